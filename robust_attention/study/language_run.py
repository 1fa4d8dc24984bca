"""The language study as `robust-attention study` runs it, and what its paper scale would cost."""

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from robust_attention.models.lm import next_word_loss
from robust_attention.recipes import han2023_language as paper
from robust_attention.recipes.language import LanguageConfig, classes
from robust_attention.study.grid import Cell
from robust_attention.study.language import build, run_cell
from robust_attention.study.run import Study

_WIKITEXT_WORDS, _WIKITEXT_TOKENS = 267_735, 103_227_021
_TIMED_SEGMENTS = {"cpu": 1, "cuda": 32}


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


LANGUAGE = Study(
    name="language",
    scales=paper.SCALES,
    rows=paper.ROWS,
    variants=paper.VARIANTS,
    seeds=paper.SEEDS,
    classes=classes,
    work=run_cell,
    estimate=estimate,
)
