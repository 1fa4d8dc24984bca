"""First pass of median of means: the block of the median density, query by query.

    p_l(i) = (1/|I_l|) Σ_j count[l, j] p_ij,   choice_i = lower median over the blocks that see a key

One product q·kᵀ and one exponential a score, then p @ countsᵀ with 16 columns. Rounding p to 16 bits would change the
order of close densities, so it goes in as two 16-bit numbers (p = high + low): the choice is float32's.
Memory: reads q and k, writes 4 bytes a query; densities stay in registers. The median is a count of smaller densities
(ties to the lower block), the same rule as `robust.blocks.lower_median`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from robust_attention._triton.attention import _scores, tile
from robust_attention._triton.common import LOG2E, blocks, launch, load_rows, pow2


@triton.jit
def _density_loop(
    dens, top, q, k_ptr, pad_ptr, scale_ptr, count_ptr, begin, end, limit_i, k_s, k_d, S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, ONLINE: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        k = load_rows(k_ptr, start, k_s, k_d, S, pad_ptr, BLOCK_N, BLOCK_D, D, EDGE, PADDED)
        if EDGE:
            scale = tl.load(scale_ptr + j, mask=j < S, other=-1.0)
        else:
            scale = tl.load(scale_ptr + j)
        s = _scores(q, k, scale, IEEE)
        if ONLINE:
            s = tl.where((scale < 0)[None, :], float("-inf"), s)
            if CAUSAL:
                s = tl.where(j[None, :] <= limit_i[:, None], s, float("-inf"))
            new_top = tl.maximum(top, tl.max(s, 1))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            p = tl.math.exp2(s - safe_top[:, None])
            dens = dens * tl.math.exp2(top - safe_top)[:, None]
            top = new_top
        else:
            p = tl.math.exp2(s - top[:, None])
            if PADDED:
                p = tl.where((scale < 0)[None, :], 0.0, p)
            if EDGE and CAUSAL:
                p = tl.where(j[None, :] <= limit_i[:, None], p, 0.0)
        slot = tl.arange(0, BLOCKS)
        if EDGE:
            count = tl.load(count_ptr + slot[None, :] * S + j[:, None], mask=(j < S)[:, None], other=0.0)
        else:
            count = tl.load(count_ptr + slot[None, :] * S + j[:, None])
        if IEEE:
            dens = tl.dot(p, count, dens, input_precision="ieee")
        else:
            high = p.to(q.dtype)
            dens = tl.dot(high, count, dens)
            dens = tl.dot((p - high.to(tl.float32)).to(q.dtype), count, dens)
    return dens, top


@triton.jit
def _choose(
    q_ptr, k_ptr, pad_ptr, scale_ptr, count_ptr, size_ptr, seen_ptr, choice_ptr, density_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, pad_b, seen_b, H, G, T, S, factor, M,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr, REACH: tl.constexpr, LIFT: tl.constexpr,
    KEEP: tl.constexpr,
):  # fmt: skip
    per_head = tl.cdiv(T, BLOCK_M)
    pid = tl.program_id(0)
    head = pid // per_head
    block = pid % per_head
    if CAUSAL:
        block = per_head - 1 - block
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    first = block * BLOCK_M
    t = first + tl.arange(0, BLOCK_M)
    k_ptr += b * k_b + h // G * k_h
    pad_ptr += b * pad_b
    scale_ptr += (b * (H // G) + h // G) * S
    row = head.to(tl.int64) * T
    q = load_rows(q_ptr + b * q_b + h * q_h, first, q_t, q_d, T, q_ptr, BLOCK_M, BLOCK_D, D, True, False)
    wide_q = q.to(tl.float32)
    bound = tl.sqrt(tl.sum(wide_q * wide_q, 1)) * factor
    limit_i = t + (S - T)
    end = S
    whole = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(S, first + BLOCK_M + S - T))
        whole = tl.maximum(0, tl.minimum(whole, (first + S - T + 1) // BLOCK_N * BLOCK_N))
    dens = tl.zeros([BLOCK_M, BLOCKS], tl.float32)
    if tl.max(bound, 0) < REACH:
        top = bound - LIFT
        dens, top = _density_loop(
            dens, top, q, k_ptr, pad_ptr, scale_ptr, count_ptr, 0, whole, limit_i, k_s, k_d, S,
            D, BLOCK_D, BLOCK_N, BLOCKS, PADDED, CAUSAL, False, False, IEEE,
        )  # fmt: skip
        dens, top = _density_loop(
            dens, top, q, k_ptr, pad_ptr, scale_ptr, count_ptr, whole, end, limit_i, k_s, k_d, S,
            D, BLOCK_D, BLOCK_N, BLOCKS, PADDED, CAUSAL, True, False, IEEE,
        )  # fmt: skip
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        dens, top = _density_loop(
            dens, top, q, k_ptr, pad_ptr, scale_ptr, count_ptr, 0, end, limit_i, k_s, k_d, S,
            D, BLOCK_D, BLOCK_N, BLOCKS, PADDED, CAUSAL, True, True, IEEE,
        )  # fmt: skip
    slot = tl.arange(0, BLOCKS)
    size = tl.load(size_ptr + slot, mask=slot < M, other=1.0)
    # seen[l]: the first visible key of block l; S where there is none.
    seen = tl.load(seen_ptr + b * seen_b + slot, mask=slot < M, other=S)
    value = dens / size[None, :]
    if CAUSAL:
        counted = (seen[None, :] <= limit_i[:, None]) & (slot < M)[None, :]
    else:
        counted = ((seen < S) & (slot < M))[None, :] & (t >= 0)[:, None]
    value = tl.where(counted, value, float("inf"))
    number = tl.sum(counted.to(tl.int32), 1)
    lower = (value[:, None, :] < value[:, :, None]) | (
        (value[:, None, :] == value[:, :, None]) & (slot[None, None, :] < slot[None, :, None])
    )
    rank = tl.sum((lower & counted[:, None, :]).to(tl.int32), 2)
    chosen = counted & (rank == ((number - 1) // 2)[:, None])
    choice = tl.min(tl.where(chosen, slot[None, :], M), 1)  # M, the row of ones, where no block sees a key
    tl.store(choice_ptr + row + t, choice, mask=t < T)
    if KEEP:
        at = (row + t)[:, None] * M + slot[None, :]
        log = (tl.math.log2(dens) + top[:, None] - tl.math.log2(size)[None, :]) / 1.4426950408889634
        tl.store(density_ptr + at, tl.where(counted, log, float("-inf")), mask=(t < T)[:, None] & (slot < M)[None, :])


@triton.jit
def _prepare(count_ptr, pad_ptr, rows_ptr, size_ptr, seen_ptr, count_m, count_s, pad_b, M, S,
             BLOCKS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):  # fmt: skip
    """Row l of `rows` (count; ones for l = M; then zeros), |I_l|, and each sample's first visible key of block l."""
    block = tl.program_id(0)
    b = tl.program_id(1)
    size = 0
    first = S
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        count = tl.load(count_ptr + block * count_m + j * count_s, mask=(j < S) & (block < M), other=0).to(tl.int32)
        size += tl.sum(count, 0)
        held = count > 0
        if PADDED:
            held = held & (tl.load(pad_ptr + b * pad_b + j, mask=j < S, other=0) != 0)
        first = tl.minimum(first, tl.min(tl.where(held, j, S), 0))
        if b == 0:
            row = tl.where(block == M, 1, count).to(tl.float32)
            tl.store(rows_ptr + block * S + j, row.to(rows_ptr.dtype.element_ty), mask=j < S)
    if b == 0:
        tl.store(size_ptr + block, tl.maximum(size, 1).to(tl.float32))
    tl.store(seen_ptr + b * BLOCKS + block, first)


def prepare(counts: Tensor, pad: Tensor | None, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(rows `[16·n, S]` in the dtype of q, sizes `[16·n]`, first visible key of each block `[B or 1, 16·n]`).

    Counts up to 256 are exact in every dtype.
    """
    number, keys = counts.shape
    held = pow2(number + 1)
    samples = 1 if pad is None else pad.shape[0]
    rows = torch.empty(held, keys, dtype=dtype, device=counts.device)
    size = torch.empty(held, dtype=torch.float32, device=counts.device)
    seen = torch.empty(samples, held, dtype=torch.int32, device=counts.device)
    launch(
        _prepare, (held, samples), counts, counts if pad is None else pad, rows, size, seen, *counts.stride(),
        0 if pad is None else pad.stride(0), number, keys,
        BLOCKS=held, BLOCK=min(1024, pow2(keys)), PADDED=pad is not None, num_warps=4,
    )  # fmt: skip
    return rows, size, seen


def choose(
    q: Tensor, k: Tensor, scale: Tensor, rows: Tensor, size: Tensor, seen: Tensor, number: int, pad: Tensor | None,
    causal: bool, variance: float, keep: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(chosen block `[B,H,T]` int32, `number` where no block sees a key; log densities `[B,H,T,M]` if kept)."""
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    choice = torch.empty(batch, heads, queries, device=q.device, dtype=torch.int32)
    density = torch.empty(batch, heads, queries, number if keep else 0, device=q.device, dtype=torch.float32)
    half = q.dtype == torch.float16
    meta = tile("choose", width, q.dtype, queries, keys, causal)
    launch(
        _choose, (batch * heads * blocks(queries, meta["BLOCK_M"]),),
        q, k, k if pad is None else pad, scale, rows, size, seen, choice, density if keep else scale,
        *q.stride(), *k.stride(), 0 if pad is None else pad.stride(0), 0 if pad is None else rows.shape[0],
        heads, heads // k.shape[1], queries, keys, LOG2E / variance, number,
        D=width, BLOCK_D=pow2(width), BLOCKS=rows.shape[0], PADDED=pad is not None, CAUSAL=causal,
        IEEE=q.dtype == torch.float32, REACH=12.0 if half else 50.0, LIFT=10.0 if half else 0.0, KEEP=keep, **meta,
    )  # fmt: skip
    return choice, density
