"""Plain torch.nn: MultiheadAttention, alone or inside a TransformerEncoderLayer."""

import torch
from torch import nn

from robust_attention.adapters._undo import Put, Undo
from robust_attention.nn import Attend, MultiheadAttention
from robust_attention.nn.attend import EvalDraw
from robust_attention.ops import Method


def find(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Names of the attention modules, and of those that cannot be swapped with the reason."""
    found, refused = [], {}
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            found.append(name)
        elif isinstance(module, nn.MultiheadAttention) and not isinstance(module, MultiheadAttention):
            refused[name] = f"{type(module).__qualname__} changes nn.MultiheadAttention in ways of its own"
    return found, refused


def swap(
    model: nn.Module, name: str, method: Method, eval_draw: EvalDraw, max_len: int | None
) -> tuple[list[Undo], str]:
    """Put our module in its place, with the very parameters of the old one; how to undo it, and a note."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = model.get_submodule(name)
    assert isinstance(old, nn.MultiheadAttention)
    new = MultiheadAttention.__new__(MultiheadAttention)
    # The same parameters and hooks, in containers of its own: what is added to the new module does not reach the old.
    new.__dict__ = {key: value.copy() if isinstance(value, dict) else value for key, value in old.__dict__.items()}
    attend = Attend(method, kv_heads=old.num_heads, width=old.head_dim, max_len=max_len, eval_draw=eval_draw)
    new.add_module("attend", attend.to(_device(old)).train(old.training))
    setattr(parent, child, new)
    undo: list[Undo] = [Put(parent, child, old)]
    if isinstance(parent, nn.TransformerEncoderLayer):
        # Its fused path for evaluation is softmax attention: kept away by this mark, as in our own layer.
        undo.append(Put(parent, "activation_relu_or_gelu", parent.activation_relu_or_gelu))
        parent.activation_relu_or_gelu = 0
        for outer in model.modules():
            if isinstance(outer, nn.TransformerEncoder) and parent in list(outer.layers) and outer.use_nested_tensor:
                undo.append(Put(outer, "use_nested_tensor", True))
                outer.use_nested_tensor = False
    note = f"dropout {old.dropout} of attention weights is not applied" if old.dropout else ""
    return undo, note


def _device(module: nn.Module) -> torch.device:
    first = next(module.parameters(), None)
    return torch.device("cpu") if first is None else first.device
