"""The corruptions: the laws that all kinds keep, and for each what it should do, reckoned in another way."""

import colorsys
import io
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from robust_attention.data.corruptions import (
    CORRUPTIONS,
    KINDS,
    Corrupted,
    _filters,
    _noise_and_blur,
    _weather,
    corrupt,
)
from robust_attention.data.corruptions._draws import Draws
from robust_attention.data.corruptions.severities import MEANING, setting
from robust_attention.data.images import Stored

Image = pytest.importorskip("PIL.Image")

every_kind = pytest.mark.parametrize("kind", KINDS)
SIZES = (24, 32, 64, 96)

# Published constants that do not order the severities by mean squared change; the reason is printed by the test.
NOT_MONOTONE = {
    "glass_blur": "a severity may trade farther moves for fewer rounds",
    "elastic_transform": "from severity 3 the picture is moved less and warped more",
    "frost": "a darker picture under more ice may be nearer to the clean one",
    "motion_blur": "at 32 pixels, severities 3 and 4 have the same deviation",
}


def scenes(number: int = 6, size: int = 32, channels: int = 3, seed: int = 0) -> Tensor:
    """Smooth shapes with edges: natural enough for blur and compression to matter."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(number, channels, 5, 5, generator=generator)
    smooth = F.interpolate(coarse, size, mode="bicubic", align_corners=False)
    shapes = F.interpolate(torch.rand(number, 1, 9, 9, generator=generator), size, mode="bilinear") > 0.55
    fine = 0.05 * torch.randn(number, channels, size, size, generator=generator)
    return (0.7 * smooth + 0.3 * shapes + fine).clamp(0, 1)


def change(images: Tensor, kind: str, severity: int, seed: int = 0) -> float:
    return float((corrupt(images, kind=kind, severity=severity, seed=seed) - images).square().mean())


# --- laws of every kind


def test_kinds_are_the_fifteen_in_their_groups() -> None:
    assert {group: len(kinds) for group, kinds in CORRUPTIONS.items()} == {
        "noise": 3, "blur": 4, "weather": 4, "digital": 4,
    }  # fmt: skip
    assert len(set(KINDS)) == 15
    assert set(MEANING) == set(KINDS)


@every_kind
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_corrupted_images_stay_images_and_differ(kind: str, channels: int, size: int) -> None:
    images = scenes(2, size, channels)
    before = images.clone()
    for severity in (1, 5):
        spoiled = corrupt(images, kind=kind, severity=severity, seed=0)
        assert spoiled.shape == images.shape
        assert spoiled.dtype == images.dtype
        assert 0 <= float(spoiled.min()) <= float(spoiled.max()) <= 1
        assert ((spoiled - images).abs().amax((1, 2, 3)) > 2 / 255).all()
    assert torch.equal(images, before)


@every_kind
def test_corruption_of_an_image_does_not_depend_on_its_batch(kind: str) -> None:
    images = scenes(5)
    together = corrupt(images, kind=kind, severity=3, seed=4, first=10)
    assert torch.equal(corrupt(images, kind=kind, severity=3, seed=4, first=10), together)
    for place in (0, 3):
        alone = corrupt(images[place : place + 1], kind=kind, severity=3, seed=4, first=10 + place)
        assert torch.equal(alone[0], together[place])


@every_kind
def test_draws_depend_on_seed_severity_and_number_but_not_on_the_global_seed(kind: str) -> None:
    images = scenes(1).expand(3, -1, -1, -1)
    before = torch.get_rng_state()
    first = corrupt(images, kind=kind, severity=2, seed=0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert torch.equal(corrupt(images, kind=kind, severity=2, seed=0), first)
    draws = kind not in ("defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression")
    assert torch.equal(first[0], first[1]) == (not draws)
    assert torch.equal(corrupt(images, kind=kind, severity=2, seed=1), first) == (not draws)


@every_kind
@pytest.mark.parametrize("size", [32, 64])
def test_change_grows_with_the_severity(kind: str, size: int) -> None:
    changes = [change(scenes(40, size), kind, severity) for severity in range(1, 6)]
    if kind in NOT_MONOTONE:
        pytest.skip(f"published so: {NOT_MONOTONE[kind]}")
    assert all(less < more for less, more in itertools.pairwise(changes)), changes


@pytest.mark.parametrize("kind", sorted(NOT_MONOTONE))
def test_least_severity_leaves_more_of_the_picture_than_the_greatest(kind: str) -> None:
    """For the kinds whose mean squared change is not in order: how well the picture is still correlated, at 64."""
    images = scenes(40, 64)

    def correlation(severity: int) -> float:
        spoiled = corrupt(images, kind=kind, severity=severity, seed=0)
        x, y = (part - part.mean((1, 2, 3), keepdim=True) for part in (images, spoiled))
        return float(F.cosine_similarity(x.flatten(1), y.flatten(1)).mean())

    if kind == "elastic_transform":  # moved less and less; what is left is that something happens at all
        assert all(correlation(severity) < 0.98 for severity in range(1, 6))
    else:
        assert correlation(1) > correlation(5) + 0.01


@every_kind
def test_half_precision_and_empty_batches_are_taken(kind: str) -> None:
    images = scenes(2)
    half = corrupt(images.half(), kind=kind, severity=3, seed=0)
    assert half.dtype == torch.float16
    # The picture itself was rounded, and a photon or a flake may fall the other way.
    assert (half.float() - corrupt(images.half().float(), kind=kind, severity=3, seed=0)).abs().max() < 1e-3
    assert corrupt(images[:0], kind=kind, severity=3, seed=0).shape == (0, 3, 32, 32)


def test_autocast_does_not_reach_the_corruptions() -> None:
    plain = corrupt(scenes(), kind="zoom_blur", severity=3, seed=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(corrupt(scenes(), kind="zoom_blur", severity=3, seed=0), plain)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@every_kind
def test_devices_agree_to_rounding(kind: str) -> None:
    images = scenes(4, 64)
    there = corrupt(images.cuda(), kind=kind, severity=4, seed=0).cpu()
    torch.testing.assert_close(there, corrupt(images, kind=kind, severity=4, seed=0), rtol=0, atol=1e-4)


FAILS: list[tuple[dict[str, Any], str]] = [
    ({"kind": "rain"}, r"kind must be one of 'gaussian_noise', .*, got 'rain'"),
    ({"severity": 0}, r"severity must be a whole number from 1 to 5, got 0"),
    ({"severity": 6}, r"severity must be a whole number from 1 to 5, got 6"),
    ({"first": -1}, r"first must be a whole number of at least 0, got -1"),
    ({"images": scenes()[0]}, r"images must be \[B, C, S, S\] .* got \[3, 32, 32\]"),
    ({"images": scenes()[:, :2]}, r"with 1 or 3 channels .* got \[6, 2, 32, 32\]"),
    ({"images": scenes()[..., :30]}, r"images must be \[B, C, S, S\] .* got \[6, 3, 32, 30\]"),
    ({"images": scenes(size=23)}, r"S of at least 24, got \[6, 3, 23, 23\]; enlarge"),
    ({"images": (255 * scenes()).byte()}, r"images must be floating point in \[0, 1\], got torch.uint8"),
    ({"images": 2 * scenes() - 1}, r"images must lie in \[0, 1\], got -1 to .*; corrupt them before they are norm"),
    ({"images": scenes() * torch.nan}, r"images must lie in \[0, 1\], got nan"),
]


@pytest.mark.parametrize(("changed", "message"), FAILS, ids=range(len(FAILS)))
def test_corrupt_fails_clearly(changed: dict[str, Any], message: str) -> None:
    call = {"images": scenes(), "kind": "fog", "severity": 1, "seed": 0} | changed
    with pytest.raises(ValueError, match=message):
        corrupt(call.pop("images"), **call)


# --- settings


def test_published_sizes_have_the_published_constants() -> None:
    assert setting("gaussian_noise", 5, 224) == (0.38,)
    assert setting("shot_noise", 3, 64) == (50,)
    assert setting("motion_blur", 4, 32) == (8, 2)
    assert setting("glass_blur", 5, 224) == (1.5, 4, 2)
    assert setting("jpeg_compression", 1, 32) == (80,)
    assert setting("elastic_transform", 2, 224) == pytest.approx((2 * 244, 0.08 * 244, 0.2 * 244))


def test_lengths_grow_with_the_size_and_nothing_else_does() -> None:
    assert setting("defocus_blur", 1, 192) == pytest.approx((3 * 192 / 224, 0.1))
    assert setting("snow", 5, 128)[4:6] == pytest.approx((12 * 128 / 224, 12 * 128 / 224))
    assert setting("snow", 5, 128)[:4] == (0.55, 0.3, 2.5, 0.85)
    assert setting("fog", 2, 128) == (2, 2)
    assert setting("fog", 2, 48) == (0.7, 3)  # nearer to 64
    assert setting("fog", 2, 40) == (0.5, 3)  # nearer to 32


# --- each kind, reckoned in another way


def grey(number: int = 20, level: float = 0.5, size: int = 32) -> Tensor:
    return torch.full((number, 3, size, size), level)


def test_gaussian_noise_has_its_deviation() -> None:
    noise = corrupt(grey(), kind="gaussian_noise", severity=4, seed=0) - 0.5
    assert float(noise.std()) == pytest.approx(0.09, rel=0.03)
    assert abs(float(noise.mean())) < 0.002


@pytest.mark.parametrize("level", [0.2, 0.5])
def test_shot_noise_counts_photons(level: float) -> None:
    shot = corrupt(grey(level=level), kind="shot_noise", severity=3, seed=0)
    assert torch.equal((100 * shot).round() / 100, shot)  # 100 photons at full brightness
    assert float(shot.mean()) == pytest.approx(level, rel=0.01)
    assert float(shot.var()) == pytest.approx(level / 100, rel=0.05)


def test_impulse_noise_hits_its_share_half_black_half_white() -> None:
    hit = corrupt(grey(), kind="impulse_noise", severity=5, seed=0)
    for value in (0.0, 1.0):
        assert float((hit == value).float().mean()) == pytest.approx(0.035, rel=0.06)
    assert float((hit == 0.5).float().mean()) == pytest.approx(0.93, rel=0.01)
    assert not torch.equal(hit[:, 0] == 0.5, hit[:, 1] == 0.5)  # each channel on its own


def impulse(size: int = 33) -> Tensor:
    """One white point in the middle."""
    point = torch.zeros(1, 1, size, size)
    point[..., size // 2, size // 2] = 1
    return point


def test_disk_is_round_and_keeps_the_light() -> None:
    spread = _filters.disk_blur(impulse(), 5, 0.01)[0, 0]
    axis = torch.arange(33) - 16
    inside = axis[:, None] ** 2 + axis**2 <= 25
    torch.testing.assert_close(spread, inside / inside.sum())
    soft = _filters.disk_blur(impulse(), 1, 0.5)[0, 0]
    edge = math.exp(-2) / (1 + 2 * math.exp(-2))  # a step from the middle of a Gaussian of deviation 0.5
    assert float(soft[16, 18]) == pytest.approx(0.2 * edge * (1 - 2 * edge), rel=1e-4)
    assert float(soft.sum()) == pytest.approx(1, abs=1e-5)
    assert float(_filters.disk_blur(scenes(), 4, 0.5).mean()) == pytest.approx(float(scenes().mean()), rel=0.02)
    turned = _filters.disk_blur(scenes().transpose(2, 3), 3, 0.5).transpose(2, 3)
    torch.testing.assert_close(turned, _filters.disk_blur(scenes(), 3, 0.5))


def test_motion_blur_goes_one_way_in_its_direction() -> None:
    for degrees, expected in ((0, (0, -1)), (90, (-1, 0)), (45, (-1, -1))):
        spread = _filters.motion_blur(impulse(), 4, 2.0, torch.tensor([float(degrees)]))[0, 0]
        assert float(spread.sum()) == pytest.approx(1, abs=1e-4)
        weight = [math.exp(-(step**2) / 8) for step in range(9)]
        for step in range(9):
            along = step if degrees != 45 else round(step / math.sqrt(2))
            row, column = 16 + along * expected[0], 16 + along * expected[1]
            if degrees != 45:
                assert float(spread[row, column]) == pytest.approx(weight[step] / sum(weight), abs=1e-5)
            assert float(spread[row, column]) > 0
        assert float(spread[17:, 17:].sum()) == 0


def test_zoom_matrix_enlarges_linearly() -> None:
    ramp = torch.arange(32.0).double()
    # 32 / 1.25 = 25.6: 26 pixels from the 3rd on become round(32.5) = 32.
    torch.testing.assert_close(_filters.zoom_matrix(32, 1.25) @ ramp, 3.0 + ramp * 25 / 31)
    assert torch.equal(_filters.zoom_matrix(32, 1.0), torch.eye(32).double())


def test_gaussian_matrix_folds_its_border() -> None:
    constant = torch.ones(20).double()
    for border in ("nearest", "mirror"):
        matrix = _filters.gaussian_matrix(20, 15.0, truncate=4, border=border)  # type: ignore[arg-type]
        torch.testing.assert_close(matrix @ constant, constant)
    matrix = _filters.gaussian_matrix(4, 1.0, truncate=1, border="mirror")
    weight = math.exp(-0.5)
    edge, middle = weight / (1 + 2 * weight), 1 / (1 + 2 * weight)
    torch.testing.assert_close(matrix[0], torch.tensor([middle + edge, edge, 0, 0]).double())
    # Nine-tenths of a Gaussian's light lie within 1.645 deviations.
    wide = _filters.gaussian_matrix(201, 20.0, truncate=4, border="nearest")[100]
    assert float(wide[100 - 33 : 100 + 34].sum()) == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(("size", "farthest"), [(24, 1), (30, 3)])
def test_glass_moves_pixels_as_a_loop_over_them_does(size: int, farthest: int) -> None:
    source = _noise_and_blur._taken_from(size, farthest, Draws([7, 8], torch.device("cpu")))
    drawn = Draws([7, 8], torch.device("cpu")).uniform(2, size, size)
    move = (2 * farthest * drawn).floor().long() - farthest
    for image in range(2):
        holds = torch.arange(size * size).view(size, size)
        for row in range(size - farthest, farthest, -1):
            for column in range(size - farthest, farthest, -1):
                down, right = move[image, :, row, column].tolist()
                holds[row, column] = holds[row + down, column + right]
        assert torch.equal(source[image].view(size, size), holds)


def test_glass_leaves_colours_whole() -> None:
    """Pixels move as one: no new colour without the blur (severity 1 at 32 pixels blurs nothing)."""
    images = scenes(2)
    spoiled = corrupt(images, kind="glass_blur", severity=1, seed=0)
    for clean, glass in zip(images, spoiled, strict=True):
        colours = {tuple(pixel) for pixel in clean.flatten(1).T.tolist()}
        assert {tuple(pixel) for pixel in glass.flatten(1).T.tolist()} <= colours


def test_snow_whitens_and_falls() -> None:
    dark = corrupt(grey(level=0.1), kind="snow", severity=1, seed=0)
    whiter = 0.95 * 0.1 + 0.05 * (1.5 * 0.1 + 0.5)
    assert float(dark.min()) == pytest.approx(whiter, abs=1e-6)
    assert float(dark.max()) > whiter + 0.05
    assert torch.equal(dark[:, 0], dark[:, 1])


def test_plasma_is_a_cloud_that_gets_rougher_as_detail_decays_less() -> None:
    def roughness(decay: float) -> float:
        cloud = _weather._plasma(64, decay, Draws(range(20), torch.device("cpu")))
        assert cloud.shape == (20, 64, 64)
        assert torch.equal(cloud.amin((1, 2)), torch.zeros(20))
        assert torch.equal(cloud.amax((1, 2)), torch.ones(20))
        return float(cloud.diff(dim=1).abs().mean())

    assert roughness(3) < roughness(2) < roughness(1.4)


def test_plasma_follows_the_diamond_square_rule() -> None:
    size, decay = 8, 2.0
    heights = 2 * Draws([3], torch.device("cpu")).uniform(size, size)[0] - 1
    cloud = torch.zeros(size, size)
    step, wobble = size, 100.0
    while step >= 2:
        half = step // 2
        for row in range(half, size, step):
            for column in range(half, size, step):
                corners = [cloud[(row + i) % size, (column + j) % size] for i in (-half, half) for j in (-half, half)]
                cloud[row, column] = sum(corners) / 4 + wobble**2 * heights[row, column]
        for row in range(0, size, half):
            for column in range((row + half) % step, size, step):
                around = ((half, 0), (-half, 0), (0, half), (0, -half))
                corners = [cloud[(row + i) % size, (column + j) % size] for i, j in around]
                cloud[row, column] = sum(corners) / 4 + wobble**2 * heights[row, column]
        step, wobble = half, wobble / decay
    cloud = (cloud - cloud.min()) / (cloud.max() - cloud.min())
    found = _weather._plasma(size, decay, Draws([3], torch.device("cpu")))[0]
    torch.testing.assert_close(found, cloud, rtol=1e-4, atol=1e-5)


def test_fog_keeps_the_brightest_value_as_its_limit() -> None:
    images = 0.8 * scenes()
    fogged = corrupt(images, kind="fog", severity=5, seed=0)
    assert (fogged.amax((1, 2, 3)) <= images.amax((1, 2, 3)) + 1e-6).all()
    assert float(fogged.std()) < float(images.std())


def test_frost_is_bright_and_bluish() -> None:
    ice = _weather._ice(3, 48, Draws(range(60), torch.device("cpu")))
    assert 0.57 < float(ice.mean()) < 0.67
    assert float(ice[:, 2].mean()) > float(ice[:, 0].mean()) + 0.05
    assert 0.08 < float(ice.mean(1).std((1, 2)).mean()) < 0.11
    share, amount = setting("frost", 2, 32)
    difference = corrupt(grey(40, 0.2), kind="frost", severity=2, seed=0).mean() - share * 0.2
    assert float(difference) == pytest.approx(amount * float(ice.mean()), rel=0.12)


def test_brightness_raises_the_value_of_the_colour() -> None:
    images = scenes(1)
    images[..., 0, 0] = 0
    images[0, :, 3, 5] = torch.tensor([0.95, 0.5, 0.2])  # cannot rise by as much
    raised = corrupt(images, kind="brightness", severity=3, seed=0)
    for row, column in ((0, 0), (3, 5), (17, 30), (31, 2)):
        hue, saturation, value = colorsys.rgb_to_hsv(*images[0, :, row, column].tolist())
        expected = colorsys.hsv_to_rgb(hue, saturation, min(value + 0.15, 1))
        assert raised[0, :, row, column].tolist() == pytest.approx(expected, abs=1e-5)


def test_contrast_shrinks_about_the_mean_of_each_channel() -> None:
    images = scenes()
    mean = images.mean((2, 3), keepdim=True)
    found = corrupt(images, kind="contrast", severity=5, seed=0)
    torch.testing.assert_close(found, mean + 0.15 * (images - mean))


def as_picture(image: Tensor) -> Any:
    pixels = (255 * image).round().byte().permute(1, 2, 0)
    return Image.frombytes("RGB", (image.shape[2], image.shape[1]), bytes(pixels.flatten().tolist()))


def as_tensor(picture: Any) -> Tensor:
    raw = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return raw.view(picture.height, picture.width, 3).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize(("size", "share"), [(32, 0.95), (32, 0.65), (64, 0.7)])
def test_pixelate_equals_an_image_librarys_box(size: int, share: float) -> None:
    severity = next(s for s in range(1, 6) if setting("pixelate", s, size) == (share,))
    image = (255 * scenes(1, size)).round() / 255
    picture = as_picture(image[0])
    fewer = int(size * share)
    expected = as_tensor(
        picture.resize((fewer, fewer), Image.Resampling.BOX).resize((size, size), Image.Resampling.BOX)
    )
    found = corrupt(image, kind="pixelate", severity=severity, seed=0)[0]
    # The library rounds after each of its four passes.
    assert (found - expected).abs().max() < 2.1 / 255


def test_jpeg_is_the_librarys() -> None:
    image = scenes(2)
    packed = io.BytesIO()
    as_picture(image[1]).save(packed, "JPEG", quality=40)
    expected = as_tensor(Image.open(packed))
    found = corrupt(image, kind="jpeg_compression", severity=5, seed=0)[1]
    torch.testing.assert_close(found, expected)
    single = corrupt(scenes(2, channels=1), kind="jpeg_compression", severity=1, seed=0)
    assert (single - scenes(2, channels=1)).abs().mean() < 0.03


def test_elastic_moves_the_corners_of_its_triangle() -> None:
    from robust_attention.data.corruptions import _digital

    size, farthest = 33, 4.0
    place = torch.arange(float(size))
    grid = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1)
    where = _digital._affine(grid, size, farthest, Draws([5], torch.device("cpu")))[0]
    moves = farthest * (2 * Draws([5], torch.device("cpu")).uniform(3, 2)[0] - 1)
    for corner, move in zip(((27, 27), (27, 5), (5, 5)), moves, strict=True):
        # The picture at the moved corner comes from the corner; `where` is linear, so it may be read between pixels.
        x, y = (torch.tensor(corner) + move).tolist()
        origin = where[0, 0] + x * (where[0, 1] - where[0, 0]) + y * (where[1, 0] - where[0, 0])
        assert origin.tolist() == pytest.approx(corner, abs=1e-3)


def test_sampling_at_the_pixels_themselves_changes_nothing() -> None:
    from robust_attention.data.corruptions import _digital

    images, place = scenes(), torch.arange(32.0)
    grid = torch.stack(torch.meshgrid(place, place, indexing="xy"), -1).expand(6, -1, -1, -1)
    for centres in (True, False):
        torch.testing.assert_close(_digital._sample(images, grid, centres=centres), images, rtol=0, atol=1e-4)
    beyond = _digital._sample(images, grid + torch.tensor([1.0, 0.0]), centres=True)
    torch.testing.assert_close(beyond[..., -1], images[..., -2], rtol=0, atol=1e-4)  # mirrored at the centre
    beyond = _digital._sample(images, grid + torch.tensor([1.0, 0.0]), centres=False)
    torch.testing.assert_close(beyond[..., -1], images[..., -1], rtol=0, atol=1e-4)  # mirrored at the rim


# --- as a set


def stored() -> Stored:
    return Stored((255 * scenes(8)).round().byte(), torch.arange(8) % 3, num_classes=3, name="scenes")


@every_kind
def test_corrupted_set_reads_the_same_images_in_any_order(kind: str) -> None:
    spoiled = Corrupted(stored(), kind=kind, severity=3, seed=9)
    assert torch.equal(spoiled.labels, stored().labels)
    assert spoiled.name == f"scenes, {kind} 3"
    everything = spoiled.read(torch.arange(8))
    clean = stored().images.float() / 255
    whole = (255 * corrupt(clean, kind=kind, severity=3, seed=9)).round().byte()
    assert torch.equal(everything, whole)
    picked = spoiled.take(torch.tensor([6, 2])).read(torch.tensor([0, 1, 0]))
    assert torch.equal(picked, everything[[6, 2, 6]])


def test_corrupted_set_fails_clearly() -> None:
    with pytest.raises(ValueError, match=r"kind must be one of"):
        Corrupted(stored(), kind="rain", severity=3, seed=9)
    small = Stored(torch.zeros(2, 1, 8, 8).byte(), torch.zeros(2).long(), num_classes=1, name="small")
    with pytest.raises(ValueError, match=r"S of at least 24, got \[0, 1, 8, 8\]"):
        Corrupted(small, kind="fog", severity=3, seed=9)
