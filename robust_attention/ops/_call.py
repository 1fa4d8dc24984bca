"""What every call of a method shares: checks, grouped heads, visible sets, isolation of hidden keys, precision."""

import functools
import importlib.util
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.typing import Impl


def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except (ImportError, ValueError):  # blocked, or half there
        return False


HAS_TRITON = _has_triton()
STREAM_FROM = 2**18
"""Queries times keys from which "auto" streams what it can: below, the plain formula is as quick, and then a call with
gradients and one without take the same way, to the last bit."""
_CHUNK_ENTRIES = 2**20  # logits of one chunk of queries: 4 MiB in float32, about what a core's cache holds
_INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_logger = logging.getLogger("robust_attention")


class CannotStream(Exception):
    """Raised by a streamed computation that does not cover this call; the message says why."""


@dataclass(frozen=True)
class Call:
    """One call's tensors, cleaned: float32 or float64, heads split as H = K·G, hidden keys set to 0."""

    q_BKGTD: Tensor
    k_BK1SD: Tensor
    v_BK1SE: Tensor
    mask_bkgtS: Tensor | None
    """The mask that was passed in; a dimension is 1 where it does not vary."""
    causal: bool
    offset: int
    """Where causal, query t sees the keys up to t + offset."""

    @property
    def width(self) -> int:
        return self.k_BK1SD.shape[-1]

    @property
    def requires_grad(self) -> bool:
        return self.q_BKGTD.requires_grad or self.k_BK1SD.requires_grad or self.v_BK1SE.requires_grad

    @property
    def prefixes(self) -> bool:
        """The visible sets are prefixes of the keys, the same for every sample and head."""
        return self.mask_bkgtS is None

    @property
    def shared(self) -> bool:
        """Every query of a head sees the same keys."""
        return not self.causal and (self.mask_bkgtS is None or self.mask_bkgtS.shape[-2] == 1)

    @property
    def visible_bkgtS(self) -> Tensor:
        """True where a query may look at a key; a dimension is 1 where the visible sets do not vary along it."""
        return self.visible(0, self.q_BKGTD.shape[-2])

    def visible(self, start: int, stop: int) -> Tensor:
        """The visible sets of the queries start … stop."""
        keys, device = self.k_BK1SD.shape[-2], self.k_BK1SD.device
        mask = self.mask_bkgtS
        if mask is None:
            visible = torch.ones(1, 1, 1, 1, keys, dtype=torch.bool, device=device)
        else:
            visible = mask if mask.shape[-2] == 1 else mask[..., start:stop, :]
        if self.causal:
            last = torch.arange(start, stop, device=device) + self.offset
            visible = visible & (torch.arange(keys, device=device) <= last[:, None])
        return visible

    def rows(self, start: int, stop: int) -> "Call":
        """The same call for the queries start … stop alone, without the keys that lie in the future of them all."""
        keys = self.k_BK1SD.shape[-2]
        if self.causal:
            keys = min(keys, max(1, stop + self.offset))
        mask = self.mask_bkgtS
        if mask is not None:
            mask = (mask if mask.shape[-2] == 1 else mask[..., start:stop, :])[..., :keys]
        return Call(
            self.q_BKGTD[..., start:stop, :],
            self.k_BK1SD[..., :keys, :],
            self.v_BK1SE[..., :keys, :],
            mask,
            self.causal,
            self.offset + start,
        )

    def row_chunks(self, entries: int) -> list[tuple[int, int]]:
        """Ranges of queries whose logits hold about `entries` numbers each."""
        batch, kv_heads, groups, queries, _ = self.q_BKGTD.shape
        step = max(16, entries // max(1, batch * kv_heads * groups * self.k_BK1SD.shape[-2]))
        return [(start, min(queries, start + step)) for start in range(0, queries, step)]


Compute = Callable[[Call], Tensor]
"""From a cleaned call to its output `[B, K, G, T, E]`."""
Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, bool], Tensor]
"""From q, k, v as they came, a padding mask `[B, S]` or None, and `is_causal` to the output `[B, H, T, E]`."""


def run(
    compute: Compute,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    is_causal: bool,
    impl: Impl,
    *,
    streamed: Compute | None = None,
    streamed_trains: bool = False,
    triton: Kernel | str = "this method has no kernel",
) -> Tensor:
    """Check the arguments, choose an implementation, clean the tensors for it, give its output as `[B, H, T, E]`.

    Args:
        compute: the reference.
        streamed: the same without a tensor of the size T·S; `streamed_trains` says that gradients flow through it.
        triton: the fused kernel, or why these settings have none.
    A query that sees no key gets 0. A query that sees a key or value with NaN or Inf gets NaN; every other query
    computes as if that key were not there, so nothing leaks through 0·NaN. Output beyond the range of the inputs' dtype
    saturates at its largest number.
    """
    _checks.one_of("impl", impl, get_args(Impl))
    if not isinstance(is_causal, bool):
        raise ValueError(f"is_causal must be True or False, got {type(is_causal).__name__}; a mask goes into attn_mask")
    _check_qkv(q, k, v)
    batch, heads, queries, _ = q.shape
    shape = (batch, heads, queries, v.shape[-1])
    check_mask(attn_mask, (batch, heads, queries, k.shape[2]))
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        # Empty slices tie the zeros to the inputs, so that backward works and gives zeros.
        return q.new_zeros(shape) + (q[..., :0].sum() + k[..., :0].sum() + v[..., :0].sum())
    if impl in ("auto", "triton"):
        pad, refusal = _kernel_arguments(q, k, v, attn_mask, triton)
        if refusal is None:
            _say("triton", triton, q)
            assert not isinstance(triton, str)
            with torch.autocast(q.device.type, enabled=False):
                return triton(q, k, v, pad, is_causal)
        if impl == "triton":
            raise ValueError(f'impl="triton" must be able to run this call, but {refusal}; pass impl="auto"')
    with torch.autocast(q.device.type, enabled=False):
        call, poisoned_bkgt1 = _clean(q, k, v, attn_mask, is_causal)
        out = _stream(streamed, streamed_trains, call, impl) if impl in ("auto", "streamed") else None
        if out is None:
            out = compute(call)
        out = torch.where(poisoned_bkgt1, torch.nan, out).reshape(batch, heads, queries, -1)
        limit = torch.finfo(q.dtype).max
        return out.clamp(-limit, limit).to(q.dtype)


def _stream(streamed: Compute | None, trains: bool, call: Call, impl: Impl) -> Tensor | None:
    """The streamed output, or None where "auto" has to take the reference."""
    refusal = None
    if impl == "auto" and torch.compiler.is_compiling():
        return None  # streaming looks at the data; what is compiled keeps one graph
    if impl == "auto" and call.q_BKGTD.shape[-2] * call.k_BK1SD.shape[-2] < STREAM_FROM:
        return None
    if streamed is None:
        refusal = "this method is not streamed"
    elif not trains and torch.is_grad_enabled() and call.requires_grad:
        refusal = "it has no gradient and the inputs require one (wrap the call in torch.no_grad())"
    else:
        try:
            out = streamed(call)
            _say("streamed", streamed, call.q_BKGTD)
            return out
        except CannotStream as error:
            refusal = str(error)
    if impl == "streamed":
        raise ValueError(f'impl="streamed" must be able to run this call, but {refusal}; pass impl="auto"')
    return None


def _kernel_arguments(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, triton: Kernel | str
) -> tuple[Tensor | None, str | None]:
    """The padding mask `[B, S]` of a call that a kernel can run, and why it cannot, or None."""
    if isinstance(triton, str):
        return None, triton
    if not q.is_cuda and not _INTERPRETED:  # before anything of Triton is imported
        return None, f"Triton kernels need a CUDA device, got {q.device}"
    if not HAS_TRITON:
        return None, "Triton is not installed (pip install triton)"
    from robust_attention._triton.common import refuse

    refusal = refuse(q, k, v)
    if refusal is not None or attn_mask is None:
        return None, refusal
    mask = attn_mask.reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    for dim in (1, 2):
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    if mask.shape[1] != 1 or mask.shape[2] != 1:
        return None, f"kernels take masks of keys alone, [B, 1, 1, S], got {list(attn_mask.shape)}"
    return mask[:, 0, 0].to(q.device).expand(q.shape[0], k.shape[2]), None


_said: set[tuple[str, str, str]] = set()


def _say(name: str, function: object, q: Tensor) -> None:
    """Log once which implementation runs for which method on which kind of device."""
    if torch.compiler.is_compiling():
        return
    method = getattr(function, "__qualname__", "").split(".")[0]
    key = (name, method, q.device.type)
    if key not in _said:
        _said.add(key)
        _logger.info("%s runs as impl=%r on %s", method, name, q.device.type)


def keys_only(k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, num_queries: int | None) -> Call:
    """The call that the robust weights of (k, v) belong to, where there are no queries: T from the mask or given."""
    check_kv(k, v)
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
    kv_heads, queries, keys = k.shape[1], q.shape[2], k.shape[2]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    call = Call(
        q.to(wide).unflatten(1, (kv_heads, -1)),
        k.to(wide)[:, :, None],
        v.to(wide)[:, :, None],
        _small_mask(attn_mask, kv_heads, keys, k.device),
        is_causal and queries > 1,
        keys - queries,
    )
    # NaN fails every comparison.
    bad_BK1S = (~((k.abs().amax(-1) < torch.inf) & (v.abs().amax(-1) < torch.inf)))[:, :, None]
    seen, poisoned = _seen_and_poisoned(call, bad_BK1S)
    keep = (seen & ~bad_BK1S)[..., None]
    clean_k, clean_v = torch.where(keep, call.k_BK1SD, 0), torch.where(keep, call.v_BK1SE, 0)
    return replace(call, k_BK1SD=clean_k, v_BK1SE=clean_v), poisoned


def _seen_and_poisoned(call: Call, bad_BK1S: Tensor) -> tuple[Tensor, Tensor]:
    """Which keys any query sees `[b, k, 1, S]`, and which queries see a bad one `[b, k, g, t, 1]`.

    Without a mask the first bad key decides; with one, chunks of queries are looked at: nothing of size T·S is made.
    """
    queries, keys = call.q_BKGTD.shape[-2], call.k_BK1SD.shape[-2]
    position = torch.arange(keys, device=bad_BK1S.device)
    if call.mask_bkgtS is None:
        first_bad = torch.where(bad_BK1S, position, keys).amin(-1)[..., None, None]
        last = torch.arange(queries, device=bad_BK1S.device)[:, None] + call.offset if call.causal else keys - 1
        return torch.ones_like(bad_BK1S[:1, :1]), first_bad <= last
    seen = torch.zeros_like(bad_BK1S[:1, :1])
    poisoned = []
    for start, stop in call.row_chunks(_CHUNK_ENTRIES):
        visible = call.visible(start, stop)
        seen = seen | visible.any(-2).any(-2, keepdim=True)
        poisoned.append((visible & bad_BK1S[..., None, :]).any(-1, keepdim=True))
        if call.shared:
            break
    return seen, torch.cat(poisoned, -2)


def _small_mask(attn_mask: Tensor | None, kv_heads: int, keys: int, device: torch.device) -> Tensor | None:
    """The mask as `[b, k, g, t, S]`, as small as its shape and strides allow."""
    if attn_mask is None:
        return None
    mask = attn_mask.to(device).reshape((1,) * (4 - attn_mask.dim()) + tuple(attn_mask.shape))
    for dim in range(3):  # an expanded dimension repeats one mask: look at it once
        if mask.shape[dim] > 1 and mask.stride(dim) == 0:
            mask = mask.narrow(dim, 0, 1)
    mask = mask.unsqueeze(2) if mask.shape[1] == 1 else mask.unflatten(1, (kv_heads, -1))
    return mask.expand(*mask.shape[:-1], keys)


def in_rows(compute: Compute) -> Compute:
    """Stream a computation whose queries do not need each other: chunks of queries, one after the other."""

    @functools.wraps(compute)
    def streamed(call: Call) -> Tensor:
        return torch.cat([compute(call.rows(*part)) for part in call.row_chunks(_CHUNK_ENTRIES)], -2)

    return streamed


def check_kv(k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        _checks.tensor(name, x)
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
    _checks.tensor("q", q)
    check_kv(k, v)
    if q.dim() != 4:
        raise ValueError(f"q must have 4 dimensions [B, H, T, D], got {list(q.shape)}; split the heads before the call")
    if q.shape[0] != k.shape[0]:
        raise ValueError(
            f"q and k must agree in the batch, got q {list(q.shape)} and k {list(k.shape)}; "
            "pass keys and values for each sample, expanded if they are shared"
        )
    if q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must agree in width, got q {list(q.shape)} and k {list(k.shape)}; project both to one head width"
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
    _checks.tensor("attn_mask", attn_mask)
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
    # Hidden once more: the gradient of a product with a huge hidden value must not come back as 0·inf.
    return torch.where(visible, exponential / safe, 0), torch.where(positive, top + safe.log(), -torch.inf)


def log_weight(weight: Tensor) -> Tensor:
    """log ω with −inf, and no gradient, where ω = 0: a weight leaves 0 only where its own gradient is 0 too."""
    positive = weight > 0
    return torch.where(positive, torch.where(positive, weight, 1).log(), -torch.inf)
