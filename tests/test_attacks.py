"""Attacks: they climb, they stay where they must, and they leave no trace."""

import importlib
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F
from toys import taught

from robust_attention.attacks._gradient import Logits, Loss, loss_gradient, losses
from robust_attention.attacks.fgsm import fgsm
from robust_attention.attacks.pgd import pgd
from robust_attention.attacks.random_search import random_search

Attack = Callable[..., Tensor]
LOSSES: tuple[Loss, ...] = ("ce", "margin")


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def run_pgd(logits: Logits, images: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return pgd(logits, images, labels, **{"generator": seeded(), **settings})


both = pytest.mark.parametrize("attack", [fgsm, run_pgd], ids=["fgsm", "pgd"])


def images_of(number: int = 8) -> Tensor:
    """Some pixels are so near to 0 and 1 that the ball leaves the range."""
    return torch.rand(number, 1, 4, 4, generator=seeded(1)).mul(1.2).sub(0.1).clamp(0, 1)


LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def mlp() -> nn.Sequential:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.7, generator=seeded(2))
    return model


def loss_of(model: Logits, images: Tensor, labels: Tensor = LABELS) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(model(images), labels, reduction="none")


class Visits:
    """A model that remembers where it was asked."""

    def __init__(self, model: Logits) -> None:
        self.model = model
        self.images: list[Tensor] = []

    def __call__(self, images: Tensor) -> Tensor:
        self.images.append(images.detach().clone())
        return self.model(images)


@both
@pytest.mark.parametrize("eps", [0.02, 0.3])
def test_attack_reaches_the_optimum_of_a_linear_model(attack: Attack, eps: float) -> None:
    # Two classes: the loss is a rising function of (w_other - w_label)·x, so the optimum is a corner of the ball.
    images, labels = images_of(), torch.arange(8) % 2
    weight = torch.randn(2, 16, generator=seeded(3))
    towards = (weight[1 - labels] - weight[labels]).sign().reshape(images.shape)
    found = attack(lambda x: x.flatten(1) @ weight.T, images, labels, eps=eps)
    torch.testing.assert_close(found, (images + eps * towards).clamp(0, 1), rtol=0, atol=1e-6)


@both
@pytest.mark.parametrize("eps", [0.0, 0.01, 0.5, 3.0])
def test_attack_stays_in_the_ball_and_in_the_range(attack: Attack, eps: float) -> None:
    images = images_of()
    found = attack(mlp(), images, LABELS, eps=eps)
    assert found.shape == images.shape
    assert found.dtype == images.dtype
    assert found.min() >= 0
    assert found.max() <= 1
    distance = (found - images).abs().amax((1, 2, 3))
    assert (distance <= eps + 1e-7).all()
    assert (distance >= min(eps, 0.3) / 2).all()  # and it goes somewhere


@both
def test_attack_raises_the_loss_of_the_true_label(attack: Attack) -> None:
    images, model = images_of(), mlp()
    assert (loss_of(model, attack(model, images, LABELS, eps=0.02)) > loss_of(model, images)).all()


def test_pgd_is_at_least_as_strong_as_fgsm() -> None:
    images, model = images_of(), mlp()
    once = loss_of(model, fgsm(model, images, LABELS, eps=0.3))
    often = loss_of(model, run_pgd(model, images, LABELS, eps=0.3))
    assert (often >= once - 1e-5).all()
    assert often.mean() > 1.05 * once.mean()


@pytest.mark.parametrize("step_size", [None, 0.8])
def test_pgd_returns_the_best_of_the_points_it_visited(step_size: float | None) -> None:
    visits = Visits(mlp())
    found = run_pgd(visits, images_of(), LABELS, eps=0.5, steps=7, step_size=step_size)
    assert len(visits.images) == 8
    losses = torch.stack([loss_of(visits.model, at) for at in visits.images])
    best = losses.argmax(dim=0)
    assert torch.equal(found, torch.stack(visits.images)[best, torch.arange(8)])
    if step_size is not None:
        assert (best < 7).any()  # steps this long overshoot: the last point is not always the best


def test_pgd_starts_anywhere_in_the_ball_and_steps_as_the_paper_does() -> None:
    images, labels = torch.full((50, 1, 8, 8), 0.5), torch.arange(50) % 3
    weight = torch.randn(3, 64, generator=seeded(3))
    visits = Visits(lambda x: x.flatten(1) @ weight.T)
    run_pgd(visits, images, labels, eps=0.1, steps=3)
    start = ((visits.images[0] - images) / 0.1).flatten().sort().values
    assert (start - torch.linspace(-1, 1, 3200)).abs().max() < 0.1  # uniform: quantiles lie on a line
    for before, after in pairwise(visits.images):
        step = (after - before).abs()
        assert step.max() <= 0.015 + 1e-6
        assert step.median() > 0.015 - 1e-6


class Random:
    """Logits of an image that is shaken afresh at every call."""

    def __init__(self) -> None:
        self.model, self.generator = mlp(), seeded(4)

    def __call__(self, images: Tensor) -> Tensor:
        return self.model(images + 0.5 * torch.randn(images.shape, generator=self.generator))


@pytest.mark.parametrize("samples", [1, 6])
def test_gradient_of_a_random_model_is_the_mean_over_its_draws(samples: int) -> None:
    images, model = images_of(), Random()
    losses, gradients = [], []
    for _ in range(samples):
        leaf = images.clone().requires_grad_()
        loss = F.cross_entropy(model(leaf), LABELS, reduction="none")
        losses.append(loss.detach())
        gradients.append(torch.autograd.grad(loss.sum(), leaf)[0])
    loss, gradient = loss_gradient(Random(), images, LABELS, samples)
    torch.testing.assert_close(loss, torch.stack(losses).mean(0))
    torch.testing.assert_close(gradient, torch.stack(gradients).mean(0))


@both
def test_attack_on_a_random_model_asks_samples_times_a_step(attack: Attack) -> None:
    visits = Visits(Random())
    steps = {} if attack is fgsm else {"steps": 4}
    attack(visits, images_of(), LABELS, eps=0.1, samples=6, **steps)
    assert len(visits.images) == 6 * (1 if attack is fgsm else 5)
    for number, at in enumerate(visits.images):
        assert torch.equal(at, visits.images[number - number % 6])


def test_loss_keeps_the_precision_of_the_images() -> None:
    images, model = images_of().double(), mlp().double()
    loss, gradient = loss_gradient(model, images, LABELS, 1)
    assert gradient.dtype == torch.float64
    torch.testing.assert_close(loss, loss_of(model, images), rtol=1e-12, atol=1e-15)


@both
def test_attack_works_where_gradients_are_off(attack: Attack) -> None:
    wanted = attack(mlp(), images_of(), LABELS, eps=0.1)
    with torch.no_grad():
        assert torch.equal(attack(mlp(), images_of(), LABELS, eps=0.1), wanted)


@both
def test_attack_leaves_no_trace(attack: Attack) -> None:
    images, model = images_of(), mlp()
    before = images.clone()
    found = attack(model, images, LABELS, eps=0.1)
    assert torch.equal(images, before)
    assert not images.requires_grad
    assert not found.requires_grad
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    leaf = images.clone().requires_grad_()
    again = attack(model, leaf, LABELS, eps=0.1)
    assert torch.equal(again, found)
    assert not again.requires_grad
    assert leaf.grad is None


@both
def test_attack_leaves_the_global_random_state_alone(attack: Attack) -> None:
    model = mlp()
    before = torch.get_rng_state()
    found = attack(model, images_of(), LABELS, eps=0.1)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(123)
    assert torch.equal(attack(model, images_of(), LABELS, eps=0.1), found)


def test_pgd_depends_on_its_generator_alone() -> None:
    few = partial(pgd, mlp(), images_of(), LABELS, eps=0.1, steps=2)
    assert torch.equal(few(generator=seeded(5)), few(generator=seeded(5)))
    assert not torch.equal(few(generator=seeded(5)), few(generator=seeded(6)))


@both
def test_attack_on_no_images_gives_none(attack: Attack) -> None:
    assert attack(mlp(), images_of()[:0], LABELS[:0], eps=0.1).shape == (0, 1, 4, 4)


def trained(classes: int = 4, channels: int = 1) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A smooth model that has learnt noisy patterns, and 200 images that it has not seen."""
    patterns = torch.rand(classes, channels, 4, 4, generator=seeded(7))
    labels = torch.arange(600) % classes
    noise = torch.randn(600, channels, 4, 4, generator=seeded(8))
    images = (patterns[labels] + 0.35 * noise).clamp(0, 1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(channels * 16, 32), nn.Tanh(), nn.Linear(32, classes))
    taught(model, images[:400], labels[:400], std=0.2, rate=0.02, steps=60)
    return model, images[400:], labels[400:]


def accuracy(model: Logits, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


def library() -> Any:
    """foolbox, or a skip; what it imports from SciPy is deprecated, and says so."""
    if find_spec("foolbox") is None:
        pytest.skip("the oracle of this test, foolbox, is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module("foolbox")


@pytest.mark.parametrize("eps", [0.02, 0.1])
def test_attack_equals_a_library(eps: float) -> None:
    foolbox = library()
    model, images, labels = trained()
    wrapped = foolbox.PyTorchModel(model, bounds=(0, 1), device="cpu")

    class SameStart(foolbox.attacks.LinfPGD):  # type: ignore[misc]
        def get_random_start(self, x0: Any, epsilon: float) -> Any:
            noise = torch.rand(images.shape, generator=seeded()) * 2 - 1
            return type(x0)(x0.raw + epsilon * noise)

    attacks = {
        "fgsm": (foolbox.attacks.LinfFastGradientAttack(), fgsm(model, images, labels, eps=eps)),
        "pgd": (
            SameStart(abs_stepsize=0.15 * eps, steps=20, random_start=True),
            run_pgd(model, images, labels, eps=eps, keep="last"),
        ),
    }
    for oracle, found in attacks.values():
        wanted, _, fooled = oracle(wrapped, images, labels, epsilons=eps)
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
        assert accuracy(model, found, labels) == (~fooled).float().mean().item()
        assert accuracy(model, found, labels) < accuracy(model, images, labels)


@both
@pytest.mark.parametrize("eps", [0.05, 0.2, 0.4])
@pytest.mark.parametrize("loss", LOSSES)
def test_attack_leaves_a_linear_model_its_closed_form(attack: Attack, eps: float, loss: str) -> None:
    # Far enough from 0 and 1 that nothing is clipped: the margin falls by eps times the 1-norm of the weights.
    images = torch.rand(300, 1, 4, 4, generator=seeded(1)) * 0.1 + 0.45
    weight, labels = torch.randn(2, 16, generator=seeded(3)) * 0.3, torch.arange(300) % 2
    towards = weight[1] - weight[0]
    sign = 2.0 * labels - 1
    images = images + (0.25 * sign[:, None] * towards.sign() * torch.rand(300, 16, generator=seeded(5))).reshape_as(
        images
    )
    images = images.clamp(0.4, 0.6)
    margin = sign * (images.flatten(1) @ towards - 0.5 * towards.sum())
    wanted = (margin - eps * towards.abs().sum() > 0).float().mean().item()
    model: Logits = lambda x: (x - 0.5).flatten(1) @ weight.T  # noqa: E731
    found = attack(model, images, labels, eps=eps, loss=loss)
    assert accuracy(model, found, labels) == wanted


def test_pgd_at_eps_one_leaves_nothing() -> None:
    model, images, labels = trained()
    assert accuracy(model, images, labels) > 0.9
    assert accuracy(model, run_pgd(model, images, labels, eps=1.0), labels) <= 0.01


def test_fgsm_raises_the_margin_where_asked() -> None:
    model, images, labels = trained()
    by_loss = {loss: fgsm(model, images, labels, eps=0.05, loss=loss) for loss in LOSSES}
    margin = {loss: losses(model(found).detach(), labels, "margin").mean() for loss, found in by_loss.items()}
    assert margin["margin"] > margin["ce"]


def test_pgd_keeps_the_largest_margin_where_asked() -> None:
    visits = Visits(mlp())
    found = run_pgd(visits, images_of(), LABELS, eps=0.5, steps=7, step_size=0.8, loss="margin")
    margin = torch.stack([losses(visits.model(at).detach(), LABELS, "margin") for at in visits.images])
    assert torch.equal(found, torch.stack(visits.images)[margin.argmax(dim=0), torch.arange(8)])
    assert (margin.argmax(dim=0) < 7).any()


def test_losses_equal_their_definitions() -> None:
    logits = torch.randn(50, 5, generator=seeded(), dtype=torch.float64) * 5
    labels = torch.arange(50) % 5
    torch.testing.assert_close(losses(logits, labels, "ce"), F.cross_entropy(logits, labels, reduction="none"))
    margin = [max(z[j] for j in range(5) if j != y) - z[y] for z, y in zip(logits, labels, strict=True)]
    torch.testing.assert_close(losses(logits, labels, "margin"), torch.stack(margin))


def test_gradient_of_a_confident_model_keeps_the_label() -> None:
    # In float32 the probability of the label is exactly 1 here, and its distance from 1 exactly 0.
    logits = torch.tensor([[40.0, 0.0, 1.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(losses(logits, torch.tensor([0]), "ce").sum(), logits)
    assert gradient[0, 0] < 0
    torch.testing.assert_close(gradient.sum(), torch.zeros(()), rtol=0, atol=1e-23)


def test_more_restarts_are_at_least_as_strong() -> None:
    model, images = mlp(), images_of()
    one, four = (run_pgd(model, images, LABELS, eps=0.5, steps=3, restarts=number) for number in (1, 4))
    assert (loss_of(model, four) >= loss_of(model, one)).all()
    assert (loss_of(model, four) > loss_of(model, one)).any()


def test_pgd_keeps_the_last_point_if_asked() -> None:
    visits = Visits(mlp())
    found = run_pgd(visits, images_of(), LABELS, eps=0.5, steps=7, step_size=0.8, keep="last")
    assert torch.equal(found, visits.images[-1])


@both
def test_radius_may_differ_by_channel(attack: Attack) -> None:
    model, images, labels = trained(channels=3)
    radius = torch.tensor([0.0, 0.01, 0.1])
    found = attack(model, images, labels, eps=radius)
    distance = (found - images).abs().amax((0, 2, 3))
    torch.testing.assert_close(distance, radius)
    same = attack(model, images, labels, eps=torch.full((3,), 0.1))
    assert torch.equal(same, attack(model, images, labels, eps=0.1))


@both
def test_attack_without_clipping_leaves_the_range_but_not_the_ball(attack: Attack) -> None:
    images = images_of()
    found = attack(mlp(), images, LABELS, eps=0.1, clip=False)
    assert found.min() < 0
    assert found.max() > 1
    assert (found - images).abs().max() <= 0.1 + 1e-6


def test_start_of_an_image_does_not_depend_on_its_batch() -> None:
    model, images = mlp(), images_of()

    def attacked(places: list[int]) -> Tensor:
        starts = [seeded(100 + place) for place in places]
        return pgd(model, images[places], LABELS[places], eps=0.1, steps=2, generator=starts)

    torch.testing.assert_close(attacked([0, 1, 2, 3])[2:], attacked([2, 3]), rtol=0, atol=1e-6)
    assert not torch.equal(attacked([0, 1])[0], attacked([1, 0])[0])


@both
@pytest.mark.parametrize("cut", ["everything", "the images"])
def test_attack_on_a_model_without_gradient_fails_clearly(attack: Attack, cut: str) -> None:
    model = mlp()
    model.requires_grad_(cut == "the images")
    with pytest.raises(ValueError, match=r"logits must depend on the images by a differentiable path, got none"):
        attack(lambda x: model(x.detach()), images_of(), LABELS, eps=0.1)


def test_random_search_returns_the_worst_point_it_visited() -> None:
    visits = Visits(mlp())
    found = random_search(visits, images_of(), LABELS, eps=0.3, generator=seeded(), tries=9)
    margin = torch.stack([losses(visits.model(at).detach(), LABELS, "margin") for at in visits.images])
    assert len(visits.images) == 9
    assert (margin.argmax(dim=0) < 8).any()
    assert torch.equal(found, torch.stack(visits.images)[margin.argmax(dim=0), torch.arange(8)])


@pytest.mark.parametrize("seed", range(3))
def test_random_search_finds_less_than_pgd_and_more_than_nothing(seed: int) -> None:
    model, images, labels = trained()
    before = torch.get_rng_state()
    found = random_search(model, images, labels, eps=0.2, generator=seeded(seed), tries=30)
    assert torch.equal(torch.get_rng_state(), before)
    assert (found - images).abs().max() <= 0.2 + 1e-6
    assert found.min() >= 0
    assert found.max() <= 1
    strongest = run_pgd(model, images, labels, eps=0.2)
    margin = [losses(model(x).detach(), labels, "margin").mean() for x in (images, found, strongest)]
    assert margin[0] < margin[1] < margin[2]
    few = random_search(model, images[:5], labels[:5], eps=0.2, generator=seeded(seed), tries=30)
    torch.testing.assert_close(few, found[:5], rtol=0, atol=1e-6)


NAN = float("nan")
CALLS: list[tuple[dict[str, Any], str]] = [
    ({"eps": -0.1}, r"eps must be at least 0, got -0.1; it is a distance"),
    ({"eps": NAN}, r"eps must be at least 0, got nan; it is a distance"),
    ({"samples": 0}, r"samples must be at least 1, got 0"),
    ({"images": images_of() * 2}, r"images must lie in \[0, 1\], got 0 to 2; normalise inside the model"),
    ({"images": images_of() - 0.5}, r"images must lie in \[0, 1\], got -0.5 to 0.5; normalise inside the model"),
    ({"images": images_of() * NAN}, r"images must lie in \[0, 1\], got nan to nan"),
    ({"images": images_of()[0]}, r"images must be \[B, C, H, W\], got \[1, 4, 4\]; add the missing"),
    ({"eps": torch.tensor([0.1, 0.2])}, r"eps must be a number or one a channel, \[1\], got \[2\]"),
    ({"eps": torch.tensor([-1.0])}, r"eps must be at least 0, got \[-1.0\]"),
    ({"loss": "dlr"}, r"loss must be one of 'ce', 'margin', got 'dlr'"),
]


@both
@pytest.mark.parametrize(("change", "message"), CALLS, ids=[message[:20] for _, message in CALLS])
def test_attack_fails_clearly(attack: Attack, change: dict[str, Any], message: str) -> None:
    call = {"images": images_of(), "labels": LABELS, "eps": 0.1, **change}
    with pytest.raises(ValueError, match=message):
        attack(mlp(), call.pop("images"), call.pop("labels"), **call)


def test_pgd_without_steps_fails_clearly() -> None:
    with pytest.raises(ValueError, match=r"steps must be at least 1, got 0; 20 is the paper's"):
        run_pgd(mlp(), images_of(), LABELS, eps=0.1, steps=0)


def test_pgd_with_strange_settings_fails_clearly() -> None:
    few = partial(run_pgd, mlp(), images_of(), LABELS, eps=0.1)
    with pytest.raises(ValueError, match=r"restarts must be a whole number of at least 1, got 0"):
        few(restarts=0)
    with pytest.raises(ValueError, match=r"keep must be one of 'best', 'last', got 'first'"):
        few(keep="first")
    with pytest.raises(ValueError, match=r"generator must be one, or one for each of 8 images, got 2"):
        few(generator=[seeded(), seeded()])
