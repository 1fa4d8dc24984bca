"""Decoding: what a new token needs besides the keys and values that are cached anyway."""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Cache:
    """Running sums of one layer, made by `method.cache()` and moved on by `method.decode`.

    It lives beside the keys and values (whoever keeps those, keeps this). A fresh one may be passed at any time, after
    old keys were dropped for example: it is then rebuilt from the keys and values.
    """

    length: int = 0
    """Keys that the sums know of."""
    state: dict[str, Tensor] = field(default_factory=dict)
    """Tensors with the batch as first dimension."""

    def reorder(self, index: Tensor) -> None:
        """Keep the samples `index` (beam search)."""
        self.state = {name: x.index_select(0, index.to(x.device)) for name, x in self.state.items()}


def check_decode(q: Tensor, k: Tensor, v: Tensor, cache: Cache, padding: Tensor | None) -> int:
    """How many keys came before the new tokens."""
    if q.dim() != 4 or k.dim() != 4 or q.shape[2] == 0:
        raise ValueError(
            f"decode takes the queries of at least one new token [B, H, T, D] and all keys [B, Hkv, S, D], "
            f"got q {list(q.shape)} and k {list(k.shape)}; pass the keys of the past too"
        )
    past = k.shape[2] - q.shape[2]
    if past < 0:
        raise ValueError(
            f"k must hold the past and the new tokens, got {k.shape[2]} keys for {q.shape[2]} queries; "
            "append the new keys before the call"
        )
    if cache.length not in (0, past):
        raise ValueError(
            f"the cache must know the {past} keys before the {q.shape[2]} new ones, got a cache of {cache.length}; "
            "pass a fresh method.cache()"
        )
    for name, x in cache.state.items():
        if x.shape[0] != k.shape[0]:
            raise ValueError(
                f"the cache must be of the batch of k, {k.shape[0]}, got {x.shape[0]} in its {name}; "
                "call cache.reorder(index) when samples are dropped or repeated"
            )
    if padding is not None and (padding.dtype != torch.bool or padding.shape != (k.shape[0], k.shape[2])):
        raise ValueError(
            f"padding must be boolean [B, S] = {[k.shape[0], k.shape[2]]} with True for real keys, "
            f"got {padding.dtype} {list(padding.shape)}; pass it for all keys, the past ones included"
        )
    return past
