"""What the attacks share: the losses they raise, the true gradient, averaged over draws, and the checks of the ball."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from robust_attention import _checks

Logits = Callable[[Tensor], Tensor]
"""Maps images `[B, C, H, W]` in [0, 1] to logits `[B, classes]`."""

Radius = float | Tensor
"""Of a max-norm ball: one number, or `[C]` for one a channel."""

Loss = Literal["ce", "margin"]
"""`ce`: cross-entropy. `margin`: the largest other logit minus that of the label; above 0 the image is read wrong."""


def losses(logits: Tensor, labels: Tensor, loss: Loss) -> Tensor:
    """The loss of each image `[B]`, which an attack raises.

    Numerics: cross-entropy is computed as log(1 + e^u), u = log Σ_{j≠y} e^{z_j} − z_y. Its gradient has no difference
    of two numbers near 1, which in float32 would lose the label's part for every image that is read with confidence.
    """
    label = labels[:, None]
    others = logits.scatter(1, label, -torch.inf)
    own = logits.gather(1, label).squeeze(1)
    if loss == "margin":
        return others.amax(dim=1) - own
    excess = others.logsumexp(dim=1) - own
    return torch.logaddexp(excess, torch.zeros_like(excess))


def loss_gradient(
    logits: Logits, images: Tensor, labels: Tensor, samples: int, loss: Loss = "ce"
) -> tuple[Tensor, Tensor]:
    """Loss of each image, and its gradient; both are means over `samples` calls. What is not finite counts as 0."""
    images = images.detach().requires_grad_()
    total_loss = images.new_zeros(len(images))
    total_gradient = torch.zeros_like(images)
    for _ in range(samples):
        # Enabled here, because evaluation usually runs under no_grad.
        with torch.enable_grad():
            value = losses(logits(images), labels, loss)
            found = torch.autograd.grad(value.sum(), images, allow_unused=True) if value.requires_grad else (None,)
        (gradient,) = found
        if gradient is None:
            raise ValueError(
                "logits must depend on the images by a differentiable path, got none; "
                "attack such a model with spsa, and do not call it robust"
            )
        total_loss += value.detach()
        total_gradient += gradient.nan_to_num(0, 0, 0)
    return total_loss / samples, total_gradient / samples


@torch.no_grad()
def loss_alone(logits: Logits, images: Tensor, labels: Tensor, samples: int, loss: Loss) -> Tensor:
    """The loss of `loss_gradient` without its gradient."""
    total = images.new_zeros(len(images))
    for _ in range(samples):
        total += losses(logits(images), labels, loss)
    return total / samples


def keep_higher(images: Tensor, loss: Tensor, best: Tensor, best_loss: Tensor) -> tuple[Tensor, Tensor]:
    """Of each image the version with the higher loss, and that loss."""
    better = loss > best_loss
    return torch.where(better[:, None, None, None], images, best), torch.where(better, loss, best_loss)


def radius_of(eps: Radius, images: Tensor) -> Tensor:
    """The radius in the dtype and on the device of the images, ready to be multiplied with them."""
    radius = torch.as_tensor(eps)
    if not bool((radius >= 0).all()):
        shown = eps if isinstance(eps, float | int) else radius.tolist()
        raise ValueError(f"eps must be at least 0, got {shown}; it is a distance in units of the images, say 8/255")
    if radius.ndim > 1 or (radius.ndim == 1 and len(radius) != images.shape[1]):
        raise ValueError(
            f"eps must be a number or one a channel, [{images.shape[1]}], got {list(radius.shape)}; "
            "one number stands for all channels"
        )
    # A Python number meets a tensor as exactly as the tensor's dtype allows; so does this.
    radius = radius.to(images.device, images.dtype)
    return radius[:, None, None] if radius.ndim else radius


def ball_of(images: Tensor, radius: Tensor, clip: bool) -> tuple[Tensor, Tensor]:
    """Lowest and highest values of the ball, inside [0, 1] where clipping is asked for."""
    low, high = images - radius, images + radius
    return (low.clamp(min=0), high.clamp(max=1)) if clip else (low, high)


def check_call(images: Tensor, samples: int, loss: str) -> None:
    """The arguments that every attack takes."""
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    _checks.one_of("loss", loss, get_args(Loss))
    if images.ndim != 4:
        raise ValueError(f"images must be [B, C, H, W], got {list(images.shape)}; add the missing dimensions")
    if len(images) and not (images.min() >= 0 and images.max() <= 1):
        raise ValueError(
            f"images must lie in [0, 1], got {images.min():.3g} to {images.max():.3g}; "
            "normalise inside the model, not before the attack"
        )


def check_ball(attacked: Tensor, images: Tensor, radius: Tensor, clip: bool) -> Tensor:
    """Pass `attacked` on if it is in the ball and in range; anything else would be our own mistake."""
    # The sum image + radius is rounded once, to one unit in the last place of at most 1 (of its own size unclipped).
    slack = torch.finfo(images.dtype).eps * (1 if clip else 1 + radius)
    assert bool(((attacked - images).abs() <= radius + slack).all()), "attack left the ball"
    assert not clip or len(images) == 0 or (attacked.min() >= 0 and attacked.max() <= 1), "attack left [0, 1]"
    return attacked.detach()
