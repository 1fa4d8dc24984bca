"""How well a language model predicts a text: losses by a sliding window, and means over parts of the targets."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.nn.draws import is_stochastic, with_methods
from robust_attention.ops import Method
from robust_attention.ops._blocks import BlockMethod


class Score(NamedTuple):
    """A mean over targets."""

    nats: float
    """Mean loss, −log of the probability that the model gave the target."""
    perplexity: float
    """Its exponential; infinite where a float cannot hold it."""
    n: int
    """Targets."""


def score(losses: Tensor, where: Tensor | None = None) -> Score:
    """The mean of the losses, or of those that are marked."""
    if where is not None:
        losses = losses[where]
    if not len(losses):
        raise ValueError("losses must hold at least one target, got none; swap more words or take more text")
    nats = float(losses.double().mean())
    return Score(nats, math.exp(nats) if nats < 700 else math.inf, len(losses))


@torch.no_grad()
def sliding_losses(
    model: nn.Module,
    tokens: Tensor,
    *,
    context: int,
    stride: int = 1,
    batch_size: int = 16,
    device: torch.device | str = "cpu",
    draws: int = 1,
    seed: int = 0,
    report: Callable[[float], None] | None = None,
) -> Tensor:
    """The loss of every token but the first, given those before it: float64 `[N - 1]` on the CPU, in nats.

    The first window of `context` tokens counts whole; every other one is `stride` further on, and its last `stride`
    positions count. The last window may count fewer. Each target is counted once.

    Args:
        model: `model(inputs [B, T], targets=[B, T], last=s) -> losses [B, s]`. It is put into evaluation mode.
        tokens: int64 `[N]`.
        stride: 1 is the published protocol. With s > 1 it is s times as quick, and a target is predicted from no less
            than context - s + 1 tokens instead of exactly context (beyond the first window): what a model can learn
            from the tokens at that distance and beyond is all that the two can differ by.
        draws: for methods that draw. The first is the one of the method's seed, each of the others one of its own, a
            function of `seed`; a target's loss is the mean over them.
        report: told the share that is done.
    """
    _check(tokens, context, stride, batch_size, draws)
    draws = draws if is_stochastic(model) else 1
    total = torch.zeros(len(tokens) - 1, dtype=torch.float64)
    model.eval()
    inputs, targets = tokens[:-1].to(device), tokens[1:].to(device)
    for draw in range(draws):
        with _drawn(model, draw, seed):
            for rows, counted, first in _windows(len(total), context, stride, batch_size):
                place = rows.to(device)
                losses = model(inputs[place], targets=targets[place], last=counted).double().cpu()
                total[first : first + losses.numel()] += losses.flatten()
                if report is not None:
                    report((draw + (first + losses.numel()) / len(total)) / draws)
    return total / draws


def _windows(number: int, context: int, stride: int, batch_size: int) -> Iterator[tuple[Tensor, int, int]]:
    """(positions `[B, T]`, how many of the last ones count, the first target that counts) of each batch."""
    whole = min(context, number)
    yield torch.arange(whole)[None], whole, 0
    ends = torch.arange(whole, number + 1, stride)[1:]
    for part in ends.split(batch_size) if len(ends) else ():
        yield part[:, None] + torch.arange(-context, 0), stride, int(part[0]) - stride
    left = (number - whole) % stride
    if left:
        yield torch.arange(number - context, number)[None], left, number - left


def row_losses(
    model: nn.Module, *, batch_size: int = 16, device: torch.device | str = "cpu"
) -> Callable[[Tensor], Tensor]:
    """From rows of tokens `[n, l + 1]` to the losses of the next tokens `[n, l]`: what a greedy word swap asks."""
    _checks.whole("batch_size", batch_size, least=1)

    @torch.no_grad()
    def losses(rows: Tensor) -> Tensor:
        model.eval()
        parts = (part.to(device) for part in rows.split(batch_size))
        return torch.cat([model(part[:, :-1], targets=part[:, 1:]).double().cpu() for part in parts])

    return losses


def block_means(losses: Tensor, number: int) -> list[float]:
    """Means over `number` runs of consecutive targets of equal length, to within one: what paired tests are made on.

    Two models scored on the same targets have the same runs. Their mean is the mean of the losses, but for the runs
    that are one longer.
    """
    _checks.whole("number", number, least=1)
    parts = losses.tensor_split(min(number, len(losses)))
    return [round(float(part.double().mean()), 5) for part in parts]


@contextmanager
def _drawn(model: nn.Module, draw: int, seed: int) -> Iterator[None]:
    """Meanwhile, methods that draw use draw number `draw`, whatever the batches are."""

    def other(method: Method) -> Method:
        if draw == 0 or not isinstance(method, BlockMethod):
            return method
        return replace(method, seed=mix(seed, "draw", draw, method.seed))

    with with_methods(model, other):
        yield


def _check(tokens: Tensor, context: int, stride: int, batch_size: int, draws: int) -> None:
    for name, value in (("context", context), ("batch_size", batch_size), ("draws", draws)):
        _checks.whole(name, value, least=1)
    _checks.whole("stride", stride, least=1, most=context)
    if tokens.ndim != 1 or tokens.dtype != torch.int64 or len(tokens) < 2:
        raise ValueError(
            f"tokens must be int64 [N] with at least two of them, got {tokens.dtype} {list(tokens.shape)}; "
            "pass Tokens.read()"
        )
