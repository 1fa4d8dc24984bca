"""Labelled time series, padded to one length with a mask: reading, joining, splitting, and each channel's scale."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.data.ts import Missing, TSError, TSFile, read_ts

SUFFIXES = (".ts", ".ts.xz", ".ts.gz")


@dataclass(frozen=True, kw_only=True, eq=False)
class Series:
    """N series with a class each."""

    name: str
    """What the problem is called."""
    values: Tensor
    """`[N, L, C]`, float32, in the units of the file; 0 where the mask is False."""
    mask: Tensor
    """`[N, L]`, True where there is a step: padding, and steps with missing values, are not looked at."""
    labels: Tensor
    """`[N]`, int64, places in `classes`."""
    classes: tuple[str, ...]
    """Names of the classes."""
    ids: Tensor
    """`[N]`, int64: which series of its file each is."""

    def __len__(self) -> int:
        return len(self.values)

    @property
    def length(self) -> int:
        """L."""
        return self.values.shape[1]

    @property
    def channels(self) -> int:
        """C."""
        return self.values.shape[2]

    def take(self, indices: Tensor) -> "Series":
        """Some of them, in that order."""
        parts = {name: getattr(self, name)[indices] for name in ("values", "mask", "labels", "ids")}
        return replace(self, **parts)

    def padded(self, length: int) -> "Series":
        """The same with padding up to `length` steps."""
        more = length - self.length
        if more < 0:
            raise ValueError(f"length must be at least that of the series, {self.length}, got {length}")
        pad = torch.nn.functional.pad
        return replace(self, values=pad(self.values, (0, 0, 0, more)), mask=pad(self.mask, (0, more)))


class SeriesExamples:
    """Series as the training engine asks for them: batches of (values, mask, labels), nothing augmented."""

    def __init__(self, series: Series) -> None:
        self.series = series

    def __len__(self) -> int:
        return len(self.series)

    def batch(self, indices: Tensor, seed: int, device: torch.device) -> tuple[Tensor, ...]:
        part = self.series.take(indices)
        return part.values.to(device), part.mask.to(device), part.labels.to(device)


def pad(series: Sequence[Tensor], length: int | None = None) -> tuple[Tensor, Tensor]:
    """Values `[N, L, C]` and mask `[N, L]` of series `[l, C]`, which may have NaN: such steps are hidden."""
    longest = max(len(one) for one in series)
    length = longest if length is None else length
    if length < longest:
        raise ValueError(f"length must be at least that of the longest series, {longest}, got {length}")
    values = torch.zeros(len(series), length, series[0].shape[1])
    mask = torch.zeros(len(series), length, dtype=torch.bool)
    for place, one in enumerate(series):
        whole = ~one.isnan().any(1)
        mask[place, : len(one)] = whole
        values[place, : len(one)] = torch.where(whole[:, None], one, 0)
    return values, mask


def labelled(file: TSFile, classes: tuple[str, ...] | None = None, length: int | None = None) -> Series:
    """A file as series; with `classes`, labels count by these instead of the file's own list."""
    if file.labels is None:
        raise TSError(file.path, None, None, "must have a class for each series, got @classLabel false")
    known = file.classes if classes is None else classes
    if foreign := sorted({file.classes[label] for label in file.labels} - set(known)):
        raise TSError(file.path, None, None, f"classes must be among {', '.join(known)}, got {', '.join(foreign)}")
    values, mask = pad(file.series, length)
    labels = torch.tensor([known.index(file.classes[label]) for label in file.labels])
    ids = torch.arange(len(labels))
    return Series(name=file.name, values=values, mask=mask, labels=labels, classes=known, ids=ids)


class Problem(NamedTuple):
    """The archive's two parts of a problem, padded to the longest series of both.

    So the model's length, and with it the size of a flattening head and the draws over positions, follow from the test
    series too, as in the published experiments; their values and labels decide nothing.
    """

    train: Series
    test: Series | None
    """None where there is no such file: then cross-validate on the other."""


def load_problem(root: Path | str, name: str, *, missing: Missing = "fail") -> Problem:
    """Read `root/NAME/NAME_TRAIN.ts` and `NAME_TEST.ts`, plain or packed (.xz, .gz); nothing is fetched."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
        raise ValueError(f"name must be that of a problem, letters and digits, got {name!r}; for example Heartbeat")
    folder = Path(root) / name
    train_path, test_path = (_find(folder, f"{name}_{part}") for part in ("TRAIN", "TEST"))
    if train_path is None:
        raise ValueError(
            f"root must hold {name}/{name}_TRAIN.ts (or .ts.xz, .ts.gz), got no such file in {folder}; "
            "unpack the archive there"
        )
    files = [read_ts(path, missing=missing) for path in (train_path, test_path) if path is not None]
    first, last = files[0], files[-1]
    if last.channels != first.channels:
        raise TSError(last.path, None, None, f"must have {first.channels} dimensions as TRAIN, got {last.channels}")
    length = max(len(one) for file in files for one in file.series)
    parts = [replace(labelled(file, first.classes, length), name=name) for file in files]
    return Problem(parts[0], parts[1] if len(parts) == 2 else None)


def _find(folder: Path, stem: str) -> Path | None:
    found = (folder / f"{stem}{suffix}" for suffix in SUFFIXES)
    return next((path for path in found if path.is_file()), None)


class Scale(NamedTuple):
    """Mean and standard deviation of each channel, `[C]`; 0 for a channel that never changes."""

    mean: Tensor
    std: Tensor


def scale_of(series: Series) -> Scale:
    """Over all real steps of all series, which should be those that are learnt from."""
    steps = series.values[series.mask].double()
    mean = steps.mean(0)
    std = (steps - mean).square().mean(0).sqrt()
    # Below float32's resolution of the values themselves a spread is rounding.
    constant = std <= steps.abs().amax(0) * torch.finfo(torch.float32).eps
    return Scale(mean.float(), std.masked_fill(constant, 0).float())


def hold_out(series: Series, share: float, *, seed: int) -> tuple[Series, Series]:
    """Cut into the rest and a held-out share of every class: at least one of each class that has two."""
    if not 0 < share < 1:
        raise ValueError(f"share must lie between 0 and 1, got {share!r}; 0.2 holds out a fifth of every class")
    held = torch.zeros(len(series), dtype=torch.bool)
    for members in _by_class(series, seed, "hold out"):
        number = min(max(1, round(share * len(members))), len(members) - 1)
        held[members[:number]] = True
    return series.take((~held).nonzero().flatten()), series.take(held.nonzero().flatten())


def folds(series: Series, number: int, *, seed: int) -> list[tuple[Series, Series]]:
    """(rest, fold) for each of `number` folds, which together are the whole; every class is dealt out evenly."""
    _checks.whole("number", number, least=2, most=len(series))
    of = torch.empty(len(series), dtype=torch.int64)
    dealt = 0
    for members in _by_class(series, seed, "folds"):
        of[members] = (dealt + torch.arange(len(members))) % number
        dealt += len(members)
    return [
        (series.take((of != fold).nonzero().flatten()), series.take((of == fold).nonzero().flatten()))
        for fold in range(number)
    ]


def _by_class(series: Series, seed: int, purpose: str) -> Iterator[Tensor]:
    """The places of each class that is there, in an order that depends on the seed and the labels alone."""
    for label in range(len(series.classes)):
        members = (series.labels == label).nonzero().flatten()
        generator = Generator().manual_seed(mix(seed, purpose, label))
        if len(members):
            yield members[torch.randperm(len(members), generator=generator)]
