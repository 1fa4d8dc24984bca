"""One sweep of KIRWLS from uniform weights, without a Gram in memory.

    r_j = (1/n) Σ_m G_mj,   c = (1/n) Σ_m r_m,   d²_j = 1 − 2 r_j + c,   ω_j = n ψ(d_j)/Σ_m ψ(d_m)

for two Grams at once: the keys' (marginal) and its product with the values' (joint). Weights come out scaled to mean 1
(the scale cancels in eq. 11, and 1/n would not fit float16).

**Row sums.** Each program owns a block of keys and walks over all of them; every lane adds up its own entries of both
Grams, and lanes meet once, at the end. Visiting each pair once (the Grams are symmetric) was tried first: it halves
products and exponentials, but sums over the columns of a tile cost shuffles and a barrier in every tile, and integer
atomics to keep the order fixed. No atomics now: bits repeat.

**Floor.** Forward: 2·S²(D+E) FLOPs and two exponentials a pair: as many products as one attention forward, twice its
exponentials. Backward: 4 products and two exponentials over the square.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from robust_attention._triton.common import INTERPRETED, LOG2E, blocks, launch, load_rows, pow2, store_rows

LOSSES = {"huber": 0, "hampel": 1, "welsch": 2, "tukey": 3}


@triton.jit
def psi(x2, a, LOSS: tl.constexpr):
    """ψ as a function of the squared distance: robust/losses.py in the kernels' words."""
    if LOSS == 0:
        root = tl.math.rsqrt(tl.maximum(x2, a * a))
        w = tl.where(x2 > a * a, a * root, 1.0)
    elif LOSS == 1:
        root = tl.math.rsqrt(tl.maximum(x2, a * a))
        x = tl.maximum(x2, a * a) * root
        w = tl.where(x2 > a * a, a * root * tl.minimum(tl.maximum((3.0 * a - x) / a, 0.0), 1.0), 1.0)
    elif LOSS == 2:
        w = tl.exp(-x2 / (a * a))
    else:
        u = tl.maximum(1.0 - x2 / (a * a), 0.0)
        w = u * u
    return w


@triton.jit
def psi_slope(x2, a, LOSS: tl.constexpr):
    """dψ/d(x²); 0 where autograd of the reference gives 0 (below a, beyond the last threshold, at the clamp)."""
    beyond = x2 > a * a
    if LOSS == 0:
        root = tl.math.rsqrt(tl.maximum(x2, a * a))
        slope = tl.where(beyond, -0.5 * a * root * root * root, 0.0)
    elif LOSS == 1:
        root = tl.math.rsqrt(tl.maximum(x2, a * a))
        x = tl.maximum(x2, a * a) * root
        # a/x up to 2a, (3a − x)/x up to 3a, 0 beyond
        middle = -0.5 * a * root * root * root
        slope = tl.where(beyond, tl.where(x <= 2.0 * a, middle, tl.where(x < 3.0 * a, 3.0 * middle, 0.0)), 0.0)
    elif LOSS == 2:
        slope = -tl.exp(-x2 / (a * a)) / (a * a)
    else:
        slope = tl.where(beyond, 0.0, -2.0 * (1.0 - x2 / (a * a)) / (a * a))
    return slope


@triton.jit
def gram_tile(ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, IEEE: tl.constexpr):
    """(marginal, joint) Gram of two blocks of keys.

    marginal = 2^(κ scale_i scale_j k_i·k_j − half_i − half_j), half = log2(e)/(2σ²) for a unit key, 0 for a zero key;
    joint = marginal · 2^(λ(2 v_i·v_j − ‖v_i‖² − ‖v_j‖²)). Exponents are held at or below 0 (and a NaN becomes 0).
    """
    kk = tl.dot(ki, tl.trans(kj), input_precision="ieee" if IEEE else "tf32")
    vv = tl.dot(vi, tl.trans(vj), input_precision="ieee" if IEEE else "tf32")
    near = kk * scale_j[None, :] * (scale_i * kappa)[:, None] - half_i[:, None] - half_j[None, :]
    close = vv * (2.0 * lam) - (lam * square_i)[:, None] - (lam * square_j)[None, :]
    near = tl.minimum(near, 0.0)
    close = tl.minimum(close, 0.0)
    return tl.math.exp2(near), tl.math.exp2(near + close)


@triton.jit
def key_block(scale_ptr, square_ptr, j, S, half, EDGE: tl.constexpr):
    """(scale, half, square) of keys; half = inf for hidden keys and keys beyond the end, so that their Gram is 0."""
    if EDGE:
        scale = tl.load(scale_ptr + j, mask=j < S, other=-1.0)
        square = tl.load(square_ptr + j, mask=j < S, other=0.0)
    else:
        scale = tl.load(scale_ptr + j)
        square = tl.load(square_ptr + j)
    halves = tl.where(scale > 0, half, tl.where(scale < 0, float("inf"), 0.0))
    return scale, tl.where(scale != scale, half, halves), square


@triton.jit
def _sums_loop(
    rows, rows_joint, ki, vi, scale_i, half_i, square_i, k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, begin, end,
    k_s, k_d, v_s, v_e, S, kappa, lam, half,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, IEEE: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        kj = load_rows(k_ptr, start, k_s, k_d, S, pad_ptr, BLOCK_N, BLOCK_D, D, EDGE, PADDED)
        vj = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK_N, BLOCK_E, E, EDGE, PADDED)
        scale_j, half_j, square_j = key_block(scale_ptr, square_ptr, j, S, half, EDGE)
        marginal, joint = gram_tile(
            ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, IEEE
        )
        rows += marginal
        rows_joint += joint
    return rows, rows_joint


@triton.jit
def _row_sums(
    k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, sum_ptr,
    k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, pad_b, KEYS, HKV, S, kappa, lam, half,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PADDED: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Σ_m G_mj of both Grams for one block of keys, to [2, B·Hkv, S]. Lanes add on their own until the end."""
    n = tl.cdiv(S, BLOCK_M)
    pid = tl.program_id(0)
    head = pid // n
    b = (head // HKV).to(tl.int64)
    h = (head % HKV).to(tl.int64)
    at = head.to(tl.int64) * S
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    pad_ptr += b * pad_b
    scale_ptr += at
    square_ptr += at
    first = pid % n * BLOCK_M
    i = first + tl.arange(0, BLOCK_M)
    ki = load_rows(k_ptr, first, k_s, k_d, S, pad_ptr, BLOCK_M, BLOCK_D, D, True, PADDED)
    vi = load_rows(v_ptr, first, v_s, v_e, S, pad_ptr, BLOCK_M, BLOCK_E, E, True, PADDED)
    scale_i, half_i, square_i = key_block(scale_ptr, square_ptr, i, S, half, True)
    rows = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    rows_joint = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    whole = S // BLOCK_N * BLOCK_N
    rows, rows_joint = _sums_loop(
        rows, rows_joint, ki, vi, scale_i, half_i, square_i, k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, 0, whole,
        k_s, k_d, v_s, v_e, S, kappa, lam, half, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PADDED, IEEE, False,
    )  # fmt: skip
    rows, rows_joint = _sums_loop(
        rows, rows_joint, ki, vi, scale_i, half_i, square_i, k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, whole, S,
        k_s, k_d, v_s, v_e, S, kappa, lam, half, D, E, BLOCK_D, BLOCK_E, BLOCK_N, PADDED, IEEE, True,
    )  # fmt: skip
    tl.store(sum_ptr + at + i, tl.sum(rows, 1), mask=i < S)
    tl.store(sum_ptr + at + KEYS + i, tl.sum(rows_joint, 1), mask=i < S)


@triton.jit
def _squared_distance(sum_ptr, scale_ptr, j, S, n, c):
    seen = tl.load(scale_ptr + j, mask=j < S, other=-1.0)
    alive = tl.where(seen < 0, 0.0, 1.0) > 0
    r = tl.load(sum_ptr + j, mask=j < S, other=0.0) / n
    return tl.maximum(1.0 - 2.0 * r + c, 0.0), alive, 1.0 - 2.0 * r + c > 0


@triton.jit
def _totals(sum_ptr, scale_ptr, S, a, LOSS: tl.constexpr, BLOCK: tl.constexpr):
    """(n, c, Σψ) of one head."""
    n = 0.0
    c = 0.0
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        seen = tl.load(scale_ptr + j, mask=j < S, other=-1.0)
        n += tl.sum(tl.where(seen < 0, 0.0, 1.0), 0)
        c += tl.sum(tl.load(sum_ptr + j, mask=j < S, other=0.0), 0)
    n = tl.maximum(n, 1.0)
    c = c / n / n
    z = 0.0
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x2, alive, _ = _squared_distance(sum_ptr, scale_ptr, j, S, n, c)
        z += tl.sum(tl.where(alive, psi(x2, a, LOSS), 0.0), 0)
    return n, c, z


@triton.jit
def _weights(sum_ptr, scale_ptr, weight_ptr, HEADS, S, a, LOSS: tl.constexpr, BLOCK: tl.constexpr):
    """ω of one head and one Gram: three walks over its row sums."""
    pid = tl.program_id(0)
    row = pid.to(tl.int64) * S
    sum_ptr += row
    weight_ptr += row
    scale_ptr += (pid % HEADS).to(tl.int64) * S
    n, c, z = _totals(sum_ptr, scale_ptr, S, a, LOSS, BLOCK)
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x2, alive, _ = _squared_distance(sum_ptr, scale_ptr, j, S, n, c)
        w = psi(x2, a, LOSS) * (n / tl.where(z > 0, z, 1.0))
        w = tl.where(alive, tl.where(z > 0, w, 1.0), 0.0)
        tl.store(weight_ptr + j, w, mask=j < S)


@triton.jit
def _one_gram_slope(
    sum_ptr, scale_ptr, grad_ptr, slope_ptr, S, a, LOSS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """dr_j of one Gram, written to slope_ptr; returns its largest magnitude.

    dψ_j = (n/Z)(dω_j − Σ_m dω_m ω_m/n), e_j = ψ'(d²_j) dψ_j, dr_j = −2 e_j + (1/n) Σ_m e_m.
    """
    n, c, z = _totals(sum_ptr, scale_ptr, S, a, LOSS, BLOCK)
    usable = z > 0
    gain = tl.where(usable, n / tl.where(usable, z, 1.0), 0.0)
    mean = 0.0
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x2, alive, _ = _squared_distance(sum_ptr, scale_ptr, j, S, n, c)
        grad = tl.load(grad_ptr + j, mask=j < S, other=0.0)
        mean += tl.sum(tl.where(alive, grad * psi(x2, a, LOSS) * gain, 0.0), 0)
    mean = mean / n
    total = 0.0
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x2, alive, inside = _squared_distance(sum_ptr, scale_ptr, j, S, n, c)
        grad = tl.load(grad_ptr + j, mask=j < S, other=0.0)
        total += tl.sum(tl.where(alive & inside, psi_slope(x2, a, LOSS) * gain * (grad - mean), 0.0), 0)
    top = 0.0
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        x2, alive, inside = _squared_distance(sum_ptr, scale_ptr, j, S, n, c)
        grad = tl.load(grad_ptr + j, mask=j < S, other=0.0)
        e = tl.where(alive & inside, psi_slope(x2, a, LOSS) * gain * (grad - mean), 0.0)
        dr = tl.where(alive, (total / n - 2.0 * e) / n, 0.0)
        top = tl.maximum(top, tl.max(tl.abs(dr), 0))
        tl.store(slope_ptr + j, dr, mask=j < S)
    return top


@triton.jit
def _weights_backward(
    sum_ptr, scale_ptr, grad_marginal_ptr, grad_joint_ptr, slope_ptr, top_ptr, KEYS, S, a,
    LOSS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dG_mj = slope_j (the same for all m) of both Grams, and the largest of them by head (16-bit products need it)."""
    head = tl.program_id(0)
    row = head.to(tl.int64) * S
    other = KEYS
    top = _one_gram_slope(sum_ptr + row, scale_ptr + row, grad_marginal_ptr + row, slope_ptr + row, S, a, LOSS, BLOCK)
    top_joint = _one_gram_slope(
        sum_ptr + other + row, scale_ptr + row, grad_joint_ptr + row, slope_ptr + other + row, S, a, LOSS, BLOCK
    )
    tl.store(top_ptr + head, tl.maximum(top, top_joint))


@triton.jit
def _gram_backward(
    k_ptr, v_ptr, pad_ptr, scale_ptr, square_ptr, slope_ptr, top_ptr, dk_ptr, dv_ptr,
    k_b, k_h, k_s, k_d, v_b, v_h, v_s, v_e, pad_b, KEYS, HKV, S, kappa, lam, half,
    inverse_factor, inverse_variance, inverse_value_variance,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    PADDED: tl.constexpr, IEEE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Adds to dk_j and dv_j what comes through the Grams:

    A_jm = Σ_Grams (slope_j + slope_m) G_jm,  dk̂_j = Σ_m A_jm k̂_m/σ²,  dv_j = Σ_m A^joint_jm (v_m − v_j)/σ_v².
    """
    per_head = tl.cdiv(S, BLOCK_M)
    pid = tl.program_id(0)
    head = pid // per_head
    first = pid % per_head * BLOCK_M
    b = (head // HKV).to(tl.int64)
    h = (head % HKV).to(tl.int64)
    row = head.to(tl.int64) * S
    k_ptr += b * k_b + h * k_h
    v_ptr += b * v_b + h * v_h
    pad_ptr += b * pad_b
    scale_ptr += row
    square_ptr += row
    slope_ptr += row
    joint_ptr = slope_ptr + KEYS
    i = first + tl.arange(0, BLOCK_M)
    ki = load_rows(k_ptr, first, k_s, k_d, S, pad_ptr, BLOCK_M, BLOCK_D, D, True, PADDED)
    vi = load_rows(v_ptr, first, v_s, v_e, S, pad_ptr, BLOCK_M, BLOCK_E, E, True, PADDED)
    scale_i, half_i, square_i = key_block(scale_ptr, square_ptr, i, S, half, True)
    top = tl.load(top_ptr + head)
    shrink = 1.0 / tl.where(top > 0, top, 1.0)
    slope_i = tl.load(slope_ptr + i, mask=i < S, other=0.0) * shrink
    joint_i = tl.load(joint_ptr + i, mask=i < S, other=0.0) * shrink
    dk = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    for start in range(0, S, BLOCK_N):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        kj = load_rows(k_ptr, start, k_s, k_d, S, pad_ptr, BLOCK_N, BLOCK_D, D, True, PADDED)
        vj = load_rows(v_ptr, start, v_s, v_e, S, pad_ptr, BLOCK_N, BLOCK_E, E, True, PADDED)
        scale_j, half_j, square_j = key_block(scale_ptr, square_ptr, j, S, half, True)
        slope_j = tl.load(slope_ptr + j, mask=j < S, other=0.0) * shrink
        joint_j = tl.load(joint_ptr + j, mask=j < S, other=0.0) * shrink
        marginal, joint = gram_tile(
            ki, vi, scale_i, half_i, square_i, kj, vj, scale_j, half_j, square_j, kappa, lam, IEEE
        )
        joint = joint * (joint_i[:, None] + joint_j[None, :])
        both = marginal * (slope_i[:, None] + slope_j[None, :]) + joint
        if HALF:
            kj = (kj.to(tl.float32) * (scale_j * inverse_factor)[:, None]).to(kj.dtype)
        else:
            both = both * (scale_j * inverse_factor)[None, :]
        dk = tl.dot(both.to(kj.dtype), kj, dk, input_precision="ieee" if IEEE else "tf32")
        dv = tl.dot(joint.to(vj.dtype), vj, dv, input_precision="ieee" if IEEE else "tf32")
        mass += tl.sum(joint.to(vj.dtype).to(tl.float32), 1)
    norm = scale_i * inverse_factor
    unit = ki.to(tl.float32) * norm[:, None]
    dk = (dk - unit * tl.sum(unit * dk, 1)[:, None]) * (norm * inverse_variance * top)[:, None]
    dv = (dv - mass[:, None] * vi.to(tl.float32)) * (inverse_value_variance * top)
    alive = scale_i >= 0
    dk += load_rows(dk_ptr + row * D, first, D, 1, S, pad_ptr, BLOCK_M, BLOCK_D, D, True, False).to(tl.float32)
    dv += load_rows(dv_ptr + row * E, first, E, 1, S, pad_ptr, BLOCK_M, BLOCK_E, E, True, False).to(tl.float32)
    store_rows(dk_ptr + row * D, first, D, S, tl.where(alive[:, None], dk, 0.0), BLOCK_M, BLOCK_D, D)
    store_rows(dv_ptr + row * E, first, E, S, tl.where(alive[:, None], dv, 0.0), BLOCK_M, BLOCK_E, E)


# (rows, columns, warps, stages)
TILES: dict[tuple[str, int], tuple[int, int, int, int]] = {
    ("sums", 16): (64, 32, 4, 3),
    ("sums", 32): (64, 32, 4, 3),
    ("sums", 64): (64, 32, 4, 3),
    ("sums", 128): (64, 32, 4, 3),
    ("backward", 16): (64, 64, 4, 2),
    ("backward", 32): (64, 64, 4, 2),
    ("backward", 64): (64, 64, 4, 2),
    ("backward", 128): (64, 32, 4, 1),
}


def tile(kernel: str, width: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    if INTERPRETED:
        return (64, 64, 4, 1)
    if dtype == torch.float32:
        return (32, 32, 4, 1) if width > 64 else (64, 32, 8, 1) if kernel == "backward" else (32, 32, 4, 2)
    return TILES[kernel, max(16, pow2(width))]


def constants(variance: float, weight_variance: float, value_variance: float) -> tuple[float, float, float]:
    """(κ, λ, half) of `gram_tile`: scales carry log2(e)/σ² of the attention, the Gram may have another bandwidth."""
    return (
        variance * variance / (LOG2E * weight_variance),
        LOG2E / (2 * value_variance),
        LOG2E / (2 * weight_variance),
    )


def row_sums(
    k: Tensor, v: Tensor, scale: Tensor, square: Tensor, pad: Tensor | None,
    variance: float, weight_variance: float, value_variance: float,
) -> Tensor:  # fmt: skip
    """Σ_m G_mj of the marginal and the joint Gram, `[2, B, Hkv, S]` float32."""
    batch, heads, keys, width = k.shape
    sums = torch.empty(2, batch, heads, keys, device=k.device, dtype=torch.float32)
    rows, columns, warps, stages = tile("sums", max(width, v.shape[-1]), k.dtype)
    launch(
        _row_sums, (batch * heads * blocks(keys, rows),),
        k, v, k if pad is None else pad, scale, square, sums, *k.stride(), *v.stride(),
        0 if pad is None else pad.stride(0), batch * heads * keys, heads, keys,
        *constants(variance, weight_variance, value_variance),
        D=width, E=v.shape[-1], BLOCK_D=pow2(width), BLOCK_E=pow2(v.shape[-1]), BLOCK_M=rows, BLOCK_N=columns,
        PADDED=pad is not None, IEEE=k.dtype == torch.float32, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return sums


def weights(sums: Tensor, scale: Tensor, loss: str, a: float) -> Tensor:
    """(marginal, joint) weights of mean 1 over the visible keys, `[2, B, Hkv, S]` float32."""
    _, batch, heads, keys = sums.shape
    out = torch.empty(sums.shape, device=sums.device, dtype=torch.float32)
    size = min(1024, pow2(keys, 32))
    launch(
        _weights, (2 * batch * heads,), sums, scale, out, batch * heads, keys, a,
        LOSS=LOSSES[loss], BLOCK=size, num_warps=4 if size > 128 else 1,
    )  # fmt: skip
    return out


def add_backward(
    k: Tensor, v: Tensor, scale: Tensor, square: Tensor, pad: Tensor | None, sums: Tensor,
    grad_marginal: Tensor, grad_joint: Tensor, dk: Tensor, dv: Tensor, loss: str, a: float,
    variance: float, weight_variance: float, value_variance: float,
) -> None:  # fmt: skip
    """Add to dk, dv (contiguous) what reaches them through the weights."""
    batch, heads, keys, width = k.shape
    slope = torch.empty(sums.shape, device=k.device, dtype=torch.float32)
    top = torch.empty(batch, heads, device=k.device, dtype=torch.float32)
    size = min(1024, pow2(keys, 32))
    launch(
        _weights_backward, (batch * heads,),
        sums, scale, grad_marginal, grad_joint, slope, top, batch * heads * keys, keys, a,
        LOSS=LOSSES[loss], BLOCK=size, num_warps=4 if size > 128 else 1,
    )  # fmt: skip
    rows, columns, warps, stages = tile("backward", max(width, v.shape[-1]), k.dtype)
    if keys <= 512 and not INTERPRETED:
        columns, stages = 32, 1
    launch(
        _gram_backward, (batch * heads * blocks(keys, rows),),
        k, v, k if pad is None else pad, scale, square, slope, top, dk, dv, *k.stride(), *v.stride(),
        0 if pad is None else pad.stride(0), batch * heads * keys, heads, keys,
        *constants(variance, weight_variance, value_variance),
        variance / LOG2E, 1 / weight_variance, 1 / value_variance,
        D=width, E=v.shape[-1], BLOCK_D=pow2(width), BLOCK_E=pow2(v.shape[-1]), BLOCK_M=rows, BLOCK_N=columns,
        PADDED=pad is not None, IEEE=k.dtype == torch.float32, HALF=k.dtype == torch.float16,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
