"""A set of images that lie encoded on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from robust_attention.data._pillow import pillow
from robust_attention.data.cache import open_cached
from robust_attention.data.decoding import Damage, Decoding, Source, as_images, decode_all, decoded, sound
from robust_attention.data.images import Images, Stored, checked_labels

__all__ = ["Decoding", "Encoded", "open_encoded"]


def open_encoded(source: Source, labels: Tensor, how: Decoding, *, num_classes: int, name: str) -> Images:
    """A set of images from their encoded form, decoded now or when they are read, as `how` says."""
    pillow()
    if not len(source):
        raise ValueError(f"{name} must hold images, but holds none; check the path and the split")
    labels = checked_labels(labels, len(source), num_classes)
    if isinstance(how.cache, Path):
        return open_cached(source, labels, how, num_classes=num_classes, name=name)
    if how.cache == "memory":
        pixels, kept, damaged = bytearray(), [], {}
        for number, image in decode_all(source, how):
            if isinstance(image, Damage):
                damaged[image.place] = image.reason
            else:
                pixels += image
                kept.append(number)
        stored = Stored(as_images(pixels, how), labels[kept], num_classes=num_classes, name=name)
        stored.damaged = damaged
        return stored
    kept, damaged = list(range(len(source))), {}
    if how.damaged == "skip":
        damages = {number: image for number, image in decode_all(source, how) if isinstance(image, Damage)}
        kept = [number for number in kept if number not in damages]
        damaged = {damage.place: damage.reason for damage in damages.values()}
    return Encoded(source, labels[kept], how, kept=kept, num_classes=num_classes, name=name, damaged=damaged)


class Encoded(Images):
    """Images that are decoded whenever they are read."""

    def __init__(
        self,
        source: Source,
        labels: Tensor,
        how: Decoding,
        *,
        kept: Sequence[int],
        num_classes: int,
        name: str,
        damaged: dict[str, str],
    ) -> None:
        self.source, self.labels, self.how = source, labels, how
        self.num_classes, self.name, self.damaged = num_classes, name, damaged
        self.channels, self.size = how.channels, how.size
        self._kept = kept

    def _read(self, indices: Tensor) -> Tensor:
        numbers = [self._kept[index] for index in indices.tolist()]
        pixels = bytearray()
        for image in decoded(self.source, numbers, self.how):
            pixels += sound(image)
        return as_images(pixels, self.how)
