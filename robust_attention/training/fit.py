"""The training loop, for images, text and series alike: what it does in which order is all in `fit`.

Everything random is a function of the seed, the step and the process: the order of the examples, their augmentation,
the draws of random methods, dropout. So a checkpoint holds tensors and a step, and a run that was killed at any moment
goes on bitwise, as far as the model's operations are deterministic, on the same number of processes and to rounding on
another.
"""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from robust_attention.training.checkpoint import Checkpoints
from robust_attention.training.config import FitConfig
from robust_attention.training.optimise import Plan, schedule
from robust_attention.training.parallel import join
from robust_attention.training.progress import Fitted, Metrics, Run, Step
from robust_attention.training.trainer import Examples, Loss, Trainer

__all__ = ["Examples", "FitConfig", "Fitted", "Interrupted", "Loss", "Step", "fit", "schedule"]


class Interrupted(Exception):
    """SIGTERM came; the run is saved. Calling `fit` again goes on."""

    def __init__(self, step: int, num_steps: int, folder: Path) -> None:
        super().__init__(
            f"asked to stop (SIGTERM), training saved step {step} of {num_steps} in {folder}; run it again to go on"
        )
        self.step, self.num_steps, self.folder = step, num_steps, folder

    def __reduce__(self) -> tuple[type, tuple[int, int, Path]]:
        # By default an exception is unpickled from its text.
        return type(self), (self.step, self.num_steps, self.folder)


def fit(
    model: nn.Module,
    examples: Examples,
    loss: Loss,
    config: FitConfig,
    *,
    folder: Path | str | None = None,
    device: torch.device | str | None = None,
    report: Callable[[Step], None] | None = None,
    validate: Callable[[nn.Module], Metrics] | None = None,
) -> Fitted:
    """Train `model` in place. Afterwards it is in evaluation mode, with the averaged weights if `config.ema` is on.

    Args:
        examples, loss: see `Examples` and `Loss`.
        folder: keeps checkpoints and goes on from the newest one; a finished run is loaded and returns at once. None:
            no files. A checkpoint made with another configuration is refused, save for fields that change no result.
        device: None is CUDA where there is one; of several GPUs the one of LOCAL_RANK. The model moves there, except
            under fsdp, where a sharded copy is trained and the model itself is filled at the end where it is.
        report: called on process 0 every `config.report_every` steps.
        validate: `validate(model) -> metrics` after epochs, on every process with the same weights; those of process 0
            are kept.
    Raises:
        Interrupted: after SIGTERM, with a checkpoint saved (only where there is a folder).
        FloatingPointError: the loss or the gradient is no longer finite.
        torch.OutOfMemoryError: not even one example fits, or under fsdp a micro-batch does not.
        OSError: a checkpoint could not be written.
    Runs: `torchrun --nproc-per-node=4 program.py`, with --nnodes and --rdzv-endpoint for several machines; their
        `folder` needs to be seen by process 0 alone.
    """
    with join(config.parallel, device) as team, _sigterm(folder is not None) as stopped, _own_stream(team.device):
        plan = Plan(len(examples), config)
        trainer = Trainer(model, loss, config, team)
        run = Run(trainer, plan, None if folder is None else Checkpoints(folder, config.keep), report)
        step, stop = run.resume(), False
        while step < plan.num_steps and not stop:
            run.note(*trainer.step(step, plan.indices(step), plan.learning_rate(step), examples))
            step += 1
            last = step == plan.num_steps
            epoch = plan.epoch_to_validate(step)
            if last or step % config.report_every == 0:
                run.tell(step)
            if validate is not None and epoch is not None:
                run.look(step)
                run.validate(validate, epoch)
            stop, due = team.agree(stopped(), run.due(step))
            if run.checkpoints is not None and (last or stop or due):
                run.look(step)
                run.save(step)
        if not stop:
            trainer.finish(model)
    if stop and run.checkpoints is not None:
        raise Interrupted(step, plan.num_steps, run.checkpoints.folder)
    return run.fitted(step)


@contextmanager
def _sigterm(wanted: bool) -> Iterator[Callable[[], bool]]:
    """Meanwhile, SIGTERM is remembered instead of killing. Only Python's main thread may ask for signals."""
    if not wanted or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    came = threading.Event()

    def remember(number: int, frame: FrameType | None) -> None:
        came.set()

    before = signal.signal(signal.SIGTERM, remember)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Meanwhile, torch's global streams are ours; afterwards they stand where the caller left them."""
    with torch.random.fork_rng(devices=[device.index] if device.type == "cuda" else []):
        yield
