"""The language model: nothing looks ahead, no large tensor is made, and generation goes on as the model says."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Generator, Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import robust_attention as ra
from robust_attention.models import _next_word
from robust_attention.models._next_word import next_word_losses
from robust_attention.models.generate import generate
from robust_attention.models.lm import LanguageModel, LMConfig, lm_medium, lm_small, next_word_loss
from robust_attention.nn.draws import set_draws
from robust_attention.recipes.han2023_language import ROWS, VARIANTS, generated_smoke

BASE = generated_smoke(0)
EVERY = {name: recipe for name, (_, recipe) in (ROWS | VARIANTS).items()}
every_row = pytest.mark.parametrize("row", EVERY)


def tiny(row: str = "transformer", **sizes: Any) -> LanguageModel:
    config = LMConfig(**{"vocab_size": 50, "context": 64, "dim": 16, "depth": 2, "num_heads": 4, "hidden": 24,
                         "dropout": 0.0, **sizes})  # fmt: skip
    made = EVERY[row](replace(BASE, model=config))
    return LanguageModel(made.model, made.method)


def words(*shape: int, size: int = 50, seed: int = 0) -> Tensor:
    return torch.randint(size, shape, generator=Generator().manual_seed(seed))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("row", [row for row in EVERY if row != "spkde-last"])  # its attentions are two other rows'
def test_gradient_from_future_tokens_is_exactly_zero(row: str, mode: str) -> None:
    """64 × 64 pairs: of each output, with respect to each token."""
    length = 64
    model = tiny(row, num_heads=2, depth=1 if row == "spkde" else 2).train(mode == "train")
    set_draws(model, 7)
    embedded = model.embedded(words(1, length)).detach().requires_grad_()
    out = model.hidden(embedded)[0] @ torch.randn(16, generator=Generator().manual_seed(1))
    rows = [torch.autograd.grad(one, embedded, retain_graph=True)[0][0] for one in out]
    size = torch.stack(rows).abs().amax(-1)
    assert size.shape == (length, length)
    assert torch.equal(size, size.tril())
    assert (size.diagonal() > 0).all()
    assert (size[-1] > 0).float().mean() > 0.3  # MoM leaves keys out, but the past is seen


@pytest.mark.parametrize("mode", ["train", "eval"])
@every_row
def test_future_tokens_change_no_output(row: str, mode: str) -> None:
    """Not even through weights or the choice of a block, which have no gradient everywhere."""
    model = tiny(row, num_heads=2).train(mode == "train")
    tokens, cut = words(1, 64), 41
    other = torch.cat((tokens[:, :cut], words(1, 64 - cut, seed=5)), dim=1)
    with torch.no_grad():
        set_draws(model, 7)
        before = model(tokens)
        set_draws(model, 7)
        after = model(other)
        set_draws(model, 7)
        alone = model(tokens[:, :cut])
    torch.testing.assert_close(after[:, :cut], before[:, :cut], rtol=0, atol=0)
    assert not torch.equal(after[:, cut:], before[:, cut:])
    # Not even the length of what follows: a prefix alone gives the same.
    torch.testing.assert_close(alone, before[:, :cut], rtol=1e-4, atol=1e-5)


def test_rows_of_one_configuration_start_from_equal_weights() -> None:
    models = {row: tiny(row) for row in EVERY}
    for model in models.values():
        model.init_weights(Generator().manual_seed(3))
    plain = dict(models["transformer"].named_parameters())
    for row, model in models.items():
        shared = {name: p for name, p in model.named_parameters() if ".attend." not in name}
        assert shared.keys() == plain.keys()
        assert all(torch.equal(p, plain[name]) for name, p in shared.items()), row
    before = torch.get_rng_state()
    tiny("performer")
    assert torch.equal(torch.get_rng_state(), before)
    assert models["mgk"].attentions[0].num_heads == 2


def test_sizes_are_the_papers() -> None:
    small, medium = lm_small(), lm_medium()
    assert (small.depth, small.dim, small.num_heads, small.hidden, small.context) == (16, 128, 8, 2048, 256)
    assert (medium.depth, medium.dim, medium.num_heads, medium.hidden, medium.context) == (16, 256, 8, 2048, 384)
    body = sum(p.numel() for p in LanguageModel(lm_small(vocab_size=1), ra.Softmax()).parameters())
    assert 9.4e6 < body < 9.6e6


def test_first_loss_is_near_that_of_guessing_and_the_stream_keeps_its_size() -> None:
    model = tiny(vocab_size=500, depth=12, dim=64)
    model.init_weights(Generator().manual_seed(0))
    tokens = words(4, 65, size=500)
    with torch.no_grad():
        first = x = model.embedded(tokens[:, :-1])
        for block in model.blocks:
            x = block(x)
        assert 0.9 < float(x.std() / first.std()) < 1.5
        loss = next_word_loss(model, (tokens[:, :-1], tokens[:, 1:]))
    assert math.log(500) < float(loss) < math.log(500) + 1


@pytest.mark.parametrize("most", [2**27, 90])
def test_chunked_loss_equals_cross_entropy_with_its_gradients(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_next_word, "_MOST_LOGITS", most)
    g = Generator().manual_seed(0)
    inputs = [torch.randn(*shape, generator=g, dtype=torch.float64) for shape in ((11, 6), (30, 6), (30,))]
    targets, outer = words(11, size=30), torch.rand(11, generator=g, dtype=torch.float64)
    ours, theirs = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    losses = next_word_losses(*ours, targets)
    (losses * outer).sum().backward()
    expected = F.cross_entropy(F.linear(*theirs), targets, reduction="none")
    (expected * outer).sum().backward()
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-13)
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(lambda *x: next_word_losses(*x, targets), ours)


class Largest(TorchDispatchMode):
    """The most numbers that any tensor made meanwhile held, and how many all of them held together."""

    numbers = 0
    total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, list | tuple) else [out]:
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.numel())
                self.total += x.numel()
        return out


def test_training_with_many_words_never_makes_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_next_word, "_MOST_LOGITS", 2**15)
    size = 3000
    model = tiny(vocab_size=size, dim=8)
    tokens = words(32, 17, size=size)
    with Largest() as seen:
        next_word_loss(model, (tokens[:, :-1], tokens[:, 1:])).backward()
    assert seen.numbers <= 2**15
    with Largest() as seen, torch.no_grad():
        model(tokens[:, :-1])
    assert seen.numbers == 32 * 16 * size  # what the loss avoids


@pytest.mark.parametrize(("row", "most"), [("performer", 1.1), ("fourierformer", None)])
def test_cost_of_performer_is_linear_in_the_context(row: str, most: float | None) -> None:
    """The numbers written by one block's attention, which time follows: exponent from 128 to 512 tokens."""
    made = []
    for length in (128, 512):
        attention = tiny(row, depth=1, context=length, hidden=1, dim=8, num_heads=1).attentions[0]
        x = torch.randn(1, length, 8, generator=Generator().manual_seed(0))
        with Largest() as seen, torch.no_grad():
            attention(x, is_causal=True)
        made.append(seen.total)
    exponent = math.log(made[1] / made[0]) / math.log(4)
    assert exponent <= most if most else exponent > 1.4  # the count tells them apart


def test_loss_under_autocast_is_close_and_its_gradients_are_wide() -> None:
    model = tiny(vocab_size=200)
    tokens = words(2, 65, size=200)
    batch = (tokens[:, :-1], tokens[:, 1:])
    exact = next_word_loss(model, batch)
    with torch.autocast("cpu", torch.bfloat16):
        losses = model(batch[0], targets=batch[1])
    assert losses.dtype == torch.float32
    losses.mean().backward()
    assert float(losses.detach().mean()) == pytest.approx(float(exact.detach()), abs=0.02)
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad.dtype == torch.float32


def test_losses_are_those_of_the_logits_and_last_cuts() -> None:
    model = tiny().double()
    tokens = words(2, 31)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    with torch.no_grad():
        expected = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none").view(2, 30)
        torch.testing.assert_close(model(inputs, targets=targets), expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(model(inputs, targets=targets, last=4), expected[:, -4:], rtol=0, atol=1e-12)
        assert model(inputs, last=1).shape == (2, 1, 50)


def test_projections_are_what_the_attention_sees() -> None:
    model = tiny("rkde-huber")
    tokens = words(2, 9)
    with torch.no_grad():
        seen = model.projections(tokens)
        block = model.blocks[0]
        x = model.embedded(tokens)
        out = block.attn.attend(*seen[0], is_causal=True).transpose(1, 2).flatten(2)
        torch.testing.assert_close(block.attn.proj(out), block.attn(block.norm1(x), is_causal=True))
    assert [tuple(part.shape) for part in seen[1]] == [(2, 4, 9, 4)] * 3
    assert not model.blocks[0].attn.attend._forward_pre_hooks


@pytest.mark.parametrize("row", ["transformer", "rkde-hampel", "spkde", "mom", "fourierformer-mom", "performer", "mgk"])
def test_generation_with_caches_equals_generation_without(row: str) -> None:
    model = tiny(row, context=12).double()
    prompt = words(2, 5)
    made = {
        cached: generate(model, prompt, 20, cached=cached, generator=Generator().manual_seed(1))
        for cached in (True, False)
    }
    assert made[True].shape == (2, 25)
    assert torch.equal(made[True][:, :5], prompt)
    assert torch.equal(made[True], made[False])


def test_generation_draws_as_it_is_told() -> None:
    model = tiny()
    prompt = words(1, 3)
    greedy = generate(model, prompt, 12, temperature=0)
    cold = generate(model, prompt, 12, temperature=1e-45, generator=torch.Generator().manual_seed(0))
    assert torch.equal(cold, greedy)
    with torch.no_grad():
        for place in range(3, 15):
            assert int(model(greedy[:, :place])[0, -1].argmax()) == int(greedy[0, place])
    assert torch.equal(greedy, generate(model, prompt, 12, top_k=1, generator=Generator().manual_seed(5)))
    one, same, other = (generate(model, prompt, 12, generator=Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    banned = tuple(range(1, 50))
    assert (generate(model, prompt, 4, generator=Generator().manual_seed(1), banned=banned)[:, 3:] == 0).all()
    generate(model.train(), prompt, 1, temperature=0)
    assert model.training


def test_a_long_prompt_is_cut_to_the_context() -> None:
    model = tiny(context=8)
    prompt = words(1, 30)
    made = generate(model, prompt, 1, temperature=0)
    assert torch.equal(made, torch.cat((prompt, generate(model, prompt[:, -8:], 1, temperature=0)[:, -1:]), dim=1))


@pytest.mark.parametrize("row", ["mom-partition"])
def test_draws_that_need_the_whole_context_are_not_decoded(row: str) -> None:
    model = tiny(row)
    with pytest.raises(ValueError, match='decoding needs draw="poisson" in every block'):
        model.decode(words(1, 3))
    assert generate(model, words(1, 3), 2, temperature=0).shape == (1, 5)


WRONG = [
    (lambda: LMConfig(dim=12, num_heads=8), "dim must be even and divisible by num_heads = 8, got 12"),
    (lambda: LMConfig(depth=0), "depth must be a whole number of at least 1, got 0"),
    (lambda: LMConfig(dropout=1.0), "dropout must lie from 0 to below 1, got 1.0"),
    (lambda: LanguageModel(LMConfig(depth=2), [ra.KDE()] * 3), "one for each of the 2 blocks, got 3"),
    (lambda: tiny()(words(1, 65)), r"T from 1 to the context of 64, got torch.int64 \[1, 65\]"),
    (lambda: tiny()(words(1, 5).float()), r"tokens must be int64 \[B, T\]"),
    (lambda: tiny()(words(1, 5) + 46), "tokens must lie from 0 to vocab_size - 1 = 49, got"),
    (lambda: tiny()(words(1, 5), targets=words(1, 4)), r"targets must be one for each token, \[1, 5\], got \[1, 4\]"),
    (lambda: generate(tiny(), words(1, 0), 3), r"prompt must be int64 \[B, T\] with at least one token"),
    (lambda: generate(tiny(), words(1, 3) - 50, 3), "tokens must lie from 0"),
    (lambda: generate(tiny(), words(1, 3), 3), "generator must be given to draw tokens, got None"),
    (lambda: generate(tiny(), words(1, 3), 0, temperature=0), "number must be a whole number of at least 1"),
    (lambda: generate(tiny(), words(1, 3), 1, temperature=-1.0), "temperature must be a finite number above 0"),
]


@pytest.mark.parametrize(("call", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_of_language_models_fails_clearly(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
