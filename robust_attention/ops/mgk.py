"""Mixture of Gaussian keys (MGK, Nguyen et al., 2022)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call, masked_softmax, run
from robust_attention.ops._method import Method, register
from robust_attention.typing import Impl


@register("mgk")
@dataclass(frozen=True)
class MGK(Method):
    """h_i = Σ_j Σ_r π_r κ_r(q_i, k_jr) v_j / Σ_j Σ_r π_r κ_r(q_i, k_jr): each position is a mixture of M Gaussian keys.

    κ_r(q, k) = exp(−‖q − k‖²/(2σ_r²)) and k_jr = k_j + shift_r; keys are not normalised. A shift that varies with j
    gives every component a projection of its own.
    """

    equation: ClassVar[str] = "MGK"
    summary: ClassVar[str] = "each key position is a mixture of Gaussian keys"
    formula: ClassVar[str] = "Σ_jr π_r κ_r(q_i,k_jr) v_j / Σ_jr π_r κ_r(q_i,k_jr)"

    components: int = 2
    """M."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.whole("components", self.components, least=1)

    def initial_tensors(
        self, kv_heads: int, width: int, queries: int, keys: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {
            "shift": 0.1 * torch.randn(kv_heads, self.components, 1, width, generator=generator),
            "log_prior": 0.1 * torch.randn(kv_heads, self.components, generator=generator),
            # Each component is wider than the one before it: σ_r² = √D (1 + 2r).
            "component_bandwidth": (width**0.5 * (1 + 2 * torch.arange(self.components))).sqrt().repeat(kv_heads, 1),
        }

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
        *,
        shift: Tensor | None = None,
        log_prior: Tensor | None = None,
        component_bandwidth: Tensor | None = None,
    ) -> Tensor:
        """See `Method.attend`.

        Args:
            shift: what each component adds to the keys; broadcasts to `[B, Hkv, M, S, D]`. Required.
            log_prior: log π up to a constant, `[Hkv, M]` or `[M]`; None means equal.
            component_bandwidth: σ_r, `[Hkv, M]` or `[M]`; None means σ_r² = √D.
        """

        def compute(call: Call) -> Tensor:
            batch, kv_heads, _, keys, width = call.k_BK1SD.shape
            wanted = (batch, kv_heads, self.components, keys, width)
            if shift is not None:
                _checks.tensor("shift", shift)
            if shift is None or not _broadcasts(shift, wanted):
                came = None if shift is None else list(shift.shape)
                raise ValueError(
                    f"shift must broadcast to [B, Hkv, M, S, D] = {list(wanted)}, got {came}; "
                    f"pass for example torch.zeros{(kv_heads, self.components, 1, width)}"
                )
            pair = (kv_heads, self.components)
            log_pi = _component("log_prior", log_prior, pair, call.q_BKGTD, 0.0)
            sigma = _component("component_bandwidth", component_bandwidth, pair, call.q_BKGTD, width**0.25)
            k_BKMSD = call.k_BK1SD + shift.to(call.q_BKGTD)
            # ‖q‖² is large and the same for every key: only its part that differs between components is added.
            precision = sigma.square().reciprocal()
            excess = precision - precision.amin(-1, keepdim=True)
            q_size_BKGT1 = call.q_BKGTD.square().sum(-1, keepdim=True)
            # One component after the other, joined along the keys: [B, K, G, T, M·S].
            parts = []
            for r in range(self.components):
                k_BK1SD = k_BKMSD[:, :, r, None]
                inner = call.q_BKGTD @ k_BK1SD.mT - k_BK1SD.square().sum(-1)[..., None, :] / 2
                own, more = (x[:, r, None, None, None] for x in (precision, excess))
                parts.append(log_pi.log_softmax(-1)[:, r, None, None, None] + own * inner - more * q_size_BKGT1 / 2)
            visible = call.visible_bkgtS.repeat(1, 1, 1, 1, self.components)
            share = masked_softmax(torch.cat(parts, -1), visible).unflatten(-1, (self.components, keys)).sum(-2)
            return share @ call.v_BK1SE

        return run(compute, q, k, v, attn_mask, is_causal, impl)


def _broadcasts(x: Tensor, shape: tuple[int, ...]) -> bool:
    return x.dim() <= len(shape) and all(a in (1, b) for a, b in zip(reversed(x.shape), reversed(shape), strict=False))


def _component(name: str, x: Tensor | None, pair: tuple[int, int], like: Tensor, default: float) -> Tensor:
    if x is None:
        return like.new_full(pair, default)
    if not _broadcasts(x, pair):
        raise ValueError(f"{name} must be [Hkv, M] = {list(pair)} or [M], got {list(x.shape)}; or leave it out")
    return x.to(like).expand(pair)
