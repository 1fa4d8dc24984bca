"""What a method is, and the registry that puts it under every law, the command line and the docs."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch import Tensor

from robust_attention.ops._cache import Cache, check_decode
from robust_attention.typing import Impl

_registry: dict[str, type["Method"]] = {}


@dataclass(frozen=True)
class Method(ABC):
    """An attention: settings as fields, one verb, `attend`."""

    equation: ClassVar[str]
    """Where it is defined: an equation of the paper, or the paper of a baseline."""
    summary: ClassVar[str]
    """One line for tables."""
    formula: ClassVar[str]
    """The output h_i in one line."""
    stochastic: ClassVar[bool] = False
    """Draws something at random (from its own seed): `draw` gives it, and `attend` takes it as `counts`."""
    key_tensors: ClassVar[tuple[str, ...]] = ()
    """Which of the tensors that `attend` takes besides q, k, v run over the keys in their last dimension: whoever
    permutes keys must permute these too."""

    constant_tensors: ClassVar[tuple[str, ...]] = ()
    """Which of those tensors are drawn once and not learnt."""

    def __post_init__(self) -> None:
        """Nothing to check here; settings of a subclass are checked by its own, which calls this one."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        impl: Impl = "auto",
    ) -> Tensor:
        """Attend: `[B, H, T, D] × [B, Hkv, S, D] × [B, Hkv, S, E] → [B, H, T, E]`.

        Args:
            attn_mask: boolean, True where a query may look; broadcasts to `[B, H, T, S]`.
            is_causal: hide the future; the last query is aligned with the last key. Combines with `attn_mask`.
            impl: "auto" chooses; "reference" runs the plain formula. An explicit one runs or raises.
        Numerics: 16-bit inputs are computed in float32 and rounded once at the end. A query that sees no key gets 0;
            one that sees NaN or Inf gets NaN, and no other query is touched by it.
        """

    def cache(self) -> Cache:
        """An empty cache for `decode`."""
        return Cache()

    @torch.no_grad()
    def decode(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, padding: Tensor | None = None, **owned: Any
    ) -> Tensor:
        """Attend from the newest tokens to all keys: the last rows of `attend(..., is_causal=True)` alone.

        Args:
            q: `[B, H, T, D]` of the T newest tokens, usually 1.
            k, v: of all tokens, the newest included.
            cache: of this layer; it is moved on.
            padding: `[B, S]`, True where a key is real.
            owned: tensors that `attend` takes besides these.
        Cost: O(S·D) a token where the method's page does not say otherwise. No gradient.
        """
        past = check_decode(q, k, v, cache, padding)
        out = self._decode(q, k, v, cache, padding, past, **owned)
        cache.length = k.shape[2]
        return out

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, padding: Tensor | None, past: int, **owned: Any
    ) -> Tensor:
        # Nothing to remember: the newest query on its own looks at every key once.
        mask = None if padding is None else padding[:, None, None]
        return self.attend(q, k, v, attn_mask=mask, is_causal=True, **owned)

    def coefficients(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **owned: Any
    ) -> Tensor:
        """A `[B, H, T, S]` with h_i = Σ_j A_ij v_j: how much each value counts in each output.

        Rows need not sum to 1 where numerator and denominator have weights of their own.
        """
        # The identity as values gives them, where values have no other part in the output.
        identity = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
        return self.attend(q, k, identity, attn_mask, is_causal, "reference", **owned)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Settings that the laws should hold for; the default one at least."""
        return (cls(),)

    def initial_tensors(
        self, kv_heads: int, width: int, queries: int, keys: int, generator: torch.Generator
    ) -> dict[str, Tensor]:
        """Sensible values of the tensors that `attend` takes besides q, k, v: what a module would start from."""
        return {}


M = TypeVar("M", bound=type[Method])


def register(name: str) -> Callable[[M], M]:
    """Class decorator: make a method known as `name`."""

    def add(cls: M) -> M:
        known = _registry.get(name)
        if known is not None:
            raise ValueError(f"method names must be unique, but {name!r} is {known.__qualname__}; choose another name")
        _registry[name] = cls
        return cls

    return add


def methods() -> dict[str, type[Method]]:
    """The registry: name → class, in alphabetical order."""
    return dict(sorted(_registry.items()))
