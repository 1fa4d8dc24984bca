"""`robust-attention study language`: the grid of a scale, run; and what it would cost."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from robust_attention import _checks
from robust_attention._config import override
from robust_attention._files import prepare_folder
from robust_attention.models.lm import next_word_loss
from robust_attention.recipes import han2023_language as paper
from robust_attention.recipes.language import LanguageConfig, classes
from robust_attention.study.grid import Cell, open_cells, run_grid, shard_of
from robust_attention.study.language import build, run_cell
from robust_attention.study.show import shown
from robust_attention.training.parallel import launched, pick_device, processes

_WIKITEXT_WORDS, _WIKITEXT_TOKENS = 267_735, 103_227_021
_TIMED_SEGMENTS = {"cpu": 1, "cuda": 32}


def language_cells(
    scale: str,
    *,
    root: str = "",
    data: Sequence[str] = (),
    rows: Sequence[str] = (),
    seeds: int | None = None,
    settings: dict[str, Any] | None = None,
) -> list[Cell]:
    """The grid of a scale: texts × seeds × rows; the variants are run only by name. An unknown name is refused.

    Settings of the method change what the row makes of it; all others come before, so that rows which depend on the
    model's sizes follow them.
    """
    _checks.one_of("scale", scale, paper.SCALES)
    recipes, known = paper.SCALES[scale], paper.ROWS | paper.VARIANTS
    for name, choice, all_ in (("--data", data, recipes), ("--rows", rows, known)):
        if unknown := sorted(set(choice) - set(all_)):
            raise ValueError(f"{name} must be of {', '.join(all_)}, got {', '.join(unknown)}; leave it out for all")
    of_method = {path: value for path, value in (settings or {}).items() if path.split(".")[0] == "method"}
    of_base = {path: value for path, value in (settings or {}).items() if path not in of_method}
    cells = []
    for text in data or list(recipes)[:1]:
        for seed in range(paper.SEEDS[scale] if seeds is None else seeds):
            for row in rows or paper.ROWS:
                made = known[row][1](override(recipes[text](seed, root), of_base, classes()))
                config: LanguageConfig = override(made, of_method, classes())
                labels = {"data": text, "row": row, "seed": seed}
                cells.append(Cell(name=f"{text}/{row}/{seed}", labels=labels, config=config))
    return cells


def run_language(
    cells: Sequence[Cell], out: Path, console: Console, *, device: torch.device, shard: str = "1/1", jobs: int = 1
) -> list[str]:
    """Run what is open of these cells; the names of those that failed."""
    main = os.environ.get("RANK", "0") == "0"
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
        return run_grid("language", cells, run_cell, out, device=device, shard=shard, jobs=jobs, tell=tell, main=main)


def study_language(
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
    """What the command does: the folder of the results, and the cells that failed.

    Args:
        root: the folder that the recipes' files are in.
        data: texts; none means the small model's.
        settings: fields to change, see `study.run.settings_of`.
    """
    console = console or Console()
    _checks.one_of("device", device, ("auto", "cpu", "cuda"))
    for name, number in (("jobs", jobs), ("seeds", seeds)):
        if number is not None:
            _checks.whole(name, number, least=1)
    place = pick_device(None if device == "auto" else device)
    out = out or Path(f"out/language-{scale}")
    cells = language_cells(scale, root=root, data=data, rows=rows, seeds=seeds, settings=settings)
    if list_only:
        left = {cell.name for cell in open_cells(cells, out)}
        for cell in shard_of(cells, shard):
            console.print(f"{'open' if cell.name in left else 'done'}  {cell.name}", highlight=False)
        return out, []
    if scale != "smoke" and not root:
        raise ValueError("the texts of this scale need a folder that holds them, got none; name it with --data-root")
    if launched():
        jobs = 1  # all processes of torchrun work on one cell
    elif jobs is None:
        jobs = 1 if place.type == "cuda" else os.cpu_count() or 1
    with processes(place):
        if scale == "paper":
            console.print(estimate(cells, place), highlight=False)
        failed = run_language(cells, out, console, device=place, shard=shard, jobs=jobs)
    return out, failed


def estimate(
    cells: Sequence[Cell], device: torch.device, *, words: int = _WIKITEXT_WORDS, tokens: int = _WIKITEXT_TOKENS
) -> str:
    """Hours of training on devices like this one, row by row, for a text of so many words and tokens."""
    lines, total = ["Estimated training time, from a few timed steps on one device like this:"], 0.0
    for cell in cells:
        config: LanguageConfig = replace(cell.config, model=replace(cell.config.model, vocab_size=words))
        rate = tokens_per_second(config, device)
        hours = config.fit.epochs * tokens / rate / 3600
        total += hours
        millions = config.fit.epochs * tokens / 1e6
        lines.append(f"  {cell.name:32} {millions:8.0f} M tokens at {rate:9.0f} a second: {hours:10.1f} h")
    lines.append(f"  {'all':32} {total:50.1f} h on one {device.type} device, {total / 4:.1f} h on four at best")
    return "\n".join(lines)


def tokens_per_second(config: LanguageConfig, device: torch.device, steps: int = 2) -> float:
    """Forward and backward on random words, in the precision of the recipe; the best of a few steps."""
    model = build(config).to(device).train()
    shape = (_TIMED_SEGMENTS.get(device.type, 1), config.model.context)
    words = torch.randint(config.model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    best = math.inf
    for _ in range(steps):
        start = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=config.fit.precision == "bfloat16"):
            loss = next_word_loss(model, (words, words))
        loss.backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
        model.zero_grad()
    return words.numel() / best
