"""SDPA as the yardstick: every backend that runs, the fastest one counts."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn import functional as F

import robust_attention as ra
from robust_attention.bench.check import Attend, check
from robust_attention.bench.measure import or_none

_WILD = 10.0
# Errors over their limit from which a backend counts as broken. Up to there it stays the yardstick: its own rounding
# of probabilities to 16 bits is not ours to judge, and is stored.


@dataclass
class Fastest:
    """The best backend, and what became of the others."""

    name: str | None = None
    ms: float | None = None
    peak_mib: float | None = None
    all_ms: dict[str, float] = field(default_factory=dict)
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    """Errors over their limits, of each backend that runs."""
    refused: dict[str, str] = field(default_factory=dict)

    def entries(self) -> dict[str, Any]:
        """What a row stores."""
        return {
            "impl": self.name or "none",
            "ms": self.ms,
            "ratio": None if self.ms is None else 1.0,
            "peak_mib": self.peak_mib,
            "all_backends_ms": self.all_ms,
            "backends_that_refused": self.refused,
            "errors_over_limit": self.errors,
            "check": "passed" if self.name else f"no backend runs: {self.refused}",
        }


def sdpa(causal: bool) -> Attend:
    """The baseline; on a GPU the backend is set around the call."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def backends(device: str) -> Iterator[tuple[str, Callable[[], AbstractContextManager[Any]]]]:
    """Name and context of each backend."""
    if device != "cuda":
        yield "CPU", nullcontext
        return
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
        yield backend.name, partial(sdpa_kernel, [backend])


def fastest(
    small: list[Tensor],
    causal: bool,
    backward: bool,
    time: Callable[[], float],
    peak: Callable[[], float] | None,
) -> Fastest:
    """Time a call under each backend that takes it.

    Args:
        small: inputs of the same family of shapes, at which the backend is checked first.
        time: milliseconds of the call.
        peak: its peak memory, where that is measured.
    """
    best = Fastest()
    for name, context in backends(small[0].device.type):
        with context():
            try:
                judged = check(sdpa(causal), _softmax(causal), small, backward=backward)
                if not all(error <= _WILD for error in judged.worst.values()):
                    best.refused[name] = judged.reason
                    continue
                ms = or_none(time)
            except RuntimeError as error:  # a backend may not take this shape or dtype: stored, not hidden
                best.refused[name] = str(error).splitlines()[0][:200]
                continue
            if ms is None:
                best.refused[name] = "out of memory"
                continue
            best.all_ms[name], best.errors[name] = ms, judged.worst
            if best.ms is None or ms < best.ms:
                best.name, best.ms, best.peak_mib = name, ms, or_none(peak) if peak is not None else None
    return best


def _softmax(causal: bool) -> Attend:
    return lambda q, k, v: ra.Softmax().attend(q, k, v, is_causal=causal, impl="reference")
