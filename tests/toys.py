"""Small models and problems for tests of attacks and of accuracies: nothing here is drawn from global state."""

import copy
from collections.abc import Callable
from functools import cache

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import robust_attention as ra
from robust_attention.ops import Method


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def init(model: nn.Module, std: float = 0.2) -> nn.Module:
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.normal_(std=std, generator=seeded(place))
    return model


def patterns(classes: int, number: int, channels: int = 1) -> tuple[Tensor, Tensor]:
    """Noisy patterns, one a class."""
    kinds, labels = torch.rand(classes, channels, 4, 4, generator=seeded(7)), torch.arange(number) % classes
    noise = torch.randn(number, channels, 4, 4, generator=seeded(8))
    return (kinds[labels] + 0.3 * noise).clamp(0, 1), labels


def fitted(model: nn.Module, classes: int, channels: int = 1, steps: int = 60) -> nn.Module:
    images, labels = patterns(classes, 400, channels)
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()


def mlp(classes: int = 4, channels: int = 1, width: int = 32) -> nn.Module:
    return copy.deepcopy(_mlp(classes, channels, width))


@cache
def _mlp(classes: int, channels: int, width: int) -> nn.Module:
    layers = nn.Flatten(), nn.Linear(channels * 16, width), nn.Tanh(), nn.Linear(width, classes)
    return fitted(init(nn.Sequential(*layers)), classes, channels)


def unseen(classes: int = 4, number: int = 80, channels: int = 1) -> tuple[Tensor, Tensor]:
    images, labels = patterns(classes, 400 + number, channels)
    return images[400:], labels[400:]


class Patches(nn.Module):
    """The smallest classifier around an attention: pixels are tokens."""

    def __init__(self, method: Method, classes: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(1, 8), nn.Parameter(torch.zeros(16, 8))
        self.attention, self.head = ra.nn.Attention(8, 2, method=method), nn.Linear(128, classes)
        init(self, 0.5)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.embed(images.flatten(1)[..., None]) + self.place
        answer: Tensor = self.head((tokens + self.attention(tokens)).flatten(1))
        return answer


def attention_model(method: Method) -> nn.Module:
    return copy.deepcopy(_attention_model(method))


@cache
def _attention_model(method: Method) -> nn.Module:
    return fitted(Patches(method), 4, steps=30)


class Wrapped(nn.Module):
    """A model whose answers are worked out in a way of one's own."""

    def __init__(self, model: nn.Module, answer: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.answer = model, answer

    def forward(self, images: Tensor) -> Tensor:
        return self.answer(self.model, images)


def taught(model: nn.Module, images: Tensor, labels: Tensor, *, std: float, rate: float, steps: int) -> nn.Module:
    """The model, its weights drawn from fixed seeds with this spread, after some steps of Adam on all images."""
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            parameter.normal_(std=std, generator=torch.Generator().manual_seed(place))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval()
