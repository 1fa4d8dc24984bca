"""RandAugment's fifteen operations on a whole batch, each image with one of its own.

Images here are float `[B, C, S, S]` in 0..255 and are not rounded between operations. `level` `[B]` runs from 0 (little
happens) to 10; `sign` `[B]` is 1 or −1, for operations that go either way.
Reference: Cubuk et al., 2020, with the operations, ranges and "increasing" strengths that DeiT trains with. The tests
compare every operation with Pillow, which rounds after each.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

Operation = Callable[[Tensor, Tensor, Tensor], Tensor]

GREY = 127.5
"""What moves in from outside the image."""
MOST = 10.0


class Drawn(NamedTuple):
    """One operation for each image: `chosen` `[B]` indexes `OPERATIONS`, −1 is none."""

    chosen: Tensor
    level: Tensor
    sign: Tensor


def draw(number: int, *, share: float, magnitude: float, spread: float, generator: Generator) -> Drawn:
    """An operation for each of `number` images, with chance `share`, at a level around `magnitude`."""
    chosen = torch.randint(len(OPERATIONS), (number,), generator=generator)
    chosen[torch.rand(number, generator=generator) >= share] = -1
    level = (magnitude + spread * torch.randn(number, generator=generator)).clamp(0, MOST)
    sign = 2.0 * torch.randint(2, (number,), generator=generator) - 1
    return Drawn(chosen, level, sign)


def apply(images: Tensor, drawn: Drawn) -> Tensor:
    """Every image through its operation. `drawn` is on the CPU: nothing waits for the device."""
    # Sorted by operation, each works on a slice.
    order = drawn.chosen.argsort(stable=True)
    sizes = torch.bincount(drawn.chosen + 1, minlength=len(OPERATIONS) + 1).tolist()
    columns = torch.stack([order.float(), order.argsort().float(), drawn.level[order], drawn.sign[order]])
    there, back, level, sign = upload(columns, images.device)
    parts = zip(images[there.long()].split(sizes), level.split(sizes), sign.split(sizes), strict=True)
    untouched, *others = parts
    done = [untouched[0]]
    for operation, part in zip(OPERATIONS.values(), others, strict=True):
        done.append(operation(*part) if len(part[0]) else part[0])
    return torch.cat(done)[back.long()].clamp_(0, 255)  # sums of shares may pass the ends by a last bit


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Move to the device; from pinned memory, because other copies wait until a GPU has done all it was given."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def _each(x: Tensor) -> Tensor:
    """`[B]` beside images."""
    return x[:, None, None, None]


def autocontrast(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Stretch every channel to 0..255."""
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    stretched = (images - low) * (255 / (high - low).clamp(min=1e-3))
    return torch.where(high > low, stretched, images)


def equalize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Map every channel's values so that they are about equally frequent."""
    value = images.round().clamp(0, 255).long().flatten(2).flatten(0, 1)
    channels, pixels = value.shape
    place = (value + 256 * torch.arange(channels, device=value.device)[:, None]).flatten()
    histogram = torch.zeros(channels * 256, dtype=torch.int64, device=value.device)
    histogram = histogram.scatter_add_(0, place, torch.ones_like(place)).reshape(channels, 256)
    step = (pixels - histogram.gather(1, value.amax(1, keepdim=True))) // 255
    below = histogram.cumsum(1) - histogram
    table = ((step // 2 + below) // step.clamp(min=1)).clamp(max=255)
    equal = torch.where(step > 0, table.gather(1, value), value)
    return equal.reshape(images.shape).to(images.dtype)


def invert(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    return 255 - images


def posterize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Keep the first 4 bits of each value, down to one."""
    kept = (4 - (level * 0.4).floor()).clamp(min=1)
    unit = _each(2 ** (8 - kept))
    return (images.round() / unit).floor() * unit


def solarize(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Invert values from a threshold on, which falls from 256 to 0."""
    threshold = _each(256 - (level * 25.6).floor())
    return torch.where(images < threshold, images, 255 - images)


def solarize_add(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Add up to 110 to values below 128."""
    return torch.where(images < 128, images + _each((level * 11).floor()), images).clamp(max=255)


def grey(images: Tensor) -> Tensor:
    """The brightness of each pixel, one channel."""
    if images.shape[1] != 3:
        return images.mean(1, keepdim=True)
    share = images.new_tensor((0.299, 0.587, 0.114))
    return (images * share[:, None, None]).sum(1, keepdim=True)


def saturated(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(grey(images), images, factor)


def contrasted(images: Tensor, factor: Tensor) -> Tensor:
    return _blend(grey(images).mean((2, 3), keepdim=True), images, factor)


def brightened(images: Tensor, factor: Tensor) -> Tensor:
    return (images * _each(factor)).clamp(0, 255)


def sharpened(images: Tensor, factor: Tensor) -> Tensor:
    """Away from, or towards, a 3×3 mean that counts the middle five times; the outermost pixels stay."""
    mean = F.avg_pool2d(images, 3, stride=1)
    smooth = images.clone()
    smooth[:, :, 1:-1, 1:-1] = (9 * mean + 4 * images[:, :, 1:-1, 1:-1]) / 13
    return _blend(smooth, images, factor)


def _blend(without: Tensor, images: Tensor, factor: Tensor) -> Tensor:
    """0: `without`, 1: the images, more: further away from `without`."""
    return (without + _each(factor) * (images - without)).clamp(0, 255)


def _at(change: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    """By a factor of 1 ± 0.9 level/10, at least 0.1."""
    return lambda images, level, sign: change(images, (1 + sign * level * 0.09).clamp(min=0.1))


def shear_x(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Slant by up to 0.3, about the upper left corner."""
    slant, one, zero = _numbers(0.03 * sign * level)
    return _moved(images, (one, slant, slant, zero, one, zero))


def shear_y(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    slant, one, zero = _numbers(0.03 * sign * level)
    return _moved(images, (one, zero, zero, slant, one, slant))


def translate_x(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Shift by up to 0.45 of the side."""
    shift, one, zero = _numbers(0.09 * sign * level)  # the side is 2 long
    return _moved(images, (one, zero, shift, zero, one, zero))


def translate_y(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    shift, one, zero = _numbers(0.09 * sign * level)
    return _moved(images, (one, zero, zero, zero, one, shift))


def rotate(images: Tensor, level: Tensor, sign: Tensor) -> Tensor:
    """Turn by up to 30°, anticlockwise where the sign is positive."""
    angle = torch.deg2rad(3 * sign * level)
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    return _moved(images, (cos, -sin, zero, sin, cos, zero))


def _numbers(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x, torch.ones_like(x), torch.zeros_like(x)


def _moved(images: Tensor, row_by_row: tuple[Tensor, ...]) -> Tensor:
    """The pixel at (x, y), each from −1 to 1, is read at the affine map of (x, y), bilinearly."""
    matrix = torch.stack(row_by_row, 1).reshape(-1, 2, 3)
    grid = F.affine_grid(matrix, list(images.shape), align_corners=False)
    return F.grid_sample(images - GREY, grid, padding_mode="zeros", align_corners=False) + GREY


OPERATIONS: dict[str, Operation] = {
    "autocontrast": autocontrast,
    "equalize": equalize,
    "invert": invert,
    "rotate": rotate,
    "posterize": posterize,
    "solarize": solarize,
    "solarize_add": solarize_add,
    "color": _at(saturated),
    "contrast": _at(contrasted),
    "brightness": _at(brightened),
    "sharpness": _at(sharpened),
    "shear_x": shear_x,
    "shear_y": shear_y,
    "translate_x": translate_x,
    "translate_y": translate_y,
}
