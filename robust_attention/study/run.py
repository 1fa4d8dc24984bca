"""`robust-attention study vision`: the grid of a scale, run, and made into tables."""

import json
import os
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from robust_attention import _checks
from robust_attention._config import override
from robust_attention._files import prepare_folder
from robust_attention.recipes import family
from robust_attention.recipes import han2023_vision as paper
from robust_attention.recipes.vision import VisionConfig, classes
from robust_attention.study import cost
from robust_attention.study.grid import Cell, open_cells, run_grid, shard_of
from robust_attention.study.show import shown
from robust_attention.study.vision import run_cell
from robust_attention.training.parallel import launched, pick_device, processes, rank


def settings_of(given: Sequence[str], file: Path | None) -> dict[str, Any]:
    """Overrides from a TOML or JSON file, then those named on the command line as field=value."""
    found: dict[str, Any] = {}
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
            read = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ValueError(f"--config must be a TOML or JSON file, got {file} ({error}); mend the file") from error
        found |= _flat(read)
    for part in given:
        path, sign, value = part.partition("=")
        if not sign:
            raise ValueError(f"--set must be field=value, got {part!r}; for example --set fit.epochs=3")
        found[path.strip()] = value.strip()
    return found


def _flat(tree: dict[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{above}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) and "is" not in value else {path: value}
    return flat


def vision_cells(
    scale: str, *, root: str = "", data: Sequence[str] = (), rows: Sequence[str] = (), seeds: int | None = None,
    settings: dict[str, Any] | None = None,
) -> list[Cell]:  # fmt: skip
    """The grid of a scale: image sets × seeds × rows; an unknown name is refused."""
    recipes, known = paper.SCALES[scale], paper.ROWS | family.ROWS
    for name, choice, all_ in (("--data", data, recipes), ("--rows", rows, known)):
        if unknown := sorted(set(choice) - set(all_)):
            raise ValueError(f"{name} must be of {', '.join(all_)}, got {', '.join(unknown)}; leave it out for all")
    cells = []
    for dataset in data or recipes:
        for seed in range(paper.SEEDS[scale] if seeds is None else seeds):
            for row in rows or paper.ROWS:
                made = known[row][1](recipes[dataset](seed, str(Path(root) / dataset) if root else ""))
                config: VisionConfig = override(made, settings or {}, classes())
                labels = {"data": dataset, "row": row, "seed": seed}
                cells.append(Cell(name=f"{dataset}/{row}/{seed}", labels=labels, config=config))
    return cells


def run_vision(
    cells: Sequence[Cell], out: Path, console: Console, *, device: torch.device, shard: str = "1/1", jobs: int = 1
) -> list[str]:
    """Run what is open of these cells; the names of those that failed."""
    main = rank() == 0
    if main:
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
        return run_grid("vision", cells, run_cell, out, device=device, shard=shard, jobs=jobs, tell=tell, main=main)


def study_vision(
    *,
    scale: str,
    out: Path | None,
    root: str,
    data: Sequence[str],
    rows: Sequence[str],
    seeds: int | None,
    changes: Sequence[str],
    config: Path | None,
    shard: str,
    jobs: int | None,
    device: str,
    list_only: bool,
    console: Console | None = None,
) -> tuple[Path, list[str]]:
    """What the command does: the folder of the results, and the cells that failed."""
    console = console or Console(quiet=rank() > 0)
    _checks.one_of("scale", scale, paper.SCALES)
    _checks.one_of("device", device, ("auto", "cpu", "cuda"))
    if jobs is not None:
        _checks.whole("jobs", jobs, least=1)
    if seeds is not None:
        _checks.whole("seeds", seeds, least=1)
    place = pick_device(None if device == "auto" else device)
    out = out or Path(f"out/vision-{scale}")
    cells = vision_cells(scale, root=root, data=data, rows=rows, seeds=seeds, settings=settings_of(changes, config))
    if list_only:
        left = {cell.name for cell in open_cells(cells, out)}
        for cell in shard_of(cells, shard):
            console.print(f"{'open' if cell.name in left else 'done'}  {cell.name}", highlight=False)
        return out, []
    if launched():
        jobs = 1  # all processes of torchrun work on one cell
    elif jobs is None:
        jobs = 1 if place.type == "cuda" else os.cpu_count() or 1
    with processes(place):
        if scale == "paper":
            console.print(cost.estimate(cells, place), highlight=False)
        failed = run_vision(cells, out, console, device=place, shard=shard, jobs=jobs)
    return out, failed
