"""Contaminated time series: spikes, lost steps, steps in the wrong order, channels of noise."""

from dataclasses import replace
from typing import Literal, get_args

import torch
from torch import Generator, Tensor

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.data.series import Series

Kind = Literal["spike", "drop", "swap", "channel"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def contaminate_series(
    series: Series, *, kind: Kind, share: float, seed: int, std: Tensor, size: float = 5.0
) -> Series:
    """Spoil a share of every series.

    Args:
        kind: `spike`: every channel of the hit steps moves by ±`size` standard deviations. `drop`: the hit steps read 0
            in every channel, as of a sensor that fell out. `swap`: the hit steps change places among each other.
            `channel`: normal noise of `size` standard deviations is added to whole channels.
        share: of the steps (of the channels), 0 to 1. Above 0 at least one is hit, and at least two are swapped.
        seed: what happens to a series depends on the seed, the kind and its place in its file alone. Larger shares hit
            the same steps and more, so that curves over the share, and models compared on it, are paired.
        std: `[C]`, of each channel, usually over the training set.
    """
    _checks.one_of("kind", kind, KINDS)
    _checks.positive("size", size)
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}; 0.1 spoils a tenth")
    if std.shape != (series.channels,):
        raise ValueError(f"std must have one number a channel, [{series.channels}], got {list(std.shape)}")
    if share == 0:
        return series
    values = series.values.clone()
    for place, number in enumerate(series.ids.tolist()):
        generator = Generator().manual_seed(mix(seed, "contaminate", kind, number))
        real = series.mask[place]
        if real.any():
            values[place, real] = _spoilt(values[place, real], kind, share, size * std.cpu(), generator)
    return replace(series, values=values)


def _spoilt(steps: Tensor, kind: Kind, share: float, size: Tensor, generator: Generator) -> Tensor:
    """One series `[l, C]` without padding. Everything is drawn for all of it, whatever the share."""
    length, channels = steps.shape
    if kind == "channel":
        order = torch.randperm(channels, generator=generator)[: _number(share, channels)]
        noise = torch.randn(length, channels, generator=generator) * size
        steps[:, order] += noise[:, order]
        return steps
    hit = torch.randperm(length, generator=generator)[: _number(share, length, 2 if kind == "swap" else 1)]
    if kind == "spike":
        sign = torch.randint(2, (length, channels), generator=generator) * 2 - 1
        steps[hit] += (sign * size)[hit]
    elif kind == "drop":
        steps[hit] = 0
    else:
        steps[hit] = steps[hit.roll(1)]
    return steps


def _number(share: float, whole: int, least: int = 1) -> int:
    return min(max(least, round(share * whole)), whole)
