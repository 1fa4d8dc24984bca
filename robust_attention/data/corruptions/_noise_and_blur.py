"""Noise and blur. Every function takes images `[B, C, S, S]`, a setting and the draws, and need not stay in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor

from robust_attention.data.corruptions import _filters
from robust_attention.data.corruptions._draws import Draws
from robust_attention.data.corruptions.severities import Setting


def gaussian_noise(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    (deviation,) = setting
    return images + deviation * draws.normal(*images.shape[1:])


def shot_noise(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Photons are counted: Poisson(c·x)/c."""
    (photons,) = setting
    return draws.poisson(photons * images) / photons


def impulse_noise(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """A share of the values, each channel on its own, becomes 0 or 1."""
    (share,) = setting
    drawn = draws.uniform(*images.shape[1:])
    return torch.where(drawn < share, (drawn < share / 2).to(images), images)


def defocus_blur(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    radius, rim = setting
    return _filters.disk_blur(images, radius, rim)


def motion_blur(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    radius, deviation = setting
    return _filters.motion_blur(images, radius, deviation, 90 * draws.uniform(1)[:, 0] - 45)


def zoom_blur(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """The mean of the image, once more the image, and the image zoomed in step by step."""
    number, step = setting
    total = 2 * images
    for count in range(1, int(number)):
        total = total + _filters.both_ways(images, _filters.zoom_matrix(images.shape[-1], 1 + count * step))
    return total / (number + 1)


def glass_blur(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Blur; let every pixel take the value of one nearby, in rounds; blur again.

    A round visits the pixels one after the other from the last to the first, and a pixel may take what an earlier one
    has taken: that is what the released code does with NumPy views where its comment says swap.
    """
    deviation, farthest, rounds = setting
    size = images.shape[-1]
    blur = _filters.gaussian_matrix(size, deviation, truncate=4, border="nearest")
    flat = _filters.both_ways(images, blur).flatten(2)
    for _ in range(int(rounds)):
        source = _taken_from(size, max(1, round(farthest)), draws)
        flat = flat.gather(2, source[:, None].expand_as(flat))
    return _filters.both_ways(flat.view(images.shape), blur)


def _taken_from(size: int, farthest: int, draws: Draws) -> Tensor:
    """`[B, S·S]`: whose value each pixel holds after a round in which every pixel took its turn.

    A pixel looks at another. If that one had its turn before, it holds the value of whoever it looked at, and so on:
    a chain that is followed in doubling strides. Few go on for long; those of more than 2^8 links end there.
    """
    drawn = draws.uniform(2, size, size)
    # From -farthest to farthest - 1: the released code leaves out the upper end.
    move = (2 * farthest * drawn).floor().clamp(max=2 * farthest - 1).long() - farthest
    place = torch.arange(size, device=drawn.device)
    # Pixels too near the border for the farthest move keep their value.
    inside = (place > farthest) & (place <= size - farthest)
    moves = inside[:, None] & inside
    row = place[:, None] + torch.where(moves, move[:, 0], 0)
    column = place + torch.where(moves, move[:, 1], 0)
    source = (row * size + column).flatten(1)
    number = torch.arange(size * size, device=drawn.device)
    # The last pixel has its turn first: larger numbers were there before.
    goes_on = moves.flatten()[source] & (source > number)
    for _ in range(8):
        source, goes_on = (
            torch.where(goes_on, source.gather(1, source), source),
            goes_on & goes_on.gather(1, source),
        )
    return source
