"""One short training loop: AdamW, warm-up and cosine, clipped gradients, and nothing random left to chance."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How to train."""

    epochs: int = 30
    """Passes over the training images."""
    batch_size: int = 64
    """Images a step; a last, smaller batch is used too."""
    learning_rate: float = 2e-3
    """Peak of the schedule."""
    weight_decay: float = 0.05
    """AdamW's, on matrices only."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    clip: float = 1.0
    """Largest norm of a gradient."""
    seed: int = 0
    """Fixes the order of the images and the draws of random methods."""


class Step(NamedTuple):
    """What one step of training reports."""

    step: int
    num_steps: int
    loss: float


def fit(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    config: FitConfig,
    report: Callable[[Step], None] | None = None,
) -> list[float]:
    """Train `model(images, generator=...)` in place by cross-entropy and return the loss of every step.

    The order of the images has a generator of its own, so that twins, models that differ in their method only,
    see the same batches whether or not one of them draws at random. Leaves the model in evaluation mode.
    """
    num_steps = config.epochs * math.ceil(len(images) / config.batch_size)
    order_generator = Generator().manual_seed(config.seed)
    draw_generator = Generator().manual_seed(config.seed + 1)
    optimizer = torch.optim.AdamW(_groups(model, config.weight_decay), lr=config.learning_rate)
    losses: list[float] = []
    model.train()
    for _ in range(config.epochs):
        order = torch.randperm(len(images), generator=order_generator).to(images.device)
        for batch in order.split(config.batch_size):
            for group in optimizer.param_groups:
                group["lr"] = config.learning_rate * schedule(len(losses), num_steps, config.warmup)
            loss = F.cross_entropy(model(images[batch], generator=draw_generator), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            optimizer.step()
            losses.append(loss.item())
            if not math.isfinite(losses[-1]):
                raise FloatingPointError(
                    f"the loss must stay finite, got {losses[-1]} at step {len(losses)} of {num_steps}; "
                    f"lower learning_rate = {config.learning_rate}"
                )
            if report is not None:
                report(Step(len(losses), num_steps, losses[-1]))
    model.eval()
    return losses


def schedule(step: int, num_steps: int, warmup: float) -> float:
    """Factor of the learning rate at a step counted from 0: a line up to 1, then half a cosine down to 0."""
    num_warmup = max(1, round(warmup * num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    return 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup)))


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    # Biases, norms, positions and the class token are not decayed: shrinking them does not regularise.
    decayed = [p for p in model.parameters() if p.ndim >= 2 and p.shape[0] > 1]
    others = [p for p in model.parameters() if not (p.ndim >= 2 and p.shape[0] > 1)]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
