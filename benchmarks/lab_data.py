"""Carry image sets to a machine that cannot read parquet: pack the encoded images here, lay them out there.

    python benchmarks/lab_data.py pack cifar10_train.parquet cifar10_test.parquet --out packed
    python benchmarks/lab_data.py unpack packed --out data

`pack` writes, for each parquet file, one file of encoded images one after the other and one JSON with their lengths and
labels. `unpack` makes the published layouts from them: CIFAR-10's binary version (decoded), Tiny-ImageNet's folders
(encoded as they came). Needs pyarrow for packing, Pillow for unpacking CIFAR-10.
"""

import argparse
import io
import json
from itertools import accumulate, pairwise
from pathlib import Path


def pack(source: Path, out: Path) -> None:
    import pyarrow.parquet as pq

    table = pq.read_table(source)
    images = [row["bytes"] if isinstance(row, dict) else row for row in table["image"].to_pylist()]
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{source.stem}.bytes").write_bytes(b"".join(images))
    index = {"lengths": [len(image) for image in images], "labels": table["label"].to_pylist()}
    (out / f"{source.stem}.json").write_text(json.dumps(index))


def images_in(index: Path) -> list[tuple[bytes, int]]:
    about = json.loads(index.read_text())
    content = index.with_suffix(".bytes").read_bytes()
    ends = accumulate(about["lengths"], initial=0)
    return [(content[a:b], label) for (a, b), label in zip(pairwise(ends), about["labels"], strict=True)]


def lay_out_cifar10(parts: dict[str, Path], out: Path) -> None:
    from PIL import Image

    folder = out / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True, exist_ok=True)
    records: dict[str, list[bytes]] = {}
    for split, index in parts.items():
        records[split] = []
        for image, label in images_in(index):
            bands = Image.open(io.BytesIO(image)).convert("RGB").split()
            records[split].append(bytes([label]) + b"".join(band.tobytes() for band in bands))
    size = -(-len(records["train"]) // 5)
    for number in range(5):
        batch = records["train"][number * size : (number + 1) * size]
        (folder / f"data_batch_{number + 1}.bin").write_bytes(b"".join(batch))
    (folder / "test_batch.bin").write_bytes(b"".join(records["test"]))


def lay_out_tiny_imagenet(parts: dict[str, Path], out: Path) -> None:
    root = out / "tiny-imagenet" / "tiny-imagenet-200"
    lines = []
    for split, index in parts.items():
        for number, (image, label) in enumerate(images_in(index)):
            # Made-up names that sort as the labels do: the reader numbers classes in that order.
            wnid, name = f"n{label:08d}", f"{split}_{number}.JPEG"
            folder = root / split / wnid / "images" if split == "train" else root / split / "images"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(image)
            if split == "val":
                lines.append(f"{name}\t{wnid}\t0\t0\t63\t63\n")
    (root / "val" / "val_annotations.txt").write_text("".join(lines))


def unpack(packed: Path, out: Path) -> None:
    for name, splits, lay_out in (
        ("cifar10", ("train", "test"), lay_out_cifar10),
        ("tiny_imagenet", ("train", "val"), lay_out_tiny_imagenet),
    ):
        parts = {split: found[0] for split in splits if (found := sorted(packed.glob(f"{name}_{split}*.json")))}
        if len(parts) == len(splits):
            lay_out(parts, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "unpack"))
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    for path in given.paths:
        (pack if given.what == "pack" else unpack)(path, given.out)
