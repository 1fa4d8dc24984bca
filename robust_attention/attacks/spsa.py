"""SPSA: ascent along gradients that are estimated from answers alone (Uesato et al., 2018)."""

import math

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
    losses,
    radius_of,
)

_DECAY1, _DECAY2, _TINY = 0.9, 0.999, 1e-12


@torch.no_grad()
def spsa(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    eps: Radius,
    generator: Generator,
    steps: int = 100,
    samples: int = 64,
    probe: float = 0.01,
    rate: float = 0.25,
    loss: Loss = "margin",
    clip: bool = True,
    batch_size: int = 1024,
) -> Tensor:
    """Raise the loss of the labels inside the max-norm ball of radius eps without asking for a gradient.

        g = (1/n) Σ_v (L(x' + c v) − L(x' − c v)) / (2c) · v,    x' ← project(x' + rate·eps·Adam(g)),    v in {−1, 1}

    x' is the point reached so far, not the image that the attack began with.

    Departs: the v of successive steps are rows of one Hadamard matrix, its columns' signs flipped at random, instead of
    independent ones. Each v has the same distribution as before, but they are orthogonal (nearly so where C·H·W is no
    power of 2), so that none repeats what another has found: on 256 pixels a quarter of the answers does as much.

    Args:
        logits: Maps images `[B, C, H, W]` to logits; both signs of a v meet in one call, and thus in one draw of a
            random model. The points asked about may lie up to c outside [0, 1].
        images: In [0, 1].
        eps: Radius in units of the images; one number, or `[C]` for one a channel.
        generator: Draws the v on the CPU, shared by the images of the batch, so that an image's result does not depend
            on its neighbours.
        samples: Directions v a step: 2·samples + 1 answers an image.
        probe: c, in units of the images.
        rate: First step of Adam, as a share of eps; falls to a tenth of that along a line.
        loss: `margin`, the largest other logit minus the label's, or `ce`, cross-entropy.
        clip: Keep the results in [0, 1].
        batch_size: Images a call, at most, but one pair at least.
    Returns: for each image, the visited point of the highest loss.
    """
    check_call(images, samples, loss)
    radius = radius_of(eps, images)
    _checks.whole("steps", steps, least=1)
    _checks.positive("probe", probe)
    _checks.positive("rate", rate)
    low, high = ball_of(images, radius, clip)
    attacked, best, best_loss = images, images, images.new_full((len(images),), -torch.inf)
    first, second = torch.zeros_like(images), torch.zeros_like(images)
    directions = _Directions(images, generator)
    for step in range(steps):
        gradient = _estimate(logits, attacked, labels, directions.take(samples), probe, loss, batch_size)
        first = _DECAY1 * first + (1 - _DECAY1) * gradient
        second = _DECAY2 * second + (1 - _DECAY2) * gradient.square()
        direction = first / (1 - _DECAY1 ** (step + 1))
        length = (second / (1 - _DECAY2 ** (step + 1))).sqrt()
        share = rate * (1 - 0.9 * step / steps)
        attacked = (attacked + share * radius * direction / (length + _TINY)).clamp(low, high)
        best, best_loss = keep_higher(attacked, loss_alone(logits, attacked, labels, 1, loss), best, best_loss)
    return check_ball(best, images, radius, clip)


class _Directions:
    """Rows of a Hadamard matrix in random order, with random signs of its columns; a new order when all are used up."""

    def __init__(self, images: Tensor, generator: Generator) -> None:
        self.images, self.generator = images, generator
        self.num_columns = math.prod(images.shape[1:])
        self.num_rows = 1 << max(0, self.num_columns - 1).bit_length()
        self.column = torch.arange(self.num_columns, device=images.device)
        self.left = torch.empty(0, dtype=torch.int64, device=images.device)
        self.flip = torch.empty(0, dtype=torch.int64, device=images.device)

    def take(self, number: int) -> Tensor:
        """The next `number` directions `[number, C, H, W]`, of -1 and 1."""
        taken = []
        while number:
            if not len(self.left):
                self.left = torch.randperm(self.num_rows, generator=self.generator).to(self.images.device)
                self.flip = torch.randint(0, 2, (self.num_columns,), generator=self.generator).to(self.images.device)
            rows, self.left = self.left[:number], self.left[number:]
            # The entry in row r and column c is -1 to the number of bits that r and c share.
            shared = rows[:, None] & self.column
            for shift in (32, 16, 8, 4, 2, 1):
                shared = shared ^ (shared >> shift)
            taken.append((shared & 1) ^ self.flip)
            number -= len(rows)
        signs = 1 - 2 * torch.cat(taken)
        return signs.reshape(-1, *self.images.shape[1:]).to(self.images.dtype)


def _estimate(
    logits: Logits, images: Tensor, labels: Tensor, directions: Tensor, probe: float, loss: Loss, batch_size: int
) -> Tensor:
    """The mean over the directions of the slope along each, times the direction."""
    total = torch.zeros_like(images)
    both_ways = images.new_tensor([1.0, -1.0])[None, :, None, None, None, None]
    for part in directions.split(max(1, batch_size // max(1, 2 * len(images)))):
        asked = (images + probe * part[:, None, None] * both_ways).flatten(0, 2)
        value = losses(logits(asked), labels.repeat(2 * len(part)), loss).unflatten(0, (len(part), 2, len(images)))
        slope = ((value[:, 0] - value[:, 1]) / (2 * probe)).nan_to_num(0, 0, 0)
        total += torch.einsum("pb,pchw->bchw", slope, part)
    return total / len(directions)
