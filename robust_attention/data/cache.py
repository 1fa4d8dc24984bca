"""Decoded images in a plain file: decoded once, mapped into memory, checked at every read.

`<name>.u8` is nothing but the images, uint8 `[N, C, size, size]`. `<name>.json` beside it holds the shape, what was
left out, and a CRC-32 for each image; it is written last, so a file without it is not finished.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import mmap
import os
import shutil
import sys
import warnings
import zlib
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from robust_attention._files import write_json
from robust_attention.data.decoding import Damage, Decoding, Source, as_images, decode_all, sound
from robust_attention.data.images import Images

_VERSION = 1


def open_cached(source: Source, labels: Tensor, how: Decoding, *, num_classes: int, name: str) -> Images:
    """The decoded images of `source` in `how.cache`, made if they are not there.

    The file's name holds a fingerprint of the source's files and of the way of decoding: other files, other cache.
    """
    assert isinstance(how.cache, Path)
    key = _fingerprint(source, how)
    data = how.cache / f"{_plain(name)}-{how.size}-{key[:16]}.u8"
    how.cache.mkdir(parents=True, exist_ok=True)
    with _alone(data.with_suffix(".lock")):
        record = _load(data, key, len(source), how)
        if record is None:
            _make(source, how, data, key)
            record = _load(data, key, len(source), how)
    assert record is not None
    if record["damaged"] and how.damaged == "fail":
        sound(Damage(*next(iter(record["damaged"].items()))))
    left_out = set(record["left_out"])
    kept = [number for number in range(len(source)) if number not in left_out]
    return Mapped(data, record, labels[kept], how, num_classes=num_classes, name=name)


class Mapped(Images):
    """Images in a file of the cache."""

    def __init__(
        self, data: Path, record: dict[str, Any], labels: Tensor, how: Decoding, *, num_classes: int, name: str
    ) -> None:
        self.data, self.how, self.labels = data, how, labels
        self.num_classes, self.name, self.damaged = num_classes, name, record["damaged"]
        self.channels, self.size = how.channels, how.size
        self._checksums = _unpack(record["crc32"])
        with data.open("rb") as file:
            self._bytes = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def _read(self, indices: Tensor) -> Tensor:
        each = self.how.bytes_each
        pixels = bytearray(len(indices) * each)
        for place, number in enumerate(indices.tolist()):
            image = self._bytes[number * each : (number + 1) * each]
            if zlib.crc32(image) != self._checksums[number]:
                raise ValueError(
                    f"image {number} of {self.data} must have the checksum that it was stored with, but has another: "
                    "the file is damaged; delete it, and it is made again"
                )
            pixels[place * each : (place + 1) * each] = image
        return as_images(pixels, self.how)


def _make(source: Source, how: Decoding, data: Path, key: str) -> None:
    needed = len(source) * how.bytes_each
    free = shutil.disk_usage(data.parent).free
    if free < needed:
        raise OSError(
            f"the folder of a cache must have room for {needed / 2**30:.1f} GiB, {data.parent} has "
            f"{free / 2**30:.1f}; choose another folder or a smaller size"
        )
    data.with_suffix(".json").unlink(missing_ok=True)
    part = data.with_suffix(".part")
    checksums, left_out, damaged = array("I"), [], {}
    with part.open("wb") as file:
        for number, image in decode_all(source, how):
            if isinstance(image, Damage):
                left_out.append(number)
                damaged[image.place] = image.reason
            else:
                checksums.append(zlib.crc32(image))
                file.write(image)
        file.flush()
        os.fsync(file.fileno())
    part.replace(data)
    record = {
        "version": _VERSION,
        "fingerprint": key,
        "shape": [len(checksums), how.channels, how.size, how.size],
        "left_out": left_out,
        "damaged": damaged,
        "crc32": _pack(checksums),
    }
    write_json(data.with_suffix(".json"), record | {"sha256": _seal(record)})


def _load(data: Path, key: str, number: int, how: Decoding) -> dict[str, Any] | None:
    """The record of a whole cache; None, with a warning where there is something, if it must be made."""
    beside = data.with_suffix(".json")
    if not beside.exists() or not data.exists():
        return None
    try:
        record: dict[str, Any] = json.loads(beside.read_text(encoding="utf-8"))
        seal = record.pop("sha256")
        images = number - len(record["left_out"])
        whole = (
            seal == _seal(record)
            and record["version"] == _VERSION
            and record["fingerprint"] == key
            and len(_unpack(record["crc32"])) == images
            and data.stat().st_size == images * how.bytes_each
        )
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        warnings.warn(f"the cache {data} is damaged; it is made again", stacklevel=2)
        return None
    return record


def _fingerprint(source: Source, how: Decoding) -> str:
    settings = [_VERSION, how.size, how.channels, how.resize, how.interpolation, source.fingerprint()]
    return hashlib.sha256(json.dumps(settings).encode()).hexdigest()


def _seal(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()


def _plain(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower())


def _pack(checksums: array[int]) -> str:
    if sys.byteorder == "big":
        checksums.byteswap()
    return base64.b64encode(checksums.tobytes()).decode()


def _unpack(text: str) -> array[int]:
    checksums = array("I", base64.b64decode(text))
    if sys.byteorder == "big":
        checksums.byteswap()
    return checksums


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One process at a time; the others wait and then find what it made. A killed process lets go of it."""
    try:
        import fcntl
    except ImportError:  # not on Windows: there, two at once would both make it, and the last one stays
        yield
        return
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
