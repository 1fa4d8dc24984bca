"""The digits, and the ways to spoil images: what is hit, by what, and that nothing else changes."""

from importlib import resources
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from robust_attention.data import digits
from robust_attention.data.contaminate import KINDS, Contaminated, Kind, contaminate, from_patches, to_patches

every_kind = pytest.mark.parametrize("kind", KINDS)


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def images_of(number: int = 6, channels: int = 2, height: int = 8, width: int = 12) -> Tensor:
    return torch.rand(number, channels, height, width, generator=seeded(1))


def spoil(
    images: Tensor, kind: Kind = "noise", share: float = 0.25, patch_size: int = 4, seed: int = 0
) -> Contaminated:
    return contaminate(images, kind=kind, share=share, patch_size=patch_size, generator=seeded(seed))


def test_digits_are_the_known_ones() -> None:
    images, labels = digits.load()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert labels.dtype == torch.int64
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.equal(images.unique(), torch.arange(17) / 16)
    # The first rows of the first image, a 0, as every copy of the data set prints them.
    assert labels[0] == 0
    assert (16 * images[0, 0, :2]).tolist() == [[0, 0, 5, 13, 9, 1, 0, 0], [0, 0, 13, 15, 10, 15, 5, 0]]


def test_labels_belong_to_their_images() -> None:
    train, _, test = digits.split()
    nearest = torch.cdist(test.images.flatten(1), train.images.flatten(1)).argmin(dim=1)
    assert (train.labels[nearest] == test.labels).float().mean() > 0.97


def test_damaged_digits_fail_clearly() -> None:
    packed = bytearray(resources.files("robust_attention.data").joinpath("digits.bin").read_bytes())
    assert torch.equal(digits.unpack(bytes(packed)).images, digits.load().images)
    packed[len(packed) // 2] ^= 1
    message = rf"digits.bin must have SHA-256 217d9c659e.*, got [0-9a-f]{{64}} \({len(packed)} bytes\); .* reinstall"
    for damaged in (bytes(packed), bytes(packed[:-1])):
        with pytest.raises(ValueError, match=message if len(damaged) == len(packed) else "digits.bin must have SHA"):
            digits.unpack(damaged)


def numbered() -> digits.Digits:
    """Each image is its own number."""
    return digits.Digits(torch.arange(1797.0)[:, None, None, None], digits.load().labels)


def test_split_is_disjoint_and_leaves_nothing_out() -> None:
    source = numbered()
    parts = [part.images.flatten().long() for part in digits.split(source)]
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(1797))
    for numbers, part in zip(parts, digits.split(source), strict=True):
        assert (numbers.diff() > 0).all()  # in the order of the source
        assert torch.equal(part.labels, source.labels[numbers])


def test_split_has_equal_shares_of_every_class() -> None:
    whole = digits.load().labels.bincount()
    for part, share in zip(digits.split(), (0.55, 0.15, 0.30), strict=True):
        assert (part.labels.bincount(minlength=10) - share * whole).abs().max() <= 1
        assert abs(len(part.labels) - share * 1797) <= 5


def test_split_depends_on_its_seed_alone() -> None:
    before = torch.get_rng_state()
    first = digits.split()
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    for a, b in zip(first, digits.split(seed=0), strict=True):
        assert torch.equal(a.images, b.images)
    assert not torch.equal(digits.split(numbered()).test.images, digits.split(numbered(), seed=1).test.images)


def test_patches_are_cut_row_by_row() -> None:
    images = images_of()
    patches = to_patches(images, 4)
    assert torch.equal(patches, F.unfold(images, kernel_size=4, stride=4).transpose(1, 2))
    assert torch.equal(from_patches(patches, images.shape, 4), images)


@every_kind
@pytest.mark.parametrize("share", [0.0, 0.1, 0.2, 0.4, 1.0])
def test_share_of_hit_patches_is_exact(kind: Kind, share: float) -> None:
    images = images_of(height=24, width=24)
    spoiled, hit = spoil(images, kind, share)
    assert hit.dtype == torch.bool
    assert hit.sum(dim=1).tolist() == [{0.0: 0, 0.1: 4, 0.2: 7, 0.4: 14, 1.0: 36}[share]] * 6
    assert torch.equal((to_patches(spoiled, 4) != to_patches(images, 4)).any(dim=2), hit)


@every_kind
def test_untouched_patches_keep_every_bit(kind: Kind) -> None:
    images = images_of()
    before = images.clone()
    spoiled, hit = spoil(images, kind, 0.5)
    assert torch.equal(images, before)
    assert spoiled.dtype == images.dtype
    for image in range(6):
        for place in range(6):  # two rows of three patches
            row, column = 4 * (place // 3), 4 * (place % 3)
            window = (image, slice(None), slice(row, row + 4), slice(column, column + 4))
            assert torch.equal(spoiled[window], images[window]) == (not hit[image, place])


@every_kind
def test_hit_patches_are_nested_and_equal_as_the_share_grows(kind: Kind) -> None:
    images = images_of(height=24, width=24)
    smaller = spoil(images, kind, 0.0)
    for share in (0.1, 0.3, 0.6, 1.0):
        larger = spoil(images, kind, share)
        assert (larger.hit | ~smaller.hit).all()
        patches = to_patches(smaller.images, 4), to_patches(larger.images, 4)
        assert torch.equal(patches[0][smaller.hit], patches[1][smaller.hit])
        smaller = larger


def test_every_place_is_hit_alike() -> None:
    hit = spoil(torch.zeros(4000, 1, 8, 12), share=0.5).hit.float()
    assert (hit.mean(dim=0) - 0.5).abs().max() < 0.04
    together = (hit.T @ hit / 4000)[~torch.eye(6, dtype=torch.bool)]
    assert (together - 0.2).abs().max() < 0.04  # 3 of 6 places: a pair has (3/6)(2/5)


def uniform_error(values: Tensor) -> float:
    """Largest distance of the quantiles from those of the uniform distribution on [0, 1]."""
    values = values.flatten().sort().values
    return float((values - torch.linspace(0, 1, len(values))).abs().max())


def test_noise_is_uniform_in_every_pixel() -> None:
    images = images_of(height=24, width=24)
    spoiled = spoil(images, "noise", 1.0).images
    assert 0 <= spoiled.min() <= spoiled.max() <= 1
    assert uniform_error(spoiled) < 0.03
    assert len(spoiled.unique()) > 0.99 * spoiled.numel()
    assert uniform_error(spoil(torch.zeros_like(images), "noise", 1.0).images) < 0.03  # whatever was there before


def test_flat_patch_has_one_random_colour() -> None:
    patches = to_patches(spoil(images_of(50), "flat", 1.0).images, 4).reshape(50, 6, 2, 16)
    assert torch.equal(patches, patches[..., :1].expand_as(patches))
    colours = patches[..., 0]
    assert len(colours.unique()) > 0.99 * colours.numel()  # its own in every image, patch and channel
    assert uniform_error(colours) < 0.1


def test_foreign_patch_comes_from_another_image() -> None:
    patches = to_patches(images_of(), 4)
    spoiled = to_patches(spoil(images_of(), "foreign", 1.0).images, 4)
    donors, shifts = set(), set()
    for image in range(6):
        for place in range(6):
            ((donor, origin),) = (patches == spoiled[image, place]).all(dim=2).nonzero().tolist()
            assert donor != image
            donors.add(donor)
            shifts.add(origin - place)
    assert donors == set(range(6))
    assert len(shifts) > 5  # from anywhere in the other image


@every_kind
def test_spoilt_images_depend_on_their_generator_alone(kind: Kind) -> None:
    before = torch.get_rng_state()
    first = spoil(images_of(), kind)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    for a, b, c in zip(first, spoil(images_of(), kind), spoil(images_of(), kind, seed=1), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


CALLS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "blur"}, r"kind must be one of noise, flat, foreign, got 'blur'"),
    ({"share": -0.1}, r"share must lie between 0 and 1, got -0.1; 0.25 overwrites a quarter"),
    ({"share": 25}, r"share must lie between 0 and 1, got 25; 0.25 overwrites a quarter"),
    ({"share": float("nan")}, r"share must lie between 0 and 1, got nan"),
    ({"images": images_of()[0]}, r"images must be \[B, C, H, W\], got \[2, 8, 12\]; add the missing dimensions"),
    ({"patch_size": 6}, r"patch_size must divide the image's height and width \[8, 12\], got 6"),
    ({"patch_size": 8}, r"patch_size must divide the image's height and width \[8, 12\], got 8"),
    ({"patch_size": 0}, r"patch_size must divide the image's height and width \[8, 12\], got 0"),
    ({"kind": "foreign", "images": images_of()[:1]}, r"kind 'foreign' must have at least 2 images .*, got 1"),
]


@pytest.mark.parametrize(("change", "message"), CALLS, ids=[str(list(change.items()))[:30] for change, _ in CALLS])
def test_contaminate_fails_clearly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        spoil(**{"images": images_of(), **change})
