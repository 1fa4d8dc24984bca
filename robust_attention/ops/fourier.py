"""Fourier attention, alone and within median blocks."""

from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._blocks import BlockMethod
from robust_attention.ops._call import Call, in_rows, masked_softmax, run
from robust_attention.ops._method import Method, register
from robust_attention.robust.fourier import log_fourier_kernel
from robust_attention.typing import Impl


@dataclass(frozen=True, kw_only=True)
class FourierKernel(Method):
    """Methods whose kernel is κ_F(q, k) = Π_d (sin(R_d(q_d − k_d)) / (R_d(q_d − k_d)))^p, keys as they come."""

    power: int = field(default=4)
    """p, even so that no weight is negative; the paper takes 4."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.whole("power", self.power, least=2)
        if self.power % 2:
            raise ValueError(f"power must be even, so that no weight is negative, got {self.power}; pass power=4")

    def initial_tensors(
        self, kv_heads: int, width: int, queries: int, keys: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {"radius": torch.tensor(1.0)}

    @staticmethod
    def _checked_radius(radius: Tensor | None, width: int) -> Tensor:
        if radius is None:
            raise ValueError(
                "radius must be a tensor with one number or one for each of the D widths, got None; "
                "pass radius=torch.tensor(1.0)"
            )
        _checks.tensor("radius", radius)
        if radius.dim() > 1 or (radius.dim() == 1 and radius.shape[0] not in (1, width)):
            raise ValueError(
                f"radius must be a scalar or [D] = [{width}], got {list(radius.shape)}; pass radius=torch.tensor(1.0)"
            )
        return radius

    def _logit(self, call: Call, radius: Tensor | None) -> Tensor:
        """log κ_F, `[B, K, G, T, S]`."""
        held = self._checked_radius(radius, call.width).to(call.q_BKGTD)
        return log_fourier_kernel(call.q_BKGTD, call.k_BK1SD, held, self.power)


@register("fourier")
@dataclass(frozen=True)
class Fourier(FourierKernel):
    """h_i = Σ_j κ_F(q_i, k_j) v_j / Σ_j κ_F(q_i, k_j) (FourierFormer, Nguyen et al., 2022).

    Numerics: in log space, where 64 factors to the 4th power do not underflow. At an exact zero of a sine the weight
        is 0; a query all of whose weights are exactly 0 gets 0.
    """

    equation: ClassVar[str] = "App. C"
    summary: ClassVar[str] = "FourierFormer: product of sinc⁴ of the coordinates' differences"
    formula: ClassVar[str] = "Σ_j κ_F(q_i,k_j) v_j / Σ_j κ_F(q_i,k_j)"

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
        *,
        radius: Tensor | None = None,
    ) -> Tensor:
        """See `Method.attend`. `radius`: R, a scalar or `[D]`; required, because it is learnt."""

        def compute(call: Call) -> Tensor:
            return masked_softmax(self._logit(call, radius), call.visible_bkgtS) @ call.v_BK1SE

        def kernel(q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, is_causal: bool) -> Tensor:
            from robust_attention._triton.fourier import fourier

            held = self._checked_radius(radius, q.shape[-1])
            return fourier(q, k, v, held, pad, is_causal, power=self.power)

        return run(compute, q, k, v, attn_mask, is_causal, impl, streamed=in_rows(compute), triton=kernel)


@register("fourier_mom")
@dataclass(frozen=True)
class FourierMoM(BlockMethod, FourierKernel):
    """Fourier attention within the block that gives a query the median of the blocks' *Fourier* densities.

    Reference: eq. C.1 (FourierFormer with median of means) of the paper.
    """

    equation: ClassVar[str] = "App. C"
    summary: ClassVar[str] = "FourierFormer within each query's median block"
    formula: ClassVar[str] = "Σ_{j∈I_l*} κ_F(q_i,k_j) v_j / Σ_{j∈I_l*} κ_F(q_i,k_j)"

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return cls(), cls(blocks=3, draw="partition", power=2)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
        *,
        radius: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """See `Method.attend`. `radius` as for Fourier, `counts` as for MoM."""

        def logit(call: Call) -> Tensor:
            return self._logit(call, radius)

        def reference(call: Call) -> Tensor:
            return self._within_median_block(call, logit, counts)

        def streamed(call: Call) -> Tensor:
            return self._within_median_block_in_rows(call, logit, counts, bounded=False)

        return run(
            reference, q, k, v, attn_mask, is_causal, impl, streamed=streamed,
            triton="no kernel chooses blocks by Fourier densities",
        )  # fmt: skip
