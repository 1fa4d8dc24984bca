"""FGSM: one step of size eps along the sign of the gradient (Goodfellow, Shlens and Szegedy, 2015)."""

from torch import Tensor

from robust_attention.attacks._gradient import Logits, check_ball, check_images, loss_gradient


def fgsm(logits: Logits, images: Tensor, labels: Tensor, *, eps: float, samples: int = 1) -> Tensor:
    """Raise the cross-entropy of the true labels inside the max-norm ball of radius eps.

    Args:
        logits: Maps images `[B, C, H, W]` to logits. A random model should draw afresh at every call.
        images: In [0, 1]; so are the results.
        eps: Radius in units of the images.
        samples: Calls whose gradients are averaged (EOT); more than 1 only helps on a random model.
    """
    check_images(images, eps, samples)
    _, gradient = loss_gradient(logits, images, labels, samples)
    attacked = (images + eps * gradient.sign()).clamp(0, 1)
    return check_ball(attacked, images, eps)
