"""Unit keys k̂ = k/‖k‖ as a tensor of their own, for attention by SDPA: one read and one write of k.

Backward: dk = (dk̂ − k̂ (k̂·dk̂))/‖k‖, two reads and one write. Norms in float32; a zero key stays zero, gradient zero.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from robust_attention._triton.common import blocks, launch, load_rows, pow2, store_rows


@triton.jit
def _unit(
    k_ptr, grad_ptr, out_ptr, k_b, k_h, k_s, k_d, g_b, g_h, g_s, g_d, H, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, BACKWARD: tl.constexpr,
):  # fmt: skip
    per_head = tl.cdiv(S, ROWS)
    pid = tl.program_id(0)
    head = pid // per_head
    start = pid % per_head * ROWS
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    k = load_rows(k_ptr + b * k_b + h * k_h, start, k_s, k_d, S, k_ptr, ROWS, BLOCK_D, D, True, False).to(tl.float32)
    largest = tl.max(tl.abs(k), 1)
    largest = tl.where(largest > 0, largest, 1.0)
    scaled = k / largest[:, None]
    square = tl.sum(scaled * scaled, 1)
    inverse = tl.where(square > 0, 1.0 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)
    out = scaled * inverse[:, None]
    if BACKWARD:
        at = grad_ptr + b * g_b + h * g_h
        grad = load_rows(at, start, g_s, g_d, S, k_ptr, ROWS, BLOCK_D, D, True, False).to(tl.float32)
        along = tl.sum(grad * out, 1)
        out = (grad - out * along[:, None]) * (inverse / largest)[:, None]
        out = tl.where((square > 0)[:, None], out, 0.0)
    store_rows(out_ptr + head.to(tl.int64) * S * D, start, D, S, out, ROWS, BLOCK_D, D)


def _run(k: Tensor, grad: Tensor | None) -> Tensor:
    batch, heads, keys, width = k.shape
    out = torch.empty(k.shape, device=k.device, dtype=k.dtype)
    rows = 32
    launch(
        _unit, (batch * heads * blocks(keys, rows),), k, k if grad is None else grad, out, *k.stride(),
        *(k if grad is None else grad).stride(), heads, keys,
        D=width, BLOCK_D=pow2(width), ROWS=rows, BACKWARD=grad is not None, num_warps=4,
    )  # fmt: skip
    return out


def forward(k: Tensor) -> Tensor:
    return _run(k, None)


def backward(grad: Tensor, k: Tensor) -> Tensor:
    return _run(k, grad)
