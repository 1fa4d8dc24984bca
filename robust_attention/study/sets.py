"""The image sets of a study by name, each cut into train, validation and test."""

from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from robust_attention.data.decoding import Decoding
from robust_attention.data.folders import class_folders
from robust_attention.data.images import Images, digits_images, hold_out
from robust_attention.data.small import cifar10, tiny_imagenet
from robust_attention.recipes.vision import DataConfig

_NONE = torch.empty(0, dtype=torch.int64)


class Sets(NamedTuple):
    """Three disjoint parts."""

    train: Images
    validation: Images
    test: Images


def load_sets(config: DataConfig) -> Sets:
    """Read the sets; nothing is fetched."""
    if config.name == "digits":
        train, validation, test = digits_images(config.size)
        return Sets(_first(train, config.num_train), validation, test)
    if not config.root:
        raise ValueError(f"data.root must be the folder of {config.name}, got nothing; pass --root FOLDER")
    whole, test = _read(config, Path(config.root))
    train, validation = hold_out(whole, config.validation) if config.validation else (whole, whole.take(_NONE))
    return Sets(_first(train, config.num_train), validation, test)


def _read(config: DataConfig, root: Path) -> tuple[Images, Images]:
    """The training set, and what results are reported on: test, or val where test images have no labels."""
    cache: Path | Literal["memory"] = Path(config.cache) if config.cache else "memory"
    how = Decoding(size=config.size, damaged=config.damaged, cache=cache)
    if config.name == "cifar10":
        return cifar10(root, "train", how), cifar10(root, "test", how)
    if config.name == "tiny-imagenet":
        return tiny_imagenet(root, "train", how), tiny_imagenet(root, "val", how)
    # 1.3 million images are decoded anew each time, unless they have a folder to be kept in.
    how = replace(how, cache=Path(config.cache) if config.cache else None)
    return class_folders(root / "train", how, name="ImageNet train"), class_folders(root / "val", how, name="ImageNet")


def _first(images: Images, number: int | None) -> Images:
    return images if number is None or number >= len(images) else images.take(torch.arange(number))
