"""Median of means: drawing blocks of points, and picking the block of the median.

Draws come from a hash of (seed, block, position), not from a random stream: the same seed gives the same blocks on
every device, inside and outside `torch.compile`, and no global state is read or written.
"""

import math

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.typing import Draw

_MASK = 0xFFFFFFFF


def _multiply(x: Tensor, factor: int) -> Tensor:
    """x·factor mod 2³² for x in [0, 2³²): in halves, because the whole product would overflow int64."""
    low = (x & 0xFFFF) * factor
    high = ((x >> 16) * factor) & 0xFFFF
    return (low + (high << 16)) & _MASK


def _hash(x: Tensor) -> Tensor:
    """Mix 32-bit integers (held in int64) so that every output bit depends on every input bit."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = _multiply(x ^ (x >> shift), factor)
    return x ^ (x >> 16)


def random_words(seed: int | Tensor, rows: int, columns: int, device: torch.device | None = None) -> Tensor:
    """[rows, columns] of 32 random bits each, a function of seed (a number or int64 scalar), row and column alone."""
    row = torch.arange(rows, device=device)[:, None]
    column = torch.arange(columns, device=device)[None, :]
    zero = torch.zeros_like(row)
    key = _hash(_hash((zero + (seed & _MASK)) ^ 0x9E3779B9) ^ (zero + ((seed >> 32) & _MASK)))
    return _hash(_hash(key ^ row) ^ _multiply(column + 1, 0x85EBCA6B))


def draw_blocks(
    num_points: int, blocks: int, size: int, draw: Draw, seed: int | Tensor, device: torch.device | None = None
) -> Tensor:
    """counts[l, j]: how often block l holds point j; int64 [blocks, num_points].

    Args:
        size: points a block; `partition` ignores it (its blocks are disjoint and cover all points, sizes within 1).
        draw: "bootstrap" with replacement, "subsample" without (blocks may overlap), "partition" disjoint.
    """
    _checks.one_of("draw", draw, ("bootstrap", "subsample", "partition"))
    counts = torch.zeros(blocks, num_points, dtype=torch.int64, device=device)
    if num_points == 0:
        return counts
    if draw == "bootstrap":
        picked = (random_words(seed, blocks, size, device) * num_points) >> 32
        return counts.scatter_add(1, picked, torch.ones_like(picked))
    # Ties among the 32-bit words are broken by position: the sort is stable.
    if draw == "subsample":
        order = torch.sort(random_words(seed, blocks, num_points, device), dim=1, stable=True).indices
        picked = order[:, : min(size, num_points)]
        return counts.scatter(1, picked, torch.ones_like(picked))
    order = torch.sort(random_words(seed, 1, num_points, device)[0], stable=True).indices
    block = torch.zeros_like(order).scatter(0, order, torch.arange(num_points, device=device) % blocks)
    return (block[None, :] == torch.arange(blocks, device=device)[:, None]).long()


def poisson_blocks(
    num_points: int, blocks: int, mean: float, seed: int | Tensor, device: torch.device | None = None
) -> Tensor:
    """counts[l, j] ~ Poisson(mean), each a function of (seed, l, j) alone: more points change nothing for the first.

    Bootstrap with a random size: block l holds mean·num_points points on average.
    """
    words = random_words(seed, blocks, num_points, device)
    counts = torch.zeros_like(words)
    probability = below = math.exp(-mean)
    number = 0
    # Inversion of the distribution function, in integers, so that every device agrees.
    while int(below * 2**32) < 2**32 and probability > 0:
        counts += words >= int(below * 2**32)
        number += 1
        probability *= mean / number
        below += probability
    return counts


def lower_median(value: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
    """Position of the lower median over the last dimension among the `counted` entries, and whether there is one.

    Ties go to the lower position on every device (the sort is stable; `torch.median` is not the same everywhere).
    """
    order = torch.sort(torch.where(counted, value, torch.inf), dim=-1, stable=True).indices
    number = counted.sum(-1, keepdim=True)
    return order.gather(-1, ((number - 1) // 2).clamp(min=0)).squeeze(-1), number.squeeze(-1) > 0
