"""The generalised Fourier integral kernel, in log space."""

import torch
from torch import Tensor

# Below this the series of log(sin x / x) up to x¹⁰ is exact to float64; above, the formula and its gradient are.
_SERIES_BELOW = 0.1


def log_abs_sinc(x: Tensor) -> Tensor:
    """log|sin(x)/x|: 0 at x = 0, −inf with zero gradient where the sine is exactly 0."""
    near = x.abs() < _SERIES_BELOW
    # Each branch sees only its own arguments: an overflow in the one that is not taken would spoil the gradient.
    x2 = torch.where(near, x, 0).square()
    series = -x2 * (1 / 6 + x2 * (1 / 180 + x2 * (1 / 2835 + x2 * (1 / 37800 + x2 / 467775))))
    far = torch.where(near, 1, x)
    sinc = torch.where(near, 1, (torch.sin(far) / far).abs())
    zero = sinc == 0
    return torch.where(near, series, torch.where(zero, -torch.inf, torch.where(zero, 1, sinc).log()))


def log_fourier_kernel(q: Tensor, k: Tensor, radius: Tensor, power: int) -> Tensor:
    """log Π_d (sin(R_d(q_d − k_d)) / (R_d(q_d − k_d)))^p for `[..., T, D]` and `[..., S, D]`: `[..., T, S]`.

    Sums one coordinate after the other, so that nothing of size T·S·D exists at once (autograd keeps D parts).
    """
    radius = radius.expand(k.shape[-1])
    total = torch.zeros((), dtype=q.dtype, device=q.device)
    for d in range(k.shape[-1]):
        total = total + log_abs_sinc(radius[d] * (q[..., :, None, d] - k[..., None, :, d]))
    return power * total
