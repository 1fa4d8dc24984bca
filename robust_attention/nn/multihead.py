"""`torch.nn.MultiheadAttention` with another attention inside."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robust_attention.nn.attend import Attend, EvalDraw
from robust_attention.ops import Method
from robust_attention.ops.softmax import Softmax


class MultiheadAttention(nn.MultiheadAttention):
    """Constructor, parameters and `forward` of `torch.nn.MultiheadAttention`, and three keywords more.

    Args:
        method: any method of the registry (default: softmax, which is the module it replaces).
        max_len, eval_draw: see `Attend`.
    Departs: the returned weights are the coefficients A with output = A·values, whose rows need not sum to 1 (eq. 11).
        Masks must be boolean or additive with 0 and −inf; dropout of single weights is refused, because robust
        weights have no such entries.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        *args: Any,
        method: Method | None = None,
        max_len: int | None = None,
        eval_draw: EvalDraw = "fixed",
        **kwargs: Any,
    ) -> None:
        if dropout:
            raise ValueError(f"dropout must be 0, got {dropout}; put an nn.Dropout after the module")
        super().__init__(embed_dim, num_heads, dropout, *args, **kwargs)
        self.attend = Attend(
            Softmax() if method is None else method,
            kv_heads=num_heads,
            width=self.head_dim,
            max_len=max_len,
            eval_draw=eval_draw,
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """See `torch.nn.MultiheadAttention.forward`: masks are True where a query may *not* look."""
        if query.is_nested:
            raise ValueError("query must be a plain tensor, got a nested one; pass key_padding_mask instead")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(0 if self.batch_first else 1) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (self._heads(x) for x in self._project(query, key, value))
        mask = self._visible(attn_mask, key_padding_mask, q.shape[0])
        extra = 0
        if self.bias_k is not None and self.bias_v is not None:
            k = torch.cat((k, self._heads(self.bias_k.expand(k.shape[0], -1, -1))), 2)
            v = torch.cat((v, self._heads(self.bias_v.expand(v.shape[0], -1, -1))), 2)
            extra += 1
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
            extra += 1
        if mask is not None and extra:
            mask = F.pad(mask, (0, extra), value=True)
        # `is_causal` is a hint about the mask there; without a mask torch refuses it.
        if is_causal and attn_mask is None:
            raise ValueError("attn_mask must be given with is_causal=True, got None; pass the causal mask")
        out = self.attend(q, k, v, mask)
        merged: Tensor = self.out_proj(out.transpose(1, 2).flatten(2))
        weights = None
        if need_weights:
            owned = self.attend.tensors(q.shape[2], k.shape[2], k.device)
            weights = self.attend.method.coefficients(q, k, v, mask, **owned)
            weights = weights.mean(1) if average_attn_weights else weights
        if not self.batch_first:
            merged = merged.transpose(0, 1)
        if not batched:
            merged = merged.squeeze(0 if self.batch_first else 1)
            weights = None if weights is None else weights.squeeze(0)
        return merged, weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if self._qkv_same_embed_dim:
            w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        else:
            w_q, w_k, w_v = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        b_q, b_k, b_v = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return F.linear(query, w_q, b_q), F.linear(key, w_k, b_k), F.linear(value, w_v, b_v)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def _visible(self, attn_mask: Tensor | None, padding: Tensor | None, batch: int) -> Tensor | None:
        """torch's masks (True or −inf: do not look) as ours, `[B or 1, H or 1, T or 1, S]`."""
        parts = []
        if attn_mask is not None:
            seen = _may_look("attn_mask", attn_mask)
            parts.append(seen[None, None] if seen.dim() == 2 else seen.unflatten(0, (batch, self.num_heads)))
        if padding is not None:
            parts.append(_may_look("key_padding_mask", padding)[:, None, None])
        return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _may_look(name: str, mask: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        return ~mask
    if not torch.compiler.is_compiling() and not bool(((mask == 0) | (mask == -torch.inf)).all()):
        raise ValueError(
            f"{name} must be boolean, or additive with 0 and -inf only, got other numbers; "
            "biases on single pairs have no meaning for robust densities"
        )
    return mask == 0
