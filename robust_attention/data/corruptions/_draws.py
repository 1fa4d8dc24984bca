"""Random numbers that belong to an image, not to its batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Generator, Tensor


class Draws:
    """One stream an image: what an image draws does not depend on its neighbours in the batch.

    Everything is drawn on the CPU and moved, so that all devices see the same numbers.
    """

    def __init__(self, seeds: Sequence[int], device: torch.device) -> None:
        self.generators = [Generator().manual_seed(seed) for seed in seeds]
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        """`[B, *shape]`, mean 0 and deviation 1."""
        return self._each(shape, lambda row, generator: row.normal_(generator=generator))

    def uniform(self, *shape: int) -> Tensor:
        """`[B, *shape]` from 0 to 1."""
        return self._each(shape, lambda row, generator: row.uniform_(generator=generator))

    def poisson(self, rate: Tensor) -> Tensor:
        """As many events as come at the rates `[B, ...]`."""
        rows = [
            torch.poisson(row, generator=generator) for row, generator in zip(rate.cpu(), self.generators, strict=True)
        ]
        return torch.stack(rows).to(self.device)

    def _each(self, shape: tuple[int, ...], fill: Callable[[Tensor, Generator], Tensor]) -> Tensor:
        drawn = torch.empty(len(self.generators), *shape)
        for row, generator in zip(drawn.view(len(drawn), -1), self.generators, strict=True):
            fill(row, generator)
        return drawn.to(self.device)
