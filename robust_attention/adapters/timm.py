"""timm's vision transformers: its `Attention` with another attention inside, as a class or swapped in place."""

from functools import cache
from typing import Any

from torch import Tensor, nn

from robust_attention.adapters._masks import may_look
from robust_attention.adapters._torchvision import import_torchvision
from robust_attention.adapters._undo import Put, Undo
from robust_attention.nn import Attend
from robust_attention.nn.attend import EvalDraw
from robust_attention.ops import Method


@cache
def base() -> type[nn.Module]:
    """timm's attention, with our way through it."""
    import_torchvision()
    try:
        from timm.layers import Attention
    except ImportError as error:
        raise ImportError("timm is not installed; pip install 'robust-attention[timm]'") from error

    class TimmAttention(Attention):  # type: ignore[misc]
        """timm's projections, norms, gate and dropout of the output around a robust attention.

        Departs: dropout of attention weights (`attn_drop`) is not applied.
        """

        attend: Attend

        def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
            qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, self.head_dim))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mask = None if attn_mask is None else may_look("attn_mask", attn_mask)
            out = self.attend(self.q_norm(q), self.k_norm(k), v, mask, is_causal)
            out = self.norm(out.transpose(1, 2).flatten(2))
            if getattr(self, "gate", None) is not None:
                out = out * self.gate(x).sigmoid()
            done: Tensor = self.proj_drop(self.proj(out))
            return done

    return TimmAttention


def attention(method: Method, *, max_len: int | None = None, eval_draw: EvalDraw = "fixed") -> type[nn.Module]:
    """A class for timm's `attn_layer`: `timm.create_model("vit_tiny_patch16_224", attn_layer=attention(ra.RKDE()))`."""

    class RobustTimmAttention(base()):  # type: ignore[misc]
        def __init__(self, dim: int, num_heads: int = 8, **keywords: Any) -> None:
            super().__init__(dim, num_heads, **keywords)
            self.attend = Attend(method, kv_heads=num_heads, width=self.head_dim, max_len=max_len, eval_draw=eval_draw)

    RobustTimmAttention.__qualname__ = RobustTimmAttention.__name__ = f"{type(method).__name__}Attention"
    return RobustTimmAttention


def find(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Names of the attention modules, and of those that cannot be swapped with the reason."""
    from timm.layers import Attention

    found, refused = [], {}
    for name, module in model.named_modules():
        if type(module) is Attention:
            found.append(name)
        elif isinstance(module, base()):
            continue
        elif type(module).__module__.startswith("timm.") and "Attention" in type(module).__name__:
            refused[name] = (
                f"{type(module).__module__}.{type(module).__name__} is not supported, only timm.layers.Attention"
            )
    return found, refused


def swap(
    model: nn.Module, name: str, method: Method, eval_draw: EvalDraw, max_len: int | None
) -> tuple[list[Undo], str]:
    """Put our module in its place, with the very parameters of the old one; how to undo it, and a note."""
    parent_name, _, child = name.rpartition(".")
    parent, old = model.get_submodule(parent_name), model.get_submodule(name)
    new: Any = base().__new__(base())
    new.__dict__ = {key: value.copy() if isinstance(value, dict) else value for key, value in old.__dict__.items()}
    attend = Attend(method, kv_heads=old.num_heads, width=old.head_dim, max_len=max_len, eval_draw=eval_draw)  # type: ignore[arg-type]
    new.add_module("attend", attend.to(next((p.device for p in old.parameters()), "cpu")).train(old.training))
    setattr(parent, child, new)
    dropped = float(old.attn_drop.p)  # type: ignore[union-attr, arg-type]
    note = f"dropout {dropped} of attention weights is not applied" if dropped else ""
    return [Put(parent, child, old)], note
