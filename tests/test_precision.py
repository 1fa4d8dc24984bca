"""16-bit inputs, huge logits and keys of extreme length: finite, and as exact as the formula's own rounding allows."""

import pytest
import torch
from cases import Problem, every_method, problem
from torch import Tensor

import robust_attention as ra
from robust_attention.ops.fourier import FourierKernel

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def check(out: Tensor, exact: Tensor, unit: float, name: object) -> None:
    """Error within twice the rounding `unit` (relative to the largest entry) of the same formula."""
    assert out.isfinite().all(), name
    limit = torch.finfo(out.dtype).max
    exact = exact.clamp(-limit, limit)
    error = float((out.double() - exact).abs().max() / exact.abs().max())
    assert error <= 2 * unit, (name, error, unit)


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_low_precision_inputs_round_once(method: ra.Method, dtype: torch.dtype, is_causal: bool) -> None:
    p = problem(method, T=17, S=33, D=16).map(lambda x: x.to(dtype))
    out = p.attend(is_causal=is_causal)
    assert out.dtype == dtype
    # One rounding of the output is half an ulp; float32 arithmetic inside has a few roundings of its own.
    unit = torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 30 * torch.finfo(dtype).eps
    check(out, p.map(Tensor.double).attend(is_causal=is_causal), unit, method)


def without_choice(p: Problem) -> Problem:
    """One block: which block is the median may rightly hang on the last digit."""
    if isinstance(p.method, ra.BlockMethod):
        p.owned["counts"] = p.method.draw(p.k.shape[2])[:1]
    return p


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_logits_stay_finite(method: ra.Method, dtype: torch.dtype) -> None:
    p = without_choice(problem(method, T=16, S=32, D=16))
    p.q = p.q / p.q.norm(dim=-1, keepdim=True) * 4e4
    p.k = p.k / p.k.norm(dim=-1, keepdim=True)
    p = p.map(lambda x: x.to(dtype))
    logit = p.q.double() @ p.k.double().repeat_interleave(2, 1).mT / 4
    assert logit.max() > 5e3
    assert logit.min() < -5e3
    if isinstance(method, FourierKernel):  # its logits do not grow with q·k, and a sine of 1e4 has lost its digits
        assert p.attend().isfinite().all()
        return
    # A logit of 1e4 is itself known to 1e4 roundings of float32; so is the weight that it gives.
    check(p.attend(), p.map(Tensor.double).attend(), max(torch.finfo(dtype).eps, 1e4 * 2**-23), method)


@every_method
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", [1e-30, 1e-4, 6e4])
def test_keys_of_any_length(method: ra.Method, dtype: torch.dtype, norm: float) -> None:
    if dtype == torch.float16 and norm < 1e-4:
        norm = 1e-6  # the least that float16 can hold with some digits
    p = without_choice(problem(method, T=16, S=32, D=16))
    p.k = p.k / p.k.norm(dim=-1, keepdim=True) * norm
    p = p.map(lambda x: x.to(dtype))
    exact = p.map(Tensor.double).attend()
    scale = 2**-23 * (1 if getattr(method, "keys", "own") == "unit" else max(1, norm**2))
    # Kernels that look at the keys' length lose what float32 loses of logits that large; near a zero of a sine the log
    # of Fourier's kernel is as steep as the sine is small.
    if isinstance(method, FourierKernel):
        scale = max(scale, 3e-6)
    check(p.attend(), exact, max(torch.finfo(dtype).eps, min(1.0, 30 * scale)), method)


@pytest.mark.parametrize("method", [ra.KDE(), ra.RKDE(), ra.SPKDE(), ra.MoM()], ids=repr)
def test_length_of_keys_is_ignored(method: ra.Method) -> None:
    p = problem(method)
    for scale in (1e-30, 1e-3, 6e4, 1e30):
        torch.testing.assert_close(p.attend(k=p.k * scale), p.attend(), rtol=1e-10, atol=1e-12)
    zero = p.k.clone()
    zero[:, :, 2] = 0
    assert p.attend(k=zero).isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_float32(dtype: torch.dtype) -> None:
    k = torch.randn(1, 2, 20, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    for method in (ra.RKDE(), ra.SPKDE()):
        for w in method.weights(k, k):
            assert w.dtype == torch.float32


@every_method
def test_autocast_does_not_reach_inside(method: ra.Method) -> None:
    p = problem(method).map(Tensor.float)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = p.attend()
    assert torch.equal(inside, p.attend())


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_beyond_the_range_saturates(dtype: torch.dtype) -> None:
    # A query aligned with a key that the marginal weights drop and the joint ones keep: a density ratio above e^1000.
    g = torch.Generator().manual_seed(0)
    k = torch.randn(16, generator=g) + 0.2 * torch.randn(1, 1, 40, 16, generator=g)
    k[:, :, 0] = -k[:, :, 1]
    v = torch.randn(1, 1, 40, 16, generator=g)
    q = 5e3 * k[:, :, :1]
    assert ra.SPKDE(1.4).weights(k, v).marginal[0, 0, 0] == 0
    out = ra.SPKDE(1.4).attend(q.to(dtype), k.to(dtype), v.to(dtype))
    assert out.isfinite().all()
    assert float(out.abs().max()) == torch.finfo(dtype).max
