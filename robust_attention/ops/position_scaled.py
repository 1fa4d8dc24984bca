"""Position-aware attention scaling (RVT, Mao et al., 2022), the one part of RVT that the paper compares with."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call, masked_softmax, run
from robust_attention.ops._method import Method, register
from robust_attention.typing import Impl


@register("position_scaled")
@dataclass(frozen=True)
class PositionScaled(Method):
    """h_i = Σ_j softmax_j(sigmoid(W_ij) q_i·k_j/√D) v_j with a learnt table W for each head."""

    equation: ClassVar[str] = "RVT"
    summary: ClassVar[str] = "RVT: a learnt table scales each pair's logit"
    formula: ClassVar[str] = "Σ_j softmax_j(sigmoid(W_ij) q_i·k_j/√D) v_j"
    key_tensors: ClassVar[tuple[str, ...]] = ("table",)

    def initial_tensors(
        self, kv_heads: int, width: int, queries: int, keys: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        return {"table": torch.randn(1, queries, keys, generator=generator)}

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
        *,
        table: Tensor | None = None,
    ) -> Tensor:
        """See `Method.attend`. `table`: W, `[H, T, S]` or `[1, T, S]`; required, because it is learnt."""

        def compute(call: Call) -> Tensor:
            kv_heads, groups, queries = call.q_BKGTD.shape[1:4]
            wanted = (kv_heads * groups, queries, call.k_BK1SD.shape[-2])
            if table is not None:
                _checks.tensor("table", table)
            if (
                table is None
                or table.dim() != 3
                or table.shape[0] not in (1, wanted[0])
                or table.shape[1:] != wanted[1:]
            ):
                came = None if table is None else list(table.shape)
                raise ValueError(
                    f"table must be [H, T, S] = {list(wanted)} (or 1 for H), got {came}; "
                    f"pass table=torch.zeros{wanted} to start from half of every logit"
                )
            scale = torch.sigmoid(table.to(call.q_BKGTD))
            scale = scale[:, None] if scale.shape[0] == 1 else scale.unflatten(0, (kv_heads, groups))
            logit_BKGTS = (call.q_BKGTD / call.width**0.5) @ call.k_BK1SD.mT * scale
            return masked_softmax(logit_BKGTS, call.visible_bkgtS) @ call.v_BK1SE

        return run(compute, q, k, v, attn_mask, is_causal, impl)
