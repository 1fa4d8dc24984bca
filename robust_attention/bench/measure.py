"""Time, peak memory, and the ceilings of the machine, each measured."""

import statistics
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def median_ms(call: Callable[[], Any], device: str, seconds: float) -> float:
    """Median time of a call; on a GPU of replays of a CUDA graph, so that launch gaps do not count."""
    if device == "cpu":
        call()
        times: list[float] = []
        begin = time.perf_counter()
        while len(times) < 3 or (time.perf_counter() - begin < seconds and len(times) < 200):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
        return 1000 * statistics.median(times)
    from triton.testing import do_bench, do_bench_cudagraph

    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            return float(do_bench_cudagraph(call, rep=int(1000 * seconds), return_mode="median"))
    except Exception:  # what waits for the host cannot be captured; it is timed with its gaps
        torch.cuda.synchronize()
        return float(do_bench(call, warmup=20, rep=int(1000 * seconds), return_mode="median"))


def sequence_ms(calls: Iterable[Callable[[], Any]], device: str) -> float:
    """Median time of calls that each run once, because each goes on from the one before; launch gaps count."""
    times = []
    for call in calls:
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def or_none(measure: Callable[[], float]) -> float | None:
    """None where there is not enough memory; anything else is our mistake and raises."""
    try:
        return measure()
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None


class _Live(TorchDispatchMode):
    """Bytes of the tensors that operations returned and that still live; temporaries inside an operation do not show,
    and neither does what autograd keeps: for calls without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.holders: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self._hold(x, before)
        return out

    def _hold(self, x: Tensor, before: set[int]) -> None:
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self.holders:
            if key in before:  # a view of something that was there before the call
                return
            self.holders[key] = 0
            self.now += size
            self.peak = max(self.peak, self.now)
        self.holders[key] += 1
        weakref.finalize(x, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self.holders[key] -= 1
        if self.holders[key] == 0:
            del self.holders[key]
            self.now -= size


def peak_mib(call: Callable[[], Any], device: str) -> float:
    """Peak memory of a call above what was there before. On a CPU: of the tensors of a call without gradients."""
    if device == "cpu":
        with _Live() as live:
            call()
        return live.peak / 2**20
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def ceilings(device: str, dtype: torch.dtype) -> dict[str, float]:
    """TFLOP/s of a large matrix product, TB/s of a large copy (bytes read and written), T exponentials a second.

    On a GPU that says so also T instructions of single lanes a second: multiprocessors × 128 lanes × clock.
    """
    size = 8192 if device == "cuda" else 1536
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    x = torch.randn(2**29 if device == "cuda" else 2**25, device=device)
    y = torch.empty_like(x)
    product, copy, exponential = (
        median_ms(call, device, 0.3)
        for call in (lambda: torch.mm(a, b), lambda: y.copy_(x), lambda: torch.exp(x[: 2**22], out=y[: 2**22]))
    )
    found = {
        "tflops": 2 * size**3 / product / 1e9,
        "tbytes": 2 * 4 * len(x) / copy / 1e9,
        "texp": 2**22 / exponential / 1e9,
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        kilohertz = getattr(properties, "clock_rate", None)
        if kilohertz:
            found["tinstructions"] = properties.multi_processor_count * 128 * kilohertz / 1e9
    return found
