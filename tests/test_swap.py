"""Word swap: as many words as were asked for, content words alone, the same for the same seed."""

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from robust_attention.data.sentences import paragraphs
from robust_attention.data.swap import STOP_WORDS, generic, greedy_swap, random_swap, swappable
from robust_attention.data.text import EOS, UNK, Vocabulary
from robust_attention.data.tokens import tokenise

LINES = list(paragraphs(700))
CODER = Vocabulary.build(line.split() for line in LINES)
TOKENS = torch.tensor([number for line in tokenise(LINES, CODER) for number in line])
MAY = swappable(CODER)[TOKENS]
LINE = torch.cat((torch.zeros(1).long(), (CODER.eos == TOKENS).cumsum(0)[:-1]))
CANDIDATES = torch.bincount(LINE[MAY], minlength=int(LINE[-1]) + 1)


def test_only_content_words_may_be_swapped() -> None:
    words = [EOS, UNK, "AAA", "the", "The", "of", "'s", ",", "@-@", "=", ".", "1997", "@-", "King", "2nd", "ghost"]
    coder = Vocabulary(words)
    found = {word for word, may in zip(words, swappable(coder).tolist(), strict=True) if may}
    assert found == {"1997", "King", "2nd", "ghost"}
    assert all(word == word.lower() for word in STOP_WORDS)
    assert {"the", "of", "and", "who", "not", "every"} <= STOP_WORDS


def test_words_become_aaa_or_else_unknown() -> None:
    assert generic(Vocabulary([EOS, UNK, "AAA", "b"])) == 2
    assert generic(Vocabulary([EOS, UNK, "b"])) == 1
    swapped = random_swap(TOKENS, CODER, seed=0)
    assert (swapped.tokens[swapped.where] == CODER.unk).all()
    assert torch.equal(swapped.tokens[~swapped.where], TOKENS[~swapped.where])
    assert MAY[swapped.where].all()


@pytest.mark.parametrize("share", [0.015, 0.05, 0.2, 1.0])
def test_each_line_loses_the_share_that_was_asked_for(share: float) -> None:
    swapped = random_swap(TOKENS, CODER, share=share, seed=3)
    lost = torch.bincount(LINE[swapped.where], minlength=len(CANDIDATES))
    wanted = share * CANDIDATES
    assert (lost[CANDIDATES > 0] >= 1).all()
    assert (lost[CANDIDATES == 0] == 0).all()
    assert (lost >= wanted.floor()).all()
    assert (lost <= wanted.ceil().clamp(min=1)).all()
    # Where a line is long enough for no minimum, the mean is exact: 40 seeds of rounding.
    long = wanted > 1
    if long.any() and share < 1:
        lines = [torch.bincount(LINE[random_swap(TOKENS, CODER, share=share, seed=s).where]) for s in range(40)]
        rate = sum(int(line[long].sum()) for line in lines) / (40 * int(CANDIDATES[long].sum()))
        assert rate == pytest.approx(share, rel=0.03)
    assert swapped.share == pytest.approx(int(lost.sum()) / int(CANDIDATES.sum()))


def test_swaps_are_a_function_of_the_seed() -> None:
    before = torch.get_rng_state()
    one, same, other = (random_swap(TOKENS, CODER, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.where, same.where)
    assert not torch.equal(one.where, other.where)
    more = random_swap(TOKENS, CODER, share=0.1, seed=1)
    assert more.where[one.where].all()  # those of a smaller share are among them


def test_every_word_of_a_line_is_as_likely_as_the_others() -> None:
    line = [CODER.words.index(word) for word in [word for word in CODER.words if word[0].isupper()][-10:]]
    tokens = torch.tensor([*line, CODER.eos])
    assert swappable(CODER)[tokens][:-1].all()
    hits = torch.stack([random_swap(tokens, CODER, share=0.2, seed=seed).where for seed in range(1000)])
    assert (hits.sum(1) == 2).all()
    assert (hits[:, :-1].float().mean(0) - 0.2).abs().max() < 0.06


def test_a_quarter_of_a_million_tokens_take_no_time() -> None:
    tokens = TOKENS.repeat(250_000 // len(TOKENS) + 1)
    start = time.perf_counter()
    random_swap(tokens, CODER, seed=0)
    assert time.perf_counter() - start < 2


COST = torch.rand(len(CODER), generator=torch.Generator().manual_seed(0))


class Costs:
    """A model whose loss of a target is 1 for the generic token, and COST of the word before it for every other."""

    def __init__(self) -> None:
        self.queries = 0

    def __call__(self, rows: Tensor) -> Tensor:
        self.queries += len(rows)
        own = COST[rows[:, :-1]].double()
        return torch.where(rows[:, 1:] == CODER.unk, 1.0, own)


def worst(line: Tensor, quota: int) -> set[int]:
    """Brute force for `Costs`: swap the words that raise the sum most, one after the other."""
    tokens, chosen = line.clone(), set()
    model = Costs()
    for _ in range(quota):
        best, place = -1.0, -1
        for i in range(len(tokens)):
            if swappable(CODER)[line[i]] and i not in chosen:
                tried = tokens.clone()
                tried[i] = CODER.unk
                total = float(model(tried[None]).sum())
                if total > best:
                    best, place = total, i
        chosen.add(place)
        tokens[place] = CODER.unk
    return chosen


def test_greedy_swaps_are_the_worst_ones() -> None:
    length = int((CODER.eos == TOKENS).nonzero()[11]) + 1
    tokens = TOKENS[:length]
    found = greedy_swap(tokens, CODER, Costs(), share=0.05, seed=0, context=512, queries=10_000)
    lost = torch.bincount(LINE[:length][found.where], minlength=int(LINE[length - 1]) + 1)
    start = 0
    for line in range(len(lost)):
        part = TOKENS[:length][LINE[:length] == line]
        expected = worst(part, int(lost[line]))
        got = found.where[start : start + len(part)].nonzero().flatten().tolist()
        assert set(got) == expected, line
        start += len(part)
    random = random_swap(tokens, CODER, share=0.05, seed=0)
    assert torch.equal(lost, torch.bincount(LINE[:length][random.where], minlength=len(lost)))
    damage = [float(Costs()(swapped.tokens[None]).sum()) for swapped in (found, random)]
    assert damage[0] > damage[1]


@pytest.mark.parametrize("queries", [1, 7, 40])
def test_greedy_swaps_keep_to_their_budget_and_their_rate(queries: int) -> None:
    tokens = TOKENS[:1500]
    model = Costs()
    found = greedy_swap(tokens, CODER, model, share=0.5, seed=0, context=64, queries=queries)
    again = greedy_swap(tokens, CODER, Costs(), share=0.5, seed=0, context=64, queries=queries)
    assert torch.equal(found.where, again.where)
    pieces = sum(-(-int(n) // 32) for n in torch.bincount(LINE[:1500]))
    assert 0 < model.queries <= queries * pieces
    assert MAY[:1500][found.where].all()
    assert found.share == pytest.approx(0.5, abs=0.03)
    assert torch.equal(found.tokens, torch.where(found.where, CODER.unk, tokens))


@pytest.mark.parametrize("context", [16, 64, 512])
@pytest.mark.parametrize("share", [0.015, 0.2])
def test_greedy_swaps_as_many_words_of_a_line_as_random(context: int, share: float) -> None:
    tokens, line = TOKENS[:600], LINE[:600]
    greedy = greedy_swap(tokens, CODER, Costs(), share=share, seed=3, context=context, queries=5)
    random = random_swap(tokens, CODER, share=share, seed=3)
    assert torch.equal(torch.bincount(line[greedy.where]), torch.bincount(line[random.where]))


WRONG = [
    (lambda: random_swap(TOKENS, CODER, share=0.0, seed=0), "share must lie above 0 and up to 1, got 0.0"),
    (lambda: random_swap(TOKENS.float(), CODER, seed=0), r"tokens must be int64 \[N\], got torch.float32"),
    (lambda: random_swap(TOKENS + len(CODER), CODER, seed=0), "token ids must lie from 0 to"),
    (lambda: greedy_swap(TOKENS, CODER, Costs(), seed=0, context=64, queries=0), "queries must be a whole number"),
    (lambda: greedy_swap(TOKENS, CODER, Costs(), seed=0, context=2), "context must be a whole number of at least 4"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_of_swaps_fails_clearly(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
