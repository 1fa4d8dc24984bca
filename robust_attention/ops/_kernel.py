"""The Gaussian kernel between queries and unit keys, as logits."""

from dataclasses import dataclass
from typing import get_args

from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call
from robust_attention.ops._method import Method
from robust_attention.typing import Keys


@dataclass(frozen=True, kw_only=True)
class GaussianKernel(Method):
    """Methods whose kernel is κ(q, k̂) = exp(−‖q − k̂‖²/(2σ²)) on keys of unit length."""

    bandwidth: float | None = None
    """σ of the kernel; None means σ² = √D."""

    keys: Keys = "unit"
    """"unit" normalises the keys of the kernel, as the paper does. "own" keeps them as they are, κ = exp(q·k/σ²), so
    that a model that was trained with softmax keeps its own logits: with uniform weights it is softmax attention to
    rounding. Robust weights come from unit keys either way."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.bandwidth("bandwidth", self.bandwidth)
        _checks.one_of("keys", self.keys, get_args(Keys))

    def variance(self, width: int) -> float:
        """σ²."""
        return width**0.5 if self.bandwidth is None else self.bandwidth**2

    def logit(self, call: Call, unit_k_BK1SD: Tensor) -> Tensor:
        """log κ up to a term of the query alone, which cancels: q·k̂/σ², `[B, K, G, T, S]`.

        Departs: a zero key has no direction; it stays zero and its logit is 0 (the paper does not say).
        """
        return call.q_BKGTD @ self.logit_keys(call, unit_k_BK1SD).mT

    def logit_keys(self, call: Call, unit_k_BK1SD: Tensor) -> Tensor:
        """The keys over σ²: scaled first, a product stays in range for queries near the end of the dtype's."""
        return (unit_k_BK1SD if self.keys == "unit" else call.k_BK1SD) / self.variance(call.width)

    def needs_unit_keys(self) -> str | None:
        """Why a kernel that normalises keys cannot run, or None."""
        return None if self.keys == "unit" else 'the kernel takes keys="unit", got "own"'
