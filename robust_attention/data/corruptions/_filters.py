"""Linear filters on square images, most of them as a matrix on rows and columns.

A blur, a zoom or a change of resolution that treats rows and columns alike is `M X Mᵀ`: the border rule is folded into
M once, any radius is allowed, and a batch is one product.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

Border = Literal["nearest", "mirror"]
"""What lies outside. nearest: a a | a b c | c c. mirror: b a | a b c | c b, the edge counted twice."""


def gaussian_matrix(size: int, sigma: float, *, truncate: float, border: Border) -> Tensor:
    """`[size, size]`, float64: average over a Gaussian, cut off at `truncate` deviations."""
    radius = int(truncate * sigma + 0.5)
    if radius == 0:
        return torch.eye(size, dtype=torch.float64)
    offset = torch.arange(-radius, radius + 1)
    weight = torch.exp(-0.5 * (offset.double() / sigma) ** 2)
    source = torch.arange(size)[:, None] + offset
    if border == "nearest":
        source = source.clamp(0, size - 1)
    else:
        source = source % (2 * size)
        source = torch.minimum(source, 2 * size - 1 - source)
    return _rows(source, (weight / weight.sum()).expand(size, -1), size)


def zoom_matrix(size: int, factor: float) -> Tensor:
    """`[size, size]`: enlarge the middle by `factor`, linearly, and cut to the size."""
    kept = math.ceil(size / factor)
    enlarged = round(kept * factor)
    place = torch.arange(size) + (enlarged - size) // 2
    where = place.double() * ((kept - 1) / (enlarged - 1))
    low = where.floor().clamp(0, kept - 2)
    share = where - low
    source = torch.stack([low, low + 1], 1).long() + (size - kept) // 2
    return _rows(source, torch.stack([1 - share, share], 1), size)


def box_matrix(size: int, onto: int) -> Tensor:
    """`[onto, size]`: each new pixel is the mean of the pixels whose centres it covers, as an image library's box."""
    width = size / onto
    centre = (torch.arange(onto, dtype=torch.float64)[:, None] + 0.5) * width
    away = (torch.arange(size) + 0.5 - centre) / max(width, 1)
    covered = ((away > -0.5) & (away <= 0.5)).double()
    return covered / covered.sum(1, keepdim=True)


def both_ways(images: Tensor, matrix: Tensor) -> Tensor:
    """`M X Mᵀ` for images `[..., S, S]`.

    In float64, rounded once: a float32 product depends on the size of the batch in its last digits, and some devices
    shorten it.
    """
    matrix = matrix.to(images.device, torch.float64)
    return (matrix @ (images.double() @ matrix.T)).to(images.dtype)


def disk_blur(images: Tensor, radius: float, rim: float) -> Tensor:
    """Average over a disk whose rim is blurred by a 3x3 (above radius 8: 5x5) Gaussian; mirrored at the edge pixels.

    The kernel is the same upside down and has few rows: one matrix for each, and the picture shifted up and down.
    """
    kernel = _disk(radius, rim)
    side = len(kernel) // 2
    size = images.shape[-1]
    tall = F.pad(images.double(), (0, 0, side, side), mode="reflect")
    source = (torch.arange(size)[:, None] + torch.arange(-side, side + 1)).abs()
    source = torch.minimum(source, 2 * (size - 1) - source)
    out = torch.zeros_like(images, dtype=torch.float64)
    for away in range(side + 1):
        shifted = tall[..., side + away : side + away + size, :]
        if away:
            shifted = shifted + tall[..., side - away : side - away + size, :]
        row = _rows(source, kernel[side + away].expand(size, -1), size)
        out += shifted @ row.to(images.device).T
    return out.to(images.dtype)


def _disk(radius: float, rim: float) -> Tensor:
    """The kernel, `[2r + 1, 2r + 1]`.

    As released, it lies in a window of radius 8 or more and is mirrored at the window's edge when its rim is blurred:
    from radius 8 on it sums to a little more than 1.
    """
    reach, soft = int(radius), 1 if radius <= 8 else 2
    window = max(8, reach)
    axis = torch.arange(-window, window + 1, dtype=torch.float64)
    disk = ((axis[:, None] ** 2 + axis**2) <= radius**2).double()
    edge = torch.exp(-0.5 * (torch.arange(-soft, soft + 1, dtype=torch.float64) / rim) ** 2)
    edge = edge / edge.sum()
    wide = F.pad((disk / disk.sum())[None, None], (soft,) * 4, mode="reflect")
    kernel = F.conv2d(wide, (edge[:, None] * edge)[None, None])[0, 0]
    empty = max(0, window - reach - soft)
    return kernel[empty : len(kernel) - empty, empty : len(kernel) - empty]


def motion_blur(images: Tensor, radius: float, sigma: float, degrees_B: Tensor) -> Tensor:
    """Average over one half of a Gaussian, `2 radius + 1` pixels long, in a direction of each image's own.

    out(p) = Σ_i w_i in(p + round(i·d)), w_i ∝ exp(-i²/2σ²), d = (cos, sin) of the angle; outside counts the edge.
    """
    steps = torch.arange(2 * round(radius) + 1, dtype=torch.float64)
    weight = torch.exp(-0.5 * (steps / sigma) ** 2)
    weight = weight / weight.sum()
    # Whole pixels are reckoned on the CPU: another device's sine might round one step to another pixel.
    angle = torch.deg2rad(degrees_B.double().cpu())[:, None]
    right_BK = (steps * angle.cos() - 0.5).ceil().long()
    down_BK = (steps * angle.sin() - 0.5).ceil().long()
    size = images.shape[-1]
    place = torch.arange(size, device=images.device)
    flat = images.flatten(2)
    out = torch.zeros_like(flat)
    for step, share in enumerate(weight.tolist()):
        if share < 1e-6:  # far below one of 255 levels
            break
        column = (place + right_BK[:, step, None].to(images.device)).clamp(0, size - 1)
        row = (place + down_BK[:, step, None].to(images.device)).clamp(0, size - 1)
        source = (row[:, :, None] * size + column[:, None, :]).flatten(1)
        out += share * flat.gather(2, source[:, None].expand_as(flat))
    return out.view(images.shape)


def _rows(source: Tensor, weight: Tensor, size: int) -> Tensor:
    """A matrix whose row i holds `weight[i]` at the columns `source[i]`."""
    matrix = torch.zeros(len(source), size, dtype=torch.float64)
    return matrix.scatter_add_(1, source, weight)
