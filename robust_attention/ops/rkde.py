"""RKDE attention: keys and values far from the others in the kernel's Hilbert space count less."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call, CannotStream
from robust_attention.ops._method import register
from robust_attention.ops._weighted import WeightedKernel
from robust_attention.robust.gram import unit
from robust_attention.robust.kirwls import kirwls
from robust_attention.robust.losses import Hampel, Huber, Loss, Tukey, Welsch
from robust_attention.robust.tiles import causal_weights, kirwls_weights, points

_TILE_ROWS = 64  # rows of a Gram at a time where it is streamed
PAPER_LOSS = Huber(0.2)


@register("rkde")
@dataclass(frozen=True)
class RKDE(WeightedKernel[None]):
    """Eq. 11 with weights from sweeps of KIRWLS, started from uniform weights on the visible keys.

        r_j = Σ_m ω_m G_mj,  c = Σ_m ω_m r_m,  d_j = sqrt(1 − 2r_j + c),  ω_j ← ψ(d_j) / Σ_m ψ(d_m)

    Reference: eq. 5, 11 and B.2 of the paper; Kim and Scott, 2012.
    Departs: where every ψ is 0 the weights are uniform (the paper does not say). The released code has another sign
        in d_j, and so weights outliers up; the equations are what is implemented.
    """

    equation: ClassVar[str] = "eq. 5, 11"
    summary: ClassVar[str] = "outliers weighted down by a robust loss (KIRWLS)"
    formula: ClassVar[str] = "Σ_j ωᴶ_j κ(q_i,k̂_j) v_j / Σ_j ωᴹ_j κ(q_i,k̂_j), ω from KIRWLS"

    loss: Loss = PAPER_LOSS
    """Huber, Hampel, Welsch or Tukey, with its threshold a."""
    sweeps: int = 1
    """Sweeps of KIRWLS; the paper takes one. 0 is plain kernel attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.loss, Loss):
            raise ValueError(
                f"loss must be Huber, Hampel, Welsch or Tukey, got {self.loss!r}; pass for example loss=Huber(a=0.2)"
            )
        _checks.whole("sweeps", self.sweeps, least=0)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (
            cls(),
            cls(loss=Hampel(0.2)),
            cls(loss=Welsch(0.5), sweeps=2),
            cls(loss=Tukey(0.8), sweeps=3),
            cls(loss=Huber(0.3), weight_bandwidth=0.7, value_bandwidth=3.0, bandwidth=1.5),
        )

    def _solve(self, gram: Tensor, visible: Tensor, prefixes: bool) -> tuple[Tensor, None]:
        return kirwls(gram, visible, self.loss, self.sweeps), None

    def _streamed(self, call: Call) -> Tensor:
        unit_k = unit(call.k_BK1SD)
        mask = call.mask_bkgtS
        if mask is not None and (mask.shape[2] > 1 or mask.shape[3] > 1):
            raise CannotStream("its mask gives the queries of one key head different keys")
        if call.causal and self.sweeps != 1:
            raise CannotStream(f"causal weights are streamed for one sweep, got sweeps={self.sweeps}")
        batch, kv_heads, groups, queries, _ = call.q_BKGTD.shape
        seen = torch.ones_like(unit_k[..., 0], dtype=torch.bool) if mask is None else mask[..., 0, :]
        keys, values = unit_k.flatten(0, 2), call.v_BK1SE.flatten(0, 2)
        visible = seen.expand(unit_k.shape[:-1]).flatten(0, 2)
        variance, value_variance = self._weight_variances(call.width)
        if not call.causal:
            shared = kirwls_weights(keys, values, visible, variance, value_variance, self.loss, self.sweeps, _TILE_ROWS)
            marginal, joint = (w.reshape(batch, kv_heads, 1, 1, -1) for w in shared)
            return self._combine_shared(call, unit_k, joint, marginal, all_count=isinstance(self.loss, Huber))
        # Query t goes with the prefix that ends at key t + offset; queries before the first key see nothing.
        out = call.v_BK1SE.new_zeros(batch, kv_heads, groups, queries, call.v_BK1SE.shape[-1])
        prepared = points(keys, values, visible, variance, value_variance, exact=True)
        for start, stop, *weights in causal_weights(prepared, self.loss, _TILE_ROWS, max(0, call.offset)):
            first = max(0, start - call.offset)
            skipped = first + call.offset - start
            marginal, joint = (w[:, skipped:].reshape(batch, kv_heads, 1, -1, stop) for w in weights)
            rows = call.rows(first, stop - call.offset)
            out[..., first : stop - call.offset, :] = self._combine(rows, unit_k[..., :stop, :], joint, marginal)
        return out

    def _no_kernel(self, causal: bool) -> str | None:
        if self.sweeps != 1:
            return f"the kernel takes one sweep, got sweeps={self.sweeps}"
        if type(self.loss) not in (Huber, Hampel, Welsch, Tukey):
            return f"the kernel knows Huber, Hampel, Welsch and Tukey, got {self.loss!r}"
        if causal and self.weight_grad == "stop":
            return 'the causal kernel takes weight_grad="full", got "stop"'
        return None

    def _triton(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, is_causal: bool) -> Tensor:
        from robust_attention._triton import ops

        weight_variance, value_variance = self._weight_variances(q.shape[-1])
        return ops.rkde(
            q,
            k,
            v,
            pad,
            is_causal,
            loss=type(self.loss).__name__.lower(),
            a=self.loss.a,
            variance=self.variance(q.shape[-1]),
            weight_variance=weight_variance,
            value_variance=value_variance,
            weight_grad=self.weight_grad,
        )

    def density_weights(self, gram: Tensor) -> Tensor:
        """Weights of the N points of a Gram `[N, N]`."""
        return kirwls(gram, gram.new_ones(1, gram.shape[-1]).bool(), self.loss, self.sweeps)[0]
