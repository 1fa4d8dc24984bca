"""Robust attention in models that exist already: Hugging Face transformers, timm, plain torch.nn."""

from robust_attention.adapters._torchvision import import_torchvision
from robust_attention.adapters.robustify import Report, restore, robustify, weights_of

__all__ = ["Report", "import_torchvision", "restore", "robustify", "weights_of"]
