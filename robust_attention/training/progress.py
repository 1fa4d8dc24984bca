"""What is kept about the steps of a run: losses, metrics, the clock, and the checkpoints."""

import math
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robust_attention._config import describe
from robust_attention._seeds import mix
from robust_attention._version import __version__
from robust_attention.training.checkpoint import Checkpoints, Saved
from robust_attention.training.config import MAY_CHANGE, FitConfig
from robust_attention.training.optimise import Plan
from robust_attention.training.trainer import Trainer, seed_torch

Metrics = dict[str, float]


class Step(NamedTuple):
    """What training reports, on process 0."""

    step: int
    """Steps done."""
    num_steps: int
    """Steps of the whole run."""
    loss: float
    """Mean since the report before."""
    learning_rate: float
    """Of this step."""
    examples_per_second: float
    """Lately, over all processes, with what validation and checkpoints take."""
    seconds_left: float
    """At that rate."""
    memory: int | None
    """Most bytes in use on the GPU so far; None on the CPU."""
    metrics: Metrics
    """The newest of `validate`; empty before."""


@dataclass
class Fitted:
    """How training went; of a resumed run, all of it."""

    losses: list[float] = field(default_factory=list)
    """Of every step."""
    metrics: list[Metrics] = field(default_factory=list)
    """Of every validation, with its "epoch", counted from 1."""
    seconds: float = 0.0
    """Spent training, over all starts."""
    examples_per_second: float = 0.0
    """Over the whole run."""
    micro_batch: int = 0
    """Examples that a process had in flight in the end."""


class Run:
    """One run, from its first start to its end."""

    def __init__(
        self, trainer: Trainer, plan: Plan, checkpoints: Checkpoints | None, report: Callable[[Step], None] | None
    ) -> None:
        self.trainer, self.plan, self.checkpoints, self.report = trainer, plan, checkpoints, report
        self.team, self.config = trainer.team, trainer.config
        self.losses: list[float] = []
        self.metrics: list[Metrics] = []
        self.unseen: list[tuple[Tensor, Tensor]] = []
        self.seconds = 0.0
        self.started = self.saved = time.perf_counter()
        self.pace: deque[tuple[float, int]] = deque(maxlen=20)
        self.reported = 0

    def note(self, loss: Tensor, norm: Tensor) -> None:
        self.unseen.append((loss, norm))

    def look(self, step: int) -> None:
        """Fetch the losses of the steps so far, which waits for the GPU; the first that is not finite ends the run."""
        if not self.unseen:
            return
        losses, norms = (torch.stack(values).float() for values in zip(*self.unseen, strict=True))
        self.team.sum_([losses])
        fetched = torch.stack([losses, norms]).tolist()
        first = step - len(self.unseen)
        self.unseen = []
        for number, (loss, norm) in enumerate(zip(*fetched, strict=True), start=first):
            for name, value in (("loss", loss), ("norm of the gradient", norm)):
                if not math.isfinite(value):
                    rate = self.plan.learning_rate(number)
                    raise FloatingPointError(
                        f"the {name} must stay finite, got {value} at step {number + 1} of {self.plan.num_steps}, "
                        f"where the learning rate was {rate:.3g}; lower learning_rate = {self.config.learning_rate}"
                    )
        self.losses += fetched[0]

    def tell(self, step: int) -> None:
        """Look at the losses and report."""
        self.look(step)
        self.pace.append((time.perf_counter(), self._examples(step)))
        if self.report is not None and self.team.rank == 0:
            (before, had), (now, has) = self.pace[0], self.pace[-1]
            rate = (has - had) / max(now - before, 1e-9)
            lately = self.losses[self.reported :]
            gpu = self.team.device.type == "cuda"
            self.report(
                Step(
                    step,
                    self.plan.num_steps,
                    sum(lately) / len(lately),
                    self.plan.learning_rate(step - 1),
                    rate,
                    (self._examples(self.plan.num_steps) - has) / rate,
                    torch.cuda.max_memory_allocated(self.team.device) if gpu else None,
                    self.metrics[-1] if self.metrics else {},
                )
            )
        self.reported = len(self.losses)

    def validate(self, validate: Callable[[nn.Module], Metrics], epoch: int) -> None:
        seed_torch(mix(self.config.seed, "validate", epoch), self.team.device)
        with self.trainer.averaged() as model:
            found = validate(model)
        # JSON has no infinity: what is not finite is kept as NaN, written as null.
        found = {name: float(value) if math.isfinite(value) else math.nan for name, value in found.items()}
        self.metrics.append({"epoch": epoch, **self.team.on_first(lambda: found)})

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due by the steps, or by this process's clock."""
        every, seconds = self.config.save_every, self.config.save_seconds
        by_clock = seconds > 0 and time.perf_counter() - self.saved > seconds
        return by_clock or (every > 0 and step % every == 0)

    def save(self, step: int) -> None:
        checkpoints = self.checkpoints
        assert checkpoints is not None
        tensors = self.trainer.state()
        tensors["losses"] = torch.tensor(self.losses, dtype=torch.float64)
        metrics = [{name: None if math.isnan(value) else value for name, value in m.items()} for m in self.metrics]
        record = {
            "num_steps": self.plan.num_steps,
            "num_examples": self.plan.num_examples,
            "config": describe(self.config),
            "micro_batch": self.trainer.micro_batch,
            "processes": self.team.size,
            "seconds": self._seconds(),
            "metrics": metrics,
            "versions": {
                "robust_attention": __version__,
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
        }
        self.team.on_first(lambda: checkpoints.save(step, tensors, record))
        self.saved = time.perf_counter()

    def resume(self) -> int:
        """Load the newest checkpoint, if there is one; returns the steps it has done."""
        read: list[Saved] = []

        def look_for() -> dict[str, Any] | None:
            saved = None if self.checkpoints is None else self.checkpoints.newest()
            if saved is None:
                return None
            self._check(saved)
            assert self.checkpoints is not None
            self.checkpoints.tidy(saved.record["step"])
            read.append(saved)
            return {**saved.record, "names": list(saved.tensors), "losses": saved.tensors["losses"].tolist()}

        record = self.team.on_first(look_for)
        step = 0
        if record is not None:
            self.trainer.load(read[0] if read else None, record["names"])
            step, self.losses, self.seconds = record["step"], record["losses"], record["seconds"]
            self.reported = step
            self.metrics = [
                {name: math.nan if value is None else value for name, value in m.items()} for m in record["metrics"]
            ]
            if record["config"]["micro_batch"] == self.config.micro_batch:
                # A size that the memory did not allow is not tried again.
                self.trainer.micro_batch = min(self.trainer.micro_batch, record["micro_batch"])
        self.started = self.saved = time.perf_counter()
        self.pace.append((self.started, self._examples(step)))
        return step

    def _check(self, saved: Saved) -> None:
        count = "number of examples"
        # A field that is newer than the checkpoint had its default's effect.
        then = {**describe(FitConfig()), **saved.record["config"], count: saved.record["num_examples"]}
        now = {**describe(self.config), count: self.plan.num_examples}
        changed = [name for name in now if name not in MAY_CHANGE and then[name] != now[name]]
        if changed:
            were = ", ".join(f"{name} = {then[name]!r}" for name in changed)
            are = ", ".join(f"{name} = {now[name]!r}" for name in changed)
            raise ValueError(
                f"training can only go on as it began: the checkpoint {saved.path} has {were}, got {are}; pass the old "
                "value, or choose another folder"
            )
        self.trainer.check(saved)

    def fitted(self, step: int) -> Fitted:
        seconds = self._seconds()
        rate = self._examples(step) / max(seconds, 1e-9)
        return Fitted(self.losses, self.metrics, seconds, rate, self.trainer.micro_batch)

    def _seconds(self) -> float:
        return self.seconds + time.perf_counter() - self.started

    def _examples(self, step: int) -> int:
        """Examples seen in so many steps."""
        epochs, place = divmod(step, self.plan.steps_per_epoch)
        return epochs * self.plan.num_examples + place * self.config.batch_size
