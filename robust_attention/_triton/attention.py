"""Attention with weights on the keys: KDE, eq. 11, and the second pass of median of means.

    g_ij = p_ij / Σ_m wM_m p_im,   h_i = Σ_j wJ_j g_ij v_j,   p_ij = exp(q_i·k̂_j/σ²)

KDE is wJ = wM = 1 on the visible keys; a block of keys is wJ = wM = count[choice_i, j], gathered by a small product
onehot(choice) @ counts in the matrix units.

**What moves through memory.** q, k, v, out once each, 4 bytes a query (the log of the denominator) and 4 to 12 bytes a
key (scale and weights). Backward: two kernels (queries, then keys), each recomputes p from that log; no atomics, so
bits repeat. Nothing of size T·S exists.

**Floor.** Forward 2·T·S·(D+E) FLOPs a head; one exponential a score: for D = E = 64 an H200 spends as long on the
exponentials (16 a cycle and multiprocessor) as on both products. Backward as two kernels: 7 products where forward has
2.

**No running maximum.** Keys are unit vectors, so q·k̂/σ² ≤ ‖q‖/σ² is known before the first key is read. Taken as the
offset of the exponent it saves the maximum, the rescaling of the accumulator and their wait. Where the bound is so
loose that 2^(−2·bound) could vanish (‖q‖/σ² > 35, in half precision > 8) the block of queries takes the usual online
path instead.
"""

import math
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
    store_rows,
)


@triton.jit
def _scores(q, k, scale, IEEE: tl.constexpr):
    """log2 p."""
    return tl.dot(q, tl.trans(k), input_precision="ieee" if IEEE else "tf32") * scale[None, :]


@triton.jit
def _key_rows(k_ptr, v_ptr, pad_ptr, start, k_s, k_d, v_s, v_e, S,
              D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
              PADDED: tl.constexpr, EDGE: tl.constexpr):  # fmt: skip
    k = load_rows(k_ptr, start, k_s, k_d, S, pad_ptr, BLOCK_N, BLOCK_D, D, EDGE, PADDED)
    v = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK_N, BLOCK_E, E, EDGE, PADDED)
    return k, v


@triton.jit
def _forward_loop(
    acc, total, top, q, onehot, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr,
    begin, end, limit_i, k_s, k_d, v_s, v_e, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr, WEIGHTED: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    EDGE: tl.constexpr, ONLINE: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Fold the keys begin … end into acc = Σ wJ p v and total = Σ wM p, both relative to 2^top."""
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        k, v = _key_rows(
            k_ptr, v_ptr, pad_ptr, start, k_s, k_d, v_s, v_e, S, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PADDED, EDGE
        )
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
            shrink = tl.math.exp2(top - safe_top)
            p = tl.math.exp2(s - safe_top[:, None])
            acc = acc * shrink[:, None]
            total = total * shrink
            top = new_top
        else:
            p = tl.math.exp2(s - top[:, None])
            if EDGE and CAUSAL:
                p = tl.where(j[None, :] <= limit_i[:, None], p, 0.0)
        if EDGE and CAUSAL:
            # A future value that is not finite must not reach the past as 0·NaN.
            v = tl.where(tl.abs(v.to(tl.float32)) < float("inf"), v, 0.0).to(v.dtype)
        if BLOCKS > 0:
            slot = tl.arange(0, BLOCKS)
            if EDGE:
                count = tl.load(count_ptr + slot[:, None] * S + j[None, :], mask=(j < S)[None, :], other=0.0)
            else:
                count = tl.load(count_ptr + slot[:, None] * S + j[None, :])
            p = p * tl.dot(onehot, count, input_precision="ieee" if IEEE else "tf32")
        if WEIGHTED:
            if EDGE:
                joint = tl.load(joint_ptr + j, mask=j < S, other=0.0)
                marginal = tl.load(marginal_ptr + j, mask=j < S, other=0.0)
            else:
                joint = tl.load(joint_ptr + j)
                marginal = tl.load(marginal_ptr + j)
            total += tl.sum(p * marginal[None, :], 1)
            p = p * joint[None, :]
        elif (EDGE or PADDED) and BLOCKS == 0:
            total += tl.sum(tl.where((scale < 0)[None, :], 0.0, p), 1)
        elif PADDED:
            p = tl.where((scale < 0)[None, :], 0.0, p)
            total += tl.sum(p, 1)
        else:
            total += tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision="ieee" if IEEE else "tf32")
    return acc, total, top


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr, choice_ptr, out_ptr, log_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, pad_b, H, G, T, S, factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, WEIGHTED: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr, REACH: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head against all its keys."""
    per_head = tl.cdiv(T, BLOCK_M)
    pid = tl.program_id(0)
    head = pid // per_head
    block = pid % per_head
    if CAUSAL:
        block = per_head - 1 - block  # the longest rows start first
    b = (head // H).to(tl.int64)
    h = (head % H).to(tl.int64)
    first = block * BLOCK_M
    t = first + tl.arange(0, BLOCK_M)
    kv_head = b * (H // G) + h // G
    k_ptr += b * k_b + h // G * k_h
    v_ptr += b * v_b + h // G * v_h
    pad_ptr += b * pad_b
    scale_ptr += kv_head * S
    joint_ptr += kv_head * S
    marginal_ptr += kv_head * S
    row = head.to(tl.int64) * T
    q = load_rows(q_ptr + b * q_b + h * q_h, first, q_t, q_d, T, q_ptr, BLOCK_M, BLOCK_D, D, True, False)
    wide_q = q.to(tl.float32)
    bound = tl.sqrt(tl.sum(wide_q * wide_q, 1)) * factor
    onehot = q
    if BLOCKS > 0:
        choice = tl.load(choice_ptr + row + t, mask=t < T, other=0)
        onehot = (choice[:, None] == tl.arange(0, BLOCKS)[None, :]).to(q.dtype)
    limit_i = t + (S - T)
    end = S
    whole = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(S, first + BLOCK_M + S - T))
        whole = tl.maximum(0, tl.minimum(whole, (first + S - T + 1) // BLOCK_N * BLOCK_N))
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if tl.max(bound, 0) < REACH:
        top = bound - LIFT
        acc, total, top = _forward_loop(
            acc, total, top, q, onehot, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr,
            0, whole, limit_i, k_s, k_d, v_s, v_e, S, D, E, BLOCK_D, BLOCK_E, BLOCK_N,
            BLOCKS, WEIGHTED, PADDED, CAUSAL, False, False, IEEE,
        )  # fmt: skip
        acc, total, top = _forward_loop(
            acc, total, top, q, onehot, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr,
            whole, end, limit_i, k_s, k_d, v_s, v_e, S, D, E, BLOCK_D, BLOCK_E, BLOCK_N,
            BLOCKS, WEIGHTED, PADDED, CAUSAL, True, False, IEEE,
        )  # fmt: skip
    else:
        top = tl.full([BLOCK_M], float("-inf"), tl.float32)
        acc, total, top = _forward_loop(
            acc, total, top, q, onehot, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr,
            0, end, limit_i, k_s, k_d, v_s, v_e, S, D, E, BLOCK_D, BLOCK_E, BLOCK_N,
            BLOCKS, WEIGHTED, PADDED, CAUSAL, True, True, IEEE,
        )  # fmt: skip
    seen = total != 0
    out = acc * tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)[:, None]
    out = tl.where((total != total)[:, None], float("nan"), out)
    # +inf makes every g of the row 0 in backward: rows that see nothing, and poisoned rows.
    log = tl.where(total > 0, top + tl.math.log2(tl.where(total > 0, total, 1.0)), float("inf"))
    tl.store(log_ptr + row + t, log, mask=t < T)
    store_rows(out_ptr + row * E, first, E, T, out, BLOCK_M, BLOCK_E, E)


@triton.jit
def _query_loop(
    acc, q, grad, onehot, log, delta, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr,
    begin, end, limit_i, k_s, k_d, v_s, v_e, S, inverse_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCKS: tl.constexpr, WEIGHTED: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    EDGE: tl.constexpr, IEEE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        k, v = _key_rows(
            k_ptr, v_ptr, pad_ptr, start, k_s, k_d, v_s, v_e, S, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PADDED, EDGE
        )
        if EDGE:
            scale = tl.load(scale_ptr + j, mask=j < S, other=0.0)
        else:
            scale = tl.load(scale_ptr + j)
        g = tl.math.exp2(_scores(q, k, scale, IEEE) - log[:, None])
        dov = tl.dot(grad, tl.trans(v), input_precision="ieee" if IEEE else "tf32")
        if BLOCKS > 0:
            slot = tl.arange(0, BLOCKS)
            if EDGE:
                count = tl.load(count_ptr + slot[:, None] * S + j[None, :], mask=(j < S)[None, :], other=0.0)
            else:
                count = tl.load(count_ptr + slot[:, None] * S + j[None, :])
            g = g * tl.dot(onehot, count, input_precision="ieee" if IEEE else "tf32")
        if WEIGHTED:
            if EDGE:
                joint = tl.load(joint_ptr + j, mask=j < S, other=0.0)
                marginal = tl.load(marginal_ptr + j, mask=j < S, other=0.0)
            else:
                joint = tl.load(joint_ptr + j)
                marginal = tl.load(marginal_ptr + j)
            ds = g * (joint[None, :] * dov - marginal[None, :] * delta[:, None])
        else:
            ds = g * (dov - delta[:, None])
        if EDGE and CAUSAL:
            ds = tl.where(j[None, :] <= limit_i[:, None], ds, 0.0)
            k = tl.where(tl.abs(k.to(tl.float32)) < float("inf"), k, 0.0).to(k.dtype)
        if HALF:  # float16 cannot hold ds/‖k‖ of long keys: unit keys instead
            k = (k.to(tl.float32) * (scale * inverse_factor)[:, None]).to(k.dtype)
        else:
            ds = ds * (scale * inverse_factor)[None, :]
        acc = tl.dot(ds.to(k.dtype), k, acc, input_precision="ieee" if IEEE else "tf32")
    return acc


@triton.jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr, choice_ptr, out_ptr, grad_ptr,
    log_ptr, delta_ptr, dq_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, g_b, g_h, g_t, g_e, pad_b, H, G, T, S,
    inverse_factor, inverse_variance,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, WEIGHTED: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """δ_i = do_i·h_i, kept for the keys' kernel, and dq_i = Σ_j ds_ij k̂_j/σ², ds = g (wJ do·v − wM δ)."""
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
    kv_head = b * (H // G) + h // G
    k_ptr += b * k_b + h // G * k_h
    v_ptr += b * v_b + h // G * v_h
    pad_ptr += b * pad_b
    scale_ptr += kv_head * S
    joint_ptr += kv_head * S
    marginal_ptr += kv_head * S
    row = head.to(tl.int64) * T
    q = load_rows(q_ptr + b * q_b + h * q_h, first, q_t, q_d, T, q_ptr, BLOCK_M, BLOCK_D, D, True, False)
    grad = load_rows(grad_ptr + b * g_b + h * g_h, first, g_t, g_e, T, q_ptr, BLOCK_M, BLOCK_E, E, True, False)
    out = load_rows(out_ptr + row * E, first, E, 1, T, q_ptr, BLOCK_M, BLOCK_E, E, True, False)
    log = tl.load(log_ptr + row + t, mask=t < T, other=float("inf"))
    alive = log < float("inf")
    delta = tl.where(alive, tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1), 0.0)
    tl.store(delta_ptr + row + t, delta, mask=t < T)
    onehot = q
    if BLOCKS > 0:
        choice = tl.load(choice_ptr + row + t, mask=t < T, other=0)
        onehot = (choice[:, None] == tl.arange(0, BLOCKS)[None, :]).to(q.dtype)
    limit_i = t + (S - T)
    end = S
    whole = S // BLOCK_N * BLOCK_N
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(S, first + BLOCK_M + S - T))
        whole = tl.maximum(0, tl.minimum(whole, (first + S - T + 1) // BLOCK_N * BLOCK_N))
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    acc = _query_loop(
        acc, q, grad, onehot, log, delta, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr,
        0, whole, limit_i, k_s, k_d, v_s, v_e, S, inverse_factor, D, E, BLOCK_D, BLOCK_E, BLOCK_N,
        BLOCKS, WEIGHTED, PADDED, CAUSAL, False, IEEE, HALF,
    )  # fmt: skip
    acc = _query_loop(
        acc, q, grad, onehot, log, delta, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr,
        whole, end, limit_i, k_s, k_d, v_s, v_e, S, inverse_factor, D, E, BLOCK_D, BLOCK_E, BLOCK_N,
        BLOCKS, WEIGHTED, PADDED, CAUSAL, True, IEEE, HALF,
    )  # fmt: skip
    acc = tl.where(alive[:, None], acc * inverse_variance, 0.0)
    store_rows(dq_ptr + row * D, first, D, T, acc, BLOCK_M, BLOCK_D, D)


@triton.jit
def _key_loop(
    dk, dv, d_joint, d_marginal, k, v, scale, joint, marginal, count, j,
    q_ptr, grad_ptr, log_ptr, delta_ptr, choice_ptr, begin, end, q_t, q_d, g_t, g_e, T, S,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCKS: tl.constexpr, WEIGHTED: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BLOCK_M):
        start = tl.multiple_of(start, BLOCK_M)
        t = start + tl.arange(0, BLOCK_M)
        q = load_rows(q_ptr, start, q_t, q_d, T, q_ptr, BLOCK_M, BLOCK_D, D, EDGE, False)
        grad = load_rows(grad_ptr, start, g_t, g_e, T, q_ptr, BLOCK_M, BLOCK_E, E, EDGE, False)
        if EDGE:
            log = tl.load(log_ptr + t, mask=t < T, other=float("inf"))
            delta = tl.load(delta_ptr + t, mask=t < T, other=0.0)
        else:
            log = tl.load(log_ptr + t)
            delta = tl.load(delta_ptr + t)
        s = tl.dot(k, tl.trans(q), input_precision="ieee" if IEEE else "tf32") * scale[:, None]
        g = tl.math.exp2(s - log[None, :])
        dov = tl.dot(v, tl.trans(grad), input_precision="ieee" if IEEE else "tf32")
        if EDGE and CAUSAL:
            g = tl.where(j[:, None] <= (t + (S - T))[None, :], g, 0.0)
        if BLOCKS > 0:
            if EDGE:
                choice = tl.load(choice_ptr + t, mask=t < T, other=0)
            else:
                choice = tl.load(choice_ptr + t)
            onehot = (tl.arange(0, BLOCKS)[:, None] == choice[None, :]).to(q.dtype)
            g = g * tl.dot(count, onehot, input_precision="ieee" if IEEE else "tf32")
        dv = tl.dot(g.to(grad.dtype), grad, dv, input_precision="ieee" if IEEE else "tf32")
        if WEIGHTED:
            up = g * dov
            down = g * delta[None, :]
            d_joint += tl.sum(up, 1)
            d_marginal -= tl.sum(down, 1)
            ds = joint[:, None] * up - marginal[:, None] * down
        else:
            ds = g * (dov - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee" if IEEE else "tf32")
    return dk, dv, d_joint, d_marginal


@triton.jit
def _backward_keys(
    q_ptr, k_ptr, v_ptr, pad_ptr, scale_ptr, joint_ptr, marginal_ptr, count_ptr, choice_ptr, grad_ptr,
    log_ptr, delta_ptr, dk_ptr, dv_ptr, d_joint_ptr, d_marginal_ptr,
    q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, g_b, g_h, g_t, g_e, pad_b, HKV, G, T, S,
    inverse_factor, inverse_variance,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCKS: tl.constexpr, WEIGHTED: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """One block of keys against all queries of the heads that share it: dk (through the normalisation), dv, dw."""
    per_head = tl.cdiv(S, BLOCK_N)
    pid = tl.program_id(0)
    kv_head = pid // per_head
    first = pid % per_head * BLOCK_N
    b = (kv_head // HKV).to(tl.int64)
    h = (kv_head % HKV).to(tl.int64)
    j = first + tl.arange(0, BLOCK_N)
    key = kv_head.to(tl.int64) * S
    k, v = _key_rows(
        k_ptr + b * k_b + h * k_h, v_ptr + b * v_b + h * v_h, pad_ptr + b * pad_b, first, k_s, k_d, v_s, v_e, S,
        D, E, BLOCK_D, BLOCK_E, BLOCK_N, PADDED, True,
    )  # fmt: skip
    scale = tl.load(scale_ptr + key + j, mask=j < S, other=-1.0)
    joint = scale
    marginal = scale
    if WEIGHTED:
        joint = tl.load(joint_ptr + key + j, mask=j < S, other=0.0)
        marginal = tl.load(marginal_ptr + key + j, mask=j < S, other=0.0)
    count = k
    if BLOCKS > 0:
        slot = tl.arange(0, BLOCKS)
        count = tl.load(count_ptr + slot[None, :] * S + j[:, None], mask=(j < S)[:, None], other=0.0)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    d_joint = tl.zeros([BLOCK_N], tl.float32)
    d_marginal = tl.zeros([BLOCK_N], tl.float32)
    edge_begin = 0
    edge_end = 0
    whole_end = T // BLOCK_M * BLOCK_M
    if CAUSAL:
        # Queries before `first − (S − T)` see none of these keys; from `first + BLOCK_N − 1 − (S − T)` on, all.
        edge_begin = tl.minimum(whole_end, tl.maximum(0, first - (S - T)) // BLOCK_M * BLOCK_M)
        edge_end = tl.minimum(whole_end, tl.cdiv(tl.maximum(0, first + BLOCK_N - 1 - (S - T)), BLOCK_M) * BLOCK_M)
    for member in range(G):
        head = h * G + member
        row = (b * HKV * G + head) * T
        q_head = q_ptr + b * q_b + head * q_h
        grad_head = grad_ptr + b * g_b + head * g_h
        if CAUSAL:
            dk, dv, d_joint, d_marginal = _key_loop(
                dk, dv, d_joint, d_marginal, k, v, scale, joint, marginal, count, j,
                q_head, grad_head, log_ptr + row, delta_ptr + row, choice_ptr + row, edge_begin, edge_end,
                q_t, q_d, g_t, g_e, T, S, D, E, BLOCK_D, BLOCK_E, BLOCK_M, BLOCKS, WEIGHTED, CAUSAL, True, IEEE,
            )  # fmt: skip
        dk, dv, d_joint, d_marginal = _key_loop(
            dk, dv, d_joint, d_marginal, k, v, scale, joint, marginal, count, j,
            q_head, grad_head, log_ptr + row, delta_ptr + row, choice_ptr + row, edge_end, whole_end,
            q_t, q_d, g_t, g_e, T, S, D, E, BLOCK_D, BLOCK_E, BLOCK_M, BLOCKS, WEIGHTED, CAUSAL, False, IEEE,
        )  # fmt: skip
        dk, dv, d_joint, d_marginal = _key_loop(
            dk, dv, d_joint, d_marginal, k, v, scale, joint, marginal, count, j,
            q_head, grad_head, log_ptr + row, delta_ptr + row, choice_ptr + row, whole_end, T,
            q_t, q_d, g_t, g_e, T, S, D, E, BLOCK_D, BLOCK_E, BLOCK_M, BLOCKS, WEIGHTED, CAUSAL, True, IEEE,
        )  # fmt: skip
    alive = scale >= 0  # not hidden, and not NaN
    if WEIGHTED:
        dv = dv * joint[:, None]
        tl.store(d_joint_ptr + key + j, tl.where(alive, d_joint, 0.0), mask=j < S)
        tl.store(d_marginal_ptr + key + j, tl.where(alive, d_marginal, 0.0), mask=j < S)
    # dk = (dk̂ − k̂ (k̂·dk̂))/‖k‖, with 1/‖k‖ = scale · inverse_factor.
    norm = scale * inverse_factor
    unit = k.to(tl.float32) * norm[:, None]
    dk = (dk - unit * tl.sum(unit * dk, 1)[:, None]) * (norm * inverse_variance)[:, None]
    dk = tl.where(alive[:, None], dk, 0.0)
    dv = tl.where(alive[:, None], dv, 0.0)
    store_rows(dk_ptr + key * D, first, D, S, dk, BLOCK_N, BLOCK_D, D)
    store_rows(dv_ptr + key * E, first, E, S, dv, BLOCK_N, BLOCK_E, E)


def tile(kernel: str, width: int, dtype: torch.dtype, queries: int, keys: int, causal: bool) -> dict[str, int]:
    """Block shapes, chosen by hand on an H200 (benchmarks/tiles.py measures them)."""
    if INTERPRETED:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 1}
    if dtype == torch.float32:
        return {
            "BLOCK_M": 64,
            "BLOCK_N": 32 if width > 64 else 64,
            "num_warps": 8,
            "num_stages": 1 if width > 64 else 2,
        }
    found = TILES.get((kernel, pow2(width)), TILES[kernel, 64])
    m, n, warps, stages = found
    if kernel in ("queries", "choose") and keys <= 512 and width > 32:
        n = 32  # little to pipeline: more programs at once instead
    if kernel == "keys":
        m, n = min(m, pow2(queries)), min(n, pow2(keys, 32))
    else:
        m, n = min(m, pow2(queries, 32)), min(n, pow2(keys))
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps if max(m, n) > 32 else 4, "num_stages": stages}


# (queries, keys, warps, stages)
TILES: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("forward", 16): (128, 64, 4, 3),
    ("forward", 32): (128, 64, 4, 3),
    ("forward", 64): (128, 32, 4, 3),
    ("forward", 128): (128, 64, 8, 2),
    ("queries", 16): (128, 64, 4, 3),
    ("queries", 32): (128, 64, 4, 3),
    ("queries", 64): (128, 64, 4, 2),
    ("queries", 128): (64, 64, 4, 2),
    ("choose", 16): (64, 64, 4, 3),
    ("choose", 32): (64, 64, 4, 3),
    ("choose", 64): (64, 64, 4, 3),
    ("choose", 128): (64, 64, 4, 2),
    ("keys", 16): (64, 128, 4, 3),
    ("keys", 32): (64, 128, 4, 3),
    ("keys", 64): (64, 64, 4, 2),
    ("keys", 128): (64, 64, 4, 2),
}


def _common(
    q: Tensor, k: Tensor, v: Tensor, pad: Tensor | None, counts: Tensor | None, weighted: bool
) -> dict[str, Any]:
    return {
        "D": k.shape[-1], "E": v.shape[-1], "BLOCK_D": pow2(k.shape[-1]), "BLOCK_E": pow2(v.shape[-1]),
        "BLOCKS": 0 if counts is None else counts.shape[0], "WEIGHTED": weighted, "PADDED": pad is not None,
        "IEEE": q.dtype == torch.float32,
    }  # fmt: skip


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, joint: Tensor | None, marginal: Tensor | None,
    counts: Tensor | None, choice: Tensor | None, pad: Tensor | None, causal: bool, variance: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out `[B,H,T,E]` in the dtype of q, log2 of the denominators `[B,H,T]`).

    Args:
        scale: from `scan_keys`.
        joint, marginal: weights `[B, Hkv, S]`, float32, of mean about 1; 0 on hidden keys.
        counts: `[16·n, S]` in the dtype of q, row `choice[b, h, t]` (int32) weights the keys of that query.
    """
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    out = q.new_empty(batch, heads, queries, v.shape[-1])
    log = torch.empty(batch, heads, queries, device=q.device, dtype=torch.float32)
    half = q.dtype == torch.float16
    meta = tile("forward", max(width, v.shape[-1]), q.dtype, queries, keys, causal)
    launch(
        _forward, (batch * heads * blocks(queries, meta["BLOCK_M"]),),
        q, k, v, k if pad is None else pad, scale, scale if joint is None else joint,
        scale if marginal is None else marginal, q if counts is None else counts, log if choice is None else choice,
        out, log, *q.stride(), *k.stride(), *v.stride(), 0 if pad is None else pad.stride(0),
        heads, heads // k.shape[1], queries, keys, LOG2E / variance,
        **_common(q, k, v, pad, counts, joint is not None), CAUSAL=causal,
        REACH=12.0 if half else 50.0, LIFT=10.0 if half else 0.0, **meta,
    )  # fmt: skip
    return out, log


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, joint: Tensor | None, marginal: Tensor | None,
    counts: Tensor | None, choice: Tensor | None, pad: Tensor | None, out: Tensor, log: Tensor, causal: bool,
    variance: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dwJ, dwM); the last two are empty without weights."""
    batch, heads, queries, width = q.shape
    kv_heads, keys, value_width = k.shape[1], k.shape[2], v.shape[-1]
    group = heads // kv_heads
    dq = q.new_empty(batch, heads, queries, width)
    dk = k.new_empty(batch, kv_heads, keys, width)
    dv = v.new_empty(batch, kv_heads, keys, value_width)
    weighted = joint is not None
    d_joint = torch.empty_like(scale) if weighted else scale.new_empty(0)
    d_marginal = torch.empty_like(scale) if weighted else scale.new_empty(0)
    delta = torch.empty_like(log)
    common = _common(q, k, v, pad, counts, weighted)
    tensors = (
        q, k, v, k if pad is None else pad, scale, scale if joint is None else joint,
        scale if marginal is None else marginal, q if counts is None else counts, log if choice is None else choice,
    )  # fmt: skip
    strides = (*q.stride(), *k.stride(), *v.stride(), *grad.stride(), 0 if pad is None else pad.stride(0))
    meta = tile("queries", max(width, value_width), q.dtype, queries, keys, causal)
    launch(
        _backward_queries, (batch * heads * blocks(queries, meta["BLOCK_M"]),),
        *tensors, out, grad, log, delta, dq, *strides, heads, group, queries, keys,
        variance / LOG2E, 1 / variance, **common, CAUSAL=causal, HALF=q.dtype == torch.float16, **meta,
    )  # fmt: skip
    meta = tile("keys", max(width, value_width), q.dtype, queries, keys, causal)
    launch(
        _backward_keys, (batch * kv_heads * blocks(keys, meta["BLOCK_N"]),),
        *tensors, grad, log, delta, dk, dv, d_joint if weighted else delta, d_marginal if weighted else delta,
        *strides, kv_heads, group, queries, keys, variance / LOG2E, 1 / variance, **common, CAUSAL=causal, **meta,
    )  # fmt: skip
    return dq, dk, dv, d_joint, d_marginal


__all__ = ["backward", "forward", "held", "math"]
