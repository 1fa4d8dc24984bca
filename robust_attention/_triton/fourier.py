"""Fourier attention: a product of sincs over the coordinates, as a sum of logarithms, tile by tile.

    log κ_ij = p Σ_d log|sin x_ijd / x_ijd|,   x_ijd = R_d(q_id − k_jd),   h_i = Σ_j κ_ij v_j / Σ_j κ_ij
    ∂log κ_ij/∂q_id = −∂log κ_ij/∂k_jd = p R_d c(x_ijd),   ∂log κ_ij/∂R_d = p (q_id − k_jd) c(x_ijd),
    c(x) = cot x − 1/x

**Neither sine nor cosine.** With x = nπ + r, |r| ≤ π/2, and p even, only |sin x| = |sin r| matters:

    log|sin x / x| = log(sin r / r) + log|r/x|,   cot x − 1/x = (cot r − 1/r) + (x − r)/(r x)

The first terms are r²·L(r²) and r·C(r²), polynomials of six and seven coefficients; the second are 0 where n = 0. So x
→ 0 keeps every digit without a branch, and beside a zero of the sine r is as exact as x: π leaves in three parts, two
of them exactly. The ratios r/x of four coordinates share one division and one logarithm. Up to 2²³ no float32 x has |r|
< 8e-9 (all of them were tried), so that a weight is exactly 0 only where four coordinates of a group meet zeros of the
sine beyond |x| = 200; its gradient is 0 then. |R_d q_d| and |R_d k_d| are held below 2²², where float32 has no digit of
a sine left.

Errors of 4 Σ_d log|sin x / x| in float32, 64 coordinates, q and k normal, root mean square, in brackets those of
log(|sin x / x|): R = 0.1: 4e-8 (1e-6); R = 0.3: 7e-7 (1e-6); R = 1: 8e-4 (8e-4; x itself is rounded, near π). The other
way to save the sines, sin(Rq)cos(Rk) − cos(Rq)sin(Rk) from O(N) of them, loses the digits of small sines (R = 0.1:
2e-4; R = 0.3: 7e-5) and has to divide by x all the same.

**δ is not do·h alone.** Fourier weights are close to one-hot, so that do·v_j − δ_i cancels at the one key that matters,
and with δ = do·h the rounding of h was up to four times the reference's error of dq and dk. The queries' kernel also
sums ε_i = Σ_j g_ij (do_i·v_j − do_i·h_i), 0 but for rounding, and Σ_j g_ij c(x_ij), and ε times these is taken off at
the end; the keys' kernel gets δ and ε. A second walk over the keys for ε came to the same errors and costs all
logarithms again.

**What moves through memory.** q, k, v, out once each; float32 copies of q and k, one coordinate after the other ([D, T]
a head), so that a tile reads a coordinate of its rows in one run; 8 bytes a query (largest log2 κ, inverse sum), 4 a
key (whether it counts). Backward: two kernels (queries, then keys), each recomputes log κ. Registers cannot be indexed
by d: what a tile sums for coordinate d is added to [D, T] in memory by the one program that owns these rows: two such
sums for queries, four where R learns, one for keys. No atomics: bits repeat. Nothing of size T·S exists; R's gradient
is a sum over [D, T].

**Floor.** Counted, instructions a (query, key, coordinate), with additions fused: forward 16 additions and
multiplications, 3 comparisons and selections, and a quarter of a division, a logarithm and an addition. Backward: the
same again in each kernel, and for the slope 18, 2 and a division, and then 2 for keys, 4 for queries, 8 where R learns.
Products with v and do are E a pair in the matrix units, exponentials one a pair: little beside D of the above. Compiled
for sm_90 (Triton 3.7.1, 16 bits, 64 wide, the tiles below) the loops over coordinates hold 29 forward, 29 + 32 for keys
and 29 + 42 for queries where R learns, with loads and addresses, without spills.

**Tiles** are [met, kept]: 32 lanes hold 32 kept rows, so that sums over the met rows need few other lanes. The product
do·v is written as the transpose of [kept, met]: its layout becomes that of the slopes' loop, and the other way round a
sum needed three times the shuffles (35 and 46 instructions).
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from robust_attention._triton.common import INTERPRETED, blocks, held, launch, load_rows, pow2, store_rows

_op = torch.library.custom_op
LANES = 128
"""The largest block. Copies are padded to whole blocks: their columns need no mask."""
GROUP = 4
"""Coordinates that share a division and a logarithm; copies are padded with zeros to a multiple."""
REACH = 2.0**22
"""The largest |R_d q_d| and |R_d k_d|; beyond, they are held."""


@triton.jit
def _columns(
    x_ptr, v_ptr, pad_ptr, limit_ptr, out_ptr, state_ptr,
    x_b, x_h, x_n, x_d, v_b, v_h, v_n, v_e, pad_b, HEADS, N, LONG,
    D: tl.constexpr, E: tl.constexpr, DEPTH: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, PADDED: tl.constexpr, BLANK: tl.constexpr,
):  # fmt: skip
    """One coordinate after the other, [DEPTH, LONG] a head, zeros beyond D and N.

    Keys that are hidden or not finite (or whose value is not) are 0 and named in their state: −1 hidden, NaN not
    finite, 0 otherwise. Queries that are not finite are NaN (0 where BLANK).
    """
    per_head = LONG // ROWS
    pid = tl.program_id(0)
    head = pid // per_head
    start = pid % per_head * ROWS
    b = (head // HEADS).to(tl.int64)
    h = (head % HEADS).to(tl.int64)
    rows = start + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_D)
    pad_row = pad_ptr + b * pad_b
    x = load_rows(x_ptr + b * x_b + h * x_h, start, x_n, x_d, N, pad_row, ROWS, BLOCK_D, D, True, PADDED)
    x = x.to(tl.float32)
    wrong = tl.sum(x * 0.0, 1)  # 0, or NaN where an entry is not finite
    if KEYS:
        v = load_rows(v_ptr + b * v_b + h * v_h, start, v_n, v_e, N, pad_row, ROWS, BLOCK_E, E, True, PADDED)
        wrong += tl.sum(v.to(tl.float32) * 0.0, 1)
        state = tl.where(rows < N, wrong, -1.0)
        if PADDED:
            state = tl.where(tl.load(pad_row + rows, mask=rows < N, other=0) != 0, state, -1.0)
        tl.store(state_ptr + head.to(tl.int64) * LONG + rows, state)
    limit = tl.load(limit_ptr + cols, mask=cols < D, other=0.0)
    x = tl.minimum(tl.maximum(x, -limit[None, :]), limit[None, :])
    if KEYS or BLANK:
        x = tl.where((wrong == 0)[:, None], x, 0.0)
    else:
        x = tl.where((wrong == 0)[:, None], x, float("nan"))
    at = out_ptr + head.to(tl.int64) * DEPTH * LONG + (cols.to(tl.int64) * LONG)[:, None] + rows[None, :]
    tl.store(at, tl.trans(x), mask=(cols < DEPTH)[:, None])


@triton.jit
def _reduced(x):
    """(r, n): x = nπ + r. Adding 1.5·2²³ rounds; the first two parts of π times n are exact (n below 2¹³)."""
    n = (x * 0.318309886 + 12582912.0) - 12582912.0
    r = ((x - n * 3.140625) - n * 0.000967502593994140625) - n * 1.50995799e-07
    return r, n


@triton.jit
def _slope(x):
    """cot x − 1/x; 0 at x = 0 and at an exact zero of the sine."""
    r, n = _reduced(x)
    y = r * r
    c = y * -6.579806e-07 - 1.5180841e-07
    c = c * y - 2.5514772e-05
    c = c * y - 0.00020744612
    c = c * y - 0.0021183859
    c = c * y - 0.022221874
    c = c * y - 0.33333334
    apart = tl.where(n * r == 0, float("inf"), r * x)
    return c * r + (x - r) / apart


@triton.jit
def _log_kernel(
    met_ptr, kept_ptr, radius_ptr, met_n, kept_n, power,
    DEPTH: tl.constexpr, MET: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """log2 κ [MET, KEPT] of the rows whose first coordinates lie at met_ptr and kept_ptr."""
    total = tl.zeros([MET, KEPT], tl.float32)
    for group in range(0, DEPTH, 4):
        part = tl.zeros([MET, KEPT], tl.float32)
        above = tl.full([MET, KEPT], 1.0, tl.float32)
        below = tl.full([MET, KEPT], 1.0, tl.float32)
        for lane in tl.static_range(4):
            d = group + lane
            kept = tl.load(kept_ptr + d * kept_n)
            met = tl.load(met_ptr + d * met_n)
            x = (kept[None, :] - met[:, None]) * tl.load(radius_ptr + d)
            r, n = _reduced(x)
            y = r * r
            c = y * -5.911757e-07 - 1.8622109e-06
            c = c * y - 4.0083898e-05
            c = c * y - 0.00050756906
            c = c * y - 0.008015299
            c = c * y - 0.24044916
            part += c * y
            inside = n == 0
            above *= tl.where(inside, 1.0, r)
            below *= tl.where(inside, 1.0, x)
        total += part + tl.math.log2(tl.abs(above / below))
    return total * power


@triton.jit
def _add(at, tile):
    """Add a tile's sums over its first dimension to memory that is this program's own."""
    tl.store(at, tl.load(at) + tl.sum(tile, 0))


@triton.jit
def _pull(
    ds, g, met_ptr, kept_ptr, radius_ptr, sum_ptr, term, met_n, kept_n,
    D: tl.constexpr, MASS: tl.constexpr, RADIUS: tl.constexpr,
):  # fmt: skip
    """Add Σ ds c(x) over the met rows to the kept rows' sums, coordinate by coordinate.

    The sums lie `term` apart: Σ ds c, Σ g c (if MASS), and both times (kept − met) (if RADIUS).
    """
    for d in range(D):
        kept = tl.load(kept_ptr + d * kept_n)
        met = tl.load(met_ptr + d * met_n)
        apart = kept[None, :] - met[:, None]
        c = _slope(apart * tl.load(radius_ptr + d))
        at = sum_ptr + d * kept_n
        up = ds * c
        _add(at, up)
        if MASS:
            mass = g * c
            _add(at + term, mass)
            if RADIUS:
                _add(at + 2 * term, up * apart)
                _add(at + 3 * term, mass * apart)
    # The next tile adds to the same places.
    tl.debug_barrier()


@triton.jit
def _forward(
    q_ptr, k_ptr, v_ptr, pad_ptr, state_ptr, radius_ptr, out_ptr, log_ptr,
    v_b, v_h, v_s, v_e, pad_b, H, G, T, S, LONG_T, LONG_S, QUERIES, power,
    E: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head against all its keys: out, maximum and inverse sum."""
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
    q_ptr += head.to(tl.int64) * DEPTH * LONG_T
    k_ptr += kv_head * DEPTH * LONG_S
    state_ptr += kv_head * LONG_S
    v_ptr += b * v_b + h // G * v_h
    pad_ptr += b * pad_b
    limit = t + (S - T)
    end = S
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(S, first + BLOCK_M + S - T))
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in range(0, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        s = _log_kernel(k_ptr + j, q_ptr + t, radius_ptr, LONG_S, LONG_T, power, DEPTH, BLOCK_N, BLOCK_M)
        state = tl.load(state_ptr + j)
        s = tl.where((state < 0)[:, None], float("-inf"), s + state[:, None])
        if CAUSAL:
            s = tl.where(j[:, None] <= limit[None, :], s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 0))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink = tl.math.exp2(top - safe_top)
        p = tl.math.exp2(s - safe_top[None, :])
        total = total * shrink + tl.sum(p, 0)
        top = new_top
        v = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK_N, BLOCK_E, E, True, PADDED).to(tl.float32)
        # A value that is not finite reaches its queries through the state; others must not see it as 0·NaN.
        v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
        acc = tl.dot(tl.trans(p), v, acc * shrink[:, None], input_precision="ieee" if IEEE else "tf32")
    seen = total != 0
    inverse = tl.where(seen, 1.0 / tl.where(seen, total, 1.0), 0.0)
    out = tl.where((total != total)[:, None], float("nan"), acc * inverse[:, None])
    # A maximum of +inf makes every weight of the row 0 in backward: rows that see nothing, and poisoned rows.
    alive = total > 0
    row = head.to(tl.int64) * T
    tl.store(log_ptr + row + t, tl.where(alive, top, float("inf")), mask=t < T)
    tl.store(log_ptr + QUERIES + row + t, tl.where(alive, inverse, 0.0), mask=t < T)
    store_rows(out_ptr + row * E, first, E, T, out, BLOCK_M, BLOCK_E, E)


@triton.jit
def _backward_queries(
    q_ptr, k_ptr, v_ptr, pad_ptr, state_ptr, radius_ptr, out_ptr, grad_ptr, log_ptr, delta_ptr, sum_ptr,
    v_b, v_h, v_s, v_e, g_b, g_h, g_t, g_e, pad_b, H, G, T, S, LONG_T, LONG_S, QUERIES, term, power,
    D: tl.constexpr, E: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr, RADIUS: tl.constexpr,
):  # fmt: skip
    """δ_i = do_i·h_i, ε_i = Σ_j g_ij (do_i·v_j − δ_i), and the sums of `_pull` with ds_ij = g_ij (do_i·v_j − δ_i).

    The gradient is Σ_j (ds_ij − ε_i g_ij) c(x_ij). Without rounding ε were 0.
    """
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
    q_ptr += head.to(tl.int64) * DEPTH * LONG_T
    sum_ptr += head.to(tl.int64) * D * LONG_T
    k_ptr += kv_head * DEPTH * LONG_S
    state_ptr += kv_head * LONG_S
    v_ptr += b * v_b + h // G * v_h
    pad_ptr += b * pad_b
    row = head.to(tl.int64) * T
    top = tl.load(log_ptr + row + t, mask=t < T, other=float("inf"))
    inverse = tl.load(log_ptr + QUERIES + row + t, mask=t < T, other=0.0)
    alive = top < float("inf")
    grad = load_rows(grad_ptr + b * g_b + h * g_h, first, g_t, g_e, T, pad_ptr, BLOCK_M, BLOCK_E, E, True, False)
    grad = tl.where(alive[:, None], grad.to(tl.float32), 0.0)
    out = load_rows(out_ptr + row * E, first, E, 1, T, pad_ptr, BLOCK_M, BLOCK_E, E, True, False)
    delta = tl.where(alive, tl.sum(out.to(tl.float32) * grad, 1), 0.0)
    tl.store(delta_ptr + row + t, delta, mask=t < T)
    limit = t + (S - T)
    end = S
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(S, first + BLOCK_M + S - T))
    rest = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        s = _log_kernel(k_ptr + j, q_ptr + t, radius_ptr, LONG_S, LONG_T, power, DEPTH, BLOCK_N, BLOCK_M)
        s = tl.where((tl.load(state_ptr + j) == 0)[:, None], s, float("-inf"))
        if CAUSAL:
            s = tl.where(j[:, None] <= limit[None, :], s, float("-inf"))
        g = tl.math.exp2(s - top[None, :]) * inverse[None, :]
        v = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK_N, BLOCK_E, E, True, PADDED).to(tl.float32)
        v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
        dov = tl.trans(tl.dot(grad, tl.trans(v), input_precision="ieee" if IEEE else "tf32"))
        ds = g * (dov - delta[None, :])
        rest += tl.sum(ds, 0)
        _pull(ds, g, k_ptr + j, q_ptr + t, radius_ptr, sum_ptr + t, term, LONG_S, LONG_T, D, True, RADIUS)
    tl.store(delta_ptr + QUERIES + row + t, rest, mask=t < T)


@triton.jit
def _backward_keys(
    q_ptr, k_ptr, v_ptr, pad_ptr, state_ptr, radius_ptr, grad_ptr, log_ptr, delta_ptr, sum_ptr, dv_ptr,
    v_b, v_h, v_s, v_e, g_b, g_h, g_t, g_e, pad_b, HKV, G, T, S, LONG_T, LONG_S, QUERIES, power,
    D: tl.constexpr, E: tl.constexpr, DEPTH: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """One block of keys against all queries of the heads that share it: Σ_i ds_ij c(x_ij) and dv."""
    per_head = tl.cdiv(S, BLOCK_N)
    pid = tl.program_id(0)
    kv_head = pid // per_head
    first = pid % per_head * BLOCK_N
    b = (kv_head // HKV).to(tl.int64)
    h = (kv_head % HKV).to(tl.int64)
    j = first + tl.arange(0, BLOCK_N)
    k_ptr += kv_head.to(tl.int64) * DEPTH * LONG_S
    sum_ptr += kv_head.to(tl.int64) * D * LONG_S
    usable = tl.load(state_ptr + kv_head.to(tl.int64) * LONG_S + j) == 0
    v = load_rows(
        v_ptr + b * v_b + h * v_h, first, v_s, v_e, S, pad_ptr + b * pad_b, BLOCK_N, BLOCK_E, E, True, PADDED
    ).to(tl.float32)
    v = tl.where(tl.abs(v) < float("inf"), v, 0.0)
    dv = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(0, first - (S - T)) // BLOCK_M * BLOCK_M
    for member in range(G):
        head = h * G + member
        at = b * HKV * G + head
        row = at * T
        q_head = q_ptr + at * DEPTH * LONG_T
        grad_head = grad_ptr + b * g_b + head * g_h
        for start in range(begin, T, BLOCK_M):
            start = tl.multiple_of(start, BLOCK_M)
            t = start + tl.arange(0, BLOCK_M)
            s = _log_kernel(q_head + t, k_ptr + j, radius_ptr, LONG_T, LONG_S, power, DEPTH, BLOCK_M, BLOCK_N)
            s = tl.where(usable[None, :], s, float("-inf"))
            if CAUSAL:
                s = tl.where(j[None, :] <= (t + (S - T))[:, None], s, float("-inf"))
            top = tl.load(log_ptr + row + t, mask=t < T, other=float("inf"))
            inverse = tl.load(log_ptr + QUERIES + row + t, mask=t < T, other=0.0)
            delta = tl.load(delta_ptr + row + t, mask=t < T, other=0.0)
            rest = tl.load(delta_ptr + QUERIES + row + t, mask=t < T, other=0.0)
            g = tl.math.exp2(s - top[:, None]) * inverse[:, None]
            grad = load_rows(grad_head, start, g_t, g_e, T, pad_ptr, BLOCK_M, BLOCK_E, E, True, False).to(tl.float32)
            grad = tl.where((top < float("inf"))[:, None], grad, 0.0)
            dov = tl.trans(tl.dot(v, tl.trans(grad), input_precision="ieee" if IEEE else "tf32"))
            dv = tl.dot(tl.trans(g), grad, dv, input_precision="ieee" if IEEE else "tf32")
            ds = g * ((dov - delta[:, None]) - rest[:, None])
            _pull(ds, g, q_head + t, k_ptr + j, radius_ptr, sum_ptr + j, 0, LONG_T, LONG_S, D, False, False)
    store_rows(dv_ptr + kv_head.to(tl.int64) * S * E, first, E, S, dv, BLOCK_N, BLOCK_E, E)


# (queries, keys, warps, stages): the compiler's registers decided (none spilt in 16 bits), time is not yet measured.
TILES: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("forward", 64): (64, 32, 4, 1),
    ("forward", 128): (64, 32, 4, 1),
    ("queries", 64): (128, 16, 4, 1),
    ("queries", 128): (64, 16, 2, 1),
    ("keys", 64): (16, 128, 4, 1),
    ("keys", 128): (32, 64, 4, 1),
}
# float32, whose products take registers instead of the matrix units.
TILES_IEEE: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("forward", 64): (64, 32, 8, 1),
    ("forward", 128): (32, 32, 8, 1),
    ("queries", 64): (64, 16, 8, 1),
    ("queries", 128): (64, 16, 8, 1),
    ("keys", 64): (16, 64, 8, 1),
    ("keys", 128): (16, 32, 8, 1),
}


def tile(kernel: str, dtype: torch.dtype, width: int, queries: int, keys: int) -> dict[str, int]:
    """Block shapes, at most LANES and no longer than the copies; the width of the values sets the registers."""
    table = TILES_IEEE if dtype == torch.float32 else TILES
    m, n, warps, stages = (64, 64, 4, 1) if INTERPRETED else table[kernel, max(64, pow2(width))]
    m, n = min(m, pow2(queries)), min(n, pow2(keys))
    return {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps if m * n >= 512 else 1, "num_stages": stages}


def _copy(
    x: Tensor, radius: Tensor, v: Tensor | None = None, pad: Tensor | None = None, blank: bool = False
) -> tuple[Tensor, Tensor]:
    """(copy `[B, H, DEPTH, LONG]`, state `[B, H, LONG]` of keys, which come with their values)."""
    batch, heads, n, width = x.shape
    block = min(LANES, pow2(n))
    depth, long, rows = blocks(width, GROUP) * GROUP, blocks(n, block) * block, min(64, block)
    out = torch.empty(batch, heads, depth, long, device=x.device, dtype=torch.float32)
    state = torch.empty(batch, heads, 0 if v is None else long, device=x.device, dtype=torch.float32)
    values = x if v is None else v
    launch(
        _columns, (batch * heads * (long // rows),),
        x, values, x if pad is None else pad, REACH / radius.abs(), out, state,
        *x.stride(), *values.stride(), 0 if pad is None else pad.stride(0), heads, n, long,
        D=width, E=values.shape[-1], DEPTH=depth, BLOCK_D=pow2(width), BLOCK_E=pow2(values.shape[-1]), ROWS=rows,
        KEYS=v is not None, PADDED=pad is not None, BLANK=blank, num_warps=4,
    )  # fmt: skip
    return out, state


def forward(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, pad: Tensor | None, causal: bool, power: int
) -> tuple[Tensor, Tensor]:
    """(out `[B,H,T,E]` in the dtype of q, (largest log2 κ, 1/Σκ relative to it) `[2,B,H,T]`). `radius [D]`: float32."""
    batch, heads, queries, _ = q.shape
    keys, value_width = v.shape[2:]
    columns_q, _ = _copy(q, radius)
    columns_k, state = _copy(k, radius, v, pad)
    out = q.new_empty(batch, heads, queries, value_width)
    log = torch.empty(2, batch, heads, queries, device=q.device, dtype=torch.float32)
    meta = tile("forward", q.dtype, value_width, queries, keys)
    launch(
        _forward, (batch * heads * blocks(queries, meta["BLOCK_M"]),),
        columns_q, columns_k, v, k if pad is None else pad, state, _padded(radius), out, log,
        *v.stride(), 0 if pad is None else pad.stride(0), heads, heads // k.shape[1], queries, keys,
        columns_q.shape[-1], columns_k.shape[-1], batch * heads * queries, float(power),
        E=value_width, DEPTH=columns_q.shape[2], BLOCK_E=pow2(value_width), PADDED=pad is not None, CAUSAL=causal,
        IEEE=q.dtype == torch.float32, **meta,
    )  # fmt: skip
    return out, log


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, radius: Tensor, pad: Tensor | None, out: Tensor, log: Tensor,
    causal: bool, power: int, radius_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dR), the last float32 and empty unless `radius_learns`."""
    batch, heads, queries, width = q.shape
    kv_heads, keys, value_width = v.shape[1:]
    columns_q, _ = _copy(q, radius, blank=True)
    columns_k, state = _copy(k, radius, v, pad)
    depth, long_q, long_k = columns_q.shape[2], columns_q.shape[3], columns_k.shape[3]
    sums_q = columns_q.new_zeros(4 if radius_learns else 2, batch, heads, width, long_q)
    sums_k = columns_q.new_zeros(batch, kv_heads, width, long_k)
    delta = torch.empty_like(log)
    dv = v.new_empty(batch, kv_heads, keys, value_width)
    tensors = columns_q, columns_k, v, k if pad is None else pad, state, _padded(radius)
    strides = (*v.stride(), *grad.stride(), 0 if pad is None else pad.stride(0))
    sizes = queries, keys, long_q, long_k, batch * heads * queries
    common = {
        "D": width, "E": value_width, "DEPTH": depth, "BLOCK_E": pow2(value_width), "PADDED": pad is not None,
        "CAUSAL": causal, "IEEE": q.dtype == torch.float32,
    }  # fmt: skip
    meta = tile("queries", q.dtype, value_width, queries, keys)
    launch(
        _backward_queries, (batch * heads * blocks(queries, meta["BLOCK_M"]),),
        *tensors, out, grad, log, delta, sums_q, *strides, heads, heads // kv_heads, *sizes,
        sums_q[0].numel(), float(power), **common, RADIUS=radius_learns, **meta,
    )  # fmt: skip
    meta = tile("keys", q.dtype, value_width, queries, keys)
    launch(
        _backward_keys, (batch * kv_heads * blocks(keys, meta["BLOCK_N"]),),
        *tensors, grad, log, delta, sums_k, dv, *strides, kv_heads, heads // kv_heads, *sizes, float(power),
        **common, **meta,
    )  # fmt: skip
    sums_q = sums_q[..., :queries]
    sums_q = sums_q[0::2] - delta[1][:, :, None] * sums_q[1::2]
    steep = (power * radius)[:, None]
    dq, dk = (sums_q[0] * steep).mT, (sums_k[..., :keys] * steep).mT
    d_radius = power * sums_q[1].sum((0, 1, 3)) if radius_learns else radius.new_empty(0)
    return dq.to(q.dtype).contiguous(), dk.to(k.dtype).contiguous(), dv, d_radius


def _padded(radius: Tensor) -> Tensor:
    return torch.nn.functional.pad(radius, (0, -len(radius) % GROUP))


# ------------------------------------------------------------------ the operators


@_op("robust_attention::fourier_forward", mutates_args=())
def _fourier_forward(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, pad: Tensor | None, causal: bool, power: int
) -> tuple[Tensor, Tensor]:
    dtype = q.dtype
    q, k, v = held(q, k, v)
    out, log = forward(q, k, v, radius, pad, causal, power)
    return out.to(dtype), log


@_fourier_forward.register_fake
def _(q: Any, k: Any, v: Any, radius: Any, pad: Any, causal: Any, power: Any) -> Any:
    return q.new_empty(*q.shape[:3], v.shape[-1]), q.new_empty((2, *q.shape[:3]), dtype=torch.float32)


@_op("robust_attention::fourier_backward", mutates_args=())
def _fourier_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, radius: Tensor, pad: Tensor | None, out: Tensor, log: Tensor,
    causal: bool, power: int, radius_learns: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = q.dtype
    grad, q, k, v, out = held(grad, q, k, v, out)
    dq, dk, dv, d_radius = backward(grad, q, k, v, radius, pad, out, log, causal, power, radius_learns)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), d_radius


@_fourier_backward.register_fake
def _(grad: Any, q: Any, k: Any, v: Any, radius: Any, pad: Any, out: Any, log: Any, causal: Any, power: Any,
      radius_learns: Any) -> Any:  # fmt: skip
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
        radius.new_empty(radius.shape if radius_learns else (0,)),
    )  # fmt: skip


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, causal, power = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.rest = causal, power
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _gradient(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    if grad is None:
        return (None,) * 7
    radius_learns = ctx.needs_input_grad[3]
    dq, dk, dv, d_radius = _fourier_backward(grad, *ctx.saved_tensors, *ctx.rest, radius_learns)
    return dq, dk, dv, d_radius if radius_learns else None, None, None, None


_fourier_forward.register_autograd(_gradient, setup_context=_setup)


def fourier(
    q: Tensor, k: Tensor, v: Tensor, radius: Tensor, pad: Tensor | None = None, is_causal: bool = False, *,
    power: int = 4,
) -> Tensor:  # fmt: skip
    """Fourier attention. `radius`: a scalar or `[D]`; `pad [B, S]`: True where a key is real."""
    radius = radius.to(q.device, torch.float32).expand(k.shape[-1]).contiguous()
    return _fourier_forward(q, k, v, radius, pad, is_causal, power)[0]
