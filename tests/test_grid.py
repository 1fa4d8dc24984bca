"""Grids of cells: what is done stays done, what fails is told, shards and processes add up."""

import errno
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from robust_attention.study import store
from robust_attention.study.grid import Cell, News, Tell, open_cells, run_grid, shard_of
from robust_attention.training.fit import Interrupted

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Config:
    number: int
    fails: bool = False


def cells(number: int = 5, **changed: Any) -> list[Cell]:
    return [Cell(name=f"a/{i}", labels={"row": "a", "seed": i}, config=Config(i, **changed)) for i in range(number)]


def work(cell: Cell, folder: Path, device: torch.device, tell: Tell) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "runs").open("a") as file:
        file.write("x")
    tell(News(cell.name, "half", 0.5))
    if cell.config.fails:
        raise RuntimeError("no luck")
    return {"measurements": [{"value": cell.config.number}], "threads": torch.get_num_threads()}


def runs(out: Path) -> dict[str, int]:
    return {path.parent.name: len(path.read_text()) for path in sorted(out.glob("runs/a/*/runs"))}


def test_done_cells_are_not_run_again(tmp_path: Path) -> None:
    assert run_grid("s", cells(2), work, tmp_path, device=CPU) == []
    assert run_grid("s", cells(3), work, tmp_path, device=CPU) == []
    assert runs(tmp_path) == {"0": 1, "1": 1, "2": 1}
    found = store.read(store.result_files(tmp_path))
    assert [(r["cell"], r["study"], r["row"], r["seed"], r["status"]) for r in found] == [
        (f"a/{i}", "s", "a", i, "done") for i in range(3)
    ]
    for i, record in enumerate(found):
        assert record["config"] == {"is": "Config", "number": i, "fails": False}
        assert record["versions"]["torch"] == torch.__version__
        assert record["measurements"] == [{"value": i}]
        assert {"commit", "hardware", "date", "seconds", "digest"} <= set(record)


def test_another_configuration_is_another_cell(tmp_path: Path) -> None:
    run_grid("s", cells(1), work, tmp_path, device=CPU)
    changed = [Cell(name="a/0", labels={"row": "a", "seed": 0}, config=Config(9))]
    assert open_cells(changed, tmp_path) == changed
    run_grid("s", changed, work, tmp_path, device=CPU)
    (newest,) = store.read(store.result_files(tmp_path))
    assert newest["config"]["number"] == 9


def test_a_failing_cell_is_listed_and_tried_again(tmp_path: Path) -> None:
    both = [*cells(1), *cells(2, fails=True)[1:], *cells(3)[2:]]
    told: list[News] = []
    assert run_grid("s", both, work, tmp_path, device=CPU, tell=told.append) == ["a/1"]
    found = {r["cell"]: r for r in store.read(store.result_files(tmp_path))}
    assert found["a/1"]["status"] == "failed"
    assert found["a/1"]["error"] == "RuntimeError: no luck"
    assert found["a/2"]["status"] == "done"
    assert News("a/1", "failed: no luck", 1.0) in told
    assert [cell.name for cell in open_cells(both, tmp_path)] == ["a/1"]


@pytest.mark.parametrize("number", [1, 2, 3, 7])
def test_shards_are_disjoint_and_whole(number: int, tmp_path: Path) -> None:
    everything = cells(5)
    parts = [shard_of(everything, f"{i}/{number}") for i in range(1, number + 1)]
    assert sorted(cell.name for part in parts for cell in part) == [cell.name for cell in everything]
    for i in range(1, number + 1):
        run_grid("s", everything, work, tmp_path, device=CPU, shard=f"{i}/{number}")
    assert set(runs(tmp_path).values()) == {1}
    assert len(store.read(store.result_files(tmp_path))) == 5


@pytest.mark.parametrize("shard", ["0/2", "3/2", "1", "a/b", "1/", "-1/2"])
def test_a_wrong_shard_fails_clearly(shard: str) -> None:
    with pytest.raises(ValueError, match="shard must be i/n"):
        shard_of(cells(), shard)


def test_processes_do_the_same_with_one_thread_each(tmp_path: Path) -> None:
    told: list[News] = []
    mixed = [*cells(3), *cells(4, fails=True)[3:]]
    assert run_grid("s", mixed, work, tmp_path, device=CPU, jobs=2, tell=told.append) == ["a/3"]
    found = {r["cell"]: r for r in store.read(store.result_files(tmp_path))}
    assert [found[f"a/{i}"]["measurements"][0]["value"] for i in range(3)] == [0, 1, 2]
    assert {found[f"a/{i}"]["threads"] for i in range(3)} == {1}
    assert {news.cell for news in told} == {f"a/{i}" for i in range(4)}


def test_a_cut_line_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    store.append(path, {"cell": "a", "status": "done"})
    with path.open("a") as file:
        file.write('{"cell": "b", "sta')
    store.append(path, {"cell": "c", "status": "done"})
    with pytest.warns(UserWarning, match=r"cells.jsonl:2 is no whole line"):
        found = store.read([path])
    assert [record["cell"] for record in found] == ["a", "c"]


def test_a_later_failure_does_not_hide_what_was_done(tmp_path: Path) -> None:
    path = tmp_path / "cells.jsonl"
    for status in ("failed", "done", "failed"):
        store.append(path, {"cell": "a", "status": status})
    assert [record["status"] for record in store.read([path])] == ["done"]


def test_a_full_disk_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cells.jsonl"
    store.append(path, {"cell": "a", "status": "done"})
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"cells.jsonl must take one line more, got No space left"):
        store.append(path, {"cell": "b", "status": "done"})
    assert path.read_bytes() == before


def test_nan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        store.append(tmp_path / "cells.jsonl", {"cell": "a", "value": float("nan")})
    assert not (tmp_path / "cells.jsonl").exists()


def stopping(cell: Cell, folder: Path, device: torch.device, tell: Tell) -> dict[str, Any]:
    if cell.config.number == 1:
        raise KeyboardInterrupt
    return work(cell, folder, device, tell)


def test_an_interrupt_stops_the_grid_and_loses_nothing(tmp_path: Path) -> None:
    run: Callable[..., Any] = run_grid
    with pytest.raises(KeyboardInterrupt):
        run("s", cells(3), stopping, tmp_path, device=CPU)
    assert [record["cell"] for record in store.read(store.result_files(tmp_path))] == ["a/0"]


def dying(cell: Cell, folder: Path, device: torch.device, tell: Tell) -> dict[str, Any]:
    if cell.config.number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return work(cell, folder, device, tell)


def test_a_process_that_is_killed_loses_its_cell_alone(tmp_path: Path) -> None:
    told: list[News] = []
    assert run_grid("s", cells(4), dying, tmp_path, device=CPU, jobs=2, tell=told.append) == ["a/1"]
    found = {r["cell"]: r for r in store.read(store.result_files(tmp_path))}
    assert [found[f"a/{i}"]["status"] for i in range(4)] == ["done", "failed", "done", "done"]
    assert found["a/1"]["error"] == "its process ended with exit code -9"
    assert {news.cell for news in told if news.done == 1} == {f"a/{i}" for i in range(4)}


SLOW = """
import signal, sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[2])
from test_grid import cells, lasting
from robust_attention.study.grid import run_grid
if __name__ == "__main__":
    try:
        run_grid("s", cells(3), lasting, Path(sys.argv[1]), device=torch.device("cpu"), jobs=2)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def lasting(cell: Cell, folder: Path, device: torch.device, tell: Tell) -> dict[str, Any]:
    """Trains until it is told to stop, as `fit` does."""
    stopped = []
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pid").write_text(str(os.getpid()))
    while not stopped:
        time.sleep(0.02)
    (folder / "saved").write_text("")
    raise Interrupted(3, 9, folder)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z" if Path("/proc").is_dir() else True


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_grid(how: signal.Signals, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    out = tmp_path / "out"
    command = [sys.executable, str(tmp_path / "slow.py"), str(out), str(Path(__file__).parent)]
    main = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 90
        while len(list(out.glob("runs/a/*/pid"))) < 2:
            assert time.monotonic() < deadline
            assert main.poll() is None
            time.sleep(0.05)
        time.sleep(0.2)
        pids = [int(path.read_text()) for path in out.glob("runs/a/*/pid")]
        main.send_signal(how)
        assert main.wait(timeout=60) == (-9 if how == signal.SIGKILL else 130)
        while any(is_running(pid) for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        main.kill()
    assert len(list(out.glob("runs/a/*/saved"))) == (0 if how == signal.SIGKILL else 2)
    assert len(list(out.glob("runs/a/*"))) == 2  # no third cell was begun


def test_interrupted_survives_a_pipe() -> None:
    error = pickle.loads(pickle.dumps(Interrupted(3, 9, Path("x"))))
    assert (error.step, error.num_steps, error.folder) == (3, 9, Path("x"))
