"""Draws and methods of all attentions of a model at once."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import robust_attention as ra
from robust_attention.nn import attends, eval_draw, is_stochastic, set_draws, with_methods


def model(method: ra.Method) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(ra.nn.Attention(8, 2, method=method) for _ in range(3)))


def x_of() -> Tensor:
    return torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))


def counts_of(layers: nn.Module) -> list[Tensor]:
    return [attend.tensors(12, 12, torch.device("cpu"))["counts"] for attend in attends(layers)]


def test_set_draws_fixes_the_draws_and_parts_the_layers() -> None:
    layers, x = model(ra.MoM()), x_of()
    set_draws(layers, 7)
    first, then = layers(x), layers(x)
    assert not torch.equal(first, then)  # in training every call draws afresh
    set_draws(layers, 8)
    other = layers(x)
    set_draws(layers, 7)
    assert torch.equal(layers(x), first)
    assert not torch.equal(other, first)
    set_draws(layers, 7)
    one, two, three = counts_of(layers)
    assert not torch.equal(one, two)
    assert not torch.equal(two, three)


def test_numbers_and_places_share_no_draw() -> None:
    layers = model(ra.MoM())
    seen = set()
    for number in range(50):
        set_draws(layers, number)
        for counts in counts_of(layers):
            seen.add(counts.numpy().tobytes())
    assert len(seen) == 150


def test_eval_draw_holds_inside_and_is_undone() -> None:
    layers, x = model(ra.MoM()).eval(), x_of()
    known = layers(x)
    assert torch.equal(layers(x), known)
    with eval_draw(layers, "fresh"):
        set_draws(layers, 3)
        assert not torch.equal(layers(x), layers(x))
    assert torch.equal(layers(x), known)
    with pytest.raises(RuntimeError), eval_draw(layers, "fresh"):
        raise RuntimeError
    assert torch.equal(layers(x), known)


def test_with_methods_holds_inside_and_is_undone() -> None:
    layers = model(ra.RKDE())
    with with_methods(layers, lambda method: replace(method, weight_grad="stop")):  # type: ignore[call-arg]
        assert [attend.method for attend in attends(layers)] == [ra.RKDE(weight_grad="stop")] * 3
    assert [attend.method for attend in attends(layers)] == [ra.RKDE()] * 3


def test_another_class_of_method_fails_clearly() -> None:
    layers = model(ra.RKDE())
    with (
        pytest.raises(ValueError, match="must keep the class of a method, here RKDE"),
        with_methods(layers, lambda method: ra.KDE()),
    ):
        pass
    assert attends(layers)[0].method == ra.RKDE()


def test_is_stochastic_asks_every_layer() -> None:
    assert is_stochastic(model(ra.MoM()))
    assert not is_stochastic(model(ra.SPKDE()))
    assert is_stochastic(nn.Sequential(model(ra.KDE()), model(ra.FourierMoM())))
