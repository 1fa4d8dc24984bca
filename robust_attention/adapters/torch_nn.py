"""Plain torch.nn: MultiheadAttention, alone or inside a TransformerEncoderLayer."""

from torch import nn

from robust_attention.adapters._undo import Undo, all_of
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


def swap(model: nn.Module, name: str, method: Method, eval_draw: EvalDraw, max_len: int | None) -> tuple[Undo, str]:
    """Put our module in its place, with the very parameters of the old one; how to undo it, and a note."""
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = model.get_submodule(name)
    assert isinstance(old, nn.MultiheadAttention)
    new = MultiheadAttention.__new__(MultiheadAttention)
    # The same parameters and hooks, in containers of its own: what is added to the new module does not reach the old.
    new.__dict__ = {key: value.copy() if isinstance(value, dict) else value for key, value in old.__dict__.items()}
    attend = Attend(method, kv_heads=old.num_heads, width=old.head_dim, max_len=max_len, eval_draw=eval_draw)
    new.add_module("attend", attend.to(old.out_proj.weight.device).train(old.training))
    setattr(parent, child, new)
    undo: list[Undo] = [lambda: setattr(parent, child, old)]
    if isinstance(parent, nn.TransformerEncoderLayer):
        # Its fused path for evaluation is softmax attention: kept away by this mark, as in our own layer.
        mark = parent.activation_relu_or_gelu
        parent.activation_relu_or_gelu = 0
        undo.append(lambda: setattr(parent, "activation_relu_or_gelu", mark))
        for outer in model.modules():
            if isinstance(outer, nn.TransformerEncoder) and parent in list(outer.layers) and outer.use_nested_tensor:
                outer.use_nested_tensor = False
                undo.append(lambda outer=outer: setattr(outer, "use_nested_tensor", True))  # type: ignore[misc]
    note = f"dropout {old.dropout} of attention weights is not applied" if old.dropout else ""
    return (lambda: all_of(undo)), note
