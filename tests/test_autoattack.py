"""AutoAttack: it is the original, it is told what it needs, and it leaves no trace."""

import importlib
import random
import sys
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from toys import taught

from robust_attention.attacks.auto import AutoAttacked, autoattack
from robust_attention.attacks.pgd import pgd

original = pytest.mark.skipif(find_spec("pyautoattack") is None, reason="the original code, pyautoattack, is missing")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def problem(classes: int = 10, channels: int = 1) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A smooth model that has learnt noisy patterns, and 40 images that it has not seen."""
    patterns, labels = torch.rand(classes, channels, 4, 4, generator=seeded(7)), torch.arange(440) % classes
    images = (patterns[labels] + 0.25 * torch.randn(440, channels, 4, 4, generator=seeded(8))).clamp(0, 1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(channels * 16, 32), nn.Tanh(), nn.Linear(32, classes))
    taught(model, images[:400], labels[:400], std=0.2, rate=0.02, steps=60)
    return model, images[400:], labels[400:]


def run(model: Any, images: Tensor, labels: Tensor, **settings: Any) -> AutoAttacked:
    return autoattack(model, images, labels, **{"eps": 0.1, "seed": 5, "queries": 30, **settings})


def right(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images).argmax(dim=1) == labels


@original
def test_autoattack_is_the_original() -> None:
    model, images, labels = (part if isinstance(part, nn.Module) else part[:12] for part in problem())
    suite = importlib.import_module("pyautoattack").AutoAttack(model, eps=0.15, seed=5, version="standard")
    suite.square.n_queries = 30
    with torch.random.fork_rng():
        wanted, answers = suite.run_standard_evaluation(images, labels)
    found = run(model, images, labels, eps=0.15)
    assert found.attacks == ("apgd-ce", "apgd-t", "fab-t", "square")
    assert torch.equal(found.broken_by == -1, answers == labels)
    assert torch.equal(found.broken_by == -1, right(model, found.images, labels))
    fell = found.broken_by >= 0
    torch.testing.assert_close(found.images[fell], wanted[fell], rtol=0, atol=1e-6)
    assert torch.equal(found.images[~fell], images[~fell])
    # Some fall, some stand, and some were wrong before.
    assert fell.any()
    assert (found.broken_by == -1).any()


@original
def test_autoattack_is_at_least_as_strong_as_pgd() -> None:
    model, images, labels = problem()
    by_pgd = right(model, pgd(model, images, labels, eps=0.15, generator=seeded()), labels)
    found = run(model, images, labels, eps=0.15, attacks=("apgd-ce", "apgd-t"))
    assert (found.broken_by == -1).sum() <= by_pgd.sum()
    assert (found.images - images).abs().max() <= 0.15 + 1e-6
    assert found.images.min() >= 0
    assert found.images.max() <= 1


@original
def test_autoattack_says_what_was_wrong_before_and_who_broke_the_rest() -> None:
    model, images, labels = problem()
    labels = labels.clone()
    labels[:7] = (labels[:7] + 1) % 10
    found = run(model, images, labels, attacks=("square", "apgd-ce"), eps=0.2)
    assert (found.broken_by[:7] == -2).all()
    assert set(found.broken_by[7:].tolist()) >= {0, 1}  # few queries: the other one has something left to do
    only = run(model, images, labels, attacks=("square",), eps=0.2)
    assert torch.equal(only.broken_by == 0, found.broken_by == 0)
    assert only.attacks == ("square",)


@original
@pytest.mark.parametrize("classes", [2, 3, 4, 10])
def test_autoattack_makes_do_with_few_classes(classes: int) -> None:
    model, images, labels = problem(classes)
    found = run(model, images, labels, eps=1.0)
    second = {2: (), 3: ("apgd-dlr",)}.get(classes, ("apgd-t",))
    assert found.attacks == ("apgd-ce", *second, "fab-t", "square")
    assert (found.broken_by != -1).all()
    # Where nothing falls, every class is aimed at: there must not be more of them than there are.
    untouched = run(model, images[:2], labels[:2], eps=1e-4, attacks=found.attacks)
    assert (untouched.broken_by < 0).all()
    by_fab = run(model, images, labels, eps=1.0, attacks=("fab-t",))
    assert (by_fab.broken_by != -1).float().mean() > 0.8


@original
@pytest.mark.parametrize("attack", ["apgd-ce", "square", "fab-t"])
def test_autoattack_without_clipping_is_the_same_attack_on_stretched_images(attack: Any) -> None:
    # Images far from 0 and 1 are clipped nowhere, so that stretching must change nothing but rounding.
    model, images, labels = problem()
    images, labels = 0.3 + 0.4 * images[:15], labels[:15]
    clipped = run(model, images, labels, attacks=(attack,), queries=200)
    free = run(model, images, labels, attacks=(attack,), queries=200, clip=False)
    assert (clipped.broken_by >= 0).any()
    assert (clipped.broken_by != free.broken_by).sum() <= 1


@original
def test_autoattack_without_clipping_takes_a_radius_a_channel() -> None:
    model, images, labels = problem(channels=3)
    radius = torch.tensor([0.05, 0.3, 0.001])
    found = run(model, images, labels, eps=radius, attacks=("apgd-ce",), clip=False)
    distance = (found.images - images).abs().amax((0, 2, 3))
    assert (found.broken_by >= 0).any()
    torch.testing.assert_close(distance, radius, rtol=0, atol=1e-4)
    assert found.images.min() < 0


@original
def test_autoattack_leaves_no_trace_and_depends_on_its_seed_alone() -> None:
    model, images, labels = (part if isinstance(part, nn.Module) else part[:10] for part in problem())
    before, state, python = images.clone(), torch.get_rng_state(), random.getstate()

    def tracer(*_: Any) -> None:
        return None

    old = sys.gettrace()
    sys.settrace(tracer)
    try:
        found = run(model, images, labels, attacks=("fab-t", "apgd-ce"))
        assert sys.gettrace() is tracer
    finally:
        sys.settrace(old)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert torch.equal(images, before)
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    torch.manual_seed(99)
    again = run(model, images, labels, attacks=("fab-t", "apgd-ce"))
    torch.set_rng_state(state)
    assert torch.equal(again.images, found.images)
    guess = partial(run, model, images, labels, eps=0.3, attacks=("square",))
    assert not torch.equal(guess(seed=6).images, guess().images)


@original
def test_autoattack_of_a_random_model_averages_over_draws() -> None:
    model, images, labels = problem()
    calls = [0]

    def shaken(x: Tensor) -> Tensor:
        calls[0] += 1
        return model(x) + 0.3 * torch.randn(len(x), 10)

    counts = []
    for eot in (1, 3):
        calls[0] = 0
        found = run(shaken, images[:4], labels[:4], random=True, eot=eot, eps=0.001)
        counts.append(calls[0])
    assert found.attacks == ("apgd-ce", "apgd-dlr")
    assert counts[1] > 2 * counts[0]


@original
def test_autoattack_passes_on_what_the_original_suspects(caplog: pytest.LogCaptureFixture) -> None:
    model, images, labels = problem()
    assert run(model, images, labels, attacks=("apgd-ce",)).flags == ()
    hidden = run(lambda x: model((x * 8).round() / 8 + 0 * x), images, labels, attacks=("apgd-dlr",))
    assert hidden.flags == ("zero gradient",)
    shaken = run(lambda x: model(x + 0.1 * torch.randn_like(x)), images, labels, attacks=("apgd-ce",))
    assert shaken.flags == ("randomised",)
    probable = run(lambda x: model(x).softmax(1), images, labels, attacks=("apgd-ce",))
    assert probable.flags == ("probabilities, not logits",)
    assert caplog.records == []  # and logs nothing


@original
def test_square_asks_as_often_as_it_is_told() -> None:
    model, images, labels = problem()
    calls = [0]

    def counted(x: Tensor) -> Tensor:
        calls[0] += 1
        return model(x)

    asked = []
    for queries in (20, 60):
        calls[0] = 0
        run(counted, images, labels, eps=1e-4, attacks=("square",), queries=queries)
        asked.append(calls[0])
    assert asked[1] - asked[0] == 40


@original
def test_autoattack_on_no_images_gives_none() -> None:
    model, images, labels = problem()
    assert run(model, images[:0], labels[:0]).images.shape == (0, 1, 4, 4)


def test_autoattack_without_the_original_fails_clearly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model, images, labels = problem()
    with pytest.raises(ImportError, match=r"pyautoattack is not installed; pip install .*\[autoattack\]'"):
        run(model, images, labels)


@original
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"attacks": ("apgd",)}, r"attacks must be one of 'apgd-ce', .*, got 'apgd'"),
        ({"attacks": ()}, r"attacks must name at least one, got none"),
        ({"attacks": ("apgd-t",), "classes": 3}, r"apgd-t must have at least 4 classes, got 3; leave it out"),
        ({"eps": torch.tensor([0.1, 0.2, 0.1]), "channels": 3}, r"eps must be one number where results are clipped"),
        ({"eps": torch.tensor([0.1, 0.2, 0.0]), "channels": 3, "clip": False}, r"eps must be above 0 in every channel"),
        ({"eps": -0.1}, r"eps must be at least 0, got -0.1"),
    ],
)
def test_autoattack_fails_clearly(settings: dict[str, Any], message: str) -> None:
    settings = dict(settings)
    model, images, labels = problem(settings.pop("classes", 10), settings.pop("channels", 1))
    with pytest.raises(ValueError, match=message):
        run(model, images, labels, **settings)
