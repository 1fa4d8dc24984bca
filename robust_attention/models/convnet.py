"""A small residual convolutional network: the teacher that a distilled transformer learns from."""

from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True)
class ConvNetConfig:
    """Sizes of the network."""

    channels: int = 3
    """Colour channels."""
    num_classes: int = 10
    """Width of the logits."""
    dim: int = 64
    """Channels of the first stage; each stage has twice those of the one before, at half the resolution."""
    stages: int = 3
    """Stages of two residual blocks."""
    mean: tuple[float, ...] | None = None
    """Subtracted from each colour channel; None means 0.5."""
    std: tuple[float, ...] | None = None
    """Divides each colour channel; None means 0.5."""


class _Residual(nn.Module):
    """x + two convolutions of normalised x; the shortcut changes shape where the stage does."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, inside)
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(8, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        same = inside == outside and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.conv1(F.relu(self.norm1(x)))
        moved: Tensor = self.shortcut(x)
        return moved + self.conv2(F.relu(self.norm2(hidden)))


class ConvNet(nn.Module):
    """images [B, C, H, W] in [0, 1] -> logits [B, num_classes].

    Group norms, because they mean the same in training and evaluation and on any number of processes.
    """

    def __init__(self, config: ConvNetConfig) -> None:
        super().__init__()
        self.config = config
        with torch.random.fork_rng(devices=[]):
            self.stem = nn.Conv2d(config.channels, config.dim, 3, 1, 1, bias=False)
            blocks, width = [], config.dim
            for stage in range(config.stages):
                outside = config.dim * 2**stage
                blocks += [_Residual(width, outside, 2 if stage else 1), _Residual(outside, outside, 1)]
                width = outside
            self.blocks = nn.ModuleList(blocks)
            self.norm = nn.GroupNorm(8, width)
            self.head = nn.Linear(width, config.num_classes)
        shape = (1, config.channels, 1, 1)
        self.register_buffer("mean", torch.tensor(config.mean or (0.5,) * config.channels).reshape(shape), False)
        self.register_buffer("std", torch.tensor(config.std or (0.5,) * config.channels).reshape(shape), False)
        self.mean: Tensor
        self.std: Tensor

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem((images - self.mean) / self.std)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(F.relu(self.norm(x)).mean(dim=(2, 3)))
        return logits

    @torch.no_grad()
    def init_weights(self, generator: Generator) -> None:
        """Draw every weight from `generator`."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 4:
                fan_in = parameter[0].numel()
                parameter.normal_(std=(2 / fan_in) ** 0.5, generator=generator)
            elif name == "head.weight":
                parameter.normal_(std=0.01, generator=generator)
            else:
                parameter.fill_(1.0 if name.endswith("weight") else 0.0)
