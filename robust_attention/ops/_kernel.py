"""The Gaussian kernel between queries and unit keys, as logits."""

from dataclasses import dataclass

from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call
from robust_attention.ops._method import Method
from robust_attention.robust.gram import unit


@dataclass(frozen=True, kw_only=True)
class GaussianKernel(Method):
    """Methods whose kernel is κ(q, k̂) = exp(−‖q − k̂‖²/(2σ²)) on keys of unit length."""

    bandwidth: float | None = None
    """σ of the kernel; None means σ² = √D."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.positive("bandwidth", self.bandwidth, optional=True)

    def variance(self, width: int) -> float:
        """σ²."""
        return width**0.5 if self.bandwidth is None else self.bandwidth**2

    def logit(self, call: Call) -> Tensor:
        """log κ up to a term of the query alone, which cancels: q·k̂/σ², `[B, K, G, T, S]`.

        A zero key has no direction and stays zero (Departs: the paper does not say).
        """
        # Scaling the keys first keeps the product in range for queries near the end of the dtype's.
        return call.q_BKGTD @ (unit(call.k_BK1SD) / self.variance(call.width)).mT

