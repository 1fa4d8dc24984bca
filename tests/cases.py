"""Every registered method in every example setting, with the tensors it owns: what the laws range over."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import robust_attention as ra

METHODS = [
    pytest.param(method, id=f"{name}-{number}")
    for name, cls in ra.methods().items()
    for number, method in enumerate(cls.examples())
]
every_method = pytest.mark.parametrize("method", METHODS)


@dataclass
class Problem:
    """Inputs of one call. `attend` runs it, with any of the inputs replaced."""

    method: ra.Method
    q: Tensor
    k: Tensor
    v: Tensor
    owned: dict[str, Tensor]

    def attend(self, **changes: object) -> Tensor:
        call: dict[str, object] = {"q": self.q, "k": self.k, "v": self.v, **self.owned, **changes}
        return self.method.attend(call.pop("q"), call.pop("k"), call.pop("v"), **call)  # type: ignore[arg-type]

    def map(self, change: Callable[[Tensor], Tensor]) -> "Problem":
        owned = {n: change(x) if x.is_floating_point() else x for n, x in self.owned.items()}
        return Problem(self.method, change(self.q), change(self.k), change(self.v), owned)


def problem(
    method: ra.Method,
    B: int = 2,
    H: int = 4,
    Hkv: int = 2,
    T: int = 9,
    S: int = 9,
    D: int = 8,
    E: int = 6,
    seed: int = 0,
) -> Problem:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    q, k, v = normal(B, H, T, D), normal(B, Hkv, S, D), normal(B, Hkv, S, E)
    owned = {n: x.double() for n, x in method.initial_tensors(Hkv, D, T, S, g).items()}
    return Problem(method, q, k, v, owned)


def masks(B: int, T: int, S: int, seed: int = 0) -> dict[str, dict[str, object]]:
    """Arguments of `attend` for every masking situation; each query of the padded ones sees at least key 0."""
    g = torch.Generator().manual_seed(seed)
    padding = torch.arange(S) < torch.randint(1, S + 1, (B, 1), generator=g)
    arbitrary = torch.rand(B, 1, T, S, generator=g) < 0.5
    return {
        "full": {},
        "padding": {"attn_mask": padding[:, None, None, :]},
        "arbitrary": {"attn_mask": arbitrary},
        "causal": {"is_causal": True},
        "causal+padding": {"is_causal": True, "attn_mask": padding[:, None, None, :]},
    }
