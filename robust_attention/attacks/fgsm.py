"""FGSM: one step of size eps along the sign of the gradient (Goodfellow, Shlens and Szegedy, 2015)."""

from torch import Tensor

from robust_attention.attacks._gradient import (
    Logits,
    Loss,
    Radius,
    ball_of,
    check_ball,
    check_call,
    loss_gradient,
    radius_of,
)


def fgsm(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    eps: Radius,
    samples: int = 1,
    loss: Loss = "ce",
    clip: bool = True,
) -> Tensor:
    """Raise the loss of the labels inside the max-norm ball of radius eps.

    Args:
        logits: Maps images `[B, C, H, W]` to logits. A random model should draw afresh at every call.
        images: In [0, 1].
        eps: Radius in units of the images; one number, or `[C]` for one a channel.
        samples: Calls whose gradients are averaged (EOT); more than 1 only helps on a random model.
        loss: `ce`, cross-entropy, or `margin`, the largest other logit minus the label's.
        clip: Keep the results in [0, 1]; False is the published tables' habit.
    """
    check_call(images, samples, loss)
    radius = radius_of(eps, images)
    _, gradient = loss_gradient(logits, images, labels, samples, loss)
    low, high = ball_of(images, radius, clip)
    return check_ball((images + radius * gradient.sign()).clamp(low, high), images, radius, clip)
