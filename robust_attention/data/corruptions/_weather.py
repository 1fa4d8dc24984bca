"""Weather. Every function takes images `[B, C, S, S]`, a setting and the draws, and need not stay in [0, 1]."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_attention.data.corruptions import _filters
from robust_attention.data.corruptions._draws import Draws
from robust_attention.data.corruptions.severities import Setting


def snow(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """A whiter picture, with flakes that fall, and the same flakes upside down."""
    mean, deviation, zoom, threshold, radius, smear, share = setting
    size = images.shape[-1]
    flakes = mean + deviation * draws.normal(1, size, size)
    flakes = _filters.both_ways(flakes, _filters.zoom_matrix(size, zoom))
    flakes = torch.where(flakes < threshold, 0, flakes).clamp(0, 1)
    flakes = _filters.motion_blur(flakes, radius, smear, 90 * draws.uniform(1)[:, 0] - 135)
    whiter = torch.maximum(images, 1.5 * _grey(images) + 0.5)
    return share * images + (1 - share) * whiter + flakes + flakes.flip(2, 3)


def frost(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """Departs: the published sets add photographs of frosted glass; here the ice is made (`_ice`)."""
    share, ice = setting
    return share * images + ice * _ice(images.shape[1], images.shape[-1], draws)


def fog(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    thickness, decay = setting
    size = images.shape[-1]
    brightest = images.amax((1, 2, 3), keepdim=True)
    cloud = _plasma(1 << (size - 1).bit_length(), decay, draws)[:, None, :size, :size]
    return (images + thickness * cloud) * brightest / (brightest + thickness)


def brightness(images: Tensor, setting: Setting, draws: Draws) -> Tensor:
    """The value of the colour (its largest channel) rises; hue and saturation stay, so all channels rise in step."""
    (more,) = setting
    value = images.amax(1, keepdim=True)
    raised = (value + more).clamp(max=1)
    return torch.where(value > 0, images * raised / value.clamp(min=1e-12), raised)


def _grey(images: Tensor) -> Tensor:
    if images.shape[1] == 1:
        return images
    weight = torch.tensor([0.299, 0.587, 0.114], device=images.device)
    return (images * weight[:, None, None]).sum(1, keepdim=True)


def _plasma(size: int, decay: float, draws: Draws) -> Tensor:
    """A cloud `[B, size, size]` from 0 to 1 by the diamond-square rule on a torus; `size` is a power of two.

    From step to step, the point in the middle of each square, then of each diamond, is the mean of its four corners
    plus a random height that shrinks by `decay`.
    """
    height = 2 * draws.uniform(size, size) - 1  # each point is filled once, with the height drawn for it
    cloud = torch.zeros_like(height)
    # The released code scales a height that was drawn from ±100 by 100 again, and both shrink with each step.
    step, wobble = size, 100.0
    while step >= 2:
        half = step // 2
        corner = cloud[:, ::step, ::step]
        across = corner + corner.roll(-1, 1)
        middle = (across + across.roll(-1, 2)) / 4 + wobble**2 * height[:, half::step, half::step]
        cloud[:, half::step, half::step] = middle
        sides = corner + corner.roll(-1, 2) + middle + middle.roll(1, 1)
        cloud[:, ::step, half::step] = sides / 4 + wobble**2 * height[:, ::step, half::step]
        sides = corner + corner.roll(-1, 1) + middle + middle.roll(1, 2)
        cloud[:, half::step, ::step] = sides / 4 + wobble**2 * height[:, half::step, ::step]
        step, wobble = half, wobble / decay
    cloud = cloud - cloud.amin((1, 2), keepdim=True)
    return cloud / cloud.amax((1, 2), keepdim=True)


def _ice(channels: int, size: int, draws: Draws) -> Tensor:
    """A frosted window `[B, channels, size, size]`: patches and grains of ice, with needles that meet at 60 degrees.

    Patches, grains and needles grow with the picture: it is the same window at every size. Brightness (0.42 to 0.82
    from window to window), contrast (a deviation of 0.1) and the blue tint are those of photographs of frosted glass.
    """

    def smooth(cells: int) -> Tensor:
        return F.interpolate(draws.normal(1, cells, cells), (size, size), mode="bicubic", align_corners=False)

    level = 0.42 + 0.4 * draws.uniform(1, 1, 1)
    thick = torch.sigmoid(smooth(3) + 0.8 * smooth(7))
    # 1 - |n| of smooth noise n is bright in thin lines, where n changes its sign.
    grain = sum(share * (1 - smooth(cells).abs()).clamp(0, 1) for cells, share in ((6, 0.3), (12, 0.4), (24, 0.5)))
    tips = torch.where(draws.uniform(1, size, size) < 4 / size, draws.uniform(1, size, size), 0)
    turn, reach = 180 * draws.uniform(1)[:, 0], size / 10
    needles = torch.zeros_like(thick)
    for degrees in (0, 60, 120):
        there, back = (_filters.motion_blur(tips, reach, reach, turn + degrees + way) for way in (0, 180))
        needles = torch.maximum(needles, there + back)
    needles = (needles / (5 * needles.mean((1, 2, 3), keepdim=True))).clamp(0, 1)
    ice = 0.5 * thick + thick * grain + (0.5 + 0.5 * thick) * needles + 0.1 * draws.normal(1, size, size)
    ice = ice - ice.mean((1, 2, 3), keepdim=True)
    ice = (level + 0.1 * ice / ice.std((1, 2, 3), keepdim=True)).clamp(0, 1)
    tint = torch.tensor([-0.06, 0.01, 0.05] if channels == 3 else [0.0], device=draws.device)
    return (ice + tint[:, None, None]).clamp(0, 1)
