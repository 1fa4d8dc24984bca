"""Steps that take something back."""

from collections.abc import Callable

Undo = Callable[[], None]


def all_of(steps: list[Undo]) -> None:
    """Take back everything, the last thing first."""
    for step in reversed(steps):
        step()
