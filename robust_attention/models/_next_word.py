"""The loss over a large vocabulary, a chunk of the text at a time: never all logits at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_MOST_LOGITS = 2**27
"""Logits at once: 512 MiB in float32, of which about three are alive."""


def next_word_losses(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
    """−log softmax(W h + b)[target] of each row, float32 (float64 for float64 inputs).

    Args:
        hidden: `[N, C]`.
        weight: W `[V, C]`; it may be tied to the embedding, whose gradient adds up as usual.
        bias: b `[V]`.
        targets: int64 `[N]`, from 0 to V - 1.
    Cost: O(N·V·C) in time, and the backward pass computes the logits again; memory for 2²⁷ logits at a time and for
        the gradient of W. Against an adaptive softmax: this is the exact softmax, four matrix products a row, and for
        a small model on a GPU of today they are quick.
    Numerics: under autocast products are 16-bit, each logit rounded once; sums, exponentials and the gradient of W
        over chunks are float32.
    """
    device = hidden.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    with torch.autocast(device, enabled=False):
        losses: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, low)
    return losses


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunks(number: int, size: int) -> list[slice]:
    step = max(1, _MOST_LOGITS // size)
    return [slice(start, start + step) for start in range(0, number, step)]


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    wide = _wide(hidden.dtype)
    product = hidden @ weight.mT
    return product.add_(bias) if product.dtype == wide else product.to(wide).add_(bias)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, low: torch.dtype) -> Tensor:
        h, w = hidden.to(low), weight.to(low)
        b = bias.to(_wide(low))
        normal = torch.empty(len(h), dtype=b.dtype, device=h.device)
        losses = torch.empty_like(normal)
        for rows in _chunks(len(h), len(w)):
            logits = _logits(h[rows], w, b)
            normal[rows] = logits.logsumexp(-1)
            losses[rows] = normal[rows] - logits.gather(-1, targets[rows, None]).squeeze(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, normal)
        ctx.low = low
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        with torch.autocast(outer.device.type, enabled=False):  # somebody may ask for it around backward()
            return (*_gradients(ctx, outer), None, None)


def _gradients(ctx: Any, outer: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight, bias, targets, normal = ctx.saved_tensors
    h, w = hidden.to(ctx.low), weight.to(ctx.low)
    b = bias.to(_wide(ctx.low))
    h_grad, w_grad, b_grad = torch.empty_like(hidden), torch.zeros_like(weight), torch.zeros_like(bias)
    for rows in _chunks(len(h), len(w)):
        share = _logits(h[rows], w, b).sub_(normal[rows, None]).exp_()
        share.scatter_add_(-1, targets[rows, None], torch.full_like(share[:, :1], -1.0))
        share *= outer[rows, None]
        b_grad += share.sum(0)
        low = share.to(ctx.low)
        del share
        h_grad[rows] = (low @ w).to(h_grad.dtype)
        w_grad += low.mT @ h[rows]
    return h_grad, w_grad, b_grad
