"""SPKDE attention: the kernel mean, scaled by β and projected back on the weighted densities."""

import warnings
from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from robust_attention.ops._call import Call, CannotStream
from robust_attention.ops._method import register
from robust_attention.ops._weighted import WeightedKernel
from robust_attention.robust.gram import unit
from robust_attention.robust.simplex_qp import QPInfo, spkde_weights


@register("spkde")
@dataclass(frozen=True)
class SPKDE(WeightedKernel[QPInfo]):
    """Eq. 11 with weights from one quadratic programme for each sample, head and visible set.

        min_ω ωᵀGω − 2qᵀω,  q = (β/n) G1,  ω on the simplex over the visible keys

    Reference: eq. 9 to 11 of the paper; Vandermeulen and Scott, 2014.
    Gradient: by implicit differentiation on the support of ω.
    Numerics: solved in float64; `weights(...).info` holds the Frank–Wolfe gap of every problem, and a gap above 1e-10
        (5e-6 for float32 Grams) is reported by a warning.
    Departs: one Gram for each sample and head (the released code averages it over both, so that a sample's output
        depends on its neighbours), and with gradients.
    """

    equation: ClassVar[str] = "eq. 9–11"
    summary: ClassVar[str] = "weights from a projection: outliers can drop out entirely"
    formula: ClassVar[str] = "Σ_j ωᴶ_j κ(q_i,k̂_j) v_j / Σ_j ωᴹ_j κ(q_i,k̂_j), ω from a QP"

    beta: float = 1.4
    """Scale β = 1/(1 − ε) for a share ε of outliers; 1 gives uniform weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.beta, bool) or not isinstance(self.beta, int | float) or not 1 <= self.beta < float("inf"):
            raise ValueError(f"beta must be a finite number of at least 1, got {self.beta!r}; the paper takes beta=1.4")

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return cls(), cls(beta=1.05), cls(weight_bandwidth=0.7, value_bandwidth=3.0, keys="own")

    def _solve(self, gram: Tensor, visible: Tensor, prefixes: bool) -> tuple[Tensor, QPInfo]:
        batch, kv_heads = gram.shape[:2]
        sets = visible.expand(batch, kv_heads, *visible.shape[2:])
        shape = sets.shape
        weights, info = spkde_weights(gram.flatten(0, 2), sets.flatten(2, 3).flatten(0, 1), self.beta, prefixes)
        _say(info)
        return weights.reshape(shape), QPInfo(
            info.gap.reshape(shape[:-1]), info.objective.reshape(shape[:-1]), info.tolerance
        )

    def _streamed(self, call: Call) -> Tensor:
        if not call.shared or (call.mask_bkgtS is not None and call.mask_bkgtS.shape[2] > 1):
            raise CannotStream("its queries see different keys, and each visible set is a programme of its own")
        unit_k = unit(call.k_BK1SD)
        joint, marginal, _ = self._weights(call, unit_k)
        return self._combine_shared(call, unit_k, joint, marginal, all_count=False)

    def _no_kernel(self, causal: bool) -> str | None:
        return "the kernel takes one visible set a sample, not prefixes" if causal else None

    def _triton(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, is_causal: bool) -> Tensor:
        from robust_attention._triton import ops

        joint, marginal = self.weights(k, v, None if pad is None else pad[:, None, None])
        number = k.shape[2] if pad is None else pad.sum(-1)[:, None, None]  # the kernel wants weights of mean 1
        return ops.weighted(q, k, v, joint * number, marginal * number, pad, variance=self.variance(q.shape[-1]))

    def density_weights(self, gram: Tensor) -> Tensor:
        """Weights of the N points of a Gram `[N, N]`."""
        everything = gram.new_ones(1, 1, gram.shape[-1]).bool()
        weights, info = spkde_weights(gram[None], everything, self.beta)
        _say(info)
        return weights[0, 0]


def _say(info: QPInfo) -> None:
    missed = ~info.reached
    if missed.any():
        warnings.warn(
            f"SPKDE: {int(missed.sum())} of {missed.numel()} quadratic programmes end with a Frank–Wolfe gap "
            f"of up to {float(info.gap.max()):.1e}, above {info.tolerance:.0e}; "
            "use float64 inputs or a narrower weight_bandwidth",
            stacklevel=4,
        )
