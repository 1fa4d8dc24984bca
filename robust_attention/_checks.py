"""Checks of arguments. Each says what must hold, what came and what to do."""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch


def positive(name: str, value: Any, *, optional: bool = False) -> None:
    """A finite number above zero (None too, where `optional`)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value) or value <= 0:
        none = " or None" if optional else ""
        raise ValueError(f"{name} must be a finite number above 0{none}, got {value!r}; pass for example {name}=1.0")


def whole(name: str, value: int, least: int, most: int | None = None) -> None:
    """A whole number of at least `least` (and at most `most`)."""
    wrong = isinstance(value, bool) or not isinstance(value, Integral)
    if wrong or value < least or (most is not None and value > most):
        range_ = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {range_}, got {value!r}; pass for example {name}={least}")


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """One of a few names."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}; choose one of them")


def bandwidth(name: str, value: float | None) -> None:
    """A width whose square is a number to divide by."""
    positive(name, value, optional=True)
    if value is not None and not 1e-15 <= value <= 1e15:
        raise ValueError(f"{name} must lie between 1e-15 and 1e15, got {value!r}; scale the data instead")


def tensor(name: str, value: object) -> None:
    """A tensor, not an array, a list or a number."""
    if not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}; pass torch.as_tensor({name})")
