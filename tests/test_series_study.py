"""The time-series study: validation chooses the epoch, a cut run goes on bitwise, tables say what a case is worth."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import robust_attention as ra
from robust_attention._config import describe, override, rebuild
from robust_attention.data.series import scale_of
from robust_attention.data.series_contaminate import contaminate_series
from robust_attention.eval.measure import unpack
from robust_attention.eval.series import logits_of, rights
from robust_attention.models.series import SeriesTransformer, SeriesTransformerConfig
from robust_attention.recipes import han2023_series as paper
from robust_attention.recipes.series import SeriesConfig, SeriesData, SeriesEvaluation, classes
from robust_attention.study import series_fit
from robust_attention.study.grid import Cell, News
from robust_attention.study.run import run_cells, run_study
from robust_attention.study.series import BEST_ON_TEST, classify, load_model, load_parts, load_run, run_cell
from robust_attention.study.series_fit import Chosen, build, series_loss, sizes_of, trained
from robust_attention.study.studies import TIMESERIES
from robust_attention.training.config import FitConfig

CPU = torch.device("cpu")
TINY = SeriesConfig(
    row="mom",
    seed=0,
    data=SeriesData(name="sines"),
    model=SeriesTransformerConfig(dim=16, depth=1, num_heads=2, hidden=16),
    method=ra.MoM(),
    fit=FitConfig(epochs=3, batch_size=32, learning_rate=5e-3, save_seconds=0),
    evaluation=SeriesEvaluation(shares=(0.2,), draws=2, batch_size=48),
)


def silent(*_: Any) -> None:
    pass


def cell_of(config: SeriesConfig) -> Cell:
    labels = {"data": config.data.name, "row": config.row, "seed": config.seed}
    return Cell(name=f"{config.data.name}/{config.row}/{config.seed}", labels=labels, config=config)


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    return folder, run_cell(cell_of(TINY), folder, CPU, silent)


# One cell


def test_cell_measures_clean_contaminated_and_the_published_number(done: tuple[Path, dict[str, Any]]) -> None:
    _, line = done
    found = {(m["metric"], m["condition"]): m for m in line["measurements"]}
    assert list(found) == [
        ("accuracy", "clean"),
        *(("accuracy", f"{kind} 20%") for kind in ("spike", "drop", "swap", "channel")),
        (BEST_ON_TEST, "clean"),
    ]
    json.dumps(line, allow_nan=False)
    for (metric, _), m in found.items():
        assert m["n"] == 90
        if metric == "accuracy":
            assert m["right"].startswith("2x90:")
            assert m["value"] == pytest.approx(float(unpack(m["right"]).mean()))
    assert found["accuracy", "spike 20%"]["settings"] == {
        "draws": 2, "seed": 0, "batch_size": 48, "kind": "spike", "share": 0.2, "size": 5.0,
    }  # fmt: skip
    training = line["training"]
    assert found[BEST_ON_TEST, "clean"]["value"] == pytest.approx(max(training["test"]), abs=1e-6)
    assert len(training["validation"]) == len(training["test"]) == 3
    assert training["validation"][training["epoch"] - 1] == max(training["validation"])
    assert (training["num_train"], training["num_validation"]) == (57, 15)


def test_measured_numbers_are_those_of_the_model_that_was_kept(done: tuple[Path, dict[str, Any]]) -> None:
    folder, line = done
    (parts,) = load_parts(TINY.data, 0)
    model = load_model(folder)
    clean, _, dropped = line["measurements"][:3]
    assert unpack(clean["right"]).tolist() == rights(model, parts.test, CPU, 48, 2, 0).float().mean(0).tolist()
    spoilt = contaminate_series(parts.test, kind="drop", share=0.2, seed=0, std=scale_of(parts.train).std)
    assert unpack(dropped["right"]).tolist() == rights(model, spoilt, CPU, 48, 2, 0).float().mean(0).tolist()


def test_training_checkpoints_go_and_weights_stay_if_asked(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    folder, line = done
    assert not list(folder.glob("step-*"))
    assert len(list((folder / "chosen").glob("step-*"))) == 2
    again = run_cell(cell_of(replace(TINY, keep_weights=False)), tmp_path, CPU, silent)
    assert not list(tmp_path.rglob("step-*"))
    assert again["measurements"] == line["measurements"]


@pytest.mark.parametrize("save_every", [1, 5])
def test_cell_that_was_cut_goes_on_bitwise(done: tuple[Path, dict[str, Any]], tmp_path: Path, save_every: int) -> None:
    """Cut before steps 3, 5 and 6 of 6 are saved; with 5, weights were chosen that no checkpoint knows of."""
    folder, line = done
    config = replace(TINY, fit=replace(TINY.fit, save_every=save_every, report_every=1))

    class Cut(Exception):
        pass

    for place in (0.3, 0.6, 0.8):

        def cut(news: News, place: float = place) -> None:
            if news.done > place:
                raise Cut

        with pytest.raises(Cut):
            run_cell(cell_of(config), tmp_path, CPU, cut)
    assert list(tmp_path.glob("step-*.json")) or save_every == 5
    resumed = run_cell(cell_of(config), tmp_path, CPU, silent)
    assert resumed["measurements"] == line["measurements"]
    same = {"first_losses", "final_loss", "epoch", "validation", "test"}
    assert {name: resumed["training"][name] for name in same} == {name: line["training"][name] for name in same}
    first, second = weights(load_model(folder)), weights(load_model(tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_equal_seeds_pair_rows_and_other_seeds_cut_anew() -> None:
    (parts,) = load_parts(TINY.data, 0)
    (again,) = load_parts(TINY.data, 0)
    (other,) = load_parts(TINY.data, 1)
    assert torch.equal(parts.validation.ids, again.validation.ids)
    assert not torch.equal(parts.validation.ids, other.validation.ids)
    sizes = sizes_of(TINY, parts.train)
    first, second = (weights(build(replace(TINY, method=m), sizes)) for m in (ra.MoM(), ra.RKDE()))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_random_method_is_measured_on_fresh_draws_that_the_seed_fixes(done: tuple[Path, dict[str, Any]]) -> None:
    (parts,) = load_parts(TINY.data, 0)
    model = load_model(done[0])
    first = rights(model, parts.test, CPU, 48, 6, 0)
    assert first.shape == (6, 90)
    assert len({tuple(row.tolist()) for row in first}) > 1
    assert torch.equal(rights(model, parts.test, CPU, 48, 6, 0), first)
    assert not torch.equal(rights(model, parts.test, CPU, 48, 6, 1), first)


# The choice of the epoch


def test_chosen_epoch_is_best_on_validation_then_smallest_in_loss_then_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (parts,) = load_parts(TINY.data, 0)
    labels = parts.validation.labels
    model = build(TINY, sizes_of(TINY, parts.train))
    chosen = Chosen(tmp_path, TINY, parts, CPU)
    epochs: list[dict[str, float]] = []
    # (wrong ones, how sure): the third and the fifth are equal, and better than the second in loss alone.
    for epoch, (wrong, sure) in enumerate([(5, 1.0), (1, 1.0), (1, 3.0), (2, 9.0), (1, 3.0)], 1):
        logits = sure * torch.nn.functional.one_hot((labels + (torch.arange(len(labels)) < wrong)) % 3, 3).float()
        monkeypatch.setattr(series_fit, "logits_of", lambda *_, logits=logits: logits)
        with torch.no_grad():
            model.head.bias.fill_(epoch)
        epochs.append({"epoch": epoch, **chosen(model)})
    assert [round(m["validation"] * 15) for m in epochs] == [10, 14, 14, 13, 14]
    assert chosen.epoch(epochs) == 3
    assert Chosen(tmp_path, TINY, parts, CPU).epoch(epochs) == 3
    assert Chosen(tmp_path, replace(TINY, seed=9), parts, CPU).best is None
    series_fit.load_weights(model, tmp_path)
    assert (model.head.bias == 3).all()


def test_loss_is_cross_entropy_with_smoothing() -> None:
    logits, labels = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0])
    model: Any = lambda values, mask: logits  # noqa: E731
    values, mask = torch.zeros(2, 3, 1), torch.ones(2, 3, dtype=torch.bool)
    log = logits.log_softmax(1)
    wanted = -(0.9 * log[:, 0].mean() + 0.1 * log.mean())
    torch.testing.assert_close(series_loss(0.1)(model, (values, mask, labels)), wanted * 1.0)


# Cross-validation


def write_sorted(root: Path, number: int = 20) -> None:
    """A problem with a TRAIN file alone, sorted by class."""
    head = "@univariate true\n@equalLength true\n@classLabel true low high\n@data\n"
    generator = torch.Generator().manual_seed(0)
    lines = []
    for i in range(number):
        values = torch.randn(6, generator=generator) + (0.4 if i >= number // 4 else -0.4)
        lines.append(",".join(f"{v:.4f}" for v in values.tolist()) + (":high" if i >= number // 4 else ":low"))
    (root / "Sorted").mkdir()
    (root / "Sorted" / "Sorted_TRAIN.ts").write_text(head + "\n".join(lines))


def test_cross_validation_tests_every_series_once_in_the_order_of_the_file(tmp_path: Path) -> None:
    write_sorted(tmp_path)
    data = SeriesData(name="Sorted", root=str(tmp_path), folds=3)
    fit = replace(TINY.fit, epochs=8, batch_size=4, learning_rate=0.03, final_learning_rate=1.0)
    config = replace(TINY, data=data, method=ra.Softmax(), fit=fit)
    line = run_cell(cell_of(config), tmp_path / "run", CPU, silent)
    clean, best = line["measurements"][0], line["measurements"][-1]
    assert (clean["n"], best["n"], len(line["training"])) == (20, 20, 3)
    got = unpack(clean["right"])
    assert 0 < float(got.mean()) < 1
    assert any(max(run["test"]) > run["test"][-1] for run in line["training"])  # else the last epoch would do as well
    for number, parts in enumerate(load_parts(data, 0)):
        assert len(set(parts.train.ids.tolist() + parts.validation.ids.tolist() + parts.test.ids.tolist())) == 20
        model = load_model(tmp_path / "run" / f"fold-{number}")
        right = logits_of(model, parts.test, CPU, 48).argmax(1) == parts.test.labels
        assert got[parts.test.ids].tolist() == right.float().tolist()
    cases = [max(run["test"]) * len(p.test) for run, p in zip(line["training"], load_parts(data, 0), strict=True)]
    assert best["value"] == pytest.approx(sum(cases) / 20, abs=1e-5)
    assert best["settings"]["epoch"].count(",") == 2
    with pytest.raises(ValueError, match=r"pass out/timeseries-SCALE/runs/PROBLEM/ROW/SEED/fold-0"):
        load_model(tmp_path / "run")


def test_problem_without_test_file_asks_for_folds_and_fails_clearly(tmp_path: Path) -> None:
    write_sorted(tmp_path)
    with pytest.raises(ValueError, match=r"cross-validate with --set data\.folds=5"):
        load_parts(SeriesData(name="Sorted", root=str(tmp_path)), 0)


def test_long_series_are_averaged_over_windows(tmp_path: Path) -> None:
    (parts,) = load_parts(TINY.data, 0)
    config = replace(TINY, data=replace(TINY.data, max_tokens=12))
    sizes = sizes_of(config, parts.train)
    assert (sizes.window, sizes.length) == (3, 10)
    assert (sizes_of(TINY, parts.train).window, sizes_of(TINY, parts.train).length) == (1, 30)
    run = trained(replace(config, fit=replace(TINY.fit, epochs=1)), parts, tmp_path, CPU, silent)
    assert logits_of(run.model, parts.test, CPU, 48).shape == (90, 3)


# A trained model


def test_trained_model_loads_in_three_lines(done: tuple[Path, dict[str, Any]]) -> None:
    (parts,) = load_parts(TINY.data, 0)
    model = load_model(done[0])
    logits = model(parts.test.values, parts.test.mask)
    assert isinstance(model, SeriesTransformer)
    assert not model.training
    assert logits.shape == (90, 3)
    torch.testing.assert_close(model.channel_mean, scale_of(parts.train).mean)
    assert load_run(done[0]).config == TINY


def test_classify_names_the_class_of_every_series_of_a_file(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (parts,) = load_parts(TINY.data, 0)
    lines = [
        ":".join(",".join(map(str, channel)) for channel in values[mask].T.tolist())
        for values, mask in zip(parts.test.values[:5], parts.test.mask[:5], strict=True)
    ]
    path = tmp_path / "new.ts"
    path.write_text("@dimensions 2\n@classLabel false\n@data\n" + "\n".join(lines))
    guesses = classify(done[0], path)
    logits = load_model(done[0])(parts.test.values[:5], parts.test.mask[:5])
    assert [g.name for g in guesses] == [parts.test.classes[i] for i in logits.argmax(1).tolist()]
    assert [g.share for g in guesses] == pytest.approx(logits.softmax(1).amax(1).tolist(), abs=1e-5)
    assert {g.truth for g in guesses} == {None}
    # Names of another file count as they are written; the model's own are those it was trained with.
    path.write_text("@dimensions 2\n@classLabel true x slow\n@data\n" + lines[0] + ":slow\n" + lines[1] + ":x\n")
    assert [g.truth for g in classify(done[0], path)] == ["slow", "x"]


def test_classify_what_does_not_fit_fails_clearly(done: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    path = tmp_path / "new.ts"
    path.write_text("@classLabel false\n@data\n1,2,3")
    with pytest.raises(ValueError, match=r"new\.ts: must have 2 dimensions, got 1"):
        classify(done[0], path)
    path.write_text("@classLabel false\n@data\n" + ":".join([",".join("1" * 31)] * 2))
    with pytest.raises(ValueError, match="must not be longer than the model's 30 steps, got 31"):
        classify(done[0], path)
    path.write_text("@classLabel false\n@data\n" + ":".join(["3e38,-3e38,3e38"] * 2))
    with pytest.raises(ValueError, match="series 1 must have values that add up, got too large ones"):
        classify(done[0], path)
    with pytest.raises(ValueError, match="folder must hold a run of the time-series study"):
        classify(tmp_path, path)


# Recipes and the grid


def test_recipes_have_every_row_and_the_paper_s_numbers() -> None:
    assert set(paper.TABLE_5) == set(paper.ROWS) - {"kde"}
    assert all(list(numbers) == list(paper.PAPER_NAMES.values()) for numbers in paper.TABLE_5.values())
    assert sum(sum(numbers.values()) for numbers in paper.TABLE_5.values()) == pytest.approx(2291.51)
    assert set(paper.SCALES["paper"]) == set(paper.PAPER_NAMES)
    assert len(paper.SCALES["lab"]) == 6
    assert paper.SEEDS["lab"] == 10
    for recipes in paper.SCALES.values():
        for name, recipe in recipes.items():
            for row, (_, change) in paper.ROWS.items():
                config = change(recipe(4, "root"))
                assert (config.row, config.seed, config.data.name) == (row, 4, name)
                assert rebuild(json.loads(json.dumps(describe(config))), classes()) == config
    assert paper.SCALES["lab"]["Heartbeat"](0, "").data.folds == 5
    assert override(TINY, {"data.folds": "3", "method.blocks": 7}, classes()).method == ra.MoM(blocks=7)


def test_data_settings_fails_clearly() -> None:
    with pytest.raises(ValueError, match="folds must be 0 or at least 2, got 1"):
        SeriesData(name="sines", folds=1)
    with pytest.raises(ValueError, match="validation must lie between 0 and 1"):
        SeriesData(name="sines", validation=0.0)


def test_cells_are_problems_by_seeds_by_rows() -> None:
    cells = TIMESERIES.cells("lab", root="r", data=["Heartbeat", "Handwriting"], rows=["kde", "mom"], seeds=2)
    assert [cell.name for cell in cells][:3] == ["Heartbeat/kde/0", "Heartbeat/mom/0", "Heartbeat/kde/1"]
    assert len(cells) == 8
    assert len(TIMESERIES.cells("lab", root="r")) == 6 * 10 * 7
    with pytest.raises(ValueError, match=r"--rows must be of transformer, .*, got vit"):
        TIMESERIES.cells("lab", rows=["vit"])
    with pytest.raises(ValueError, match="--data must be of sines, got Heartbeat"):
        TIMESERIES.cells("smoke", data=["Heartbeat"])


def test_study_refuses_what_it_cannot_do_and_fails_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="--root must be the folder that holds the data of scale 'lab'"):
        run_study(TIMESERIES, scale="lab", out=tmp_path, device="cpu", list_only=True)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "1")
    with pytest.raises(ValueError, match="got torchrun; use --shard"):
        run_study(TIMESERIES, scale="smoke", out=tmp_path, device="cpu")


def test_study_runs_every_row_at_test_size_and_reports(tmp_path: Path) -> None:
    from robust_attention.plots.series import markdown
    from robust_attention.study.series_pages import series_report

    settings = {
        "fit.epochs": 2, "model.dim": 16, "model.hidden": 16, "model.depth": 1, "fit.batch_size": 32,
        "evaluation.draws": 2,
    }  # fmt: skip
    cells = TIMESERIES.cells("smoke", seeds=1, settings=settings)
    assert [cell.labels["row"] for cell in cells] == list(paper.ROWS)
    console = Console(width=100, record=True, file=io.StringIO())
    assert run_cells(TIMESERIES, cells, tmp_path, console, device=CPU) == []
    assert run_cells(TIMESERIES, cells, tmp_path, console, device=CPU) == []
    assert "0 cells to run of 7, on cpu" in console.export_text()
    report = json.loads(json.dumps(series_report(tmp_path), allow_nan=False))
    part = report["data"]["sines"]
    assert part["n"] == 90
    assert [len(part["pairs"]), len(report["ranks"])] == [12, 3]
    assert set(part["share_curves"]) == {"spike", "drop", "swap", "channel"}
    assert report["ranks"][0]["critical_difference"] == pytest.approx(9.008, abs=0.01)
    text = markdown(report)
    assert "90 test cases: one case is 1.11 points." in text
    assert "| Transformer-MoM | clean |" in text
    assert "critical difference 9.01" in text


def line_of(data: str, row: str, seed: int, wrong: int, best: float) -> dict[str, Any]:
    from robust_attention.eval.measure import Measurement, pack

    right = (torch.arange(40) >= wrong)[None]
    shared = {"n": 40, "settings": {"seed": seed}}
    found = [
        Measurement(metric="accuracy", condition="clean", value=1 - wrong / 40, right=pack(right), **shared),
        Measurement(metric=BEST_ON_TEST, condition="clean", value=best, **shared),
    ]
    return {
        "cell": f"{data}/{row}/{seed}", "data": data, "row": row, "seed": seed, "status": "done",
        "hardware": "paper", "commit": "0", "measurements": [m.to_dict() for m in found],
    }  # fmt: skip


def test_report_ranks_tests_and_stands_beside_the_paper(tmp_path: Path) -> None:
    from robust_attention.plots.series import markdown
    from robust_attention.study import store
    from robust_attention.study.series_pages import series_report

    for data in ("Heartbeat", "UWaveGestureLibrary", "Handwriting"):
        for seed in range(4):
            for row, wrong in (("transformer", 16 + seed % 2), ("mom", 3), ("spkde", 16 + seed % 2)):
                store.append(tmp_path / "cells.jsonl", line_of(data, row, seed, wrong, 0.95))
    report = series_report(tmp_path)
    clean, best = report["ranks"]
    assert clean["mean_ranks"] == {"transformer": 2.5, "spkde": 2.5, "mom": 1.0}
    assert best["mean_ranks"] == {"transformer": 2.0, "spkde": 2.0, "mom": 2.0}
    mom, same = report["data"]["Heartbeat"]["pairs"]
    assert (mom["row"], mom["better"], mom["worse"], mom["verdict"]) == ("mom", 14, 0, "better")
    assert mom["p_holm"] == pytest.approx(2 * 2 / 2**14)
    assert mom["gain_in_cases"] == pytest.approx(13.5)
    assert (same["better"], same["worse"], same["p_holm"]) == (0, 0, 1.0)
    ledger = {(line["problem"], line["row"]): line for line in report["ledger"]}
    assert len(ledger) == 6  # Handwriting is not in the paper
    assert ledger["Heartbeat", "mom"]["paper_gain"] == "-2.53"
    assert ledger["Heartbeat", "mom"]["conclusion"] == "printed worse, ours better: the sign is not confirmed"
    assert ledger["Heartbeat", "spkde"]["conclusion"] == "printed better; ours detects no difference"
    assert ledger["Heartbeat", "transformer"]["best"] == "95.0"
    assert "one case is 2.50 points" in markdown(report)
