"""What the attentions inside a whole model draw, and by which method they attend: set for all of them at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from robust_attention import _checks
from robust_attention.nn.attend import Attend, EvalDraw
from robust_attention.ops import Method


def attends(model: nn.Module) -> list[Attend]:
    """Every `Attend` inside a model, in the order of its modules."""
    return [module for module in model.modules() if isinstance(module, Attend)]


def is_stochastic(model: nn.Module) -> bool:
    """Whether some attention of the model draws at random."""
    return any(module.method.stochastic for module in attends(model))


def set_draws(model: nn.Module, number: int) -> None:
    """Let the next draws of every attention be a function of `number`, the module's place and its method's seed alone.

    Whoever calls it before every step needs no state of a random stream to resume: call it with a number made from
    the seed of the run and the step. Several calls of the model after it draw from number, number + 1, ...: numbers
    of different steps should lie far apart, as hashes do.
    """
    _checks.whole("number", number, least=0, most=2**62)
    for place, module in enumerate(attends(model)):
        # Attend counts its draws up from here; the large odd step keeps the sequences of different places apart.
        module.num_draws.fill_((number + place * 0x2545F4914F6CDD1D) % 2**62)


@contextmanager
def eval_draw(model: nn.Module, how: EvalDraw) -> Iterator[None]:
    """Meanwhile, evaluation uses the draw of each method's own seed ("fixed"), or a new one at every call ("fresh")."""
    _checks.one_of("how", how, ("fixed", "fresh"))
    before = [(module, module.eval_draw) for module in attends(model)]
    try:
        for module, _ in before:
            module.eval_draw = how
        yield
    finally:
        for module, old in before:
            module.eval_draw = old


@contextmanager
def with_methods(model: nn.Module, change: Callable[[Method], Method]) -> Iterator[None]:
    """Meanwhile, every attention of the model uses `change(its method)`.

    The tensors that a module owns stay: the new method must take the same ones.
    """
    before = [(module, module.method) for module in attends(model)]
    try:
        for module, method in before:
            new = change(method)
            if type(new) is not type(method):
                raise ValueError(
                    f"change must keep the class of a method, here {type(method).__name__}, got {new!r}; "
                    "use dataclasses.replace"
                )
            module.method = new
        yield
    finally:
        for module, method in before:
            module.method = method
