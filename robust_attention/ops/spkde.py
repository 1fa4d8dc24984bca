"""SPKDE attention: the kernel mean, scaled by β and projected back on the weighted densities."""

import warnings
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from robust_attention.ops._cache import Cache
from robust_attention.ops._call import Call, CannotStream, keys_only, run
from robust_attention.ops._method import register
from robust_attention.ops._weighted import WeightedKernel
from robust_attention.robust.gram import squared_distances, unit
from robust_attention.robust.growing_qp import GrowingQP
from robust_attention.robust.qp_solver import AIM
from robust_attention.robust.simplex_qp import GAP_TOLERANCE, QPInfo, spkde_weights


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

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, padding: Tensor | None, past: int, **owned: Any
    ) -> Tensor:
        """Both Grams, and the inverse on the support of the last weights, with one point more for each token."""
        if min(q.numel(), k.numel(), v.numel()) == 0:
            return super()._decode(q, k, v, cache, padding, past, **owned)
        # Taken out of the cache while it is changed: what is left behind by an error is made anew.
        state, cache.state = cache.state, {}
        if past == 0 and q.shape[2] > 1:
            out = super()._decode(q, k, v, cache, padding, past, **owned)
            cache.state = self._packed(self._started(k, v, padding), k)
            return out
        if cache.length != past or not state or not bool((state["length"] == past).all()):
            growing = self._started(k[:, :, :past], v[:, :, :past], None if padding is None else padding[:, :past])
        else:
            growing = GrowingQP(**{f.name: state[f.name].flatten(0, 2) for f in fields(GrowingQP)})
            state["length"].fill_(-1)  # whoever else holds these tensors sees that they have moved on
        rows = []
        for new in range(past + 1, k.shape[2] + 1):
            seen = None if padding is None else padding[:, None, None, :new]

            def compute(call: Call) -> Tensor:
                unit_k = unit(call.k_BK1SD)
                weights = self._grown(growing, call, unit_k).to(unit_k.dtype)[..., None, None, :]
                return self._combine(call, unit_k, weights[:, 1], weights[:, 0])

            last = q[:, :, new - past - 1 : new - past]
            rows.append(run(compute, last, k[:, :, :new], v[:, :, :new], seen, False, "reference"))
        cache.state = self._packed(growing, k)
        return torch.cat(rows, 2)

    def _grown(self, growing: GrowingQP, call: Call, unit_k: Tensor) -> Tensor:
        """Weights (marginal, joint) `[B, 2, K, S]` of all keys, the last of which is new."""
        row = self._grams(_to_the_last(unit_k[:, :, 0]), _to_the_last(call.v_BK1SE[:, :, 0]), call.width)
        seen = call.visible_bkgtS[:, :, 0, 0, -1].expand(*unit_k.shape[:2])[:, None].expand(row.shape[:-1])
        weights, gap = growing.grow(row.flatten(0, 2), seen.flatten(), self.beta, AIM[row.dtype])
        _say(QPInfo(gap, gap, GAP_TOLERANCE[row.dtype]))
        return weights.reshape(row.shape)

    def _started(self, k: Tensor, v: Tensor, padding: Tensor | None) -> GrowingQP:
        """After the keys k."""
        if k.shape[2] == 0:
            problems = 2 * k.shape[0] * k.shape[1]
            wide = torch.float64 if k.dtype == torch.float64 else torch.float32
            nothing = k.new_zeros(problems, 0, 0, dtype=wide)
            return GrowingQP.start(nothing, k.new_zeros(problems, 0).bool(), self.beta, AIM[wide])
        call = keys_only(k, v, None if padding is None else padding[:, None, None], False, None)
        unit_k = unit(call.k_BK1SD)[:, :, 0]
        gram = self._grams(squared_distances(unit_k), squared_distances(call.v_BK1SE[:, :, 0]), call.width)
        seen = call.visible_bkgtS[:, :, 0, 0].expand(unit_k.shape[:-1])[:, None].expand(gram.shape[:-1])
        return GrowingQP.start(gram.flatten(0, 2), seen.flatten(0, 2), self.beta, AIM[gram.dtype])

    def _grams(self, of_keys: Tensor, of_values: Tensor, width: int) -> Tensor:
        """Entries (marginal, joint) `[B, 2, K, ...]` of the Grams, from squared distances `[B, K, ...]`."""
        variance, value_variance = self._weight_variances(width)
        exponent = of_keys / (2 * variance)
        return torch.exp(-torch.stack((exponent, exponent + of_values / (2 * value_variance)), 1))

    @staticmethod
    def _packed(growing: GrowingQP, k: Tensor) -> dict[str, Tensor]:
        """What the cache keeps, batch first; `length` says how many keys the tensors know of."""
        sizes = (k.shape[0], 2, k.shape[1])
        state = {f.name: getattr(growing, f.name).unflatten(0, sizes) for f in fields(growing)}
        return state | {"length": torch.full(sizes[:1], k.shape[2])}

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


def _to_the_last(x: Tensor) -> Tensor:
    """The last row of `squared_distances`."""
    return (x.double() - x[..., -1:, :].double()).square().sum(-1).to(x.dtype)


def _say(info: QPInfo) -> None:
    missed = ~info.reached
    if missed.any():
        warnings.warn(
            f"SPKDE: {int(missed.sum())} of {missed.numel()} quadratic programmes end with a Frank–Wolfe gap "
            f"of up to {float(info.gap.max()):.1e}, above {info.tolerance:.0e}; "
            "use float64 inputs or a narrower weight_bandwidth",
            stacklevel=4,
        )
