"""Softmax attention (Vaswani et al., 2017): the transformer that everything here is compared with."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call, in_rows, masked_softmax, run
from robust_attention.ops._method import Method, register
from robust_attention.ops._sdpa import by_sdpa
from robust_attention.typing import Impl


@register("softmax")
@dataclass(frozen=True)
class Softmax(Method):
    """h_i = Σ_j softmax_j(q_i·k_j/σ²) v_j, σ² = √D unless a bandwidth is given. Keys as they come."""

    equation: ClassVar[str] = "eq. A.1"
    summary: ClassVar[str] = "the usual transformer"
    formula: ClassVar[str] = "Σ_j softmax_j(q_i·k_j/√D) v_j"

    bandwidth: float | None = None
    """σ; None means σ² = √D."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.bandwidth("bandwidth", self.bandwidth)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
    ) -> Tensor:
        return run(self._reference, q, k, v, attn_mask, is_causal, impl, streamed=self._streamed, streamed_trains=True)

    def _variance(self, width: int) -> float:
        return width**0.5 if self.bandwidth is None else self.bandwidth**2

    def _reference(self, call: Call) -> Tensor:
        logit_BKGTS = (call.q_BKGTD / self._variance(call.width)) @ call.k_BK1SD.mT
        return masked_softmax(logit_BKGTS, call.visible_bkgtS) @ call.v_BK1SE

    def _streamed(self, call: Call) -> Tensor:
        if call.mask_bkgtS is not None or (call.causal and call.offset):
            # SDPA would add −inf to the logit of a hidden key, which may be +inf already.
            return in_rows(self._reference)(call)
        return by_sdpa(call, call.k_BK1SD / self._variance(call.width))
