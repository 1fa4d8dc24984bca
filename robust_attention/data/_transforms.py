"""Crops, flips, colours, erasing and mixing, on whole batches on their device.

Every `draw_…` takes a CPU generator and gives one number an image, so that the device waits for nothing and the same
seed gives the same choice everywhere.
"""

import math
import random
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

_TRIES = 10
"""Boxes drawn for an image until one fits."""


class Boxes(NamedTuple):
    """Rectangles, one an image, in whole pixels: `[B]` each."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def draw_boxes(
    number: int, side: int, *, area: tuple[float, float], ratio: tuple[float, float], generator: Generator
) -> tuple[Boxes, Tensor]:
    """Rectangles inside a square: their share of its area uniform, their width over height log-uniform.

    Returns: the boxes, and whether any of ten tries fitted; the first that did is taken, or one of size 0.
    """
    shape = (number, _TRIES)
    share = area[0] + (area[1] - area[0]) * torch.rand(shape, generator=generator)
    low, high = math.log(ratio[0]), math.log(ratio[1])
    slim = (low + (high - low) * torch.rand(shape, generator=generator)).exp()
    width, height = (side * (share * slim).sqrt()).round(), (side * (share / slim).sqrt()).round()
    fits = (width >= 1) & (width <= side) & (height >= 1) & (height <= side)
    first = fits.float().argmax(1, keepdim=True)
    some = fits.gather(1, first)[:, 0]
    width, height = (torch.where(some, x.gather(1, first)[:, 0], 0) for x in (width, height))
    place = torch.rand(2, number, generator=generator)
    top, left = ((place * (side - torch.stack((height, width)) + 1)).floor()).unbind()
    return Boxes(top, left, height, width), some


def flip(images: Tensor, which: Tensor) -> Tensor:
    """Mirror those images, left to right. `which`: `[B]`, boolean."""
    return torch.where(which[:, None, None, None], images.flip(-1), images)


def crop_padded(images: Tensor, padding: int, top: Tensor, left: Tensor) -> Tensor:
    """Put zeros around the images and cut out their size again, from `top` and `left` of 0 to twice the padding."""
    side = images.shape[-1]
    padded = F.pad(images, (padding,) * 4)
    span = torch.arange(side, device=images.device)
    row, column = top.long()[:, None] + span, left.long()[:, None] + span
    image = torch.arange(len(images), device=images.device)[:, None, None]
    return padded[image, :, row[:, :, None], column[:, None, :]].permute(0, 3, 1, 2)


def crop_resized(images: Tensor, boxes: Boxes, size: int, mode: str) -> Tensor:
    """Cut out the boxes and scale each to `size`, in values of 0..255."""
    side = images.shape[-1]
    wide, high = boxes.width / side, boxes.height / side
    x, y = (2 * boxes.left + boxes.width) / side - 1, (2 * boxes.top + boxes.height) / side - 1
    zero = torch.zeros_like(x)
    matrix = torch.stack((wide, zero, x, zero, high, y), 1).reshape(-1, 2, 3)
    grid = F.affine_grid(matrix, [*images.shape[:2], size, size], align_corners=False)
    cut = F.grid_sample(images, grid, mode=mode, padding_mode="border", align_corners=False)
    return cut.clamp(0, 255)  # a cubic swings over


def erase(images: Tensor, boxes: Boxes, content: Tensor) -> Tensor:
    """Overwrite the boxes."""
    span = torch.arange(images.shape[-1], device=images.device)
    rows = (span >= boxes.top[:, None]) & (span < (boxes.top + boxes.height)[:, None])
    columns = (span >= boxes.left[:, None]) & (span < (boxes.left + boxes.width)[:, None])
    return torch.where((rows[:, :, None] & columns[:, None, :])[:, None], content, images)


class Mix(NamedTuple):
    """What a batch is mixed with its reverse by: a share of each image, or a box that all cut out alike."""

    share: float
    """Of the image itself, and of its target."""
    box: tuple[int, int, int, int] | None
    """Cutmix: top, bottom, left and right of what comes from the other image."""


def draw_mix(mixup: float, cutmix: float, switch: float, side: int, seed: int) -> Mix | None:
    """Mixup, cutmix (where both are on, with chance `switch`) or neither; the share is Beta(alpha, alpha)."""
    stream = random.Random(seed)
    if not mixup and not cutmix:
        return None
    if not cutmix or (mixup and stream.random() >= switch):
        return Mix(stream.betavariate(mixup, mixup), None)
    cut = int(side * math.sqrt(1 - stream.betavariate(cutmix, cutmix)))
    middle = stream.randrange(side), stream.randrange(side)
    top, left = (max(0, m - cut // 2) for m in middle)
    bottom, right = (min(side, m - cut // 2 + cut) for m in middle)
    # What hangs over the edge is lost: the share is that of the pixels that remain.
    return Mix(1 - (bottom - top) * (right - left) / side**2, (top, bottom, left, right))


def mix(images: Tensor, targets: Tensor, how: Mix) -> tuple[Tensor, Tensor]:
    """Mix a batch with itself in reverse: images `[B, C, S, S]` and targets `[B, classes]`."""
    if how.box is None:
        images = torch.lerp(images.flip(0), images, how.share)
    else:
        top, bottom, left, right = how.box
        other, images = images.flip(0), images.clone()
        images[:, :, top:bottom, left:right] = other[:, :, top:bottom, left:right]
    return images, torch.lerp(targets.flip(0), targets, how.share)
