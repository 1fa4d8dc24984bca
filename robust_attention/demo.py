"""The demo: twins that differ in their attention only learn digits; then their input is spoilt and attacked.

Twins share their initial weights, the order of their batches and every spoilt image, so that whatever differs between
them is their attention. `run` trains, measures, and leaves a picture and every number under one folder.
"""

import hashlib
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple, cast

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Generator, Tensor
from torch.nn import functional as F

import robust_attention as ra
from robust_attention._files import prepare_folder, write_json
from robust_attention.attacks.fgsm import fgsm
from robust_attention.attacks.pgd import pgd
from robust_attention.data import digits
from robust_attention.data.contaminate import KINDS, Contaminated, Kind, contaminate
from robust_attention.eval.robustness import BATCH, attacked, correct, logits_of, patch_weights
from robust_attention.eval.statistics import binomial_interval, holm, sign_flip_p
from robust_attention.models.vit import ViT, ViTConfig
from robust_attention.training.fit import FitConfig, Step, fit

METHODS: dict[str, ra.Method] = {
    "softmax": ra.Softmax(),
    "KDE": ra.KDE(),
    "RKDE": ra.RKDE(),
    "SPKDE": ra.SPKDE(),
    "MoM": ra.MoM(),
}
BASELINE = "softmax"
MODEL = ViTConfig(image_size=24, patch_size=4)
FIT = FitConfig()


@dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo does; the defaults are what `robust-attention demo` runs."""

    seed: int = 0
    """Initial weights, order of batches, contamination and attacks; the split of the digits does not depend on it."""
    model: ViTConfig = MODEL
    """Digits are enlarged to its image size: 36 patches, each smooth where nothing spoilt it."""
    fit: FitConfig = FIT
    """How to train; its seed is replaced by `seed`."""
    kinds: tuple[Kind, ...] = KINDS
    """Contaminations to try."""
    shares: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4)
    """Shares of patches to overwrite."""
    table_shares: tuple[float, ...] = (0.2, 0.4)
    """Those that the table shows."""
    eps: float = 1 / 64
    """Radius of the attacks: a quarter of a grey level of the digits."""
    pgd_steps: int = 20
    """Steps of PGD, each of 0.15 eps."""
    eot_samples: int = 8
    """Draws that a gradient averages over where the method draws at random."""
    fresh_draws: int = 5
    """Draws that an accuracy averages over where the method draws at random."""
    num_train: int | None = None
    """Training images; None means all."""
    num_test: int | None = None
    """Test images; None means all."""
    num_attacked: int = 256
    """Test images that are attacked."""
    num_threads: int = 2
    """Twins trained at once, each on one core; changes no number."""


class Trial(NamedTuple):
    """One thing done to the test images."""

    name: str
    kind: str
    strength: float
    """Share of patches, or eps."""


CLEAN = Trial("clean", "clean", 0.0)


@dataclass
class Twin:
    """One model and what it got right."""

    name: str
    model: ViT
    correct: dict[Trial, Tensor] = field(default_factory=dict)
    """`[draws, images]`, 0 or 1."""
    adversarial: Tensor = field(default_factory=lambda: torch.empty(0))
    """The images that PGD found."""
    seconds: dict[str, float] = field(default_factory=dict)
    loss: float = math.nan
    known_draw: float | None = None
    """Accuracy under PGD where attacker and model use one known draw."""
    reaches_zero: bool = True
    """Whether an attack that may change everything leaves nothing right."""


class Cancelled(Exception):
    """Another twin failed, or the user gave up."""


class Work:
    """What a twin's bar shows: a text, and batches done. Stops the twin once `stop` is set."""

    def __init__(self, progress: Progress, task: TaskID, stop: Event) -> None:
        self.progress, self.task, self.stop = progress, task, stop

    def now(self, doing: str) -> None:
        self.progress.update(self.task, doing=doing)

    def batch(self) -> None:
        if self.stop.is_set():
            raise Cancelled
        self.progress.advance(self.task)

    def step(self, step: Step) -> None:
        self.now(f"learning, loss {step.loss:.3f}")
        self.batch()


def run(config: DemoConfig, out: Path, console: Console) -> dict[str, Any]:
    """Run the demo, leave `demo.json`, `demo.png` and the twins in `out`, and return what the JSON holds."""
    # Minutes of training come next: whatever can be known to fail, a missing matplotlib or a full disk, fails now.
    import matplotlib  # noqa: F401
    import safetensors  # noqa: F401

    from robust_attention.plots import demo as picture

    prepare_folder(out)
    started = time.perf_counter()
    train, test = load(config)
    console.print(
        f"{len(METHODS)} twins, equal but for their attention, learn {len(train.images)} digits of "
        f"{config.model.num_patches} patches; then {len(test.images)} others are spoilt and attacked."
    )
    with _one_core_a_thread():
        twins = train_all(config, train, test, console)
        survive_all(config, twins, test)
        record = collect(config, twins, test)
    record["seconds"] = round(time.perf_counter() - started, 1)
    save_twins(out, config, {twin.name: twin.model for twin in twins})
    write_json(out / "demo.json", record)
    image = picture.draw(out / "demo.json", out / "demo.png")
    console.print(table(record))
    console.print("\n".join(record["notes"]), highlight=False)
    console.print(f"\n{record['seconds']:.0f} s. The picture: {image}", highlight=False, soft_wrap=True)
    return record


def save_twins(out: Path, config: DemoConfig, models: dict[str, ViT]) -> None:
    """All twins in one file, `twins.safetensors`, and what `load_twins` needs to build them, with its SHA-256."""
    from safetensors.torch import save

    tensors = {f"{name}/{key}": x for name, model in models.items() for key, x in model.state_dict().items()}
    packed = save(tensors)
    part = out / "twins.part"
    part.write_bytes(packed)
    part.replace(out / "twins.safetensors")
    about = {"model": asdict(config.model), "twins": list(models), "sha256": hashlib.sha256(packed).hexdigest()}
    write_json(out / "twins.json", about)


def load_twins(folder: Path) -> dict[str, ViT]:
    """The twins that a demo left in `folder`, ready to look at."""
    from safetensors.torch import load as unpack

    try:
        about = json.loads((folder / "twins.json").read_text(encoding="utf-8"))
        packed = (folder / "twins.safetensors").read_bytes()
    except OSError as error:
        raise ValueError(
            f"--model must be a folder that `robust-attention demo` wrote, got {folder} ({error.strerror}); "
            f"run robust-attention demo --out {folder}"
        ) from error
    found = hashlib.sha256(packed).hexdigest()
    if found != about["sha256"]:
        raise ValueError(
            f"twins.safetensors must have SHA-256 {about['sha256']}, got {found}; it is damaged: run the demo again"
        )
    tensors, models = unpack(packed), {}
    for name in about["twins"]:
        model = ViT(ViTConfig(**about["model"]), METHODS[name])
        model.load_state_dict({k.split("/", 1)[1]: x for k, x in tensors.items() if k.startswith(f"{name}/")})
        models[name] = model.eval()
    return models


def load(config: DemoConfig) -> tuple[digits.Digits, digits.Digits]:
    """The train and test split, enlarged to the model's image size."""
    size = config.model.image_size

    def enlarge(part: digits.Digits, number: int | None) -> digits.Digits:
        images = F.interpolate(part.images[:number], size=(size, size), mode="bilinear", align_corners=False)
        return digits.Digits(images.clamp(0, 1), part.labels[:number])

    splits = digits.split()
    return enlarge(splits.train, config.num_train), enlarge(splits.test, config.num_test)


def contaminations(config: DemoConfig) -> list[Trial]:
    return [Trial(f"{kind} {share:.0%}", kind, share) for kind in config.kinds for share in config.shares]


def attacks(config: DemoConfig) -> tuple[Trial, Trial, Trial]:
    """FGSM, PGD, and all that was tried."""
    names = ("FGSM", f"PGD-{config.pgd_steps}", "all attacks")
    return tuple(Trial(name, name.split("-")[0], config.eps) for name in names)  # type: ignore[return-value]


def spoil(config: DemoConfig, trial: Trial, images: Tensor) -> Contaminated:
    """The images under a contamination: the same for every twin, and nested over shares."""
    return contaminate(
        images,
        kind=cast(Kind, trial.kind),
        share=trial.strength,
        patch_size=config.model.patch_size,
        generator=Generator().manual_seed(config.seed),
    )


def train_all(config: DemoConfig, train: digits.Digits, test: digits.Digits, console: Console) -> list[Twin]:
    """Train and try every twin, a few at once, under a live display."""
    stop = Event()
    columns = (
        TextColumn("{task.description:8}"),
        BarColumn(bar_width=28),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[doing]}"),
    )
    spoilt = {CLEAN: test.images} | {t: spoil(config, t, test.images).images for t in contaminations(config)}
    with Progress(*columns, console=console) as progress, ThreadPoolExecutor(config.num_threads) as pool:
        work = {
            name: Work(
                progress,
                progress.add_task(name, total=_num_batches(config, name, train, test), doing="waiting", start=False),
                stop,
            )
            for name in METHODS
        }

        def job(name: str) -> Twin:
            progress.start_task(work[name].task)
            try:
                return train_and_try(config, name, train, test, spoilt, work[name])
            except BaseException:
                stop.set()
                raise

        # The slowest first, so that no core idles at the end.
        slow_first = sorted(METHODS, key=lambda name: name != "SPKDE")
        futures = {name: pool.submit(job, name) for name in slow_first}
        try:
            errors = [error for future in futures.values() if (error := future.exception()) is not None]
        except BaseException:  # an interrupt: the threads must end before the pool can
            stop.set()
            raise
        for error in errors:
            if not isinstance(error, Cancelled):
                raise error
        return [futures[name].result() for name in METHODS]


def train_and_try(
    config: DemoConfig,
    name: str,
    train: digits.Digits,
    test: digits.Digits,
    spoilt: dict[Trial, Tensor],
    work: Work,
) -> Twin:
    """One twin's whole life."""
    started = time.perf_counter()
    model = ViT(config.model, METHODS[name])
    model.init_weights(Generator().manual_seed(config.seed))
    twin = Twin(name, model)
    losses = fit(model, train.images, train.labels, replace(config.fit, seed=config.seed), report=work.step)
    twin.loss = sum(losses[-10:]) / len(losses[-10:])
    twin.seconds["train"] = time.perf_counter() - started
    generator = Generator().manual_seed(config.seed)
    logits = logits_of(model, generator, work.batch)
    draws = _draws(config, model.method)
    for trial, images in spoilt.items():
        work.now(trial.name)
        twin.correct[trial] = correct(logits, images, test.labels, draws=draws)
    _attack(config, twin, test, generator, work)
    twin.seconds["total"] = time.perf_counter() - started
    work.progress.update(work.task, completed=work.progress.tasks[work.task].total)
    work.now(f"{twin.correct[CLEAN].mean():.0%} of clean digits right")
    return twin


def _attack(config: DemoConfig, twin: Twin, test: digits.Digits, generator: Generator, work: Work) -> None:
    """FGSM and PGD through the true gradient; then what could still be stronger, or shows an attack to be broken."""
    images, labels = test.images[: config.num_attacked], test.labels[: config.num_attacked]
    method = twin.model.method
    draws, samples = _draws(config, method), config.eot_samples if method.stochastic else 1
    logits = logits_of(twin.model, generator, work.batch)
    fgsm_trial, pgd_trial, all_trial = attacks(config)

    def pgd_of(model: ViT, draw: Generator | None, number: int = len(images), eps: float = config.eps) -> Tensor:
        target = logits_of(model, draw, work.batch)
        start = Generator().manual_seed(config.seed)
        eot = samples if draw is not None else 1
        return attacked(
            lambda x, y: pgd(target, x, y, eps=eps, steps=config.pgd_steps, generator=start, samples=eot),
            images[:number],
            labels[:number],
        )

    work.now("FGSM")
    found = attacked(lambda x, y: fgsm(logits, x, y, eps=config.eps, samples=samples), images, labels)
    twin.correct[fgsm_trial] = correct(logits, found, labels, draws=draws)
    work.now("PGD")
    twin.adversarial = pgd_of(twin.model, generator)
    twin.correct[pgd_trial] = correct(logits, twin.adversarial, labels, draws=draws)
    survived = torch.minimum(twin.correct[fgsm_trial], twin.correct[pgd_trial])
    if "weight_grad" in {f.name for f in fields(method)}:
        # Weights may hide the gradient that matters: attack once more as if they were constant.
        work.now("PGD, weights detached")
        constant = ViT(config.model, replace(method, weight_grad="stop"))  # type: ignore[call-arg]
        constant.load_state_dict(twin.model.state_dict())
        detached = pgd_of(constant.eval(), generator)
        survived = torch.minimum(survived, correct(logits, detached, labels, draws=draws))
    twin.correct[all_trial] = survived
    if method.stochastic:
        work.now("PGD, draw known")
        fixed = logits_of(twin.model, None, work.batch)
        twin.known_draw = correct(fixed, pgd_of(twin.model, None), labels).mean().item()
    work.now("PGD, eps 1")
    everything = pgd_of(twin.model, generator, number=min(BATCH // 2, len(images)), eps=1.0)
    right = correct(logits, everything, labels[: len(everything)], draws=draws)
    twin.reaches_zero = right.mean().item() <= 0.05


def survive_all(config: DemoConfig, twins: list[Twin], test: digits.Digits) -> None:
    """Try every twin on the images that broke the others: what survives all attacks must survive these too."""
    *_, all_trial = attacks(config)
    labels = test.labels[: config.num_attacked]
    for twin in twins:
        logits = logits_of(twin.model, Generator().manual_seed(config.seed))
        for other in twins:
            if other is not twin:
                right = correct(logits, other.adversarial, labels, draws=_draws(config, twin.model.method))
                twin.correct[all_trial] = torch.minimum(twin.correct[all_trial], right)


def collect(config: DemoConfig, twins: list[Twin], test: digits.Digits) -> dict[str, Any]:
    """Every number of the demo, ready for JSON."""
    record: dict[str, Any] = {
        "study": "demo",
        "protocol": "pixel",
        "config": asdict(config),
        "versions": {
            "robust_attention": ra.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
        "command": sys.argv[1:],
        "baseline": BASELINE,
        "methods": [
            {
                "name": twin.name,
                "settings": repr(twin.model.method),
                "equation": twin.model.method.equation,
                "stochastic": twin.model.method.stochastic,
                "final_loss": twin.loss,
                "seconds": {key: round(value, 1) for key, value in twin.seconds.items()},
                "pgd_known_draw": twin.known_draw,
            }
            for twin in twins
        ],
        "cells": _cells(twins),
        "checks": {
            twin.name: {
                "PGD ≤ FGSM": _accuracy(twin, attacks(config)[1]) <= _accuracy(twin, attacks(config)[0]),
                "eps = 1 leaves at most 5 %": twin.reaches_zero,
            }
            for twin in twins
        },
        **_weights(config, twins, test),
    }
    record["notes"] = _notes(config, record)
    return record


def _cells(twins: list[Twin]) -> list[dict[str, Any]]:
    """One entry for each twin and trial, compared with the baseline image by image."""
    (baseline,) = (twin for twin in twins if twin.name == BASELINE)
    cells: list[dict[str, Any]] = []
    p_values: list[float] = []
    for twin in twins:
        for trial, right in twin.correct.items():
            per_image = right.mean(dim=0)
            accuracy = per_image.mean().item()
            low, high = binomial_interval(accuracy, len(per_image))
            cell: dict[str, Any] = {
                "method": twin.name,
                "trial": trial.name,
                "kind": trial.kind,
                "strength": trial.strength,
                "accuracy": accuracy,
                "low": low,
                "high": high,
                "n": len(per_image),
                "draws": len(right),
                # Right under every draw: what is left if the worst draw decides, image by image.
                "accuracy_worst_draw": right.amin(dim=0).mean().item(),
            }
            if twin is not baseline:
                difference = per_image - baseline.correct[trial].mean(dim=0)
                cell["difference"] = difference.mean().item()
                p_values.append(sign_flip_p(difference.tolist()))
            cells.append(cell)
    adjusted = iter(holm(p_values))
    for cell in cells:
        if "difference" in cell:
            cell["p_holm"] = next(adjusted)
            better = "better" if cell["difference"] > 0 else "worse"
            cell["verdict"] = better if cell["p_holm"] < 0.05 else "no difference detected"
    return cells


def _weights(config: DemoConfig, twins: list[Twin], test: digits.Digits) -> dict[str, Any]:
    """How much each patch counts: over all test images, and on one example."""
    share = config.table_shares[0]
    spoilt = {kind: spoil(config, Trial("", kind, share), test.images) for kind in config.kinds}
    ratios: dict[str, dict[str, float]] = {}
    maps: dict[str, Tensor] = {}
    for twin in twins:
        ratios[twin.name] = {}
        for kind, (images, hit) in spoilt.items():
            weight = patch_weights(twin.model, images, draws=40, generator=Generator().manual_seed(config.seed))
            ratios[twin.name][kind] = (weight[hit].mean() / weight[~hit].mean()).item()
            if kind == config.kinds[0]:
                maps[twin.name] = weight
    # The example is not picked by hand: the first image that every twin reads when it is clean.
    readable = torch.stack([twin.correct[CLEAN].amin(dim=0) for twin in twins]).amin(dim=0)
    index = int(readable.argmax())
    images, hit = spoilt[config.kinds[0]]
    return {
        "weight_ratio": {"share": share, "of_spoilt_over_clean": ratios},
        "example": {
            "rule": "the first test image that every twin reads when it is clean",
            "index": index,
            "label": int(test.labels[index]),
            "kind": config.kinds[0],
            "share": share,
            "clean": test.images[index, 0].tolist(),
            "spoilt": images[index, 0].tolist(),
            "hit": hit[index].tolist(),
            "weights": {name: weight[index].tolist() for name, weight in maps.items()},
            "read_as": {
                twin.name: int(logits_of(twin.model, None)(images[index : index + 1]).argmax()) for twin in twins
            },
        },
    }


def _notes(config: DemoConfig, record: dict[str, Any]) -> list[str]:
    cells = record["cells"]
    num_test, num_attacked = cells[0]["n"], cells[-1]["n"]
    notes = [
        f"Per cent right, ± half a 95 % interval over {num_test} images ({num_attacked} attacked, max-norm eps "
        f"{config.eps:.4g}). One training run each: another seed moves these numbers too.",
        f"▲ better, ▼ worse than {record['baseline']} (paired sign-flip test over images, Holm-corrected); unmarked: "
        "no difference detected.",
        "all attacks: right under FGSM, PGD, PGD with the robust weights held constant, and PGD images of every other "
        "twin.",
    ]
    for method in record["methods"]:
        if method["stochastic"]:
            notes.append(
                f"{method['name']} is random: gradients average {config.eot_samples} draws (EOT), accuracies "
                f"{config.fresh_draws} fresh ones; where the attacker knows the draw, {method['pgd_known_draw']:.0%} "
                "survive PGD."
            )
    for name, checks in record["checks"].items():
        notes += [f"† {name}: a check failed: {check}" for check, passed in checks.items() if not passed]
    return notes


def table(record: dict[str, Any]) -> Table:
    """The record's main numbers, for a terminal."""
    config = record["config"]
    names = [method["name"] for method in record["methods"]]
    cells = {(cell["trial"], cell["method"]): cell for cell in record["cells"]}
    failed = {name for name, checks in record["checks"].items() if not all(checks.values())}
    shown = Table(title="Digits read right, %", title_justify="left")
    shown.add_column("")
    for name in names:
        shown.add_column(name, justify="right")
    for trial in dict.fromkeys(cell["trial"] for cell in record["cells"]):
        row = [cells[trial, name] for name in names]
        contaminated = row[0]["kind"] in config["kinds"]
        if contaminated and row[0]["strength"] not in config["table_shares"]:
            continue
        is_attack = not contaminated and row[0]["kind"] != "clean"
        marks = ["†" if is_attack and cell["method"] in failed else "" for cell in row]
        shown.add_row(trial, *(_percent(cell) + mark for cell, mark in zip(row, marks, strict=True)))
    return shown


def _percent(cell: dict[str, Any]) -> str:
    mark = {"better": "▲", "worse": "▼"}.get(cell.get("verdict", ""), " ")
    half = 50 * (cell["high"] - cell["low"])
    return f"{100 * cell['accuracy']:.1f}±{half:.1f}{mark}"


def _accuracy(twin: Twin, trial: Trial) -> float:
    return twin.correct[trial].mean().item()


def _draws(config: DemoConfig, method: ra.Method) -> int:
    return config.fresh_draws if method.stochastic else 1


def _num_batches(config: DemoConfig, name: str, train: digits.Digits, test: digits.Digits) -> int:
    """Calls of the model that `train_and_try` makes, for the length of its bar."""
    method = METHODS[name]
    draws, samples = _draws(config, method), config.eot_samples if method.stochastic else 1
    steps = config.fit.epochs * math.ceil(len(train.images) / config.fit.batch_size)
    tries = (1 + len(contaminations(config))) * draws * math.ceil(len(test.images) / BATCH)
    num_attacked = math.ceil(min(config.num_attacked, len(test.images)) / BATCH)
    one_pgd = (config.pgd_steps + 1) * samples + draws
    weights_held = one_pgd if hasattr(method, "weight_grad") else 0
    known_draw = config.pgd_steps + 1 + 1 if method.stochastic else 0
    return steps + tries + num_attacked * (samples + draws + one_pgd + weights_held + known_draw) + one_pgd


@contextmanager
def _one_core_a_thread() -> Iterator[None]:
    # Tensors this small gain nothing from several cores; twins side by side do.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
