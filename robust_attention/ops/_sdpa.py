"""Attention by PyTorch's own scaled dot product: what is streamed on a CPU."""

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_attention.ops._call import Call, in_rows


def by_sdpa(call: Call, logit_k_BK1SD: Tensor, log_bias_BK1S: Tensor | None = None) -> Tensor:
    """Σ_j softmax_j(q_i·k_j + b_j) v_j over the visible keys, `[B, K, G, T, E]`; 0 where there are none.

    Args:
        logit_k_BK1SD: keys whose product with a query is the logit (any scale is in them).
        log_bias_BK1S: b, one number a key.
    Gradients of queries that do not see a key are exact unless its value is beyond 1e38, where SDPA multiplies infinity
    by their share of 0.
    Numerics: hidden keys are 0 in a `Call`, so SDPA's habit of multiplying what it hides by 0 is harmless.
    Memory: O(T + S) where all queries see the same keys or their prefixes; elsewhere a chunk of the mask at a time.
    """
    aligned = call.causal and call.prefixes and call.offset == 0
    if log_bias_BK1S is None and (aligned or (call.shared and call.mask_bkgtS is None)):
        return _attend(call, logit_k_BK1SD, None)
    if call.shared:
        return _masked(call, logit_k_BK1SD, log_bias_BK1S)

    def part(rows: Call) -> Tensor:
        keys = rows.k_BK1SD.shape[-2]
        bias = None if log_bias_BK1S is None else log_bias_BK1S[..., :keys]
        return _masked(rows, logit_k_BK1SD[..., :keys, :], bias)

    return in_rows(part)(call)


def _masked(call: Call, logit_k: Tensor, log_bias: Tensor | None) -> Tensor:
    visible = call.visible_bkgtS
    sees = visible.any(-1, keepdim=True)
    # A row that sees nothing would be 0/0: it looks at everything instead, and is zeroed afterwards.
    bias = torch.where(visible | ~sees, 0.0 if log_bias is None else log_bias[..., None, :], -torch.inf).to(logit_k)
    return torch.where(sees, _attend(call, logit_k, bias), 0)


def _attend(call: Call, logit_k: Tensor, bias_bkgtS: Tensor | None) -> Tensor:
    batch, kv_heads, groups, queries, width = call.q_BKGTD.shape
    keys, value_width = call.v_BK1SE.shape[-2:]
    # Fused kernels on the CPU want one width for all three.
    wide = max(width, value_width)

    def heads(x: Tensor) -> Tensor:
        return F.pad(x.expand(batch, kv_heads, groups, *x.shape[-2:]).flatten(1, 2), (0, wide - x.shape[-1]))

    bias = None
    if bias_bkgtS is not None:
        # Queries that share a bias keep sharing it: heads are joined before the queries are expanded.
        bias = bias_bkgtS.expand(batch, kv_heads, groups, *bias_bkgtS.shape[-2:]).flatten(1, 2)
        bias = bias.expand(batch, kv_heads * groups, queries, keys)
    out = F.scaled_dot_product_attention(
        heads(call.q_BKGTD),
        heads(logit_k),
        heads(call.v_BK1SE),
        bias,
        is_causal=call.causal and bias is None,
        scale=1.0,
    )
    return out[..., :value_width].unflatten(1, (kv_heads, groups))
