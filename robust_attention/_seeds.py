"""Seeds for everything random: each is a function of what it is for, never of how often some stream was used."""

from __future__ import annotations

import hashlib

__all__ = ["mix"]


def mix(*parts: int | str) -> int:
    """A 62-bit seed from its parts, the same in every process and version.

    Every part is written with its kind and its length before hashing, so ``mix(1, 23)``, ``mix(12, 3)`` and
    ``mix("1", 23)`` are unrelated seeds. 62 bits, because a torch.Generator takes a signed 64-bit number and a
    caller may add to it.
    """
    digest = hashlib.sha256()
    for part in parts:
        # bool is an int to Python, but mix(True) equal to mix(1) would be an accident
        if isinstance(part, bool) or not isinstance(part, (int, str)):
            raise ValueError(f"parts of a seed must be int or str, got {part!r}; convert it first")
        text = str(part).encode()
        digest.update(f"{'i' if isinstance(part, int) else 's'}{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest()[:8], "big") >> 2
