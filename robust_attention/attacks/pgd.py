"""PGD: projected gradient ascent from a random start (Madry et al., 2018)."""

import torch
from torch import Generator, Tensor

from robust_attention.attacks._gradient import Logits, check_ball, check_images, loss_gradient


def pgd(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    eps: float,
    generator: Generator,
    steps: int = 20,
    step_size: float | None = None,
    samples: int = 1,
) -> Tensor:
    """Raise the cross-entropy of the true labels inside the max-norm ball of radius eps.

    Args:
        logits: Maps images `[B, C, H, W]` to logits. A random model should draw afresh at every call.
        images: In [0, 1]; so are the results.
        eps: Radius in units of the images.
        generator: Draws the start, uniform in the ball.
        step_size: 0.15 * eps if None, the paper's.
        samples: Calls whose gradients are averaged (EOT); more than 1 only helps on a random model.
    Returns: for each image, the visited point of the highest loss (estimated from `samples` calls).
    """
    check_images(images, eps, samples)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}; 20 is the paper's")
    step_size = 0.15 * eps if step_size is None else step_size
    low, high = (images - eps).clamp(min=0), (images + eps).clamp(max=1)
    start = torch.rand(images.shape, generator=generator).to(images) * 2 - 1
    attacked = (images + eps * start).clamp(low, high)
    best, best_loss = attacked, images.new_full((len(images),), -torch.inf)
    for _ in range(steps):
        loss, gradient = loss_gradient(logits, attacked, labels, samples)
        best, best_loss = _keep(attacked, loss, best, best_loss)
        attacked = (attacked + step_size * gradient.sign()).clamp(low, high)
    # The last point has not been judged yet; its gradient is not needed, but one call more is cheap.
    loss, _ = loss_gradient(logits, attacked, labels, samples)
    best, _ = _keep(attacked, loss, best, best_loss)
    return check_ball(best, images, eps)


def _keep(images: Tensor, loss: Tensor, best: Tensor, best_loss: Tensor) -> tuple[Tensor, Tensor]:
    better = loss > best_loss
    return torch.where(better[:, None, None, None], images, best), torch.where(better, loss, best_loss)
