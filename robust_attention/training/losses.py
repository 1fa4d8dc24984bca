"""What image models are trained on: cross-entropy, and DeiT's distillation from a teacher's decisions.

A batch is `(images, targets)`. Targets are classes `[B]`, int64, or shares of the classes `[B, C]`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from robust_attention.training.trainer import Loss


def cross_entropy_loss(*, label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of the model's logits. Smoothing spreads that share of every target over all classes alike."""
    _check_smoothing(label_smoothing)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        images, targets = batch[:2]
        return _cross_entropy(model(images), targets, label_smoothing)

    return loss


def hard_distillation(teacher: nn.Module, *, label_smoothing: float = 0.0) -> Loss:
    """½ CE(class head, target) + ½ CE(distillation head, argmax of the teacher's logits).

    Args:
        teacher: any model `images -> logits`, images in [0, 1]. It sees what the student sees, augmented and mixed, in
            the same precision; it is put into evaluation mode and on the images' device, and gets no gradient.
        label_smoothing: of the first term.
    Reference: Touvron et al., 2021. The student must be distilled: `model(images, heads=True)` gives two logits.
    """
    _check_smoothing(label_smoothing)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        images, targets = batch[:2]
        decided = _logits_of(teacher, images)
        logits, distilled = model(images, heads=True)
        if decided.shape != distilled.shape:
            raise ValueError(
                f"teacher must know the student's classes, [B, C] = {list(distilled.shape)}, got {list(decided.shape)}"
                "; pass one that was trained on them"
            )
        supervised = _cross_entropy(logits, targets, label_smoothing)
        return 0.5 * (supervised + _cross_entropy(distilled, decided.argmax(dim=1), 0.0))

    return loss


@torch.no_grad()
def _logits_of(teacher: nn.Module, images: Tensor) -> Tensor:
    if teacher.training:
        teacher.eval()
    first = next(teacher.parameters(), images)
    if first.device != images.device:
        teacher.to(images.device)
    logits: Tensor = teacher(images)
    return logits


def _cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float) -> Tensor:
    # 16-bit logits would round the loss itself.
    wide = logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits
    soft = targets.to(wide.dtype) if targets.is_floating_point() else targets
    return F.cross_entropy(wide, soft, label_smoothing=label_smoothing)


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must lie from 0 to below 1, got {label_smoothing}; 0.1 is usual")
