"""How encoded images become squares of 8 bits, and what is said of damaged ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import torch
from torch import Tensor

from robust_attention._checks import one_of, whole
from robust_attention.data._pillow import pillow

Resize = Literal["crop", "stretch"]
Interpolation = Literal["bicubic", "bilinear"]
Damaged = Literal["fail", "skip"]

# Images that are decoded between two looks at the results: enough for every worker, few enough for memory.
_PART = 512


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How encoded images become squares."""

    size: int
    """Height and width in pixels, afterwards."""
    channels: int = 3
    """3 or 1. Grey images become colour ones and the reverse."""
    resize: Resize = "crop"
    """crop: the shorter side to `size · 256/224`, then the middle. stretch: both sides to `size`, whatever they were.
    An image that is `size` by `size` already is left as it is, either way."""
    interpolation: Interpolation = "bicubic"
    """bicubic as DeiT evaluates, bilinear as torchvision's models do; both with antialiasing."""
    damaged: Damaged = "fail"
    """fail: an image that cannot be decoded is an error that names it. skip: it is left out with its label and listed
    in `Images.damaged`; to know which, all are decoded when the set is opened."""
    workers: int = 4
    """Threads that decode."""
    cache: Path | str | None = None
    """None: images are decoded each time they are read. "memory": once, at opening, into memory. A folder: once, into
    a file there that is mapped, checked at every read, and found again by the next run."""

    def __post_init__(self) -> None:
        whole("size", self.size, 1)
        whole("workers", self.workers, 1)
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {self.channels!r}")
        one_of("resize", self.resize, get_args(Resize))
        one_of("interpolation", self.interpolation, get_args(Interpolation))
        one_of("damaged", self.damaged, get_args(Damaged))
        if isinstance(self.cache, str) and self.cache != "memory":
            object.__setattr__(self, "cache", Path(self.cache))

    @property
    def bytes_each(self) -> int:
        """Bytes of a decoded image."""
        return self.channels * self.size**2


class Source(Protocol):
    """Encoded images by number."""

    def __len__(self) -> int: ...

    def place(self, index: int) -> str:
        """The name of an image, for reports: its file, or its row in a file."""

    def open(self, index: int) -> Any:
        """The image as Pillow opens it; raises whatever is wrong with it."""

    def fingerprint(self) -> str:
        """Other when a file of the set is another one; need not read the files."""


class Damage(Exception):
    """An image that cannot be decoded."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{place}: {reason}")
        self.place, self.reason = place, reason


def decode_all(source: Source, how: Decoding) -> Iterator[tuple[int, bytes | Damage]]:
    """Every image in order: decoded, or what is wrong with it. With `damaged="fail"` the first damage is raised."""
    good = 0
    for start in range(0, len(source), _PART):
        numbers = range(start, min(start + _PART, len(source)))
        for number, image in zip(numbers, decoded(source, numbers, how), strict=True):
            if how.damaged == "fail":
                sound(image)
            good += not isinstance(image, Damage)
            yield number, image
    if not good:
        raise ValueError(f"of {len(source)} images, at least one must be readable; {source.place(0)} is the first")


def decoded(source: Source, numbers: Sequence[int], how: Decoding) -> list[bytes | Damage]:
    """The images of these numbers, in their order."""
    # Threads of a lasting pool would not survive a fork; starting some costs little beside decoding.
    with ThreadPoolExecutor(how.workers) as pool:
        return list(pool.map(lambda number: _decode(source, number, how), numbers))


def _decode(source: Source, number: int, how: Decoding) -> bytes | Damage:
    """Red, green, blue: one plane after the other."""
    try:
        image = square(source.open(number), how)
        return b"".join(band.tobytes() for band in image.split())
    except MemoryError:
        raise
    except Exception as error:  # decoders of damaged files raise all kinds
        return Damage(source.place(number), _reason(error))


def _reason(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    # Pillow's own words name an address in memory, which is another one each time.
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known format"
    return str(error) or type(error).__name__


def sound(image: bytes | Damage) -> bytes:
    """The image, if it is one."""
    if isinstance(image, Damage):
        raise ValueError(
            f"every image must be readable, but {image.place} is not ({image.reason}); "
            'replace the file, or leave out what is damaged with damaged="skip"'
        ) from image
    return image


def square(image: Any, how: Decoding) -> Any:
    """A Pillow image as a square of `how.size` with `how.channels`."""
    image = _coloured(image, how.channels)
    size = how.size
    if image.size == (size, size):
        return image
    filters = pillow().Resampling
    filter_ = filters.BICUBIC if how.interpolation == "bicubic" else filters.BILINEAR
    if how.resize == "stretch":
        return image.resize((size, size), filter_)
    width, height = image.size
    shorter = round(size * 256 / 224)
    width, height = (int(shorter * side / min(width, height)) for side in (width, height))
    left, top = (round((side - size) / 2) for side in (width, height))
    return image.resize((width, height), filter_).crop((left, top, left + size, top + size))


def _coloured(image: Any, channels: int) -> Any:
    if image.mode.startswith(("I", "F")):
        raise ValueError(f"pixels of mode {image.mode} have more than 8 bits; save it with 8")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    # Raises if the file ends too early.
    return image.convert("RGB" if channels == 3 else "L")


def as_images(pixels: bytearray, how: Decoding) -> Tensor:
    """The bytes of decoded images as uint8 `[n, C, size, size]`; the memory is shared."""
    shape = (len(pixels) // how.bytes_each, how.channels, how.size, how.size)
    # torch has no tensor over no bytes.
    return torch.frombuffer(pixels, dtype=torch.uint8).view(shape) if pixels else torch.empty(shape, dtype=torch.uint8)
