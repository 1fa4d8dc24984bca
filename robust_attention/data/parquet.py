"""Encoded images in parquet files, as the Hugging Face hub stores them."""

from __future__ import annotations

import bisect
import hashlib
import io
import threading
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from robust_attention._checks import whole
from robust_attention.data._pillow import pillow
from robust_attention.data.decoding import Decoding, Source
from robust_attention.data.encoded import open_encoded
from robust_attention.data.images import Images


def parquet_images(
    files: Path | str | Sequence[Path | str],
    how: Decoding,
    *,
    num_classes: int,
    image: str = "image",
    label: str = "label",
    name: str | None = None,
) -> Images:
    """Images from parquet files, in the order of the files and their rows.

    Args:
        files: One file or several.
        num_classes: Of the whole data set: a part of it need not hold all.
        image: The column of the images: bytes, or a struct of `bytes` and `path`.
        label: The column of the labels, whole numbers from 0.
        name: What the set is called; the first file's name by default.

    Without a cache, the encoded images stay in memory once their group of rows was read.
    """
    paths = [Path(files)] if isinstance(files, (str, Path)) else [Path(file) for file in files]
    whole("number of parquet files", len(paths), 1)
    source = Rows(paths, image, keep=None if how.cache is None else 4)
    labels = torch.tensor(source.column(label))
    return open_encoded(source, labels, how, num_classes=num_classes, name=name or paths[0].stem)


class Rows(Source):
    """The rows of parquet files; groups of rows are read when they are needed."""

    def __init__(self, paths: Sequence[Path], image: str, *, keep: int | None) -> None:
        self.paths, self.image = paths, image
        self._keep = keep
        """How many groups stay in memory; None: all."""
        self._files = [_open(path) for path in paths]
        for path, file in zip(paths, self._files, strict=True):
            if image not in file.schema_arrow.names:
                raise ValueError(f"{path} must have a column {image!r}, has {', '.join(file.schema_arrow.names)}")
        self._groups = [
            (number, group) for number, file in enumerate(self._files) for group in range(file.num_row_groups)
        ]
        sizes = (self._files[number].metadata.row_group(group).num_rows for number, group in self._groups)
        self._ends = list(accumulate(sizes))
        self._read: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def column(self, name: str) -> list[int]:
        """A column of whole numbers."""
        values: list[int] = []
        for path, file in zip(self.paths, self._files, strict=True):
            if name not in file.schema_arrow.names:
                raise ValueError(f"{path} must have a column {name!r}, has {', '.join(file.schema_arrow.names)}")
            some = file.read([name]).column(0).to_pylist()
            wrong = next((row for row, value in enumerate(some) if not isinstance(value, int)), None)
            if wrong is not None:
                raise ValueError(f"row {wrong} of {path} must have a whole number in {name!r}, got {some[wrong]!r}")
            values += some
        return values

    def place(self, index: int) -> str:
        group, row = self._find(index)
        number, which = self._groups[group]
        metadata = self._files[number].metadata
        before = sum(metadata.row_group(earlier).num_rows for earlier in range(which))
        return f"{self.paths[number]}, row {before + row}"

    def open(self, index: int) -> Any:
        group, row = self._find(index)
        value = self._rows(group)[row].as_py()
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise ValueError("the row holds no bytes of an image")
        return pillow().open(io.BytesIO(content))

    def fingerprint(self) -> str:
        digest = hashlib.sha256(self.image.encode())
        for path in self.paths:
            stat = path.stat()
            digest.update(f"{path.name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()

    def _find(self, index: int) -> tuple[int, int]:
        group = bisect.bisect_right(self._ends, index)
        return group, index - (self._ends[group - 1] if group else 0)

    def _rows(self, group: int) -> Any:
        with self._lock:  # several threads want the same group at once
            if group not in self._read:
                number, which = self._groups[group]
                self._read[group] = self._files[number].read_row_group(which, [self.image]).column(0)
                if self._keep is not None and len(self._read) > self._keep:
                    self._read.popitem(last=False)
            return self._read[group]


def _open(path: Path) -> Any:
    try:
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise ImportError("parquet is read by pyarrow; install it: pip install 'robust-attention[vision]'") from error
    if not path.is_file():
        raise ValueError(f"{path} must be a parquet file, but there is none; check the path")
    try:
        return ParquetFile(path)
    except (ArrowInvalid, OSError) as error:
        raise ValueError(f"{path} must be a parquet file, but cannot be read ({error}); fetch it again") from error
