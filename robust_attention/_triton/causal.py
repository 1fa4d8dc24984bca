"""Causal RKDE, one sweep: every query has weights over its own prefix of the keys, and none of them is stored.

With deficits δG = 1 − G (small where keys are alike: sums of them lose no digits) and n_i visible keys in prefix i:

    D_ij = Σ_{m≤i} δG_mj,  U_i = Σ_{j≤i} D_ij,  d²_ij = 2 D_ij/n_i − U_i/n_i²,  ω_ij = ψ(d_ij)/Σ_{j≤i} ψ(d_ij)

**Passes.** (1) `_prefix`: the lower triangle of both Grams, tile by tile; writes the column sums of each tile and the
row sums. (2) `_carry`: column sums of all earlier blocks, D at each block's start; U by a cumulative sum.
(3) `_attend`: per tile the scores, both Grams again, D inside the tile as a product with a triangle of ones, ψ, and
eq. 11. Backward: `_queries` (dq; what reaches D and U), the same carry from the other end, then `_keys` (dk, dv of
attention, and of the Gram with a key as column) and `_rows` (of the Gram with a key as row). With
E_mj = Σ_{i≥m} dD_ij and f_m = E_mm + 2 Σ_{i≥m} dU_i, a pair m > j gets −dG = E_mj + f_m.

**Memory.** The block-start sums: 2 Grams · S/BLOCK · S floats a key-value head (BLOCK = 64: S²/8 bytes; 2 MiB at 4096,
34 MiB at 16384); backward the same again a query head. Everything else is O(S).

**Floor.** Forward 8 products a tile (attention alone: 2) on the lower triangle, 5 exponentials or roots a score in
`_attend` and 2 in `_prefix` (attention alone: 1). Backward 29 products (attention alone, fused: 5).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from robust_attention._triton.common import (
    INTERPRETED,
    LOG2E,
    blocks,
    held,
    launch,
    load_rows,
    pow2,
    scan_keys,
    store_rows,
)
from robust_attention._triton.gram import LOSSES, constants, gram_tile, key_block, psi, psi_slope


@triton.jit
def _deficits(ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, diagonal,
              IEEE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """(marginal G, joint G, 1 − marginal, 1 − joint) of a tile; the deficits are 0 for hidden keys."""
    marginal, joint = gram_tile(ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, IEEE)
    if diagonal:
        same = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
        seen = (half_i < float("inf"))[:, None]
        marginal = tl.where(same & seen, 1.0, marginal)
        joint = tl.where(same & seen, 1.0, joint)
    seen_i = tl.where(half_i < float("inf"), 1.0, 0.0)
    seen_j = tl.where(half_j < float("inf"), 1.0, 0.0)
    both = seen_i[:, None] * seen_j[None, :]
    return marginal, joint, both - marginal, both - joint


@triton.jit
def _triangle(BLOCK: tl.constexpr, IEEE: tl.constexpr):
    """Ones where column ≤ row. Float16 for 16-bit inputs: deficits lie in 0 … 1, where it holds 11 bits."""
    held = tl.arange(0, BLOCK)[None, :] <= tl.arange(0, BLOCK)[:, None]
    if IEEE:
        found = held.to(tl.float32)
    else:
        found = held.to(tl.float16)
    return found


@triton.jit
def _prefix(
    k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, sum_ptr, row_ptr, step_ptr,
    k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, pad_b, KEYS, HKV, S, kappa, lam, half,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Row block I: sum[I, j] = Σ_{m in I} δG_mj for j up to its end, row[i] the sum over earlier blocks, and
    step[i] = U_i − U_{i−1}."""
    n = tl.cdiv(S, BLOCK)
    pid = tl.program_id(0)
    head = pid // n
    block = n - 1 - pid % n
    b = (head // HKV).to(tl.int64)
    h = (head % HKV).to(tl.int64)
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    pad_ptr += b * pad_b
    at = head.to(tl.int64) * S
    gap = head.to(tl.int64) * 0 + KEYS
    scale_ptr += at
    square_ptr += at
    line = sum_ptr + (head.to(tl.int64) * n + block) * S
    line_joint = line + gap * n
    first = block * BLOCK
    i = first + tl.arange(0, BLOCK)
    ki = load_rows(k_ptr, first, k_s, k_d, S, pad_ptr, BLOCK, BLOCK_D, D, True, PADDED)
    vi = load_rows(v_ptr, first, v_s, v_e, S, pad_ptr, BLOCK, BLOCK_E, E, True, PADDED)
    scale_i, half_i, square_i = key_block(scale_ptr, square_ptr, i, S, half, True)
    rows = tl.zeros([BLOCK], tl.float32)
    rows_joint = tl.zeros([BLOCK], tl.float32)
    for start in range(0, first, BLOCK):
        start = tl.multiple_of(start, BLOCK)
        j = start + tl.arange(0, BLOCK)
        kj = load_rows(k_ptr, start, k_s, k_d, S, pad_ptr, BLOCK, BLOCK_D, D, False, PADDED)
        vj = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK, BLOCK_E, E, False, PADDED)
        scale_j, half_j, square_j = key_block(scale_ptr, square_ptr, j, S, half, True)
        _, _, marginal, joint = _deficits(
            ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, False, IEEE, BLOCK
        )
        tl.store(line + j, tl.sum(marginal, 0))
        tl.store(line_joint + j, tl.sum(joint, 0))
        rows += tl.sum(marginal, 1)
        rows_joint += tl.sum(joint, 1)
    _, _, marginal, joint = _deficits(
        ki, vi, scale_i, half_i, square_i, ki, vi, scale_i, half_i, square_i, kappa, lam, True, IEEE, BLOCK
    )
    tl.store(line + i, tl.sum(marginal, 0), mask=i < S)
    tl.store(line_joint + i, tl.sum(joint, 0), mask=i < S)
    before = tl.arange(0, BLOCK)[None, :] < tl.arange(0, BLOCK)[:, None]
    tl.store(row_ptr + at + i, rows, mask=i < S)
    tl.store(row_ptr + at + gap + i, rows_joint, mask=i < S)
    tl.store(step_ptr + at + i, 2.0 * (rows + tl.sum(tl.where(before, marginal, 0.0), 1)), mask=i < S)
    tl.store(step_ptr + at + gap + i, 2.0 * (rows_joint + tl.sum(tl.where(before, joint, 0.0), 1)), mask=i < S)


@triton.jit
def _carry(sum_ptr, row_ptr, GROUP, S, BLOCK: tl.constexpr, CHUNK: tl.constexpr, REVERSE: tl.constexpr):
    """In place, for one block of columns J: the sums of tiles become exclusive sums over row blocks I ≥ J.

    Forward they run downwards from row[j] (what earlier blocks hold). REVERSE: upwards from the last row block, over
    the GROUP query heads that share a key head as well (the result is in the first of them), and row[j] receives the
    total.
    """
    n = tl.cdiv(S, BLOCK)
    pid = tl.program_id(0)
    head = (pid // n).to(tl.int64)
    block = pid % n
    j = block * BLOCK + tl.arange(0, BLOCK)
    base = sum_ptr + head * GROUP * n * S
    step = tl.arange(0, CHUNK)
    if REVERSE:
        carry = tl.zeros([BLOCK], tl.float32)
    else:
        carry = tl.load(row_ptr + head * S + j, mask=j < S, other=0.0)
    for start in range(block, n, CHUNK):
        index = start + step
        if REVERSE:
            index = n - 1 - (start - block) - step
        keep = ((index >= block) & (index < n))[:, None] & (j < S)[None, :]
        at = index[:, None].to(tl.int64) * S + j[None, :]
        part = tl.load(base + at, mask=keep, other=0.0)
        if REVERSE:
            for member in range(1, GROUP):
                part += tl.load(base + member * n * S + at, mask=keep, other=0.0)
        running = tl.cumsum(part, 0)
        tl.store(base + at, running - part + carry[None, :], mask=keep)
        carry += tl.sum(part, 0)
    if REVERSE:
        tl.store(row_ptr + head * S + j, carry, mask=j < S)


@triton.jit
def _psis(marginal_gap, joint_gap, start, start_joint, triangle, per, size, size_joint, IEEE: tl.constexpr):
    """Squared distances (unclamped) of both Grams: d²_ij = 2 D_ij/n_i − U_i/n_i²."""
    inside = tl.dot(triangle, marginal_gap.to(triangle.dtype), input_precision="ieee" if IEEE else "tf32")
    inside_joint = tl.dot(triangle, joint_gap.to(triangle.dtype), input_precision="ieee" if IEEE else "tf32")
    x2 = (inside + start[None, :]) * (2.0 * per)[:, None] - size[:, None]
    x2_joint = (inside_joint + start_joint[None, :]) * (2.0 * per)[:, None] - size_joint[:, None]
    return x2, x2_joint


@triton.jit
def _row_constants(number_ptr, size_ptr, gap, i, S):
    """1/n_i and U_i/n_i² of both Grams."""
    per = 1.0 / tl.maximum(tl.load(number_ptr + i, mask=(i >= 0) & (i < S), other=1.0), 1.0)
    size = tl.load(size_ptr + i, mask=(i >= 0) & (i < S), other=0.0) * per * per
    size_joint = tl.load(size_ptr + gap + i, mask=(i >= 0) & (i < S), other=0.0) * per * per
    return per, size, size_joint


@triton.jit
def _attend_tile(
    acc, acc_flat, total, total_flat, z, z_joint, top, q, ki, vi, scale_i, half_i, square_i, per, size, size_joint,
    triangle, start, k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, line, line_joint, k_s, k_d, v_s, v_e, S,
    kappa, lam, half, a,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, IEEE: tl.constexpr, LOSS: tl.constexpr, DIAGONAL: tl.constexpr, ONLINE: tl.constexpr,
):  # fmt: skip
    j = start + tl.arange(0, BLOCK)
    kj = load_rows(k_ptr, start, k_s, k_d, S, pad_ptr, BLOCK, BLOCK_D, D, DIAGONAL, PADDED)
    vj = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK, BLOCK_E, E, DIAGONAL, PADDED)
    scale_j, half_j, square_j = key_block(scale_ptr, square_ptr, j, S, half, True)
    _, _, gap, gap_joint = _deficits(
        ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, DIAGONAL, IEEE, BLOCK
    )
    begin = tl.load(line + j, mask=j < S, other=0.0)
    begin_joint = tl.load(line_joint + j, mask=j < S, other=0.0)
    x2, x2_joint = _psis(gap, gap_joint, begin, begin_joint, triangle, per, size, size_joint, IEEE)
    w = psi(tl.maximum(x2, 0.0), a, LOSS)
    w_joint = psi(tl.maximum(x2_joint, 0.0), a, LOSS)
    s = tl.dot(q, tl.trans(kj), input_precision="ieee" if IEEE else "tf32") * scale_j[None, :]
    if DIAGONAL or PADDED:
        seen = (half_j < float("inf"))[None, :] & (top == top)[:, None]
        if DIAGONAL:
            seen = seen & (tl.arange(0, BLOCK)[None, :] <= tl.arange(0, BLOCK)[:, None])
        w = tl.where(seen, w, 0.0)
        w_joint = tl.where(seen, w_joint, 0.0)
        s = tl.where(seen, s, float("-inf"))
    if DIAGONAL:
        vj = tl.where(tl.abs(vj.to(tl.float32)) < float("inf"), vj, 0.0).to(vj.dtype)
    if ONLINE:
        new_top = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.math.exp2(top - safe)
        p = tl.math.exp2(s - safe[:, None])
        acc = acc * shrink[:, None]
        total = total * shrink
        if LOSS > 0:
            acc_flat = acc_flat * shrink[:, None]
            total_flat = total_flat * shrink
        top = new_top
    else:
        p = tl.math.exp2(s - top[:, None])
    z += tl.sum(w, 1)
    z_joint += tl.sum(w_joint, 1)
    total += tl.sum(p * w, 1)
    acc = tl.dot((p * w_joint).to(vj.dtype), vj, acc, input_precision="ieee" if IEEE else "tf32")
    if LOSS > 0:  # every ψ of a row may be 0: then its weights are uniform
        total_flat += tl.sum(p, 1)
        acc_flat = tl.dot(p.to(vj.dtype), vj, acc_flat, input_precision="ieee" if IEEE else "tf32")
    return acc, acc_flat, total, total_flat, z, z_joint, top


@triton.jit
def _attend(
    q_ptr, k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, sum_ptr, number_ptr, size_ptr, out_ptr, log_ptr, z_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, pad_b, number_b, KEYS, QUERIES, H, G, T, S, first_block,
    factor, kappa, lam, half, a,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, IEEE: tl.constexpr, LOSS: tl.constexpr, REACH: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Eq. 11 for the queries whose last visible key lies in one block."""
    n = tl.cdiv(S, BLOCK)
    rows = n - first_block
    pid = tl.program_id(0)
    head = pid // rows
    block = n - 1 - pid % rows
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    kv_head = b * (H // G) + h // G
    gap = kv_head * 0 + KEYS
    k_ptr += b * k_b + h // G * k_h
    v_ptr += b * v_b + h // G * v_h
    pad_ptr += b * pad_b
    scale_ptr += kv_head * S
    square_ptr += kv_head * S
    line = sum_ptr + (kv_head * n + block) * S
    line_joint = line + gap * n
    first = block * BLOCK
    i = first + tl.arange(0, BLOCK)
    t = i - (S - T)
    inside = (i < S) & (t >= 0)
    row = head.to(tl.int64) * T
    d = tl.arange(0, BLOCK_D)
    q = tl.load(
        q_ptr + b * q_b + h * q_h + t.to(tl.int64)[:, None] * q_t + (d * q_d)[None, :],
        mask=inside[:, None] & (d < D)[None, :], other=0.0,
    )  # fmt: skip
    wide_q = q.to(tl.float32)
    bound = tl.sqrt(tl.sum(wide_q * wide_q, 1)) * factor
    ki = load_rows(k_ptr, first, k_s, k_d, S, pad_ptr, BLOCK, BLOCK_D, D, True, PADDED)
    vi = load_rows(v_ptr, first, v_s, v_e, S, pad_ptr, BLOCK, BLOCK_E, E, True, PADDED)
    scale_i, half_i, square_i = key_block(scale_ptr, square_ptr, i, S, half, True)
    per, size, size_joint = _row_constants(number_ptr + b * number_b, size_ptr + kv_head * S, gap, i, S)
    triangle = _triangle(BLOCK, IEEE)
    acc = tl.zeros([BLOCK, BLOCK_E], tl.float32)
    acc_flat = tl.zeros([BLOCK, BLOCK_E], tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    total_flat = tl.zeros([BLOCK], tl.float32)
    z = tl.zeros([BLOCK], tl.float32)
    z_joint = tl.zeros([BLOCK], tl.float32)
    if tl.max(bound, 0) < REACH:
        top = bound - LIFT
        for start in range(0, first, BLOCK):
            acc, acc_flat, total, total_flat, z, z_joint, top = _attend_tile(
                acc, acc_flat, total, total_flat, z, z_joint, top, q, ki, vi, scale_i, half_i, square_i,
                per, size, size_joint, triangle, tl.multiple_of(start, BLOCK), k_ptr, v_ptr, pad_ptr, scale_ptr,
                square_ptr, line, line_joint, k_s, k_d, v_s, v_e, S, kappa, lam, half, a,
                D, E, BLOCK_D, BLOCK_E, BLOCK, PADDED, IEEE, LOSS, False, False,
            )  # fmt: skip
        acc, acc_flat, total, total_flat, z, z_joint, top = _attend_tile(
            acc, acc_flat, total, total_flat, z, z_joint, top, q, ki, vi, scale_i, half_i, square_i,
            per, size, size_joint, triangle, first, k_ptr, v_ptr, pad_ptr, scale_ptr,
            square_ptr, line, line_joint, k_s, k_d, v_s, v_e, S, kappa, lam, half, a,
            D, E, BLOCK_D, BLOCK_E, BLOCK, PADDED, IEEE, LOSS, True, False,
        )  # fmt: skip
    else:
        top = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, first, BLOCK):
            acc, acc_flat, total, total_flat, z, z_joint, top = _attend_tile(
                acc, acc_flat, total, total_flat, z, z_joint, top, q, ki, vi, scale_i, half_i, square_i,
                per, size, size_joint, triangle, tl.multiple_of(start, BLOCK), k_ptr, v_ptr, pad_ptr, scale_ptr,
                square_ptr, line, line_joint, k_s, k_d, v_s, v_e, S, kappa, lam, half, a,
                D, E, BLOCK_D, BLOCK_E, BLOCK, PADDED, IEEE, LOSS, False, True,
            )  # fmt: skip
        acc, acc_flat, total, total_flat, z, z_joint, top = _attend_tile(
            acc, acc_flat, total, total_flat, z, z_joint, top, q, ki, vi, scale_i, half_i, square_i,
            per, size, size_joint, triangle, first, k_ptr, v_ptr, pad_ptr, scale_ptr,
            square_ptr, line, line_joint, k_s, k_d, v_s, v_e, S, kappa, lam, half, a,
            D, E, BLOCK_D, BLOCK_E, BLOCK, PADDED, IEEE, LOSS, True, True,
        )  # fmt: skip
    number = tl.load(number_ptr + b * number_b + i, mask=i < S, other=0.0)
    if LOSS > 0:
        flat = z == 0
        total = tl.where(flat, total_flat, total)
        z = tl.where(flat, -number, z)
        flat = z_joint == 0
        acc = tl.where(flat[:, None], acc_flat, acc)
        z_joint = tl.where(flat, -number, z_joint)
    size_of = tl.where(z_joint == 0, 1.0, tl.abs(z_joint))
    seen = total != 0
    ratio = tl.where(seen, tl.abs(z) / size_of / tl.where(seen, total, 1.0), 0.0)
    out = tl.where((total != total)[:, None], float("nan"), acc * ratio[:, None])
    log = tl.where(total > 0, top + tl.math.log2(tl.where(total > 0, total, 1.0)), float("inf"))
    e = tl.arange(0, BLOCK_E)
    tl.store(
        out_ptr + (row + t)[:, None] * E + e[None, :], out.to(out_ptr.dtype.element_ty),
        mask=inside[:, None] & (e < E)[None, :],
    )  # fmt: skip
    tl.store(log_ptr + row + t, log, mask=inside)
    tl.store(z_ptr + row + t, z, mask=inside)
    tl.store(z_ptr + QUERIES + row + t, z_joint, mask=inside)


@triton.jit
def _tile_gradients(
    q, grad, log, delta, z, z_joint, kj, vj, scale_j, half_j, x2, x2_joint, per, a,
    IEEE: tl.constexpr, LOSS: tl.constexpr, DIAGONAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One tile of one head: (ds, κ ψJ g, dD marginal, dD joint).

    g = p/den, κ = ZM/ZJ:  ds = g (κ ψJ do·v − ψM δ),  dψJ = κ g do·v − δ/ZJ,  dψM = δ (1/ZM − g),
    dD = (2/n) ψ'(d²) dψ.
    """
    g = tl.math.exp2(
        tl.dot(q, tl.trans(kj), input_precision="ieee" if IEEE else "tf32") * scale_j[None, :] - log[:, None]
    )
    dov = tl.dot(grad, tl.trans(vj), input_precision="ieee" if IEEE else "tf32")
    w = psi(tl.maximum(x2, 0.0), a, LOSS)
    w_joint = psi(tl.maximum(x2_joint, 0.0), a, LOSS)
    slope = tl.where(x2 > 0, psi_slope(tl.maximum(x2, 0.0), a, LOSS), 0.0)
    slope_joint = tl.where(x2_joint > 0, psi_slope(tl.maximum(x2_joint, 0.0), a, LOSS), 0.0)
    if LOSS > 0:
        w = tl.where((z < 0)[:, None], 1.0, w)
        slope = tl.where((z < 0)[:, None], 0.0, slope)
        w_joint = tl.where((z_joint < 0)[:, None], 1.0, w_joint)
        slope_joint = tl.where((z_joint < 0)[:, None], 0.0, slope_joint)
    of_z = tl.where(z == 0, 0.0, delta / tl.where(z == 0, 1.0, tl.abs(z)))
    of_z_joint = tl.where(z_joint == 0, 0.0, delta / tl.where(z_joint == 0, 1.0, tl.abs(z_joint)))
    kappa = tl.where(z_joint == 0, 0.0, tl.abs(z) / tl.where(z_joint == 0, 1.0, tl.abs(z_joint)))
    up = g * dov * kappa[:, None]
    down = g * delta[:, None]
    ds = w_joint * up - w * down
    share = w_joint * g * kappa[:, None]
    dd = slope * (of_z[:, None] - down) * (2.0 * per)[:, None]
    dd_joint = slope_joint * (up - of_z_joint[:, None]) * (2.0 * per)[:, None]
    seen = (half_j < float("inf"))[None, :] & (log < float("inf"))[:, None]
    if DIAGONAL:
        seen = seen & (tl.arange(0, BLOCK)[None, :] <= tl.arange(0, BLOCK)[:, None])
    ds = tl.where(seen, ds, 0.0)
    share = tl.where(seen, share, 0.0)
    dd = tl.where(seen, dd, 0.0)
    dd_joint = tl.where(seen, dd_joint, 0.0)
    return ds, share, dd, dd_joint


@triton.jit
def _load_queries(
    q_ptr, grad_ptr, log_ptr, delta_ptr, z_ptr, z_gap, t, T, q_t, q_d, g_t, g_e,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    inside = (t >= 0) & (t < T)
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_E)
    wide_t = t.to(tl.int64)
    q = tl.load(q_ptr + wide_t[:, None] * q_t + (d * q_d)[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0)
    grad = tl.load(
        grad_ptr + wide_t[:, None] * g_t + (e * g_e)[None, :], mask=inside[:, None] & (e < E)[None, :], other=0.0
    )
    log = tl.load(log_ptr + t, mask=inside, other=float("inf"))
    delta = tl.load(delta_ptr + t, mask=inside, other=0.0)
    z = tl.load(z_ptr + t, mask=inside, other=0.0)
    z_joint = tl.load(z_ptr + z_gap + t, mask=inside, other=0.0)
    return q, grad, log, delta, z, z_joint


@triton.jit
def _queries(
    q_ptr, k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, sum_ptr, number_ptr, size_ptr, grad_ptr, log_ptr, delta_ptr,
    z_ptr, dq_ptr, dsum_ptr, dsize_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, g_b, g_h, g_t, g_e, pad_b, number_b,
    KEYS, QUERIES, H, G, T, S, first_block, inverse_factor, inverse_variance, kappa, lam, half, a,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, IEEE: tl.constexpr, HALF: tl.constexpr, LOSS: tl.constexpr,
):  # fmt: skip
    """dq; the column sums of dD by tile; dU_i. Row blocks before the first query write zeros."""
    n = tl.cdiv(S, BLOCK)
    pid = tl.program_id(0)
    head = pid // n
    block = n - 1 - pid % n
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    kv_head = b * (H // G) + h // G
    gap = kv_head * 0 + KEYS
    query_gap = gap * G
    k_ptr += b * k_b + h // G * k_h
    v_ptr += b * v_b + h // G * v_h
    pad_ptr += b * pad_b
    scale_ptr += kv_head * S
    square_ptr += kv_head * S
    line = sum_ptr + (kv_head * n + block) * S
    line_joint = line + gap * n
    dline = dsum_ptr + (head.to(tl.int64) * n + block) * S
    dline_joint = dline + query_gap * n
    first = block * BLOCK
    i = first + tl.arange(0, BLOCK)
    t = i - (S - T)
    row = head.to(tl.int64) * T
    q, grad, log, delta, z, z_joint = _load_queries(
        q_ptr + b * q_b + h * q_h, grad_ptr + b * g_b + h * g_h, log_ptr + row, delta_ptr + row, z_ptr + row,
        QUERIES, t, T, q_t, q_d, g_t, g_e, D, E, BLOCK_D, BLOCK_E,
    )  # fmt: skip
    ki = load_rows(k_ptr, first, k_s, k_d, S, pad_ptr, BLOCK, BLOCK_D, D, True, PADDED)
    vi = load_rows(v_ptr, first, v_s, v_e, S, pad_ptr, BLOCK, BLOCK_E, E, True, PADDED)
    scale_i, half_i, square_i = key_block(scale_ptr, square_ptr, i, S, half, True)
    per, size, size_joint = _row_constants(number_ptr + b * number_b, size_ptr + kv_head * S, gap, i, S)
    triangle = _triangle(BLOCK, IEEE)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dsize = tl.zeros([BLOCK], tl.float32)
    dsize_joint = tl.zeros([BLOCK], tl.float32)
    for start in range(0, first, BLOCK):
        start = tl.multiple_of(start, BLOCK)
        j = start + tl.arange(0, BLOCK)
        kj = load_rows(k_ptr, start, k_s, k_d, S, pad_ptr, BLOCK, BLOCK_D, D, False, PADDED)
        vj = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK, BLOCK_E, E, False, PADDED)
        scale_j, half_j, square_j = key_block(scale_ptr, square_ptr, j, S, half, True)
        _, _, m_gap, j_gap = _deficits(
            ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, False, IEEE, BLOCK
        )
        x2, x2_joint = _psis(
            m_gap, j_gap, tl.load(line + j), tl.load(line_joint + j), triangle, per, size, size_joint, IEEE
        )
        ds, _, dd, dd_joint = _tile_gradients(
            q, grad, log, delta, z, z_joint, kj, vj, scale_j, half_j, x2, x2_joint, per, a, IEEE, LOSS, False, BLOCK
        )
        tl.store(dline + j, tl.sum(dd, 0))
        tl.store(dline_joint + j, tl.sum(dd_joint, 0))
        dsize += tl.sum(dd, 1)
        dsize_joint += tl.sum(dd_joint, 1)
        if HALF:
            kj = (kj.to(tl.float32) * (scale_j * inverse_factor)[:, None]).to(kj.dtype)
        else:
            ds = ds * (scale_j * inverse_factor)[None, :]
        acc = tl.dot(ds.to(kj.dtype), kj, acc, input_precision="ieee" if IEEE else "tf32")
    _, _, m_gap, j_gap = _deficits(
        ki, vi, scale_i, half_i, square_i, ki, vi, scale_i, half_i, square_i, kappa, lam, True, IEEE, BLOCK
    )
    begin = tl.load(line + i, mask=i < S, other=0.0)
    begin_joint = tl.load(line_joint + i, mask=i < S, other=0.0)
    x2, x2_joint = _psis(m_gap, j_gap, begin, begin_joint, triangle, per, size, size_joint, IEEE)
    ds, _, dd, dd_joint = _tile_gradients(
        q, grad, log, delta, z, z_joint, ki, vi, scale_i, half_i, x2, x2_joint, per, a, IEEE, LOSS, True, BLOCK
    )
    tl.store(dline + i, tl.sum(dd, 0), mask=i < S)
    tl.store(dline_joint + i, tl.sum(dd_joint, 0), mask=i < S)
    dsize += tl.sum(dd, 1)
    dsize_joint += tl.sum(dd_joint, 1)
    kj = tl.where(tl.abs(ki.to(tl.float32)) < float("inf"), ki, 0.0).to(ki.dtype)
    if HALF:
        kj = (kj.to(tl.float32) * (scale_i * inverse_factor)[:, None]).to(kj.dtype)
    else:
        ds = ds * (scale_i * inverse_factor)[None, :]
    acc = tl.dot(ds.to(kj.dtype), kj, acc, input_precision="ieee" if IEEE else "tf32")
    # dU_i = −Σ_j e_ij/n², and dD = 2 e/n.
    at = head.to(tl.int64) * S
    tl.store(dsize_ptr + at + i, dsize * per * -0.5, mask=i < S)
    tl.store(dsize_ptr + query_gap + at + i, dsize_joint * per * -0.5, mask=i < S)
    acc = tl.where((log < float("inf"))[:, None], acc * inverse_variance, 0.0)
    d = tl.arange(0, BLOCK_D)
    keep = ((t >= 0) & (i < S))[:, None] & (d < D)[None, :]
    tl.store(dq_ptr + (row + t)[:, None] * D + d[None, :], acc.to(dq_ptr.dtype.element_ty), mask=keep)


@triton.jit
def _keys(
    q_ptr, k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, sum_ptr, number_ptr, size_ptr, grad_ptr, log_ptr, delta_ptr,
    z_ptr, dsum_ptr, f_ptr, top_ptr, dk_ptr, dv_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, g_b, g_h, g_t, g_e, pad_b, number_b,
    KEYS, QUERIES, HKV, G, T, S, inverse_factor, inverse_variance, inverse_weight_variance, inverse_value_variance,
    kappa, lam, half, a,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr,
    PADDED: tl.constexpr, IEEE: tl.constexpr, LOSS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """COLUMNS: block J as columns against all row blocks from J on: attention's dk, dv and the Gram's, written.

    Otherwise: block I as rows against the column blocks up to I: the Gram's other half, added to dk, dv.
    """
    n = tl.cdiv(S, BLOCK)
    pid = tl.program_id(0)
    kv_head = (pid // n).to(tl.int64)
    if COLUMNS:
        block = pid % n
    else:
        block = n - 1 - pid % n
    b = kv_head // HKV
    h = kv_head % HKV
    H = HKV * G
    gap = kv_head * 0 + KEYS
    query_gap = gap * G
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    pad_ptr += b * pad_b
    number_ptr += b * number_b
    scale_ptr += kv_head * S
    square_ptr += kv_head * S
    size_ptr += kv_head * S
    f_ptr += kv_head * S
    sum_ptr += kv_head * n * S
    dsum_ptr += kv_head * G * n * S
    mine = block * BLOCK
    x = mine + tl.arange(0, BLOCK)
    kx = load_rows(k_ptr, mine, k_s, k_d, S, pad_ptr, BLOCK, BLOCK_D, D, True, PADDED)
    vx = load_rows(v_ptr, mine, v_s, v_e, S, pad_ptr, BLOCK, BLOCK_E, E, True, PADDED)
    scale_x, half_x, square_x = key_block(scale_ptr, square_ptr, x, S, half, True)
    top = tl.load(top_ptr + kv_head)
    shrink = 1.0 / tl.where(top > 0, top, 1.0)
    local = tl.arange(0, BLOCK)
    triangle = _triangle(BLOCK, IEEE)
    upper = tl.trans(triangle)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_E], tl.float32)
    dk_gram = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv_gram = tl.zeros([BLOCK, BLOCK_E], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    if COLUMNS:
        low = block
        high = n
    else:
        low = 0
        high = block + 1
    for other in range(low, high):
        start = tl.multiple_of(other * BLOCK, BLOCK)
        y = start + local
        ky = load_rows(k_ptr, start, k_s, k_d, S, pad_ptr, BLOCK, BLOCK_D, D, True, PADDED)
        vy = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK, BLOCK_E, E, True, PADDED)
        scale_y, half_y, square_y = key_block(scale_ptr, square_ptr, y, S, half, True)
        if COLUMNS:
            i, j, block_i = y, x, other
            ki, vi, scale_i, half_i, square_i = ky, vy, scale_y, half_y, square_y
            kj, vj, scale_j, half_j, square_j = kx, vx, scale_x, half_x, square_x
        else:
            i, j, block_i = x, y, block
            ki, vi, scale_i, half_i, square_i = kx, vx, scale_x, half_x, square_x
            kj, vj, scale_j, half_j, square_j = ky, vy, scale_y, half_y, square_y
        after = i[:, None] > j[None, :]
        upto = i[:, None] >= j[None, :]
        marginal, joint = gram_tile(
            ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, IEEE
        )
        seen = tl.where(half_i < float("inf"), 1.0, 0.0)[:, None] * tl.where(half_j < float("inf"), 1.0, 0.0)[None, :]
        same = i[:, None] == j[None, :]
        m_gap = tl.where(same, 0.0, seen - marginal)
        j_gap = tl.where(same, 0.0, seen - joint)
        line = sum_ptr + block_i * S
        begin = tl.load(line + j, mask=j < S, other=0.0)
        begin_joint = tl.load(line + gap * n + j, mask=j < S, other=0.0)
        per, size, size_joint = _row_constants(number_ptr, size_ptr, gap, i, S)
        x2, x2_joint = _psis(m_gap, j_gap, begin, begin_joint, triangle, per, size, size_joint, IEEE)
        flow = tl.zeros([BLOCK, BLOCK], tl.float32)
        flow_joint = tl.zeros([BLOCK, BLOCK], tl.float32)
        t = i - (S - T)
        for member in range(G):
            head = h * G + member
            row = (b * H + head) * T
            q, grad, log, delta, z, z_joint = _load_queries(
                q_ptr + b * q_b + head * q_h, grad_ptr + b * g_b + head * g_h, log_ptr + row, delta_ptr + row,
                z_ptr + row, QUERIES, t, T, q_t, q_d, g_t, g_e, D, E, BLOCK_D, BLOCK_E,
            )  # fmt: skip
            ds, share, dd, dd_joint = _tile_gradients(
                q, grad, log, delta, z, z_joint, kj, vj, scale_j, half_j, x2, x2_joint, per, a,
                IEEE, LOSS, False, BLOCK,
            )  # fmt: skip
            flow += tl.where(upto, dd, 0.0)
            flow_joint += tl.where(upto, dd_joint, 0.0)
            if COLUMNS:
                share = tl.where(upto, share, 0.0)
                ds = tl.where(upto, ds, 0.0)
                dv = tl.dot(tl.trans(share.to(grad.dtype)), grad, dv, input_precision="ieee" if IEEE else "tf32")
                dk = tl.dot(tl.trans(ds.to(q.dtype)), q, dk, input_precision="ieee" if IEEE else "tf32")
        # −dG_mj = E_mj + f_m: what reaches the pair from all queries at or behind the later of the two.
        dline = dsum_ptr + block_i * S
        end = tl.load(dline + j, mask=j < S, other=0.0)
        end_joint = tl.load(dline + query_gap * n + j, mask=j < S, other=0.0)
        f = tl.load(f_ptr + i, mask=i < S, other=0.0)
        f_joint = tl.load(f_ptr + gap + i, mask=i < S, other=0.0)
        flow = tl.dot(upper, (flow * shrink).to(upper.dtype), input_precision="ieee" if IEEE else "tf32")
        flow_joint = tl.dot(upper, (flow_joint * shrink).to(upper.dtype), input_precision="ieee" if IEEE else "tf32")
        pull = flow + (end * shrink)[None, :] + (f * shrink)[:, None]
        pull_joint = flow_joint + (end_joint * shrink)[None, :] + (f_joint * shrink)[:, None]
        pull = tl.where(after, -pull * marginal, 0.0)
        pull_joint = tl.where(after, -pull_joint * joint, 0.0)
        pull += pull_joint
        norm_y = tl.where(scale_y == scale_y, scale_y * inverse_factor, 0.0)
        unit_y = (ky.to(tl.float32) * norm_y[:, None]).to(ky.dtype)
        if COLUMNS:
            dk_gram = tl.dot(tl.trans(pull.to(ky.dtype)), unit_y, dk_gram, input_precision="ieee" if IEEE else "tf32")
            dv_gram = tl.dot(tl.trans(pull_joint.to(vy.dtype)), vy, dv_gram, input_precision="ieee" if IEEE else "tf32")
            mass += tl.sum(pull_joint.to(vy.dtype).to(tl.float32), 0)
        else:
            dk_gram = tl.dot(pull.to(ky.dtype), unit_y, dk_gram, input_precision="ieee" if IEEE else "tf32")
            dv_gram = tl.dot(pull_joint.to(vy.dtype), vy, dv_gram, input_precision="ieee" if IEEE else "tf32")
            mass += tl.sum(pull_joint.to(vy.dtype).to(tl.float32), 1)
    norm = scale_x * inverse_factor
    unit = kx.to(tl.float32) * norm[:, None]
    dk = dk * inverse_variance + dk_gram * (inverse_weight_variance * top)
    dv += (dv_gram - mass[:, None] * vx.to(tl.float32)) * (inverse_value_variance * top)
    dk = (dk - unit * tl.sum(unit * dk, 1)[:, None]) * norm[:, None]
    alive = (scale_x >= 0)[:, None]
    key = kv_head * S
    if not COLUMNS:
        dk += load_rows(dk_ptr + key * D, mine, D, 1, S, pad_ptr, BLOCK, BLOCK_D, D, True, False).to(tl.float32)
        dv += load_rows(dv_ptr + key * E, mine, E, 1, S, pad_ptr, BLOCK, BLOCK_E, E, True, False).to(tl.float32)
    store_rows(dk_ptr + key * D, mine, D, S, tl.where(alive, dk, 0.0), BLOCK, BLOCK_D, D)
    store_rows(dv_ptr + key * E, mine, E, S, tl.where(alive, dv, 0.0), BLOCK, BLOCK_E, E)


BLOCK = 32


def _block(dtype: torch.dtype, width: int) -> int:
    return 32 if dtype == torch.float32 and not INTERPRETED else BLOCK


WARPS: dict[str, int] = {"prefix": 2, "attend": 2, "queries": 2, "keys": 4, "rows": 4}
STAGES: dict[str, int] = {"prefix": 2, "attend": 2, "queries": 2, "keys": 1, "rows": 1}


def _meta(q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, kernel: str) -> dict[str, Any]:
    return {
        "D": k.shape[-1], "E": v.shape[-1], "BLOCK_D": pow2(k.shape[-1]), "BLOCK_E": pow2(v.shape[-1]),
        "BLOCK": _block(k.dtype, k.shape[-1]), "PADDED": pad is not None, "IEEE": k.dtype == torch.float32,
        "num_warps": WARPS[kernel], "num_stages": 1 if k.dtype == torch.float32 else STAGES[kernel],
    }  # fmt: skip


_op = torch.library.custom_op


@_op("robust_attention::rkde_causal_forward", mutates_args=())
def _forward(
    q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, loss: str, a: float,
    variance: float, weight_variance: float, value_variance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype
    q, k, v = held(q, k, v)
    batch, heads, queries, _ = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    scale, square = scan_keys(k, v, pad, variance, read_v=True)
    meta = _meta(q, k, v, pad, "prefix")
    n = blocks(keys, meta["BLOCK"])
    sums = torch.empty(2, batch, kv_heads, n, keys, device=k.device, dtype=torch.float32)
    row = torch.empty(2, batch, kv_heads, keys, device=k.device, dtype=torch.float32)
    size = torch.empty_like(row)
    pads = (k, 0) if pad is None else (pad, pad.stride(0))
    fixed = constants(variance, weight_variance, value_variance)
    launch(
        _prefix, (batch * kv_heads * n,), k, v, pads[0], scale, square, sums, row, size, *k.stride(), *v.stride(),
        pads[1], batch * kv_heads * keys, kv_heads, keys, *fixed, **meta,
    )  # fmt: skip
    launch(
        _carry, (2 * batch * kv_heads * n,), sums, row, 1, keys,
        BLOCK=meta["BLOCK"], CHUNK=min(16, pow2(n, 4)), REVERSE=False, num_warps=4,
    )  # fmt: skip
    size = size.cumsum(-1)
    number = _numbers(pad, keys, k.device)
    fresh = torch.empty if queries <= keys else torch.zeros
    out = fresh(batch, heads, queries, v.shape[-1], device=q.device, dtype=q.dtype)
    log = torch.empty(batch, heads, queries, device=q.device, dtype=torch.float32)
    z = torch.zeros(2, batch, heads, queries, device=q.device, dtype=torch.float32)
    if queries > keys:
        log.fill_(torch.inf)
    half = q.dtype == torch.float16
    first_block = max(0, keys - queries) // meta["BLOCK"]
    meta = _meta(q, k, v, pad, "attend")
    launch(
        _attend, (batch * heads * (n - first_block),), q, k, v, pads[0], scale, square, sums, number, size, out, log, z,
        *q.stride(), *k.stride(), *v.stride(), pads[1], 0 if pad is None else keys,
        batch * kv_heads * keys, batch * heads * queries, heads, heads // kv_heads,
        queries, keys, first_block, LOG2E / variance, *fixed, a, LOSS=LOSSES[loss],
        REACH=12.0 if half else 50.0, LIFT=10.0 if half else 0.0, **meta,
    )  # fmt: skip
    return out.to(dtype), log, z, scale, square, sums, size, number


def _numbers(pad: Tensor | None, keys: int, device: torch.device) -> Tensor:
    """n_i, the number of visible keys up to i, `[B or 1, S]`."""
    if pad is None:
        return torch.arange(1, keys + 1, device=device, dtype=torch.float32)[None]
    return (pad != 0).float().cumsum(-1)


@_forward.register_fake
def _(
    q: Any, k: Any, v: Any, pad: Any, loss: Any, a: Any, variance: Any, weight_variance: Any, value_variance: Any
) -> Any:
    per_query, per_key, keys = q.shape[:3], k.shape[:3], k.shape[2]
    block = _block(torch.float32 if INTERPRETED else k.dtype, k.shape[-1])
    n = (keys + block - 1) // block

    def new(*shape: Any) -> Tensor:
        return q.new_empty(shape, dtype=torch.float32)

    return (
        q.new_empty(*per_query, v.shape[-1]), new(*per_query), new(2, *per_query), new(*per_key), new(*per_key),
        new(2, *k.shape[:2], n, keys), new(2, *per_key), new(1 if pad is None else k.shape[0], keys),
    )  # fmt: skip


@_op("robust_attention::rkde_causal_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, out: Tensor, log: Tensor, z: Tensor,
    scale: Tensor, square: Tensor, sums: Tensor, size: Tensor, number: Tensor, loss: str, a: float,
    variance: float, weight_variance: float, value_variance: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype
    grad, q, k, v, out = held(grad, q, k, v, out)
    batch, heads, queries, width = q.shape
    kv_heads, keys, value_width = k.shape[1], k.shape[2], v.shape[-1]
    group = heads // kv_heads
    delta = torch.where(log < torch.inf, (out.float() * grad.float()).sum(-1), 0.0)
    meta = _meta(q, k, v, pad, "queries")
    n = blocks(keys, meta["BLOCK"])
    fresh = torch.empty if queries <= keys else torch.zeros
    dq = fresh(batch, heads, queries, width, device=q.device, dtype=q.dtype)
    dk = torch.empty(batch, kv_heads, keys, width, device=q.device, dtype=q.dtype)
    dv = torch.empty(batch, kv_heads, keys, value_width, device=q.device, dtype=q.dtype)
    dsums = torch.empty(2, batch, heads, n, keys, device=q.device, dtype=torch.float32)
    dsize = torch.empty(2, batch, heads, keys, device=q.device, dtype=torch.float32)
    total = torch.empty(2, batch, kv_heads, keys, device=q.device, dtype=torch.float32)
    pads = (k, 0) if pad is None else (pad, pad.stride(0))
    fixed = constants(variance, weight_variance, value_variance)
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), pads[1], 0 if pad is None else keys)
    counts = batch * kv_heads * keys, batch * heads * queries
    tensors = (q, k, v, pads[0], scale, square, sums, number, size, grad, log, delta, z)
    launch(
        _queries, (batch * heads * n,), *tensors, dq, dsums, dsize, *strides, *counts, heads, group, queries, keys,
        0, variance / LOG2E, 1 / variance, *fixed, a, LOSS=LOSSES[loss], HALF=q.dtype == torch.float16, **meta,
    )  # fmt: skip
    launch(
        _carry, (2 * batch * kv_heads * n,), dsums, total, group, keys,
        BLOCK=meta["BLOCK"], CHUNK=min(16, pow2(n, 4)), REVERSE=True, num_warps=4,
    )  # fmt: skip
    later = dsize.unflatten(2, (kv_heads, group)).sum(3).flip(-1).cumsum(-1).flip(-1)
    f = total + 2 * later
    top = torch.maximum(total.abs(), later.abs()).amax(-1).amax(0)
    for columns in (True, False):
        launch(
            _keys, (batch * kv_heads * n,), *tensors, dsums, f, top, dk, dv, *strides, *counts, kv_heads, group,
            queries, keys, variance / LOG2E, 1 / variance, 1 / weight_variance, 1 / value_variance, *fixed, a,
            LOSS=LOSSES[loss], COLUMNS=columns, **_meta(q, k, v, pad, "keys" if columns else "rows"),
        )  # fmt: skip
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


@_backward.register_fake
def _(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> Any:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, pad, *rest = inputs
    ctx.save_for_backward(q, k, v, pad, *output)
    ctx.rest = rest
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 9
    return *_backward(grad, *ctx.saved_tensors, *ctx.rest), *(None,) * 6


_forward.register_autograd(_gradient, setup_context=_setup)


def rkde(
    q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, loss: str, a: float,
    variance: float, weight_variance: float, value_variance: float,
) -> Tensor:  # fmt: skip
    """Causal RKDE, the last query aligned with the last key."""
    return _forward(q, k, v, pad, loss, a, variance, weight_variance, value_variance)[0]
