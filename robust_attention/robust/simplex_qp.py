"""Scaled and projected kernel mean (SPKDE, Vandermeulen and Scott, 2014): many small simplex QPs at once.

For every visible set V of a Gram G, with n = |V|:

    min_ω ωᵀGω − 2qᵀω,   q = (β/n) G 1_V,   ω ≥ 0,  Σω = 1,  ω = 0 outside V

Where the optimum is inside the simplex it has a closed form; elsewhere a few exchanges of its support usually find it,
and for what is left a primal–dual interior point does, before the last exchanges make it exact. Whatever the way, the
answer is judged by its Frank–Wolfe gap `gᵀω − min_V g`, g = Gω − q, which bounds how far the objective is from the
optimum, and that gap is returned. Causal prefixes share one factorisation where their optima are inside; the others of
the same Gram are found one after the other, each from the one before (`growing_qp`), as in decoding.

Numerics: everything is float64, on the device of the Gram. Problems never influence each other: each leaves the
batch as soon as its own gap is reached.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_attention.robust.gram import matmul
from robust_attention.robust.growing_qp import prefix_weights
from robust_attention.robust.kirwls import uniform
from robust_attention.robust.qp_solver import AIM, certificate, chunks, factored, refined_solve, restricted, solve_batch

GAP_TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-6}
"""What an answer must reach, by the dtype of the Gram; a larger gap is reported with a warning."""

_GROW_FROM = 64  # points from which prefixes are taken one after the other: below, all at once is as quick


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
        prefixes: promise that every visible set is the first n points for some n: they then share their work.
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
        weights = _solve(wide, visible, beta, prefixes, AIM[gram.dtype]) if visible.numel() else visible.double()
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
        for part in chunks(todo, size):
            held = support.reshape(-1, size)[part]
            block = restricted(gram[part // sets].double(), held)
            factor = factored(block)
            right = torch.stack((incoming[part] * held, held.to(block.dtype)), -1)
            solved = refined_solve(factor, block, right)
            of_grad, of_one = solved.unbind(-1)
            flat[part] = of_grad - of_one * (of_grad.sum(-1, keepdim=True) / of_one.sum(-1, keepdim=True))
        pull = ctx.beta * uniform(visible, torch.float64) - weights
        return (flat.reshape(problems, sets, size).mT @ pull).to(gram.dtype), None, None, None


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
        if size >= _GROW_FROM and 2 * sets >= size:
            some = (~done).any(-1).nonzero().squeeze(-1)
            found = prefix_weights(gram, some, visible.sum(-1)[some], beta, aim)
            weights[some] = torch.where(done[some][..., None], weights[some], found)
            return weights
    flat_visible, flat_weights = visible.reshape(-1, size), weights.reshape(-1, size)
    for part in chunks((~done).flatten().nonzero().squeeze(-1), size):
        held = flat_visible[part]
        block = restricted(gram[part // sets], held)
        flat_weights[part] = solve_batch(block, held, beta, aim)
    return flat_weights.reshape(problems, sets, size)


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
