"""One cell of the language study: train a model, score it on clean and on swapped text; and use it afterwards."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Generator, nn

from robust_attention._config import describe, digest, rebuild
from robust_attention._files import alone, write_json
from robust_attention._seeds import mix
from robust_attention.data.text import Coder, load_coder
from robust_attention.data.tokens import Windows
from robust_attention.eval.measure import Measurement
from robust_attention.eval.perplexity import score, sliding_losses
from robust_attention.models.generate import generate
from robust_attention.models.lm import LanguageModel, next_word_loss
from robust_attention.recipes.language import LanguageConfig, classes
from robust_attention.study.grid import Cell, News, Tell
from robust_attention.study.language_measure import Blocks, Found, measure
from robust_attention.study.texts import Texts, load_texts
from robust_attention.training.checkpoint import Checkpoints, load_weights
from robust_attention.training.config import MAY_CHANGE
from robust_attention.training.fit import Step, fit
from robust_attention.training.parallel import rank, weights_of

_VALIDATED = 50_000  # first tokens of the validation text that are scored after each epoch
WEIGHTS, WORDS = "weights", "words.json"
"""What a run's folder holds once it is trained, beside config.json."""


def run_cell(cell: Cell, folder: Path, device: torch.device, tell: Tell) -> dict[str, Any]:
    """Train the cell's model, measure, and return what its line holds. What is already done in `folder` is kept.

    The line's "blocks" hold, for each condition, the mean loss over runs of consecutive targets, for paired tests
    against another row of the same seed, whose runs are the same targets.
    """
    config: LanguageConfig = cell.config
    texts = load_texts(config.data, folder.parent.parent / "tokens")
    config = resolved(config, texts.coder)
    model, history = trained(config, folder, texts, device, lambda doing, done: tell(News(cell.name, doing, done / 2)))
    measurements: list[Measurement] = []
    blocks: Blocks = {}
    parts = config.evaluation.parts
    for number, part in enumerate(parts):

        def say(doing: str, done: float, number: int = number) -> None:
            tell(News(cell.name, doing, min(0.99, 0.5 + (number + done) / len(parts) / 2)))

        look = partial(measure, config, model, texts, part, device, say)
        found = _kept(folder / "measured" / f"{part}.json", config, look)
        measurements += found.measurements
        blocks |= found.blocks
    return {"measurements": [m.to_dict() for m in measurements], "blocks": blocks, "training": history}


def resolved(config: LanguageConfig, coder: Coder) -> LanguageConfig:
    """The configuration with what follows from the text and the seed."""
    model = replace(config.model, vocab_size=len(coder.words))
    return replace(config, model=model, fit=replace(config.fit, seed=config.seed))


def build(config: LanguageConfig) -> LanguageModel:
    """The model with its first weights, which depend on the seed and the sizes alone."""
    model = LanguageModel(config.model, config.method)
    model.init_weights(Generator().manual_seed(mix(config.seed, "weights")))
    return model


def trained(
    config: LanguageConfig, folder: Path, texts: Texts, device: torch.device, tell: Callable[[str, float], None]
) -> tuple[LanguageModel, dict[str, Any]]:
    """The trained model, from `folder` if it is there, and how its training went.

    A run that was cut goes on. A finished one keeps its weights, and not what training would need to go on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder):
        model = build(config).to(device)
        key = _what_is_learnt(config)
        kept = Checkpoints(folder / WEIGHTS, keep=1)
        saved = kept.newest()
        if saved is not None and saved.record["digest"] == key:
            load_weights(model, kept.folder)
            _keep_description(config, folder, texts.coder)
            return model.eval(), saved.record["history"]
        if saved is not None:
            raise ValueError(f"{folder} holds a run with other settings; choose another --out, or remove it")
        _keep_description(config, folder, texts.coder)
        history = _learn(model, config, folder, texts, device, tell)
        if rank() == 0:  # the other processes of a torchrun only work
            tensors = {f"model.{name}": tensor.detach().cpu() for name, tensor in weights_of(model).items()}
            kept.save(history["steps"], tensors, {"digest": key, "history": history})
            for path in folder.glob("step-*"):
                path.unlink(missing_ok=True)
    return model, history


def _what_is_learnt(config: LanguageConfig) -> str:
    """Equal for configurations that give the same weights: neither what is tried nor how it is computed counts."""
    record = describe(config)
    how = {name: value for name, value in record["fit"].items() if name not in MAY_CHANGE}
    return digest({name: record[name] for name in ("seed", "data", "model", "method")} | {"fit": how})


def _learn(
    model: LanguageModel,
    config: LanguageConfig,
    folder: Path,
    texts: Texts,
    device: torch.device,
    tell: Callable[[str, float], None],
) -> dict[str, Any]:
    """Train the model in place; how it went."""
    context = config.model.context
    valid = texts.valid.read(0, _VALIDATED)

    def validate(model: nn.Module) -> dict[str, float]:
        losses = sliding_losses(
            model, valid, context=context, stride=context, batch_size=config.evaluation.batch_size, device=device
        )
        return {"valid": score(losses).nats}

    def report(step: Step) -> None:
        tell(f"{config.row} learns, loss {step.loss:.3f}", step.step / step.num_steps)

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    fitted = fit(
        model,
        Windows(texts.train, context),
        next_word_loss,
        config.fit,
        folder=folder,
        device=device,
        report=report,
        validate=validate,
    )
    model.to(device).eval()
    memory = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return {
        "steps": len(fitted.losses),
        "first_losses": fitted.losses[:5],
        "final_loss": sum(fitted.losses[-20:]) / len(fitted.losses[-20:]),
        "valid": [round(metrics["valid"], 5) for metrics in fitted.metrics],
        "seconds": round(fitted.seconds, 2),
        "tokens_per_second": round(context * fitted.examples_per_second, 1),
        "memory_mib": None if memory is None else round(memory, 1),
        "micro_batch": fitted.micro_batch,
        "parameters": sum(p.numel() for p in model.parameters()),
        "words": len(texts.coder.words),
        "train_tokens": len(texts.train),
    }


def _kept(path: Path, config: LanguageConfig, measure: Callable[[], Found]) -> Found:
    """What is in `path` if it was measured with this configuration, else measured now and kept there."""
    key = digest(config)
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["digest"] == key:
            return Found([Measurement.from_dict(m) for m in record["measurements"]], record["blocks"])
    except (OSError, ValueError, KeyError):
        pass  # not there, or cut by a crash
    found = measure()
    if rank() == 0:  # the other processes of a torchrun only work
        path.parent.mkdir(parents=True, exist_ok=True)
        stored = [m.to_dict() for m in found.measurements]
        write_json(path, {"digest": key, "measurements": stored, "blocks": found.blocks})
    return found


def _keep_description(config: LanguageConfig, folder: Path, coder: Coder) -> None:
    if rank() == 0:  # the other processes of a torchrun only work
        write_json(folder / "config.json", describe(config))
        coder.save(folder / WORDS)


class Loaded(NamedTuple):
    """A trained model and the words that it knows."""

    model: LanguageModel
    coder: Coder
    config: LanguageConfig


def load_model(folder: Path | str, device: torch.device | str = "cpu") -> Loaded:
    """A model that the study trained, in evaluation mode."""
    folder = Path(folder)
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"folder must hold a run of the language study, got {folder} ({error.strerror}); "
            "pass out/language-SCALE/runs/DATA/ROW/SEED"
        ) from error
    config: LanguageConfig = rebuild(record, classes())
    model = build(config)
    load_weights(model, folder / WEIGHTS if (folder / WEIGHTS).exists() else folder)
    return Loaded(model.to(device).eval(), load_coder(folder / WORDS), config)


def generate_text(
    folder: Path | str,
    prompt: str = "",
    *,
    number: int = 100,
    temperature: float = 1.0,
    top_k: int | None = 40,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> str:
    """Continue a prompt by so many words, by a model that the study trained; equal seeds give equal texts.

    The text begins as after the end of a line. `<unk>` is never chosen.
    """
    model, coder, _ = load_model(folder, device)
    start: Sequence[int] = [coder.eos, *coder.encode(prompt)]
    found = generate(
        model,
        torch.tensor([start]),
        number,
        temperature=temperature,
        top_k=top_k,
        generator=Generator().manual_seed(mix(seed, "generate")),
        banned=() if coder.unk is None else (coder.unk,),
    )
    return coder.decode(found[0, 1:].tolist())
