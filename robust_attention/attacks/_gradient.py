"""What the attacks share: the true gradient, averaged over draws, and the checks of ball and range."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Logits = Callable[[Tensor], Tensor]
"""Maps images `[B, C, H, W]` in [0, 1] to logits `[B, classes]`."""


def loss_gradient(logits: Logits, images: Tensor, labels: Tensor, samples: int) -> tuple[Tensor, Tensor]:
    """Cross-entropy of each image, and its gradient; both are means over `samples` calls."""
    images = images.detach().requires_grad_()
    total_loss = images.new_zeros(len(images))
    total_gradient = torch.zeros_like(images)
    for _ in range(samples):
        # Enabled here, because evaluation usually runs under no_grad.
        with torch.enable_grad():
            loss = F.cross_entropy(logits(images), labels, reduction="none")
            (gradient,) = torch.autograd.grad(loss.sum(), images)
        total_loss += loss.detach()
        total_gradient += gradient
    return total_loss / samples, total_gradient / samples


def check_images(images: Tensor, eps: float, samples: int) -> None:
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, got {eps}; it is a distance in units of the images, say 8/255")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if len(images) and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"images must lie in [0, 1], got {images.min():.3g} to {images.max():.3g}; "
            "normalise inside the model, not before the attack"
        )


def check_ball(attacked: Tensor, images: Tensor, eps: float) -> Tensor:
    """Pass `attacked` on if it is in the ball and in range; anything else would be our own mistake."""
    # The sum image + eps is rounded once, to one unit in the last place of at most 1.
    slack = torch.finfo(images.dtype).eps
    assert len(images) == 0 or (attacked - images).abs().max() <= eps + slack, "attack left the ball"
    assert len(images) == 0 or (attacked.min() >= 0 and attacked.max() <= 1), "attack left [0, 1]"
    return attacked.detach()
