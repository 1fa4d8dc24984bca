"""Digital. Every function takes images `[B, C, S, S]`, a setting and the draws, and need not stay in [0, 1]."""

from __future__ import annotations

import ctypes
import io

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_attention.data._pillow import pillow
from robust_attention.data.corruptions import _filters
from robust_attention.data.corruptions._draws import Draws
from robust_attention.data.corruptions.severities import Setting


def contrast(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    (share,) = setting
    mean = images.mean((2, 3), keepdim=True)
    return mean + share * (images - mean)


def pixelate(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    (share,) = setting
    size = images.shape[-1]
    # The small number keeps 0.9 of 20 from becoming 17.999..., as a float, and then 17.
    fewer = max(1, int(size * share + 1e-9))
    small = _filters.both_ways(images, _filters.box_matrix(size, fewer))
    return _filters.both_ways(small, _filters.box_matrix(fewer, size))


def jpeg_compression(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Through Pillow's encoder and back, one after the other, on the CPU; colour at half the resolution."""
    (quality,) = setting
    image_module = pillow()
    channels, height, width = images.shape[1:]
    mode = "L" if channels == 1 else "RGB"
    pixels = (255 * images).round().byte().permute(0, 2, 3, 1).contiguous().cpu()
    # The bytes of a tensor without NumPy, which need not be installed.
    raw = memoryview(ctypes.string_at(pixels.data_ptr(), pixels.numel()))
    decoded = bytearray()
    for start in range(0, len(raw), pixels[0].numel()):
        packed = io.BytesIO()
        image = image_module.frombytes(mode, (width, height), raw[start : start + pixels[0].numel()])
        image.save(packed, "JPEG", quality=int(quality))
        decoded += image_module.open(packed).tobytes()
    out = torch.frombuffer(decoded, dtype=torch.uint8).view(len(images), height, width, channels)
    return out.permute(0, 3, 1, 2).to(images) / 255


def elastic_transform(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Move three corners of a triangle at random and the picture with them; then push every pixel by smooth noise."""
    strength, smoothness, farthest = setting
    size = images.shape[-1]
    place = torch.arange(size, dtype=torch.float32, device=images.device)
    grid = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1)  # [S, S, 2], x before y
    moved = _sample(images, _affine(grid, size, farthest, draws), centres=True)
    if strength == 0:
        return moved
    noise = 2 * draws.uniform(2, size, size) - 1
    smooth = _filters.gaussian_matrix(size, smoothness, truncate=3, border="mirror")
    push = strength * _filters.both_ways(noise, smooth)
    return _sample(moved, grid + push.permute(0, 2, 3, 1), centres=False)


def _affine(grid: Tensor, size: int, farthest: float, draws: Draws) -> Tensor:
    """Where each pixel of the moved picture comes from: `[B, S, S, 2]`."""
    middle, arm = size // 2, size // 3
    corners = torch.tensor(
        [[middle + arm, middle + arm], [middle + arm, middle - arm], [middle - arm, middle - arm]], dtype=torch.float64
    )
    # A 3x3 system an image: on the CPU and in float64, so that every device moves the picture alike.
    moved = corners + farthest * (2 * draws.uniform(3, 2).double().cpu() - 1)
    ones = torch.ones(len(moved), 3, 1, dtype=torch.float64)
    matrix = torch.linalg.solve(torch.cat([moved, ones], 2), corners.expand_as(moved)).to(grid.device)
    matrix_B1132 = matrix.float()[:, None, None]
    x, y = grid[..., :1], grid[..., 1:]
    return x * matrix_B1132[..., 0, :] + y * matrix_B1132[..., 1, :] + matrix_B1132[..., 2, :]


def _sample(images: Tensor, where: Tensor, *, centres: bool) -> Tensor:
    """The images at places `[B, S, S, 2]` in pixels, bilinearly.

    Outside, the picture is mirrored at the centres of its edge pixels (`centres`) or at their outer rims.
    """
    size = images.shape[-1]
    where = 2 * where / (size - 1) - 1 if centres else (2 * where + 1) / size - 1
    return F.grid_sample(images, where, mode="bilinear", padding_mode="reflection", align_corners=centres)
