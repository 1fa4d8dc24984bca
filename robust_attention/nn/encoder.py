"""`torch.nn.TransformerEncoderLayer` with another attention inside."""

from typing import Any

import torch
from torch import Tensor, nn

from robust_attention.nn.attend import EvalDraw
from robust_attention.nn.multihead import MultiheadAttention
from robust_attention.ops import Method


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """Constructor, parameters and `forward` of `torch.nn.TransformerEncoderLayer`, with `method`, `max_len` and
    `eval_draw` as in `MultiheadAttention`.

    Departs: `dropout` acts on the two residual branches and in the feed-forward part, not on attention weights.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        *args: Any,
        method: Method | None = None,
        max_len: int | None = None,
        eval_draw: EvalDraw = "fixed",
        **kwargs: Any,
    ) -> None:
        super().__init__(d_model, nhead, *args, **kwargs)
        old = self.self_attn
        self.self_attn = MultiheadAttention(
            d_model,
            nhead,
            bias=old.in_proj_bias is not None,
            batch_first=old.batch_first,
            device=old.in_proj_weight.device,
            dtype=old.in_proj_weight.dtype,
            method=method,
            max_len=max_len,
            eval_draw=eval_draw,
        )
        # torch's fused path for evaluation computes softmax attention from the weights, past `self_attn.forward`.
        # This mark keeps it away, from the layer and from a TransformerEncoder around it.
        self.activation_relu_or_gelu = 0

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        if is_causal and attn_mask is None:
            size = x.shape[1 if self.self_attn.batch_first else 0] if x.dim() == 3 else x.shape[0]
            attn_mask = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        out = self.self_attn(x, x, x, key_padding_mask=key_padding_mask, need_weights=False, attn_mask=attn_mask)[0]
        dropped: Tensor = self.dropout1(out)
        return dropped
