"""A tiny transformer, its examples, and two programs that tests start: one that is killed, one for two processes.

python train_tiny.py kill OUT        forks a child for every kill, so that PyTorch is imported once
torchrun ... train_tiny.py team OUT  the same training under ddp and fsdp
"""

import hashlib
import importlib
import json
import os
import random
import shutil
import signal
import stat
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import robust_attention as ra
from robust_attention import _files
from robust_attention.training import FitConfig, Fitted, Interrupted, fit

WIDTH = 8


class Block(nn.Module):
    def __init__(self, method: ra.Method, dropout: float) -> None:
        super().__init__()
        self.attention = ra.nn.Attention(WIDTH, 2, method=method)
        self.dropout = nn.Dropout(dropout)
        self.mlp = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(x))
        return x + self.mlp(x).relu()


class Tiny(nn.Module):
    """Two blocks of attention. `batch_norm` adds buffers that change; `room` is the largest batch that fits."""

    def __init__(
        self, method: ra.Method | None = None, *, dropout: float = 0.0, batch_norm: bool = False, room: int = 1000
    ) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(5)
            self.position = nn.Parameter(torch.randn(1, 6, WIDTH))
            self.blocks = nn.ModuleList(Block(method or ra.MoM(blocks=3), dropout) for _ in range(2))
            self.norm = nn.BatchNorm1d(WIDTH) if batch_norm else nn.Identity()
            self.head = nn.Linear(WIDTH, 3)
        self.room = room
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.sizes.append(len(x))
        if len(x) > self.room:
            raise torch.OutOfMemoryError("no room")
        x = x + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).mean(dim=2))


class Clouds:
    """Three kinds of series, `[N, 6, WIDTH]`; with `noise`, augmented by it. `before` is called before every batch."""

    def __init__(self, number: int = 17, noise: float = 0.0, before: Callable[[int], None] | None = None) -> None:
        generator = Generator().manual_seed(1)
        self.labels = torch.arange(number) % 3
        self.series = torch.eye(3, WIDTH)[self.labels][:, None] + torch.randn(number, 6, WIDTH, generator=generator)
        self.noise, self.before = noise, before
        self.seen: list[Tensor] = []
        self.seeds: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, seed: int, device: torch.device) -> tuple[Tensor, ...]:
        self.seen.append(indices)
        self.seeds.append(seed)
        if self.before is not None:
            self.before(len(self.seen))
        noise = self.noise * torch.randn(len(indices), 6, WIDTH, generator=Generator().manual_seed(seed))
        return (self.series[indices] + noise).to(device), self.labels[indices].to(device)


def cross_entropy(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    series, labels = batch
    return F.cross_entropy(model(series), labels)


def train(folder: Path | None, config: FitConfig, model: Tiny | None = None, **options: Any) -> Fitted:
    examples = options.pop("examples", None)
    examples = Clouds() if examples is None else examples
    return fit(model or Tiny(), examples, cross_entropy, config, folder=folder, device="cpu", **options)


def final_file(folder: Path) -> Path:
    return max(folder.glob("step-*.safetensors"))


def digest(folder: Path) -> str:
    """Of every tensor that the newest checkpoint holds: weights, averages, optimiser, losses."""
    return hashlib.sha256(final_file(folder).read_bytes()).hexdigest()


# Killed at any moment -------------------------------------------------------------------------------------------------

KILL = FitConfig(epochs=3, batch_size=6, micro_batch=4, learning_rate=0.01, ema=0.9, save_every=1, save_seconds=0)


def life(folder: Path) -> None:
    """One start of a run in which everything is random that can be."""
    train(folder, KILL, Tiny(dropout=0.2, batch_norm=True), examples=Clouds(noise=0.3))


class Killer:
    """Kills this process before or after its n-th call of the system that changes files."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0
        fsync, replace, unlink = os.fsync, Path.replace, Path.unlink

        def torn(handle: int) -> None:
            # The kernel had written half of the file when the power went.
            if self.count + 1 == self.at and stat.S_ISREG(os.fstat(handle).st_mode):
                os.ftruncate(handle, os.fstat(handle).st_size // 2)
            self.event()
            fsync(handle)

        def replaced(path: Path, target: Path) -> Path:
            self.event()
            found = replace(path, target)
            self.event()
            return found

        def unlinked(path: Path, missing_ok: bool = False) -> None:
            self.event()
            unlink(path, missing_ok)
            self.event()

        _files.os.fsync = torn
        Path.replace, Path.unlink = replaced, unlinked  # type: ignore[assignment, method-assign]

    def event(self) -> None:
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def forked(act: Callable[[], None], after: float | None = None) -> bool:
    """Run `act` in a child, kill it after so many seconds; whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            act()
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if after is not None:
        time.sleep(after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError("a child failed")
    return os.WIFSIGNALED(status)


def kill(out: Path) -> None:
    # PyTorch imports this late, which takes seconds; the children should find it.
    for name in ("safetensors.torch", "torch._dynamo"):
        importlib.import_module(name)
    torch.set_num_threads(1)
    chance = random.Random(0)

    def reference() -> None:
        killer = Killer(at=-1)
        started = time.perf_counter()
        life(out / "whole")
        seconds = time.perf_counter() - started
        (out / "cost.json").write_text(json.dumps([killer.count, seconds]))

    forked(reference)
    events, seconds = json.loads((out / "cost.json").read_text())
    points: list[dict[str, Any]] = []
    for number in range(20):
        folder = out / str(number)
        event = chance.randrange(1, events) if number % 2 else None
        killed = False
        while not killed:
            shutil.rmtree(folder, ignore_errors=True)
            if event is not None:
                killed = forked(lambda folder=folder, at=event: (Killer(at), life(folder)))  # type: ignore[misc]
            else:
                killed = forked(lambda folder=folder: life(folder), after=chance.uniform(0.02, 0.9) * seconds)
        left = sorted(path.name for path in folder.glob("*"))
        forked(lambda folder=folder: life(folder))
        points.append({"event": event, "left": left, "digest": digest(folder), "folder": str(folder)})
    (out / "points.json").write_text(json.dumps({"whole": digest(out / "whole"), "events": events, "points": points}))


# Two processes --------------------------------------------------------------------------------------------------------

TEAM: dict[str, Any] = {"epochs": 2, "batch_size": 8, "micro_batch": 3, "learning_rate": 0.01, "ema": 0.9}


def team(out: Path) -> None:
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    told: dict[str, Any] = {}

    def stop_me(step: int) -> None:
        # One process alone is asked to stop; all must.
        if rank == 1 and step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    for mode in ("ddp", "fsdp"):
        config = FitConfig(**TEAM, parallel=mode)
        model = Tiny()
        # Validation sees the averaged weights, in a forward pass that training must not notice.
        fitted = train(out / mode, config, model, validate=validation_loss)
        told[mode] = {
            "losses": fitted.losses,
            "metrics": fitted.metrics,
            "digest": digest(out / mode),
            "plain": not model.training and all(type(p) is nn.Parameter for p in model.parameters()),
            "norm": float(sum(p.detach().double().square().sum() for p in model.parameters())),
        }
        halfway = out / f"{mode}-halfway"
        try:
            train(halfway, config, examples=Clouds(before=stop_me))
        except Interrupted as error:
            told[mode]["interrupted"] = error.step
        if rank == 0:
            shutil.copytree(halfway, out / f"{mode}-left")
        again = train(halfway, config)
        told[mode] |= {"digest again": digest(halfway), "losses again": again.losses}
    # A checkpoint of one process.
    examples = Clouds()
    told["from one"] = train(out / "one-halfway", FitConfig(**TEAM, parallel="fsdp"), examples=examples).losses
    told["from one seen"] = len(examples.seen)
    # Running means, which each process has of its own examples.
    uneven = Tiny(batch_norm=True)
    train(None, FitConfig(**TEAM), uneven)
    told["running mean"] = uneven.norm.running_mean.tolist()
    # One process runs out of memory, in the middle of a step.
    roomy = Tiny(room=2 if rank == 1 else 1000)
    fitted = train(None, FitConfig(**TEAM | {"micro_batch": 4}), roomy)
    told["out of memory"] = {"micro_batch": fitted.micro_batch, "losses": fitted.losses}
    try:
        train(out / "ddp", FitConfig(**TEAM | {"learning_rate": 0.02}))
    except ValueError as error:
        told["refused"] = str(error)
    (out / f"rank{rank}.json").write_text(json.dumps(told))


def validation_loss(model: nn.Module) -> dict[str, float]:
    examples = Clouds()
    with torch.no_grad():
        return {"loss": float(cross_entropy(model, (examples.series, examples.labels)))}


if __name__ == "__main__":
    {"kill": kill, "team": team}[sys.argv[1]](Path(sys.argv[2]))
