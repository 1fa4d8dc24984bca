"""Refusals: each names the argument, says what must hold and what came, and gives a remedy."""

import re
from typing import Any

import numpy as np
import pytest
import torch
from cases import problem

import robust_attention as ra
from robust_attention.density import RobustKernelDensity

Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 7, 8), torch.zeros(2, 2, 7, 6)

# What is wrong, the words that must appear (argument, rule, what came, remedy).
CALLS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"impl": "fast"}, ("impl must be one of", "'auto'", "'reference'", "got 'fast'", "choose")),
    ({"q": Q[0]}, ("q must have 4 dimensions [B, H, T, D]", "got [4, 5, 8]", "split the heads")),
    ({"k": K[0]}, ("k must have 4 dimensions [B, Hkv, S, width]", "got [2, 7, 8]", "split the heads")),
    ({"v": V[0]}, ("v must have 4 dimensions", "got [2, 7, 6]", "split the heads")),
    ({"q": Q.long()}, ("q and k must share dtype", "torch.int64", "pass k.to(q)")),
    ({"k": K.long(), "v": V.long()}, ("k must be float16, bfloat16, float32 or float64", "int64", "pass k.float()")),
    ({"v": V.half()}, ("k and v must share dtype", "float16", "pass v.to(k)")),
    ({"q": Q.double()}, ("q and k must share dtype", "float64", "pass k.to(q)")),
    ({"k": torch.zeros(2, 2, 7, 9)}, ("q and k must agree in width", "[2, 2, 7, 9]", "project")),
    ({"q": torch.zeros(3, 4, 5, 8)}, ("q and k must agree in the batch", "[3, 4, 5, 8]", "for each sample")),
    ({"q": Q.tolist()}, ("q must be a torch.Tensor", "got list", "torch.as_tensor(q)")),
    ({"k": K.numpy()}, ("k must be a torch.Tensor", "got ndarray", "torch.as_tensor(k)")),
    ({"v": None}, ("v must be a torch.Tensor", "got NoneType", "torch.as_tensor(v)")),
    ({"attn_mask": [[True]]}, ("attn_mask must be a torch.Tensor", "got list", "torch.as_tensor(attn_mask)")),
    ({"is_causal": "yes"}, ("is_causal must be True or False", "got str", "attn_mask")),
    ({"is_causal": torch.ones(5, 7).bool()}, ("is_causal must be True or False", "got Tensor", "attn_mask")),
    ({"v": torch.zeros(2, 2, 6, 6)}, ("k and v must agree in [B, Hkv, S]", "[2, 2, 6, 6]", "one value for each key")),
    ({"q": torch.zeros(2, 3, 5, 8)}, ("heads of q must be a multiple", "got 3 and 2", "repeat or drop")),
    ({"attn_mask": torch.zeros(5, 7)}, ("attn_mask must be boolean", "got torch.float32", "attn_mask > -1")),
    (
        {"attn_mask": torch.ones(2, 7).bool()},
        ("attn_mask must broadcast to [B, H, T, S] = [2, 4, 5, 7]", "got [2, 7]", "attn_mask[:, None, None, :]"),
    ),
    ({"attn_mask": torch.ones(2, 4, 6, 7).bool()}, ("attn_mask must broadcast", "got [2, 4, 6, 7]", "dimensions of 1")),
    ({"attn_mask": torch.ones(1, 2, 4, 5, 7).bool()}, ("attn_mask must have at most 4 dimensions", "drop the others")),
]


@pytest.mark.parametrize(("change", "words"), CALLS, ids=lambda x: str(x)[:40] if isinstance(x, dict) else "")
@pytest.mark.parametrize("method", [ra.Softmax(), ra.RKDE()], ids=lambda m: type(m).__name__)
def test_attend_fails_clearly(method: ra.Method, change: dict[str, Any], words: tuple[str, ...]) -> None:
    call = {"q": Q, "k": K, "v": V, **change}
    with pytest.raises(ValueError) as refusal:
        method.attend(call.pop("q"), call.pop("k"), call.pop("v"), **call)
    for word in words:
        assert word in str(refusal.value), str(refusal.value)


OWNED: list[tuple[ra.Method, dict[str, Any], tuple[str, ...]]] = [
    (ra.MoM(), {"counts": torch.ones(3, 6).long()}, ("counts must be [blocks, S]", "7", "[3, 6]", "draw(7)")),
    (ra.MoM(), {"counts": torch.ones(3, 7)}, ("counts must be integers", "float32", "counts.long()")),
    (ra.MoM(), {"counts": -torch.ones(3, 7).long()}, ("counts must not be negative", "got -1", "how often")),
    (ra.MoM(), {"counts": [[1] * 7]}, ("counts must be a torch.Tensor", "got list", "torch.as_tensor(counts)")),
    (ra.Fourier(), {"radius": 2.0}, ("radius must be a torch.Tensor", "got float", "torch.as_tensor(radius)")),
    (ra.PositionScaled(), {"table": 1.0}, ("table must be a torch.Tensor", "got float", "torch.as_tensor(table)")),
    (ra.MGK(), {"shift": 0.0}, ("shift must be a torch.Tensor", "got float", "torch.as_tensor(shift)")),
    (ra.Performer(), {"directions": []}, ("directions must be a torch.Tensor", "got list", "as_tensor(directions)")),
    (ra.Fourier(), {"radius": None}, ("radius must be a tensor", "got None", "torch.tensor(1.0)")),
    (ra.Fourier(), {"radius": torch.ones(3)}, ("radius must be a scalar or [D] = [8]", "[3]", "torch.tensor(1.0)")),
    (ra.PositionScaled(), {"table": None}, ("table must be [H, T, S] = [4, 5, 7]", "got None", "torch.zeros")),
    (
        ra.PositionScaled(),
        {"table": torch.ones(5, 7)},
        ("table must be [H, T, S] = [4, 5, 7]", "[5, 7]", "torch.zeros"),
    ),
    (ra.MGK(), {"shift": None}, ("shift must broadcast to [B, Hkv, M, S, D] = [2, 2, 2, 7, 8]", "None", "torch.zeros")),
    (ra.MGK(), {"log_prior": torch.zeros(3)}, ("log_prior must be [Hkv, M] = [2, 2]", "got [3]", "leave it out")),
    (ra.Performer(), {"directions": None}, ("directions must be [M, D]", "got None", "orthogonal_directions(128, 8")),
]


@pytest.mark.parametrize(("method", "change", "words"), OWNED, ids=lambda x: str(x)[:30])
def test_owned_tensors_fail_clearly(method: ra.Method, change: dict[str, Any], words: tuple[str, ...]) -> None:
    p = problem(method, T=5, S=7)
    with pytest.raises(ValueError) as refusal:
        p.attend(**change)
    for word in words:
        assert word in str(refusal.value), str(refusal.value)


SETTINGS: list[tuple[Any, dict[str, Any], str]] = [
    (ra.KDE, {"bandwidth": 0.0}, r"bandwidth must be a finite number above 0 or None, got 0.0; pass"),
    (ra.KDE, {"bandwidth": float("nan")}, r"bandwidth must be a finite number above 0 or None, got nan; pass"),
    (ra.RKDE, {"weight_bandwidth": -1.0}, r"weight_bandwidth must be .* got -1.0; pass"),
    (ra.RKDE, {"value_bandwidth": "wide"}, r"value_bandwidth must be .* got 'wide'; pass"),
    (ra.RKDE, {"sweeps": -1}, r"sweeps must be a whole number of at least 0, got -1; pass"),
    (ra.RKDE, {"sweeps": 1.5}, r"sweeps must be a whole number of at least 0, got 1.5; pass"),
    (ra.RKDE, {"loss": "huber"}, r"loss must be Huber, Hampel, Welsch or Tukey, got 'huber'; pass"),
    (ra.RKDE, {"weight_grad": "half"}, r"weight_grad must be one of 'full', 'stop', got 'half'; choose"),
    (ra.Huber, {"a": 0}, r"a must be a finite number above 0, got 0; pass"),
    (ra.SPKDE, {"beta": 0.9}, r"beta must be a finite number of at least 1, got 0.9; the paper takes beta=1.4"),
    (ra.MoM, {"blocks": 0}, r"blocks must be a whole number of at least 1, got 0; pass"),
    (ra.MoM, {"fraction": 0.0}, r"fraction must be a finite number above 0, got 0.0; pass"),
    (
        ra.MoM,
        {"fraction": 1.5, "draw": "subsample"},
        r"fraction must be at most 1 for draw='subsample' .* got 1.5; use",
    ),
    (
        ra.MoM,
        {"draw": "jackknife"},
        r"draw must be one of 'bootstrap', 'subsample', 'partition', 'poisson', got 'jackknife'; choose",
    ),
    (ra.MoM, {"seed": -1}, r"seed must be a whole number from 0 to .*, got -1; pass"),
    (ra.Fourier, {"power": 3}, r"power must be even, .* got 3; pass power=4"),
    (ra.MGK, {"components": 0}, r"components must be a whole number of at least 1, got 0; pass"),
    (ra.Performer, {"features": 0}, r"features must be a whole number of at least 1, got 0; pass"),
]


@pytest.mark.parametrize(("make", "settings", "message"), SETTINGS, ids=lambda x: str(x)[:40])
def test_settings_fail_clearly(make: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**settings)


def test_draw_fails_clearly() -> None:
    with pytest.raises(ValueError, match=r"num_keys must be a whole number of at least 0, got -3; pass"):
        ra.MoM().draw(-3)


def test_weights_fail_clearly() -> None:
    with pytest.raises(ValueError, match=re.escape("attn_mask must have 1 head or a multiple of the 2 heads of k")):
        ra.RKDE().weights(K, V, attn_mask=torch.ones(2, 3, 5, 7).bool())


def test_density_fails_clearly() -> None:
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    cases: list[tuple[Any, str]] = [
        (lambda: RobustKernelDensity(ra.Softmax()).fit(x), r"method must be KDE, RKDE, SPKDE or MoM, got Softmax"),  # type: ignore[arg-type]
        (lambda: RobustKernelDensity().fit(x[0]), r"X must be \[N, D\], got \[2\]; pass X.reshape"),
        (lambda: RobustKernelDensity().fit(x[:0]), r"X must hold at least one point .* got \[0, 2\]; pass more"),
        (lambda: RobustKernelDensity().fit(x / 0), r"X must be finite, got NaN or Inf; drop those rows"),
        (lambda: RobustKernelDensity(bandwidth="auto").fit(x), r"bandwidth must be one of 'scott', 'silverman'"),
        (lambda: RobustKernelDensity().fit(x[:1].expand(5, 2)), r"bandwidth='scott' needs points that differ"),
        (lambda: RobustKernelDensity().score_samples(x), r"fit must be called before score_samples"),
        (lambda: RobustKernelDensity().fit(x).score_samples(x[:, :1]), r"X must have 2 columns as in fit, got 1"),
        (lambda: RobustKernelDensity().set_params(sigma=1), r"the parameters are method and bandwidth, got 'sigma'"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize("width", [1e-200, 1e200])
def test_a_bandwidth_whose_square_is_no_number_fails_clearly(width: float) -> None:
    for make in (ra.Softmax, ra.KDE, ra.RKDE):
        with pytest.raises(ValueError, match=r"bandwidth must lie between 1e-15 and 1e15, got .*; scale the data"):
            make(bandwidth=width)
    with pytest.raises(ValueError, match=r"value_bandwidth must lie between"):
        ra.RKDE(value_bandwidth=width)


def test_numbers_of_numpy_are_numbers() -> None:
    assert ra.Huber(np.float32(0.5)).a == 0.5
    assert ra.MoM(blocks=np.int64(3)).draw(10).shape == (3, 10)


def test_weights_of_nothing_are_empty_or_uniform() -> None:
    k, v = K[:, :, :0], V[:, :, :0]
    for method in (ra.RKDE(), ra.SPKDE()):
        assert method.weights(k, v).joint.shape == (2, 2, 0)
        assert method.weights(k[:0], v[:0], is_causal=True).joint.shape[0] == 0
        assert method.weights(K[..., :0], V).marginal.sum(-1).allclose(torch.ones(2, 2))
        with pytest.raises(ValueError, match=r"num_queries must be a whole number of at least 1, got 0"):
            method.weights(K, V, num_queries=0)
