"""CIFAR-10 and Tiny-ImageNet, wherever and however they lie."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from robust_attention._checks import one_of
from robust_attention.data._pillow import pillow
from robust_attention.data.decoding import Decoding, Source
from robust_attention.data.encoded import open_encoded
from robust_attention.data.folders import tiny_imagenet_folders
from robust_attention.data.images import Images
from robust_attention.data.parquet import parquet_images

CifarSplit = Literal["train", "test"]
TinySplit = Literal["train", "val"]

# Small enough to be decoded once and kept.
CIFAR10 = Decoding(size=32, cache="memory")
TINY_IMAGENET = Decoding(size=64, cache="memory")

_SIDE, _PLANE = 32, 32 * 32
_RECORD = 1 + 3 * _PLANE
_BATCHES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}


def cifar10(root: Path | str, split: CifarSplit, how: Decoding = CIFAR10) -> Images:
    """CIFAR-10: the published binary version (`data_batch_1.bin` ...), or `cifar10_<split>.parquet`.

    The published Python version is made of pickles, which can run anything when they are opened: it is refused.
    """
    one_of("split", split, get_args(CifarSplit))
    root = Path(root)
    name = f"CIFAR-10 {split}"
    for folder in (root, root / "cifar-10-batches-bin"):
        if all((folder / batch).is_file() for batch in _BATCHES[split]):
            source = Records([folder / batch for batch in _BATCHES[split]])
            return open_encoded(source, source.labels, how, num_classes=10, name=name)
    packed = root / f"cifar10_{split}.parquet"
    if packed.is_file():
        return parquet_images(packed, how, num_classes=10, name=name)
    if (root / "cifar-10-batches-py").exists() or (root / "data_batch_1").exists() or (root / "test_batch").exists():
        raise ValueError(
            f"CIFAR-10 must be its binary version, {root} holds the Python version: pickles can run any code and are "
            "not opened here; fetch cifar-10-binary.tar.gz from the same page and unpack it"
        )
    raise ValueError(
        f"{root} must hold cifar-10-batches-bin/ with {', '.join(_BATCHES[split])}, or cifar10_{split}.parquet; "
        "unpack cifar-10-binary.tar.gz there"
    )


def tiny_imagenet(root: Path | str, split: TinySplit, how: Decoding = TINY_IMAGENET) -> Images:
    """Tiny-ImageNet: the published folders, or `tiny_imagenet_<split>*.parquet` (several are put in sorted order).

    The published test images have no labels; `val` is what results are reported on.
    """
    one_of("split", split, get_args(TinySplit))
    root = Path(root)
    for folder in (root, root / "tiny-imagenet-200"):
        if (folder / "train").is_dir():
            return tiny_imagenet_folders(folder, split, how)
    packed = sorted(root.glob(f"tiny_imagenet_{split}*.parquet"))
    if packed:
        return parquet_images(packed, how, num_classes=200, name=f"Tiny-ImageNet {split}")
    raise ValueError(
        f"{root} must hold tiny-imagenet-200/ or tiny_imagenet_{split}*.parquet; unpack tiny-imagenet-200.zip there"
    )


class Records(Source):
    """The images of CIFAR-10's binary version: a byte of label, then 1,024 of red, green and blue each."""

    def __init__(self, paths: list[Path]) -> None:
        self._content = b""
        self._origin: list[tuple[Path, int]] = []
        for path in paths:
            content = path.read_bytes()
            if not content or len(content) % _RECORD:
                raise ValueError(
                    f"{path} must hold whole records of {_RECORD} bytes, has {len(content)} bytes; fetch it again"
                )
            self._origin += [(path, record) for record in range(len(content) // _RECORD)]
            self._content += content
        self.labels = torch.tensor(list(self._content[::_RECORD]))
        if int(self.labels.max()) > 9:
            raise ValueError(f"labels in {paths[0].parent} must lie from 0 to 9, got {int(self.labels.max())}")

    def __len__(self) -> int:
        return len(self._origin)

    def place(self, index: int) -> str:
        path, record = self._origin[index]
        return f"{path}, record {record}"

    def open(self, index: int) -> Any:
        image = pillow()
        start = index * _RECORD + 1
        planes = [self._content[start + band * _PLANE : start + (band + 1) * _PLANE] for band in range(3)]
        return image.merge("RGB", [image.frombytes("L", (_SIDE, _SIDE), plane) for plane in planes])

    def fingerprint(self) -> str:
        return hashlib.sha256(self._content).hexdigest()
