"""Robust attention in models that exist already: Hugging Face transformers, timm, plain torch.nn."""

from robust_attention.adapters.robustify import Report, restore, robustify, weights_of

__all__ = ["Report", "restore", "robustify", "weights_of"]
