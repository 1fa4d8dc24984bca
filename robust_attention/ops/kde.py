"""Kernel attention: the Nadaraya–Watson estimate from a plain kernel density estimate."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robust_attention.ops._call import Call, in_rows, masked_softmax, run
from robust_attention.ops._kernel import GaussianKernel
from robust_attention.ops._method import register
from robust_attention.ops._sdpa import by_sdpa
from robust_attention.robust.gram import unit
from robust_attention.robust.kirwls import uniform
from robust_attention.typing import Impl


@register("kde")
@dataclass(frozen=True)
class KDE(GaussianKernel):
    """h_i = Σ_j κ(q_i, k̂_j) v_j / Σ_j κ(q_i, k̂_j), which is softmax attention on unit keys.

    Reference: eq. 3 of the paper.
    """

    equation: ClassVar[str] = "eq. 3"
    summary: ClassVar[str] = "softmax on unit keys: a plain kernel density estimate"
    formula: ClassVar[str] = "Σ_j κ(q_i,k̂_j) v_j / Σ_j κ(q_i,k̂_j)"

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
    ) -> Tensor:
        return run(
            self._reference,
            q,
            k,
            v,
            attn_mask,
            is_causal,
            impl,
            streamed=self._streamed,
            streamed_trains=True,
            triton=self.needs_unit_keys() or self._triton,
        )

    def _reference(self, call: Call) -> Tensor:
        return masked_softmax(self.logit(call, unit(call.k_BK1SD)), call.visible_bkgtS) @ call.v_BK1SE

    def _streamed(self, call: Call) -> Tensor:
        if self.keys == "own" and (call.mask_bkgtS is not None or (call.causal and call.offset)):
            # SDPA would add −inf to the logit of a hidden key, which may be +inf already.
            return in_rows(self._reference)(call)
        return by_sdpa(call, self.logit_keys(call, unit(call.k_BK1SD)))

    def _triton(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, is_causal: bool) -> Tensor:
        from robust_attention._triton import ops

        variance = self.variance(q.shape[-1])
        if pad is None and not is_causal and q.dtype != torch.float32:
            return ops.kde_by_sdpa(q, k, v, variance=variance)
        return ops.kde(q, k, v, pad, is_causal, variance=variance)

    def density_weights(self, gram: Tensor) -> Tensor:
        """1/N for each of the N points of a Gram."""
        return uniform(gram.new_ones(gram.shape[:-1]).bool(), gram.dtype)
