"""Token contamination: overwrite a share of an image's patches, and say which."""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor

Kind = Literal["noise", "flat", "foreign"]
KINDS: tuple[Kind, ...] = get_args(Kind)


class Contaminated(NamedTuple):
    """Images `[B, C, H, W]` in [0, 1], and `[B, P]`: which patches, row by row, were overwritten."""

    images: Tensor
    hit: Tensor


def contaminate(images: Tensor, *, kind: Kind, share: float, patch_size: int, generator: Generator) -> Contaminated:
    """Overwrite `round(share * P)` of every image's P patches.

    Args:
        images: `[B, C, H, W]` in [0, 1]; H and W are multiples of `patch_size`.
        kind: `noise`: every pixel uniform in [0, 1]. `flat`: one random colour a patch. `foreign`: patches of
            other images of the batch, from anywhere in them.
        share: Share of the patches, 0 to 1.
        generator: Equal states hit nested sets of patches with equal content as the share grows, so that
            curves over the share, and models compared on it, are paired.
    """
    _check(images, kind, share, patch_size)
    patches_BPX = to_patches(images, patch_size)
    num_images, num_patches, _ = patches_BPX.shape
    # Everything is drawn for all patches, whatever the share: this is what makes the sets nested.
    order = torch.rand(num_images, num_patches, generator=generator).argsort(dim=1)
    content = _content(patches_BPX, kind, images.shape[1], generator)
    hit = torch.zeros(num_images, num_patches, dtype=torch.bool)
    hit.scatter_(1, order[:, : round(share * num_patches)], True)
    hit = hit.to(images.device)
    spoiled = torch.where(hit[:, :, None], content, patches_BPX)
    return Contaminated(from_patches(spoiled, images.shape, patch_size), hit)


def to_patches(images: Tensor, patch_size: int) -> Tensor:
    """Cut `[B, C, H, W]` into `[B, P, C * patch_size**2]`, row by row."""
    batch, channels, height, width = images.shape
    rows, columns = height // patch_size, width // patch_size
    cut = images.reshape(batch, channels, rows, patch_size, columns, patch_size)
    return cut.permute(0, 2, 4, 1, 3, 5).reshape(batch, rows * columns, channels * patch_size**2)


def from_patches(patches: Tensor, shape: torch.Size, patch_size: int) -> Tensor:
    """Undo `to_patches` for images of `shape`."""
    batch, channels, height, width = shape
    rows, columns = height // patch_size, width // patch_size
    cut = patches.reshape(batch, rows, columns, channels, patch_size, patch_size)
    return cut.permute(0, 3, 1, 4, 2, 5).reshape(shape)


def _content(patches_BPX: Tensor, kind: Kind, channels: int, generator: Generator) -> Tensor:
    batch, num_patches, width = patches_BPX.shape
    if kind == "noise":
        content = torch.rand(patches_BPX.shape, generator=generator)
    elif kind == "flat":
        colour = torch.rand(batch, num_patches, channels, 1, generator=generator)
        content = colour.expand(-1, -1, -1, width // channels).reshape(patches_BPX.shape)
    else:
        # A shift between 1 and B-1 never meets the image itself.
        shift = torch.randint(1, batch, (batch, num_patches), generator=generator)
        donor = (torch.arange(batch)[:, None] + shift) % batch
        place = torch.randint(num_patches, (batch, num_patches), generator=generator)
        return patches_BPX[donor.to(patches_BPX.device), place.to(patches_BPX.device)]
    return content.to(patches_BPX)


def _check(images: Tensor, kind: str, share: float, patch_size: int) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}")
    if not 0 <= share <= 1:
        raise ValueError(f"share must lie between 0 and 1, got {share}; 0.25 overwrites a quarter of the patches")
    if images.ndim != 4:
        raise ValueError(f"images must be [B, C, H, W], got {list(images.shape)}; add the missing dimensions")
    if patch_size < 1 or images.shape[2] % patch_size or images.shape[3] % patch_size:
        raise ValueError(
            f"patch_size must divide the image's height and width {list(images.shape[2:])}, got {patch_size}"
        )
    if kind == "foreign" and len(images) < 2:
        raise ValueError(f"kind 'foreign' must have at least 2 images to take patches from, got {len(images)}")
