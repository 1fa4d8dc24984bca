"""Robust losses ρ for distances in the kernel's Hilbert space, and their weights ψ(x) = ρ'(x)/x.

Weights are functions of the *squared* distance: none of them needs the square root near 0, where its derivative
is infinite, so gradients stay finite for points that sit on their own mean.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from robust_attention import _checks


@dataclass(frozen=True)
class Loss(ABC):
    """A loss with one threshold `a`: distances well below it count in full, distances above it count less."""

    a: float = 0.2
    """Threshold, in units of the distance between unit feature vectors (0 to √2). The paper: 0.2 images, 0.4 text."""

    def __post_init__(self) -> None:
        _checks.positive("a", self.a)

    @abstractmethod
    def rho(self, x: Tensor) -> Tensor:
        """ρ(x) for distances x ≥ 0."""

    @abstractmethod
    def psi_of_square(self, x2: Tensor) -> Tensor:
        """ψ as a function of x²; finite gradient everywhere."""

    def psi(self, x: Tensor) -> Tensor:
        """ψ(x) = ρ'(x)/x for distances x ≥ 0; ψ(0) = 1."""
        return self.psi_of_square(x.square())

    def _beyond(self, x2: Tensor) -> tuple[Tensor, Tensor]:
        """Where x > a, and a distance that is x there and a elsewhere (so its root has a gradient)."""
        beyond = x2 > self.a * self.a
        return beyond, torch.where(beyond, x2, torch.full_like(x2, self.a * self.a)).sqrt()


@dataclass(frozen=True)
class Huber(Loss):
    """ρ = x²/2 up to a, then a·x − a²/2; ψ = min(1, a/x). Weights never reach 0."""

    def rho(self, x: Tensor) -> Tensor:
        return torch.where(x <= self.a, x.square() / 2, self.a * x - self.a * self.a / 2)

    def psi_of_square(self, x2: Tensor) -> Tensor:
        beyond, x = self._beyond(x2)
        return torch.where(beyond, self.a / x, torch.ones_like(x))


@dataclass(frozen=True)
class Hampel(Loss):
    """Three parts, with b = 2a and c = 3a: ψ = 1, then a/x from a, then a(c−x)/((c−b)x) from b, then 0 from c."""

    def rho(self, x: Tensor) -> Tensor:
        a, b, c = self.a, 2 * self.a, 3 * self.a
        top = a * b - a * a / 2 + a * (c - b) / 2
        falling = top - a * (c - x.clamp(b, c)).square() / (2 * (c - b))
        return torch.where(x <= a, x.square() / 2, torch.where(x <= b, a * x - a * a / 2, falling))

    def psi_of_square(self, x2: Tensor) -> Tensor:
        a, b, c = self.a, 2 * self.a, 3 * self.a
        beyond, x = self._beyond(x2)
        return torch.where(beyond, a / x * ((c - x) / (c - b)).clamp(0, 1), torch.ones_like(x))


@dataclass(frozen=True)
class Welsch(Loss):
    """ρ = a²/2 (1 − exp(−(x/a)²)); ψ = exp(−(x/a)²)."""

    def rho(self, x: Tensor) -> Tensor:
        return self.a * self.a / 2 * -torch.expm1(-(x / self.a).square())

    def psi_of_square(self, x2: Tensor) -> Tensor:
        return torch.exp(-x2 / (self.a * self.a))


@dataclass(frozen=True)
class Tukey(Loss):
    """ρ = a²/6 (1 − (1 − (x/a)²)³) up to a, then a²/6; ψ = (1 − (x/a)²)² up to a, then 0."""

    def rho(self, x: Tensor) -> Tensor:
        return self.a * self.a / 6 * (1 - (1 - (x / self.a).square()).clamp(min=0) ** 3)

    def psi_of_square(self, x2: Tensor) -> Tensor:
        return (1 - x2 / (self.a * self.a)).clamp(min=0).square()
