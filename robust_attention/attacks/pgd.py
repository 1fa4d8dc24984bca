"""PGD: projected gradient ascent from a random start (Madry et al., 2018)."""

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from robust_attention import _checks
from robust_attention.attacks._gradient import (
    Logits,
    Loss,
    Radius,
    ball_of,
    check_ball,
    check_call,
    keep_higher,
    loss_alone,
    loss_gradient,
    radius_of,
)

Keep = Literal["best", "last"]

STEP = 0.15
"""The paper's step size, as a share of eps."""


def pgd(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    eps: Radius,
    generator: Generator | Sequence[Generator],
    steps: int = 20,
    step_size: Radius | None = None,
    restarts: int = 1,
    samples: int = 1,
    loss: Loss = "ce",
    keep: Keep = "best",
    clip: bool = True,
) -> Tensor:
    """Raise the loss of the labels inside the max-norm ball of radius eps.

    Args:
        logits: Maps images `[B, C, H, W]` to logits. A random model should draw afresh at every call.
        images: In [0, 1].
        eps: Radius in units of the images; one number, or `[C]` for one a channel.
        generator: Draws the starts, uniform in the ball, on the CPU: all devices start alike. One for the batch, or
            one for each image, whose start then does not depend on its batch.
        step_size: 0.15 * eps if None, the paper's.
        restarts: Runs, each from a start of its own.
        samples: Calls whose gradients are averaged (EOT); more than 1 only helps on a random model.
        loss: `ce`, cross-entropy, or `margin`, the largest other logit minus the label's.
        keep: `best`: the visited point of the highest loss. `last`: the last point of a run, as other libraries do;
            of several runs that of the highest loss.
        clip: Keep the results in [0, 1]; False is the published tables' habit.
    Returns: for each image, the point that `keep` says (losses are estimated from `samples` calls).
    """
    check_call(images, samples, loss)
    radius = radius_of(eps, images)
    step = STEP * radius if step_size is None else radius_of(step_size, images)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}; 20 is the paper's")
    _checks.whole("restarts", restarts, least=1)
    _checks.one_of("keep", keep, get_args(Keep))
    low, high = ball_of(images, radius, clip)
    best, best_loss = images, images.new_full((len(images),), -torch.inf)
    for restart in range(restarts):
        attacked = (images + radius * _start(images, generator)).clamp(low, high)
        # A model that answers NaN never beats minus infinity: it is left with its first start.
        best = attacked if restart == 0 else best
        for _ in range(steps):
            value, gradient = loss_gradient(logits, attacked, labels, samples, loss)
            if keep == "best":
                best, best_loss = keep_higher(attacked, value, best, best_loss)
            attacked = (attacked + step * gradient.sign()).clamp(low, high)
        # The last point has not been judged yet.
        value = loss_alone(logits, attacked, labels, samples, loss)
        best, best_loss = keep_higher(attacked, value, best, best_loss)
    return check_ball(best, images, radius, clip)


def _start(images: Tensor, generator: Generator | Sequence[Generator]) -> Tensor:
    """Uniform in [-1, 1], of the images' shape."""
    if isinstance(generator, Generator):
        return torch.rand(images.shape, generator=generator).to(images) * 2 - 1
    if len(generator) != len(images):
        raise ValueError(f"generator must be one, or one for each of {len(images)} images, got {len(generator)}")
    if not len(images):
        return torch.zeros_like(images)
    return torch.stack([torch.rand(images.shape[1:], generator=own) for own in generator]).to(images) * 2 - 1
