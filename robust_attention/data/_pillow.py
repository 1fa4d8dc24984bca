"""Pillow, where it is installed."""

from __future__ import annotations

from types import ModuleType


def pillow() -> ModuleType:
    """`PIL.Image`, or an error that says what to install."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("images are decoded by Pillow; install it: pip install 'robust-attention[vision]'") from error
    return Image
