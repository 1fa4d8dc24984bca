"""What `robust-attention study NAME` does: the grid of a scale, run, whichever study it is."""

import json
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from robust_attention import _checks
from robust_attention._config import override
from robust_attention._files import prepare_folder
from robust_attention.study.grid import Cell, Work, open_cells, run_grid, shard_of
from robust_attention.study.show import shown
from robust_attention.training.parallel import launched, pick_device, processes, rank

Recipe = Callable[[int, str], Any]
"""(seed, folder of the data) -> the whole configuration of the plain model."""
Rows = Mapping[str, tuple[str, Callable[[Any], Any]]]
"""Short name -> what tables call it, and a function that turns the plain model's configuration into the row's."""
_OF_ROW = ("method", "teacher")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Everything that tells one study from another."""

    name: str
    """What the command and the lines call it."""
    scales: Mapping[str, Mapping[str, Recipe]]
    """Scale -> data -> recipe."""
    rows: Rows
    """Rows of the paper's tables, run unless others are named."""
    variants: Rows
    """Rows that are run when they are named."""
    seeds: Mapping[str, int]
    """Scale -> seeds a row, counted from 0."""
    classes: Callable[[], Mapping[str, type]]
    """What configurations are made of."""
    work: Work
    """Does one cell."""
    estimate: Callable[[Sequence[Cell], torch.device], str] | None = None
    """What the scale "paper" will cost."""
    under_torchrun: bool = True
    """Whether the processes of torchrun can train one of its models together."""

    @property
    def labels(self) -> dict[str, str]:
        """What tables call the rows."""
        return {row: label for row, (label, _) in {**self.rows, **self.variants}.items()}

    def cells(
        self,
        scale: str,
        *,
        root: str = "",
        data: Sequence[str] = (),
        rows: Sequence[str] = (),
        seeds: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> list[Cell]:
        """The grid of a scale: data × seeds × rows; an unknown name is refused.

        Settings of the method change what the row makes of it; all others come before, so that rows which depend on
        the model's sizes follow them.
        """
        _checks.one_of("scale", scale, self.scales)
        recipes, known = self.scales[scale], {**self.rows, **self.variants}
        for name, choice, all_ in (("--data", data, recipes), ("--rows", rows, known)):
            if unknown := sorted(set(choice) - set(all_)):
                raise ValueError(f"{name} must be of {', '.join(all_)}, got {', '.join(unknown)}; leave it out for all")
        for path in settings or {}:
            if path in ("seed", "row"):
                raise ValueError(f"{path} is the grid's own, and cannot be set; choose with --seeds and --rows")
        of_row = {path: value for path, value in (settings or {}).items() if path.split(".")[0] in _OF_ROW}
        of_base = {path: value for path, value in (settings or {}).items() if path not in of_row}
        cells = []
        for part in dict.fromkeys(data or recipes):
            for seed in range(self.seeds[scale] if seeds is None else seeds):
                base = override(recipes[part](seed, root), of_base, self.classes())
                for row in dict.fromkeys(rows or self.rows):
                    config = override(known[row][1](base), of_row, self.classes())
                    labels = {"data": part, "row": row, "seed": seed}
                    cells.append(Cell(name=f"{part}/{row}/{seed}", labels=labels, config=config))
        return cells


def run_cells(
    study: Study,
    cells: Sequence[Cell],
    out: Path,
    console: Console,
    *,
    device: torch.device,
    shard: str = "1/1",
    jobs: int = 1,
) -> list[str]:
    """Run what is open of these cells; the names of those that failed."""
    if rank() == 0:
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
        return run_grid(
            study.name, cells, study.work, out, device=device, shard=shard, jobs=jobs, tell=tell, main=rank() == 0
        )


def run_study(
    study: Study,
    *,
    scale: str = "smoke",
    out: Path | None = None,
    root: str = "",
    data: Sequence[str] = (),
    rows: Sequence[str] = (),
    seeds: int | None = None,
    changes: Sequence[str] = (),
    config: Path | None = None,
    shard: str = "1/1",
    jobs: int | None = None,
    device: str = "auto",
    list_only: bool = False,
    console: Console | None = None,
) -> tuple[Path, list[str]]:
    """What the command does: the folder of the results, and the cells that failed."""
    console = console or Console(quiet=rank() > 0)
    _checks.one_of("device", device, ("auto", "cpu", "cuda"))
    for name, number in (("jobs", jobs), ("seeds", seeds)):
        if number is not None:
            _checks.whole(name, number, least=1)
    if launched() and not study.under_torchrun:
        raise ValueError(f"models of {study.name} must each train in one process, got torchrun; use --shard i/n")
    cells = study.cells(scale, root=root, data=data, rows=rows, seeds=seeds, settings=settings_of(changes, config))
    if scale != "smoke" and not root:
        raise ValueError(f"--root must be the folder that holds the data of scale {scale!r}, got none; name it")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device, got none; choose cpu or auto")
    place = pick_device(None if device == "auto" else device)
    out = out or Path(f"out/{study.name}-{scale}")
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
        if scale == "paper" and study.estimate is not None:
            console.print(study.estimate(cells, place), highlight=False)
        return out, run_cells(study, cells, out, console, device=place, shard=shard, jobs=jobs)


def settings_of(given: Sequence[str], file: Path | None) -> dict[str, Any]:
    """Overrides from a TOML or JSON file, then those named on the command line as field=value."""
    found: dict[str, Any] = {}
    if file is not None:
        try:
            text = file.read_text(encoding="utf-8")
            read = json.loads(text) if file.suffix == ".json" else tomllib.loads(text)
        except (OSError, ValueError) as error:
            raise ValueError(f"--config must be a TOML or JSON file, got {file} ({error}); mend the file") from error
        if not isinstance(read, dict):
            raise ValueError(f"--config must hold fields and their values, got {type(read).__name__} in {file}")
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
