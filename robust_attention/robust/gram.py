"""Directions, distances and Gaussian Grams that keep their digits."""

import torch
from torch import Tensor


def unit(x: Tensor) -> Tensor:
    """x/‖x‖ over the last dimension; a zero vector stays zero and gets a zero gradient.

    Numerics: the input is float32 or float64. It is first divided by its largest entry, so that no square overflows
    or vanishes (norms from 1e-38 to 3e38). The divisor is a constant to autograd: the quotient does not depend on it.
    """
    largest = x.detach().abs().amax(-1, keepdim=True)
    nonzero = largest > 0
    scaled = x / torch.where(nonzero, largest, 1)
    norm = torch.where(nonzero, scaled.square().sum(-1, keepdim=True), 1).sqrt()
    return torch.where(nonzero, scaled / norm, 0)


def squared_distances(x: Tensor) -> Tensor:
    """‖x_m − x_j‖² for points [..., N, D], as [..., N, N] in the dtype of x.

    Numerics: ‖x‖² + ‖y‖² − 2x·y with the inner products in float64, where the cancellation costs nothing that float32
    could show and TF32 has no say; never below 0, and exactly 0 on the diagonal.
    """
    wide = x.double()
    inner = wide @ wide.mT
    norms = wide.square().sum(-1)
    distance = (norms[..., :, None] + norms[..., None, :] - 2 * inner).clamp(min=0)
    same = torch.eye(x.shape[-2], dtype=torch.bool, device=x.device)
    return torch.where(same, 0, distance).to(x.dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in full precision: where TF32 is switched on, float32 operands take the float64 units instead."""
    if a.is_cuda and a.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return (a.double() @ b.double()).to(a.dtype)
    return a @ b
