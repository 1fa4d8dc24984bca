"""impl="streamed": the same numbers as the reference, the same laws, and no tensor of the size T·S."""

from typing import Any

import pytest
import torch
from cases import METHODS, Problem, masks, problem
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import robust_attention as ra
from robust_attention.ops import _call, rkde

STREAMED = (ra.Softmax, ra.KDE, ra.RKDE, ra.SPKDE, ra.MoM, ra.Fourier, ra.FourierMoM)
TRAINS = (ra.Softmax, ra.KDE)
every_streamed = pytest.mark.parametrize("method", [m for m in METHODS if isinstance(m.values[0], STREAMED)])


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks and tiles even of the smallest problem, none of which divides its size."""
    monkeypatch.setattr(_call, "_CHUNK_ENTRIES", 1)
    monkeypatch.setattr(rkde, "_TILE_ROWS", 7)


def refused(p: Problem, arguments: dict[str, Any]) -> str | None:
    """Why this call cannot be streamed, or None."""
    try:
        p.attend(impl="streamed", **arguments)
    except ValueError as error:
        return str(error)
    return None


SIZES = [(1, 1), (2, 2), (17, 17), (40, 33), (33, 40), (1, 40), (40, 1)]


@every_streamed
@pytest.mark.parametrize(("T", "S"), SIZES)
def test_streamed_equals_the_reference(method: ra.Method, T: int, S: int) -> None:
    p = problem(method, T=T, S=S)
    ran = 0
    for arguments in masks(2, T, S).values():
        if refused(p, arguments) is None:
            ran += 1
            exact, mine = p.attend(impl="reference", **arguments), p.attend(impl="streamed", **arguments)
            torch.testing.assert_close(mine, exact, rtol=1e-10, atol=1e-11)
    least = 2 if isinstance(method, ra.SPKDE) or (isinstance(method, ra.RKDE) and method.sweeps != 1) else 4
    assert ran >= least


@every_streamed
def test_streamed_future_and_hidden_keys_change_no_bit(method: ra.Method) -> None:
    p = problem(method, T=40, S=44)
    hidden = torch.arange(44) >= 30
    for arguments, seen, queries in (({"is_causal": True}, 30, 26), ({"attn_mask": ~hidden}, 30, 40)):
        if refused(p, arguments):
            continue
        out = p.attend(impl="streamed", **arguments)[:, :, :queries]
        for fill in (100.0, 3e38, float("nan"), float("inf")):
            k, v = p.k.clone(), p.v.clone()
            k[:, :, seen:], v[:, :, seen:] = fill, fill
            again = p.attend(impl="streamed", k=k, v=v, **arguments)[:, :, :queries]
            assert torch.equal(again, out), (arguments.keys(), fill)


@every_streamed
@pytest.mark.parametrize("kind", ["full", "padding", "causal"])
def test_streamed_sample_never_depends_on_its_batch(method: ra.Method, kind: str) -> None:
    p = problem(method, T=40, S=40)
    arguments = masks(2, 40, 40)[kind]
    if refused(p, arguments):
        return
    others = {"q": p.q.clone(), "k": p.k.clone(), "v": p.v.clone()}
    for x in others.values():
        x[1] = 50 * x[1] + 1
    out = p.attend(impl="streamed", **arguments)[0]
    assert torch.equal(p.attend(impl="streamed", **others, **arguments)[0], out)


@every_streamed
def test_streamed_query_without_keys_gets_zero_and_nan_stays_where_it_is_seen(method: ra.Method) -> None:
    p = problem(method, T=20, S=20)
    mask = torch.ones(20, 20, dtype=torch.bool).tril(-1)
    if refused(p, {"attn_mask": mask}) is None:
        k = p.k.clone()
        k[:, :, 10] = float("nan")
        out = p.attend(impl="streamed", k=k, attn_mask=mask)
        assert not out[:, :, 0].any()
        assert out[:, :, :11].isfinite().all()
        assert out[:, :, 11:].isnan().all()
    k = p.k.clone()
    k[0, :, 3] = float("inf")
    padding = torch.arange(20) != 3
    assert p.attend(impl="streamed", k=k, attn_mask=padding).isfinite().all()
    assert p.attend(impl="streamed", k=k)[0].isnan().all()


@every_streamed
def test_streamed_gradients_flow_or_fail_clearly(method: ra.Method) -> None:
    p = problem(method, T=20, S=20)
    q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    if not isinstance(method, TRAINS):
        with pytest.raises(ValueError, match=r"but it has no gradient .* torch\.no_grad"):
            p.attend(q=q, k=k, v=v, impl="streamed")
        with torch.no_grad():
            p.attend(q=q, k=k, v=v, impl="streamed")
        return
    for arguments in masks(2, 20, 20).values():
        both = []
        for impl in ("reference", "streamed"):
            out = p.attend(q=q, k=k, v=v, impl=impl, **arguments)
            both.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
        for mine, exact in zip(both[1], both[0], strict=True):
            torch.testing.assert_close(mine, exact, rtol=1e-9, atol=1e-10)


class Largest(TorchDispatchMode):
    """The largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            # What an expanded tensor occupies, not what it shows.
            if isinstance(x, Tensor) and x.numel():
                self.entries = max(self.entries, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.mark.parametrize("method", [ra.Softmax(), ra.KDE(), ra.RKDE(), ra.RKDE(ra.Tukey(0.8)), ra.MoM()], ids=repr)
@pytest.mark.parametrize("is_causal", [False, True])
def test_auto_makes_no_square_tensor_from_512_on(
    method: ra.Method, is_causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(_call, "_CHUNK_ENTRIES", 2**15)
    monkeypatch.setattr(rkde, "_TILE_ROWS", 16)
    n = 600
    p = problem(method, B=1, H=1, Hkv=1, T=n, S=n, D=16, E=16).map(Tensor.float)
    with Largest() as seen:
        out = p.attend(is_causal=is_causal)
    assert seen.entries < n * n / 4
    torch.testing.assert_close(out, p.attend(is_causal=is_causal, impl="reference"), rtol=1e-4, atol=1e-4)
    with Largest() as seen:
        p.attend(is_causal=is_causal, impl="reference")
    assert seen.entries >= n * n


def test_choice_is_said_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_call, "_said", set())
    monkeypatch.setattr(_call, "STREAM_FROM", 1)
    p = problem(ra.KDE())
    with caplog.at_level("INFO", logger="robust_attention"):
        for _ in range(3):
            p.attend()
    assert [record.getMessage() for record in caplog.records] == ["KDE runs as impl='streamed' on cpu"]


def test_an_implementation_that_cannot_run_fails_clearly() -> None:
    with pytest.raises(ValueError, match=r'impl="streamed" .* but this method is not streamed; pass impl="auto"'):
        problem(ra.PositionScaled()).attend(impl="streamed")
    with pytest.raises(ValueError, match=r'impl="triton" .* but this method has no kernel; pass impl="auto"'):
        problem(ra.Softmax()).attend(impl="triton")
    with pytest.raises(ValueError, match=r'impl="triton" .* but (Triton is not installed|Triton kernels need a CUDA)'):
        problem(ra.KDE()).map(Tensor.float).attend(impl="triton")


@pytest.mark.parametrize("method", [ra.Softmax(), ra.KDE(), ra.KDE(keys="own"), ra.RKDE(), ra.MoM()], ids=repr)
def test_streamed_huge_hidden_keys_reach_no_other_query(method: ra.Method) -> None:
    p = problem(method, T=30, S=40)
    k = p.k.clone()
    k[:, :, -1] = 1e308
    mask = torch.ones(30, 40, dtype=torch.bool).tril(10)
    for arguments in ({"is_causal": True}, {"attn_mask": mask}):
        if refused(p, arguments) is None:
            out = p.attend(impl="streamed", k=k, **arguments)[:, :, :-1]
            assert out.isfinite().all()
            assert torch.equal(out, p.attend(impl="streamed", **arguments)[:, :, :-1])
