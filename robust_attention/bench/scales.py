"""What is measured at which scale."""

from dataclasses import dataclass

import torch

import robust_attention as ra
from robust_attention.bench.stack import StackShape
from robust_attention.ops import Method

Shape = tuple[int, int, int, int]
"""B, H, N, D."""

METHODS: dict[str, Method] = {
    "KDE": ra.KDE(),
    "RKDE": ra.RKDE(),
    "MoM": ra.MoM(),
    "SPKDE": ra.SPKDE(),
    "Fourier": ra.Fourier(),
}
DECODED: dict[str, Method] = {**METHODS, "MoM": ra.MoM(draw="poisson")}
"""The same where they decode: a longer prefix must keep its blocks."""
KINDS = ("operator", "growing", "decode", "step")
"""Kinds of rows, in the order in which they are measured."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """What to measure."""

    device: str
    dtype: torch.dtype
    operators: tuple[tuple[str, Shape, bool], ...] = ()
    """(method, [B, H, N, D], causal)."""
    growing: tuple[int, ...] = ()
    """Lengths for the exponents of time and memory."""
    growing_heads: int = 1
    decode: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
    """(heads, keys, methods)."""
    steps: tuple[tuple[StackShape, tuple[str, ...]], ...] = ()
    """Training steps, and the methods to take them with."""
    backward: bool = True
    seconds: float = 0.3
    """Spent on each time."""
    largest_square: int = 2**28
    """Scores up to which implementations that write the T × S matrix are run."""


def _vit(name: str, dim: int, heads: int, batch: int, depth: int = 12) -> StackShape:
    return StackShape(name=name, batch=batch, tokens=197, dim=dim, num_heads=heads, depth=depth, hidden=4 * dim)


def _text(batch: int, depth: int) -> StackShape:
    return StackShape(
        name=f"language model {depth}×128",
        batch=batch,
        tokens=256,
        dim=128,
        num_heads=8,
        depth=depth,
        hidden=2048,
        causal=True,
    )


_ALL = ("KDE", "MoM", "RKDE", "SPKDE")
_BOTH = (False, True)
_BIG, _VIT = (4, 16, 4096, 64), (256, 3, 197, 64)
SCALES = {
    "smoke": Scale(
        device="cpu",
        dtype=torch.float32,
        operators=(("KDE", (1, 2, 64, 16), False), ("RKDE", (1, 2, 64, 16), True), ("MoM", (1, 2, 64, 16), False)),
        growing=(64, 128),
        decode=((2, 64, _ALL),),
        steps=((_vit("tiny", 16, 2, 1, depth=1), ("RKDE",)),),
        seconds=0.0,
    ),
    "laptop": Scale(
        device="cpu",
        dtype=torch.float32,
        operators=tuple((name, (1, 8, 1024, 64), causal) for name in ("KDE", "RKDE", "MoM") for causal in _BOTH)
        + tuple((name, (4, 3, 197, 64), False) for name in METHODS),
        growing=(256, 512, 1024, 2048, 4096),
        growing_heads=2,
        decode=((8, 4096, ("KDE", "RKDE", "MoM")), (8, 1024, ("RKDE", "SPKDE"))),
        steps=((_vit("ViT tiny", 192, 3, 4), _ALL), (_text(2, 4), ("MoM", "RKDE"))),
        seconds=0.5,
        largest_square=2**24,
    ),
    "gpu": Scale(
        device="cuda",
        dtype=torch.bfloat16,
        operators=tuple((name, _BIG, causal) for name in ("KDE", "RKDE", "MoM") for causal in _BOTH)
        + tuple((name, _VIT, False) for name in METHODS)
        + tuple((name, (96, 8, 256, 16), True) for name in ("KDE", "RKDE", "MoM")),
        growing=(1024, 2048, 4096, 8192, 16384),
        growing_heads=16,
        decode=((16, 8192, ("KDE", "RKDE", "MoM")), (16, 2048, ("RKDE", "SPKDE"))),
        steps=(
            (_vit("ViT tiny", 192, 3, 256), _ALL),
            (_text(96, 16), ("MoM", "RKDE")),
            (_vit("ViT small", 384, 6, 128), _ALL),
            (_vit("ViT base", 768, 12, 64), _ALL),
        ),
        largest_square=2**31,
    ),
}
