"""Steps that take something back: data, not closures, so that a deep copy of a model takes back its own changes."""

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass
class Put:
    """Set an attribute (a child, a mark) to what it was."""

    owner: nn.Module
    name: str
    value: Any

    def __call__(self) -> None:
        setattr(self.owner, self.name, self.value)


@dataclass
class Drop:
    """Remove a child that was added."""

    owner: nn.Module
    name: str

    def __call__(self) -> None:
        if hasattr(self.owner, self.name):
            delattr(self.owner, self.name)


_users: dict[int, int] = {}


@dataclass
class SwitchBack:
    """Give a transformers model the attention implementation that it had.

    Models that were built from one configuration object share it, and so the implementation: the last one that is
    restored switches it back.
    """

    model: Any
    old: str

    def take(self, name: str) -> None:
        """Switch to another implementation."""
        _users[id(self.model.config)] = _users.get(id(self.model.config), 0) + 1
        self.model.set_attn_implementation(name)

    def __call__(self) -> None:
        key = id(self.model.config)
        left = _users.pop(key, 1) - 1
        if left > 0:
            _users[key] = left
        else:
            self.model.set_attn_implementation(self.old)


Undo = Put | Drop | SwitchBack


def all_of(steps: list[Undo]) -> None:
    """Take back everything, the last thing first."""
    for step in reversed(steps):
        step()
