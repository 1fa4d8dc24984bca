"""What a grid will cost, told before it starts: a few steps are timed here, the rest is multiplication."""

import math
import time
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

from robust_attention.recipes.vision import VisionConfig
from robust_attention.study.grid import Cell
from robust_attention.study.vision import build

_IMAGENET = 1_281_167
_TIMED_IMAGES = {"cpu": 8, "cuda": 128}


def estimate(cells: Sequence[Cell], device: torch.device) -> str:
    """Hours of training on devices like this one, row by row; attacks and data loading come on top."""
    lines, total = ["Estimated training time, from a few timed steps on one device like this:"], 0.0
    for cell in cells:
        config: VisionConfig = cell.config
        rate = images_per_second(config, device)
        images = config.fit.epochs * (config.data.num_train or _IMAGENET)
        hours = images / rate / 3600
        total += hours
        lines.append(f"  {cell.name:32} {images / 1e6:8.0f} M images at {rate:9.1f} a second: {hours:10.1f} h")
    lines.append(f"  {'all':32} {total:46.1f} h on one {device.type} device, {total / 4:.1f} h on four at best")
    return "\n".join(lines)


def images_per_second(config: VisionConfig, device: torch.device, steps: int = 3) -> float:
    """Forward and backward on random images, in the precision of the recipe."""
    model: nn.Module = build(config).to(device).train()
    number = _TIMED_IMAGES.get(device.type, 8)
    sizes = config.model
    images = torch.rand(number, sizes.channels, config.data.size, config.data.size, device=device)
    labels = torch.zeros(number, dtype=torch.int64, device=device)
    lowered = config.fit.precision == "bfloat16"
    best = math.inf
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=lowered):
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        model.zero_grad()
    return number / best
