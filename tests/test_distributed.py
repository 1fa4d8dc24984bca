"""Two processes under torchrun train as one does, in either way, and take over each other's checkpoints."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_tiny import TEAM, Clouds, Tiny, train, validation_loss

from robust_attention.training import FitConfig, Fitted, Interrupted
from robust_attention.training.checkpoint import load_weights
from robust_attention.training.parallel import processes

pytest.importorskip("safetensors")
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)
CONFIG = FitConfig(**TEAM)
MODES = ["ddp", "fsdp"]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tiny, Fitted]:
    """What one process does."""
    model = Tiny()
    return model, train(None, CONFIG, model, validate=validation_loss)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """What two did, see `team` in train_tiny.py: the folder, and what each of them told."""
    out = tmp_path_factory.mktemp("two")

    def stop(number: int) -> None:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        train(out / "one-halfway", CONFIG, examples=Clouds(before=stop))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).parent / "train_tiny.py"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, script, "team", out], capture_output=True, text=True, timeout=150, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return out, [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def same(found: list[float], wanted: list[float]) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_two_processes_train_as_one(mode: str, one: tuple[Tiny, Fitted], two: tuple[Path, Any]) -> None:
    model, fitted = one
    out, told = two
    for process in told:
        same(process[mode]["losses"], fitted.losses)
        for found, wanted in zip(process[mode]["metrics"], fitted.metrics, strict=True):
            assert found == pytest.approx(wanted, rel=1e-4)
        assert process[mode]["plain"]  # the caller's model is no sharded one
    loaded = Tiny()
    load_weights(loaded, out / mode)
    for name, parameter in loaded.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
def test_the_caller_s_model_has_the_weights_on_every_process(mode: str, two: tuple[Path, Any]) -> None:
    out, told = two
    loaded = Tiny()
    load_weights(loaded, out / mode)
    norm = float(sum(parameter.detach().double().square().sum() for parameter in loaded.parameters()))
    assert [process[mode]["norm"] for process in told] == [norm, norm]


@pytest.mark.parametrize("mode", MODES)
def test_sigterm_to_one_process_stops_both_and_they_go_on_bitwise(mode: str, two: tuple[Path, Any]) -> None:
    for process in two[1]:
        assert process[mode]["interrupted"] == 3
        assert process[mode]["digest again"] == process[mode]["digest"]
        assert process[mode]["losses again"] == process[mode]["losses"]


@pytest.mark.parametrize("mode", MODES)
def test_checkpoint_of_two_processes_goes_on_in_one(
    mode: str, one: tuple[Tiny, Fitted], two: tuple[Path, Any], tmp_path: Path
) -> None:
    shutil.copytree(two[0] / f"{mode}-left", tmp_path / "left")
    examples = Clouds()
    same(train(tmp_path / "left", CONFIG, examples=examples).losses, one[1].losses)
    assert len(examples.seen) == 3


def test_checkpoint_of_one_process_goes_on_in_two(one: tuple[Tiny, Fitted], two: tuple[Path, Any]) -> None:
    for process in two[1]:
        assert process["from one seen"] == 3
        same(process["from one"], one[1].losses)


def test_one_process_out_of_memory_halves_for_both(one: tuple[Tiny, Fitted], two: tuple[Path, Any]) -> None:
    for process in two[1]:
        assert process["out of memory"]["micro_batch"] == 2
        same(process["out of memory"]["losses"], one[1].losses)


def test_error_of_the_first_process_ends_both(two: tuple[Path, Any]) -> None:
    for process in two[1]:
        assert "has learning_rate = 0.01, got learning_rate = 0.02" in process["refused"]


@pytest.mark.parametrize("mode", MODES)
def test_a_team_of_one_is_one_process(mode: Any, one: tuple[Tiny, Fitted], monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    with processes("cpu"):
        same(train(None, replace(CONFIG, parallel=mode)).losses, one[1].losses)
    assert not torch.distributed.is_initialized()


def test_running_means_are_the_same_on_both(two: tuple[Path, Any]) -> None:
    first, second = (process["running mean"] for process in two[1])
    assert first == second
    assert any(first)
