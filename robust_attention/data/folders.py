"""Images in folders: one a class, or as Tiny-ImageNet is published."""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from robust_attention.data._pillow import pillow
from robust_attention.data.decoding import Decoding, Source
from robust_attention.data.encoded import open_encoded
from robust_attention.data.images import Images

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
"""Endings of the files that count as images, in any case of letters."""


class Files(Source):
    """Image files below a folder."""

    def __init__(self, root: Path, names: Sequence[str]) -> None:
        self.root, self.names = root, names

    def __len__(self) -> int:
        return len(self.names)

    def place(self, index: int) -> str:
        return str(self.root / self.names[index])

    def open(self, index: int) -> Any:
        # Read whole, so that no file stays open.
        return pillow().open(io.BytesIO((self.root / self.names[index]).read_bytes()))

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for name in self.names:
            stat = (self.root / name).stat()
            digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def read_classes(path: Path | str) -> tuple[str, ...]:
    """A class list: the first word of each line, in the order of the labels. ImageNet's has 1,000 synsets."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    names = tuple(line.split()[0] for line in lines if line.strip())
    twice = sorted({name for name in names if names.count(name) > 1})
    if not names or twice:
        came = f"{', '.join(twice[:3])} more than once" if twice else "none"
        raise ValueError(f"a class list must name each class once, one a line, but {path} names {came}")
    return names


def class_folders(
    root: Path | str,
    how: Decoding,
    *,
    classes: Path | str | Sequence[str] | None = None,
    name: str | None = None,
) -> Images:
    """ImageNet-style folders: `root/<class>/<image>`.

    Args:
        classes: The classes in the order of their labels: a list, or a file with one a line. Folders may be missing,
            and then the class has no images; a folder that is not in the list is an error. Without it, the folders
            themselves, sorted, are the classes: right if all are there.
        name: What the set is called; the folder's name by default.
    """
    root = Path(root)
    found = _folders(root)
    known = _listed(classes, found)
    unknown = sorted(set(found) - set(known))
    if unknown:
        raise ValueError(
            f"every folder of {root} must be a class of the list, but {', '.join(unknown[:3])} "
            f"({len(unknown)} in all) is not; pass the list that belongs to the data"
        )
    number = {name: label for label, name in enumerate(known)}
    names, labels = [], []
    for folder in found:
        images = _images(root / folder)
        names += [f"{folder}/{image}" for image in images]
        labels += [number[folder]] * len(images)
    _some(names, root, "<class>/<image>.jpg")
    return open_encoded(
        Files(root, names), torch.tensor(labels), how, num_classes=len(known), name=name or root.resolve().name
    )


def tiny_imagenet_folders(root: Path | str, split: str, how: Decoding) -> Images:
    """Tiny-ImageNet as published: `train/<wnid>/images/*`, and `val/images/*` beside `val/val_annotations.txt`.

    A label is the place of the wnid among the sorted folders of `train` (not the order of `wnids.txt`).
    """
    root = Path(root)
    wnids = _folders(root / "train")
    number = {wnid: label for label, wnid in enumerate(wnids)}
    names, labels = [], []
    if split == "train":
        for wnid in wnids:
            images = _images(root / "train" / wnid / "images")
            names += [f"train/{wnid}/images/{image}" for image in images]
            labels += [number[wnid]] * len(images)
    else:
        classes = _annotations(root / "val" / "val_annotations.txt", number)
        for image in _images(root / "val" / "images"):
            if image not in classes:
                raise ValueError(f"every image of {root / 'val'} must stand in val_annotations.txt, {image} does not")
            names.append(f"val/images/{image}")
            labels.append(classes[image])
    _some(names, root, f"{split}/...")
    labels_N = torch.tensor(labels)
    return open_encoded(Files(root, names), labels_N, how, num_classes=len(wnids), name=f"Tiny-ImageNet {split}")


def _annotations(path: Path, number: dict[str, int]) -> dict[str, int]:
    """Image to label, from lines of `image<tab>wnid<tab>box`."""
    labels = {}
    for line_number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        image, _, rest = line.partition("\t")
        wnid = rest.partition("\t")[0]
        if wnid not in number:
            raise ValueError(
                f"line {line_number} of {path} must be an image, a tab and a class of train, got {line[:60]!r}"
            )
        labels[image] = number[wnid]
    return labels


def _listed(classes: Path | str | Sequence[str] | None, found: list[str]) -> Sequence[str]:
    if classes is None:
        return found
    return read_classes(classes) if isinstance(classes, (str, Path)) else classes


def _folders(root: Path) -> list[str]:
    if not root.is_dir():
        raise ValueError(f"{root} must be a folder with a folder a class, but there is none; check the path")
    with os.scandir(root) as entries:
        found = sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    if not found:
        raise ValueError(f"{root} must hold a folder a class, but holds none; point one level up or down")
    return found


def _images(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise ValueError(f"{folder} must be a folder of images, but there is none; check that the data set is whole")
    with os.scandir(folder) as entries:
        names = (entry.name for entry in entries if entry.is_file() and not entry.name.startswith("."))
        return sorted(name for name in names if name.lower().endswith(SUFFIXES))


def _some(names: list[str], root: Path, layout: str) -> None:
    if not names:
        raise ValueError(f"{root} must hold images as {layout}, but holds none of {', '.join(SUFFIXES)}")
