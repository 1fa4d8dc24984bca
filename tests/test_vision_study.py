"""The vision study at its smoke scale, every row of it, small: from the command to the tables."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import robust_attention as ra
from robust_attention import cli
from robust_attention._config import describe, rebuild
from robust_attention.recipes import han2023_tables as paper
from robust_attention.recipes import han2023_vision as recipes
from robust_attention.recipes.vision import VisionConfig, classes
from robust_attention.study import store
from robust_attention.study.cost import images_per_second
from robust_attention.study.run import settings_of
from robust_attention.study.sets import load_sets
from robust_attention.study.studies import VISION
from robust_attention.study.vision import build, load_model, trained

TINY = {
    "fit.epochs": 1,
    "data.num_train": 48,
    "model.dim": 16,
    "model.depth": 1,
    "evaluation.num_clean": 40,
    "evaluation.shares": [0.25],
    "evaluation.severities": [3],
    "evaluation.num_corrupted": 10,
    "evaluation.num_attacked": 8,
    "evaluation.draws": 2,
    "evaluation.plan.pgd_steps": 2,
    "evaluation.plan.eot": 2,
    "evaluation.plan.draws": 2,
    "evaluation.plan.random_tries": 2,
    "evaluation.plan.spsa_steps": 2,
    "evaluation.plan.spsa_samples": 2,
}


def settings() -> list[str]:
    return [word for path, value in TINY.items() for word in ("--set", f"{path}={json.dumps(value)}")]


def run(*arguments: str) -> int | str | None:
    try:
        cli.main(list(arguments))
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study") / "smoke"
    assert run("study", "vision", "--out", str(folder), "--jobs", "1", "--seeds", "1", *settings()) == 0
    return folder


def records(out: Path) -> dict[str, dict[str, Any]]:
    return {record["row"]: record for record in store.read(store.result_files(out))}


def test_every_row_is_done_and_measured(out: Path) -> None:
    found = records(out)
    assert set(found) == set(recipes.ROWS)
    for row, record in found.items():
        assert record["status"] == "done", record
        conditions = {m["condition"] for m in record["measurements"]}
        assert {"clean", "noise 25%", "flat 25%", "foreign 25%", "fog 3"} <= conditions
        assert {"FGSM 4/255", "PGD-2 4/255", "all attacks 4/255"} <= conditions, row
        assert any(condition.startswith("SPSA") for condition in conditions)
        assert ("PGD-2 transfer 4/255" in conditions) == (row != "vit")
        assert ("PGD-2 detached 4/255" in conditions) == (row in ("rkde-huber", "rkde-hampel", "spkde"))
        assert ("clean, known draw" in conditions) == (row in ("mom", "fourierformer-mom"))
        for m in record["measurements"]:
            assert 0 <= m["value"] <= 1
            assert m["right"] is not None


def test_lines_hold_the_whole_configuration(out: Path) -> None:
    for record in records(out).values():
        config = rebuild(record["config"], classes())
        assert isinstance(config, VisionConfig)
        assert describe(config) == record["config"]
        assert config.fit.epochs == 1
        assert config.evaluation.plan.pgd_steps == 2
        assert (out / "runs" / record["cell"] / "config.json").is_file()


def test_tables_figures_and_ledger_are_written(out: Path) -> None:
    names = {path.name for path in out.iterdir()}
    assert {"report.json", "report.md", "ledger.md", "digits-contamination.png", "digits-attacks.png"} <= names
    table = (out / "report.md").read_text()
    for label, _ in recipes.ROWS.values():
        assert f"| {label} |" in table
    assert "ViT-MoM, known draw" in table
    ledger = (out / "ledger.md").read_text()
    assert "| ViT-SPKDE: clean, top 1 | 73.22 | +0.99 |" in ledger
    assert "too few seeds to conclude" in ledger


def test_done_cells_are_left_alone(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_bytes() for path in out.glob("cells*.jsonl")}
    assert run("study", "vision", "--out", str(out), "--jobs", "1", "--seeds", "1", *settings()) == 0
    assert {path: path.read_bytes() for path in out.glob("cells*.jsonl")} == before
    assert "0 cells to run of 10" in capsys.readouterr().out
    assert run("study", "vision", "--out", str(out), "--list", *settings()) == 0
    assert capsys.readouterr().out.split() == [word for row in recipes.ROWS for word in ("done", f"digits/{row}/0")]


def test_a_trained_model_loads_and_answers_as_measured(out: Path) -> None:
    record = records(out)["spkde"]
    model = load_model(out / "runs" / "digits" / "spkde" / "0")
    test = load_sets(rebuild(record["config"], classes()).data).test
    indices = torch.arange(40)
    with torch.no_grad():
        right = model(test.read(indices).float() / 255).argmax(1) == test.labels[indices]
    (clean,) = (m for m in record["measurements"] if m["condition"] == "clean" and m["metric"] == "accuracy")
    assert right.float().mean().item() == pytest.approx(clean["value"])
    with pytest.raises(ValueError, match="folder must hold a run of the vision study"):
        load_model(out)


def test_twins_share_weights_and_batches() -> None:
    base = recipes.digits_smoke(3)
    models = []
    for row in ("vit", "spkde", "mom"):
        config = recipes.ROWS[row][1](base)
        models.append(build(config).state_dict())
    for other in models[1:]:
        assert all(torch.equal(x, other[name]) for name, x in models[0].items())


def test_a_run_of_other_settings_is_refused(out: Path) -> None:
    record = records(out)["vit"]
    config = rebuild(record["config"], classes())
    folder = out / "runs" / record["cell"]
    sets = load_sets(config.data)
    changed = replace(config, fit=replace(config.fit, epochs=2))
    with pytest.raises(ValueError, match=r"holds a run with other settings of fit; choose another --out"):
        trained(changed, folder, sets, torch.device("cpu"), lambda *_: None)
    # What is tried on the model may change.
    again = replace(config, evaluation=replace(config.evaluation, num_attacked=1))
    trained(again, folder, sets, torch.device("cpu"), lambda *_: None)


def test_grids_of_every_scale() -> None:
    assert len(VISION.cells("smoke")) == 10
    lab = VISION.cells("lab", root="data")
    assert len(lab) == 2 * 3 * 10
    assert lab[0].config.data.root == os.path.join("data", "cifar10")
    assert len({cell.name for cell in lab}) == len(lab)
    (cell,) = VISION.cells("paper", root="data", rows=("spkde",))
    assert cell.config.method == ra.SPKDE(beta=1.4)
    assert cell.config.fit.epochs == 300


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--scale", "huge"), "scale must be one of"),
        (("--rows", "rkde"), "--rows must be of vit, .* got rkde"),
        (("--data", "mnist"), "--data must be of digits, got mnist"),
        (("--shard", "3/2"), "shard must be i/n"),
        (("--set", "fit.epochs"), "--set must be field=value"),
        (("--set", "fit.epoch=3"), "no 'epoch'"),
        (("--seeds", "0"), "seeds must be a whole number"),
        (("--set", "seed=7"), "seed is the grid's own"),
        (("--set", "evaluation.kinds=rain"), "kinds must be one of"),
        (("--set", "evaluation.shares=2.0"), "shares must lie above 0 and up to 1"),
        (("--set", "evaluation.num_attacked=-3"), "num_attacked must be a whole number"),
        (("--set", "data.num_train=-5"), "num_train must be a whole number"),
        (("--jobs", "0"), "jobs must be a whole number"),
    ],
)
def test_wrong_arguments_fail_clearly(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    said = run("study", "vision", "--out", str(tmp_path), *arguments)
    assert re.search(message, str(said)), said


def test_a_scale_without_its_data_says_so(tmp_path: Path) -> None:
    only = ("--rows", "vit", "--seeds", "1", "--data", "cifar10", "--device", "cpu", "--jobs", "1")
    command = ("study", "vision", "--scale", "lab", "--out", str(tmp_path), *only)
    assert "--root must be the folder that holds the data of scale 'lab', got none" in str(run(*command))
    assert "1 cells failed: cifar10/vit/0" in str(run(*command, "--root", str(tmp_path)))
    (record,) = store.read(store.result_files(tmp_path))
    assert "cifar10 must hold cifar-10-batches-bin/" in record["error"]


def test_settings_come_from_files_and_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('[fit]\nepochs = 3\n[evaluation.plan]\neps = [0.1]\n[method]\nis = "KDE"\n')
    found = settings_of(("fit.epochs=4",), tmp_path / "a.toml")
    assert found == {"fit.epochs": "4", "evaluation.plan.eps": [0.1], "method": {"is": "KDE"}}
    (tmp_path / "b.json").write_text("{")
    with pytest.raises(ValueError, match="--config must be a TOML or JSON file"):
        settings_of((), tmp_path / "b.json")


def test_the_papers_numbers_are_whole_tables() -> None:
    for table in (paper.TABLE_2, paper.TABLE_3):
        assert all(len(numbers) == len(paper.ROWS) for numbers in table.values())
    assert set(paper.ROWS) == set(recipes.ROWS) - {"kde"}
    assert paper.number(paper.TABLE_2, "PGD, top 1", "spkde") == 44.51
    assert paper.number(paper.TABLE_2, "PGD, top 1", "kde") is None


def test_cost_is_timed_on_the_device() -> None:
    assert images_per_second(recipes.digits_smoke(0), torch.device("cpu"), steps=1) > 0
