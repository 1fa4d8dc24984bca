"""One batch of simplex QPs, solved: closed form, exchanges of the support, interior point.

    min_ω ωᵀGω − 2qᵀω,   q = (β/n) G 1_V,   ω ≥ 0,  Σω = 1,  ω = 0 outside V

Everything is float64. Problems never influence each other: each leaves the batch as soon as its own gap is reached.
"""

import torch
from torch import Tensor

from robust_attention.robust.gram import matmul
from robust_attention.robust.kirwls import uniform

AIM = {torch.float64: 1e-13, torch.float32: 2e-9}
# What the solver works towards: rounding of the Gram's dtype; the tolerance leaves room for Grams of condition 1e9.
_MAX_STEPS = 60
_QUICK_ROUNDS = 8  # exchanges before the interior point: enough for most problems of an attention layer
_MAX_ROUNDS = 30
_CHUNK_ENTRIES = 2**23  # entries of one batch of Grams: 64 MiB in float64, times a handful of temporaries


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


def chunks(index: Tensor, size: int) -> tuple[Tensor, ...]:
    return index.split(max(1, _CHUNK_ENTRIES // max(1, size * size))) if len(index) else ()


def restricted(gram: Tensor, held: Tensor) -> Tensor:
    """The Gram of the held points; elsewhere the identity, so that a factorisation passes the others by."""
    inside = held[:, :, None] & held[:, None, :]
    return torch.where(inside, gram, torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device))


def factored(matrix: Tensor) -> Tensor:
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


def refined_solve(factor: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """Solve with the factor, then take back what the factor's shifted diagonal changed (two refinements)."""
    solved = torch.cholesky_solve(right, factor)
    for _ in range(2):
        solved = solved + torch.cholesky_solve(right - matrix @ solved, factor)
    return solved


def solve_batch(gram: Tensor, held: Tensor, beta: float, aim: float) -> Tensor:
    """Problems `[C, S, S]` whose Gram is already restricted to the held points `[C, S]`."""
    mean = uniform(held, gram.dtype)
    target = beta * apply(gram, mean)  # q; 0 outside, because the mean is
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


def apply(matrix: Tensor, vector: Tensor) -> Tensor:
    # Two columns: with one, a batch of one is multiplied by another routine, with another last bit.
    return (matrix @ torch.stack((vector, vector), -1))[..., 0]


def _gap(gram: Tensor, target: Tensor, held: Tensor, weights: Tensor) -> Tensor:
    slope = apply(gram, weights) - target
    return (slope * weights).sum(-1) - torch.where(held, slope, torch.inf).amin(-1)


def _equality(gram: Tensor, target: Tensor, support: Tensor) -> Tensor:
    """Minimise over Σω = 1 with ω = 0 outside the support, signs free."""
    block = restricted(gram, support)
    one = support.to(gram.dtype)
    of_target, of_one = refined_solve(factored(block), block, torch.stack((target * one, one), -1)).unbind(-1)
    price = (1 - of_target.sum(-1, keepdim=True)) / of_one.sum(-1, keepdim=True)
    return (of_target + price * of_one) * one


def _interior_point(gram: Tensor, target: Tensor, held: Tensor, aim: float) -> tuple[Tensor, Tensor]:
    """Mehrotra's predictor–corrector from the uniform weights. Returns weights and their slacks, both above 0."""
    weights = torch.where(held, uniform(held, gram.dtype), 1.0)
    slope = apply(gram, weights * held) - target
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
        factor = factored(gram + torch.diag_embed(ratio))
        dual = (apply(gram, weights * one) - target - price - slack) * one
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
        slope = apply(gram, weights) - target
        price = (slope * weights).sum(-1, keepdim=True)
        missing = held & ~support & (slope < price - aim)
        dropping = negative.any(-1, keepdim=True) & (not at_once)
        changed = torch.where(dropping, support & ~negative, (support & ~negative) | missing)
        go = (changed != support).any(-1) & (gap > aim) & changed.any(-1)
        if not go.any():
            break
        index, gram, target, held, support = index[go], gram[go], target[go], held[go], changed[go]
    return best, best_gap
