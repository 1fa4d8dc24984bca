"""Augmentation: every operation is compared with Pillow or a count by hand, and a batch is a function of its seed."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor

from robust_attention.data import _randaugment, _transforms
from robust_attention.data.augment import Augment, AugmentedExamples, augmented, deit, light, mixed, repeated
from robust_attention.data.images import Stored, digits_images

CPU = torch.device("cpu")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def picture(channels: int = 3, side: int = 40) -> Tensor:
    """Smooth colours with an edge, a dark and a bright corner, and some grain; uint8."""
    y, x = torch.meshgrid(torch.linspace(0, 1, side), torch.linspace(0, 1, side), indexing="ij")
    planes = torch.stack((x, (x + y) / 2, (3 * x).sin() * (2 * y).cos()))[:channels]
    values = 30 + 180 * planes
    values[:, 5:15, 20:30] = torch.tensor([200.0, 20.0, 90.0])[:channels, None, None]
    grain = torch.randint(-6, 7, values.shape, generator=seeded())
    return (values + grain).clamp(0, 255).byte()


def stored(number: int = 24, side: int = 16, channels: int = 3, classes: int = 4) -> Stored:
    images = torch.randint(256, (number, channels, side, side), generator=seeded(1), dtype=torch.uint8)
    return Stored(images, torch.arange(number) % classes, num_classes=classes, name="made")


def operate(name: str, image: Tensor, level: float, sign: float) -> Tensor:
    """One operation on one image, alone."""
    out = _randaugment.OPERATIONS[name](image[None].float(), torch.tensor([level]), torch.tensor([sign]))
    return out[0]


def pillows() -> dict[str, Callable[..., Any]]:
    """What Pillow makes of an image at a level."""
    Image = pytest.importorskip("PIL.Image")
    from PIL import ImageEnhance, ImageOps

    filled = {"resample": Image.Resampling.BILINEAR, "fillcolor": (127, 127, 127)}

    def moved(matrix: tuple[float, ...]) -> Callable[[Any], Any]:
        return lambda image: image.transform(image.size, Image.Transform.AFFINE, matrix, **filled)

    def enhanced(kind: Any) -> Callable[[Any, float, float], Any]:
        return lambda image, level, sign: kind(image).enhance(max(0.1, 1 + sign * 0.9 * level / 10))

    return {
        "autocontrast": lambda image, level, sign: ImageOps.autocontrast(image),
        "equalize": lambda image, level, sign: ImageOps.equalize(image),
        "invert": lambda image, level, sign: ImageOps.invert(image),
        "rotate": lambda image, level, sign: image.rotate(sign * 30 * level / 10, **filled),
        "posterize": lambda image, level, sign: ImageOps.posterize(image, max(1, 4 - int(4 * level / 10))),
        "solarize": lambda image, level, sign: ImageOps.solarize(image, 256 - int(256 * level / 10)),
        "solarize_add": lambda image, level, sign: image.point(
            [min(255, i + int(110 * level / 10)) if i < 128 else i for i in range(256)] * 3
        ),
        "color": enhanced(ImageEnhance.Color),
        "contrast": enhanced(ImageEnhance.Contrast),
        "brightness": enhanced(ImageEnhance.Brightness),
        "sharpness": enhanced(ImageEnhance.Sharpness),
        "shear_x": lambda image, level, sign: moved((1, sign * 0.3 * level / 10, 0, 0, 1, 0))(image),
        "shear_y": lambda image, level, sign: moved((1, 0, 0, sign * 0.3 * level / 10, 1, 0))(image),
        "translate_x": lambda image, level, sign: moved((1, 0, sign * 0.45 * level / 10 * image.width, 0, 1, 0))(image),
        "translate_y": lambda image, level, sign: moved((1, 0, 0, 0, 1, sign * 0.45 * level / 10 * image.width))(image),
    }


MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("level", [0.0, 4.3, 9.0, 10.0])
@pytest.mark.parametrize("name", _randaugment.OPERATIONS)
def test_operations_do_what_pillow_does(name: str, level: float, sign: float) -> None:
    oracle = pillows()
    import numpy as np
    from PIL import Image

    image = picture()
    theirs = oracle[name](Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()), level, sign)
    wanted = torch.from_numpy(np.array(theirs)).permute(2, 0, 1).float()
    off = (operate(name, image, level, sign) - wanted).abs()
    if name in MOVES:
        # Where the image ends, Pillow repeats its edge for half a pixel and we go over to grey.
        assert off.quantile(0.9) <= 1.01, off.quantile(0.9)
        assert (off > 1.5).float().mean() < 0.08
    elif name in ("equalize", "invert", "posterize", "solarize", "solarize_add"):
        assert off.max() == 0  # whole numbers on both sides
    else:
        assert off.max() <= 1.51, off.max()  # Pillow rounds, or cuts, twice
    if level == 9:
        assert (wanted - image.float()).abs().mean() > 1  # it does something


@pytest.mark.parametrize("name", _randaugment.OPERATIONS)
def test_operations_take_one_channel_and_flat_images(name: str) -> None:
    grey, flat = picture(channels=1), torch.full((3, 12, 12), 80, dtype=torch.uint8)
    out = operate(name, grey, 9.0, 1.0)
    assert out.shape == grey.shape
    assert -1e-3 <= out.min() <= out.max() <= 255.001
    if name == "color":
        assert torch.equal(out, grey.float())  # grey has no colour
    assert operate(name, flat, 9.0, 1.0).isfinite().all()
    if name in ("autocontrast", "equalize", "color", "contrast", "sharpness"):
        torch.testing.assert_close(operate(name, flat, 9.0, 1.0), flat.float())


def test_each_image_gets_its_own_operation() -> None:
    images = torch.stack([picture()] * 32).float()
    names = list(_randaugment.OPERATIONS)
    drawn = _randaugment.Drawn(
        chosen=torch.randint(-1, 15, (32,), generator=seeded(3)),
        level=10 * torch.rand(32, generator=seeded(4)),
        sign=2.0 * torch.randint(2, (32,), generator=seeded(5)) - 1,
    )
    together = _randaugment.apply(images, drawn)
    for number, (op, level, sign) in enumerate(zip(*(x.tolist() for x in drawn), strict=True)):
        alone = images[number] if op < 0 else operate(names[op], picture(), level, sign).clamp(0, 255)
        torch.testing.assert_close(together[number], alone, rtol=0, atol=1e-3)


def test_operations_never_leave_the_range_by_a_last_bit() -> None:
    images = torch.randint(256, (400, 3, 16, 16), generator=seeded()).float()
    images[:200] = 255 * (torch.arange(200) % 2)[:, None, None, None].float()
    for name in ("rotate", "autocontrast"):
        chosen = torch.full((400,), list(_randaugment.OPERATIONS).index(name))
        drawn = _randaugment.Drawn(chosen, 10 * torch.rand(400, generator=seeded(4)), torch.ones(400))
        out = _randaugment.apply(images, drawn)
        assert 0 <= out.min() <= out.max() <= 255


def test_operations_that_follow_each_other_are_drawn_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(_randaugment, "apply", lambda images, one: drawn.append(one.chosen) or images)
    augmented(stored().images, Augment(randaugment=3), 0)
    assert len({tuple(one.tolist()) for one in drawn}) == len(drawn) == 3


def test_draws_of_operations_follow_their_settings() -> None:
    drawn = _randaugment.draw(30_000, share=0.5, magnitude=9, spread=0.5, generator=seeded())
    times = torch.bincount(drawn.chosen + 1, minlength=16) / 30_000
    assert abs(float(times[0]) - 0.5) < 0.02
    assert (times[1:] - 0.5 / 15).abs().max() < 0.006
    assert abs(float(drawn.level.mean()) - 9) < 0.02
    assert abs(float(drawn.level.std()) - 0.48) < 0.03  # 0.5, cut off at 10
    assert drawn.level.max() == 10
    assert abs(float(drawn.sign.mean())) < 0.03
    assert set(drawn.sign.tolist()) == {-1.0, 1.0}


def test_identity_gives_the_images_over_255_exactly() -> None:
    source = stored()
    images, labels = AugmentedExamples(source, Augment(), 4).batch(torch.arange(24), 3, CPU)
    assert torch.equal(images, source.images.float() / 255)
    assert images.dtype == torch.float32
    assert torch.equal(labels, source.labels)
    assert labels.dtype == torch.int64


EVERYTHING = deit(jitter=0.3, repeats=1)
SETTINGS = [light(), deit(), EVERYTHING, deit(crop="pad", mixup=0.0), Augment(crop="resized", size=9)]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("augment", SETTINGS, ids=range(len(SETTINGS)))
def test_equal_seeds_give_equal_batches(augment: Augment, channels: int) -> None:
    source = stored(channels=channels)
    indices, before = torch.randperm(24, generator=seeded()), torch.get_rng_state()
    one = AugmentedExamples(source, augment, 5).batch(indices, 7, CPU)
    other = AugmentedExamples(source, augment, 5).batch(indices, 7, CPU)
    third = AugmentedExamples(source, augment, 5).batch(indices, 8, CPU)
    assert torch.equal(torch.get_rng_state(), before)
    for a, b in zip(one, other, strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(one[0], third[0])
    side = augment.size or 16
    assert one[0].shape == (24, channels, side, side)
    assert one[0].dtype == torch.float32
    assert 0 <= one[0].min() <= one[0].max() <= 1
    assert one[1].shape == ((24, 5) if augment.soft else (24,))


def test_sources_that_do_not_fit_give_the_same_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    source, indices, asked = stored(), torch.tensor([5, 3, 5, 20]), []
    held = AugmentedExamples(source, EVERYTHING, 4).batch(indices, 1, CPU)
    monkeypatch.setattr("robust_attention.data.augment._HELD_BYTES", 24 * 3 * 256)
    read = source._read
    monkeypatch.setattr(source, "_read", lambda where: asked.append(where.tolist()) or read(where))
    examples = AugmentedExamples(source, EVERYTHING, 4)
    for a, b in zip(held, examples.batch(indices, 1, CPU), strict=True):
        assert torch.equal(a, b)
    assert asked == [[5, 3, 5, 20]]
    monkeypatch.setattr("robust_attention.data.augment._HELD_BYTES", 24 * 3 * 256 + 1)
    for _ in range(2):
        examples.batch(indices, 1, CPU)
    assert asked[1:] == [list(range(24))]  # once, for good


def test_switching_one_thing_off_leaves_the_others_as_they_were() -> None:
    raw = stored().images
    full = Augment(crop="pad", flip=0.5, erasing=1.0)
    one, other = augmented(raw, full, 3), augmented(raw, replace(full, erasing=0.0), 3)
    assert 0.6 < float((one == other).float().mean()) < 0.99
    flipped, plain = augmented(raw, Augment(flip=1.0, crop="pad"), 3), augmented(raw.flip(-1), light(flip=0.0), 3)
    assert torch.equal(flipped, plain)


def test_flips_are_flips_of_their_share() -> None:
    raw = stored(400).images
    out, plain = augmented(raw, Augment(flip=0.25), 0), raw.float() / 255
    flipped = (out == plain.flip(-1)).flatten(1).all(1)
    same = (out == plain).flatten(1).all(1)
    assert (flipped ^ same).all()
    assert abs(float(flipped.float().mean()) - 0.25) < 0.08


def test_padded_crops_are_windows_of_the_padded_image() -> None:
    raw = torch.arange(1, 65, dtype=torch.uint8).reshape(1, 1, 8, 8).repeat(500, 1, 1, 1)
    out = (augmented(raw, Augment(crop="pad", padding=2), 0) * 255).round()
    padded = torch.nn.functional.pad(raw[0, 0].float(), (2, 2, 2, 2))
    windows = {(y, x): padded[y : y + 8, x : x + 8] for y in range(5) for x in range(5)}
    found = [next(place for place, window in windows.items() if torch.equal(window, one[0])) for one in out]
    assert set(found) == set(windows)  # every place, the last one included
    assert torch.equal((augmented(raw, light(flip=0.0), 4) * 255).round()[:, :, 1:-1, 1:-1].amin(), torch.tensor(1.0))


def test_boxes_have_the_share_and_the_shape_asked_for_and_lie_within() -> None:
    boxes, fits = _transforms.draw_boxes(5000, 200, area=(0.08, 1.0), ratio=(0.75, 4 / 3), generator=seeded())
    assert fits.all()
    assert all((x == x.round()).all() for x in boxes)
    assert boxes.top.min() == 0
    assert boxes.left.min() == 0
    assert (boxes.top + boxes.height).max() == 200
    assert (boxes.left + boxes.width).max() == 200
    share, slim = boxes.height * boxes.width / 200**2, boxes.width / boxes.height
    assert 0.078 < share.min() < 0.09
    assert share.max() <= 1
    # Uniform but for the slim boxes near 1 that do not fit.
    assert abs(float((share < 0.54).float().mean()) - 0.54) < 0.06
    assert 0.73 < slim.min() < 0.77
    assert 1.3 < slim.max() < 1.36
    assert abs(float(slim.log().mean())) < 0.01
    small, _ = _transforms.draw_boxes(5000, 20, area=(0.2, 0.3), ratio=(0.75, 4 / 3), generator=seeded())
    for start, length in ((small.top, small.height), (small.left, small.width)):
        assert start.min() == 0
        assert (start + length).max() == 20  # to the last row and column
    none, fits = _transforms.draw_boxes(3, 4, area=(0.9, 1.0), ratio=(9.0, 9.5), generator=seeded())
    assert not fits.any()
    assert not torch.stack((none.height, none.width)).any()


# A cubic through four points of a line leaves the line a little.
@pytest.mark.parametrize(("mode", "atol"), [("bilinear", 1e-3), ("bicubic", 0.06)])
def test_resized_crops_show_their_box(mode: str, atol: float) -> None:
    side, size = 32, 24
    y, x = torch.meshgrid(torch.arange(side) + 0.5, torch.arange(side) + 0.5, indexing="ij")
    ramp = torch.stack((x, y))[None].repeat(6, 1, 1, 1) * 7
    boxes, _ = _transforms.draw_boxes(6, side, area=(0.2, 0.7), ratio=(0.75, 4 / 3), generator=seeded())
    out = _transforms.crop_resized(ramp, boxes, size, mode) / 7
    steps = (torch.arange(size) + 0.5) / size
    for image, top, left, height, width in zip(out, *boxes, strict=True):
        inner = slice(2, -2)  # at the very edge of the image there is nothing to interpolate with
        torch.testing.assert_close(
            image[0, :, inner], (left + width * steps)[inner].expand(size, -1), rtol=0, atol=atol
        )
        torch.testing.assert_close(
            image[1, inner], (top + height * steps)[inner, None].expand(-1, size), rtol=0, atol=atol
        )


@pytest.mark.parametrize("ratio", [(1.0, 1.0), (9.0, 9.5)], ids=["square", "too slim to fit"])
def test_a_resized_crop_of_everything_or_of_what_does_not_fit_is_the_image(ratio: tuple[float, float]) -> None:
    raw = stored().images
    out = augmented(raw, Augment(crop="resized", scale=(1.0, 1.0), ratio=ratio), 0)
    torch.testing.assert_close(out, raw.float() / 255, rtol=0, atol=1e-4)


def test_erase_overwrites_its_box_alone() -> None:
    images, content = torch.zeros(2, 3, 8, 8), torch.rand(2, 3, 8, 8, generator=seeded()) + 1
    boxes = _transforms.Boxes(*torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0]]))
    out = _transforms.erase(images, boxes, content)
    images[0, :, 1:4, 2:6] = content[0, :, 1:4, 2:6]
    assert torch.equal(out, images)


def test_erasing_overwrites_a_rectangle_of_the_share_asked_for() -> None:
    raw = torch.zeros(600, 3, 32, 32, dtype=torch.uint8)
    out = augmented(raw, Augment(erasing=0.25, erasing_area=(0.1, 0.2)), 0)
    changed = (out != 0).any(1)
    hit = changed.flatten(1).any(1)
    assert abs(float(hit.float().mean()) - 0.25) < 0.06
    for one in changed[hit]:
        rows, columns = one.any(1).nonzero()[:, 0], one.any(0).nonzero()[:, 0]
        height, width = len(rows), len(columns)
        assert int(rows[-1] - rows[0]) == height - 1
        assert int(columns[-1] - columns[0]) == width - 1
        assert int(one.sum()) == height * width
        assert 0.08 < height * width / 32**2 < 0.22
    noise = out[hit][changed[hit][:, None].expand(-1, 3, -1, -1)]
    assert abs(float(noise.mean()) - 0.5) < 0.01
    assert 0.2 < float(noise.std()) < 0.25


def test_jitter_changes_brightness_contrast_and_colour_within_bounds() -> None:
    raw = torch.full((300, 3, 4, 4), 100, dtype=torch.uint8)
    level = augmented(raw, Augment(jitter=0.4), 0)[:, 0, 0, 0] * 2.55
    assert 0.6 <= level.min() < 0.65
    assert 1.35 < level.max() <= 1.4
    raw = torch.stack([picture()] * 200)
    out = augmented(raw, Augment(jitter=0.4), 0)
    assert len({round(float(image.mean()), 3) for image in out}) > 50
    spread = out.amax((2, 3)) - out.amin((2, 3))
    assert spread.std() > 0.05


def test_mixup_mixes_images_and_targets_in_one_ratio() -> None:
    raw, labels = stored().images.float() / 255, stored().labels
    shares = []
    for seed in range(40):
        images, targets = mixed(raw, labels, Augment(mixup=0.8), 4, seed)
        torch.testing.assert_close(targets.sum(1), torch.ones(24))
        other = labels.flip(0)
        share = targets[labels != other].gather(1, labels[labels != other, None])[0, 0]
        wanted = share * raw + (1 - share) * raw.flip(0)
        torch.testing.assert_close(images, wanted, rtol=0, atol=1e-5)
        shares.append(float(share))
    assert abs(sum(shares) / 40 - 0.5) < 0.2
    assert min(shares) < 0.2
    assert max(shares) > 0.8


def test_cutmix_targets_are_the_shares_of_the_pixels() -> None:
    labels = torch.tensor([0, 1, 2, 3])
    images = labels[:, None, None, None].float().expand(-1, 3, 16, 16)
    shares = []
    for seed in range(60):
        out, targets = mixed(images, labels, Augment(cutmix=1.0), 4, seed)
        torch.testing.assert_close(targets.sum(1), torch.ones(4))
        for label in range(4):
            pixels = torch.stack([(out[label, 0] == other).float().mean() for other in range(4)])
            torch.testing.assert_close(targets[label], pixels, rtol=0, atol=1e-6)
        shares.append(float(targets[0, 0]))
    assert min(shares) < 0.3
    assert max(shares) > 0.9
    assert torch.equal(images[3, 0], torch.full((16, 16), 3.0))  # the batch itself is left alone


def test_switch_says_how_often_cutmix_is_taken() -> None:
    def kinds(switch: float) -> float:
        found = [_transforms.draw_mix(0.8, 1.0, switch, 16, seed) for seed in range(400)]
        return sum(how is not None and how.box is not None for how in found) / 400

    assert kinds(0.0) == 0
    assert kinds(1.0) == 1
    assert abs(kinds(0.3) - 0.3) < 0.08
    assert _transforms.draw_mix(0.0, 0.0, 0.5, 16, 0) is None


def test_label_smoothing_spreads_its_share() -> None:
    images = torch.zeros(2, 3, 4, 4)
    out, targets = mixed(images, torch.tensor([1, 0]), Augment(label_smoothing=0.2), 4, 0)
    torch.testing.assert_close(targets, torch.tensor([[0.05, 0.85, 0.05, 0.05], [0.85, 0.05, 0.05, 0.05]]))
    assert torch.equal(out, images)


def test_repeats_show_fewer_images_several_times() -> None:
    indices = torch.randperm(100, generator=seeded())
    assert torch.equal(repeated(indices, 1), indices)
    for number in (12, 13, 14, 2, 1):
        some = repeated(indices[:number], 3)
        assert len(some) == number
        assert set(some.tolist()) == set(indices[: math.ceil(number / 3)].tolist())
        assert int(torch.bincount(some).max()) <= 3
    images, _ = AugmentedExamples(stored(), light(repeats=3), 4).batch(torch.arange(24), 0, CPU)
    raw, _ = AugmentedExamples(stored(), Augment(), 4).batch(torch.arange(24), 0, CPU)
    assert not torch.equal(images[:8], images[8:16])  # each augmented anew
    values = [set(image.flatten().tolist()) - {0.0} for image in images]
    assert all(values[n] <= set(raw[n % 8].flatten().tolist()) for n in range(24))


def test_digits_go_through_everything() -> None:
    train = digits_images(16).train
    images, targets = AugmentedExamples(train, EVERYTHING, 10).batch(torch.arange(64), 0, CPU)
    assert images.shape == (64, 1, 16, 16)
    assert images.isfinite().all()
    torch.testing.assert_close(targets.sum(1), torch.ones(64))
    assert len(AugmentedExamples(train, EVERYTHING, 10)) == len(train)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"crop": "centre"}, r"crop must be one of 'none', 'pad', 'resized', got 'centre'"),
    ({"flip": 1.5}, r"flip must lie from 0 to 1, got 1.5"),
    ({"magnitude": 11}, r"magnitude must lie from 0 to 10"),
    ({"randaugment": -1}, r"randaugment must be a whole number of at least 0"),
    ({"repeats": 0}, r"repeats must be a whole number of at least 1, got 0"),
    ({"scale": (0.5, 0.1)}, r"scale must be two numbers, 0 < low <= high <= 1, got \(0.5, 0.1\)"),
    ({"mixup": -0.1}, r"mixup must lie from 0 to 100"),
    ({"size": 16}, r'size must be None where crop is not "resized", got 16'),
    ({"label_smoothing": float("nan")}, r"label_smoothing must lie from 0"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG, ids=[str(settings) for settings, _ in WRONG])
def test_wrong_settings_fail_clearly(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Augment(**settings)


def test_too_few_classes_fail_clearly() -> None:
    with pytest.raises(ValueError, match=r"num_classes must be at least that of the images, 4, got 3; build the model"):
        AugmentedExamples(stored(), light(), 3)
