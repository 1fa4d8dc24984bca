"""The training loop: it learns, its schedule is what it says, and nothing in it is left to chance."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn

import robust_attention as ra
from robust_attention.models.vit import ViT, ViTConfig
from robust_attention.training.fit import FitConfig, Step, fit, schedule


def seeded(seed: int = 0) -> Generator:
    return Generator().manual_seed(seed)


class Toy(nn.Module):
    """A linear model that remembers its batches. `draws` takes numbers from the generator; `scale` 0 mutes it."""

    def __init__(self, draws: bool = False, scale: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.position = nn.Parameter(torch.ones(1, 4))
        self.draws, self.scale = draws, scale
        self.batches: list[Tensor] = []
        self.drawn: list[float] = []
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=seeded(3))

    def forward(self, images: Tensor, generator: Generator) -> Tensor:
        assert self.training
        self.batches.append(images.detach())
        if self.draws:
            self.drawn.append(float(torch.rand((), generator=generator)))
        return self.scale * self.linear(images + self.position)


def problem(number: int = 60) -> tuple[Tensor, Tensor]:
    """Three clouds, far from each other."""
    labels = torch.arange(number) % 3
    return torch.eye(3, 4)[labels] * 3 + 0.3 * torch.randn(number, 4, generator=seeded(1)), labels


def test_loss_falls_on_a_problem_that_can_be_learned() -> None:
    model = Toy()
    images, labels = problem()
    losses = fit(model, images, labels, FitConfig(epochs=40, batch_size=16, learning_rate=0.05))
    assert len(losses) == 40 * 4
    assert all(isinstance(loss, float) for loss in losses)
    assert sum(losses[-4:]) < 0.05 * sum(losses[:4])
    assert not model.training
    with torch.no_grad():
        assert (model.linear(images + model.position).argmax(dim=1) == labels).all()


@pytest.mark.parametrize("method", [ra.Softmax(), ra.MoM()], ids=lambda m: type(m).__name__)
def test_equal_seeds_give_equal_weights(method: ra.Method) -> None:
    images, labels = torch.rand(24, 1, 8, 8, generator=seeded()), torch.arange(24) % 10

    def trained(seed: int) -> dict[str, Tensor]:
        model = ViT(ViTConfig(dim=16, depth=1), method)
        fit(model, images, labels, FitConfig(epochs=2, batch_size=8, seed=seed))
        return model.state_dict()

    before = torch.get_rng_state()
    first = trained(0)
    torch.manual_seed(123)
    again, other = trained(0), trained(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])
    torch.set_rng_state(before)


def test_training_leaves_the_global_random_state_alone() -> None:
    model = Toy(draws=True)
    before = torch.get_rng_state()
    fit(model, *problem(), FitConfig(epochs=2))
    assert torch.equal(torch.get_rng_state(), before)


def test_twins_see_the_same_batches_even_if_one_draws() -> None:
    calm, drawing = Toy(), Toy(draws=True)
    for model in (calm, drawing):
        fit(model, *problem(), FitConfig(epochs=3, batch_size=7))
    assert len(calm.batches) == len(drawing.batches) == 27
    assert all(torch.equal(a, b) for a, b in zip(calm.batches, drawing.batches, strict=True))
    assert len(set(drawing.drawn)) == 27  # afresh at every step


def test_every_epoch_shows_every_image_once_in_an_order_of_its_own() -> None:
    images, labels = problem(10)
    model = Toy()
    fit(model, images, labels, FitConfig(epochs=3, batch_size=4))
    assert [len(batch) for batch in model.batches] == [4, 4, 2] * 3
    epochs = [torch.cat(model.batches[start : start + 3]) for start in (0, 3, 6)]
    for epoch in epochs:
        assert torch.equal(epoch.sort(dim=0).values, images.sort(dim=0).values)
        assert not torch.equal(epoch, images)
    assert not torch.equal(epochs[0], epochs[1])


def test_images_keep_their_labels() -> None:
    images, labels = problem(6)
    model = Toy()
    # One image a step: the loss says which label came with it.
    losses = fit(model, images, labels, FitConfig(epochs=2, batch_size=1, learning_rate=0.0))
    with torch.no_grad():
        for batch, loss in zip(model.batches, losses, strict=True):
            (index,) = (images == batch).all(dim=1).nonzero()
            logits = model.linear(batch + model.position)
            assert math.isclose(loss, float(nn.functional.cross_entropy(logits, labels[index])), rel_tol=1e-6)


def test_report_tells_every_step() -> None:
    steps: list[Step] = []
    losses = fit(Toy(), *problem(10), FitConfig(epochs=2, batch_size=4), report=steps.append)
    assert steps == [Step(number, 6, loss) for number, loss in enumerate(losses, start=1)]


def test_schedule_rises_on_a_line_and_falls_on_a_cosine() -> None:
    factors = [schedule(step, 20, 0.2) for step in range(21)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    for step, wanted in ((8, (2 + math.sqrt(2)) / 4), (12, 0.5), (16, (2 - math.sqrt(2)) / 4), (20, 0.0)):
        assert math.isclose(factors[step], wanted, abs_tol=1e-12)
    assert all(after < before for before, after in pairwise(factors[4:]))


@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0.1), (7, 0.0), (7, 1.0)])
def test_schedule_has_no_step_of_nothing(num_steps: int, warmup: float) -> None:
    factors = [schedule(step, num_steps, warmup) for step in range(num_steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == 1


def test_only_matrices_decay_and_by_the_schedule() -> None:
    model = Toy(scale=0.0)  # no gradient: what moves is decay
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    config = FitConfig(epochs=5, batch_size=20, learning_rate=0.1, weight_decay=0.5, warmup=0.2)
    fit(model, *problem(), config)
    shrunk = math.prod(1 - 0.1 * 0.5 * schedule(step, 15, 0.2) for step in range(15))
    torch.testing.assert_close(model.linear.weight.detach(), before["linear.weight"] * shrunk)
    assert torch.equal(model.linear.bias, before["linear.bias"])
    assert torch.equal(model.position, before["position"])


def test_gradient_of_a_step_is_that_of_its_batch_alone() -> None:
    images, labels = problem(12)
    model = Toy()
    fit(model, images, labels, FitConfig(epochs=3, batch_size=4, learning_rate=0.0, clip=1e9))
    last = (model.batches[-1][:, None] == images).all(dim=2).nonzero()[:, 1]
    loss = nn.functional.cross_entropy(model.linear(images[last] + model.position), labels[last])
    for parameter, wanted in zip(model.parameters(), torch.autograd.grad(loss, tuple(model.parameters())), strict=True):
        torch.testing.assert_close(parameter.grad, wanted)


def test_long_gradients_are_clipped() -> None:
    images, labels = problem()
    norms = []
    for clip in (1e-3, 1e3):
        model = Toy()
        fit(model, images, labels, FitConfig(epochs=1, clip=clip))
        norms.append(float(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()))
    assert math.isclose(norms[0], 1e-3, rel_tol=1e-2)
    assert norms[1] > 0.1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale": math.nan}, r"the loss must stay finite, got nan at step 1 of 4; lower learning_rate = 0.01"),
        ({"scale": math.inf}, r"the loss must stay finite, got (nan|inf) at step 1 of 4; lower learning_rate = 0.01"),
    ],
)
def test_loss_that_is_not_finite_fails_clearly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FloatingPointError, match=message):
        fit(Toy(**change), *problem(), FitConfig(epochs=4, learning_rate=0.01))
