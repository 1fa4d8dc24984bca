"""The benchmark: every row checked, timed beside SDPA in the same run, and stored as soon as it is there."""

import datetime
import os
import platform
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import robust_attention as ra
from robust_attention._files import prepare_folder, write_json
from robust_attention.bench import published
from robust_attention.bench.check import Attend, check, gradients, inputs
from robust_attention.bench.measure import ceilings, median_ms, peak_mib
from robust_attention.bench.stack import StackShape, training_step
from robust_attention.ops import Method
from robust_attention.typing import Impl

Shape = tuple[int, int, int, int]
Say = Callable[[str], None]

METHODS: dict[str, Method] = {
    "KDE": ra.KDE(),
    "RKDE": ra.RKDE(),
    "MoM": ra.MoM(),
    "SPKDE": ra.SPKDE(),
    "Fourier": ra.Fourier(),
}
# (products of T·S·D, exponentials a score) that a forward pass cannot do without, the Grams' symmetry used.
WORK = {
    ("SDPA", False): (2.0, 1.0),
    ("SDPA", True): (2.0, 1.0),
    ("KDE", False): (2.0, 1.0),
    ("KDE", True): (2.0, 1.0),
    ("RKDE", False): (3.0, 2.0),
    ("RKDE", True): (4.0, 3.0),
    ("MoM", False): (3.0, 2.0),
    ("MoM", True): (3.0, 2.0),
}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What to measure."""

    device: str
    dtype: torch.dtype
    operators: tuple[tuple[str, Shape, bool], ...]
    """(method, [B, H, N, D], causal)."""
    growing: tuple[int, ...]
    """Lengths for the exponents of time and memory."""
    growing_heads: int
    decode: tuple[int, int]
    """(heads, keys)."""
    steps: tuple[tuple[StackShape, tuple[str, ...]], ...]
    """Training steps, and the methods to take them with."""
    backward: bool = True
    seconds: float = 0.3
    """Spent on each time."""
    largest_square: int = 2**28
    """Scores up to which implementations that write the T × S matrix are run."""


def _vit(name: str, dim: int, heads: int, batch: int, depth: int = 12) -> StackShape:
    return StackShape(name=name, batch=batch, tokens=197, dim=dim, num_heads=heads, depth=depth, hidden=4 * dim)


def _text(batch: int, depth: int) -> StackShape:
    return StackShape(
        name=f"language model {depth}×128",
        batch=batch,
        tokens=256,
        dim=128,
        num_heads=8,
        depth=depth,
        hidden=2048,
        causal=True,
    )


ALL = ("KDE", "MoM", "RKDE", "SPKDE")
BIG, VIT = (4, 16, 4096, 64), (256, 3, 197, 64)
SCALES = {
    "smoke": Scale(
        device="cpu",
        dtype=torch.float32,
        operators=(("KDE", (1, 2, 64, 16), False), ("RKDE", (1, 2, 64, 16), True), ("MoM", (1, 2, 64, 16), False)),
        growing=(64, 128),
        growing_heads=1,
        decode=(2, 64),
        steps=((_vit("tiny", 16, 2, 1, depth=1), ("RKDE",)),),
        seconds=0.0,
    ),
    "laptop": Scale(
        device="cpu",
        dtype=torch.float32,
        operators=tuple((name, (1, 8, 1024, 64), causal) for name in ("KDE", "RKDE", "MoM") for causal in (False, True))
        + tuple((name, (4, 3, 197, 64), False) for name in METHODS),
        growing=(256, 512, 1024, 2048, 4096),
        growing_heads=2,
        decode=(8, 4096),
        steps=((_vit("ViT tiny", 192, 3, 4), ALL), (_text(2, 4), ("MoM", "RKDE"))),
        seconds=0.5,
        largest_square=2**24,
    ),
    "gpu": Scale(
        device="cuda",
        dtype=torch.bfloat16,
        operators=tuple((name, BIG, causal) for name in ("KDE", "RKDE", "MoM") for causal in (False, True))
        + tuple((name, VIT, False) for name in METHODS)
        + tuple((name, (96, 8, 256, 16), True) for name in ("KDE", "RKDE", "MoM")),
        growing=(1024, 2048, 4096, 8192, 16384),
        growing_heads=16,
        decode=(16, 8192),
        steps=(
            (_vit("ViT tiny", 192, 3, 256), ALL),
            (_text(96, 16), ("MoM", "RKDE")),
            (_vit("ViT small", 384, 6, 128), ALL),
            (_vit("ViT base", 768, 12, 64), ALL),
        ),
        largest_square=2**31,
    ),
}


@dataclass
class Bench:
    """One run: its rows, and where they go."""

    scale: Scale
    out: Path
    say: Say
    record: dict[str, Any]
    done: set[tuple[Any, ...]] = field(default_factory=set)

    def add(self, **row: Any) -> None:
        self.record["rows"].append(row)
        write_json(self.out / "bench.json", self.record)
        ratio = f"{row['ratio']:8.2f} × SDPA" if row.get("ratio") is not None else ""
        wrong = "" if row.get("check") in (None, "passed") else f"  NOT TIMED: {row['check']}"
        time_ = f"{row['ms']:10.3f} ms" if row.get("ms") is not None else " " * 13
        mode = "" if row["mode"] == row["kind"] else row["mode"]
        self.say(f"{row['kind']:9} {row['method']:8} {row['what']:31} {mode:17} {row['impl']:10}{time_}{ratio}{wrong}")


def run(name: str, scale: Scale, out: Path, say: Say) -> dict[str, Any]:
    """Measure everything of a scale; `bench.json` in `out` is complete after every row."""
    prepare_folder(out)
    started = time.perf_counter()
    record = {"study": "bench", "scale": name, **_where(scale), "rows": []}
    record["ceilings"] = ceilings(scale.device, scale.dtype)
    bench = Bench(scale, out, say, record)
    for method, shape, causal in scale.operators:
        operator(bench, method, shape, causal)
    growing(bench)
    decoding(bench)
    for shape_, methods in scale.steps:
        steps(bench, shape_, methods)
    record["exponents"] = exponents(record["rows"])
    record["seconds"] = round(time.perf_counter() - started, 1)
    write_json(out / "bench.json", record)
    return record


def attend_with(method: Method, impl: Impl, causal: bool) -> Attend:
    """A method's verb with the tensors it owns, as a function of q, k and v."""
    if isinstance(method, ra.Fourier):
        return lambda q, k, v: method.attend(q, k, v, is_causal=causal, impl=impl, radius=q.new_tensor(1.0))
    return lambda q, k, v: method.attend(q, k, v, is_causal=causal, impl=impl)


def sdpa(causal: bool) -> Attend:
    """The baseline; on a GPU the backend is set around the call."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def published_of(name: str, causal: bool, keys: int, device: str) -> Attend | None:
    """The published algorithm in eager form, or None where it does not run on the device of the tensors at all."""
    if name == "KDE":
        return lambda q, k, v: published.kde(q, k, v, causal)
    if name == "RKDE":
        return lambda q, k, v: published.rkde(q, k, v, causal)
    if name == "MoM":
        counts = ra.MoM().draw(keys, device=torch.device(device))
        return lambda q, k, v: published.mom(q, k, v, causal, counts)
    return None


def operator(bench: Bench, name: str, shape: Shape, causal: bool) -> None:
    """One method at one shape: SDPA, auto, the reference and the published algorithm, forward and with gradients."""
    scale, device = bench.scale, bench.scale.device
    what = "×".join(map(str, shape)) + (" causal" if causal else "")
    tensors = inputs(shape, scale.dtype, device)
    square = shape[0] * shape[1] * shape[2] ** 2
    method = METHODS[name]
    reference = attend_with(method, "reference", causal)
    auto = attend_with(method, "auto", causal)
    small = inputs((1, min(2, shape[1]), min(257, shape[2]), shape[3]), scale.dtype, device)
    for backward in (False, True) if scale.backward else (False,):
        mode = "forward+backward" if backward else "forward"
        base = baseline(bench, tensors, causal, backward, what, mode)
        ways: list[tuple[str, Attend | None]] = [("auto", auto)]
        if square <= scale.largest_square:
            ways += [("reference", reference), ("published", published_of(name, causal, shape[2], device))]
        for impl, attend in ways:
            if attend is None:
                continue
            row: dict[str, Any] = {"kind": "operator", "method": name, "what": what, "mode": mode, "impl": impl}
            if impl == "auto":
                judged = check(_forced(attend, small, tensors, method, causal), reference, small, backward=backward)
                row["errors_over_limit"] = judged.worst
                row["check"] = "passed" if judged.passed else f"errors over their limits: {judged.worst}"
                if not judged.passed:
                    bench.add(**row)
                    continue
            call = _call(attend, tensors, backward)
            row["ms"] = _or_none(lambda call=call: median_ms(call, device, scale.seconds))  # type: ignore[misc]
            row["ratio"] = None if row["ms"] is None else row["ms"] / base
            if device == "cuda" or not backward:
                row["peak_mib"] = _or_none(lambda call=call: peak_mib(call, device))  # type: ignore[misc]
            row |= floor(bench, name, shape, causal, backward)
            bench.add(**row)


def _forced(attend: Attend, small: list[Tensor], large: list[Tensor], method: Method, causal: bool) -> Attend:
    """What is checked must be what is timed: where "auto" streams the large case, the small one is streamed too."""
    streams = not large[0].is_cuda and large[0].shape[2] ** 2 >= 2**18 and small[0].shape[2] ** 2 < 2**18
    streamed = attend_with(method, "streamed", causal)

    def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        needs_grad = torch.is_grad_enabled() and q.requires_grad
        return streamed(q, k, v) if streams and not needs_grad and q.dtype != torch.float64 else attend(q, k, v)

    return chosen


def baseline(bench: Bench, tensors: list[Tensor], causal: bool, backward: bool, what: str, mode: str) -> float:
    """Milliseconds of SDPA's best backend, stored once."""
    key = (what, mode)
    for row in bench.record["rows"]:
        if row["method"] == "SDPA" and (row["what"], row["mode"]) == key:
            return float(row["ms"])
    device, seconds = bench.scale.device, bench.scale.seconds
    call = _call(sdpa(causal), tensors, backward)
    times: dict[str, float] = {}
    peaks: dict[str, float | None] = {}
    refused: dict[str, str] = {}
    if device == "cuda":
        from torch.nn.attention import SDPBackend, sdpa_kernel

        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
            with sdpa_kernel([backend]):
                try:
                    call()
                except RuntimeError as error:  # a backend may not take this shape or dtype: stored, not hidden
                    refused[backend.name] = str(error).splitlines()[0][:200]
                    continue
                found = _or_none(lambda: median_ms(call, device, seconds))
                if found is not None:
                    times[backend.name], peaks[backend.name] = found, peak_mib(call, device)
    else:
        times["CPU"] = median_ms(call, device, seconds)
        peaks["CPU"] = peak_mib(call, device) if not backward else None
    best = min(times, key=times.__getitem__)
    shape = tuple(tensors[0].shape)
    bench.add(
        kind="operator",
        method="SDPA",
        what=what,
        mode=mode,
        impl=best,
        ms=times[best],
        ratio=1.0,
        peak_mib=peaks[best],
        all_backends_ms=times,
        backends_that_refused=refused,
        **floor(bench, "SDPA", shape, causal, backward),  # type: ignore[arg-type]
    )
    return times[best]


def floor(bench: Bench, name: str, shape: Shape, causal: bool, backward: bool) -> dict[str, float]:
    """FLOPs and bytes that cannot be saved, and the time that the machine's measured ceilings make of them."""
    if (name, causal) not in WORK:
        return {}
    batch, heads, keys, width = shape
    products, exponentials = WORK[name, causal]
    scores = batch * heads * keys * keys / (2 if causal else 1)
    # Backward does 2.5 times the products of forward, and its exponentials once more.
    flops = 2 * scores * width * products * (3.5 if backward else 1)
    exps = scores * exponentials * (2 if backward else 1)
    tensor = batch * heads * keys * width * torch.finfo(bench.scale.dtype).bits / 8
    moved = tensor * (12 if backward else 4)
    top = bench.record["ceilings"]
    ms = 1000 * max(flops / top["tflops"], moved / top["tbytes"], exps / top["texp"]) / 1e12
    return {"flops": flops, "bytes": moved, "exponentials": exps, "floor_ms": ms}


def growing(bench: Bench) -> None:
    """Time and memory over the length."""
    scale = bench.scale
    for keys in scale.growing:
        shape = (1, scale.growing_heads, keys, 64)
        tensors = inputs(shape, scale.dtype, scale.device)
        square = scale.growing_heads * keys * keys
        ways: list[tuple[str, str, Attend]] = [("SDPA", "default", sdpa(False))]
        for name in ("KDE", "RKDE", "MoM"):
            ways.append((name, "auto", attend_with(METHODS[name], "auto", False)))
            old = published_of(name, False, keys, scale.device)
            if square <= scale.largest_square and old is not None:
                ways.append((name, "published", old))
        for name, impl, attend in ways:
            call = _call(attend, tensors, scale.device == "cuda")
            bench.add(
                kind="growing",
                method=name,
                what=f"N = {keys}",
                mode="forward+backward" if scale.device == "cuda" else "forward",
                impl=impl,
                keys=keys,
                ms=_or_none(lambda call=call: median_ms(call, scale.device, scale.seconds)),  # type: ignore[misc]
                peak_mib=_or_none(lambda call=call: peak_mib(call, scale.device)),  # type: ignore[misc]
            )


def decoding(bench: Bench) -> None:
    """One new token after many."""
    scale = bench.scale
    heads, keys = scale.decode
    q, k, v, _ = inputs((1, heads, keys, 64), scale.dtype, scale.device, queries=1)
    what = f"1×{heads}×{keys}×64, one token"
    plain = sdpa(False)
    with torch.no_grad():
        base = median_ms(lambda: plain(q, k, v), scale.device, scale.seconds)
        bench.add(kind="decode", method="SDPA", what=what, mode="decode", impl="default", ms=base, ratio=1.0)
        for name, method in (("KDE", ra.KDE()), ("RKDE", ra.RKDE()), ("MoM", ra.MoM(draw="poisson"))):
            cache = method.cache()
            many = torch.randn_like(k[:, :, :-1])
            method.decode(many, k[:, :, :-1], v[:, :, :-1], cache)
            length, state = cache.length, dict(cache.state)

            def token(method: Method = method, length: int = length, state: dict[str, Tensor] = state) -> Tensor:
                return method.decode(q, k, v, ra.Cache(length, dict(state)))

            ms = median_ms(token, scale.device, scale.seconds)
            bench.add(kind="decode", method=name, what=what, mode="decode", impl="cache", ms=ms, ratio=ms / base)


def steps(bench: Bench, shape: StackShape, methods: tuple[str, ...]) -> None:
    """Training steps of a whole model, softmax by SDPA first."""
    device, seconds = bench.scale.device, bench.scale.seconds
    base: float | None = None
    for name in ("SDPA", *methods):
        attend = sdpa(shape.causal) if name == "SDPA" else attend_with(METHODS[name], "auto", shape.causal)
        step = training_step(shape, attend, device)
        step()
        ms = _or_none(lambda step=step: median_ms(step, device, max(seconds, 0.0)))  # type: ignore[misc]
        base = ms if name == "SDPA" else base
        bench.add(
            kind="step",
            method=name,
            what=f"{shape.name}, batch {shape.batch}",
            mode="training step",
            impl="default" if name == "SDPA" else "auto",
            ms=ms,
            ratio=ms / base if ms and base else None,
            peak_mib=_or_none(lambda step=step: peak_mib(step, device)) if device == "cuda" else None,  # type: ignore[misc]
            iterations_per_second=1000 / ms if ms else None,
        )


def exponents(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Slopes of log time and log memory over log N (least squares over the upper half of the lengths)."""
    found = []
    groups = dict.fromkeys((r["method"], r["impl"]) for r in rows if r["kind"] == "growing")
    for method, impl in groups:
        mine = [r for r in rows if r["kind"] == "growing" and (r["method"], r["impl"]) == (method, impl)]
        row: dict[str, Any] = {"method": method, "impl": impl}
        for name in ("ms", "peak_mib"):
            points = [(r["keys"], r[name]) for r in mine if r.get(name)]
            points = points[min(len(points) // 2, len(points) - 2) :] if len(points) > 1 else []
            row[name] = _slope(points) if len(points) > 1 else None
        found.append(row)
    return found


def _slope(points: list[tuple[int, float]]) -> float:
    x = torch.tensor([p[0] for p in points], dtype=torch.float64).log()
    y = torch.tensor([p[1] for p in points], dtype=torch.float64).log()
    x, y = x - x.mean(), y - y.mean()
    return float((x * y).sum() / x.square().sum())


def _call(attend: Attend, tensors: list[Tensor], backward: bool) -> Callable[[], Any]:
    if backward:
        return lambda: gradients(attend, tensors, tensors[0].dtype)
    return lambda: gradients(attend, tensors, tensors[0].dtype, backward=False)


def _or_none(measure: Callable[[], float]) -> float | None:
    """None where there is not enough memory; anything else is our mistake and raises."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


def _where(scale: Scale) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    return {
        "dtype": str(scale.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if scale.device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "versions": {
            "robust_attention": ra.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "commit": commit.stdout.strip() or None,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores"
