"""What the kernels share: the scan of the keys, launch arithmetic, and how operands are held.

Every kernel reads `k` raw and gets the *scale* of each key beside it (float32, [B, Hkv, S]):

    scale_j = log2(e) / (σ² ‖k_j‖),    so that   p_ij = exp(q_i·k̂_j/σ²) = 2^(scale_j · q_i·k_j)

Normalised keys are never written: products of raw 16-bit numbers are exact in the matrix units, so that Grams come out
in float32 quality, and no copy of k takes memory. Special values of a scale: 0 for a zero key (it stays zero), −1 for a
key hidden by the padding mask (its rows of k and v are read as 0), NaN for a key that is not finite (a query that sees
it gets NaN).
"""

import math
import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
LOG2E = math.log2(math.e)
HEAD_SIZES = (16, 128)
"""Head sizes that the kernels are meant for; others from 1 to 128 are padded inside."""


def pow2(n: int, least: int = 16) -> int:
    """The power of two that holds n entries."""
    return max(least, 1 << max(0, n - 1).bit_length())


def blocks(n: int, size: int) -> int:
    return -(-n // size)


def refuse(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why these tensors cannot run here, or None."""
    if not (q.is_cuda or (INTERPRETED and q.device.type == "cpu")):
        return f"Triton kernels need a CUDA device, got {q.device}"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"Triton kernels take float16, bfloat16 and float32, got {q.dtype}"
    if max(k.shape[-1], v.shape[-1]) > HEAD_SIZES[1]:
        return f"Triton kernels take head sizes up to {HEAD_SIZES[1]}, got {k.shape[-1]} and {v.shape[-1]}"
    if min(q.numel(), k.numel(), v.numel()) == 0:
        return "Triton kernels take tensors with at least one entry"
    return None


def held(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors as the kernels read them: as they are, but float32 for bfloat16 in the interpreter (wrong there)."""
    if INTERPRETED:
        return tuple(x.float() if x.dtype == torch.bfloat16 else x for x in tensors)
    return tensors


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> Any:
    """Start a kernel on the device of its first tensor; the compiled kernel (registers, spills) for who measures."""
    device = args[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return kernel[grid](*args, **meta)
    return kernel[grid](*args, **meta)


@triton.jit
def row_offsets(start, stride, BLOCK: tl.constexpr):
    """Offsets of BLOCK rows from `start`, in 64 bits."""
    return (start + tl.arange(0, BLOCK)).to(tl.int64) * stride


@triton.jit
def load_rows(
    base, start, stride_row, stride_col, limit, hidden_ptr,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, BOUND: tl.constexpr, HIDES: tl.constexpr,
):  # fmt: skip
    """Tile [ROWS, COLS] of a matrix; 0 beyond `limit` rows (if BOUND), beyond WIDTH columns, and on hidden rows."""
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    at = base + (row_offsets(start, stride_row, ROWS)[:, None] + (cols * stride_col)[None, :])
    if HIDES:
        keep = tl.load(hidden_ptr + rows, mask=rows < limit, other=0) != 0
        tile = tl.load(at, mask=keep[:, None] & (cols < WIDTH)[None, :], other=0.0)
    elif BOUND:
        tile = tl.load(at, mask=(rows < limit)[:, None] & (cols < WIDTH)[None, :], other=0.0)
    elif WIDTH != COLS:
        tile = tl.load(at, mask=(cols < WIDTH)[None, :], other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def store_rows(base, start, stride_row, limit, tile, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Write a tile [ROWS, COLS] of a matrix whose columns are contiguous."""
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    at = base + (row_offsets(start, stride_row, ROWS)[:, None] + cols[None, :])
    keep = (rows < limit)[:, None] & (cols < WIDTH)[None, :]
    tl.store(at, tile.to(base.dtype.element_ty), mask=keep)


@triton.jit
def _scan_keys(
    k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr,
    k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, pad_b, HKV, S, factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, ROWS: tl.constexpr,
    READ_V: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """scale_j, and ‖v_j‖² where READ_V; one read of k (and v)."""
    per_head = tl.cdiv(S, ROWS)
    pid = tl.program_id(0)
    head = pid // per_head
    start = pid % per_head * ROWS
    b = (head // HKV).to(tl.int64)
    h = (head % HKV).to(tl.int64)
    rows = start + tl.arange(0, ROWS)
    pad_row = pad_ptr + b * pad_b
    k = load_rows(k_ptr + b * k_b + h * k_h, start, k_s, k_d, S, pad_row, ROWS, BLOCK_D, D, True, PADDED).to(tl.float32)
    # Divided by its largest entry first, so that no square overflows or vanishes.
    largest = tl.max(tl.abs(k), 1)
    nonzero = largest > 0
    safe = tl.where(nonzero, largest, 1.0)
    unit = k / safe[:, None]
    norm = tl.sqrt(tl.sum(unit * unit, 1))
    scale = tl.where(nonzero, factor / safe / tl.where(nonzero, norm, 1.0), 0.0)
    wrong = tl.sum(k * 0.0, 1)  # 0, or NaN where an entry is not finite
    if READ_V:
        v = load_rows(v_ptr + b * v_b + h * v_h, start, v_s, v_e, S, pad_row, ROWS, BLOCK_E, E, True, PADDED)
        v = v.to(tl.float32)
        wrong += tl.sum(v * 0.0, 1)
        tl.store(square_ptr + head.to(tl.int64) * S + rows, tl.sum(v * v, 1), mask=rows < S)
    scale = tl.where(wrong == 0, scale, float("nan"))
    if PADDED:
        scale = tl.where(tl.load(pad_row + rows, mask=rows < S, other=0) != 0, scale, -1.0)
    tl.store(scale_ptr + head.to(tl.int64) * S + rows, scale, mask=rows < S)


def scan_keys(k: Tensor, v: Tensor, pad: Tensor | None, variance: float, read_v: bool) -> tuple[Tensor, Tensor]:
    """(scale, ‖v‖²), both float32 `[B, Hkv, S]`; without `read_v` the second is empty.

    Memory: reads k (and v) once, writes 4 (8) bytes a key: bound by bandwidth.
    """
    batch, heads, keys, width = k.shape
    scale = torch.empty(batch, heads, keys, device=k.device, dtype=torch.float32)
    square = torch.empty_like(scale) if read_v else scale.new_empty(0)
    rows = 64
    launch(
        _scan_keys, (batch * heads * blocks(keys, rows),),
        k, v, k if pad is None else pad, scale, square if read_v else scale,
        *k.stride(), *v.stride(), 0 if pad is None else pad.stride(0), heads, keys, LOG2E / variance,
        D=width, E=v.shape[-1], BLOCK_D=pow2(width), BLOCK_E=pow2(v.shape[-1]), ROWS=rows,
        READ_V=read_v, PADDED=pad is not None, num_warps=4,
    )  # fmt: skip
    return scale, square
