"""What the language study measures on one text: losses, clean and after swaps, of all targets and of parts of them."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robust_attention._seeds import mix
from robust_attention.data.swap import Swapped, generic, greedy_swap, random_swap
from robust_attention.data.text import Coder
from robust_attention.eval.measure import Measurement, Setting
from robust_attention.eval.perplexity import block_means, row_losses, score, sliding_losses
from robust_attention.recipes.language import LanguageConfig, Part
from robust_attention.study.texts import Texts

Blocks = dict[str, list[float]]
"""Condition → means over runs of consecutive targets: `block_means`."""


class Found(NamedTuple):
    """What was measured on one text."""

    measurements: list[Measurement]
    blocks: Blocks


def measure(
    config: LanguageConfig,
    model: nn.Module,
    texts: Texts,
    part: Part,
    device: torch.device,
    tell: Callable[[str, float], None] = lambda doing, done: None,
) -> Found:
    """Losses on one text: clean, then under each swap of all targets, of the swapped and of the clean ones.

    "clean targets, before the swap" is the clean text's loss on the very targets that the swap leaves alone: what the
    loss of the clean targets rose from.
    """
    asked = config.evaluation
    tokens = getattr(texts, part).read(0, asked.num_tokens)
    number, done = 1 + len(asked.shares) + 3 * bool(asked.greedy_lines), 0

    def losses_of(tokens: Tensor, doing: str) -> Tensor:
        nonlocal done
        found = sliding_losses(
            model,
            tokens,
            context=config.model.context,
            stride=asked.stride,
            batch_size=asked.batch_size,
            device=device,
            draws=asked.draws,
            seed=mix(config.seed, "draws"),
            report=lambda share: tell(doing, (done + share) / number),
        )
        done += 1
        return found

    common: dict[str, Setting] = {
        "context": config.model.context,
        "stride": asked.stride,
        "draws": asked.draws,
        "seed": config.seed,
    }
    found = Found([], {})
    clean = losses_of(tokens, f"clean {part}")
    _add(found, f"clean {part}", clean, common, asked.blocks)
    for share in asked.shares:
        swapped = random_swap(tokens, texts.coder, share=share, seed=mix(config.seed, part))
        name, some = f"swap {100 * share:g}% {part}", {**common, "share": share}
        _add_swap(found, name, clean, losses_of(swapped.tokens, name), swapped, texts.coder, some, asked.blocks)
    if asked.greedy_lines and asked.shares:
        tokens = tokens[: _end_of_line(tokens, texts.coder.eos, asked.greedy_lines)]
        swapped = greedy_swap(
            tokens,
            texts.coder,
            row_losses(model, batch_size=asked.batch_size, device=device),
            share=asked.shares[0],
            seed=mix(config.seed, part),
            context=config.model.context,
            queries=asked.greedy_queries,
        )
        name = f"greedy swap {100 * asked.shares[0]:g}% {part}"
        some = {**common, "share": asked.shares[0], "lines": asked.greedy_lines, "queries": asked.greedy_queries}
        before, after = losses_of(tokens, name), losses_of(swapped.tokens, name)
        _add_swap(found, name, before, after, swapped, texts.coder, some, asked.blocks)
    return found


def _add_swap(
    found: Found,
    name: str,
    before: Tensor,
    after: Tensor,
    swapped: Swapped,
    coder: Coder,
    common: dict[str, Setting],
    blocks: int,
) -> None:
    where = swapped.where[1:]  # of the targets
    settings = {
        **common,
        "swapped": int(swapped.where.sum()),
        "swapped_share": round(swapped.share, 6),
        "word": coder.words[generic(coder)],
    }
    _add(found, f"{name}, all targets", after, settings, blocks)
    if where.any():
        _add(found, f"{name}, swapped targets", after[where], settings, blocks)
    _add(found, f"{name}, clean targets", after[~where], settings, blocks)
    _add(found, f"{name}, clean targets, before the swap", before[~where], settings, blocks)


def _add(found: Found, condition: str, losses: Tensor, settings: dict[str, Setting], blocks: int) -> None:
    nats, perplexity, number = score(losses)
    # Above e^700 there is no such float, and JSON would not take it.
    settings = {**settings, "perplexity": perplexity if nats < 700 else "above 1e300"}
    found.measurements.append(Measurement(metric="loss", condition=condition, value=nats, n=number, settings=settings))
    found.blocks[condition] = block_means(losses, blocks)


def _end_of_line(tokens: Tensor, eos: int, lines: int) -> int:
    ends = (tokens == eos).nonzero().flatten()
    return int(ends[lines - 1]) + 1 if lines <= len(ends) else len(tokens)
