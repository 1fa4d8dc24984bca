"""Image sets: what is read from real layouts on disk, that labels stay with their images, and what damage does."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from robust_attention.data import benchmarks, digits
from robust_attention.data.cache import Mapped
from robust_attention.data.decoding import Decoding
from robust_attention.data.encoded import Encoded
from robust_attention.data.folders import class_folders, read_classes, tiny_imagenet_folders
from robust_attention.data.images import Images, Stored, digits_images, hold_out
from robust_attention.data.parquet import parquet_images
from robust_attention.data.small import cifar10, tiny_imagenet

Image = pytest.importorskip("PIL.Image")

SHARED = Path(__file__).parents[2] / "shared" / "data"
on_real_data = pytest.mark.skipif(not SHARED.exists(), reason="the project's data sets are not on this machine")

COLOURS = [(250, 10, 10), (10, 250, 10), (10, 10, 250), (200, 200, 30), (30, 200, 200)]
SMALL = Decoding(size=16, workers=2)


def stored(number: int = 12, num_classes: int = 3) -> Stored:
    """Every pixel of an image is its number; labels go round."""
    images = torch.arange(number, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 4)
    return Stored(images, torch.arange(number) % num_classes, num_classes=num_classes, name="numbers")


def everything(images: Images) -> Tensor:
    return images.read(torch.arange(len(images)))


def encode(label: int, size: tuple[int, int] = (16, 16), format_: str = "JPEG") -> bytes:
    """A picture of the label's colour."""
    out = io.BytesIO()
    Image.new("RGB", size, COLOURS[label]).save(out, format_, quality=95)
    return out.getvalue()


def write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def make_folders(root: Path, classes: tuple[str, ...] = ("ant", "bee", "cat"), each: int = 3) -> Path:
    for label, name in enumerate(classes):
        for number in range(each):
            write(root / name / f"{number}.jpg", encode(label % len(COLOURS)))
    return root


def labels_seen(images: Images) -> list[int]:
    """The label whose colour each image has."""
    mean = everything(images).float().mean((2, 3))
    return torch.cdist(mean, torch.tensor(COLOURS).float()).argmin(1).tolist()


def cut_off(share: float) -> bytes:
    """A file that ends too early, as a broken download leaves it."""
    noise = torch.randint(256, (64 * 64 * 3,), generator=torch.Generator().manual_seed(0))
    out = io.BytesIO()
    Image.frombytes("RGB", (64, 64), bytes(noise.tolist())).save(out, "JPEG")
    content = out.getvalue()
    return content[: int(share * len(content))]


DAMAGED = {
    "cut in its data": (cut_off(0.7), "truncated"),
    "cut in its head": (cut_off(0.01), "Truncated"),
    "text": (b"<html>404 not found</html>", "not an image of a known format"),
    "empty": (b"", "not an image of a known format"),
}


# --- what every set does


def test_stored_images_are_read_by_number() -> None:
    images = stored()
    assert len(images) == 12
    assert (images.channels, images.size, images.num_classes, images.damaged) == (3, 4, 3, {})
    assert images.read(torch.tensor([5, 0, 5]))[:, 0, 0, 0].tolist() == [5, 0, 5]
    assert images.read(torch.tensor([], dtype=torch.int64)).shape == (0, 3, 4, 4)


def test_subset_of_a_subset_reads_the_same_images() -> None:
    taken = stored().take(torch.tensor([9, 1, 4])).take(torch.tensor([2, 0]))
    assert taken.labels.tolist() == [1, 0]
    assert everything(taken)[:, 0, 0, 0].tolist() == [4, 9]


def test_digits_are_enlarged_and_split() -> None:
    parts = digits_images(32)
    assert [len(part) for part in parts] == [989, 269, 539]
    clean = digits.split().test
    assert torch.equal(parts.test.labels, clean.labels)
    image = F.interpolate(clean.images[7:8], size=32, mode="bilinear", align_corners=False)
    difference = parts.test.read(torch.tensor([7])).float() / 255 - image
    assert difference.abs().max() <= 0.5 / 255 + 1e-6
    assert torch.equal(everything(digits_images(8).train), (255 * digits.split().train.images).round().byte())


def test_held_out_share_is_equal_in_every_class_and_disjoint() -> None:
    rest, held = hold_out(stored(60), 0.25, seed=1)
    assert held.labels.bincount().tolist() == [5, 5, 5]
    numbers = torch.cat([everything(rest), everything(held)])[:, 0, 0, 0]
    assert numbers.sort().values.tolist() == list(range(60))
    again = hold_out(stored(60), 0.25, seed=1)[1]
    other = hold_out(stored(60), 0.25, seed=2)[1]
    assert torch.equal(everything(again), everything(held))
    assert not torch.equal(everything(other), everything(held))


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (lambda: stored().read(torch.tensor([12])), r"indices must lie from 0 to 11, got 12 to 12"),
    (lambda: stored().take(torch.tensor([-1])), r"indices must lie from 0 to 11, got -1 to -1"),
    (
        lambda: stored().read(torch.tensor([True])),
        r"indices must be a list of whole numbers .*bool; mask.nonzero",
    ),
    (
        lambda: Stored(torch.zeros(2, 3, 4, 4), torch.tensor([0, 1]), num_classes=2, name=""),
        r"images must be uint8 \[N, C, S, S\], got float32 \[2, 3, 4, 4\]",
    ),
    (
        lambda: Stored(torch.zeros(2, 3, 4, 4).byte(), torch.tensor([0, 2]), num_classes=2, name=""),
        r"labels must lie from 0 to num_classes - 1 = 1, got 0 to 2",
    ),
    (
        lambda: Stored(torch.zeros(2, 3, 4, 4).byte(), torch.tensor([0]), num_classes=2, name=""),
        r"labels must be whole numbers, one an image: \[2\], got \[1\]",
    ),
    (lambda: hold_out(stored(), 1.0), r"share must lie between 0 and 1, got 1.0"),
    (lambda: digits_images(7), r"size must be a whole number of at least 8, got 7"),
    (lambda: Decoding(size=0), r"size must be a whole number of at least 1, got 0"),
    (lambda: Decoding(size=8, channels=4), r"channels must be 1 or 3, got 4"),
    (lambda: Decoding(size=8, damaged="ignore"), r"damaged must be one of 'fail', 'skip', got 'ignore'"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=range(len(REFUSED)))
def test_wrong_arguments_of_images_fail_clearly(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# --- decoding


def photograph(width: int, height: int) -> Any:
    """Smooth, so that JPEG and resampling change little, and different everywhere."""
    x, y = torch.meshgrid(torch.linspace(0, 1, width), torch.linspace(0, 1, height), indexing="xy")
    pixels = torch.stack([x, y, (x * y)], 2).mul(255).round().byte().contiguous()
    return Image.frombytes("RGB", (width, height), bytes(pixels.flatten().tolist()))


def read_one(root: Path, picture: Any, how: Decoding, suffix: str = "png") -> Tensor:
    (root / "c").mkdir(parents=True, exist_ok=True)
    picture.save(root / "c" / f"0.{suffix}")
    return class_folders(root, how).read(torch.tensor([0]))[0]


def test_crop_takes_the_middle_of_the_usual_size(tmp_path: Path) -> None:
    picture = photograph(120, 80)
    found = read_one(tmp_path, picture, Decoding(size=28))
    # 28 · 256/224 = 32; 120 by 80 becomes 48 by 32; ten columns go left and right, two rows above and below.
    expected = picture.resize((48, 32), Image.Resampling.BICUBIC).crop((10, 2, 38, 30))
    assert bytes(found.permute(1, 2, 0).flatten().tolist()) == expected.tobytes()


def test_stretch_keeps_the_edges(tmp_path: Path) -> None:
    found = read_one(tmp_path, photograph(120, 80), Decoding(size=28, resize="stretch", interpolation="bilinear"))
    assert found[0, :, 0].float().mean() < 6  # red grows from left to right
    assert found[0, :, -1].float().mean() > 249
    assert found[1, -1].float().mean() > 249  # green from top to bottom


def test_image_of_the_right_size_is_left_as_it_is(tmp_path: Path) -> None:
    picture = photograph(28, 28)
    found = read_one(tmp_path, picture, Decoding(size=28))
    assert bytes(found.permute(1, 2, 0).flatten().tolist()) == picture.tobytes()


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK", "1"])
def test_images_of_every_mode_become_colour(tmp_path: Path, mode: str) -> None:
    suffix = "tif" if mode == "CMYK" else "png"
    found = read_one(tmp_path / mode, Image.new("RGB", (16, 16), "white").convert(mode), SMALL, suffix)
    assert found.shape == (3, 16, 16)
    assert (found >= 250).all()


def test_colour_becomes_grey(tmp_path: Path) -> None:
    found = read_one(tmp_path, Image.new("RGB", (16, 16), (255, 0, 0)), Decoding(size=16, channels=1))
    assert found.shape == (1, 16, 16)
    assert (found == 76).all()  # 0.299 · 255


# --- folders


def test_class_folders_are_sorted_and_labelled(tmp_path: Path) -> None:
    make_folders(tmp_path)
    write(tmp_path / "bee" / "notes.txt", b"not an image")
    write(tmp_path / ".cache" / "0.jpg", b"hidden")
    write(tmp_path / "README.txt", b"beside the folders")
    images = class_folders(tmp_path, SMALL)
    assert images.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert labels_seen(images) == images.labels.tolist()
    assert (images.num_classes, images.name) == (3, tmp_path.name)


def test_class_list_numbers_the_folders(tmp_path: Path) -> None:
    make_folders(tmp_path / "data", ("n02", "n01"), each=1)
    (tmp_path / "list.txt").write_text("n03 third\nn02 second\n\nn01 first\n")
    images = class_folders(tmp_path / "data", SMALL, classes=tmp_path / "list.txt")
    assert images.num_classes == 3
    assert images.labels.tolist() == [2, 1]  # n01, then n02
    assert labels_seen(images) == [1, 0]  # the colours say who is who
    with pytest.raises(ValueError, match=r"must be a class of the list, but n01 \(1 in all\) is not"):
        class_folders(tmp_path / "data", SMALL, classes=("n02", "n03"))


def test_class_list_fails_clearly(tmp_path: Path) -> None:
    (tmp_path / "twice").write_text("n01\nn02\nn01\n")
    with pytest.raises(ValueError, match=r"a class list must name each class once, .* names n01 more than once"):
        read_classes(tmp_path / "twice")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match=r"names none"):
        read_classes(tmp_path / "empty")


def test_missing_folders_fail_clearly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be a folder with a folder a class, but there is none"):
        class_folders(tmp_path / "nowhere", SMALL)
    with pytest.raises(ValueError, match=r"must hold a folder a class, but holds none"):
        class_folders(tmp_path, SMALL)
    (tmp_path / "ant").mkdir()
    with pytest.raises(ValueError, match=r"must hold images as <class>/<image>.jpg, but holds none of .jpg"):
        class_folders(tmp_path, SMALL)


# --- damage and the cache


def decodings(tmp_path: Path, **changes: Any) -> list[Decoding]:
    caches = (None, "memory", tmp_path / "cache")
    return [Decoding(size=16, workers=2, cache=cache, **changes) for cache in caches]


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_named_and_stops_by_default(tmp_path: Path, damage: str) -> None:
    root = make_folders(tmp_path / "data")
    content, reason = DAMAGED[damage]
    write(root / "bee" / "1.jpg", content)
    for how in decodings(tmp_path):
        with pytest.raises(ValueError, match=rf"but .*bee/1.jpg is not \(.*{reason}.*\); .* damaged=\"skip\""):
            everything(class_folders(root, how))


@pytest.mark.parametrize("damage", DAMAGED)
def test_damaged_file_is_skipped_with_its_label(tmp_path: Path, damage: str) -> None:
    root = make_folders(tmp_path / "data")
    content, reason = DAMAGED[damage]
    for place in ("ant/0.jpg", "bee/1.jpg"):
        write(root / place, content)
    for how in decodings(tmp_path, damaged="skip"):
        images = class_folders(root, how)
        assert images.labels.tolist() == [0, 0, 1, 1, 2, 2, 2]
        assert labels_seen(images) == images.labels.tolist()
        assert list(images.damaged) == [str(root / "ant/0.jpg"), str(root / "bee/1.jpg")]
        assert all(reason in found for found in images.damaged.values())
        assert images.take(torch.tensor([0])).damaged == images.damaged


def test_nothing_readable_fails_clearly(tmp_path: Path) -> None:
    write(tmp_path / "data" / "ant" / "0.jpg", b"")
    for how in decodings(tmp_path, damaged="skip"):
        with pytest.raises(ValueError, match=r"of 1 images, at least one must be readable; .*ant/0.jpg is the first"):
            class_folders(tmp_path / "data", how)


def test_every_way_of_keeping_images_reads_the_same(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "data")
    picked = torch.tensor([8, 0, 3, 3])
    sets = [class_folders(root, how) for how in decodings(tmp_path)]
    assert [type(images) for images in sets] == [Encoded, Stored, Mapped]
    first, *others = (images.read(picked) for images in sets)
    for read in others:
        assert torch.equal(read, first)
    for images in sets:
        assert images.read(torch.tensor([], dtype=torch.int64)).shape == (0, 3, 16, 16)


def count_opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from robust_attention.data.folders import Files

    opened, plain = [], Files.open

    def counted(self: Files, index: int) -> Any:
        opened.append(self.names[index])
        return plain(self, index)

    monkeypatch.setattr(Files, "open", counted)
    return opened


def test_cache_is_made_once_and_again_for_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, how = make_folders(tmp_path / "data"), decodings(tmp_path)[2]
    opened = count_opened(monkeypatch)
    first = everything(class_folders(root, how))
    assert len(opened) == 9
    assert torch.equal(everything(class_folders(root, how)), first)
    assert len(opened) == 9
    # As a plain file: nothing but the images.
    (data,) = (tmp_path / "cache").glob("*.u8")
    assert data.read_bytes() == bytes(first.flatten().tolist())
    write(root / "cat" / "2.jpg", encode(4, (40, 40)))
    assert labels_seen(class_folders(root, how)) == [0, 0, 0, 1, 1, 1, 2, 2, 4]
    assert len(opened) == 18
    class_folders(root, Decoding(size=16, workers=2, cache=tmp_path / "cache", channels=1))
    assert len(list((tmp_path / "cache").glob("*.u8"))) == 3


def test_damaged_image_of_the_cache_is_named_when_it_is_read(tmp_path: Path) -> None:
    root, how = make_folders(tmp_path / "data"), decodings(tmp_path)[2]
    class_folders(root, how)
    (data,) = (tmp_path / "cache").glob("*.u8")
    content = bytearray(data.read_bytes())
    content[5 * 3 * 16 * 16 + 100] ^= 1
    data.write_bytes(content)
    images = class_folders(root, how)
    assert images.read(torch.tensor([4, 6])).shape == (2, 3, 16, 16)
    with pytest.raises(ValueError, match=r"image 5 of .*\.u8 must have the checksum .* and it is made again"):
        images.read(torch.tensor([4, 5]))


@pytest.mark.parametrize("part", ["the images are cut off", "the record is cut off", "the record is another"])
def test_unfinished_cache_is_made_again(tmp_path: Path, part: str) -> None:
    root, how = make_folders(tmp_path / "data"), decodings(tmp_path)[2]
    first = everything(class_folders(root, how))
    (data,) = (tmp_path / "cache").glob("*.u8")
    record = data.with_suffix(".json")
    if part == "the images are cut off":
        data.write_bytes(data.read_bytes()[:-1])
    elif part == "the record is cut off":
        record.write_text(record.read_text()[:50])
    else:
        record.write_text(record.read_text().replace('"damaged": {}', '"damaged": {"bee": "sting"}'))
    with pytest.warns(UserWarning, match=r"the cache .*\.u8 is damaged; it is made again"):
        images = class_folders(root, how)
    assert torch.equal(everything(images), first)


def test_cache_without_its_record_is_made_again(tmp_path: Path) -> None:
    """What is left when a process is killed before it had finished."""
    root, how = make_folders(tmp_path / "data"), decodings(tmp_path)[2]
    first = everything(class_folders(root, how))
    (data,) = (tmp_path / "cache").glob("*.u8")
    data.with_suffix(".json").unlink()
    data.write_bytes(b"half")
    assert torch.equal(everything(class_folders(root, how)), first)


def test_skipped_images_of_a_cache_stop_a_strict_reader(tmp_path: Path) -> None:
    root = make_folders(tmp_path / "data")
    write(root / "bee" / "1.jpg", b"")
    class_folders(root, decodings(tmp_path, damaged="skip")[2])
    with pytest.raises(ValueError, match=r"but .*bee/1.jpg is not"):
        class_folders(root, decodings(tmp_path)[2])


def test_cache_needs_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    root, how = make_folders(tmp_path / "data"), decodings(tmp_path)[2]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(OSError, match=r"the folder of a cache must have room for .* GiB"):
        class_folders(root, how)


# --- parquet


def write_parquet(path: Path, rows: list[tuple[Any, Any]], **options: Any) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"image": [image for image, _ in rows], "label": [label for _, label in rows]})
    parquet.write_table(table, path, **options)
    return path


def as_struct(content: bytes | None) -> dict[str, Any]:
    return {"bytes": content, "path": "x.jpg"}


def test_parquet_rows_keep_their_labels_over_groups_and_files(tmp_path: Path) -> None:
    labels = [2, 0, 1, 1, 4, 3, 0, 2, 2, 1]
    first = write_parquet(tmp_path / "a", [(as_struct(encode(k)), k) for k in labels[:6]], row_group_size=2)
    second = write_parquet(tmp_path / "b", [(encode(k, (40, 20), "PNG"), k) for k in labels[6:]], row_group_size=3)
    for how in decodings(tmp_path):
        images = parquet_images([first, second], how, num_classes=5)
        assert images.labels.tolist() == labels
        assert labels_seen(images) == labels
        assert labels_seen(images.take(torch.tensor([9, 0, 6]))) == [1, 2, 0]


def test_damaged_rows_are_named_and_skipped(tmp_path: Path) -> None:
    rows = [(as_struct(encode(k)), k) for k in (0, 1, 2, 3, 4)]
    rows[3] = (as_struct(None), 3)
    rows[4] = (as_struct(encode(4)[:100]), 4)
    file = write_parquet(tmp_path / "a.parquet", rows, row_group_size=2)
    for how in decodings(tmp_path, damaged="skip"):
        images = parquet_images([file, file], how, num_classes=5)
        assert images.labels.tolist() == [0, 1, 2, 0, 1, 2] == labels_seen(images)
        assert set(images.damaged) == {f"{file}, row 3", f"{file}, row 4"}
        assert images.damaged[f"{file}, row 3"] == "the row holds no bytes of an image"
    with pytest.raises(ValueError, match=r"a.parquet, row 3 is not \(the row holds no bytes"):
        parquet_images(file, decodings(tmp_path)[1], num_classes=5)


def test_parquet_fails_clearly(tmp_path: Path) -> None:
    file = write_parquet(tmp_path / "a.parquet", [(encode(0), 0), (encode(1), None)])
    with pytest.raises(ValueError, match=r"row 1 of .*a.parquet must have a whole number in 'label', got None"):
        parquet_images(file, SMALL, num_classes=2)
    with pytest.raises(ValueError, match=r"must have a column 'img', has image, label"):
        parquet_images(file, SMALL, num_classes=2, image="img")
    with pytest.raises(ValueError, match=r"must have a column 'fine', has image, label"):
        parquet_images(file, SMALL, num_classes=2, label="fine")
    (tmp_path / "b.parquet").write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"b.parquet must be a parquet file, but cannot be read"):
        parquet_images(tmp_path / "b.parquet", SMALL, num_classes=2)
    with pytest.raises(ValueError, match=r"c.parquet must be a parquet file, but there is none"):
        parquet_images(tmp_path / "c.parquet", SMALL, num_classes=2)
    with pytest.raises(ValueError, match=r"labels must lie from 0 to num_classes - 1 = 0, got 0 to 1"):
        parquet_images(write_parquet(tmp_path / "d", [(b"", 0), (b"", 1)]), SMALL, num_classes=1)
    with pytest.raises(ValueError, match=r"e must hold images, but holds none"):
        parquet_images(write_parquet(tmp_path / "e", []), SMALL, num_classes=1, label="label")


# --- CIFAR-10 and Tiny-ImageNet


def cifar_record(label: int, first: int) -> bytes:
    """Pixels count up from `first` in red, are 50 in green and the label in blue."""
    red = bytes((first + pixel) % 256 for pixel in range(1024))
    return bytes([label]) + red + bytes([50]) * 1024 + bytes([label]) * 1024


def test_binary_cifar_is_read_plane_by_plane(tmp_path: Path) -> None:
    for batch in range(1, 6):
        write(tmp_path / "cifar-10-batches-bin" / f"data_batch_{batch}.bin", cifar_record(batch, batch) * 2)
    write(tmp_path / "cifar-10-batches-bin" / "test_batch.bin", cifar_record(7, 0) + cifar_record(3, 9))
    train, test = cifar10(tmp_path, "train"), cifar10(tmp_path / "cifar-10-batches-bin", "test")
    assert train.labels.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert (test.labels.tolist(), test.num_classes, test.name) == ([7, 3], 10, "CIFAR-10 test")
    image = everything(test)[1]
    assert image[0].flatten().tolist() == [(9 + pixel) % 256 for pixel in range(1024)]
    assert image[1].unique().tolist() == [50]
    assert image[2].unique().tolist() == [3]
    assert everything(cifar10(tmp_path, "test", Decoding(size=48))).shape == (2, 3, 48, 48)


def test_cifar_fails_clearly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold cifar-10-batches-bin/ with test_batch.bin, or cifar10_test"):
        cifar10(tmp_path, "test")
    (tmp_path / "cifar-10-batches-py").mkdir()
    with pytest.raises(ValueError, match=r"the Python version: pickles can run any code .* cifar-10-binary.tar.gz"):
        cifar10(tmp_path, "test")
    write(tmp_path / "test_batch.bin", cifar_record(7, 0)[:-1])
    with pytest.raises(ValueError, match=r"test_batch.bin must hold whole records of 3073 bytes, has 3072 bytes"):
        cifar10(tmp_path, "test")
    write(tmp_path / "test_batch.bin", cifar_record(10, 0))
    with pytest.raises(ValueError, match=r"labels in .* must lie from 0 to 9, got 10"):
        cifar10(tmp_path, "test")
    with pytest.raises(ValueError, match=r"split must be one of 'train', 'test', got 'val'"):
        cifar10(tmp_path, "val")  # type: ignore[arg-type]


def make_tiny(root: Path) -> Path:
    for label, wnid in enumerate(("n11", "n22", "n33")):
        for number in range(2):
            write(root / "train" / wnid / "images" / f"{wnid}_{number}.JPEG", encode(label, (64, 64)))
        write(root / "train" / wnid / f"{wnid}_boxes.txt", b"")
    classes = {"val_0.JPEG": 2, "val_1.JPEG": 0, "val_10.JPEG": 1}
    for name, label in classes.items():
        write(root / "val" / "images" / name, encode(label, (64, 64)))
    lines = [f"{name}\t{('n11', 'n22', 'n33')[label]}\t0\t0\t63\t63\n" for name, label in reversed(classes.items())]
    (root / "val" / "val_annotations.txt").write_text("".join(lines))
    (root / "wnids.txt").write_text("n33\nn11\nn22\n")
    return root


def test_published_tiny_imagenet_is_read(tmp_path: Path) -> None:
    make_tiny(tmp_path / "tiny-imagenet-200")
    train, val = tiny_imagenet(tmp_path, "train"), tiny_imagenet(tmp_path / "tiny-imagenet-200", "val")
    assert train.labels.tolist() == [0, 0, 1, 1, 2, 2] == labels_seen(train)
    assert val.labels.tolist() == [2, 0, 1] == labels_seen(val)
    assert (val.num_classes, val.size, val.name) == (3, 64, "Tiny-ImageNet val")


def test_tiny_imagenet_fails_clearly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must hold tiny-imagenet-200/ or tiny_imagenet_val\*.parquet"):
        tiny_imagenet(tmp_path, "val")
    root = make_tiny(tmp_path)
    write(root / "val" / "images" / "val_3.JPEG", encode(0))
    with pytest.raises(ValueError, match=r"must stand in val_annotations.txt, val_3.JPEG does not"):
        tiny_imagenet_folders(root, "val", SMALL)
    (root / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn99\t0\n")
    with pytest.raises(ValueError, match=r"line 1 of .* must be an image, a tab and a class of train, got 'val_0.JPEG"):
        tiny_imagenet_folders(root, "val", SMALL)


# --- benchmarks

SYNSETS = ("n01", "n02", "n03", "n04", "n05")


def test_imagenet_c_is_found_by_kind_and_severity(tmp_path: Path) -> None:
    make_folders(tmp_path / "fog" / "3", ("n02", "n04"), each=1)
    make_folders(tmp_path / "noise" / "shot_noise" / "1", ("n01", "n02"), each=2)
    fog = benchmarks.imagenet_c(tmp_path, "fog", 3, SMALL, synsets=SYNSETS)
    assert fog.labels.tolist() == [1, 3]
    assert (fog.num_classes, fog.name) == (5, f"{tmp_path.name}, fog 3")
    assert len(benchmarks.imagenet_c(tmp_path, "shot_noise", 1, SMALL)) == 4
    with pytest.raises(ValueError, match=r"must hold fog/4/<wnid>/<image>.JPEG, but does not; unpack"):
        benchmarks.imagenet_c(tmp_path, "fog", 4, SMALL)
    with pytest.raises(ValueError, match=r"kind must be one of 'gaussian_noise', .*, got 'rain'"):
        benchmarks.imagenet_c(tmp_path, "rain", 1, SMALL)
    with pytest.raises(ValueError, match=r"severity must be a whole number from 1 to 5, got 0"):
        benchmarks.imagenet_c(tmp_path, "fog", 0, SMALL)


@pytest.mark.parametrize("reader", [benchmarks.imagenet_a, benchmarks.imagenet_r, benchmarks.imagenet_o])
def test_masked_sets_number_their_classes_among_all(tmp_path: Path, reader: Any) -> None:
    make_folders(tmp_path, ("n02", "n05"), each=1)
    images, mask = reader(tmp_path, SMALL, synsets=SYNSETS, classes=("n02", "n04", "n05"))
    assert images.labels.tolist() == [1, 4]
    assert images.num_classes == 5
    assert mask.tolist() == [False, True, False, True, True]
    inside = benchmarks.in_mask(stored(10, 5), mask)
    assert everything(inside)[:, 0, 0, 0].tolist() == [1, 3, 4, 6, 8, 9]


def test_masks_fail_clearly(tmp_path: Path) -> None:
    make_folders(tmp_path, ("n02", "n05"), each=1)
    with pytest.raises(ValueError, match=r"ImageNet-A must have 200 class folders, .* has 2; finish the download"):
        benchmarks.imagenet_a(tmp_path, SMALL, synsets=SYNSETS)
    with pytest.raises(ValueError, match=r"every folder of .* must be one of classes, but n05 is not"):
        benchmarks.imagenet_a(tmp_path, SMALL, synsets=SYNSETS, classes=("n02",))
    with pytest.raises(ValueError, match=r"every class of the mask must be one of the model's 2, but n05 \(1 in all\)"):
        benchmarks.class_mask(("n05", "n01"), ("n01", "n02"))
    with pytest.raises(ValueError, match=r"mask must be bool, one a class: \[3\], got \[2\]"):
        benchmarks.in_mask(stored(), torch.tensor([True, False]))


def test_two_hundred_folders_need_no_list(tmp_path: Path) -> None:
    wnids = tuple(f"n{number:03}" for number in range(200))
    make_folders(tmp_path / "a", wnids, each=1)
    images, mask = benchmarks.imagenet_r(tmp_path / "a", SMALL, synsets=("n-1", *wnids, "n999"))
    assert images.labels.tolist() == list(range(1, 201))
    assert mask.tolist() == [False] + [True] * 200 + [False]
    assert benchmarks.imagenet_sketch(tmp_path / "a", SMALL).num_classes == 200


# --- the real sets


@on_real_data
def test_real_class_lists_give_the_published_masks() -> None:
    lists = SHARED / "class-index"
    synsets = read_classes(lists / "imagenet_synsets.txt")
    assert len(synsets) == 1000
    assert list(synsets) == sorted(synsets)
    for letter in "aro":
        mask = benchmarks.class_mask(lists / f"imagenet_{letter}_synsets.txt", synsets)
        published = [int(line) for line in (lists / f"imagenet_{letter}_indices.txt").read_text().split()]
        assert mask.nonzero().flatten().tolist() == sorted(published)


@on_real_data
def test_real_sets_are_read() -> None:
    pytest.importorskip("pyarrow")
    lazily = Decoding(size=32)
    cifar = cifar10(SHARED / "cifar10", "test", lazily)
    assert cifar.labels.bincount().tolist() == [1000] * 10
    airplane = (cifar.labels == 0).nonzero().flatten()[:50]
    frog = (cifar.labels == 6).nonzero().flatten()[:50]
    blue = [cifar.read(part).float().mean((0, 2, 3))[2] for part in (airplane, frog)]
    assert blue[0] > blue[1] + 20  # the sky
    tiny = tiny_imagenet(SHARED / "tiny-imagenet", "val", Decoding(size=64))
    assert tiny.labels.bincount().tolist() == [50] * 200
    assert tiny.read(torch.arange(8)).shape == (8, 3, 64, 64)
    file = SHARED / "imagenet-val" / "imagenet_val_2perclass_224.parquet"
    imagenet = parquet_images(file, Decoding(size=224), num_classes=1000)
    assert imagenet.labels.bincount().tolist() == [2] * 1000
    assert imagenet.read(torch.tensor([3])).shape == (1, 3, 224, 224)
