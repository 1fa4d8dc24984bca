"""One cell of the vision study: train a model, then try on it everything that its configuration names."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

import robust_attention as ra
from robust_attention._config import describe, digest, rebuild
from robust_attention._files import alone, write_json
from robust_attention._seeds import mix
from robust_attention.data.augment import AugmentedExamples
from robust_attention.data.corruptions import Corrupted
from robust_attention.data.images import Images
from robust_attention.eval.accuracy import clean_accuracy, contaminations
from robust_attention.eval.adversarial import attack_all
from robust_attention.eval.measure import Measurement
from robust_attention.models.convnet import ConvNet
from robust_attention.models.vit import ViT
from robust_attention.recipes.vision import Evaluation, VisionConfig, classes
from robust_attention.study.grid import Cell, News, Tell
from robust_attention.study.sets import Sets, load_sets
from robust_attention.training.fit import Loss, Step, fit
from robust_attention.training.losses import cross_entropy_loss, hard_distillation
from robust_attention.training.parallel import rank


def run_cell(cell: Cell, folder: Path, device: torch.device, tell: Tell) -> dict[str, Any]:
    """Train the cell's model, measure, and return what its line holds. What is already done in `folder` is kept."""
    config: VisionConfig = cell.config
    sets = load_sets(config.data)
    model, history = trained(config, folder, sets, device, lambda doing, done: tell(News(cell.name, doing, done / 2)))
    twin = None
    if config.row != TWIN and config.evaluation.num_attacked != 0:
        # A lock in its folder lets cells that need the same twin wait for the first one to train it.
        twin_folder = folder.parent.parent / TWIN / folder.name
        twin, _ = trained(twin_of(config), twin_folder, sets, device, lambda doing, done: None)
    if rank():
        return {"measurements": []}  # the first process measures; the others wait for the next cell
    measurements: list[Measurement] = []
    done = 0.5

    def say(doing: str, share: float) -> None:
        tell(News(cell.name, doing, min(0.99, done + (1 - done) * share)))

    for name, measure in _groups(config, model, twin, sets, say):
        say(name, 0.0)
        measurements += _kept(folder / "measured" / f"{name}.json", config, measure)
        done += (0.9 - done) / 4
    damaged = {part: len(images.damaged) for part, images in sets._asdict().items()}
    return {"measurements": [m.to_dict() for m in measurements], "training": history, "damaged": damaged}


TWIN = "vit"
"""The row that every other one is compared with, and whose adversarial images are tried on it."""


def twin_of(config: VisionConfig) -> VisionConfig:
    """The same model with softmax attention, trained in the same way."""
    plain = replace(config.model, distilled=False)
    return replace(config, row=TWIN, model=plain, method=ra.Softmax(), teacher=None)


def build(config: VisionConfig) -> ViT:
    """The model with its first weights, which depend on the seed and the sizes alone."""
    model = ViT(config.model, config.method)
    model.init_weights(Generator().manual_seed(mix(config.seed, "weights")))
    return model


def trained(
    config: VisionConfig, folder: Path, sets: Sets, device: torch.device, tell: Callable[[str, float], None]
) -> tuple[ViT, dict[str, Any]]:
    """The trained model, from `folder` if it is there, and how its training went."""
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        _keep_config(config, folder)
        loss = cross_entropy_loss()
        if config.teacher is not None:
            teacher = ConvNet(config.teacher)
            teacher.init_weights(Generator().manual_seed(mix(config.seed, "teacher")))
            _learn(teacher, loss, config, folder / "teacher", sets, device, tell)
            loss = hard_distillation(teacher)
        model = build(config)
        return model, _learn(model, loss, config, folder, sets, device, tell)


def _learn(
    model: nn.Module,
    loss: Loss,
    config: VisionConfig,
    folder: Path,
    sets: Sets,
    device: torch.device,
    tell: Callable[[str, float], None],
) -> dict[str, Any]:
    """Train the model in place, or load it from `folder`; how it went."""

    def report(step: Step) -> None:
        tell(f"learning, loss {step.loss:.3f}", step.step / step.num_steps)

    examples = AugmentedExamples(sets.train, config.augment, sets.train.num_classes)
    how = replace(config.fit, seed=config.seed)
    fitted = fit(model, examples, loss, how, folder=folder, device=device, report=report)
    model.to(device).eval()
    return {
        "steps": len(fitted.losses),
        "first_losses": fitted.losses[:5],
        "final_loss": sum(fitted.losses[-20:]) / len(fitted.losses[-20:]),
        "seconds": round(fitted.seconds, 2),
        "examples_per_second": round(fitted.examples_per_second, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _keep_config(config: VisionConfig, folder: Path) -> None:
    """Write the resolved configuration beside the run, or refuse a run of another one."""
    path, new = folder / "config.json", describe(config)
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        old = new
    # What is tried on the trained model may change; what made it may not.
    if differ := [name for name in new if name not in ("evaluation", "row") and old.get(name) != new[name]]:
        raise ValueError(
            f"{folder} holds a run with other settings of {', '.join(differ)}; choose another --out, or remove it"
        )
    if rank() == 0:
        write_json(path, new)


def _groups(
    config: VisionConfig, model: nn.Module, twin: nn.Module | None, sets: Sets, tell: Callable[[str, float], None]
) -> Iterator[tuple[str, Callable[[], list[Measurement]]]]:
    """What is measured, piece by piece: a name, and a function that does it."""
    asked, sizes = config.evaluation, config.model
    images = sets.validation if asked.part == "validation" else sets.test
    seed, batch = config.seed, asked.batch_size

    def first(number: int | None) -> tuple[Images, Tensor]:
        indices = torch.arange(len(images) if number is None else min(number, len(images)))
        return images.take(indices), images.labels[indices]

    def spoilt() -> list[Measurement]:
        return contaminations(
            model,
            *first(asked.num_clean),
            patch_size=sizes.patch_size,
            kinds=asked.kinds,
            shares=asked.shares,
            draws=asked.draws,
            seed=seed,
            batch_size=batch,
        )

    def attacked() -> list[Measurement]:
        std = sizes.std or (0.5,) * sizes.channels
        some = first(asked.num_attacked)
        return attack_all(model, *some, asked.plan, twin=twin, std=std, seed=seed, batch_size=batch, tell=tell)

    yield (
        "clean",
        lambda: clean_accuracy(model, *first(asked.num_clean), draws=asked.draws, seed=seed, batch_size=batch),
    )
    if asked.kinds and asked.shares:
        yield "contamination", spoilt
    for kind in asked.corruptions:
        yield kind, partial(_corrupted, asked, kind, model, *first(asked.num_corrupted), config.seed)
    if asked.num_attacked != 0:
        yield "attacks", attacked


def _corrupted(
    asked: Evaluation, kind: str, model: nn.Module, images: Images, labels: Tensor, seed: int
) -> list[Measurement]:
    """Accuracy under one corruption at each severity."""
    found = []
    for severity in asked.severities:
        # The corruptions have a seed of their own: all models of a study meet the same images.
        worse = Corrupted(images, kind=kind, severity=severity, seed=0)
        for m in clean_accuracy(model, worse, labels, seed=seed, draws=asked.draws, batch_size=asked.batch_size):
            if m.metric == "accuracy":
                condition = m.condition.replace("clean", f"{kind} {severity}", 1)
                found.append(
                    replace(m, condition=condition, settings={**m.settings, "kind": kind, "severity": severity})
                )
    return found


def _kept(path: Path, config: VisionConfig, measure: Callable[[], list[Measurement]]) -> list[Measurement]:
    """Measurements from `path` if they were made with this configuration, else made now and kept there."""
    key = digest(config)
    if path.exists():
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["digest"] == key:
                return [Measurement.from_dict(m) for m in record["measurements"]]
        except (ValueError, KeyError):
            pass  # cut by a crash: measured again
    found = measure()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"digest": key, "measurements": [m.to_dict() for m in found]})
    return found


def load_model(folder: Path | str, device: torch.device | str = "cpu") -> nn.Module:
    """A model that a study trained, in evaluation mode."""
    from robust_attention.training.checkpoint import load_weights

    folder = Path(folder)
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"folder must hold a run of the vision study, got {folder} ({error.strerror}); "
            "pass out/vision-SCALE/runs/DATA/ROW/SEED"
        ) from error
    model = build(rebuild(record, classes()))
    load_weights(model, folder)
    return model.to(device).eval()


def images_of(config: VisionConfig) -> Images:
    """The images that a cell is tried on."""
    sets = load_sets(config.data)
    return sets.validation if config.evaluation.part == "validation" else sets.test
