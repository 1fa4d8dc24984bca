"""Labelled square images, however they are stored: what training and evaluation ask of a data set."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from robust_attention._checks import whole
from robust_attention.data import digits

__all__ = ["Images", "Parts", "Stored", "Subset", "digits_images", "hold_out"]


class Images(ABC):
    """N labelled images, 8 bits a channel, all of one square size.

    The labels are in memory; the images may be decoded only when they are read.
    """

    name: str
    """What the set is called in reports."""
    labels: Tensor
    """`[N]`, int64, each from 0 to `num_classes - 1`."""
    num_classes: int
    """How many classes there are, whether or not each has images here."""
    channels: int
    """1 (grey) or 3 (red, green, blue)."""
    size: int
    """Height and width in pixels."""
    damaged: dict[str, str]
    """Files that were left out because they could not be decoded, and why."""

    def __len__(self) -> int:
        return len(self.labels)

    @abstractmethod
    def _read(self, indices: Tensor) -> Tensor:
        """`read`, with indices that are known to be int64 on the CPU, from 0 to N - 1."""

    def read(self, indices: Tensor) -> Tensor:
        """The images of these numbers, uint8 `[n, C, size, size]` on the CPU; equal numbers give equal bytes."""
        return self._read(_checked(indices, len(self)))

    def take(self, indices: Tensor) -> Images:
        """The images of these numbers as a set of its own; nothing is read or copied."""
        return Subset(self, indices)


class Stored(Images):
    """Images that lie in memory."""

    def __init__(self, images: Tensor, labels: Tensor, *, num_classes: int, name: str) -> None:
        if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[2] != images.shape[3]:
            raise ValueError(
                f"images must be uint8 [N, C, S, S], got {str(images.dtype).removeprefix('torch.')} "
                f"{list(images.shape)}; crop to a square and round (255 * images) first"
            )
        if images.shape[1] not in (1, 3):
            raise ValueError(f"images must have 1 or 3 channels, got {images.shape[1]}; drop the others")
        self.labels = checked_labels(labels, len(images), num_classes)
        self.images = images.cpu()
        self.num_classes, self.name = num_classes, name
        self.channels, self.size = images.shape[1], images.shape[2]
        self.damaged = {}

    def _read(self, indices: Tensor) -> Tensor:
        return self.images[indices]


class Subset(Images):
    """Some images of another set, in an order of its own."""

    def __init__(self, source: Images, indices: Tensor) -> None:
        self.source = source
        self.indices = _checked(indices, len(source))
        self.labels = source.labels[self.indices]
        self.name, self.num_classes = source.name, source.num_classes
        self.channels, self.size = source.channels, source.size
        self.damaged = source.damaged

    def _read(self, indices: Tensor) -> Tensor:
        return self.source._read(self.indices[indices])

    def take(self, indices: Tensor) -> Images:
        return Subset(self.source, self.indices[_checked(indices, len(self))])


class Parts(NamedTuple):
    """Three disjoint sets of one kind."""

    train: Images
    validation: Images
    test: Images


def digits_images(size: int) -> Parts:
    """The digits that ship with the package, enlarged bilinearly to `size` and rounded to 8 bits; one channel."""
    whole("size", size, digits.SIZE)

    def enlarged(part: digits.Digits) -> Stored:
        images = F.interpolate(part.images, size=(size, size), mode="bilinear", align_corners=False)
        return Stored((255 * images).round().byte(), part.labels, num_classes=digits.NUM_CLASSES, name="digits")

    return Parts(*(enlarged(part) for part in digits.split()))


def hold_out(images: Images, share: float, *, seed: int = 0) -> tuple[Images, Images]:
    """Cut a set into the rest and a held-out share, the same share of every class; each in the order of the source.

    The cut depends on the labels and `seed` alone, so that everything that is chosen is chosen on the same images.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share!r}; 0.1 holds out a tenth of every class")
    generator = Generator().manual_seed(seed)
    held = torch.zeros(len(images), dtype=torch.bool)
    for label in range(images.num_classes):
        members = (images.labels == label).nonzero().flatten()
        chosen = torch.randperm(len(members), generator=generator)[: round(share * len(members))]
        held[members[chosen]] = True
    return images.take((~held).nonzero().flatten()), images.take(held.nonzero().flatten())


def checked_labels(labels: Tensor, number: int, num_classes: int) -> Tensor:
    """The labels as int64 on the CPU, after a look at each."""
    whole("num_classes", num_classes, 1)
    if labels.shape != (number,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise ValueError(
            f"labels must be whole numbers, one an image: [{number}], got {list(labels.shape)} of {labels.dtype}"
        )
    labels = labels.long().cpu()
    if number and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
        raise ValueError(
            f"labels must lie from 0 to num_classes - 1 = {num_classes - 1}, got {int(labels.min())} to "
            f"{int(labels.max())}; pass the number of classes of the whole data set"
        )
    return labels


def _checked(indices: Tensor, number: int) -> Tensor:
    if indices.ndim != 1 or indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool:
        raise ValueError(
            f"indices must be a list of whole numbers [n], got {list(indices.shape)} of {indices.dtype}; "
            "mask.nonzero().flatten() lists a mask"
        )
    indices = indices.long().cpu()
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < number:
        raise ValueError(
            f"indices must lie from 0 to {number - 1}, got {int(indices.min())} to {int(indices.max())}; "
            "count from the front"
        )
    return indices
