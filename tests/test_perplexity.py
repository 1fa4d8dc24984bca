"""The sliding window: every target once, from the context that was promised, as a plain loop would have it."""

import math
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

import robust_attention as ra
from robust_attention.eval.perplexity import block_means, row_losses, score, sliding_losses
from robust_attention.models.lm import LanguageModel, LMConfig
from robust_attention.training.fit import FitConfig, fit

SIZE = 40


def words(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(SIZE, shape, generator=Generator().manual_seed(seed))


class Seen(nn.Module):
    """Its loss of a target is a number that says which tokens it saw before it and what the target is."""

    def forward(self, tokens: Tensor, targets: Tensor, last: int | None = None) -> Tensor:
        seen = torch.zeros(len(tokens), dtype=torch.float64)
        losses = []
        for place in range(tokens.shape[1]):
            seen = (31 * seen + tokens[:, place] + 1) % 1_000_003
            losses.append(seen * SIZE + targets[:, place])
        found = torch.stack(losses, 1)
        return found if last is None else found[:, -last:]


class Length(nn.Module):
    """Its loss of a target is how many tokens it saw before it."""

    def forward(self, tokens: Tensor, targets: Tensor, last: int | None = None) -> Tensor:
        seen = torch.arange(1.0, tokens.shape[1] + 1).expand(len(tokens), -1)
        return seen if last is None else seen[:, -last:]


class Pairs(nn.Module):
    """Predicts a word from the one before it alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(SIZE, SIZE, generator=Generator().manual_seed(1), dtype=torch.float64)

    def forward(self, tokens: Tensor, targets: Tensor, last: int | None = None) -> Tensor:
        losses = F.cross_entropy(self.table[tokens].transpose(1, 2), targets, reduction="none")
        return losses if last is None else losses[:, -last:]


def brute_force(model: nn.Module, tokens: Tensor, context: int) -> Tensor:
    """The published protocol, one window and one target at a time."""
    found = []
    for target in range(1, len(tokens)):
        start = max(0, target - context)
        inputs, targets = tokens[None, start:target], tokens[None, start + 1 : target + 1]
        with torch.no_grad():
            found.append(model(inputs, targets=targets)[0, -1])
    return torch.stack(found).double()


@pytest.mark.parametrize("number", [2, 7, 8, 9, 10, 30, 61])
@pytest.mark.parametrize("batch_size", [1, 4, 100])
def test_stride_one_equals_a_brute_force_loop_exactly(number: int, batch_size: int) -> None:
    tokens = words(number)
    found = sliding_losses(Seen(), tokens, context=8, batch_size=batch_size)
    assert torch.equal(found, brute_force(Seen(), tokens, 8))


@pytest.mark.parametrize("method", [ra.Softmax(), ra.RKDE(loss=ra.Hampel(0.4)), ra.MoM(draw="poisson")])
def test_stride_one_equals_a_brute_force_loop_for_real_models(method: ra.Method) -> None:
    model = tiny(method).double()
    tokens = words(40)
    found = sliding_losses(model, tokens, context=16, batch_size=5)
    torch.testing.assert_close(found, brute_force(model, tokens, 16), rtol=0, atol=1e-12)


def tiny(method: ra.Method) -> LanguageModel:
    config = LMConfig(vocab_size=SIZE, context=16, dim=16, depth=2, num_heads=2, hidden=24, dropout=0.0)
    return LanguageModel(config, method).eval()


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("number", [5, 9, 22, 40, 41])
def test_every_target_counts_once_and_sees_what_was_promised(stride: int, number: int) -> None:
    lengths = sliding_losses(Length(), words(number), context=8, stride=stride, batch_size=3)
    assert len(lengths) == number - 1
    assert lengths[:8].tolist() == list(range(1, min(8, number - 1) + 1))
    assert (lengths[8:] >= 8 - stride + 1).all()
    assert (lengths <= 8).all()
    if stride == 1:
        assert (lengths[8:] == 8).all()


def test_strides_do_not_matter_to_a_model_that_sees_no_further() -> None:
    tokens = words(200)
    found = [sliding_losses(Pairs(), tokens, context=8, stride=stride) for stride in (1, 3, 8)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


class Sums:
    """Segments of a text in which every word follows from the two before it."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // 16

    def batch(self, indices: Tensor, seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
        rows = self.tokens[indices[:, None] * 16 + torch.arange(17)]
        return rows[:, :-1], rows[:, 1:]


def test_strides_differ_by_what_the_last_tokens_of_the_context_tell() -> None:
    """A trained model: what it uses lies at most two words back, so any stride gives nearly the same."""
    tokens = words(1200)
    for place in range(2, len(tokens)):
        if place % 5:
            tokens[place] = (tokens[place - 1] + tokens[place - 2]) % 10
    model = tiny(ra.Softmax())
    fit(
        model,
        Sums(tokens),
        lambda m, b: m(b[0], targets=b[1]).mean(),
        FitConfig(epochs=12, batch_size=16, learning_rate=1e-2),
    )
    losses = {stride: sliding_losses(model, tokens[:400], context=16, stride=stride) for stride in (1, 4, 8)}
    means = {stride: score(part).nats for stride, part in losses.items()}
    assert means[1] < 0.9 * math.log(SIZE)
    assert abs(means[4] - means[1]) < 0.03
    assert abs(means[8] - means[1]) < 0.05
    assert not torch.equal(losses[4], losses[1])


def test_draws_are_averaged_whatever_the_batches_are() -> None:
    model, tokens = tiny(ra.MoM(draw="poisson", blocks=3)).double(), words(50)

    def found(draws: int, batch_size: int = 4, seed: int = 0) -> Tensor:
        return sliding_losses(model, tokens, context=16, batch_size=batch_size, draws=draws, seed=seed)

    torch.testing.assert_close(found(3), found(3, batch_size=50), rtol=0, atol=1e-12)
    assert torch.equal(found(1), found(1, seed=9))  # the draw of the method's own seed
    assert not torch.equal(found(2), found(2, seed=9))
    assert not torch.equal(found(1), found(2))
    assert [method.seed for method in model.methods] == [0, 0]
    plain = tiny(ra.KDE())
    assert torch.equal(sliding_losses(plain, tokens, context=16), sliding_losses(plain, tokens, context=16, draws=5))


def test_scores_of_parts_add_up() -> None:
    losses = torch.rand(100, dtype=torch.float64)
    where = torch.arange(100) % 3 == 0
    whole, some, others = score(losses), score(losses, where), score(losses, ~where)
    assert (whole.n, some.n, others.n) == (100, 34, 66)
    assert whole.nats == pytest.approx(float(losses.mean()))
    assert whole.nats == pytest.approx((34 * some.nats + 66 * others.nats) / 100)
    assert whole.perplexity == pytest.approx(math.exp(whole.nats))
    assert score(losses + 800).perplexity == math.inf


def test_means_of_blocks_are_of_consecutive_targets() -> None:
    losses = torch.arange(10.0)
    assert block_means(losses, 5) == [0.5, 2.5, 4.5, 6.5, 8.5]
    assert block_means(losses, 3) == [1.5, 5.0, 8.0]
    assert block_means(losses, 50) == losses.tolist()


def test_losses_of_rows_are_those_of_their_next_tokens() -> None:
    rows = words(7, 12)
    model = tiny(ra.Softmax())
    found = row_losses(model, batch_size=3)(rows)
    with torch.no_grad():
        expected = torch.cat([model(row[None, :-1], targets=row[None, 1:]) for row in rows])
    torch.testing.assert_close(found, expected.double(), rtol=1e-5, atol=1e-6)


WRONG = [
    (lambda: sliding_losses(Pairs(), words(9), context=4, stride=5), "stride must be .* from 1 to 4, got 5"),
    (lambda: sliding_losses(Pairs(), words(1), context=4), r"tokens must be int64 \[N\] with at least two"),
    (lambda: sliding_losses(Pairs(), words(9), context=4, draws=0), "draws must be a whole number of at least 1"),
    (lambda: score(torch.zeros(3), torch.zeros(3).bool()), "losses must hold at least one target, got none"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_of_scores_fails_clearly(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
