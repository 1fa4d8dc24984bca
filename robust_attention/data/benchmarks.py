"""ImageNet-C, -A, -R, -O and -Sketch in their published layouts.

All are folders of wnids ("n01440764"). ImageNet's own order of the 1,000 classes is that of the sorted wnids; the
lists are not shipped here: pass a file with one wnid a line, in the order of the model's outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from robust_attention._checks import one_of, whole
from robust_attention.data.corruptions.severities import KINDS
from robust_attention.data.decoding import Decoding
from robust_attention.data.folders import class_folders, read_classes
from robust_attention.data.images import Images

Synsets = Path | str | Sequence[str]

# Published: each of the three has 200 classes.
_MASKED = 200


class Masked(NamedTuple):
    """Images of some of the model's classes."""

    images: Images
    mask: Tensor
    """`[K]`, True at the classes that the set has; logits of all others are left out (`eval.metrics.masked_right`)."""


def imagenet_c(root: Path | str, kind: str, severity: int, how: Decoding, *, synsets: Synsets | None = None) -> Images:
    """One kind and severity: `root/<kind>/<severity>/<wnid>/*`, or the same one level down
    (`root/noise/<kind>/...`). Tiny-ImageNet-C is laid out the same.

    The published images are cut to 224 pixels (64 for Tiny-ImageNet-C) already and are left as they are at that size;
    for another one, `resize="stretch"` keeps their edges.
    """
    one_of("kind", kind, KINDS)
    whole("severity", severity, 1, 5)
    root = Path(root)
    places = [root / kind, *sorted(root.glob(f"*/{kind}"))]
    place = next((place / str(severity) for place in places if (place / str(severity)).is_dir()), None)
    if place is None:
        raise ValueError(
            f"{root} must hold {kind}/{severity}/<wnid>/<image>.JPEG, but does not; unpack the archive of {kind} there"
        )
    return class_folders(place, how, classes=synsets, name=f"{root.resolve().name}, {kind} {severity}")


def imagenet_a(root: Path | str, how: Decoding, *, synsets: Synsets, classes: Synsets | None = None) -> Masked:
    """ImageNet-A, natural adversarial images of 200 classes: `root/<wnid>/*`.

    Args:
        synsets: All classes of the model, in the order of its outputs.
        classes: The classes of the mask, where not all have a folder. Without it there must be 200 folders: an
            unfinished download would make the mask, and the task, smaller.
    """
    return _masked(root, how, synsets, classes, "ImageNet-A")


def imagenet_r(root: Path | str, how: Decoding, *, synsets: Synsets, classes: Synsets | None = None) -> Masked:
    """ImageNet-R, renditions (paintings, toys ...) of 200 classes: `root/<wnid>/*`; arguments as for `imagenet_a`."""
    return _masked(root, how, synsets, classes, "ImageNet-R")


def imagenet_o(root: Path | str, how: Decoding, *, synsets: Synsets, classes: Synsets | None = None) -> Masked:
    """ImageNet-O, images of no class of ImageNet: `root/<wnid>/*`; arguments as for `imagenet_a`.

    A folder is named by the class that its images are mistaken for, so labels are not to be scored. Compare with the
    validation images of the same 200 classes (`in_mask`), both with the mask on: `eval.metrics.aupr`.
    """
    return _masked(root, how, synsets, classes, "ImageNet-O")


def imagenet_sketch(root: Path | str, how: Decoding, *, synsets: Synsets | None = None) -> Images:
    """ImageNet-Sketch, drawings of all 1,000 classes: `root/<wnid>/*`."""
    return class_folders(root, how, classes=synsets, name="ImageNet-Sketch")


def in_mask(images: Images, mask: Tensor) -> Images:
    """The images whose class is in the mask."""
    if mask.shape != (images.num_classes,) or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be bool, one a class: [{images.num_classes}], got {list(mask.shape)} of {mask.dtype}"
        )
    return images.take(mask[images.labels].nonzero().flatten())


def class_mask(classes: Synsets, synsets: Synsets) -> Tensor:
    """`[K]`, True where a class of `synsets` is one of `classes`."""
    wanted, known = _names(classes), _names(synsets)
    missing = sorted(set(wanted) - set(known))
    if missing:
        raise ValueError(
            f"every class of the mask must be one of the model's {len(known)}, but {', '.join(missing[:3])} "
            f"({len(missing)} in all) is not; pass the list that belongs to the model"
        )
    chosen = set(wanted)
    return torch.tensor([name in chosen for name in known])


def _masked(root: Path | str, how: Decoding, synsets: Synsets, classes: Synsets | None, name: str) -> Masked:
    known = _names(synsets)
    images = class_folders(root, how, classes=known, name=name)
    present = [entry.name for entry in Path(root).iterdir() if entry.is_dir() and not entry.name.startswith(".")]
    if classes is None:
        if len(present) != _MASKED:
            raise ValueError(
                f"{name} must have {_MASKED} class folders, {root} has {len(present)}; finish the download, or pass "
                "classes= with the list of its classes"
            )
        return Masked(images, class_mask(present, known))
    outside = sorted(set(present) - set(_names(classes)))
    if outside:
        raise ValueError(
            f"every folder of {root} must be one of classes, but {', '.join(outside[:3])} is not; pass {name}'s list"
        )
    return Masked(images, class_mask(classes, known))


def _names(classes: Synsets) -> Sequence[str]:
    return read_classes(classes) if isinstance(classes, (str, Path)) else classes
