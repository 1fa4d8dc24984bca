"""`robust-attention study timeseries`: the grid of a scale, run."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from robust_attention import _checks
from robust_attention._config import override
from robust_attention._files import prepare_folder
from robust_attention.recipes import han2023_series as paper
from robust_attention.recipes.series import SeriesConfig, classes
from robust_attention.study.grid import Cell, open_cells, run_grid, shard_of
from robust_attention.study.series import run_cell
from robust_attention.study.show import shown
from robust_attention.training.parallel import launched, pick_device


def series_cells(
    scale: str,
    *,
    root: str = "",
    data: Sequence[str] = (),
    rows: Sequence[str] = (),
    seeds: int | None = None,
    settings: dict[str, Any] | None = None,
) -> list[Cell]:
    """The grid of a scale: problems × seeds × rows; an unknown name is refused."""
    _checks.one_of("scale", scale, paper.SCALES)
    recipes = paper.SCALES[scale]
    for name, choice, all_ in (("--data", data, recipes), ("--rows", rows, paper.ROWS)):
        if unknown := sorted(set(choice) - set(all_)):
            raise ValueError(f"{name} must be of {', '.join(all_)}, got {', '.join(unknown)}; leave it out for all")
    cells = []
    for problem in data or recipes:
        for seed in range(paper.SEEDS[scale] if seeds is None else seeds):
            for row in rows or paper.ROWS:
                made = paper.ROWS[row][1](recipes[problem](seed, root))
                config: SeriesConfig = override(made, settings or {}, classes())
                labels = {"data": problem, "row": row, "seed": seed}
                cells.append(Cell(name=f"{problem}/{row}/{seed}", labels=labels, config=config))
    return cells


def run_series(
    cells: Sequence[Cell], out: Path, console: Console, *, device: torch.device, shard: str = "1/1", jobs: int = 1
) -> list[str]:
    """Run what is open of these cells; the names of those that failed."""
    prepare_folder(out)
    mine = shard_of(cells, shard)
    left = open_cells(mine, out)
    console.print(
        f"{len(left)} cells to run of {len(mine)}"
        + (f" in shard {shard}" if shard != "1/1" else "")
        + f", on {device}, {jobs} at once; results go to {out}",
        highlight=False,
        soft_wrap=True,
    )
    with shown(console, len(left)) as tell:
        return run_grid("timeseries", cells, run_cell, out, device=device, shard=shard, jobs=jobs, tell=tell)


def study_series(
    *,
    scale: str,
    out: Path | None,
    root: str,
    data: Sequence[str],
    rows: Sequence[str],
    seeds: int | None,
    settings: dict[str, Any],
    shard: str,
    jobs: int | None,
    device: str,
    list_only: bool,
    console: Console | None = None,
) -> tuple[Path, list[str]]:
    """What the command does: the folder of the results, and the cells that failed."""
    console = console or Console()
    _checks.one_of("device", device, ("auto", "cpu", "cuda"))
    for name, number in (("jobs", jobs), ("seeds", seeds)):
        if number is not None:
            _checks.whole(name, number, least=1)
    if launched():
        raise ValueError("the models of this study must each train in one process, got torchrun; use --shard i/n")
    place = pick_device(None if device == "auto" else device)
    out = out or Path(f"out/timeseries-{scale}")
    cells = series_cells(scale, root=root, data=data, rows=rows, seeds=seeds, settings=settings)
    if scale != "smoke" and not root:
        raise ValueError("--root must be the folder that holds NAME/NAME_TRAIN.ts, got none; unpack the archive there")
    if list_only:
        left = {cell.name for cell in open_cells(cells, out)}
        for cell in shard_of(cells, shard):
            console.print(f"{'open' if cell.name in left else 'done'}  {cell.name}", highlight=False)
        return out, []
    jobs = jobs or (1 if place.type == "cuda" else os.cpu_count() or 1)
    return out, run_series(cells, out, console, device=place, shard=shard, jobs=jobs)
