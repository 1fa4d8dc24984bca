"""KIRWLS: iteratively reweighted least squares for a kernel mean (Kim and Scott, 2012)."""

import torch
from torch import Tensor

from robust_attention.robust.gram import matmul
from robust_attention.robust.losses import Loss


def uniform(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """1/n over the visible points [..., S], 0 elsewhere (and everywhere, where nothing is visible)."""
    return visible.to(dtype) / visible.sum(-1, keepdim=True).clamp(min=1).to(dtype)


def kirwls(gram: Tensor, visible: Tensor, loss: Loss, sweeps: int) -> Tensor:
    """Weights of the robust mean of the visible points' feature vectors.

        r_j = Σ_m ω_m G_mj,  c = Σ_m ω_m r_m,  d_j = sqrt(1 − 2r_j + c),  ω_j ← ψ(d_j) / Σ_m ψ(d_m)

    Args:
        gram: `[..., S, S]`, ones on the diagonal.
        visible: `[..., T, S]`, True where set t holds point j.
        sweeps: how often to reweight; 0 leaves the uniform weights.
    Returns: `[..., T, S]`; each row sums to 1 over its visible points, or is 0 where it has none.
    Numerics: a set whose every ψ is 0 gets uniform weights.
    """
    start = uniform(visible, gram.dtype)
    weights = start.expand(torch.broadcast_shapes(start.shape[:-2], gram.shape[:-2]) + start.shape[-2:])
    for _ in range(sweeps):
        overlap = matmul(weights, gram)
        size = (weights * overlap).sum(-1, keepdim=True)
        weights = reweight(1 - 2 * overlap + size, visible, loss, start)
    return weights


def reweight(squared_distance: Tensor, visible: Tensor, loss: Loss, otherwise: Tensor) -> Tensor:
    """ψ(d_j) / Σ_m ψ(d_m) over the visible points; `otherwise` where every ψ is 0."""
    psi = loss.psi_of_square(squared_distance.clamp(min=0)) * visible
    total = psi.sum(-1, keepdim=True)
    return torch.where(total > 0, psi / torch.where(total > 0, total, 1), otherwise)
