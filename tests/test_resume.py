"""A run that ends too early, for whatever reason, goes on as if nothing had happened; a damaged file is never used."""

import errno
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_tiny import Clouds, Tiny, digest, final_file, train

from robust_attention import _files
from robust_attention.training import FitConfig, Fitted, Interrupted
from robust_attention.training.checkpoint import Checkpoints, load_weights

pytest.importorskip("safetensors")
CONFIG = FitConfig(epochs=2, batch_size=6, learning_rate=0.01, save_every=2, save_seconds=0)  # 6 steps


def stopping(at: int) -> Clouds:
    """Examples whose batch number `at` brings a SIGTERM."""

    def stop(number: int) -> None:
        if number == at:
            os.kill(os.getpid(), signal.SIGTERM)

    return Clouds(before=stop)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Fitted]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, train(folder, CONFIG)


@pytest.fixture
def half(tmp_path: Path) -> Path:
    """A run stopped after 5 of 6 steps, with checkpoints of steps 4 and 5."""
    folder = tmp_path / "half"
    with pytest.raises(Interrupted):
        train(folder, CONFIG, examples=stopping(5))
    return folder


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_runs_go_on_bitwise(tmp_path: Path) -> None:
    script = Path(__file__).parent / "train_tiny.py"
    subprocess.run([sys.executable, script, "kill", tmp_path], check=True, timeout=300)
    told = json.loads((tmp_path / "points.json").read_text())
    points = told["points"]
    assert len(points) == 20
    # Weights, averages, optimiser, buffers, losses: the last file is the same to the byte.
    assert {point["digest"] for point in points} == {told["whole"]}
    left = [" ".join(point["left"]) for point in points]
    assert sum("json" in names for names in left) >= 10  # they did go on, they did not start anew
    assert any(".part" in names for names in left)  # and some were killed while they wrote
    for point in points:
        names = {path.name for path in Path(point["folder"]).iterdir()}
        assert names == {f"step-{step:08d}.{kind}" for step in (8, 9) for kind in ("json", "safetensors")}


def test_sigterm_saves_and_says_so(half: Path, whole: tuple[Path, Fitted]) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert sorted(Checkpoints(half).steps()) == [4, 5]
    assert train(half, CONFIG).losses == whole[1].losses
    assert digest(half) == digest(whole[0])
    with pytest.raises(Interrupted, match=r"SIGTERM.*step 1 of 6 in .*other; run it again to go on") as caught:
        train(half / "other", CONFIG, examples=stopping(1))
    assert caught.value.step == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_finished_run_is_loaded_without_training(whole: tuple[Path, Fitted]) -> None:
    folder, first = whole
    examples, model, trained = Clouds(), Tiny(), Tiny()
    again = train(folder, CONFIG, model, examples=examples)
    assert not examples.seen
    assert again.losses == first.losses
    train(None, CONFIG, trained)
    assert not model.training
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), trained.parameters(), strict=True))


def test_metrics_survive_a_stop(tmp_path: Path) -> None:
    def validate(model: torch.nn.Module) -> dict[str, float]:
        return {"norm": model.head.weight.norm().item(), "undefined": float("nan")}

    whole = train(tmp_path / "whole", CONFIG, validate=validate).metrics
    with pytest.raises(Interrupted):
        train(tmp_path / "half", CONFIG, examples=stopping(4), validate=validate)
    again = train(tmp_path / "half", CONFIG, validate=validate).metrics
    assert [m["epoch"] for m in whole] == [1, 2]
    assert repr(again) == repr(whole)


@pytest.mark.parametrize("kind", ["safetensors", "json"])
@pytest.mark.parametrize("harm", ["flip", "cut", "remove"])
def test_damaged_checkpoint_is_refused_and_the_one_before_used(
    half: Path, whole: tuple[Path, Fitted], kind: str, harm: str
) -> None:
    path = half / f"step-00000005.{kind}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if harm == "remove":
        path.unlink()
    else:
        path.write_bytes(data if harm == "flip" else data[: len(data) // 2])
    examples = Clouds()
    if (kind, harm) == ("json", "remove"):  # then there is no checkpoint of that step
        train(half, CONFIG, examples=examples)
    else:
        with pytest.warns(UserWarning, match=r"step-00000005\.json is damaged .*the one before is used"):
            train(half, CONFIG, examples=examples)
    assert len(examples.seen) == 2  # steps 5 and 6
    assert digest(half) == digest(whole[0])
    assert sorted(Checkpoints(half).steps()) == [4, 6]


def test_only_damaged_checkpoints_fails_clearly(half: Path) -> None:
    for path in half.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-1])
    message = r"half must hold a checkpoint that can be read.*step-00000005.*SHA-256.*step-00000004.*remove the step-\*"
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(ValueError, match=message):
        train(half, CONFIG)


def test_damaged_newer_checkpoint_gives_way(half: Path) -> None:
    """A damaged step 5 does not count among the ones to keep, when training stops again before it."""
    final_file(half).write_bytes(b"")
    with pytest.warns(UserWarning, match="damaged"), pytest.raises(Interrupted):
        train(half, replace(CONFIG, save_every=0), examples=stopping(1))
    assert sorted(Checkpoints(half).steps()) == [4, 5]
    assert Checkpoints(half).newest() is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.02}, r"has learning_rate = 0.01, got learning_rate = 0.02; pass the old value, or"),
        ({"seed": 1, "ema": 0.5}, r"has ema = 0.0, seed = 0, got ema = 0.5, seed = 1; pass the old value, or"),
    ],
)
def test_another_configuration_fails_clearly(half: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        train(half, replace(CONFIG, **change))


def test_other_examples_or_another_model_fail_clearly(half: Path) -> None:
    with pytest.raises(ValueError, match=r"has number of examples = 17, got number of examples = 18;"):
        train(half, CONFIG, examples=Clouds(18))
    wider = Tiny()
    wider.head = torch.nn.Linear(8, 4)
    message = r"must be of this model, which has model.head.bias \[4\], got \[3\] \(2 differ\)"
    with pytest.raises(ValueError, match=message):
        train(half, CONFIG, wider)
    with pytest.raises(ValueError, match=message):
        load_weights(wider, half)


def test_what_changes_no_result_may_change(half: Path) -> None:
    fitted = train(half, replace(CONFIG, micro_batch=2, save_every=1, keep=1, report_every=1))
    assert fitted.micro_batch == 2
    assert Checkpoints(half).steps() == [6]


def test_older_checkpoints_make_room(tmp_path: Path) -> None:
    train(tmp_path, replace(CONFIG, save_every=1, keep=3))
    assert sorted(Checkpoints(tmp_path).steps()) == [4, 5, 6]
    assert len(list(tmp_path.iterdir())) == 6


def test_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "step-by-step.json").write_text("mine")
    train(tmp_path, CONFIG)
    assert (tmp_path / "config.json").read_text() == "{}"
    assert (tmp_path / "step-by-step.json").exists()


def test_full_disk_fails_clearly(half: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in half.iterdir()}

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_files.os, "fsync", full)
    message = r"the checkpoint of step 6, .* MiB, could not be written .*No space left.*of step 5 is intact; make room"
    with pytest.raises(OSError, match=message) as caught:
        train(half, CONFIG)
    assert caught.value.errno == errno.ENOSPC
    assert {path.name: path.read_bytes() for path in half.iterdir()} == before


def test_clock_brings_checkpoints_too(tmp_path: Path) -> None:
    def fail(number: int) -> None:
        if number == 4:
            raise KeyError

    with pytest.raises(KeyError):
        train(tmp_path, replace(CONFIG, save_every=0, save_seconds=1e-9), examples=Clouds(before=fail))
    assert sorted(Checkpoints(tmp_path).steps()) == [2, 3]


def test_weights_load_alone_averaged_if_they_are(tmp_path: Path) -> None:
    for ema in (0.0, 0.9):
        folder = tmp_path / str(ema)
        trained, loaded = Tiny(batch_norm=True), Tiny(batch_norm=True)
        train(folder, replace(CONFIG, ema=ema), trained)
        assert load_weights(loaded, folder) == 6
        state = loaded.state_dict()
        assert all(torch.equal(tensor, state[name]) for name, tensor in trained.state_dict().items())
    with pytest.raises(ValueError, match=re.escape("must hold checkpoints, step-*.json")):
        load_weights(Tiny(), tmp_path)


def test_missing_safetensors_fails_clearly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"need safetensors.*pip install"):
        train(tmp_path, CONFIG)


def test_checkpoint_holds_names_that_any_reader_knows(whole: tuple[Path, Fitted]) -> None:
    from safetensors.torch import load_file

    tensors = load_file(final_file(whole[0]))
    names = {name for name, _ in Tiny().named_parameters()}
    assert {name.removeprefix("model.") for name in tensors if name.startswith("model.")} == names
    for key in ("step", "exp_avg", "exp_avg_sq"):
        assert {f"optimizer.{key}.{name}" for name in names} <= tensors.keys()
    assert tensors["losses"].tolist() == whole[1].losses
