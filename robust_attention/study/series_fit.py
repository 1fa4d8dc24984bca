"""Train one model of the time-series study, and keep the epoch that validation chooses."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from robust_attention._config import describe, digest
from robust_attention._files import write_json
from robust_attention._seeds import mix
from robust_attention.data.series import Series, SeriesExamples, scale_of
from robust_attention.eval.series import logits_of, right
from robust_attention.models.series import SeriesTransformer, SeriesTransformerConfig
from robust_attention.recipes.series import SeriesConfig
from robust_attention.training.checkpoint import Checkpoints, load_weights
from robust_attention.training.fit import Loss, Step, fit
from robust_attention.training.parallel import weights_of

CHOSEN = "chosen"
"""Folder of the weights that validation chose, inside that of a run."""


class Parts(NamedTuple):
    """Three disjoint sets of series."""

    train: Series
    validation: Series
    test: Series


class Run(NamedTuple):
    """A trained model."""

    model: SeriesTransformer
    """With the weights of the epoch that validation chose."""
    epochs: list[dict[str, float]]
    """What every epoch had: epoch, validation, validation loss, test."""
    history: dict[str, Any]
    """How training went, for the cell's line."""


def build(config: SeriesConfig, sizes: SeriesTransformerConfig) -> SeriesTransformer:
    """The model with its first weights, which depend on the seed and the sizes alone."""
    model = SeriesTransformer(sizes, config.method)
    model.init_weights(Generator().manual_seed(mix(config.seed, "weights")))
    return model


def sizes_of(config: SeriesConfig, series: Series) -> SeriesTransformerConfig:
    """The sizes of the configuration with those that the data have."""
    window = math.ceil(series.length / (config.data.max_tokens or series.length))
    return replace(
        config.model,
        channels=series.channels,
        length=math.ceil(series.length / window),
        num_classes=len(series.classes),
        window=window,
    )


def series_loss(label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of `model(values, mask)`, mean over a batch (values, mask, labels)."""

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        values, mask, labels = batch
        return F.cross_entropy(model(values, mask).float(), labels, label_smoothing=label_smoothing)

    return loss


def trained(
    config: SeriesConfig, parts: Parts, folder: Path, device: torch.device, tell: Callable[[str, float], None]
) -> Run:
    """The trained model, from `folder` if it is there."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = sizes_of(config, parts.train)
    model = build(config, sizes)
    model.standardise(*scale_of(parts.train))
    model.to(device)
    write_json(
        folder / "config.json",
        {"config": describe(config), "model": describe(sizes), "classes": list(parts.train.classes)},
    )
    chosen = Chosen(folder / CHOSEN, config, parts, device)

    def report(step: Step) -> None:
        tell(f"{config.row} learns, loss {step.loss:.3f}", step.step / step.num_steps)

    fitted = fit(
        model,
        SeriesExamples(parts.train),
        series_loss(config.label_smoothing),
        replace(config.fit, seed=config.seed),
        folder=folder,
        device=device,
        report=report,
        validate=chosen,
    )
    load_weights(model, folder / CHOSEN)
    history = {
        "steps": len(fitted.losses),
        "first_losses": fitted.losses[:5],
        "final_loss": sum(fitted.losses[-20:]) / len(fitted.losses[-20:]),
        "seconds": round(fitted.seconds, 2),
        "examples_per_second": round(fitted.examples_per_second, 1),
        "parameters": sum(p.numel() for p in model.parameters()),
        "num_train": len(parts.train),
        "num_validation": len(parts.validation),
        "epoch": chosen.epoch(fitted.metrics),
        "validation": [round(metrics["validation"], 6) for metrics in fitted.metrics],
        "test": [round(metrics["test"], 6) for metrics in fitted.metrics],
    }
    return Run(model.to(device).eval(), fitted.metrics, history)


class Chosen:
    """Looks at a model after each epoch, and keeps the weights of the best one so far in a folder.

    Best: the highest accuracy on validation; among equals, which few validation series make common, the smallest
    validation loss; then the first. A resumed run repeats the epochs since its checkpoint bitwise, so the weights kept
    by the run that was cut are those it will choose again: they need not be rolled back.
    """

    def __init__(self, folder: Path, config: SeriesConfig, parts: Parts, device: torch.device) -> None:
        self.checkpoints = Checkpoints(folder, keep=1)
        self.parts, self.device, self.batch_size = parts, device, config.evaluation.batch_size
        self.digest = digest(config)
        saved = self.checkpoints.newest()
        mine = saved is not None and saved.record.get("digest") == self.digest
        self.best: dict[str, float] | None = saved.record["metrics"] if saved is not None and mine else None

    def __call__(self, model: nn.Module) -> dict[str, float]:
        logits = logits_of(model, self.parts.validation, self.device, self.batch_size)
        labels = self.parts.validation.labels
        found = {
            "validation": share_of(logits.argmax(1) == labels),
            "validation loss": float(F.cross_entropy(logits, labels)),
            "test": share_of(right(model, self.parts.test, self.device, self.batch_size)),
        }
        if self.best is None or _score(found) > _score(self.best):
            tensors = {f"model.{name}": tensor.detach().cpu() for name, tensor in weights_of(model).items()}
            self.checkpoints.save(0, tensors, {"metrics": found, "digest": self.digest})
            self.best = found
        return found

    def epoch(self, epochs: list[dict[str, float]]) -> int:
        """Which epoch was kept; 0 where a device that does not repeat itself has changed it in a second start."""
        kept = _score(self.best or {})
        return next((int(metrics["epoch"]) for metrics in epochs if _score(metrics) == kept), 0)


def _score(metrics: dict[str, float]) -> tuple[float, float]:
    loss = metrics.get("validation loss", math.inf)
    return metrics.get("validation", -1.0), -loss if math.isfinite(loss) else -math.inf


def share_of(right: Tensor) -> float:
    """The mean of right and wrong."""
    return float(right.double().mean())
