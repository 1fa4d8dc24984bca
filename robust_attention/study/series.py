"""One cell of the time-series study: cut the data, train, try the model; and its trained models for later use."""

import json
import math
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from robust_attention._config import rebuild
from robust_attention.data.series import Problem, folds, hold_out, load_problem, pad, scale_of
from robust_attention.data.series_contaminate import Kind, contaminate_series
from robust_attention.data.sines import sines
from robust_attention.data.ts import Missing, TSError, read_ts
from robust_attention.eval.measure import Measurement, Setting, pack
from robust_attention.eval.series import rights
from robust_attention.models.series import SeriesTransformer
from robust_attention.recipes.series import SeriesConfig, SeriesData, classes
from robust_attention.study.grid import Cell, News, Tell
from robust_attention.study.series_fit import CHOSEN, Parts, Run, build, share_of, trained
from robust_attention.training.checkpoint import load_weights

BEST_ON_TEST = "accuracy, best epoch on test"
"""The metric that published tables print: of all epochs the one that does best on the test series."""


def load_parts(config: SeriesData, seed: int) -> list[Parts]:
    """The series, cut by the seed: one set of parts, or one for each fold of a cross-validation."""
    whole, test = sines() if config.name == "sines" else _read(config.root, config.name, config.missing)
    if config.folds:
        cuts = folds(whole, config.folds, seed=seed)
    elif test is None:
        raise ValueError(
            f"{config.name} must have a TEST file where data.folds is 0, got TRAIN alone in {config.root}; "
            "cross-validate with --set data.folds=5"
        )
    else:
        cuts = [(whole, test)]
    return [Parts(*hold_out(rest, config.validation, seed=seed), held) for rest, held in cuts]


@lru_cache(maxsize=1)
def _read(root: str, name: str, missing: Missing) -> Problem:
    """The problem, which the next cells want too; reading takes seconds, in which a GPU would wait."""
    return load_problem(root, name, missing=missing)


def run_cell(cell: Cell, folder: Path, device: torch.device, tell: Tell) -> dict[str, Any]:
    """Train the cell's model (one for each fold), measure, and return what its line holds. Training resumes.

    Once all is measured the training checkpoints are removed, and the weights too unless `keep_weights`.
    """
    config: SeriesConfig = cell.config
    cuts = load_parts(config.data, config.seed)
    runs, places = [], [folder / f"fold-{n}" for n in range(len(cuts))] if config.data.folds else [folder]
    for number, (parts, place) in enumerate(zip(cuts, places, strict=True)):

        def learns(doing: str, done: float, number: int = number) -> None:
            tell(News(cell.name, doing, 0.9 * (number + done) / len(cuts)))

        runs.append(trained(config, parts, place, device, learns))
    tell(News(cell.name, "is tried", 0.9))
    found = measure(config, cuts, [run.model for run in runs], device)
    found.append(_best_on_test(config, cuts, runs))
    history = [run.history for run in runs]
    for place in places:
        _tidy(place, config.keep_weights)
    return {"measurements": [m.to_dict() for m in found], "training": history if config.data.folds else history[0]}


def _tidy(folder: Path, keep_weights: bool) -> None:
    for name in ("step-*", *(() if keep_weights else (f"{CHOSEN}/step-*",))):
        for path in sorted(folder.glob(name)):  # the records before the tensors that they vouch for
            path.unlink()


def measure(
    config: SeriesConfig, cuts: list[Parts], models: list[SeriesTransformer], device: torch.device
) -> list[Measurement]:
    """Accuracy on clean and on contaminated series; of a cross-validation over all folds together."""
    asked = config.evaluation
    conditions: list[tuple[Kind | None, float]] = [(kind, share) for kind in asked.kinds for share in asked.shares]
    return [_tried(config, cuts, models, device, *condition) for condition in [(None, 0.0), *conditions]]


def _tried(
    config: SeriesConfig,
    cuts: list[Parts],
    models: list[SeriesTransformer],
    device: torch.device,
    kind: Kind | None,
    share: float,
) -> Measurement:
    asked, results, ids = config.evaluation, [], []
    for parts, model in zip(cuts, models, strict=True):
        series = parts.validation if asked.part == "validation" else parts.test
        if kind is not None:
            std = scale_of(parts.train).std
            series = contaminate_series(series, kind=kind, share=share, seed=config.seed, std=std, size=asked.size)
        results.append(rights(model, series, device, asked.batch_size, asked.draws, config.seed))
        ids.append(series.ids)
    # In the order of the file, so that seeds and rows can be compared series by series.
    together = torch.cat(results, 1)[:, torch.cat(ids).argsort(stable=True)]
    settings: dict[str, Setting] = {"draws": len(together), "seed": config.seed, "batch_size": asked.batch_size}
    if kind is not None:
        settings |= {"kind": kind, "share": share, "size": asked.size}
    return Measurement(
        metric="accuracy",
        condition="clean" if kind is None else f"{kind} {share:.0%}",
        value=share_of(together),
        n=together.shape[1],
        right=pack(together),
        settings=settings,
    )


def _best_on_test(config: SeriesConfig, cuts: list[Parts], runs: list[Run]) -> Measurement:
    best = [max(run.epochs, key=lambda metrics: metrics["test"]) for run in runs]  # the first of equals
    number = [len(parts.test) for parts in cuts]
    return Measurement(
        metric=BEST_ON_TEST,
        condition="clean",
        value=math.fsum(m["test"] * n for m, n in zip(best, number, strict=True)) / sum(number),
        n=sum(number),
        settings={"epoch": ", ".join(str(int(m["epoch"])) for m in best), "seed": config.seed, "draws": 1},
    )


class Loaded(NamedTuple):
    """What a folder of a run holds."""

    model: SeriesTransformer
    classes: tuple[str, ...]
    config: SeriesConfig


def load_run(folder: Path | str, device: torch.device | str = "cpu") -> Loaded:
    """A model that the study trained, in evaluation mode, with the names of its classes."""
    folder = Path(folder)
    fold = "/fold-0" if (folder / "fold-0").is_dir() else ""
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config, sizes = (rebuild(record[name], classes()) for name in ("config", "model"))
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"folder must hold a run of the time-series study, got {folder} ({type(error).__name__}); pass "
            f"out/timeseries-SCALE/runs/PROBLEM/ROW/SEED{fold}"
        ) from error
    model = build(config, sizes)
    load_weights(model, folder / CHOSEN)
    return Loaded(model.to(device).eval(), tuple(record["classes"]), config)


def load_model(folder: Path | str, device: torch.device | str = "cpu") -> SeriesTransformer:
    """`model(series [B, L, C], mask [B, L]) -> logits`, as the study trained it, in evaluation mode."""
    return load_run(folder, device).model


class Guess(NamedTuple):
    """What a model takes a series for."""

    name: str
    """The class."""
    share: float
    """Its probability."""
    truth: str | None
    """The class that the file says; None where it says none."""


@torch.no_grad()
def classify(
    folder: Path | str, ts_file: Path | str, *, missing: Missing | None = None, device: torch.device | str = "cpu"
) -> list[Guess]:
    """Classify every series of a `.ts` file; `missing` None does with missing values what training did."""
    model, names, config = load_run(folder, device)
    file = read_ts(ts_file, missing=missing or config.data.missing)
    if file.channels != model.config.channels:
        raise TSError(file.path, None, None, f"must have {model.config.channels} dimensions, got {file.channels}")
    values, mask = pad(file.series)
    found: list[Guess] = []
    for places in torch.arange(len(values)).split(config.evaluation.batch_size):
        logits = model(values[places].to(device), mask[places].to(device))
        if not bool(logits.isfinite().all()):
            bad = int(places[~logits.isfinite().all(1).cpu()][0])
            raise TSError(file.path, None, None, f"series {bad + 1} must have values that add up, got too large ones")
        shares, guesses = logits.float().softmax(1).max(1)
        for place, share, guess in zip(places.tolist(), shares.tolist(), guesses.tolist(), strict=True):
            truth = None if file.labels is None else file.classes[file.labels[place]]
            found.append(Guess(names[guess], share, truth))
    return found
