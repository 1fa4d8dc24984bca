"""The 1,797 handwritten digits that ship with the package: 8x8 pixels, 17 grey levels.

They are the test set of "Optical Recognition of Handwritten Digits" (E. Alpaydin and C. Kaynak, UCI Machine
Learning Repository, 1998, doi:10.24432/C50P49, CC BY 4.0), the same images as scikit-learn's `load_digits`.
`digits.bin` is zlib over 1,797 bytes of labels (0..9), then 64 bytes of pixels (0..16) an image, row by row.
"""

import hashlib
import zlib
from importlib import resources
from typing import NamedTuple

import torch
from torch import Tensor

NUM_IMAGES = 1797
NUM_CLASSES = 10
SIZE = 8
MAX_GREY = 16
SHA256 = "217d9c659ecd85c27a239c251bb1f8e49bd22eeaaa9dfe822e3c3b8f947a9e9c"

# Shares of every class; the test split takes the rest. Few parameters need tuning, so validation is the smallest.
_TRAIN, _VALIDATION = 0.55, 0.15


class Digits(NamedTuple):
    """Images `[N, 1, 8, 8]`, float32 in [0, 1], and labels `[N]`, int64."""

    images: Tensor
    labels: Tensor


class Splits(NamedTuple):
    """Three disjoint parts of the digits."""

    train: Digits
    validation: Digits
    test: Digits


def load() -> Digits:
    """Read all digits, in the order of the source."""
    packed = resources.files("robust_attention.data").joinpath("digits.bin").read_bytes()
    return unpack(packed)


def unpack(packed: bytes) -> Digits:
    """Turn the content of `digits.bin` into tensors, after checking that no byte of it differs."""
    found = hashlib.sha256(packed).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"digits.bin must have SHA-256 {SHA256}, got {found} ({len(packed)} bytes); "
            "the installed copy is damaged: reinstall robust-attention"
        )
    # A bytearray, because torch warns about buffers that it must not write to.
    raw = torch.frombuffer(bytearray(zlib.decompress(packed)), dtype=torch.uint8)
    labels, pixels = raw[:NUM_IMAGES], raw[NUM_IMAGES:]
    return Digits(pixels.reshape(NUM_IMAGES, 1, SIZE, SIZE).float() / MAX_GREY, labels.long())


def split(digits: Digits | None = None, *, seed: int = 0) -> Splits:
    """Cut the digits into train (55 %), validation (15 %) and test (30 %), with the same shares of every class.

    The cut depends on `seed` alone; results are comparable only for equal seeds.
    """
    images, labels = load() if digits is None else digits
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for label in range(NUM_CLASSES):
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        first, second = round(_TRAIN * len(members)), round((_TRAIN + _VALIDATION) * len(members))
        for part, chosen in zip(parts, (members[:first], members[first:second], members[second:]), strict=True):
            part.append(chosen)
    # Sorted, so that a part lists its images in the order of the source, not class by class.
    train, validation, test = (torch.cat(part).sort().values for part in parts)
    return Splits(
        Digits(images[train], labels[train]),
        Digits(images[validation], labels[validation]),
        Digits(images[test], labels[test]),
    )
