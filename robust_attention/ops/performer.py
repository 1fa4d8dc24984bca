"""Performer (Choromanski et al., 2021): softmax attention through positive random features, in linear time."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call, run
from robust_attention.ops._method import Method, register
from robust_attention.typing import Impl

_CHUNK = 32  # queries at a time where visible sets differ: [chunk, keys, features] is the largest tensor


@register("performer")
@dataclass(frozen=True)
class Performer(Method):
    """h_i = Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j),  φ(x) = exp(Ωx' − ‖x'‖²/2)/√M,  x' = x/D^¼.

    Cost: O(N·M·E) where all queries see the same keys, and where they see prefixes (running sums); any other mask is
    quadratic, because no running sum fits it.
    Numerics: every feature of the keys is scaled by its own largest visible value and the query takes the scale back,
        so no product underflows and no future key touches a past output, not even in its last bit.
    """

    equation: ClassVar[str] = "Performer"
    summary: ClassVar[str] = "positive random features, linear in the number of keys"
    formula: ClassVar[str] = "Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j)"

    constant_tensors: ClassVar[tuple[str, ...]] = ("directions",)

    features: int = 128
    """M, for modules that make the features; `attend` takes any number."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.whole("features", self.features, least=1)

    def initial_tensors(
        self, kv_heads: int, width: int, queries: int, keys: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {"directions": orthogonal_directions(self.features, width, generator)}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
        *,
        directions: Tensor | None = None,
    ) -> Tensor:
        """See `Method.attend`. `directions`: Ω, `[M, D]`; required, because it is drawn once for a model."""

        def compute(call: Call) -> Tensor:
            if directions is not None:
                _checks.tensor("directions", directions)
            if directions is None or directions.dim() != 2 or directions.shape[1] != call.width or not len(directions):
                came = None if directions is None else list(directions.shape)
                raise ValueError(
                    f"directions must be [M, D] = [any, {call.width}], got {came}; "
                    f"pass orthogonal_directions(128, {call.width}, generator)"
                )
            omega = directions.to(call.q_BKGTD)
            q = call.q_BKGTD / call.width**0.25
            k = call.k_BK1SD / call.width**0.25
            # ‖q'‖²/2 and √M are the same above and below the line.
            log_q = q @ omega.mT
            log_k = k @ omega.mT - k.square().sum(-1, keepdim=True) / 2
            v_one = torch.cat((call.v_BK1SE, torch.ones_like(call.v_BK1SE[..., :1])), -1)
            # Asked first: looking at `visible` would make the T×S mask that running sums do without.
            if call.causal and call.prefixes and call.q_BKGTD.shape[-2] > 1:
                return _causal(log_q, log_k, v_one)
            if call.visible_bkgtS.shape[-2] == 1:
                return _ratio(*_absorb(log_k, v_one, call.visible_bkgtS.mT), log_q)
            return torch.cat(
                [
                    _pairwise(part, log_k, v_one, visible)
                    for part, visible in zip(log_q.split(_CHUNK, -2), call.visible_bkgtS.split(_CHUNK, -2), strict=True)
                ],
                -2,
            )

        return run(compute, q, k, v, attn_mask, is_causal, impl)


def orthogonal_directions(features: int, width: int, generator: torch.Generator) -> Tensor:
    """Gaussian directions `[features, width]`, orthogonal within each block of `width` (lower variance)."""
    blocks = []
    for start in range(0, features, width):
        basis, upper = torch.linalg.qr(torch.randn(width, width, generator=generator))
        # A fixed sign of R's diagonal makes the basis uniform over rotations.
        blocks.append((basis * upper.diagonal().sign()).mT[: features - start])
    length = torch.randn(features, width, generator=generator).norm(dim=-1, keepdim=True)
    return torch.cat(blocks) * length


def _finite(x: Tensor) -> Tensor:
    return torch.where(x.isfinite(), x, 0)


def _absorb(log_k: Tensor, v_one: Tensor, visible: Tensor | bool = True) -> tuple[Tensor, Tensor]:
    """(scale [..., 1, M], sums [..., M, E+1]) of keys `[..., S, M]`: Σ_j exp(log_k − scale) [v_j, 1]."""
    held = torch.where(torch.as_tensor(visible, device=log_k.device), log_k, -torch.inf)
    scale = held.detach().amax(-2, keepdim=True)
    return scale, torch.exp(held - _finite(scale)).mT @ v_one


def _ratio(scale: Tensor, sums: Tensor, log_q: Tensor) -> Tensor:
    level = log_q + scale
    share = torch.exp(level - _finite(level.detach().amax(-1, keepdim=True)))
    return _divide(share @ sums)


def _divide(sums: Tensor) -> Tensor:
    below = sums[..., -1:]
    return sums[..., :-1] / torch.where(below == 0, 1, below)


def _pairwise(log_q: Tensor, log_k: Tensor, v_one: Tensor, visible: Tensor) -> Tensor:
    """Any visible sets `[..., t, S]`, each feature scaled by its largest visible value query by query."""
    held = torch.where(visible[..., None], log_k[..., None, :, :], -torch.inf)
    scale = held.detach().amax(-2)
    level = log_q + scale
    share = torch.exp(level - _finite(level.detach().amax(-1, keepdim=True)))
    pair = (share[..., None, :] * torch.exp(held - _finite(scale)[..., None, :])).sum(-1)
    return _divide(pair @ v_one)


def _causal(log_q: Tensor, log_k: Tensor, v_one: Tensor) -> Tensor:
    """Prefixes: running sums over chunks of keys, rescaled as their scale grows, and pairs within a chunk."""
    queries, keys = log_q.shape[-2], log_k.shape[-2]
    shift, absorbed = keys - queries, 0
    scale = torch.full_like(log_k[..., :1, :], -torch.inf)
    sums = torch.zeros_like(log_k[..., :1, :].mT @ v_one[..., :1, :])
    out = []
    for start in range(0, queries, _CHUNK):
        stop = min(start + _CHUNK, queries)
        first, last = max(0, start + shift), max(0, stop + shift)
        if first > absorbed:
            more_scale, more = _absorb(log_k[..., absorbed:first, :], v_one[..., absorbed:first, :])
            grown = torch.maximum(scale, more_scale)
            sums = sums * torch.exp(scale - grown).mT + more * torch.exp(more_scale - grown).mT
            scale, absorbed = grown, first
        near_k, near_v = log_k[..., first:last, :], v_one[..., first:last, :]
        position = torch.arange(start, stop, device=log_q.device)[:, None] + shift
        visible = torch.arange(first, last, device=log_q.device)[None, :] <= position
        held = torch.where(visible[..., None], near_k[..., None, :, :], -torch.inf)
        own = (
            torch.maximum(scale, held.detach().amax(-2)) if last > first else scale.expand_as(log_q[..., start:stop, :])
        )
        level = log_q[..., start:stop, :] + own
        share = torch.exp(level - _finite(level.detach().amax(-1, keepdim=True)))
        far = (share * torch.exp(scale - _finite(own))) @ sums
        pair = (share[..., None, :] * torch.exp(held - _finite(own)[..., None, :])).sum(-1)
        out.append(_divide(far + pair @ near_v))
    return torch.cat(out, -2)
