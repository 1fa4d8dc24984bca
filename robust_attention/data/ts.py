"""The archive's `.ts` files (time series with a class each), read strictly.

    # comments, before @data alone
    @problemName Waves
    @timeStamps false
    @missing false
    @univariate false
    @dimensions 2
    @equalLength false
    @classLabel true low high
    @data
    1,2.5,3:0.1,0.2,0.3:low
    4,5:0.4,0.5:high

One line of data is one series: its dimensions, then its class, parted by ":". Numbers are decimal, with or without an
exponent, and fit into float32. What is not so is refused with file, line and column, never guessed at. @seriesLength is
checked unless @equalLength is false.
"""

import gzip
import lzma
import math
import re
import zlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.data._ts_header import Header, Place, TSError, shown

__all__ = ["MOST_BYTES", "Missing", "TSError", "TSFile", "parse_ts", "read_ts"]

Missing = Literal["fail", "zero", "interpolate", "mask"]

MOST_BYTES = 2**32
"""Most bytes of a file, unpacked."""
_LARGEST = torch.finfo(torch.float32).max
_TOO_LARGE = _LARGEST * (1 + 2.0**-25)
"""The first number that float32 rounds to infinity; 3.4028235e38, as its largest is printed, lies below."""
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)
# Whatever Python's float accepts of these characters is a decimal number: no "nan", no "inf", no "1_000".
_PLAIN = re.compile(r"[0-9eE+\-.,\t ]+")
_OPEN: dict[str, Callable[..., Any]] = {".xz": lzma.open, ".gz": gzip.open}


@dataclass(frozen=True, kw_only=True)
class TSFile:
    """What a file says."""

    path: str
    """Where it was read from, for errors."""
    name: str
    """Its @problemName; empty where it has none."""
    classes: tuple[str, ...]
    """Names of the classes in the order of @classLabel; none where that is false."""
    channels: int
    """Dimensions of each series."""
    series: tuple[Tensor, ...]
    """Each `[L, C]`, float32. NaN stands for a missing value, with missing="mask" alone."""
    labels: tuple[int, ...] | None
    """The class of each series by its place in `classes`; None where @classLabel is false."""


def read_ts(path: Path | str, *, missing: Missing = "fail") -> TSFile:
    """Read a file, packed (.xz, .gz) or plain.

    Args:
        missing: what to do with a value written "?". "fail": refuse the file. "zero": 0. "interpolate": on a line
            between the neighbours in its channel; before the first and after the last the value is held. "mask": NaN,
            for who hides such steps. A file that says `@missing false` and has some is refused in any case.
    Raises:
        TSError: the file cannot be read, or is not what it must be.
    """
    path = Path(path)
    try:
        with _OPEN.get(path.suffix, open)(path, "rb") as file:
            data: bytes = file.read(MOST_BYTES + 1)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise TSError(str(path), None, None, f"must be a .ts file that can be read, got {reason}") from error
    if len(data) > MOST_BYTES:
        raise TSError(str(path), None, None, f"must hold at most {MOST_BYTES} bytes, got more; cut it into parts")
    return parse_ts(data, path=str(path), missing=missing)


def parse_ts(data: bytes, *, path: str = "<bytes>", missing: Missing = "fail") -> TSFile:
    """The same for bytes in memory; `path` stands in for the file in errors."""
    _checks.one_of("missing", missing, get_args(Missing))
    header, cases, number = Header(), _Cases(missing), 0
    lines = data.removeprefix(b"\xef\xbb\xbf").splitlines()  # of bytes: at \n, \r and \r\n alone
    for number, line in enumerate(lines, 1):
        _read_line(line, header, cases, Place(path, number))
    end = Place(path, number or None)
    if not header.complete:
        end.fail(None, "must have @data and at least one series after it, got neither")
    if not cases.series:
        end.fail(None, "must have at least one series after @data, got none")
    return TSFile(
        path=path,
        name=header.name,
        classes=tuple(header.classes),
        channels=cases.series[0].shape[1],
        series=tuple(cases.series),
        labels=tuple(cases.labels) if header.labelled else None,
    )


def _read_line(raw: bytes, header: Header, cases: "_Cases", place: Place) -> None:
    if not raw.strip():
        return
    if not header.complete and raw.lstrip()[:1] in (b"#", b"%"):
        return  # in any encoding: old files of the archive have Latin-1 in their comments
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        column = len(raw[: error.start].decode("utf-8")) + 1
        place.fail(column, f"must be UTF-8, got the byte 0x{raw[error.start]:02x}; convert the file")
    if header.complete:
        cases.add(text, header, place)
    elif text.lstrip().startswith("@"):
        header.declare(text, place)
    else:
        place.fail(1, f"must be a comment (#) or a declaration (@) before @data, got {shown(text)}")


class _Cases:
    """The lines after @data."""

    def __init__(self, missing: Missing) -> None:
        self.missing = missing
        self.series: list[Tensor] = []
        self.labels: list[int] = []

    def add(self, text: str, header: Header, place: Place) -> None:
        parts = text.split(":")
        found = len(parts) - bool(header.labelled)
        if found < 1:
            place.fail(len(text) + 1, "a series must end in a colon and its class, got no colon")
        if header.dimensions is None:
            header.dimensions = found
        if found != header.dimensions:
            wanted = f"{header.dimensions} dimensions{' and a class' if header.labelled else ''}"
            place.fail(
                len(text) + 1,
                f"a series must have {wanted}, parted by colons, got {len(parts)} parts; "
                "one is missing or there is one too many",
            )
        values, length, column = array("f"), 0, 1
        for number, part in enumerate(parts[:found]):
            numbers = self._numbers(part, column, header, place)
            if number and len(numbers) != length:
                place.fail(column, f"all dimensions of a series must be {length} long, got {len(numbers)}")
            length = len(numbers)
            values.extend(numbers)
            column += len(part) + 1
        _check_length(length, header, place)
        label = _label(parts[-1], column, header, place) if header.labelled else None
        series = torch.frombuffer(values, dtype=torch.float32).reshape(found, length).T.contiguous()
        self.series.append(self._complete(series, place))
        if label is not None:
            self.labels.append(label)

    def _numbers(self, text: str, column: int, header: Header, place: Place) -> list[float]:
        if _PLAIN.fullmatch(text):
            try:
                numbers = list(map(float, text.split(",")))
            except ValueError:
                pass
            else:
                if min(numbers) > -_TOO_LARGE and max(numbers) < _TOO_LARGE:
                    return numbers
        return self._one_by_one(text, column, header, place)

    def _one_by_one(self, text: str, column: int, header: Header, place: Place) -> list[float]:
        """The same with "?" for missing values, and with the column of what is wrong."""
        numbers = []
        for token in text.split(","):
            word = token.strip(" \t")
            start = column + len(token) - len(token.lstrip(" \t"))
            column += len(token) + 1
            if word == "?":
                self._check_missing(start, header, place)
                numbers.append(math.nan)
            elif not word:
                place.fail(start, "a number must stand before and after each comma, got nothing")
            elif not _NUMBER.fullmatch(word):
                place.fail(start, f'must be a decimal number, or "?" for a missing one, got {shown(word)}')
            elif abs(value := float(word)) >= _TOO_LARGE:
                place.fail(start, f"a number must fit into float32, up to {_LARGEST:.4g}, got {shown(word)}")
            else:
                numbers.append(value)
        return numbers

    def _check_missing(self, column: int, header: Header, place: Place) -> None:
        if header.missing is False:
            place.fail(column, 'no value may be missing where @missing is false, got "?"')
        if self.missing == "fail":
            place.fail(column, 'a value is missing ("?"); pass missing="interpolate", "zero" or "mask" to go on')

    def _complete(self, series: Tensor, place: Place) -> Tensor:
        """The series `[L, C]` after the policy for missing values."""
        unknown = series.isnan()
        if self.missing == "fail" or not unknown.any():
            return series
        if self.missing == "zero":
            return series.masked_fill(unknown, 0.0)
        if self.missing == "mask":
            if unknown.any(1).all():
                place.fail(1, 'a series must have a step without missing values for missing="mask", got none')
            return series
        if unknown.all(0).any():
            number = int(unknown.all(0).nonzero()[0]) + 1
            place.fail(1, f"a dimension must have some value to interpolate from, got none in dimension {number}")
        return torch.stack([_interpolated(channel) for channel in series.unbind(1)], 1)


def _check_length(length: int, header: Header, place: Place) -> None:
    if header.equal is False:
        return
    if header.length is None and header.equal:
        header.length = length
    if header.length is not None and length != header.length:
        place.fail(1, f"every series must be {header.length} long, as declared or as the first is, got {length}")


def _label(text: str, column: int, header: Header, place: Place) -> int:
    name = text.strip()
    if not name:
        place.fail(column, "a series must end in its class, got nothing after the last colon")
    if name not in header.classes:
        known = ", ".join(list(header.classes)[:20])
        place.fail(column, f"a class must be one of those declared ({known}), got {shown(name)}")
    return header.classes[name]


def _interpolated(channel: Tensor) -> Tensor:
    """`[L]` with each NaN on the line between its known neighbours."""
    known = (~channel.isnan()).nonzero().flatten()
    step = torch.arange(len(channel))
    right = torch.searchsorted(known, step).clamp(max=len(known) - 1)
    left = (torch.searchsorted(known, step, right=True) - 1).clamp(min=0)
    start, end = known[left], known[right]
    share = ((step - start) / (end - start).clamp(min=1)).clamp(0, 1).double()
    # In float64, where the difference of two numbers of float32 cannot overflow.
    wide = channel.double()
    return torch.where(channel.isnan(), wide[start] + share * (wide[end] - wide[start]), wide).float()
