"""What the models share: a method for each block, and a look at what each block's attention sees."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

from robust_attention.ops import Method


def one_for_each(method: Method | Sequence[Method], depth: int) -> list[Method]:
    """One method for every block, from one for all or from a list of them."""
    methods = [method] * depth if isinstance(method, Method) else list(method)
    if len(methods) != depth:
        raise ValueError(
            f"method must be one method, or one for each of the {depth} blocks, got {len(methods)}; repeat or drop some"
        )
    return methods


def given_to(attends: Iterable[nn.Module], run: Callable[[], object]) -> list[tuple[Any, ...]]:
    """The arguments that each of these modules is called with while `run` runs, in the order of the calls."""
    seen: list[tuple[Any, ...]] = []
    hooks = [attend.register_forward_pre_hook(lambda _, given: seen.append(given)) for attend in attends]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return seen
