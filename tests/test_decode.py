"""Decoding token by token equals the full causal pass, for every method; RKDE's makes no square tensor."""

import pytest
import torch
from cases import METHODS, problem
from test_streamed import Largest
from torch import Tensor

import robust_attention as ra
from robust_attention.ops import rkde

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
