"""Models whose attention is one of the package's methods."""

from robust_attention.models.config import ViTConfig, vit_base, vit_lab, vit_small, vit_tiny
from robust_attention.models.vit import ViT

__all__ = ["ViT", "ViTConfig", "vit_base", "vit_lab", "vit_small", "vit_tiny"]
