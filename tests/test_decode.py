"""Decoding token by token equals the full causal pass; RKDE's makes no square tensor, SPKDE's no new programme."""

from typing import Any

import pytest
import torch
from cases import METHODS, Problem, problem
from test_streamed import Largest
from torch import Tensor

import robust_attention as ra
from robust_attention.ops import rkde
from robust_attention.robust import growing_qp, simplex_qp

DECODES = [
    m
    for m in METHODS
    if not (isinstance(m.values[0], ra.BlockMethod) and m.values[0].draw != "poisson")
    # Its table belongs to positions, and is cut by whoever owns it.
    and not isinstance(m.values[0], ra.PositionScaled)
]
every_decoding = pytest.mark.parametrize("method", [*DECODES, pytest.param(ra.FourierMoM(draw="poisson"), id="fm")])


def owned_prefix(method: ra.Method, owned: dict[str, Tensor], keys: int) -> dict[str, Tensor]:
    return {n: x[..., :keys] if n in method.key_tensors else x for n, x in owned.items()}


@every_decoding
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunks", [(1,) * 12, (5, 1, 1, 1, 1, 1, 1, 1), (1, 11), (4, 3, 5)])
def test_decoding_equals_the_full_causal_pass(method: ra.Method, padded: bool, chunks: tuple[int, ...]) -> None:
    p = problem(method, T=12, S=12)
    padding = torch.ones(2, 12, dtype=torch.bool)
    if padded:  # on the left of one sample, on the right of the other
        padding[0, :4] = False
        padding[1, 9:] = False
    mask = padding[:, None, None] if padded else None
    exact = p.attend(attn_mask=mask, is_causal=True, impl="reference")
    cache, out, stop = method.cache(), [], 0
    for new in chunks:
        start, stop = stop, stop + new
        args = (p.q[:, :, start:stop], p.k[:, :, :stop], p.v[:, :, :stop], cache)
        part = padding[:, :stop] if padded else None
        out.append(method.decode(*args, padding=part, **owned_prefix(method, p.owned, stop)))
        assert cache.length == stop
    torch.testing.assert_close(torch.cat(out, 2), exact, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("method", [ra.KDE(), ra.RKDE(), ra.MoM(draw="poisson"), ra.SPKDE()], ids=repr)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
def test_decoding_in_low_precision_equals_the_full_pass(method: ra.Method, dtype: torch.dtype, most: float) -> None:
    p = problem(method, T=40, S=40, D=16).map(lambda x: x.to(dtype))
    exact = p.attend(is_causal=True, impl="reference")
    cache = method.cache()
    out = [method.decode(p.q[:, :, :30], p.k[:, :, :30], p.v[:, :, :30], cache)]
    out += [method.decode(p.q[:, :, i : i + 1], p.k[:, :, : i + 1], p.v[:, :, : i + 1], cache) for i in range(30, 40)]
    torch.testing.assert_close(torch.cat(out, 2), exact, rtol=most, atol=most)
    assert out[0].dtype == dtype


@pytest.mark.parametrize("method", [ra.RKDE(), ra.SPKDE()], ids=repr)
def test_a_fresh_cache_is_rebuilt_and_a_reordered_one_follows_its_samples(method: ra.Method) -> None:
    p = problem(method, T=12, S=12)
    exact = p.attend(is_causal=True)[:, :, -1:]
    torch.testing.assert_close(method.decode(p.q[:, :, -1:], p.k, p.v, method.cache()), exact, rtol=1e-9, atol=1e-10)
    cache = method.cache()
    method.decode(p.q[:, :, :11], p.k[:, :, :11], p.v[:, :, :11], cache)
    index = torch.tensor([1, 1, 0])
    cache.reorder(index)
    again = method.decode(p.q[index][:, :, -1:], p.k[index], p.v[index], cache)
    torch.testing.assert_close(again, exact[index], rtol=1e-9, atol=1e-10)


def test_rkde_decodes_without_a_square_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rkde, "_TILE_ROWS", 8)
    n = 400
    p = problem(ra.RKDE(), B=1, H=1, Hkv=1, T=n, S=n, D=16, E=16).map(Tensor.float)
    cache = ra.RKDE().cache()
    ra.RKDE().decode(p.q[:, :, : n - 1], p.k[:, :, : n - 1], p.v[:, :, : n - 1], cache)
    with Largest() as seen:
        ra.RKDE().decode(p.q[:, :, -1:], p.k, p.v, cache)
    assert seen.entries <= 2 * n * 16


def by_tokens(p: Problem, first: int, padding: Tensor | None = None) -> Tensor:
    """A prompt of `first` tokens, then one token after the other."""
    cache, out = p.method.cache(), []
    stops = [first] * (first > 0) + list(range(first + 1, p.k.shape[2] + 1))
    for start, stop in zip([0, *stops], stops, strict=False):
        part = None if padding is None else padding[:, :stop]
        out.append(p.method.decode(p.q[:, :, start:stop], p.k[:, :, :stop], p.v[:, :, :stop], cache, part))
    return torch.cat(out, 2)


def long_problem(beta: float, n: int = 72, batch: int = 2) -> Problem:
    """Neighbours are alike, so that the support changes with nearly every token; n passes one block of room."""
    p = problem(ra.SPKDE(beta), B=batch, T=n, S=n)
    for x in (p.k, p.v):
        for t in range(1, n):
            x[:, :, t] = 0.9 * x[:, :, t - 1] + 0.4 * x[:, :, t]
    return p


@pytest.mark.parametrize("beta", [1.05, 1.4])
@pytest.mark.parametrize("padded", [False, True])
def test_spkde_decodes_without_a_new_programme(monkeypatch: pytest.MonkeyPatch, beta: float, padded: bool) -> None:
    p = long_problem(beta)
    padding = torch.ones(2, 72, dtype=torch.bool)
    if padded:
        padding[0, :20], padding[1, 50:60] = False, False
    exact = p.attend(is_causal=True, attn_mask=padding[:, None, None] if padded else None, impl="reference")
    solver, solved = growing_qp.solve_batch, []

    def counted(gram: Tensor, *more: Any) -> Tensor:
        solved.append(len(gram))
        return solver(gram, *more)

    monkeypatch.setattr(growing_qp, "solve_batch", counted)
    torch.testing.assert_close(by_tokens(p, 0, padding if padded else None), exact, rtol=1e-9, atol=1e-10)
    problems = 2 * 2 * 2  # samples, key heads, densities
    assert sum(solved) <= 2 * problems  # to begin with, and hardly ever again


def test_spkde_decoding_does_not_feel_its_neighbours() -> None:
    p = long_problem(1.4, batch=3)
    p.k[1], p.v[1] = p.k[1, :, :1], p.v[1, :, :1]  # all points the same
    p.k[1, :, 40:] = p.k[0, :, 40:]
    p.v[2, 0, 30] = torch.nan
    together = by_tokens(p, 9)
    for sample in range(3):
        alone = by_tokens(Problem(p.method, *(x[sample : sample + 1] for x in (p.q, p.k, p.v)), {}), 9)
        torch.testing.assert_close(together[sample : sample + 1], alone, rtol=0, atol=0, equal_nan=True)
    assert together[:2].isfinite().all()
    assert together[2, :2, 30:].isnan().all()
    assert together[2, 2:].isfinite().all()


@pytest.mark.parametrize("kind", ["twin", "zero", "nan", "hidden"])
def test_a_degenerate_key_leaves_spkde_decoding_right(kind: str) -> None:
    p = long_problem(1.4, n=30)
    padding = torch.ones(2, 30, dtype=torch.bool)
    clean = by_tokens(p, 0)
    if kind == "twin":
        p.k[:, :, 20], p.v[:, :, 20] = p.k[:, :, 3], p.v[:, :, 3]
    elif kind == "zero":
        p.k[:, :, 20] = 0
    else:
        p.k[0, 0, 20] = torch.nan
        padding[:, 20] = kind == "nan"
    out = by_tokens(p, 0, padding)
    assert torch.equal(out[:, :, :20], clean[:, :, :20])
    exact = p.attend(is_causal=True, attn_mask=padding[:, None, None], impl="reference")
    torch.testing.assert_close(out, exact, rtol=1e-8, atol=1e-9, equal_nan=True)


def test_caches_that_share_their_tensors_do_not_disturb_each_other() -> None:
    p = problem(ra.SPKDE(), T=12, S=12)
    exact = p.attend(is_causal=True)[:, :, -1:]
    cache = p.method.cache()
    p.method.decode(p.q[:, :, :11], p.k[:, :, :11], p.v[:, :, :11], cache)
    other = ra.Cache(cache.length, dict(cache.state))
    moved = p.k.clone()
    moved[:, :, -1] = -p.k[:, :, 0]
    p.method.decode(p.q[:, :, -1:], moved, p.v, other)
    torch.testing.assert_close(p.method.decode(p.q[:, :, -1:], p.k, p.v, cache), exact, rtol=1e-9, atol=1e-10)


def test_a_gap_that_decoding_misses_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(simplex_qp.GAP_TOLERANCE, torch.float64, -1.0)
    p = problem(ra.SPKDE(2.0), B=1, T=1, S=40)
    with pytest.warns(UserWarning, match=r"SPKDE: 4 of 4 quadratic programmes end with a Frank–Wolfe gap"):
        p.method.decode(p.q, p.k, p.v, p.method.cache())


@pytest.mark.parametrize(("B", "D", "E"), [(0, 8, 6), (2, 0, 6), (2, 8, 0)])
def test_spkde_decodes_nothing(B: int, D: int, E: int) -> None:
    p = problem(ra.SPKDE(), T=5, S=5)
    q, k, v = p.q[:B, ..., :D], p.k[:B, ..., :D], p.v[:B, ..., :E]
    cache = p.method.cache()
    p.method.decode(q[:, :, :3], k[:, :, :3], v[:, :, :3], cache)
    out = p.method.decode(q[:, :, 3:4], k[:, :, :4], v[:, :, :4], cache)
    assert out.shape == (B, 4, 1, E)
    assert not out.any()


def test_decode_has_no_gradient_and_leaves_global_random_state_alone() -> None:
    for method in (ra.KDE(), ra.RKDE(), ra.MoM(draw="poisson")):
        p = problem(method, T=3, S=3)
        before = torch.get_rng_state()
        assert not method.decode(p.q.requires_grad_(), p.k, p.v, method.cache()).requires_grad
        assert torch.equal(torch.get_rng_state(), before)


def test_decode_fails_clearly() -> None:
    p = problem(ra.RKDE(), T=5, S=5)
    cache = ra.RKDE().cache()
    ra.RKDE().decode(p.q[:, :, :3], p.k[:, :, :3], p.v[:, :, :3], cache)
    with pytest.raises(ValueError, match=r"must know the 4 keys before the 1 new ones, got a cache of 3; pass a fresh"):
        ra.RKDE().decode(p.q[:, :, 4:], p.k, p.v, cache)
    with pytest.raises(ValueError, match=r"got 2 keys for 5 queries; append"):
        ra.RKDE().decode(p.q, p.k[:, :, :2], p.v[:, :, :2], ra.RKDE().cache())
    with pytest.raises(ValueError, match=r"cache must be of the batch of k, 1, got 2 in its marginal; call"):
        ra.RKDE().decode(p.q[:1, :, 3:4], p.k[:1, :, :4], p.v[:1, :, :4], cache)
    with pytest.raises(ValueError, match=r"padding must be boolean \[B, S\] = \[2, 5\]"):
        ra.RKDE().decode(p.q, p.k, p.v, ra.RKDE().cache(), padding=torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r'decoding needs draw="poisson", .* got draw=\'bootstrap\'; use'):
        ra.MoM().decode(p.q, p.k, p.v, ra.MoM().cache())
