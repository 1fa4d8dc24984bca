"""One number that was measured, with all it takes to believe it, repeat it and compare it with another."""

import base64
import binascii
import math
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Protocol = Literal["pixel", "paper"]
Setting = int | float | str


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One metric of one model under one condition."""

    metric: str
    """What was measured: accuracy, top5, mce, aupr ..."""
    condition: str
    """On what: clean, noise 10%, PGD-20 1/255, all attacks 1/255 ..."""
    protocol: Protocol = "pixel"
    """How attacks are meant; `pixel`: on images in [0, 1]; `paper`: on normalised images, as published tables did."""
    value: float
    """The number; accuracies lie between 0 and 1."""
    n: int
    """How many examples it rests on."""
    right: str | None = None
    """The result of each example, see `pack`; None where the metric is no mean over examples."""
    settings: dict[str, Setting] = field(default_factory=dict)
    """All that the number depends on: eps, steps, step_size, restarts, queries, eot, draws, gradient, seed ..."""
    failed: tuple[str, ...] = ()
    """Names of the sanity checks that failed; a row with any is not to be believed as it stands."""

    def __post_init__(self) -> None:
        if self.protocol not in get_args(Protocol):
            raise ValueError(f"protocol must be one of {', '.join(get_args(Protocol))}, got {self.protocol!r}")
        if not math.isfinite(self.value):
            raise ValueError(f"value of {self.metric} ({self.condition}) must be finite, got {self.value}")
        if self.n < 1:
            raise ValueError(f"n of {self.metric} ({self.condition}) must be at least 1, got {self.n}")

    def to_dict(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries only: `json.dumps` takes it."""
        return {**asdict(self), "failed": list(self.failed)}

    @classmethod
    def from_dict(cls, stored: dict[str, Any]) -> "Measurement":
        """Undo `to_dict`."""
        known = {entry.name for entry in fields(cls)}
        if unknown := sorted(set(stored) - known):
            raise ValueError(f"a stored measurement must have the fields {sorted(known)}, got {unknown} besides")
        if missing := sorted({"metric", "condition", "value", "n"} - set(stored)):
            raise ValueError(f"a stored measurement must have the fields {missing}, got none; was the line cut?")
        return cls(**{**stored, "failed": tuple(stored.get("failed", ()))})


def pack(right: Tensor) -> str:
    """Results `[draws, N]`, each 0 or 1, as a string: how often each example was right, in as few bits as hold it."""
    if right.ndim != 2 or not len(right):
        raise ValueError(f"right must be [draws, N], got {list(right.shape)}; pass right[None] for a single draw")
    if not ((right == 0) | (right == 1)).all():
        raise ValueError("right must hold zeros and ones only, got other values; compare predictions with labels first")
    draws, number = right.shape
    width = draws.bit_length()
    place = torch.arange(width)
    bits = (right.cpu().long().sum(dim=0)[:, None] >> place & 1).flatten()
    bits = torch.nn.functional.pad(bits, (0, -len(bits) % 8)).reshape(-1, 8)
    coded = bytes((bits << torch.arange(8)).sum(dim=1).tolist())
    return f"{draws}x{number}:{base64.b64encode(coded).decode()}"


def unpack(text: str) -> Tensor:
    """Share of the draws in which each example was right, `[N]`: undoes `pack` up to the order of the draws."""
    found = re.fullmatch(r"([1-9]\d{0,8})x(\d{1,9}):([A-Za-z0-9+/=]*)", text)
    if not found:
        raise ValueError(f"packed results must look like 20x500:<base64>, got {text[:40]!r}")
    draws, number, width = int(found[1]), int(found[2]), int(found[1]).bit_length()
    try:
        coded = base64.b64decode(found[3], validate=True)
    except binascii.Error as error:
        raise ValueError(f"packed results must end in whole base64, got {text[-40:]!r} ({error})") from error
    wanted = (number * width + 7) // 8
    if len(coded) != wanted:
        raise ValueError(f"packed results of {draws}x{number} must be {wanted} bytes, got {len(coded)}; was it cut?")
    bits = torch.tensor(list(coded), dtype=torch.int64)[:, None] >> torch.arange(8) & 1
    count = (bits.flatten()[: number * width].reshape(number, width) << torch.arange(width)).sum(dim=1)
    if number and count.max() > draws:
        raise ValueError(f"packed results of {draws} draws must not count more, got {int(count.max())}")
    return count.float() / draws
