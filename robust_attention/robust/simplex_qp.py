"""Scaled and projected kernel mean (SPKDE, Vandermeulen and Scott, 2014): many small simplex QPs at once.

For every visible set V of a Gram G, with n = |V|:

    min_ω ωᵀGω − 2qᵀω,   q = (β/n) G 1_V,   ω ≥ 0,  Σω = 1,  ω = 0 outside V

Where the optimum is inside the simplex it has a closed form; elsewhere a few exchanges of its support usually find it,
and for what is left a primal–dual interior point does, before the last exchanges make it exact. Whatever the way, the
answer is judged by its Frank–Wolfe gap `gᵀω − min_V g`, g = Gω − q, which bounds how far the objective is from the
optimum, and that gap is returned.

Numerics: everything is float64, on the device of the Gram. Problems never influence each other: each leaves the
batch as soon as its own gap is reached.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_attention.robust.gram import matmul
from robust_attention.robust.kirwls import uniform

GAP_TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-6}
"""What an answer must reach, by the dtype of the Gram; a larger gap is reported with a warning."""

_AIM = {torch.float64: 1e-13, torch.float32: 2e-9}
# What the solver works towards: rounding of the Gram's dtype; the tolerance leaves room for Grams of condition 1e9.
_MAX_STEPS = 60
_QUICK_ROUNDS = 8  # exchanges before the interior point: enough for most problems of an attention layer
_MAX_ROUNDS = 30
_CHUNK_ENTRIES = 2**23  # entries of one batch of Grams: 64 MiB in float64, times a handful of temporaries


@dataclass(frozen=True)
class QPInfo:
    """How good the answers are."""

    gap: Tensor
    """Frank–Wolfe gap of each problem, of the float64 weights before they are rounded to the Gram's dtype."""
    objective: Tensor
    """ωᵀGω − 2qᵀω of each problem."""
    tolerance: float
    """What the gap was to reach."""

    @property
    def reached(self) -> Tensor:
        """Where the gap is within the tolerance."""
        return self.gap <= self.tolerance


def spkde_weights(gram: Tensor, visible: Tensor, beta: float, prefixes: bool = False) -> tuple[Tensor, QPInfo]:
    """Solve one QP for each Gram and visible set.

    Args:
        gram: `[P, S, S]`, positive semi-definite with ones on its diagonal; float32 or float64.
        visible: bool `[P, R, S]`, the R visible sets of each Gram.
        beta: scale β ≥ 1 of the mean that is projected.
        prefixes: promise that every visible set is the first n points for some n; all closed forms then come from
            one factorisation of the whole Gram.
    Returns: weights `[P, R, S]` in the dtype of the Gram, zero rows for empty sets; gaps and objectives `[P, R]`.
    Gradient: with respect to the Gram, by implicit differentiation on the active set (the support of ω).
    """
    size = gram.shape[-1]
    weights, gap, objective = _Implicit.apply(*_aligned(gram, visible), beta, prefixes)
    return weights[..., :size], QPInfo(gap, objective, GAP_TOLERANCE[gram.dtype])


def _aligned(gram: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Add points that nobody sees until 8 divides their number.

    Every matrix of a batch then starts at the same place of a cache line. Without it the CPU's BLAS and LAPACK round a
    problem's last bit by where in its batch it stands, and so by what happens to the others.
    """
    spare = -gram.shape[-1] % 8
    if spare == 0 or visible.numel() == 0:
        return gram, visible
    ones = F.pad(gram.new_zeros(gram.shape[-1]), (0, spare), value=1.0)
    return F.pad(gram, (0, spare, 0, spare)) + ones.diag(), F.pad(visible, (0, spare))


class _Implicit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gram: Tensor, visible: Tensor, beta: float, prefixes: bool) -> tuple[Tensor, ...]:
        wide = gram.double()
        weights = _solve(wide, visible, beta, prefixes, _AIM[gram.dtype]) if visible.numel() else visible.double()
        gap, objective = certificate(wide, visible, weights, beta)
        ctx.save_for_backward(gram, visible, weights)
        ctx.beta = beta
        gap, objective = gap.to(gram.dtype), objective.to(gram.dtype)
        ctx.mark_non_differentiable(gap, objective)
        return weights.to(gram.dtype), gap, objective

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # On the support A: G_A ω_A − q_A = λ1 and Σω = 1. With u the solution of the same system for the incoming
        # gradient (Σu = 0), the Gram's gradient is u ⊗ ((β/n)1_V − ω).
        gram, visible, weights = ctx.saved_tensors
        support = weights > 0
        problems, sets, size = weights.shape
        flat = torch.zeros(problems * sets, size, dtype=torch.float64, device=gram.device)
        # A single point has weight 1 whatever the Gram.
        todo = (support.sum(-1) > 1).flatten().nonzero().squeeze(-1)
        incoming = grad.double().reshape(-1, size)
        for part in _chunks(todo, size):
            held = support.reshape(-1, size)[part]
            block = _restrict(gram[part // sets].double(), held)
            factor = _factor(block)
            right = torch.stack((incoming[part] * held, held.to(block.dtype)), -1)
            solved = _refined_solve(factor, block, right)
            of_grad, of_one = solved.unbind(-1)
            flat[part] = of_grad - of_one * (of_grad.sum(-1, keepdim=True) / of_one.sum(-1, keepdim=True))
        pull = ctx.beta * uniform(visible, torch.float64) - weights
        return (flat.reshape(problems, sets, size).mT @ pull).to(gram.dtype), None, None, None


def certificate(gram: Tensor, visible: Tensor, weights: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Frank–Wolfe gap and objective of any weights; 0 for empty sets."""
    if visible.numel() == 0:
        return weights.sum(-1), weights.sum(-1)
    mean = uniform(visible, gram.dtype)
    slope = matmul(weights - beta * mean, gram)
    least = torch.where(visible, slope, torch.inf).amin(-1)
    gap = (slope * weights).sum(-1) - torch.where(least.isfinite(), least, 0)
    objective = (weights * matmul(weights - 2 * beta * mean, gram)).sum(-1)
    return gap.clamp(min=0), objective


def _solve(gram: Tensor, visible: Tensor, beta: float, prefixes: bool, aim: float) -> Tensor:
    problems, sets, size = visible.shape
    mean = uniform(visible, gram.dtype)
    # Where the mean itself is optimal (β = 1, one point, all points equal) it is the answer among many.
    gap, _ = certificate(gram, visible, mean, beta)
    weights = mean.clone()
    done = gap <= 4 * size * torch.finfo(gram.dtype).eps
    if prefixes:
        inside = _closed_prefixes(gram, visible, beta)
        good = ((inside >= 0) | ~visible).all(-1) & (certificate(gram, visible, inside, beta)[0] <= aim) & ~done
        weights[good] = inside[good]
        done = done | good
    flat_visible, flat_weights = visible.reshape(-1, size), weights.reshape(-1, size)
    for part in _chunks((~done).flatten().nonzero().squeeze(-1), size):
        held = flat_visible[part]
        block = _restrict(gram[part // sets], held)
        flat_weights[part] = _solve_batch(block, held, beta, aim)
    return flat_weights.reshape(problems, sets, size)


def _chunks(index: Tensor, size: int) -> tuple[Tensor, ...]:
    return index.split(max(1, _CHUNK_ENTRIES // max(1, size * size))) if len(index) else ()


def _restrict(gram: Tensor, held: Tensor) -> Tensor:
    """The Gram of the held points; elsewhere the identity, so that a factorisation passes the others by."""
    inside = held[:, :, None] & held[:, None, :]
    return torch.where(inside, gram, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def _factor(matrix: Tensor) -> Tensor:
    """Cholesky factor of a positive semi-definite batch, with as little added to the diagonal as it takes."""
    size = matrix.shape[-1]
    shift = 2 * size * torch.finfo(matrix.dtype).eps
    diagonal = matrix.diagonal(dim1=-2, dim2=-1)
    factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag_embed(shift * diagonal))
    while (bad := failed > 0).any() and shift < 1e-3:
        shift *= 100
        again = matrix[bad] + torch.diag_embed(shift * diagonal[bad])
        factor[bad], failed[bad] = torch.linalg.cholesky_ex(again)
    return factor


def _refined_solve(factor: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """Solve with the factor, then take back what the factor's shifted diagonal changed (two refinements)."""
    solved = torch.cholesky_solve(right, factor)
    for _ in range(2):
        solved = solved + torch.cholesky_solve(right - matrix @ solved, factor)
    return solved


def _closed_prefixes(gram: Tensor, visible: Tensor, beta: float) -> Tensor:
    """The unconstrained optimum of every prefix from one factorisation G = LLᵀ.

    (G_n⁻¹ r)_j = Σ_{t=j..n} (L⁻¹)_tj Σ_{m≤t} (L⁻¹)_tm r_m        ω = (β/n)1 − (β−1) h/(1ᵀh),  h = G_n⁻¹1
    """
    size = gram.shape[-1]
    eye = torch.eye(size, dtype=gram.dtype, device=gram.device)
    # A pivot that fails spoils its own row and the later ones only. Prefixes that end before it are used, and the rest
    # is left as it is (zeros, whose gap sends them to the solver): no prefix depends on a later point.
    factor, failed = torch.linalg.cholesky_ex(gram + 2 * size * torch.finfo(gram.dtype).eps * eye)
    row = torch.arange(size, device=gram.device)
    sound = (failed[:, None] == 0) | (row < failed[:, None] - 1)
    factor = torch.where(sound[..., None], factor, eye)
    inverse = torch.where(sound[..., None], torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False), 0)
    held = visible.to(gram.dtype)
    solution = torch.zeros_like(held)
    for _ in range(3):  # the first pass solves, two more refine against the Gram itself
        residual = (1 - matmul(solution, gram)) * held
        solution = solution + matmul(matmul(residual, inverse.mT) * held, inverse)
    total = solution.sum(-1, keepdim=True)
    mean = uniform(visible, gram.dtype)
    return (beta * mean - (beta - 1) * solution / torch.where(total > 0, total, 1)) * held


def _solve_batch(gram: Tensor, held: Tensor, beta: float, aim: float) -> Tensor:
    """Problems `[C, S, S]` whose Gram is already restricted to the held points `[C, S]`."""
    mean = uniform(held, gram.dtype)
    target = beta * _apply(gram, mean)  # q; 0 outside, because the mean is
    inside = _equality(gram, target, held)
    good = ((inside >= 0) | ~held).all(-1)
    weights = torch.where(good[:, None], inside, mean)
    rest = (~(good & (_gap(gram, target, held, inside) <= aim))).nonzero().squeeze(-1)
    if len(rest):
        easy = gram[rest], target[rest], held[rest], held[rest] & (inside[rest] > 0)
        weights[rest], gap = _exchange(*easy, weights[rest], aim, _QUICK_ROUNDS, at_once=True)
        rest = rest[gap > aim]
    if len(rest):
        hard = gram[rest], target[rest], held[rest]
        inner, slack = _interior_point(*hard, aim)
        start = torch.where(hard[2], inner, 0)
        start = start / start.sum(-1, keepdim=True)
        better = _gap(*hard, start) < _gap(*hard, weights[rest])
        start = torch.where(better[:, None], start, weights[rest])
        weights[rest], _ = _exchange(*hard, hard[2] & (inner > slack), start, aim, _MAX_ROUNDS, at_once=False)
    return weights


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    # Two columns: with one, a batch of one is multiplied by another routine, with another last bit.
    return (matrix @ torch.stack((vector, vector), -1))[..., 0]


def _gap(gram: Tensor, target: Tensor, held: Tensor, weights: Tensor) -> Tensor:
    slope = _apply(gram, weights) - target
    return (slope * weights).sum(-1) - torch.where(held, slope, torch.inf).amin(-1)


def _equality(gram: Tensor, target: Tensor, support: Tensor) -> Tensor:
    """Minimise over Σω = 1 with ω = 0 outside the support, signs free."""
    block = _restrict(gram, support)
    one = support.to(gram.dtype)
    of_target, of_one = _refined_solve(_factor(block), block, torch.stack((target * one, one), -1)).unbind(-1)
    price = (1 - of_target.sum(-1, keepdim=True)) / of_one.sum(-1, keepdim=True)
    return (of_target + price * of_one) * one


def _interior_point(gram: Tensor, target: Tensor, held: Tensor, aim: float) -> tuple[Tensor, Tensor]:
    """Mehrotra's predictor–corrector from the uniform weights. Returns weights and their slacks, both above 0."""
    weights = torch.where(held, uniform(held, gram.dtype), 1.0)
    slope = _apply(gram, weights * held) - target
    least = torch.where(held, slope, torch.inf).amin(-1, keepdim=True)
    number = held.sum(-1, keepdim=True).to(gram.dtype)
    excess = torch.where(held, slope - least, 0)
    price = least - (excess.sum(-1, keepdim=True) / number + 1e-3 * slope.abs().amax(-1, keepdim=True))
    slack = torch.where(held, slope - price, 1.0)
    index = torch.arange(len(gram), device=gram.device)
    out_weights, out_slack = weights.clone(), slack.clone()
    for _ in range(_MAX_STEPS):
        one = held.to(gram.dtype)
        mu = (weights * slack * one).sum(-1, keepdim=True) / number
        ratio = torch.where(held, slack / weights, 0)
        factor = _factor(gram + torch.diag_embed(ratio))
        dual = (_apply(gram, weights * one) - target - price - slack) * one
        primal = (weights * one).sum(-1, keepdim=True) - 1

        def step(complement: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            right = torch.stack((-dual - complement / weights, one), -1) * one[..., None]  # noqa: B023
            of_right, of_one = torch.cholesky_solve(right, factor).unbind(-1)  # noqa: B023
            d_price = (-primal - of_right.sum(-1, keepdim=True)) / of_one.sum(-1, keepdim=True)  # noqa: B023
            d_weights = (of_right + d_price * of_one) * one  # noqa: B023
            return d_weights, d_price, (-complement / weights - ratio * d_weights) * one  # noqa: B023

        product = weights * slack
        d_weights, d_price, d_slack = step(product)
        reach = _longest(weights, slack, d_weights, d_slack, held)
        ahead = ((weights + reach * d_weights) * (slack + reach * d_slack) * one).sum(-1, keepdim=True) / number
        centre = (ahead / mu).clamp(0, 1) ** 3 * mu
        d_weights, d_price, d_slack = step(product + d_weights * d_slack - centre)
        reach = 0.995 * _longest(weights, slack, d_weights, d_slack, held)
        weights, slack, price = weights + reach * d_weights, slack + reach * d_slack, price + reach * d_price
        fit = weights * held / (weights * held).sum(-1, keepdim=True)
        settled = (_gap(gram, target, held, fit) <= aim) | (reach.squeeze(-1) < 1e-8)
        out_weights[index], out_slack[index] = weights, slack
        if settled.all():
            break
        go = ~settled
        index, gram, target, held, number = index[go], gram[go], target[go], held[go], number[go]
        weights, slack, price = weights[go], slack[go], price[go]
    return out_weights, out_slack


def _longest(weights: Tensor, slack: Tensor, d_weights: Tensor, d_slack: Tensor, held: Tensor) -> Tensor:
    """The longest step up to 1 that keeps weights and slacks at or above 0."""
    pairs = ((weights, d_weights), (slack, d_slack))
    limits = [torch.where(held & (move < 0), -now / move, 1.0).amin(-1, keepdim=True) for now, move in pairs]
    return torch.minimum(*limits).clamp(max=1)


def _exchange(
    gram: Tensor, target: Tensor, held: Tensor, support: Tensor, start: Tensor, aim: float, rounds: int, at_once: bool
) -> tuple[Tensor, Tensor]:
    """Solve on a support, drop the points that go negative, take in those that want to count, until none does.

    Args:
        start: feasible weights to fall back on; whatever is better than them is kept.
        at_once: drop and take in within one round (a primal–dual active set: quick, but it may cycle); else nothing
            is taken in before nothing is negative.
    Returns: the best weights met, and their gaps.
    """
    best, best_gap = start.clone(), _gap(gram, target, held, start)
    index = torch.arange(len(gram), device=gram.device)
    for _ in range(rounds):
        tried = _equality(gram, target, support)
        negative = support & (tried < 0)
        feasible = tried.clamp(min=0)
        feasible = feasible / feasible.sum(-1, keepdim=True)
        gap = _gap(gram, target, held, feasible)
        # Exact zeros are worth a gap that is larger by rounding only.
        better = gap <= torch.maximum(best_gap[index], torch.full_like(gap, aim))
        best[index[better]], best_gap[index[better]] = feasible[better], gap[better]
        weights = tried if at_once else feasible
        slope = _apply(gram, weights) - target
        price = (slope * weights).sum(-1, keepdim=True)
        missing = held & ~support & (slope < price - aim)
        dropping = negative.any(-1, keepdim=True) & (not at_once)
        changed = torch.where(dropping, support & ~negative, (support & ~negative) | missing)
        go = (changed != support).any(-1) & (gap > aim) & changed.any(-1)
        if not go.any():
            break
        index, gram, target, held, support = index[go], gram[go], target[go], held[go], changed[go]
    return best, best_gap
