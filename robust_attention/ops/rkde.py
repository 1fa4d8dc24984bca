"""RKDE attention: keys and values far from the others in the kernel's Hilbert space count less."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._cache import Cache
from robust_attention.ops._call import Call, CannotStream, keys_only, run
from robust_attention.ops._method import register
from robust_attention.ops._weighted import WeightedKernel
from robust_attention.robust.gram import unit
from robust_attention.robust.kirwls import kirwls, reweight
from robust_attention.robust.losses import Hampel, Huber, Loss, Tukey, Welsch
from robust_attention.robust.tiles import causal_weights, kirwls_weights, points, row_sums

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
            cls(keys="own", weight_bandwidth=0.5),
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

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, padding: Tensor | None, past: int, **owned: Any
    ) -> Tensor:
        """One running sum a key: C_ij = C_{i−1,j} + G_ij, T_i = T_{i−1} + 2 Σ_{j<i} G_ij + 1, both Grams (float64)."""
        if self.sweeps != 1:  # more sweeps need the whole Gram again
            return super()._decode(q, k, v, cache, padding, past, **owned)
        state = cache.state
        if cache.length != past or not state:
            state = self._summed(k[:, :, :past], v[:, :, :past], None if padding is None else padding[:, :past])
        if past == 0 and q.shape[2] > 1:
            out = super()._decode(q, k, v, cache, padding, past, **owned)
            cache.state = self._summed(k, v, padding)
            return out
        rows = []
        for new in range(past + 1, k.shape[2] + 1):
            seen = None if padding is None else padding[:, None, None, :new]

            def compute(call: Call) -> Tensor:
                nonlocal state
                unit_k = unit(call.k_BK1SD)
                state, weights = self._next(state, call, unit_k)
                marginal, joint = (w[:, :, None, None].to(unit_k.dtype) for w in weights)
                return self._combine(call, unit_k, joint, marginal)

            last = q[:, :, new - past - 1 : new - past]
            rows.append(run(compute, last, k[:, :, :new], v[:, :, :new], seen, False, "reference"))
        cache.state = state
        return torch.cat(rows, 2)

    def _next(
        self, state: dict[str, Tensor], call: Call, unit_k: Tensor
    ) -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
        """The state with one key more, and the weights (marginal, joint) of the prefix that ends there, `[B, K, S]`."""
        keys, values = unit_k[:, :, 0].double(), call.v_BK1SE[:, :, 0].double()
        variance, value_variance = self._weight_variances(call.width)
        exponent = (keys - keys[:, :, -1:]).square().sum(-1) / (-2 * variance)
        value_exponent = (values - values[:, :, -1:]).square().sum(-1) / (-2 * value_variance)
        visible = call.visible_bkgtS[:, :, 0, 0].expand(exponent.shape).double()
        both = visible * visible[..., -1:]
        number = visible.sum(-1, keepdim=True).clamp(min=1)
        after, weights = {}, []
        for name, log_gram in (("marginal", exponent), ("joint", exponent + value_exponent)):
            row = log_gram.exp() * both
            before = row[..., :-1]
            whole = row.sum(-1, keepdim=True)
            sums = torch.cat((state[name] + before, whole), -1)
            total = state[f"{name}_total"] + before.sum(-1, keepdim=True) + whole
            after[name], after[f"{name}_total"] = sums, total
            squared = 1 - 2 * sums / number + total / number.square()
            weights.append(reweight(squared, visible, self.loss, visible / number))
        return after, (weights[0], weights[1])

    def _summed(self, k: Tensor, v: Tensor, padding: Tensor | None) -> dict[str, Tensor]:
        """The state after the keys k."""
        if k.shape[2] == 0:
            sums = (k.new_zeros(k.shape[:3], dtype=torch.float64),) * 2
        else:
            call = keys_only(k, v, None if padding is None else padding[:, None, None], False, None)
            unit_k = unit(call.k_BK1SD)[:, :, 0]
            visible = call.visible_bkgtS[:, :, 0, 0].expand(unit_k.shape[:-1])
            keys, values = unit_k.flatten(0, 1), call.v_BK1SE[:, :, 0].flatten(0, 1)
            variance, value_variance = self._weight_variances(call.width)
            prepared = points(keys, values, visible.flatten(0, 1), variance, value_variance, exact=True)
            marginal, joint = (s.double().reshape(k.shape[:3]) for s in row_sums(prepared, _TILE_ROWS))
            sums = (marginal, joint)
        named = dict(zip(("marginal", "joint"), sums, strict=True))
        return named | {f"{name}_total": s.sum(-1, keepdim=True) for name, s in named.items()}

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
