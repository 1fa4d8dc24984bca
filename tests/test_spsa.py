"""SPSA: it follows the slope where it stands, by as many answers as it says, and needs no gradient."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from toys import taught

from robust_attention.attacks._gradient import Logits, losses
from robust_attention.attacks.pgd import pgd
from robust_attention.attacks.spsa import _Directions, _estimate, spsa


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


def problem(number: int = 150) -> tuple[nn.Sequential, Tensor, Tensor]:
    """A smooth model that has learnt noisy patterns, and images that it has not seen."""
    patterns, labels = torch.rand(4, 1, 8, 8, generator=seeded(7)), torch.arange(400 + number) % 4
    images = (patterns[labels] + 0.5 * torch.randn(len(labels), 1, 8, 8, generator=seeded(8))).clamp(0, 1)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.GELU(), nn.Flatten(), nn.Linear(384, 4))
    taught(model, images[:400], labels[:400], std=0.1, rate=0.01, steps=40)
    return model, images[400:], labels[400:]


def accuracy(model: Logits, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(dim=1) == labels).float().mean().item()


@pytest.mark.parametrize("eps", [0.08, 0.15])
def test_spsa_comes_within_two_points_of_pgd_on_a_smooth_model(eps: float) -> None:
    model, images, labels = problem()
    clean = accuracy(model, images, labels)
    strong = accuracy(model, pgd(model, images, labels, eps=eps, generator=seeded()), labels)
    found = accuracy(model, spsa(model, images, labels, eps=eps, generator=seeded(), steps=40, samples=32), labels)
    assert clean - strong > 0.05  # there is something to come close to
    assert strong - 0.02 <= found <= strong + 0.02


def test_default_budget_is_not_a_token_one() -> None:
    settings = {name: entry.default for name, entry in inspect.signature(spsa).parameters.items()}
    assert settings["steps"] * settings["samples"] >= 5000


def test_estimate_is_the_gradient_of_a_linear_model() -> None:
    # The margin of two classes is linear: with every direction of the matrix used once the estimate is exact.
    weight, images = torch.randn(2, 16, generator=seeded(3), dtype=torch.float64), torch.rand(5, 1, 4, 4).double()
    labels = torch.arange(5) % 2
    every = _Directions(images, seeded()).take(16)
    found = _estimate(lambda x: x.flatten(1) @ weight.T, images, labels, every, 0.01, "margin", 64)
    wanted = (weight[1 - labels] - weight[labels]).reshape(images.shape)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(1, 4, 4), (3, 5, 5)])
def test_directions_are_signs_fair_and_nearly_orthogonal(shape: tuple[int, int, int]) -> None:
    images = torch.zeros(2, *shape)
    pixels = images[0].numel()
    rows = 1 << (pixels - 1).bit_length()
    signs = _Directions(images, seeded(1)).take(rows).flatten(1)
    assert torch.equal(signs.abs(), torch.ones(rows, pixels))
    # All rows together: the columns of a Hadamard matrix are orthogonal.
    torch.testing.assert_close(signs.T @ signs, rows * torch.eye(pixels))
    mean = torch.stack([_Directions(images, seeded(seed)).take(1)[0] for seed in range(400)]).mean(0)
    assert mean.abs().max() < 0.25  # five standard deviations


def test_directions_go_on_when_all_are_used() -> None:
    directions = _Directions(torch.zeros(1, 1, 2, 2), seeded())
    signs = torch.cat([directions.take(3) for _ in range(4)]).flatten(1)
    first, second, third = signs[:4], signs[4:8], signs[8:]
    for whole in (first, second, third):
        torch.testing.assert_close(whole @ whole.T, 4 * torch.eye(4))


def test_estimate_is_taken_at_the_point_reached() -> None:
    # On a ramp the point walks to the edge of the ball, and the questions must walk with it.
    asked: list[Tensor] = []

    def model(x: Tensor) -> Tensor:
        asked.append(x.clone())
        height = (x - 0.5).flatten(1).sum(dim=1)
        return torch.stack((torch.zeros_like(height), height), dim=1)

    images, labels = torch.full((1, 1, 4, 4), 0.5), torch.tensor([0])
    found = spsa(model, images, labels, eps=0.1, generator=seeded(), steps=20, samples=8, probe=0.001)
    torch.testing.assert_close(found, images + 0.1)
    late = [x for x in asked[20:] if len(x) > 1]
    centres = torch.stack([(x[0] + x[1]) / 2 if len(x) == 2 else x.mean(dim=0) for x in late])
    assert (centres - 0.5).mean() > 0.05  # between the two signs of a direction lies the point itself
    assert all((x - x.mean(dim=0)).abs().max() < 0.0011 for x in late)


def test_spsa_asks_as_often_as_it_says_and_in_calls_of_the_size_it_says() -> None:
    sizes: list[int] = []

    def model(x: Tensor) -> Tensor:
        sizes.append(len(x))
        return x.flatten(1)[:, :3]

    images, labels = torch.rand(6, 1, 4, 4, generator=seeded()), torch.arange(6) % 3
    spsa(model, images, labels, eps=0.1, generator=seeded(), steps=5, samples=8, batch_size=40)
    assert max(sizes) <= 40
    assert sum(sizes) == 6 * 5 * (2 * 8 + 1)
    sizes.clear()
    spsa(model, images, labels, eps=0.1, generator=seeded(), steps=1, samples=2, batch_size=1)
    assert sizes == [12, 12, 6]  # a pair stays together


def run(model: Logits, images: Tensor, labels: Tensor, **settings: Any) -> Tensor:
    return spsa(model, images, labels, **{"eps": 0.1, "generator": seeded(), "steps": 6, "samples": 8, **settings})


def test_batch_size_and_neighbours_change_nothing() -> None:
    model, images, labels = problem(12)
    model, images = model.double(), images.double()
    wanted = run(model, images, labels)
    torch.testing.assert_close(run(model, images, labels, batch_size=24), wanted, rtol=0, atol=1e-9)
    torch.testing.assert_close(run(model, images[3:5], labels[3:5]), wanted[3:5], rtol=0, atol=1e-9)


@pytest.mark.parametrize("clip", [True, False])
def test_spsa_stays_in_the_ball_and_leaves_no_trace(clip: bool) -> None:
    model, images, labels = problem(12)
    before, state = images.clone(), torch.get_rng_state()
    found = run(model, images, labels, clip=clip)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, before)
    assert not found.requires_grad
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert (found - images).abs().max() <= 0.1 + 1e-6
    assert (bool(found.min() >= 0) and bool(found.max() <= 1)) == clip
    assert torch.equal(run(model, images, labels, clip=clip), found)


def test_spsa_needs_no_gradient() -> None:
    model, images, labels = problem(60)

    @torch.no_grad()
    def closed(x: Tensor) -> Tensor:
        return model(x.detach())

    found = run(closed, images, labels, steps=20)
    margin: Callable[[Tensor], Tensor] = lambda x: losses(closed(x), labels, "margin").mean()  # noqa: E731
    assert margin(found) > margin(images) + 1


def test_spsa_returns_the_best_point_it_visited() -> None:
    # The top of this hill is nearer than one step: the point leaps to and fro over it.
    visited: list[Tensor] = []

    def hill(x: Tensor) -> Tensor:
        if len(x) == 3:
            visited.append(x.clone())
        height = -(x - 0.5).square().flatten(1).sum(dim=1)
        return torch.stack((torch.zeros_like(height), height), dim=1)

    images, labels = 0.48 + 0.04 * torch.rand(3, 1, 4, 4, generator=seeded()), torch.zeros(3, dtype=torch.int64)
    found = run(hill, images, labels, rate=1.0, samples=16)
    margin = torch.stack([losses(hill(x), labels, "margin") for x in visited[:6]])
    assert (margin.argmax(dim=0) < 5).any()
    assert torch.equal(found, torch.stack(visited[:6])[margin.argmax(dim=0), torch.arange(3)])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"eps": -1.0}, r"eps must be at least 0, got -1.0"),
        ({"samples": 0}, r"samples must be at least 1, got 0"),
        ({"steps": 0}, r"steps must be a whole number of at least 1, got 0"),
        ({"probe": 0.0}, r"probe must be a finite number above 0, got 0.0"),
        ({"rate": 0.0}, r"rate must be a finite number above 0, got 0.0"),
    ],
)
def test_spsa_fails_clearly(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(lambda x: x.flatten(1), torch.rand(2, 1, 2, 2), torch.tensor([0, 1]), **settings)
