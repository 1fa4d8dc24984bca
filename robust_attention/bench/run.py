"""The benchmark: every row checked, timed beside SDPA's best backend in the same run, and stored as it comes."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import robust_attention as ra
from robust_attention import _checks
from robust_attention.bench import published
from robust_attention.bench.baseline import Fastest, fastest, sdpa
from robust_attention.bench.check import Attend, Checked, agrees, by_tokens, check, gradients, inputs
from robust_attention.bench.floor import floor
from robust_attention.bench.measure import median_ms, or_none, peak_mib, sequence_ms
from robust_attention.bench.record import Record
from robust_attention.bench.scales import DECODED, KINDS, METHODS, Scale, Shape
from robust_attention.bench.stack import StackShape, training_step
from robust_attention.ops import Method
from robust_attention.ops._call import STREAM_FROM
from robust_attention.typing import Impl

_TOKENS = 12  # that are decoded one after the other where decoding changes its cache in place


def run(name: str, scale: Scale, out: Path, say: Callable[[str], None], only: Sequence[str] = KINDS) -> dict[str, Any]:
    """Measure a scale; `bench.json` in `out` is complete after every row, and rows that it holds are not timed again.

    Args:
        only: kinds of rows to measure.
    """
    for kind in only:
        _checks.one_of("only", kind, KINDS)
    record = Record.open(name, scale, out, say)
    started = time.perf_counter()
    for kind, measure in zip(KINDS, (operators, growing, decoding, steps), strict=True):
        if kind in only:
            measure(record)
    record.content["exponents"] = exponents(record.rows)
    record.content["seconds"] = round(record.content.get("seconds", 0) + time.perf_counter() - started, 1)
    record.write()
    return record.content


def attend_with(method: Method, impl: Impl, causal: bool) -> Attend:
    """A method's verb with the tensors it owns, as a function of q, k and v."""
    if isinstance(method, ra.Fourier):
        return lambda q, k, v: method.attend(q, k, v, is_causal=causal, impl=impl, radius=q.new_tensor(1.0))
    return lambda q, k, v: method.attend(q, k, v, is_causal=causal, impl=impl)


def published_of(name: str, causal: bool, device: str) -> Attend | None:
    """The published algorithm in eager form, or None where there is none."""
    if name == "MoM":
        draw = partial(ra.MoM().draw, device=torch.device(device))
        return lambda q, k, v: published.mom(q, k, v, causal, draw(k.shape[2]))
    eager = {"KDE": published.kde, "RKDE": published.rkde}.get(name)
    return None if eager is None else lambda q, k, v: eager(q, k, v, causal)


def family(scale: Scale, shape: Shape, queries: int | None = None) -> list[Tensor]:
    """Small inputs of the family of a shape: what is timed there is checked here."""
    batch, heads, keys, width = shape
    return inputs((min(2, batch), min(2, heads), min(257, keys), width), scale.dtype, scale.device, queries=queries)


def judge(scale: Scale, name: str, impl: str, shape: Shape, causal: bool, backward: bool) -> Checked:
    """The check that a row of this method, implementation and family of shapes stands behind."""
    method, small = METHODS[name], family(scale, shape)
    reference = attend_with(method, "reference", causal)
    if impl == "published":
        eager = published_of(name, causal, scale.device)
        assert eager is not None
        return agrees(eager, reference, small)
    attend = attend_with(method, "auto" if impl == "auto" else "reference", causal)
    # What is checked must be what is timed: where "auto" streams the large case, the small one is streamed too.
    if impl == "auto" and scale.device == "cpu" and small[0].shape[2] ** 2 < STREAM_FROM <= shape[2] ** 2:
        attend = _streamed_where_it_can(method, causal, attend)
    return check(attend, reference, small, backward=backward)


def _streamed_where_it_can(method: Method, causal: bool, otherwise: Attend) -> Attend:
    streamed = attend_with(method, "streamed", causal)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        trains = torch.is_grad_enabled() and q.requires_grad
        return otherwise(q, k, v) if trains else streamed(q, k, v)

    return attend


def measured(
    record: Record, kind: str, name: str, what: str, mode: str, impl: str, judged: Callable[[], Checked],
    measure: Callable[[], dict[str, Any]], **more: Any,
) -> None:  # fmt: skip
    """Add a row, unless it is there: checked first, and timed only if that passes."""
    row: dict[str, Any] = {"kind": kind, "method": name, "what": what, "mode": mode, "impl": impl}
    if record.find(**row) is None:
        found = judged()
        row |= {"errors_over_limit": found.worst, "check": found.reason}
        record.add(**row, **(measure() if found.passed else {}), **more)


def operators(record: Record) -> None:
    """Methods at one shape each: SDPA, auto, the reference and the published algorithm, forward and with gradients."""
    scale = record.scale
    for name, shape, causal in scale.operators:
        what = "×".join(map(str, shape)) + (" causal" if causal else "")
        for backward in (False, True) if scale.backward else (False,):
            mode = "forward+backward" if backward else "forward"
            _ways(record, "operator", name, shape, causal, backward, what, mode, ("auto", "reference", "published"))


def growing(record: Record) -> None:
    """Time and memory over the length; with gradients on a GPU, where their memory shows."""
    modes = {"forward": False, "forward+backward": True} if record.scale.device == "cuda" else {"forward": False}
    for keys, (mode, backward) in itertools.product(record.scale.growing, modes.items()):
        shape = (1, record.scale.growing_heads, keys, 64)
        for name in ("KDE", "RKDE", "MoM"):
            _ways(record, "growing", name, shape, False, backward, f"N = {keys}", mode, ("auto", "published"))


def _ways(
    record: Record, kind: str, name: str, shape: Shape, causal: bool, backward: bool, what: str, mode: str,
    ways: tuple[str, ...],
) -> None:  # fmt: skip
    """SDPA once, then one method by each of some implementations."""
    scale = record.scale
    tensors = inputs(shape, scale.dtype, scale.device)
    size: dict[str, Any] = {"keys": shape[2]} if kind == "growing" else {}
    # What autograd keeps does not show in the peak of a CPU.
    shows = scale.device == "cuda" or not backward
    peak = partial(peak_mib, device=scale.device) if shows else None
    base = _baseline(
        record, kind, what, mode, causal, backward, family(scale, shape), _call(sdpa(causal), tensors, backward), peak,
        size | floor(record.content["ceilings"], scale.dtype, "SDPA", shape, causal, backward),
    )  # fmt: skip
    for impl in ways:
        attend = (
            published_of(name, causal, scale.device)
            if impl == "published"
            else attend_with(METHODS[name], "auto" if impl == "auto" else "reference", causal)
        )
        if attend is None or (impl != "auto" and shape[0] * shape[1] * shape[2] ** 2 > scale.largest_square):
            continue
        measure = partial(_entries, scale, _call(attend, tensors, backward), base, peak)
        judged = partial(judge, scale, name, impl, shape, causal, backward)
        work = floor(record.content["ceilings"], scale.dtype, name, shape, causal, backward)
        measured(record, kind, name, what, mode, impl, judged, measure, **size, **work)


def _baseline(
    record: Record, kind: str, what: str, mode: str, causal: bool, backward: bool, small: list[Tensor],
    call: Callable[[], Any], peak: Callable[..., float] | None, more: dict[str, Any],
) -> float | None:  # fmt: skip
    """Milliseconds of SDPA's best backend, measured once for each case."""
    row = {"kind": kind, "method": "SDPA", "what": what, "mode": mode}
    if record.find(**row) is None:
        timed = partial(median_ms, call, record.scale.device, record.scale.seconds)
        best: Fastest = fastest(small, causal, backward, timed, None if peak is None else partial(peak, call))
        record.add(**row, **best.entries(), **more)
    found = record.find(**row)
    assert found is not None
    return found["ms"]


def decoding(record: Record) -> None:
    """One new token after many."""
    scale = record.scale
    for heads, keys, names in scale.decode:
        what = f"1×{heads}×{keys}×64, one token"
        shape = (1, heads, keys + _TOKENS, 64)
        small = family(scale, (1, heads, min(keys, 72), 64))
        _, k, v, _ = inputs(shape, scale.dtype, scale.device)
        q, _, _, _ = inputs(shape, scale.dtype, scale.device, seed=1)
        with torch.no_grad():
            last = [x[:, :, :keys].contiguous() for x in (k, v)]
            plain = partial(sdpa(False), q[:, :, :1].contiguous(), *last)
            few = family(scale, shape, queries=1)
            base = _baseline(record, "decode", what, "decode", False, False, few, plain, None, {})
            for name in names:
                method = DECODED[name]
                judged = partial(
                    check, by_tokens(method, small[0].shape[2] - 8), attend_with(method, "reference", True), small,
                    backward=False,
                )  # fmt: skip
                measure = partial(_decoded, scale, method, q, k, v, keys, base)
                measured(record, "decode", name, what, "decode", "cache", judged, measure)


def _decoded(
    scale: Scale, method: Method, q: Tensor, k: Tensor, v: Tensor, keys: int, base: float | None
) -> dict[str, Any]:
    cache = method.cache()
    method.decode(q[:, :, keys - 2 : keys - 1], k[:, :, : keys - 1], v[:, :, : keys - 1], cache)
    length, state = cache.length, dict(cache.state)
    last = q[:, :, :1].contiguous(), k[:, :, :keys].contiguous(), v[:, :, :keys].contiguous()

    def once() -> Tensor:
        return method.decode(*last, ra.Cache(length, dict(state)))

    def tokens() -> float:
        upto = range(keys, keys + _TOKENS)
        return sequence_ms(
            [partial(method.decode, q[:, :, n - 1 : n], k[:, :, :n], v[:, :, :n], cache) for n in upto], scale.device
        )

    in_place = isinstance(method, ra.SPKDE)
    timed = tokens if in_place else partial(median_ms, once, scale.device, scale.seconds)
    held = sum(x.untyped_storage().nbytes() for x in state.values()) / 2**20
    return {**_timed(timed, base), "cache_mib": held, "timed": "successive tokens" if in_place else "one token"}


def steps(record: Record) -> None:
    """Training steps of a whole model, softmax by SDPA's best backend first."""
    scale = record.scale
    for shape, names in scale.steps:
        what, mode = f"{shape.name}, batch {shape.batch}", "training step"
        heads: Shape = (shape.batch, shape.num_heads, shape.tokens, shape.dim // shape.num_heads)
        peak = partial(peak_mib, device=scale.device) if scale.device == "cuda" else None
        plain = _Step(shape, sdpa(shape.causal), scale.device)
        base = _baseline(record, "step", what, mode, shape.causal, True, family(scale, heads), plain, peak, {})
        for name in names:
            step = _Step(shape, attend_with(METHODS[name], "auto", shape.causal), scale.device)
            measure = partial(_entries, scale, step, base, peak)
            judged = partial(judge, scale, name, "auto", heads, shape.causal, True)
            measured(record, "step", name, what, mode, "auto", judged, measure)


class _Step:
    """A training step whose model is built when it is first taken: rows that are there already need none."""

    def __init__(self, shape: StackShape, attend: Attend, device: str) -> None:
        self._build = partial(training_step, shape, attend, device)
        self._step: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self._step is None:
            self._step = self._build()
            self._step()  # the optimiser's state is made in the first
        self._step()


def _entries(
    scale: Scale, call: Callable[[], Any], base: float | None, peak: Callable[..., float] | None
) -> dict[str, Any]:
    """Time, ratio and peak memory of a call."""
    timed = _timed(partial(median_ms, call, scale.device, scale.seconds), base)
    return timed | {"peak_mib": None if peak is None else or_none(partial(peak, call))}


def _timed(time_: Callable[[], float], base: float | None) -> dict[str, Any]:
    ms = or_none(time_)
    return {"ms": ms, "ratio": ms / base if ms is not None and base else None}


def _call(attend: Attend, tensors: list[Tensor], backward: bool) -> Callable[[], Any]:
    return partial(gradients, attend, tensors, tensors[0].dtype, backward)


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Slopes of log time and log memory over log N (least squares over the upper half of the lengths)."""
    lines: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in sorted((row for row in rows if row["kind"] == "growing" and "ms" in row), key=lambda row: row["keys"]):
        # SDPA's best backend may change with the length.
        impl = "best" if row["method"] == "SDPA" else row["impl"]
        lines.setdefault((row["method"], impl, row["mode"]), []).append(row)
    found = []
    for (method, impl, mode), mine in lines.items():
        line: dict[str, Any] = {"method": method, "impl": impl, "mode": mode}
        for name in ("ms", "peak_mib"):
            points = [(row["keys"], row[name]) for row in mine if row.get(name)]
            points = points[min(len(points) // 2, len(points) - 2) :] if len(points) > 1 else []
            line[name] = _slope(points) if points else None
            line[f"{name}_from"] = points[0][0] if points else None
        found.append(line)
    return found


def _slope(points: list[tuple[int, float]]) -> float:
    x = torch.tensor([p[0] for p in points], dtype=torch.float64).log()
    y = torch.tensor([p[1] for p in points], dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())
