"""The kernels as PyTorch operators: shapes for `torch.compile`, gradients, and nothing that depends on data.

Operators are `torch.library.custom_op`s in the namespace `robust_attention`. Their backwards are operators of their own
and have no gradient: a second derivative raises. `torch.func.vmap` loops over its dimension.
"""

from typing import Any

import torch
from torch import Tensor

from robust_attention._triton import attention, gram, medians, norms
from robust_attention._triton.common import INTERPRETED, held, pow2, scan_keys

_op = torch.library.custom_op


# ------------------------------------------------------------------ one weight a key: KDE, eq. 11, one block of MoM


@_op("robust_attention::weighted_forward", mutates_args=())
def _weighted_forward(
    q: Tensor, k: Tensor, v: Tensor, joint: Tensor | None, marginal: Tensor | None, pad: Tensor | None,
    causal: bool, variance: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype
    q, k, v = held(q, k, v)
    # Values are looked at only where a query may be in front of a bad one; elsewhere 0·NaN has nobody to harm.
    scale, _ = scan_keys(k, v, pad, variance, read_v=causal)
    out, log = attention.forward(q, k, v, scale, joint, marginal, None, None, pad, causal, variance)
    return out.to(dtype), log, scale


@_weighted_forward.register_fake
def _(q: Any, k: Any, v: Any, joint: Any, marginal: Any, pad: Any, causal: Any, variance: Any) -> Any:
    return (
        q.new_empty(*q.shape[:3], v.shape[-1]),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        k.new_empty(k.shape[:3], dtype=torch.float32),
    )


@_op("robust_attention::weighted_backward", mutates_args=())
def _weighted_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, joint: Tensor | None, marginal: Tensor | None, pad: Tensor | None,
    rows: Tensor | None, choice: Tensor | None, out: Tensor, log: Tensor, scale: Tensor,
    causal: bool, variance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype
    grad, q, k, v, out = held(grad, q, k, v, out)
    dq, dk, dv, d_joint, d_marginal = attention.backward(
        grad, q, k, v, scale, joint, marginal, rows, choice, pad, out, log, causal, variance
    )
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), d_joint, d_marginal


@_weighted_backward.register_fake
def _(grad: Any, q: Any, k: Any, v: Any, joint: Any, marginal: Any, pad: Any, rows: Any, choice: Any, out: Any,
      log: Any, scale: Any, causal: Any, variance: Any) -> Any:  # fmt: skip
    weight = scale.shape if joint is not None else (0,)
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
        scale.new_empty(weight), scale.new_empty(weight),
    )  # fmt: skip


def _weighted_setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, causal, variance = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.rest = causal, variance
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def _weighted_grad(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 8
    q, k, v, joint, marginal, pad, out, log, scale = ctx.saved_tensors
    dq, dk, dv, d_joint, d_marginal = _weighted_backward(
        grad, q, k, v, joint, marginal, pad, None, None, out, log, scale, *ctx.rest
    )
    if joint is None:
        return dq, dk, dv, *(None,) * 5
    return dq, dk, dv, d_joint, d_marginal, *(None,) * 3


_weighted_forward.register_autograd(_weighted_grad, setup_context=_weighted_setup)


# ------------------------------------------------------------------ RKDE, one sweep, every query with the same keys


@_op("robust_attention::rkde_forward", mutates_args=())
def _rkde_forward(
    q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, loss: str, a: float,
    variance: float, weight_variance: float, value_variance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype
    q, k, v = held(q, k, v)
    scale, square = scan_keys(k, v, pad, variance, read_v=True)
    sums = gram.row_sums(k, v, scale, square, pad, variance, weight_variance, value_variance)
    weights = gram.weights(sums, scale, loss, a)
    out, log = attention.forward(q, k, v, scale, weights[1], weights[0], None, None, pad, False, variance)
    return out.to(dtype), log, scale, square, sums, weights


@_rkde_forward.register_fake
def _(
    q: Any, k: Any, v: Any, pad: Any, loss: Any, a: Any, variance: Any, weight_variance: Any, value_variance: Any
) -> Any:
    per_key = k.shape[:3]
    return (
        q.new_empty(*q.shape[:3], v.shape[-1]),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        k.new_empty(per_key, dtype=torch.float32),
        k.new_empty(per_key, dtype=torch.float32),
        k.new_empty((2, *per_key), dtype=torch.float32),
        k.new_empty((2, *per_key), dtype=torch.float32),
    )


@_op("robust_attention::rkde_backward", mutates_args=())
def _rkde_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, out: Tensor, log: Tensor, scale: Tensor,
    square: Tensor, sums: Tensor, weights: Tensor, loss: str, a: float,
    variance: float, weight_variance: float, value_variance: float, through_weights: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype
    grad, q, k, v, out = held(grad, q, k, v, out)
    dq, dk, dv, d_joint, d_marginal = attention.backward(
        grad, q, k, v, scale, weights[1], weights[0], None, None, pad, out, log, False, variance
    )
    if through_weights:
        gram.add_backward(
            k, v, scale, square, pad, sums, d_marginal, d_joint, dk, dv, loss, a,
            variance, weight_variance, value_variance,
        )  # fmt: skip
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@_rkde_backward.register_fake
def _(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _rkde_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, pad, *rest = inputs
    ctx.save_for_backward(q, k, v, pad, *output)
    ctx.rest = rest
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _rkde_grad(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    return *_rkde_backward(grad, *ctx.saved_tensors, *ctx.rest, True), *(None,) * 6


_rkde_forward.register_autograd(_rkde_grad, setup_context=_rkde_setup)


# ------------------------------------------------------------------ MoM


@_op("robust_attention::mom_forward", mutates_args=())
def _mom_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: Tensor,
    pad: Tensor | None,
    causal: bool,
    variance: float,
    equal_sizes: bool,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = held(q, k, v)
    scale, _ = scan_keys(k, v, pad, variance, read_v=causal)
    rows, size, seen = medians.prepare(counts, pad, q.dtype)
    if equal_sizes:
        size.fill_(1.0)
    choice, density = medians.choose(q, k, scale, rows, size, seen, counts.shape[0], pad, causal, variance, keep)
    out, log = attention.forward(q, k, v, scale, None, None, rows, choice, pad, causal, variance)
    return out.to(dtype), log, scale, choice, rows, density


@_mom_forward.register_fake
def _(q: Any, k: Any, v: Any, counts: Any, pad: Any, causal: Any, variance: Any, equal_sizes: Any, keep: Any) -> Any:
    number, keys = counts.shape
    rows = torch.float32 if INTERPRETED and q.dtype == torch.bfloat16 else q.dtype
    return (
        q.new_empty(*q.shape[:3], v.shape[-1]),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        k.new_empty(k.shape[:3], dtype=torch.float32),
        q.new_empty(q.shape[:3], dtype=torch.int32),
        q.new_empty((pow2(number + 1), keys), dtype=rows),
        q.new_empty((*q.shape[:3], number if keep else 0), dtype=torch.float32),
    )


def _mom_setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, _, pad, causal, variance, *_ = inputs
    ctx.save_for_backward(q, k, v, pad, *output[:5])
    ctx.rest = causal, variance
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _mom_grad(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    q, k, v, pad, out, log, scale, choice, rows = ctx.saved_tensors
    dq, dk, dv, *_ = _weighted_backward(grad, q, k, v, None, None, pad, rows, choice, out, log, scale, *ctx.rest)
    return dq, dk, dv, *(None,) * 6


_mom_forward.register_autograd(_mom_grad, setup_context=_mom_setup)


# ------------------------------------------------------------------ unit keys, for SDPA


@_op("robust_attention::unit_keys", mutates_args=())
def _unit_keys(k: Tensor) -> Tensor:
    (wide,) = held(k)
    return norms.forward(wide).to(k.dtype)


@_unit_keys.register_fake
def _(k: Any) -> Any:
    return k.new_empty(k.shape)


@_op("robust_attention::unit_keys_backward", mutates_args=())
def _unit_keys_backward(grad: Tensor, k: Tensor) -> Tensor:
    wide_grad, wide = held(grad, k)
    return norms.backward(wide_grad, wide).to(k.dtype)


@_unit_keys_backward.register_fake
def _(grad: Any, k: Any) -> Any:
    return k.new_empty(k.shape)


_unit_keys.register_autograd(
    lambda ctx, grad: _unit_keys_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


# ------------------------------------------------------------------ what a dispatcher calls


def _variance(k: Tensor, variance: float | None) -> float:
    return k.shape[-1] ** 0.5 if variance is None else variance


def kde(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pad: Tensor | None = None,
    is_causal: bool = False,
    *,
    variance: float | None = None,
) -> Tensor:
    """Kernel attention. `pad [B, S]`: True where a key is real. `variance` is σ², √D by default."""
    return _weighted_forward(q, k, v, None, None, pad, is_causal, _variance(k, variance))[0]


def weighted(
    q: Tensor, k: Tensor, v: Tensor, joint: Tensor, marginal: Tensor, pad: Tensor | None = None,
    is_causal: bool = False, *, variance: float | None = None,
) -> Tensor:  # fmt: skip
    """Eq. 11 with given weights `[B, Hkv, S]` of mean about 1 (float32; 0 on hidden keys), differentiable in all."""
    joint, marginal = joint.float().contiguous(), marginal.float().contiguous()
    return _weighted_forward(q, k, v, joint, marginal, pad, is_causal, _variance(k, variance))[0]


def rkde(
    q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None = None, is_causal: bool = False, *, loss: str = "huber",
    a: float = 0.2, variance: float | None = None, weight_variance: float | None = None,
    value_variance: float | None = None, weight_grad: str = "full",
) -> Tensor:  # fmt: skip
    """One sweep of RKDE. `loss`: huber, hampel, welsch, tukey with threshold a."""
    variance = _variance(k, variance)
    weight_variance = variance if weight_variance is None else weight_variance
    value_variance = weight_variance if value_variance is None else value_variance
    if is_causal and q.shape[2] > 1:
        from robust_attention._triton import causal

        if weight_grad != "full":
            raise ValueError('causal RKDE in Triton needs weight_grad="full"; use impl="reference"')
        return causal.rkde(q, k, v, pad, loss, a, variance, weight_variance, value_variance)
    if weight_grad == "full":
        return _rkde_forward(q, k, v, pad, loss, a, variance, weight_variance, value_variance)[0]
    with torch.no_grad():
        marginal, joint = _rkde_forward(q[:, :, :1], k, v, pad, loss, a, variance, weight_variance, value_variance)[
            5
        ].unbind(0)
    return _weighted_forward(q, k, v, joint, marginal, pad, False, variance)[0]


def mom(
    q: Tensor, k: Tensor, v: Tensor, counts: Tensor, pad: Tensor | None = None, is_causal: bool = False, *,
    variance: float | None = None, equal_sizes: bool = False,
) -> Tensor:  # fmt: skip
    """Median of means over blocks `counts [M, S]` (integers up to 256). The choice of the block has no gradient.

    `equal_sizes`: compare the blocks' sums, not their means.
    """
    return _mom_forward(q, k, v, counts, pad, is_causal, _variance(k, variance), equal_sizes, False)[0]


def kde_by_sdpa(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, *,
    variance: float | None = None,
) -> Tensor:  # fmt: skip
    """Kernel attention as SDPA on unit keys; k̂ is rounded to the dtype of k, and one copy of it is kept.

    The quickest where cuDNN's backend runs; SDPA lets NaN in hidden keys through, and its causal mask aligns the first
    query with the first key: for masks, or T ≠ S, use `kde`.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    order = [
        SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    ]  # fmt: skip
    with sdpa_kernel(order, set_priority=True):
        return torch.nn.functional.scaled_dot_product_attention(
            q, _unit_keys(k), v, attn_mask, is_causal=is_causal, scale=1 / _variance(k, variance),
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
