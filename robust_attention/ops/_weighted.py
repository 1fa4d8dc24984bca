"""Attention from two weighted densities: what RKDE and SPKDE share (eq. 11)."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call, check_kv, in_rows, keys_only, log_weight, masked_log_softmax, run
from robust_attention.ops._kernel import GaussianKernel
from robust_attention.ops._sdpa import by_sdpa
from robust_attention.robust.gram import squared_distances, unit
from robust_attention.typing import Impl, WeightGrad

Info = TypeVar("Info")


class RobustWeights(tuple[Tensor, Tensor], Generic[Info]):
    """`joint, marginal` weights, which also carry `info` about how they were found (one for each, or None)."""

    info: tuple[Info, Info]

    def __new__(cls, joint: Tensor, marginal: Tensor, info: tuple[Info, Info]) -> "RobustWeights[Info]":
        both = super().__new__(cls, (joint, marginal))
        both.info = info
        return both

    @property
    def joint(self) -> Tensor:
        """ω^joint, of the points [v_j; k̂_j]."""
        return self[0]

    @property
    def marginal(self) -> Tensor:
        """ω^marginal, of the points k̂_j."""
        return self[1]


@dataclass(frozen=True, kw_only=True)
class WeightedKernel(GaussianKernel, Generic[Info]):
    """h_i = Σ_j ω^joint_j κ(q_i, k̂_j) v_j / Σ_j ω^marginal_j κ(q_i, k̂_j), weights over the keys that i may see.

    Numerics: numerator and denominator are normalised by their own largest term, so weights of exactly 0 need no care;
    the quotient of the two densities is held within e^±88 (float32) or e^±709 (float64).
    """

    weight_bandwidth: float | None = None
    """σ of the Grams that the weights come from; None means the kernel's own."""
    value_bandwidth: float | None = None
    """σ of the values' part of the joint Gram; None means that of its keys' part."""
    weight_grad: WeightGrad = "full"
    """"full" lets gradients flow through the weights, "stop" treats them as constants."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.bandwidth("weight_bandwidth", self.weight_bandwidth)
        _checks.bandwidth("value_bandwidth", self.value_bandwidth)
        _checks.one_of("weight_grad", self.weight_grad, ("full", "stop"))

    @abstractmethod
    def _solve(self, gram: Tensor, visible: Tensor, prefixes: bool) -> tuple[Tensor, Info]:
        """Weights `[B, K, g, t, S]` for Grams `[B, K, 1, S, S]` and visible sets `[b, k, g, t, S]`."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
    ) -> Tensor:
        causal = is_causal is True and isinstance(q, Tensor) and q.dim() == 4 and q.shape[2] > 1
        refusal = self.needs_unit_keys() or self._no_kernel(causal)
        return run(
            self._reference,
            q,
            k,
            v,
            attn_mask,
            is_causal,
            impl,
            streamed=self._streamed,
            triton=self._triton if refusal is None else refusal,
        )

    @abstractmethod
    def _streamed(self, call: Call) -> Tensor:
        """Without a tensor of the size T·S, or CannotStream."""

    @abstractmethod
    def _no_kernel(self, causal: bool) -> str | None:
        """Why these settings have no fused kernel, or None."""

    @abstractmethod
    def _triton(self, q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, is_causal: bool) -> Tensor:
        """By the fused kernel."""

    def weights(
        self,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        num_queries: int | None = None,
    ) -> RobustWeights[Info]:
        """The robust weights `joint, marginal`, each summing to 1 over the visible keys; `.info` says how good.

        Returns: `[B, Hkv, S]`, or `[B, Hkv, T, S]` where queries see different keys; `[B, H, ...]` where heads that
            share keys do. Float32 for 16-bit inputs. A set without keys, or with NaN or Inf among them, is not
            weighted (its own row is 0, or leaves those keys out).
        """
        if num_queries is not None:
            _checks.whole("num_queries", num_queries, least=1)
        check_kv(k, v)
        if k.shape[:3].numel() == 0:
            rows = num_queries or (k.shape[2] if is_causal else 1)
            nothing = k.new_zeros((*k.shape[:2], k.shape[2]) if rows == 1 else (*k.shape[:2], rows, k.shape[2]))
            of_none = self._solve(k.new_zeros(0, 1, 1, 1, 1).float(), k.new_ones(1, 1, 1, 1, 1).bool(), False)[1]
            return RobustWeights(nothing, nothing, (of_none, of_none))
        # Points without coordinates are all the same point.
        k, v = (x if x.shape[-1] else x.new_zeros(*x.shape[:3], 1) for x in (k, v))
        call = keys_only(k, v, attn_mask, is_causal, num_queries)
        with torch.autocast(k.device.type, enabled=False):
            joint, marginal, info = self._weights(call, unit(call.k_BK1SD))
        joint, marginal = (w.flatten(1, 2).squeeze(2) for w in (joint, marginal))
        return RobustWeights(joint, marginal, info)

    def coefficients(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **owned: Any
    ) -> Tensor:
        """See `Method.coefficients`; the weights are those of the values v."""

        def compute(call: Call) -> Tensor:
            unit_k = unit(call.k_BK1SD)
            joint, marginal, _ = self._weights(call, unit_k)
            share, ratio = self._shares(call, unit_k, joint, marginal)
            return share * ratio

        return run(compute, q, k, v, attn_mask, is_causal, "reference")

    def _reference(self, call: Call) -> Tensor:
        # One k̂ for kernel and weights: computed twice, it makes Inductor (torch 2.13, CPU) return a wrong gradient.
        unit_k = unit(call.k_BK1SD)
        joint_BKgtS, marginal_BKgtS, _ = self._weights(call, unit_k)
        return self._combine(call, unit_k, joint_BKgtS, marginal_BKgtS)

    def _combine(self, call: Call, unit_k: Tensor, joint: Tensor, marginal: Tensor) -> Tensor:
        """Eq. 11 with given weights `[B, K, g, t, S]`."""
        share, ratio = self._shares(call, unit_k, joint, marginal)
        return share @ call.v_BK1SE * ratio

    def _shares(self, call: Call, unit_k: Tensor, joint: Tensor, marginal: Tensor) -> tuple[Tensor, Tensor]:
        """Each value's share of the joint density, and the quotient of the two densities."""
        logit_BKGTS, visible = self.logit(call, unit_k), call.visible_bkgtS
        share, top = masked_log_softmax(logit_BKGTS + log_weight(joint), visible)
        _, bottom = masked_log_softmax(logit_BKGTS + log_weight(marginal), visible)
        return share, _density_ratio(top, bottom)

    def _combine_shared(
        self, call: Call, unit_k: Tensor, joint: Tensor, marginal: Tensor, *, all_count: bool
    ) -> Tensor:
        """Eq. 11 with weights `[B, K, 1, 1, S]` that all queries share, streamed.

        Σ_j ωᴶ_j κ_ij v_j / Σ_j ωᴹ_j κ_ij = Σ_j softmax_j(q_i·k̂_j/σ² + log ωᴹ_j) (ωᴶ_j/ωᴹ_j) v_j: one SDPA, if
        `all_count`, that is if no visible key can have ωᴹ = 0 < ωᴶ. (Looking at the weights instead of at the loss
        would let one sample decide for its neighbours' last bits.)
        """
        if not all_count:
            return in_rows(lambda rows: self._combine(rows, unit_k, joint, marginal))(call)
        ratio = torch.where(marginal > 0, joint / torch.where(marginal > 0, marginal, 1), 0)
        weighted = replace(call, v_BK1SE=call.v_BK1SE * ratio.squeeze(-2)[..., None])
        return by_sdpa(weighted, self.logit_keys(call, unit_k), log_weight(marginal).squeeze(-2))

    def _weights(self, call: Call, keys: Tensor) -> tuple[Tensor, Tensor, tuple[Info, Info]]:
        variance, value_variance = self._weight_variances(call.width)
        values = call.v_BK1SE
        if self.weight_grad == "stop":
            keys, values = keys.detach(), values.detach()
        exponent = squared_distances(keys) / (2 * variance)
        value_exponent = squared_distances(values) / (2 * value_variance)
        marginal, marginal_info = self._solve(torch.exp(-exponent), call.visible_bkgtS, call.prefixes)
        joint, joint_info = self._solve(torch.exp(-exponent - value_exponent), call.visible_bkgtS, call.prefixes)
        return joint, marginal, (joint_info, marginal_info)

    def _weight_variances(self, width: int) -> tuple[float, float]:
        """σ² of the weights' Grams: of keys, and of values."""
        variance = self.variance(width) if self.weight_bandwidth is None else self.weight_bandwidth**2
        return variance, variance if self.value_bandwidth is None else self.value_bandwidth**2


def _density_ratio(top: Tensor, bottom: Tensor) -> Tensor:
    """exp(top − bottom), held within the dtype's range; 0 where nothing is visible (both −inf)."""
    bound = 88.0 if top.dtype == torch.float32 else 709.0
    seen = top > -torch.inf
    return torch.where(seen, torch.where(seen, top - bottom, 0).clamp(-bound, bound).exp(), 0)
