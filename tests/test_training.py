"""The training loop: it learns, it computes what it says, and nothing in it is left to chance."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Generator, Tensor, nn
from train_tiny import Clouds, Tiny, cross_entropy, train

import robust_attention as ra
from robust_attention._seeds import mix
from robust_attention.nn import set_draws
from robust_attention.training import FitConfig, Step, fit, schedule
from robust_attention.training.optimise import adamw


class Toy(nn.Module):
    """A linear model that remembers its batches; `scale` 0 mutes it."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.linear = nn.Linear(8, 3)
            self.position = nn.Parameter(torch.randn(1, 8))
        self.scale = scale
        self.batches: list[Tensor] = []

    def forward(self, series: Tensor) -> Tensor:
        assert self.training
        self.batches.append(series.detach())
        return self.scale * self.linear(series.mean(dim=1) + self.position)


def parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_loss_falls_on_a_problem_that_can_be_learned() -> None:
    model = Tiny()
    losses = train(None, FitConfig(epochs=30, batch_size=16, learning_rate=0.02), model, examples=Clouds(48)).losses
    assert len(losses) == 30 * 3
    assert sum(losses[-4:]) < 0.2 * sum(losses[:4])
    assert not model.training


@pytest.mark.parametrize("method", [ra.Softmax(), ra.MoM(blocks=3)], ids=lambda m: type(m).__name__)
def test_equal_seeds_give_equal_weights(method: ra.Method) -> None:
    def trained(seed: int) -> dict[str, Tensor]:
        model = Tiny(method, dropout=0.2)
        train(None, FitConfig(epochs=2, batch_size=8, seed=seed), model, examples=Clouds(noise=0.1))
        return parameters(model)

    first = trained(0)
    torch.rand(3)
    assert equal(first, trained(0))
    assert not equal(first, trained(1))


def test_draws_are_those_of_the_seed_and_the_step() -> None:
    config = FitConfig(epochs=1, batch_size=17, learning_rate=0.0, micro_batch=9, seed=4)
    loss = train(None, config).losses[0]
    model, examples = Tiny().train(), Clouds()
    found = []
    for step in (0, 1):
        set_draws(model, mix(4, "draws", step))
        found.append(cross_entropy(model, (examples.series, examples.labels)).item())
    # Both micro-batches saw the same draw, or the sum would not be that of the whole batch.
    assert math.isclose(loss, found[0], rel_tol=1e-6)
    assert not math.isclose(loss, found[1], rel_tol=1e-6)


def test_training_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    train(None, FitConfig(epochs=2), Tiny(dropout=0.5))
    assert torch.equal(torch.get_rng_state(), before)


def test_every_epoch_shows_every_example_once_in_an_order_of_its_own() -> None:
    examples = Clouds(10)
    train(None, FitConfig(epochs=3, batch_size=4), Toy(), examples=examples)
    assert [len(batch) for batch in examples.seen] == [4, 4, 2] * 3
    epochs = [torch.cat(examples.seen[start : start + 3]).tolist() for start in (0, 3, 6)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(10))
        assert epoch != list(range(10))
    assert epochs[0] != epochs[1] != epochs[2]
    assert len(set(examples.seeds)) == 9


def test_twins_see_the_same_batches() -> None:
    calm, drawing = Clouds(noise=0.1), Clouds(noise=0.1)
    for method, examples in ((ra.Softmax(), calm), (ra.MoM(blocks=3), drawing)):
        train(None, FitConfig(epochs=2, batch_size=7), Tiny(method, dropout=0.1), examples=examples)
    assert all(torch.equal(a, b) for a, b in zip(calm.seen, drawing.seen, strict=True))
    assert calm.seeds == drawing.seeds


def test_report_tells_what_happens() -> None:
    steps: list[Step] = []
    config = FitConfig(epochs=2, batch_size=4, report_every=4)
    fitted = train(None, config, Toy(), examples=Clouds(10), report=steps.append, validate=lambda m: {"right": 0.5})
    assert [step.step for step in steps] == [4, 6]
    assert all(step.num_steps == 6 for step in steps)
    for step, part in zip(steps, (fitted.losses[:4], fitted.losses[4:]), strict=True):
        assert math.isclose(step.loss, sum(part) / len(part))
        assert math.isclose(step.learning_rate, config.learning_rate * schedule(step.step - 1, 6, config.warmup))
        assert step.examples_per_second > 0
        assert step.memory is None
    assert steps[0].seconds_left > 0 == steps[1].seconds_left
    # The report of step 6 comes before the validation of epoch 2.
    assert [step.metrics for step in steps] == [{"epoch": 1, "right": 0.5}] * 2
    assert fitted.metrics == [{"epoch": 1, "right": 0.5}, {"epoch": 2, "right": 0.5}]
    assert fitted.seconds > 0
    assert math.isclose(fitted.examples_per_second, 20 / fitted.seconds)


def test_validation_comes_when_asked_and_at_the_end_and_changes_nothing() -> None:
    def validate(model: nn.Module) -> dict[str, float]:
        assert not model.training
        torch.rand(7)
        model(torch.randn(3, 6, 8)).sum().backward()  # as an attack does
        return {"epochs": 1.0}

    with_, without = Tiny(dropout=0.3), Tiny(dropout=0.3)
    config = FitConfig(epochs=5, validate_every=2, ema=0.5)
    metrics = train(None, config, with_, validate=validate).metrics
    train(None, config, without)
    assert [found["epoch"] for found in metrics] == [2, 4, 5]
    assert equal(parameters(with_), parameters(without))


def test_schedule_rises_on_a_line_and_falls_on_a_cosine() -> None:
    factors = [schedule(step, 20, 0.2) for step in range(21)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    for step, wanted in ((8, (2 + math.sqrt(2)) / 4), (12, 0.5), (16, (2 - math.sqrt(2)) / 4), (20, 0.0)):
        assert math.isclose(factors[step], wanted, abs_tol=1e-12)
    assert all(after < before for before, after in pairwise(factors[4:]))
    ending_higher = [schedule(step, 20, 0.2, final=0.1) for step in range(21)]
    for factor, higher in zip(factors[4:], ending_higher[4:], strict=True):
        assert math.isclose(higher, 0.1 + 0.9 * factor)


@pytest.mark.parametrize(("num_steps", "warmup"), [(1, 0.1), (7, 0.0), (7, 1.0)])
def test_schedule_has_no_step_of_nothing(num_steps: int, warmup: float) -> None:
    factors = [schedule(step, num_steps, warmup) for step in range(num_steps)]
    assert all(0 < factor <= 1 for factor in factors)
    assert max(factors) == 1


def test_only_matrices_decay_and_by_the_schedule() -> None:
    model = Toy(scale=0.0)  # no gradient: what moves is decay
    before = parameters(model)
    config = FitConfig(epochs=5, batch_size=6, learning_rate=0.1, weight_decay=0.5, warmup=0.2)
    train(None, config, model)
    shrunk = math.prod(1 - 0.1 * 0.5 * schedule(step, 15, 0.2) for step in range(15))
    torch.testing.assert_close(model.linear.weight.detach(), before["linear.weight"] * shrunk)
    assert torch.equal(model.linear.bias, before["linear.bias"])
    assert torch.equal(model.position, before["position"])


def by_hand(config: FitConfig, model: nn.Module, after: Callable[[int], None] = lambda step: None) -> list[float]:
    """The same training, written once more, for a model without dropout: a whole batch at a time."""
    examples, losses = Clouds(), []
    order = torch.cat(
        [
            torch.randperm(17, generator=Generator().manual_seed(mix(config.seed, "order", epoch)))
            for epoch in range(config.epochs)
        ]
    )
    batches = [part for epoch in order.split(17) for part in epoch.split(config.batch_size)]
    optimizer = adamw(model, config, torch.device("cpu"))
    model.train()
    for step, indices in enumerate(batches):
        optimizer.zero_grad()
        set_draws(model, mix(config.seed, "draws", step))
        loss = cross_entropy(model, (examples.series[indices], examples.labels[indices]))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip or math.inf)
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * schedule(step, len(batches), config.warmup)
        optimizer.step()
        losses.append(loss.item())
        after(step)
    return losses


@pytest.mark.parametrize("clip", [None, 0.5])
def test_training_equals_the_loop_written_out(clip: float | None) -> None:
    config = FitConfig(epochs=3, batch_size=6, learning_rate=0.01, clip=clip)
    ours, plain = Tiny(), Tiny()
    assert train(None, config, ours).losses == by_hand(config, plain)
    assert equal(parameters(ours), parameters(plain))


@pytest.mark.parametrize("micro_batch", [1, 4, 5])
def test_accumulated_gradients_are_those_of_the_whole_batch(micro_batch: int) -> None:
    config = FitConfig(epochs=2, batch_size=6, learning_rate=0.01)
    whole, parts = Tiny(), Tiny()
    losses = train(None, config, whole).losses
    found = train(None, replace(config, micro_batch=micro_batch), parts)
    assert max(parts.sizes) <= micro_batch == found.micro_batch
    assert min(whole.sizes[:2]) == 6
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(losses))
    # AdamW divides by the gradient's size: where it is almost 0, so is all accuracy.
    for name, parameter in parameters(parts).items():
        torch.testing.assert_close(parameter, parameters(whole)[name], rtol=0, atol=1e-4)


def test_averaged_weights_equal_their_formula() -> None:
    config = FitConfig(epochs=4, batch_size=6, learning_rate=0.01, ema=0.4)  # reached from step 5 on, of 12
    ours, plain = Tiny(), Tiny()
    averages = parameters(plain)

    def average(step: int) -> None:
        decay = min(0.4, (1 + step) / (10 + step))
        for name, parameter in plain.named_parameters():
            averages[name] = decay * averages[name] + (1 - decay) * parameter.detach()

    seen: list[dict[str, Tensor]] = []
    fitted = train(None, config, ours, validate=lambda model: seen.append(parameters(model)) or {})
    assert fitted.losses == by_hand(config, plain, average)
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.detach(), averages[name])
        assert torch.equal(seen[-1][name], parameter)
    assert not torch.allclose(averages["head.weight"], plain.head.weight)


def test_buffers_are_averaged_or_copied() -> None:
    first, last = Tiny(batch_norm=True), Tiny(batch_norm=True)
    config = FitConfig(epochs=1, batch_size=17, ema=0.9)  # one step, of decay 0.1
    train(None, config, first)
    train(None, replace(config, ema=0.0), last)
    assert isinstance(first.norm, nn.BatchNorm1d)
    assert isinstance(last.norm, nn.BatchNorm1d)
    torch.testing.assert_close(first.norm.running_mean, 0.9 * last.norm.running_mean)
    assert first.norm.num_batches_tracked == last.norm.num_batches_tracked == 1


def test_out_of_memory_halves_the_micro_batch_and_changes_nothing_else() -> None:
    config = FitConfig(epochs=2, batch_size=8, learning_rate=0.01)
    tight, ample = Tiny(room=3), Tiny()
    found = train(None, config, tight)
    assert found.micro_batch == 2
    assert tight.sizes[:6] == [8, 4, 2, 2, 2, 2]  # 4 is tried in vain too, and then remembered
    assert max(tight.sizes[6:]) == 2
    torch.testing.assert_close(torch.tensor(found.losses), torch.tensor(train(None, config, ample).losses))


def test_out_of_memory_with_one_example_fails_clearly() -> None:
    with pytest.raises(torch.OutOfMemoryError, match=r"at step 1 with a single example on a process; take a smaller"):
        train(None, FitConfig(), Tiny(room=0))


def test_bfloat16_computes_in_it_and_keeps_float32() -> None:
    seen: list[torch.dtype] = []

    class Watched(Tiny):
        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            seen.append(found.dtype)
            return found

    model = Watched()
    losses = train(None, FitConfig(epochs=2, precision="bfloat16"), model).losses
    assert set(seen) == {torch.bfloat16}
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    torch.testing.assert_close(losses, train(None, FitConfig(epochs=2)).losses, rtol=0.02, atol=0)


def test_compiled_training_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[nn.Module] = []
    real = torch.compile

    def compile_(model: nn.Module) -> Any:
        calls.append(model)
        return real(model, backend="eager")  # traced as ever, but no time spent on making code

    monkeypatch.setattr(torch, "compile", compile_)
    config = FitConfig(epochs=2, batch_size=6, learning_rate=0.01)
    compiled, plain = (nn.Sequential(nn.Flatten(), nn.Linear(48, 3)) for _ in range(2))
    plain.load_state_dict(compiled.state_dict())
    losses = train(None, replace(config, compile=True), compiled).losses
    assert calls == [compiled]
    torch.testing.assert_close(losses, train(None, config, plain).losses)
    torch._dynamo.reset()


def test_frozen_parameters_stay() -> None:
    model = Tiny()
    model.head.weight.requires_grad_(False)
    before = parameters(model)
    train(None, FitConfig(epochs=1), model)
    changed = {name for name, parameter in parameters(model).items() if not torch.equal(parameter, before[name])}
    assert changed == before.keys() - {"head.weight"}


@pytest.mark.parametrize("scale", [math.nan, math.inf])
def test_loss_that_is_not_finite_fails_clearly(scale: float) -> None:
    message = r"the loss must stay finite, got (nan|inf) at step 1 of 8, where .* was 0.01; lower learning_rate = 0.01"
    with pytest.raises(FloatingPointError, match=message):
        train(None, FitConfig(epochs=4, batch_size=9, learning_rate=0.01), Toy(scale))


def test_gradient_that_is_not_finite_fails_clearly() -> None:
    class Steep(Toy):
        def forward(self, series: Tensor) -> Tensor:
            found = super().forward(series)
            return found + (self.linear.weight * 0).sum().abs().sqrt()  # 0, but of infinite slope

    with pytest.raises(FloatingPointError, match=r"the norm of the gradient must stay finite, got nan at step 1 of 1,"):
        train(None, FitConfig(epochs=1), Steep())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"batch_size": 1.5}, "batch_size must be a whole number"),
        ({"micro_batch": 0}, "micro_batch must be a whole number"),
        ({"learning_rate": math.nan}, "learning_rate must be a finite number above 0, got nan"),
        ({"warmup": 1.5}, "warmup must be a share from 0 to 1, got 1.5"),
        ({"final_learning_rate": -1}, "final_learning_rate must be a share"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers from 0 to below 1"),
        ({"clip": 0.0}, "clip must be a finite number above 0 or None"),
        ({"ema": 1.0}, "ema must lie from 0 to below 1"),
        ({"precision": "float16"}, "precision must be one of 'float32', 'bfloat16'"),
        ({"parallel": "tensor"}, "parallel must be one of"),
        ({"compile": "yes"}, "compile must be True or False"),
        ({"keep": 0}, "keep must be a whole number"),
        ({"save_seconds": -1}, "save_seconds must be a finite number"),
    ],
)
def test_wrong_setting_fails_clearly(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FitConfig(**change)


def test_wrong_arguments_fail_clearly() -> None:
    class Short(Clouds):
        def batch(self, indices: Tensor, seed: int, device: torch.device) -> tuple[Tensor, ...]:
            return super().batch(indices[1:], seed, device)

    once = FitConfig(epochs=1)
    with pytest.raises(ValueError, match=r"must return a row for each of its 17 indices, got shapes \[\[16, 6, 8\]"):
        train(None, once, examples=Short())
    with pytest.raises(ValueError, match="examples must hold at least one example"):
        train(None, once, examples=Clouds(0))
    with pytest.raises(ValueError, match="loss must return one number, the mean over its examples, got shape"):
        fit(Tiny(), Clouds(), lambda model, batch: model(batch[0]).sum(dim=1), once, device="cpu")
    with pytest.raises(ValueError, match=r"parameters must be float32 to be trained, got torch.bfloat16 in position"):
        train(None, once, Tiny().to(torch.bfloat16))
    with pytest.raises(ValueError, match="parameters that require a gradient, got none"):
        train(None, once, Tiny().requires_grad_(False))


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_processes_without_torchrun_fail_clearly(parallel: Any) -> None:
    with pytest.raises(ValueError, match=r"needs the processes that torchrun starts.*start with torchrun"):
        train(None, FitConfig(parallel=parallel))


def test_seeds_differ_by_every_part_and_stay_what_they_are() -> None:
    parts = [(0,), ("0",), (1, 23), (12, 3), (123,), (1, "23"), ("a", "b"), ("ab",), ("a", "b", 0), (-1,)]
    seeds = [mix(*part) for part in parts]
    assert len(set(seeds)) == len(parts)
    assert all(0 <= seed < 2**62 for seed in seeds)
    assert mix(0, "order", 3) == 1244273318003668494
    for wrong in (True, 1.0, None):
        with pytest.raises(ValueError, match="parts of a seed must be int or str"):
            mix("a", wrong)  # type: ignore[arg-type]
