"""What models are trained on: cross-entropy of classes or shares, and DeiT's distillation."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import robust_attention as ra
from robust_attention.models import ViT, ViTConfig
from robust_attention.training.losses import cross_entropy_loss, hard_distillation

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.0, 0.0]], dtype=torch.float64)
TARGETS = torch.tensor([0, 2])


class Says(nn.Module):
    """Logits, or two of them, whatever it is shown."""

    def __init__(self, logits: Tensor, distilled: Tensor | None = None) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)
        self.distilled = None if distilled is None else nn.Parameter(distilled)
        self.modes: list[tuple[bool, bool, bool]] = []

    def forward(self, images: Tensor, heads: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        self.modes.append((self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        if heads:
            assert self.distilled is not None
            return self.logits, self.distilled
        return self.logits if self.distilled is None else (self.logits + self.distilled) / 2


def by_hand(logits: Tensor, shares: Tensor) -> float:
    return float(-(shares * logits.detach().log_softmax(1)).sum(1).mean())


def test_cross_entropy_takes_classes_and_shares() -> None:
    loss, images = cross_entropy_loss(), torch.rand(2, 1, 4, 4)
    hard = F.one_hot(TARGETS, 3).double()
    assert loss(Says(LOGITS), (images, TARGETS)).item() == pytest.approx(by_hand(LOGITS, hard))
    mixed = torch.tensor([[0.7, 0.3, 0.0], [0.1, 0.0, 0.9]])
    assert loss(Says(LOGITS), (images, mixed)).item() == pytest.approx(by_hand(LOGITS, mixed), rel=1e-6)
    smooth = cross_entropy_loss(label_smoothing=0.3)
    for targets, shares in ((TARGETS, hard), (mixed, mixed)):
        wanted = by_hand(LOGITS, 0.7 * shares + 0.1)
        assert smooth(Says(LOGITS), (images, targets)).item() == pytest.approx(wanted, rel=1e-6)


def test_cross_entropy_of_16_bit_logits_is_not_rounded() -> None:
    rounded = LOGITS.bfloat16()
    loss = cross_entropy_loss()(Says(rounded), (torch.rand(2, 1), TARGETS))
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(by_hand(rounded.double(), F.one_hot(TARGETS, 3)), rel=1e-6)


def test_distillation_halves_the_loss_between_target_and_teacher() -> None:
    distilled = torch.tensor([[0.0, 1.0, 0.5], [3.0, 0.0, 1.0]], dtype=torch.float64)
    teacher = Says(torch.tensor([[0.0, 9.0, 1.0], [0.1, 0.2, 0.0]])).train()  # decides for 1 and 1
    student = Says(LOGITS, distilled)
    loss = hard_distillation(teacher, label_smoothing=0.3)(student, (torch.rand(2, 1), TARGETS))
    hard = 0.7 * F.one_hot(TARGETS, 3) + 0.1
    wanted = 0.5 * by_hand(LOGITS, hard) + 0.5 * by_hand(distilled, F.one_hot(torch.tensor([1, 1]), 3))
    assert loss.item() == pytest.approx(wanted)
    loss.backward()
    assert student.logits.grad is not None
    assert student.distilled.grad.any()
    assert teacher.logits.grad is None


def test_teacher_is_asked_in_evaluation_mode_without_gradient_in_the_same_precision() -> None:
    teacher, student = Says(LOGITS).train(), Says(LOGITS, LOGITS)
    loss = hard_distillation(teacher)
    loss(student, (torch.rand(2, 1), TARGETS))
    with torch.autocast("cpu", torch.bfloat16):
        loss(student, (torch.rand(2, 1), TARGETS))
    assert teacher.modes == [(False, False, False), (False, False, True)]
    assert student.modes == [(True, True, False), (True, True, True)]


def test_a_vision_transformer_learns_from_a_teacher() -> None:
    config = {"dim": 16, "depth": 1}
    teacher, student = ViT(ViTConfig(**config), ra.Softmax()), ViT(ViTConfig(**config, distilled=True), ra.RKDE())
    images, loss = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1)), hard_distillation(teacher)
    decided = teacher(images).argmax(1)
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        loss(student, (images, (decided + 1) % 10)).backward()
        optimizer.step()
    logits, distilled = student(images, heads=True)
    assert torch.equal(distilled.argmax(1), decided)
    assert torch.equal(logits.argmax(1), (decided + 1) % 10)


def test_wrong_arguments_fail_clearly() -> None:
    with pytest.raises(ValueError, match=r"label_smoothing must lie from 0 to below 1, got 1.5; 0.1 is usual"):
        cross_entropy_loss(label_smoothing=1.5)
    teacher = Says(torch.zeros(2, 4))
    message = r"teacher must know the student's classes, \[B, C\] = \[2, 3\], got \[2, 4\]; pass one"
    with pytest.raises(ValueError, match=message):
        hard_distillation(teacher)(Says(LOGITS, LOGITS), (torch.rand(2, 1), TARGETS))
