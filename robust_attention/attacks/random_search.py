"""Random search: many points of the ball, the worst of them kept. Whoever loses against this has hidden gradients."""

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
    radius_of,
)


@torch.no_grad()
def random_search(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    eps: Radius,
    generator: Generator,
    tries: int = 50,
    loss: Loss = "margin",
    clip: bool = True,
) -> Tensor:
    """The point of the highest loss among random ones of the max-norm ball of radius eps.

    Args:
        logits: Maps images `[B, C, H, W]` to logits.
        images: In [0, 1].
        eps: Radius in units of the images; one number, or `[C]` for one a channel.
        generator: Draws the points on the CPU: in turn corners of the ball and points anywhere in it, shared by the
            images of the batch, so that an image's result does not depend on its neighbours.
        loss: `margin`, the largest other logit minus the label's, or `ce`, cross-entropy.
        clip: Keep the results in [0, 1].
    """
    check_call(images, 1, loss)
    radius = radius_of(eps, images)
    _checks.whole("tries", tries, least=1)
    low, high = ball_of(images, radius, clip)
    best, best_loss = images, images.new_full((len(images),), -torch.inf)
    for number in range(tries):
        noise = torch.rand(images.shape[1:], generator=generator).to(images) * 2 - 1
        tried = (images + radius * (noise.sign() if number % 2 == 0 else noise)).clamp(low, high)
        best, best_loss = keep_higher(tried, loss_alone(logits, tried, labels, 1, loss), best, best_loss)
    return check_ball(best, images, radius, clip)
