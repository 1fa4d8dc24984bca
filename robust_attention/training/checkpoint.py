"""Checkpoints: one safetensors file and one JSON file each, whole, checksummed, the same for any number of processes.

    step-00001234.safetensors    model.*, ema.*, optimizer.*, losses
    step-00001234.json           step, configuration, metrics, versions, and the checksums that make it valid

The JSON is written last and removed first: without it, or if a checksum is wrong, there is no checkpoint.
"""

import hashlib
import json
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from robust_attention._files import write_bytes, write_json
from robust_attention.training.parallel import weights_of


class Saved(NamedTuple):
    """A checkpoint that was read."""

    path: Path
    record: dict[str, Any]
    tensors: dict[str, Tensor]


class Damaged(Exception):
    """Why a checkpoint cannot be used."""


class Checkpoints:
    """The checkpoints in a folder, which may hold other files too."""

    def __init__(self, folder: Path | str, keep: int = 2) -> None:
        self.folder = Path(folder)
        self.keep = keep
        self._damaged: set[int] = set()

    def save(self, step: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Write a checkpoint; when it is valid, remove the older ones but `keep` - 1, and what a kill left behind.

        Needs the size of the tensors once more in memory. Raises OSError, with the older checkpoints as they were.
        """
        path = self._path(step)
        data = _safetensors().save({name: tensor.contiguous() for name, tensor in tensors.items()})
        record = {**record, "step": step, "file": path.with_suffix(".safetensors").name, "sha256": _sha256(data)}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)
            write_bytes(path.with_suffix(".safetensors"), data)
            write_json(path, {**record, "checksum": _checksum(record)})
        except OSError as error:
            if not path.exists():
                path.with_suffix(".safetensors").unlink(missing_ok=True)
            valid = set(self.steps()) - self._damaged
            left = f"that of step {max(valid)} is intact" if valid else "there is no older one"
            raise OSError(
                error.errno,
                f"the checkpoint of step {step}, {len(data) / 2**20:.1f} MiB, could not be written to {self.folder} "
                f"({error.strerror or error}); {left}; make room and run again",
            ) from error
        self._damaged.discard(step)
        self._prune(step)

    def newest(self) -> Saved | None:
        """The newest checkpoint that is valid, with a warning about each newer one that is not; None if none is there.

        Raises ValueError if there are some and all are damaged.
        """
        damaged = []
        for step in sorted(self.steps(), reverse=True):
            try:
                return self._read(self._path(step))
            except Damaged as error:
                damaged.append(f"{self._path(step).name}: {error}")
                self._damaged.add(step)
                warnings.warn(
                    f"the checkpoint {self._path(step)} is damaged ({error}); the one before is used", stacklevel=2
                )
        if damaged:
            raise ValueError(
                f"{self.folder} must hold a checkpoint that can be read, got damaged ones only "
                f"({'; '.join(damaged)}); remove the step-* files there to start anew, or choose another folder"
            )
        return None

    def tidy(self, step: int) -> None:
        """Remove what a kill left behind; `step` is the newest valid one. Damaged ones stay until the next save."""
        if not self._damaged:
            self._prune(step)

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, valid or not."""
        return [int(path.stem[5:]) for path in self.folder.glob("step-*.json") if path.stem[5:].isdigit()]

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.json"

    def _read(self, path: Path) -> Saved:
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            checksum = record.pop("checksum")
            if checksum != _checksum(record):
                raise Damaged(f"{path.name} does not match its checksum")
            data = path.with_suffix(".safetensors").read_bytes()
        except OSError as error:
            raise Damaged(f"{Path(str(error.filename)).name}: {error.strerror}") from error
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise Damaged(f"{path.name} is not a record of ours") from error
        if _sha256(data) != record["sha256"]:
            raise Damaged(f"{record['file']} does not match its SHA-256")
        return Saved(path, record, _safetensors().load(data))

    def _prune(self, newest: int) -> None:
        older = sorted((step for step in self.steps() if step < newest and step not in self._damaged), reverse=True)
        stay = {newest, *older[: self.keep - 1]}
        for step in set(self.steps()) - stay:
            self._path(step).unlink(missing_ok=True)
        names = {self._path(step).with_suffix(".safetensors").name for step in stay}
        for path in (*self.folder.glob("step-*.safetensors"), *self.folder.glob("step-*.part")):
            if path.name not in names:
                path.unlink(missing_ok=True)


def load_weights(model: nn.Module, folder: Path | str) -> int:
    """Fill a model with the newest weights in a folder, averaged ones where the run averages; returns their step.

    Works in any one process, whatever number of processes trained.
    """
    saved = Checkpoints(folder).newest()
    if saved is None:
        raise ValueError(f"folder must hold checkpoints, step-*.json, got {folder}; train into it first")
    averaged = any(name.startswith("ema.") for name in saved.tensors)
    check_names(model, saved, averaged)
    prefix = "ema." if averaged else "model."
    with torch.no_grad():
        for name, tensor in weights_of(model).items():
            tensor.copy_(saved.tensors[prefix + name])
    return int(saved.record["step"])


def check_names(model: nn.Module, saved: Saved, averaged: bool) -> None:
    """Refuse a checkpoint of another model, naming what differs."""
    expected = {
        prefix + name: list(tensor.shape)
        for prefix in (("model.", "ema.") if averaged else ("model.",))
        for name, tensor in weights_of(model).items()
    }
    found = {name: list(tensor.shape) for name, tensor in saved.tensors.items() if name.startswith(("model.", "ema."))}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        first = wrong[0]
        raise ValueError(
            f"the checkpoint {saved.path} must be of this model, which has {first} {expected.get(first, 'not')}, got "
            f"{found.get(first, 'no such tensor')} ({len(wrong)} differ); build the same model, or take another folder"
        )


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _checksum(record: dict[str, Any]) -> str:
    return _sha256(json.dumps(record, sort_keys=True).encode())


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "checkpoints need safetensors, which is not installed; run pip install 'robust-attention[demo]', or pass "
            "folder=None to train without files"
        ) from error
    return safetensors.torch
