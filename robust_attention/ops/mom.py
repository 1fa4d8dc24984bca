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

_MOST_BLOCKS = 31  # the kernel holds a query's densities in registers


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
            cls(draw="poisson", fraction=1.0, seed=3),
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

        def logit(call: Call) -> Tensor:
            return self.logit(call, unit(call.k_BK1SD))

        def reference(call: Call) -> Tensor:
            return self._within_median_block(call, logit, counts)

        def streamed(call: Call) -> Tensor:
            return self._within_median_block_in_rows(call, logit, counts, bounded=True)

        def kernel(q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, is_causal: bool) -> Tensor:
            from robust_attention._triton import ops

            held, variance = self._checked_counts(counts, k.shape[2], k.device), self.variance(q.shape[-1])
            return ops.mom(q, k, v, held, pad, is_causal, variance=variance, equal_sizes=self.kind == "poisson")

        number = len(counts) if isinstance(counts, Tensor) and counts.dim() else self.blocks
        few = number <= _MOST_BLOCKS
        refusal = None if few else f"the kernel takes up to {_MOST_BLOCKS} blocks, got {number}"
        triton = refusal or self.needs_unit_keys() or kernel
        return run(reference, q, k, v, attn_mask, is_causal, impl, streamed=streamed, triton=triton)
