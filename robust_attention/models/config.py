"""Sizes of vision transformers, and the usual ones by name."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from robust_attention import _checks

Pool = Literal["cls", "mean"]

_PATCHES = {32: 4, 64: 8}
"""Patch sizes of the presets on small images; 16 on all others."""


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Sizes of the model. The defaults are small enough to learn digits within seconds on a CPU."""

    image_size: int = 8
    """Pixels along a side."""
    patch_size: int = 2
    """Pixels along a patch's side; one patch is one token."""
    channels: int = 1
    """Colour channels."""
    num_classes: int = 10
    """Width of the logits."""
    dim: int = 64
    """Width of a token."""
    depth: int = 2
    """Blocks."""
    num_heads: int = 2
    """Attention heads; divides `dim`."""
    mlp_ratio: float = 2.0
    """Width of a block's hidden layer over `dim`."""
    pool: Pool = "cls"
    """What the classifier reads: a token of its own, which sees patches through attention only, or the mean."""
    distilled: bool = False
    """A second token with a head of its own, which learns from a teacher (DeiT)."""
    qk_norm: bool = False
    """Normalise each head's queries and keys by a learnt layer norm."""
    drop_path: float = 0.0
    """Share of images that skip a branch of the last block in training; on a line from 0 at the first block."""
    dropout: float = 0.0
    """Share of numbers zeroed in training, after the embedding and in every branch."""
    mean: tuple[float, ...] | None = None
    """Subtracted from each channel of the images; None is 0.5."""
    std: tuple[float, ...] | None = None
    """Each channel is then divided by it; None is 0.5."""

    def __post_init__(self) -> None:
        for name in ("image_size", "patch_size", "channels", "num_classes", "dim", "depth", "num_heads"):
            _checks.whole(name, getattr(self, name), least=1)
        _checks.positive("mlp_ratio", self.mlp_ratio)
        _checks.one_of("pool", self.pool, get_args(Pool))
        if self.image_size % self.patch_size:
            raise ValueError(
                f"patch_size must divide image_size = {self.image_size}, got {self.patch_size}; "
                "choose another patch size"
            )
        if self.dim % self.num_heads:
            raise ValueError(
                f"num_heads must divide dim = {self.dim}, got {self.num_heads}; choose another number of heads"
            )
        if self.distilled and self.pool != "cls":
            raise ValueError(f'pool must be "cls" for a distilled model, whose heads read tokens, got {self.pool!r}')
        for name in ("drop_path", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must lie from 0 to below 1, got {getattr(self, name)}; 0.1 is usual")
        for name in ("mean", "std"):
            given = getattr(self, name)
            if given is not None and len(given) != self.channels:
                raise ValueError(
                    f"{name} must have one number a channel = {self.channels}, got {given}; or leave it at None"
                )
        for number in self.std or ():
            _checks.positive("std", number)

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    @property
    def num_extra(self) -> int:
        """Tokens in front of the patches."""
        return (self.pool == "cls") + self.distilled

    @property
    def num_tokens(self) -> int:
        return self.num_extra + self.num_patches


def _preset(overrides: dict[str, Any], **sizes: Any) -> ViTConfig:
    known = {"image_size": 224, "channels": 3, "num_classes": 1000, "mlp_ratio": 4.0, **sizes, **overrides}
    return ViTConfig(**{"patch_size": _PATCHES.get(known["image_size"], 16), **known})


def vit_tiny(**overrides: Any) -> ViTConfig:
    """5.7 M parameters at 224/16 and 1,000 classes. All presets cut images of 32 into patches of 4, of 64 into 8."""
    return _preset(overrides, dim=192, depth=12, num_heads=3)


def vit_small(**overrides: Any) -> ViTConfig:
    """22 M parameters at 224/16 and 1,000 classes."""
    return _preset(overrides, dim=384, depth=12, num_heads=6)


def vit_base(**overrides: Any) -> ViTConfig:
    """86 M parameters at 224/16 and 1,000 classes."""
    return _preset(overrides, dim=768, depth=12, num_heads=12)


def vit_lab(**overrides: Any) -> ViTConfig:
    """Half of `vit_tiny`, for many runs on small images: 2.7 M parameters, CIFAR-10's shape unless told otherwise."""
    return _preset(overrides, image_size=32, num_classes=10, dim=192, depth=6, num_heads=3)
