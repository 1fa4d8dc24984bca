"""Median-of-means attention: each query attends within the block of keys that gives it the median density."""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from robust_attention.ops._blocks import BlockMethod
from robust_attention.ops._call import Call, run
from robust_attention.ops._kernel import GaussianKernel
from robust_attention.ops._method import register
from robust_attention.robust.gram import unit
from robust_attention.typing import Impl


@register("mom")
@dataclass(frozen=True)
class MoM(BlockMethod, GaussianKernel):
    """h_i = Σ_{j ∈ I_l* ∩ V(i)} κ(q_i, k̂_j) v_j / Σ_{j ∈ I_l* ∩ V(i)} κ(q_i, k̂_j), the block l* chosen query by query.

    Reference: eq. 12 to 16 of the paper.
    Departs: blocks are shared by samples and heads and drawn once a call; the lower median where their number is
        even; a block that sees no key of a query has no vote. The paper's bound needs draw="partition" with more
        than twice as many blocks as outliers; its experiments bootstrap.
    """

    equation: ClassVar[str] = "eq. 16"
    summary: ClassVar[str] = "each query attends within its median block of keys"
    formula: ClassVar[str] = "Σ_{j∈I_l*} κ(q_i,k̂_j) v_j / Σ_{j∈I_l*} κ(q_i,k̂_j)"

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (
            cls(),
            cls(blocks=4, fraction=0.5, draw="subsample", seed=1),
            cls(blocks=3, draw="partition", seed=2**40 + 2),
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
        *,
        counts: Tensor | None = None,
    ) -> Tensor:
        """See `Method.attend`. `counts`: integer `[blocks, S]` to use instead of a draw from the method's seed."""

        def compute(call: Call) -> Tensor:
            return self._within_median_block(
                call, self.logit(call.q_BKGTD, unit(call.k_BK1SD)), self._counts_of(call, counts)
            )

        return run(compute, q, k, v, attn_mask, is_causal, impl)
