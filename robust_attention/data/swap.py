"""Word swap: some words of every line become one generic token.

Random swaps need no model; greedy ones ask a model which words of a line, once swapped, raise its loss most.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.data.text import EOS, UNK, Coder

GENERIC = "AAA"
"""What the paper swaps words for."""

STOP_WORDS = frozenset(
    """
    a an the this that these those some any each every either neither no none all both few many much more most other
    another such same own one ones
    i me my mine myself you your yours yourself yourselves he him his himself she her hers herself it its itself we us
    our ours ourselves they them their theirs themselves who whom whose which what whoever whatever whichever
    somebody someone something anybody anyone anything everybody everyone everything nobody nothing
    and or but nor so yet if unless because since although though while whereas whether than as until till once
    of in on at by to from for with without within into onto out off over under above below up down about across after
    against along among amongst around before behind beneath beside besides between beyond despite during except inside
    like near outside per since through throughout toward towards upon via
    am is are was were be been being do does did doing done have has had having will would shall should can could may
    might must ought need dare
    not n't 's 're 've 'm 'll 'd 't
    here there where when why how then now ever never always often again also too very just only even still already
    almost quite rather perhaps however therefore thus hence else
    """.split()  # noqa: SIM905 - a list of words reads better in lines of text
)
"""English words that carry grammar rather than content; swaps leave them alone."""

Losses = Callable[[Tensor], Tensor]
"""From rows of tokens `[n, l + 1]` to the loss of each next token `[n, l]`, on the CPU."""


class Swapped(NamedTuple):
    """A text after swaps."""

    tokens: Tensor
    """`[N]`, int64."""
    where: Tensor
    """`[N]`, True where a token was swapped."""
    share: float
    """Swapped tokens over those that could have been: above the share that was asked for where lines are short."""


def generic(coder: Coder) -> int:
    """The token that words are swapped for: AAA, or `<unk>` where the vocabulary lacks it."""
    found = next((number for number, word in enumerate(coder.words) if word == GENERIC), coder.unk)
    if found is None:
        raise ValueError(f"the vocabulary must have {GENERIC} or {UNK} to swap words for, got neither; add one")
    return found


def swappable(coder: Coder) -> Tensor:
    """`[size]`, True for words that may be swapped: with a letter or a digit, and no stop word or special token."""

    def content(word: str) -> bool:
        return any(map(str.isalnum, word)) and word.lower() not in STOP_WORDS and word not in (EOS, UNK, GENERIC)

    found = torch.tensor([content(word) for word in coder.words])
    found[[generic(coder), coder.eos, *(() if coder.unk is None else (coder.unk,))]] = False
    return found


def random_swap(tokens: Tensor, coder: Coder, *, share: float = 0.015, seed: int) -> Swapped:
    """Swap a share of the words of each line, at least one.

    A line with n words that may be swapped loses share·n of them, rounded up or down at random so that the mean is
    exact, but no less than one. With equal seeds, the swaps of a smaller share are among those of a larger one.

    Args:
        tokens: `[N]`, numbered by `coder`.
    """
    _check(tokens, share, len(coder.words))
    may, line = swappable(coder)[tokens], _lines(tokens, coder.eos)
    place = may.nonzero().flatten()
    number = torch.bincount(line[place], minlength=int(line[-1]) + 1)
    quota = _quota(number, share, seed)
    key = torch.rand(len(tokens), generator=Generator().manual_seed(mix(seed, "swap", "order")), dtype=torch.float64)
    # By line, and at random within each: a stable sort keeps the random order.
    place = place[key[place].argsort()]
    place = place[line[place].argsort(stable=True)]
    rank = torch.arange(len(place)) - (number.cumsum(0) - number)[line[place]]
    where = torch.zeros_like(may)
    where[place[rank < quota[line[place]]]] = True
    return _swapped(tokens, where, may, generic(coder))


def greedy_swap(
    tokens: Tensor, coder: Coder, losses: Losses, *, share: float = 0.015, seed: int, context: int, queries: int = 256
) -> Swapped:
    """Swap those words of each line that raise its loss most, as many as `random_swap` with the same seed may.

    One word after the other: each is the one whose swap, on top of the swaps before, gives the line its largest loss.
    A query is one line that the model scores; when a round would need more than are left of a line's budget, it tries
    a random part of the words, and when none is left, the best ones of the last scores are taken.

    Args:
        losses: the model under attack.
        context: tokens that it sees at once. Lines of more than half of it are taken as several, so that each has
            some text before it.
        queries: budget a line.
    Departs: the paper names TextAttack's greedy search with its stop words and no budget or goal. Here the goal is the
        summed loss of the line, swapped targets among it, and later lines do not count.
    """
    _check(tokens, share, len(coder.words))
    _checks.whole("context", context, least=4)
    _checks.whole("queries", queries, least=1)
    may, by = swappable(coder)[tokens], generic(coder)
    pieces = list(_pieces(tokens, coder.eos, context // 2))
    number = torch.tensor([int(may[start:stop].sum()) for start, stop in pieces])
    line = _lines(tokens, coder.eos)
    quotas = _of_pieces(number.tolist(), [int(line[start]) for start, _ in pieces], share, seed)
    generator = Generator().manual_seed(mix(seed, "swap", "tries"))
    after, where = tokens.clone(), torch.zeros_like(may)
    for (start, stop), quota in zip(pieces, quotas, strict=True):
        first = max(0, stop - 1 - context)
        row, skipped = after[first:stop], max(0, start - first - 1)

        def score(tried: Tensor, row: Tensor = row, first: int = first, skipped: int = skipped) -> Tensor:
            rows = row.repeat(len(tried), 1)
            rows[torch.arange(len(tried)), tried - first] = by
            return losses(rows)[:, skipped:].sum(dim=1)

        left = start + may[start:stop].nonzero().flatten()
        for chosen in _greedy(left, score, quota, queries, generator):
            after[chosen], where[chosen] = by, True
    return _swapped(tokens, where, may, by)


def _greedy(
    left: Tensor, score: Callable[[Tensor], Tensor], quota: int, queries: int, generator: Generator
) -> Iterator[int]:
    """The places to swap, one after the other; `score` is asked again after each."""
    known = torch.full((len(left),), -torch.inf, dtype=torch.float64)
    for _ in range(quota):
        if queries:
            tried = torch.randperm(len(left), generator=generator)[:queries].sort().values
            known[tried] = score(left[tried]).double().cpu()
            queries -= len(tried)
            # What was not tried this round has an old score, of a text with fewer swaps: not comparable.
            best = int(tried[known[tried].argmax()])
        else:
            best = int(known.argmax())
        yield int(left[best])
        kept = torch.arange(len(left)) != best
        left, known = left[kept], known[kept]


def _lines(tokens: Tensor, eos: int) -> Tensor:
    """The line of each token; the token that ends a line belongs to it."""
    ends = (tokens == eos).long()
    return ends.cumsum(0) - ends


def _pieces(tokens: Tensor, eos: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of the lines, and of parts of lines that are longer than `most`."""
    start = 0
    ends = [*((tokens == eos).nonzero().flatten() + 1).tolist(), len(tokens)]
    for end in ends:
        while start < end:
            yield start, min(start + most, end)
            start = min(start + most, end)


def _quota(number: Tensor, share: float, seed: int) -> Tensor:
    """How many of each line's words to swap."""
    generator = Generator().manual_seed(mix(seed, "swap", "rounding"))
    up = torch.rand(len(number), generator=generator, dtype=torch.float64)
    return (share * number + up).floor().long().clamp(min=1).minimum(number)


def _of_pieces(number: list[int], line: list[int], share: float, seed: int) -> list[int]:
    """Each line's quota over its pieces: in proportion to their words, what is left over to the largest remainders."""
    whole = torch.zeros(max(line) + 1, dtype=torch.int64)
    whole.index_add_(0, torch.tensor(line), torch.tensor(number))
    quotas = [0] * len(number)
    for one, quota in enumerate(_quota(whole, share, seed).tolist()):
        mine = [place for place, of in enumerate(line) if of == one]
        parts = {place: quota * number[place] / max(1, int(whole[one])) for place in mine}
        for place in mine:
            quotas[place] = int(parts[place])
        left = quota - sum(quotas[place] for place in mine)
        for place in sorted(mine, key=lambda place: int(parts[place]) - parts[place])[:left]:
            quotas[place] += 1
    return quotas


def _swapped(tokens: Tensor, where: Tensor, may: Tensor, by: int) -> Swapped:
    return Swapped(torch.where(where, by, tokens), where, int(where.sum()) / max(1, int(may.sum())))


def _check(tokens: Tensor, share: float, size: int) -> None:
    if tokens.ndim != 1 or tokens.dtype != torch.int64 or not len(tokens):
        raise ValueError(f"tokens must be int64 [N], got {tokens.dtype} {list(tokens.shape)}; pass Tokens.read()")
    if not 0 <= int(tokens.min()) <= int(tokens.max()) < size:
        raise ValueError(
            f"token ids must lie from 0 to {size - 1}, got {int(tokens.min())} to {int(tokens.max())}; "
            "pass the coder that numbered the text"
        )
    if not 0 < share <= 1:
        raise ValueError(f"share must lie above 0 and up to 1, got {share!r}; the paper's is 0.015")
