"""Hugging Face transformers (5 and later): attention functions by name, and models swapped in place."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from robust_attention.adapters._masks import read
from robust_attention.adapters._torchvision import import_torchvision
from robust_attention.adapters._undo import Drop, SwitchBack, Undo
from robust_attention.nn import Attend
from robust_attention.nn.attend import EvalDraw
from robust_attention.ops import Method, methods

NAME = "robust_attention"
"""The implementation that `robustify` switches a model to; it asks each attention module for its own method."""
CHILD = "robust_attend"
"""Where an attention module keeps its `Attend`."""


_UNFIT = ("position_bias", "softcap", "s_aux")
"""What some models add to logits: it has no meaning for a density."""


def register() -> tuple[str, ...]:
    """Make every method known to transformers by its name: `from_config(config, attn_implementation="rkde")`.

    Methods that own tensors to learn need `robustify`, which makes them before an optimiser looks for parameters.
    """
    names = tuple(name for name, cls in methods().items() if not _owns(cls()))
    for name in names:
        register_method(name, methods()[name]())
    return names


def register_method(name: str, method: Method, eval_draw: EvalDraw = "fixed") -> None:
    """Make one method, with settings, known to transformers under a name of your own."""
    if _owns(method):
        raise ValueError(
            f"{type(method).__name__} owns tensors to learn, which a name cannot hold; use ra.robustify(model, method)"
        )

    def attend(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if getattr(getattr(module, CHILD, None), "method", None) != method:  # none yet, or that of another name
            made = Attend(method, kv_heads=1, width=1, eval_draw=eval_draw)
            module.add_module(CHILD, made.to(args[0].device).train(module.training))
        return _attend(module, *args, **kwargs)

    _register(name, attend)


def _register(name: str, function: Callable[..., Any]) -> None:
    import_torchvision()
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise ImportError("transformers 5 or later is not installed; pip install 'robust-attention[hf]'") from error

    def mask(*args: Any, **kwargs: Any) -> Tensor | None:
        # Without a mask function of the same name, padding would be dropped without a word.
        kwargs["allow_is_causal_skip"] = False
        made: Tensor | None = sdpa_mask(*args, **kwargs)
        return made

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, mask)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """transformers' attention function: `[B, H, T, D] -> [B, T, H, E]`, and coefficients where they are asked for."""
    attend = getattr(module, CHILD, None)
    if attend is None:  # a layer that keeps its softmax
        from transformers import AttentionInterface

        plain = AttentionInterface()["sdpa"]
        out: tuple[Tensor, None] = plain(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
        return out
    for name in _UNFIT:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"robust attention has no {name}, which {type(module).__name__} passes; "
                "leave these layers out: ra.robustify(model, method, layers=...)"
            )
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)
    found = read(attention_mask, query.shape[2], key.shape[2])
    key, value = key[:, :, : found.keys], value[:, :, : found.keys]
    done = attend(query, key, value, found.mask, found.is_causal)
    weights = None
    if kwargs.get("output_attentions") or getattr(getattr(module, "config", None), "output_attentions", False):
        owned = attend.tensors(query.shape[2], key.shape[2], key.device)
        weights = attend.method.coefficients(query, key, value, found.mask, found.is_causal, **owned)
    return done.transpose(1, 2).contiguous(), weights


def _sizes(module: nn.Module, config: Any) -> tuple[int, int]:
    """Heads and width of the keys, for tensors that a method owns."""
    # Configurations give GPT-2's n_head and n_embd these names too.
    heads = getattr(config, "num_attention_heads", None)
    if not isinstance(heads, int):
        raise ValueError(
            f"num_attention_heads of the configuration must be one number, got {heads!r}; "
            "use a method without tensors of its own"
        )
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    found = [getattr(where, name, None) for where in (module, config) for name in ("qk_head_dim", "head_dim")]
    width = next((x for x in found if isinstance(x, int)), config.hidden_size // heads)
    return kv_heads, width


def _owns(method: Method) -> bool:
    import torch

    return bool(method.initial_tensors(1, 1, 1, 1, torch.Generator()))


def roots(model: nn.Module) -> list[nn.Module]:
    """The transformers models in a model, outermost first; none inside another."""
    from transformers import PreTrainedModel

    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, PreTrainedModel) and not inside:
            found.append(name)
    return [model.get_submodule(name) for name in found]


def find(model: nn.Module) -> tuple[list[str], dict[str, str]]:
    """Names of the attention modules that go through the interface, and of others with the reason."""
    found, refused = [], {}
    for name, module in model.named_modules():
        forward = inspect.unwrap(type(module).forward)
        if "ALL_ATTENTION_FUNCTIONS" in getattr(getattr(forward, "__code__", None), "co_names", ()):
            extra = _extra_logits(module)
            if extra is None:
                found.append(name)
            else:
                refused[name] = (
                    f"{type(module).__name__} adds {extra} to its logits, which has no meaning for a density"
                )
        elif type(module).__name__.endswith("Attention") and any(
            isinstance(child, nn.Linear) and child_name in ("q", "query", "q_proj", "qkv", "c_attn", "query_key_value")
            for child_name, child in module.named_children()
        ):
            refused[name] = f"{type(module).__name__} does not go through transformers' attention interface"
    return found, refused


def _extra_logits(module: nn.Module) -> str | None:
    """What a module adds to its logits, or None."""
    for name in ("sinks", "relative_attention_bias", "relative_position_bias", "attn_logit_softcapping"):
        if getattr(module, name, None) is not None:
            return name
    return "relative attention bias" if getattr(module, "has_relative_attention_bias", False) else None


def switch(model: nn.Module) -> list[Undo]:
    """Switch every transformers model inside to our implementation; how to switch back."""
    _register(NAME, _attend)
    undo: list[Undo] = []
    for root in roots(model):
        old: str = root.config._attn_implementation  # type: ignore[union-attr, assignment]
        step = SwitchBack(root, "sdpa" if old == NAME else old)
        step.take(NAME)
        undo.append(step)
    return undo


def swap(
    model: nn.Module, name: str, method: Method, eval_draw: EvalDraw, max_len: int | None
) -> tuple[list[Undo], str]:
    """Give one attention module its method; how to undo it, and a note."""
    module = model.get_submodule(name)
    config: Any = getattr(module, "config", None)
    kv_heads, width = _sizes(module, config) if _owns(method) else (1, 1)
    attend = Attend(method, kv_heads=kv_heads, width=width, max_len=max_len, eval_draw=eval_draw)
    first = next(module.parameters(), None)
    module.add_module(CHILD, attend.to("cpu" if first is None else first.device).train(module.training))
    dropped = [
        getattr(config, key)
        for key in ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
        if getattr(config, key, 0)
    ]
    note = f"dropout {dropped[0]} of attention weights is not applied" if dropped else ""
    return [Drop(module, CHILD)], note
