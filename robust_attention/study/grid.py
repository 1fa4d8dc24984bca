"""Run the cells of a study: in order, a few at once, or one shard of them on each machine of a cluster."""

import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from robust_attention._config import describe, digest
from robust_attention._provenance import provenance
from robust_attention.study import store
from robust_attention.study.pool import side_by_side, stoppable
from robust_attention.training.fit import Interrupted


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One independent piece of a study."""

    name: str
    """Unique in its study, for example cifar10/softmax/0; also the folder of its run."""
    labels: dict[str, Any]
    """What tables group by: data, row, seed."""
    config: Any
    """Everything it does."""


class News(NamedTuple):
    """What a running cell tells."""

    cell: str
    doing: str
    done: float
    """Share of the cell, 0 to 1."""


Tell = Callable[[News], None]
Work = Callable[[Cell, Path, torch.device, Tell], dict[str, Any]]
"""Does one cell in its folder and returns what its line holds, "measurements" among it."""


def shard_of(cells: Sequence[Cell], shard: str) -> list[Cell]:
    """Every n-th cell from the i-th on, for shard "i/n" with i from 1."""
    index, _, number = shard.partition("/")
    if not (index.isdigit() and number.isdigit() and 1 <= int(index) <= int(number)):
        raise ValueError(f"shard must be i/n with 1 ≤ i ≤ n, got {shard!r}; 1/1 runs everything")
    return list(cells)[int(index) - 1 :: int(number)]


def open_cells(cells: Sequence[Cell], out: Path) -> list[Cell]:
    """Those that are not done yet with exactly this configuration."""
    found = store.read(store.result_files(out))
    done = {(record["cell"], record["digest"]) for record in found if record["status"] == "done"}
    return [cell for cell in cells if (cell.name, digest(cell.config)) not in done]


def run_grid(
    study: str,
    cells: Sequence[Cell],
    work: Work,
    out: Path,
    *,
    device: torch.device,
    shard: str = "1/1",
    jobs: int = 1,
    tell: Tell = lambda news: None,
    main: bool = True,
) -> list[str]:
    """Run what is open of a shard and append its lines; returns the names of cells that failed.

    Args:
        jobs: cells at once, each in a process of its own with one thread; more than 1 is for CPUs.
        main: False in the processes of a torchrun that are not the first: they work, and write nothing.
    A cell that fails leaves a line that says how, and the others go on; an interrupt or SIGTERM stops them all.
    """
    mine = open_cells(shard_of(cells, shard), out)
    path = out / f"cells-{shard.replace('/', '-of-')}.jsonl"
    failed = []

    def keep(cell: Cell, record: dict[str, Any]) -> None:
        if main:
            store.append(path, record)
        if record["status"] == "failed":
            failed.append(cell.name)

    with stoppable():
        if jobs == 1:
            for cell in mine:
                keep(cell, _one(study, work, out, device, cell, tell))
        else:
            side_by_side(
                mine,
                partial(_one, study, work, out, device),
                jobs,
                tell=tell,
                keep=keep,
                lost=partial(_lost, study, device, tell),
            )
    return failed


def _one(study: str, work: Work, out: Path, device: torch.device, cell: Cell, tell: Tell) -> dict[str, Any]:
    """The line of one cell, whatever happens to it."""
    started = time.perf_counter()
    record = _head(study, device, cell)
    try:
        record |= {"status": "done", **work(cell, out / "runs" / cell.name, device, tell)}
        tell(News(cell.name, "done", 1.0))
    except Interrupted:
        raise
    except Exception as error:
        if os.environ.get("ROBUST_ATTENTION_DEBUG"):
            traceback.print_exc()
        tell(News(cell.name, f"failed: {error}", 1.0))
        record |= {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return record | {"seconds": round(time.perf_counter() - started, 2)}


def _lost(study: str, device: torch.device, tell: Tell, cell: Cell, why: str) -> dict[str, Any]:
    """The line of a cell whose process is gone."""
    tell(News(cell.name, f"failed: {why}", 1.0))
    return _head(study, device, cell) | {"status": "failed", "error": why, "seconds": 0.0}


def _head(study: str, device: torch.device, cell: Cell) -> dict[str, Any]:
    """What a line says whether or not its cell was done."""
    return {
        "study": study,
        "cell": cell.name,
        **cell.labels,
        "digest": digest(cell.config),
        "config": describe(cell.config),
        **provenance(device),
    }
