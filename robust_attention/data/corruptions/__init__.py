"""The 15 corruptions of ImageNet-C at 5 severities, for any images, seeded."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from robust_attention._checks import one_of, whole
from robust_attention._seeds import mix
from robust_attention.data.corruptions import _digital, _noise_and_blur, _weather
from robust_attention.data.corruptions._draws import Draws
from robust_attention.data.corruptions.severities import CORRUPTIONS, KINDS, Setting, setting
from robust_attention.data.images import Images

__all__ = ["CORRUPTIONS", "KINDS", "Corrupted", "corrupt", "setting"]

SEVERITIES = (1, 2, 3, 4, 5)

_FUNCTIONS: dict[str, Callable[[Tensor, Setting, Draws], Tensor]] = {
    kind: getattr(module, kind)
    for module in (_noise_and_blur, _weather, _digital)
    for kind in KINDS
    if hasattr(module, kind)
}


def corrupt(images: Tensor, *, kind: str, severity: int, seed: int, first: int = 0) -> Tensor:
    """Corrupt images as ImageNet-C does.

    Args:
        images: `[B, C, S, S]` in [0, 1], 1 or 3 channels, 24 pixels a side or more.
        kind: One of the 15 of `CORRUPTIONS`.
        severity: 1 to 5; what it means at this size is `setting(kind, severity, size)`.
        seed: Of the whole set.
        first: The number of the first image. What image number n draws depends on (seed, kind, severity, n) alone,
            not on the batch that it comes in.
    Returns: as `images`, in [0, 1].
    Numerics: float32. Draws are made on the CPU: the devices differ by rounding.
    Reference: Hendrycks and Dietterich, Benchmarking neural network robustness to common corruptions and
        perturbations, ICLR 2019, and the code released with it, whose constants these are.
    Departs: frost is made, not photographed; sizes other than 32, 64 and 224 have scaled constants; results are not
        rounded to 8 bits (`Corrupted` does that), nor compressed once more as JPEG at quality 85, as the published
        ImageNet-C and Tiny-ImageNet-C are. Errors on this set are near those on the published ones, not equal.
    """
    _check(images, kind, severity)
    whole("first", first, 0)
    numbers = range(first, first + len(images))
    return _corrupt(images, list(numbers), kind, severity, seed)


class Corrupted(Images):
    """A set of images under one corruption, made as it is read and rounded to 8 bits.

    Image number n of the source is corrupted the same whether it is read through this set or a subset of it.
    """

    def __init__(self, source: Images, *, kind: str, severity: int, seed: int) -> None:
        _check(torch.empty(0, source.channels, source.size, source.size), kind, severity)
        self.source, self.kind, self.severity, self.seed = source, kind, severity, seed
        self.name = f"{source.name}, {kind} {severity}"
        self.labels, self.num_classes = source.labels, source.num_classes
        self.channels, self.size = source.channels, source.size
        self.damaged = source.damaged

    def _read(self, indices: Tensor) -> Tensor:
        clean = self.source._read(indices).float() / 255
        spoiled = _corrupt(clean, indices.tolist(), self.kind, self.severity, self.seed)
        return (255 * spoiled).round().byte()


@torch.no_grad()
def _corrupt(images: Tensor, numbers: list[int], kind: str, severity: int, seed: int) -> Tensor:
    if not numbers:
        return images.clone()
    numbers_of = setting(kind, severity, images.shape[-1])
    # Parts that fit a CPU's cache; a graphics card takes more at once.
    part = max(1, (2**26 if images.is_cuda else 2**20) // images[0].numel())
    spoiled = []
    with torch.autocast(images.device.type, enabled=False):
        for start in range(0, len(images), part):
            some = images[start : start + part].float()
            seeds = [mix(seed, kind, severity, number) for number in numbers[start : start + part]]
            corrupted = _FUNCTIONS[kind](some, numbers_of, Draws(seeds, images.device))
            spoiled.append(corrupted.clamp(0, 1).to(images.dtype))
    return torch.cat(spoiled)


def _check(images: Tensor, kind: str, severity: int) -> None:
    one_of("kind", kind, KINDS)
    whole("severity", severity, 1, 5)
    if images.ndim != 4 or images.shape[1] not in (1, 3) or images.shape[2] != images.shape[3] or images.shape[2] < 24:
        raise ValueError(
            f"images must be [B, C, S, S] with 1 or 3 channels and S of at least 24, got {list(images.shape)}; "
            "enlarge smaller images first"
        )
    if not images.is_floating_point():
        raise ValueError(f"images must be floating point in [0, 1], got {images.dtype}; pass images.float() / 255")
    if images.numel() and not (float(images.min()) >= 0 and float(images.max()) <= 1):
        raise ValueError(
            f"images must lie in [0, 1], got {float(images.min()):.3g} to {float(images.max()):.3g}; "
            "corrupt them before they are normalised"
        )
