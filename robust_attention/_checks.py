"""Checks of arguments. Each says what must hold, what came and what to do."""

import math
from collections.abc import Iterable


def positive(name: str, value: float | None, *, optional: bool = False) -> None:
    """A finite number above zero (None too, where `optional`)."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        none = " or None" if optional else ""
        raise ValueError(f"{name} must be a finite number above 0{none}, got {value!r}; pass for example {name}=1.0")


def whole(name: str, value: int, least: int, most: int | None = None) -> None:
    """A whole number of at least `least` (and at most `most`)."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least or (most is not None and value > most):
        range_ = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ValueError(f"{name} must be a whole number {range_}, got {value!r}; pass for example {name}={least}")


def one_of(name: str, value: object, choices: Iterable[str]) -> None:
    """One of a few names."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}; choose one of them")
