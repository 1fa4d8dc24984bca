"""One line for a model that exists: swap its attention in place, say what was done, and take it back."""

import dataclasses
import fnmatch
import logging
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from robust_attention.adapters import torch_nn
from robust_attention.adapters._undo import Undo, all_of
from robust_attention.nn import Attend
from robust_attention.nn.attend import EvalDraw
from robust_attention.ops import Method
from robust_attention.ops._blocks import BlockMethod
from robust_attention.ops._weighted import RobustWeights, WeightedKernel

_RECORD = "_robust_attention"
_logger = logging.getLogger("robust_attention")

Layers = Iterable[int] | str | Callable[[str], bool] | None


@dataclasses.dataclass
class Report:
    """What `robustify` did."""

    method: Method
    changed: list[str] = dataclasses.field(default_factory=list)
    """Names of the attention modules that now use the method, in order."""
    kept: list[str] = dataclasses.field(default_factory=list)
    """Attention modules that `layers` left out."""
    skipped: dict[str, str] = dataclasses.field(default_factory=dict)
    """Attention modules that could not be swapped, and why."""
    notes: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{self.method!r} in {len(self.changed)} attention modules: {', '.join(self.changed)}"]
        if self.kept:
            lines.append(f"kept as they were: {', '.join(self.kept)}")
        lines += [f"could not change {name}: {why}" for name, why in self.skipped.items()]
        return "\n".join(lines + self.notes)


def robustify(
    model: nn.Module,
    method: Method,
    *,
    layers: Layers = None,
    eval_draw: EvalDraw = "fixed",
    max_len: int | None = None,
) -> Report:
    """Swap the attention of a transformers, timm or torch.nn model in place, keeping every weight.

    Args:
        method: what to attend with; `keys="own"` keeps the logits that a trained model knows.
        layers: which attention modules, counted in their order (`[0, 1]`, negative from the end), by a pattern of
            their names (`"*.layers.1?.*"`) or by a function of the name; None means all.
        eval_draw: "fixed" or "fresh" draws in evaluation, for methods that draw. Each layer has a seed of its own.
        max_len: longest sequence, for methods with a table over positions.
    Returns: what was changed and what could not be. `restore(model)` takes everything back; a second `robustify` takes
        the first one back before it starts.
    """
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise ValueError(
            "model must not be compiled yet, got the result of torch.compile; "
            "robustify the plain model (model._orig_mod) and compile it again"
        )
    if not isinstance(method, Method):
        raise ValueError(f"method must be one of robust_attention's, got {method!r}; pass for example ra.RKDE()")
    for part in list(model.modules()):  # a part may have been changed on its own
        restore(part)
    report = Report(method)
    found: dict[str, Any] = {}
    for adapter in _adapters(model):
        names, refused = adapter.find(model)
        found |= dict.fromkeys(names, adapter)
        report.skipped |= refused
    order = [name for name, _ in model.named_modules() if name in found]
    if not order:
        why = "".join(f"; {name}: {reason}" for name, reason in report.skipped.items())
        raise ValueError(
            f"model must have attention of transformers, timm (Attention) or torch.nn (MultiheadAttention), "
            f"got {type(model).__qualname__} without{why}; build it with ra.nn.Attention instead"
        )
    if "" in order:
        raise ValueError(
            f"model must hold attention modules, got {type(model).__qualname__}, which is one itself; "
            "put it into nn.Sequential or another module first, or build ra.nn.MultiheadAttention"
        )
    chosen = _choose(order, layers)
    undo: list[Undo] = []
    notes: dict[str, None] = {}
    try:
        for number, name in enumerate(order):
            if name not in chosen:
                report.kept.append(name)
                continue
            own = dataclasses.replace(method, seed=method.seed + number) if isinstance(method, BlockMethod) else method
            back, note = found[name].swap(model, name, own, eval_draw, max_len)
            undo += back
            report.changed.append(name)
            if note:
                notes[note] = None
        for adapter in dict.fromkeys(found.values()):
            if hasattr(adapter, "switch"):
                undo += adapter.switch(model)
    except BaseException:
        all_of(undo)
        raise
    if isinstance(method, BlockMethod) and method.kind != "poisson" and _generates(model):
        notes['generation with a cache draws other blocks than without one; for equal outputs use draw="poisson"'] = (
            None
        )
    report.notes = list(notes)
    model.__dict__[_RECORD] = undo
    _logger.info("%s", report)
    return report


def restore(model: nn.Module) -> None:
    """Take back what `robustify` did, exactly; nothing happens to a model that it did not touch."""
    model = getattr(model, "_orig_mod", model)  # a compiled model is a wrapper of the one that was changed
    all_of(model.__dict__.pop(_RECORD, []))


@torch.no_grad()
def weights_of(model: nn.Module, batch: Any) -> dict[str, RobustWeights[Any]]:
    """The robust weights `joint, marginal` of every robust layer for one batch, by the layer's name.

    Args:
        batch: what the model takes: a mapping (passed as keywords), a tuple (as arguments) or one tensor.
    """
    found: dict[str, RobustWeights[Any]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Attend) and isinstance(module.method, WeightedKernel):
            owner = name.rpartition(".")[0]

            weights = module.method.weights

            def record(part: nn.Module, args: Any, out: Tensor, owner: str = owner, weights: Any = weights) -> None:
                _, k, v, mask, causal = (*args, None, False)[:5]
                found[owner] = weights(k, v, mask, causal)

            handles.append(module.register_forward_hook(record))
    if not handles:
        raise ValueError(
            "model must have layers with RKDE or SPKDE, got none; call ra.robustify(model, ra.RKDE()) first"
        )
    try:
        if hasattr(batch, "keys"):
            model(**batch)
        elif isinstance(batch, tuple):
            model(*batch)
        else:
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _adapters(model: nn.Module) -> list[Any]:
    """The bridges that this model needs; a library that is not loaded cannot have made it."""
    found: list[Any] = []
    if sys.modules.get("transformers") is not None:
        from robust_attention.adapters import huggingface

        if huggingface.roots(model):
            found.append(huggingface)
    if any(type(module).__module__.startswith("timm.") for module in model.modules()):
        from robust_attention.adapters import timm

        found.append(timm)
    return [*found, torch_nn]


def _choose(order: list[str], layers: Layers) -> set[str]:
    if layers is None:
        return set(order)
    if callable(layers):
        chosen = {name for name in order if layers(name)}
    elif isinstance(layers, str):
        chosen = set(fnmatch.filter(order, layers))
    else:
        numbers = list(layers)
        if any(isinstance(n, bool) or not isinstance(n, int) or not -len(order) <= n < len(order) for n in numbers):
            raise ValueError(
                f"layers must be numbers from {-len(order)} to {len(order) - 1}, got {numbers}; "
                f"the model has {len(order)} attention modules"
            )
        chosen = {order[n] for n in numbers}
    if not chosen:
        raise ValueError(f"layers must choose at least one of {order}, got {layers!r}; pass None for all")
    return chosen


def _generates(model: nn.Module) -> bool:
    can = getattr(model, "can_generate", None)
    return bool(can()) if callable(can) else False
