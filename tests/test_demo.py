"""The demo, small: what it leaves, that its picture needs its numbers alone, and how it fails."""

import errno
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from robust_attention import demo
from robust_attention._files import prepare_folder, write_json
from robust_attention.data.images import digits_images
from robust_attention.plots import demo as picture

TINY: dict[str, Any] = {
    "fit.epochs": 1,
    "data.num_train": 64,
    "model.dim": 16,
    "model.depth": 1,
    "evaluation.shares": [0.2],
    "evaluation.num_clean": 60,
    "evaluation.num_attacked": 12,
    "evaluation.draws": 2,
    "evaluation.plan.pgd_steps": 2,
    "evaluation.plan.eot": 2,
    "evaluation.plan.draws": 2,
    "evaluation.plan.random_tries": 2,
}


def console() -> Console:
    return Console(file=io.StringIO(), width=150)


class Result:
    """One run of the tiny demo."""

    def __init__(self, folder: Path) -> None:
        self.folder, shown = folder, console()
        self.record = demo.run(demo.demo_cells(settings=TINY), folder, shown, jobs=1)
        assert isinstance(shown.file, io.StringIO)
        self.shown = shown.file.getvalue()


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return Result(tmp_path_factory.mktemp("demo") / "new" / "folder")


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is not JSON")


def test_demo_leaves_its_numbers_and_a_picture(result: Result) -> None:
    files = sorted(path.name for path in result.folder.iterdir())
    assert files == ["cells-1-of-1.jsonl", "demo.json", "demo.png", "runs"]
    written = json.loads((result.folder / "demo.json").read_text(encoding="utf-8"), parse_constant=refuse)
    assert written == json.loads(json.dumps(result.record))
    image = (result.folder / "demo.png").read_bytes()
    assert image.startswith(b"\x89PNG")
    assert len(image) > 10_000
    assert str(result.folder / "demo.png") in result.shown


def test_picture_needs_the_numbers_alone(result: Result, tmp_path: Path) -> None:
    shutil.copy(result.folder / "demo.json", tmp_path / "numbers.json")
    image = picture.draw(tmp_path / "numbers.json", tmp_path / "deep" / "picture.png")
    assert image.read_bytes() == (result.folder / "demo.png").read_bytes()


def test_cells_hold_every_twin_on_every_trial(result: Result) -> None:
    cells = {(cell["method"], cell["trial"]): cell for cell in result.record["cells"]}
    names = list(demo.NAMES.values())
    for trial in ("clean", "noise 20%", "flat 20%", "foreign 20%", "FGSM 4/255", "PGD-2 4/255", "all attacks 4/255"):
        for name in names:
            cell = cells[name, trial]
            assert 0 <= cell["mean"] <= 1
            assert cell["n"] == (12 if "/255" in trial else 60)
            assert (cell["verdict"] is None) == (name == "softmax")
            assert cells[name, "all attacks 4/255"]["mean"] <= cells[name, "PGD-2 4/255"]["mean"]
    kinds = {trial: cells["softmax", trial]["kind"] for trial in ("clean", "noise 20%", "PGD-2 4/255")}
    assert kinds == {"clean": "clean", "noise 20%": "noise", "PGD-2 4/255": "attack"}
    assert cells["softmax", "noise 20%"]["strength"] == 0.2


def test_example_and_weights_fit_the_patches(result: Result) -> None:
    example, ratio = result.record["example"], result.record["weight_ratio"]
    assert sum(example["hit"]) == 7
    clean, spoilt = torch.tensor(example["clean"]), torch.tensor(example["spoilt"])
    for place, hit in enumerate(example["hit"]):
        row, column = 4 * (place // 6), 4 * (place % 6)
        window = slice(row, row + 4), slice(column, column + 4)
        assert torch.equal(clean[window], spoilt[window]) == (not hit)
    test = digits_images(24).test
    assert example["label"] == int(test.labels[example["index"]])
    torch.testing.assert_close(clean, test.read(torch.tensor([example["index"]]))[0, 0].float() / 255)
    for name in demo.NAMES.values():
        assert sum(example["weights"][name]) == pytest.approx(36, rel=1e-5)
        assert set(ratio["of_spoilt_over_clean"][name]) == {"noise", "flat", "foreign"}
    for name in ("softmax", "KDE"):
        assert set(example["weights"][name]) == {1.0}


def test_table_shows_every_twin(result: Result) -> None:
    for words in (*demo.NAMES.values(), "clean", "noise 20%", "all attacks"):
        assert words in result.shown


def test_started_again_it_measures_nothing_anew(result: Result, tmp_path: Path) -> None:
    shutil.copytree(result.folder, tmp_path / "demo")
    lines = (tmp_path / "demo" / "cells-1-of-1.jsonl").read_bytes()
    again = demo.run(demo.demo_cells(settings=TINY), tmp_path / "demo", console(), jobs=1)
    assert (tmp_path / "demo" / "cells-1-of-1.jsonl").read_bytes() == lines
    assert again["cells"] == result.record["cells"]
    assert again["example"] == result.record["example"]


def test_another_seed_gives_other_numbers() -> None:
    (first, *_), (second, *_) = demo.demo_cells(0), demo.demo_cells(1)
    assert (first.name, second.name) == ("digits/spkde/0", "digits/spkde/1")
    assert (first.config.seed, second.config.seed) == (0, 1)


def test_a_failing_twin_is_named(tmp_path: Path) -> None:
    cells = demo.demo_cells(settings={**TINY, "data.size": 12})
    with pytest.raises(ValueError, match=r"every cell must end, but digits/spkde/0.* failed"):
        demo.run(cells[:1], tmp_path, console(), jobs=1)
    assert "images must be floating-point" in (tmp_path / "cells-1-of-1.jsonl").read_text()


def test_a_folder_that_takes_nothing_fails_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="--out must be a folder that can be written to"):
        prepare_folder(tmp_path / "file")

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"4 MiB free, got .*No space left on device"):
        prepare_folder(tmp_path / "full")
    assert list((tmp_path / "full").iterdir()) == []


def test_a_number_that_is_none_is_not_written(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="JSON compliant"):
        write_json(tmp_path / "a.json", {"x": float("nan")})
    assert json.loads((tmp_path / "a.json").read_text()) == {"x": 1}
