"""A problem made by a formula, to try a pipeline on: which of three frequencies does a noisy wave have?"""

import math

import torch
from torch import Generator

from robust_attention._seeds import mix
from robust_attention.data.series import Problem, Series, pad

CLASSES = ("slow", "middle", "quick")
_CYCLES = (0.04, 0.08, 0.16)
"""Per step."""
_SHORTEST, _LONGEST = 18, 30
_LATEST = 0.4
"""Latest start, in cycles."""
_NOISE = 0.7


def sines(num_train: int = 72, num_test: int = 90) -> Problem:
    """Waves of two channels, a quarter of a cycle apart, with normal noise; they start anywhere in 0.4 of a cycle, and
    last 18 to 30 steps."""
    return Problem(_part("train", num_train), _part("test", num_test))


def _part(name: str, number: int) -> Series:
    generator = Generator().manual_seed(mix("sines", name))
    series, labels = [], torch.arange(number) % len(CLASSES)
    for label in labels.tolist():
        length = int(torch.randint(_SHORTEST, _LONGEST + 1, (), generator=generator))
        phase = _LATEST * torch.rand((), generator=generator)
        angle = 2 * math.pi * (_CYCLES[label] * torch.arange(length) + phase)
        noise = _NOISE * torch.randn(length, 2, generator=generator)
        series.append(torch.stack((angle.sin(), angle.cos()), 1) + noise)
    values, mask = pad(series, _LONGEST)
    return Series(name="sines", values=values, mask=mask, labels=labels, classes=CLASSES, ids=torch.arange(number))
