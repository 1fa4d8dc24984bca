"""Augmentation as DeiT's, in plain torch: whole batches, on the device that trains, every choice fixed by a seed."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.data import _randaugment, _transforms
from robust_attention.data._randaugment import upload
from robust_attention.data._transforms import Boxes
from robust_attention.data.images import Images

Crop = Literal["none", "pad", "resized"]
Interpolation = Literal["bilinear", "bicubic"]

_HELD_BYTES = 2 * 2**30
"""Data sets below this size are kept on the device."""
_READ = 4096
"""Images read at a time, where all are."""


@dataclass(frozen=True, kw_only=True)
class Augment:
    """What happens to training images and their targets; nothing, unless it is asked for."""

    crop: Crop = "none"
    """"pad": a random place among zeros around the image. "resized": a random rectangle, scaled to a square."""
    padding: int | None = None
    """Pixels of zeros on each side for crop="pad"; None is an eighth of the side."""
    scale: tuple[float, float] = (0.08, 1.0)
    """Share of the area that crop="resized" takes."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of what it takes."""
    size: int | None = None
    """Side of what crop="resized" makes; None is the side of the images."""
    interpolation: Interpolation = "bicubic"
    """How it scales. Nothing is smoothed first, so it should not make images much smaller."""
    flip: float = 0.0
    """Share of images mirrored, left to right."""
    randaugment: int = 0
    """RandAugment's operations an image, one after the other."""
    randaugment_share: float = 0.5
    """Chance of each operation to act; the others leave the image as it is."""
    magnitude: float = 9.0
    """Their strength, 0 to 10."""
    magnitude_std: float = 0.5
    """Spread of the strength, drawn anew each time."""
    jitter: float = 0.0
    """Brightness, contrast and colour each times a number in 1 ± this."""
    erasing: float = 0.0
    """Share of images of which a rectangle is overwritten by noise."""
    erasing_area: tuple[float, float] = (0.02, 1 / 3)
    """Share of the image that the rectangle covers."""
    erasing_ratio: tuple[float, float] = (0.3, 1 / 0.3)
    """Its width over its height."""
    mixup: float = 0.0
    """Alpha of mixup, the share of two images being Beta(alpha, alpha); 0 is off."""
    cutmix: float = 0.0
    """Alpha of cutmix; 0 is off."""
    switch: float = 0.5
    """Share of batches that get cutmix where both are on."""
    label_smoothing: float = 0.0
    """Share of every target that is spread over all classes alike."""
    repeats: int = 1
    """Copies of an image in a batch, each augmented anew; a batch then holds that many times fewer images."""

    def __post_init__(self) -> None:
        _checks.one_of("crop", self.crop, get_args(Crop))
        _checks.one_of("interpolation", self.interpolation, get_args(Interpolation))
        for name in ("flip", "randaugment_share", "erasing", "switch"):
            _within(name, getattr(self, name), 0, 1)
        _within("magnitude", self.magnitude, 0, _randaugment.MOST)
        _within("jitter", self.jitter, 0, 1)
        for name in ("magnitude_std", "mixup", "cutmix"):
            _within(name, getattr(self, name), 0, 100)
        _within("label_smoothing", self.label_smoothing, 0, 0.999)
        _checks.whole("randaugment", self.randaugment, least=0)
        _checks.whole("repeats", self.repeats, least=1)
        for name in ("scale", "ratio", "erasing_area", "erasing_ratio"):
            low, high = getattr(self, name)
            most = 1 if name in ("scale", "erasing_area") else float("inf")
            if not 0 < low <= high <= most:
                raise ValueError(f"{name} must be two numbers, 0 < low <= high <= {most}, got {(low, high)}; swap them")
        if self.padding is not None:
            _checks.whole("padding", self.padding, least=0)
        if self.size is not None:
            _checks.whole("size", self.size, least=1)
            if self.crop != "resized":
                raise ValueError(f'size must be None where crop is not "resized", got {self.size}; resize the images')

    @property
    def soft(self) -> bool:
        """Whether targets are shares of the classes `[B, C]`, not classes `[B]`."""
        return bool(self.mixup or self.cutmix or self.label_smoothing)


def light(**overrides: Any) -> Augment:
    """What small images are usually trained with: a padded crop and a flip."""
    return Augment(**{"crop": "pad", "flip": 0.5, **overrides})


def deit(**overrides: Any) -> Augment:
    """DeiT's: resized crop, flip, RandAugment 2 × 9 ± 0.5, erasing, mixup, cutmix, smoothing, three copies."""
    settings: dict[str, Any] = {
        "crop": "resized",
        "flip": 0.5,
        "randaugment": 2,
        "erasing": 0.25,
        "mixup": 0.8,
        "cutmix": 1.0,
        "label_smoothing": 0.1,
        "repeats": 3,
    }
    return Augment(**{**settings, **overrides})


class AugmentedExamples:
    """Images and targets for training: `batch(indices, seed, device) -> (images, targets)`.

        images: float32 [B, C, S, S] in [0, 1];  targets: int64 [B], or float32 [B, num_classes] where they are mixed

    A batch is a function of its arguments alone. Small data sets (below 2 GiB) are read once, at the first batch, and
    kept on the device in 8 bits, so that a batch is a look-up there; larger ones are read batch by batch.
    """

    def __init__(self, images: Images, augment: Augment, num_classes: int) -> None:
        if num_classes < images.num_classes:
            raise ValueError(
                f"num_classes must be at least that of the images, {images.num_classes}, got {num_classes}; "
                "build the model with as many"
            )
        self.images, self.augment, self.num_classes = images, augment, num_classes
        self._held: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __len__(self) -> int:
        return len(self.images)

    def batch(self, indices: Tensor, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Read, augment and mix the images of these numbers."""
        raw, labels = self._read(repeated(indices, self.augment.repeats), torch.device(device))
        images = augmented(raw, self.augment, seed)
        return mixed(images, labels, self.augment, self.num_classes, seed)

    def _read(self, indices: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        source = self.images
        if len(source) * source.channels * source.size**2 >= _HELD_BYTES:
            indices = indices.cpu()
            return upload(source.read(indices), device), upload(source.labels[indices], device)
        if device not in self._held:
            everything = torch.empty(len(source), source.channels, source.size, source.size, dtype=torch.uint8)
            for part in torch.arange(len(source)).split(_READ):
                everything[part] = source.read(part)
            self._held[device] = everything.to(device), source.labels.to(device)
        images, labels = self._held[device]
        where = indices if indices.device == device else upload(indices, device)
        return images[where], labels[where]


def repeated(indices: Tensor, repeats: int) -> Tensor:
    """The first B/repeats of B indices, `repeats` times over (B altogether).

    Over an epoch of shuffled indices a share 1/repeats of the images is seen, each as often as the others.
    Departs: copies stay within one process; DeiT spreads them over processes, which then make one batch.
    """
    number = len(indices)
    return indices[: -(-number // repeats)].repeat(repeats)[:number]


def augmented(images: Tensor, augment: Augment, seed: int) -> Tensor:
    """Crop, flip, change and erase: uint8 `[B, C, S, S]` to float32 in [0, 1], on the device of the images.

    Choices are drawn on the CPU, equal for all devices; the noise of erasing is drawn on the device. Each kind of
    choice has a stream of its own: switching one off leaves the others as they were.
    Departs: colours change in a fixed order; erasing draws normal noise of mean ½ and spread ¼, cut off at 0 and 1,
        where DeiT draws it after normalisation and does not cut.
    """
    number, device = len(images), images.device
    if augment.flip:
        which = torch.rand(number, generator=_stream(seed, "flip")) < augment.flip
        images = _transforms.flip(images, upload(which, device))
    values = _cropped(images, augment, seed).float()
    for layer in range(augment.randaugment):
        drawn = _randaugment.draw(
            number,
            share=augment.randaugment_share,
            magnitude=augment.magnitude,
            spread=augment.magnitude_std,
            generator=_stream(seed, "randaugment", layer),
        )
        values = _randaugment.apply(values, drawn)
    if augment.jitter:
        factors = 1 + augment.jitter * (2 * torch.rand(3, number, generator=_stream(seed, "jitter")) - 1)
        brightness, contrast, colour = upload(factors, device)
        values = _randaugment.contrasted(_randaugment.brightened(values, brightness), contrast)
        values = _randaugment.saturated(values, colour)
    return _erased(values / 255, augment, seed)


def _cropped(images: Tensor, augment: Augment, seed: int) -> Tensor:
    number, side, device = len(images), images.shape[-1], images.device
    generator = _stream(seed, "crop")
    if augment.crop == "pad":
        padding = side // 8 if augment.padding is None else augment.padding
        top, left = upload(torch.randint(2 * padding + 1, (2, number), generator=generator), device)
        return _transforms.crop_padded(images, padding, top, left)
    if augment.crop == "resized":
        boxes, fits = _transforms.draw_boxes(number, side, area=augment.scale, ratio=augment.ratio, generator=generator)
        whole = (0.0, 0.0, side, side)
        chosen = torch.stack([torch.where(fits, x, full) for x, full in zip(boxes, whole, strict=True)])
        boxes = Boxes(*upload(chosen, device))
        return _transforms.crop_resized(images.float(), boxes, augment.size or side, augment.interpolation)
    return images


def _erased(images: Tensor, augment: Augment, seed: int) -> Tensor:
    if not augment.erasing:
        return images
    number, side, device = len(images), images.shape[-1], images.device
    generator = _stream(seed, "erasing")
    boxes, _ = _transforms.draw_boxes(
        number, side, area=augment.erasing_area, ratio=augment.erasing_ratio, generator=generator
    )
    hit = torch.rand(number, generator=generator) < augment.erasing
    boxes = Boxes(*upload(torch.stack(boxes) * hit, device))
    noise = torch.empty_like(images).normal_(0.5, 0.25, generator=_stream(seed, "noise", device=device))
    return _transforms.erase(images, boxes, noise.clamp_(0, 1))


def mixed(images: Tensor, labels: Tensor, augment: Augment, num_classes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Mixup or cutmix of the batch with itself in reverse, one share for the whole batch, and smoothed targets."""
    if not augment.soft:
        return images, labels
    smooth = augment.label_smoothing
    targets = F.one_hot(labels, num_classes).float() * (1 - smooth) + smooth / num_classes
    side = images.shape[-1]
    how = _transforms.draw_mix(augment.mixup, augment.cutmix, augment.switch, side, mix(seed, "mix"))
    return (images, targets) if how is None else _transforms.mix(images, targets, how)


def _stream(seed: int, *purpose: int | str, device: torch.device | None = None) -> Generator:
    return torch.Generator(device or "cpu").manual_seed(mix(seed, *purpose))


def _within(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} must lie from {low} to {high}, got {value!r}; {name}={low} switches it off")
