"""What every call of a method shares: checks, grouped heads, visible sets, isolation of hidden keys, precision."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.typing import Impl


@dataclass(frozen=True)
class Call:
    """One call's tensors, cleaned: float32 or float64, heads split as H = K·G, hidden keys set to 0."""

    q_BKGTD: Tensor
    k_BK1SD: Tensor
    v_BK1SE: Tensor
    visible_bkgtS: Tensor
    """True where a query may look at a key. A dimension is 1 where the visible sets do not vary along it."""
    prefixes: bool
    """The visible sets are prefixes of the keys, the same for every sample and head."""

    @property
    def width(self) -> int:
        return self.k_BK1SD.shape[-1]


def run(
    compute: Callable[[Call], Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    impl: Impl,
) -> Tensor:
    """Check the arguments, clean the tensors, `compute` `[B, K, G, T, E]`, give it back as `[B, H, T, E]`.

    A query that sees no key gets 0. A query that sees a key or value with NaN or Inf gets NaN; every other query
    computes as if that key were not there, so nothing leaks through 0·NaN. Output beyond the range of the inputs' dtype
    saturates at its largest number.
    """
    _checks.one_of("impl", impl, get_args(Impl))
    _check_qkv(q, k, v)
    batch, heads, queries, _ = q.shape
    shape = (batch, heads, queries, v.shape[-1])
    check_mask(attn_mask, (batch, heads, queries, k.shape[2]))
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        # Empty slices tie the zeros to the inputs, so that backward works and gives zeros.
        return q.new_zeros(shape) + (q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum())
    with torch.autocast(q.device.type, enabled=False):
        call, poisoned_bkgt1 = _clean(q, k, v, attn_mask, is_causal)
        out = compute(call)
        out = torch.where(poisoned_bkgt1, torch.nan, out).reshape(shape)
        limit = torch.finfo(q.dtype).max
        return out.clamp(-limit, limit).to(q.dtype)


def keys_only(k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, num_queries: int | None) -> Call:
    """The call that the robust weights of (k, v) belong to, where there are no queries: T from the mask or given."""
    _check_kv(k, v)
    batch, kv_heads, keys, width = k.shape
    heads, queries = kv_heads, num_queries or 0
    if attn_mask is not None:
        _check_bool(attn_mask)
        sizes = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
        heads = sizes[1] if sizes[1] > 1 else kv_heads
        queries = sizes[2] if sizes[2] > 1 and num_queries is None else queries
        if kv_heads == 0 or heads % kv_heads:
            raise ValueError(
                f"attn_mask must have 1 head or a multiple of the {kv_heads} heads of k, got {list(attn_mask.shape)}; "
                "pass a mask [B, 1, T, S] where all heads share it"
            )
    queries = queries or (keys if is_causal else 1)
    check_mask(attn_mask, (batch, heads, queries, keys))
    q = k.new_zeros(batch, heads, queries, width)
    call, _ = _clean(q, k, v, attn_mask, is_causal)
    return call


def _clean(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Call, Tensor]:
    """The call, and where a query sees a key or value that is not finite."""
    kv_heads = k.shape[1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    q_BKGTD = q.to(wide).unflatten(1, (kv_heads, -1))
    visible, prefixes = visible_sets(
        q.shape[1] // kv_heads, kv_heads, q.shape[2], k.shape[2], attn_mask, is_causal, k.device
    )
    bad_BK1S = (~(k.isfinite().all(-1) & v.isfinite().all(-1)))[:, :, None]
    poisoned = (visible & bad_BK1S[..., None, :]).any(-1, keepdim=True)
    keep = (visible.any(-2).any(-2, keepdim=True) & ~bad_BK1S)[..., None]
    clean_k = torch.where(keep, k.to(wide)[:, :, None], 0)
    clean_v = torch.where(keep, v.to(wide)[:, :, None], 0)
    return Call(q_BKGTD, clean_k, clean_v, visible, prefixes), poisoned


def visible_sets(
    groups: int,
    kv_heads: int,
    queries: int,
    keys: int,
    attn_mask: Tensor | None,
    is_causal: bool,
    device: torch.device,
) -> tuple[Tensor, bool]:
    """Visible sets `[b, k, g, t, S]`, as small as the mask's shape and strides allow, and if they are prefixes."""
    visible = torch.ones(1, 1, 1, 1, keys, dtype=torch.bool, device=device)
    if attn_mask is not None:
        mask = attn_mask.to(device).reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
        for dim in range(3):  # an expanded dimension repeats one mask: look at it once
            if mask.shape[dim] > 1 and mask.stride(dim) == 0:
                mask = mask.narrow(dim, 0, 1)
        mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (kv_heads, groups))
        visible = mask.expand(*mask.shape[:-1], keys)
    if is_causal and queries > 1:
        causal = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
        visible = visible & causal
    return visible, attn_mask is None


def _check_kv(k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [B, Hkv, S, width], got {list(x.shape)}; "
                "split the heads before the call"
            )
        if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
            raise ValueError(
                f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}; pass {name}.float()"
            )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must agree in [B, Hkv, S], got k {list(k.shape)} and v {list(v.shape)}; "
            "pass one value for each key"
        )
    if k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"k and v must share dtype and device, got {k.dtype} on {k.device} and {v.dtype} on {v.device}; "
            "pass v.to(k)"
        )


def _check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    _check_kv(k, v)
    if q.dim() != 4:
        raise ValueError(f"q must have 4 dimensions [B, H, T, D], got {list(q.shape)}; split the heads before the call")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must agree in batch and width, got q {list(q.shape)} and k {list(k.shape)}; "
            "project both to one head width"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"the heads of q must be a multiple of those of k, got {q.shape[1]} and {k.shape[1]}; "
            "repeat or drop key-value heads"
        )
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError(
            f"q and k must share dtype and device, got {q.dtype} on {q.device} and {k.dtype} on {k.device}; "
            "pass k.to(q) and v.to(q)"
        )


def _check_bool(attn_mask: Tensor) -> None:
    if attn_mask.dtype != torch.bool:
        raise ValueError(
            f"attn_mask must be boolean with True where a query may look, got {attn_mask.dtype}; "
            "pass attn_mask > -1 for an additive mask of 0 and -inf"
        )
    if attn_mask.dim() > 4:
        raise ValueError(
            f"attn_mask must have at most 4 dimensions [B, H, T, S], got {list(attn_mask.shape)}; drop the others"
        )


def check_mask(attn_mask: Tensor | None, shape: tuple[int, int, int, int]) -> None:
    if attn_mask is None:
        return
    _check_bool(attn_mask)
    sizes = (1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape)
    if any(size not in (1, whole) for size, whole in zip(sizes, shape, strict=True)):
        hint = (
            "pass attn_mask[:, None, None, :] for padding [B, S]"
            if attn_mask.dim() == 2
            else "give it dimensions of 1 where it does not vary"
        )
        raise ValueError(
            f"attn_mask must broadcast to [B, H, T, S] = {list(shape)}, got {list(attn_mask.shape)}; {hint}"
        )


def masked_softmax(logit: Tensor, visible: Tensor) -> Tensor:
    """Softmax over the visible keys; rows without one are 0. Logits of −inf have weight 0."""
    return masked_log_softmax(logit, visible)[0]


def masked_log_softmax(logit: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """(softmax, log of the sum of exponentials [..., 1]) over the visible keys; rows without one: (0, −inf)."""
    logit = torch.where(visible, logit, -torch.inf)
    top = logit.detach().amax(-1, keepdim=True)
    top = torch.where(top.isfinite(), top, 0)
    exponential = torch.exp(logit - top)
    total = exponential.sum(-1, keepdim=True)
    positive = total > 0
    safe = torch.where(positive, total, 1)
    return exponential / safe, torch.where(positive, top + safe.log(), -torch.inf)


def log_weight(weight: Tensor) -> Tensor:
    """log ω with −inf, and no gradient, where ω = 0: a weight leaves 0 only where its own gradient is 0 too."""
    positive = weight > 0
    return torch.where(positive, torch.where(positive, weight, 1).log(), -torch.inf)
