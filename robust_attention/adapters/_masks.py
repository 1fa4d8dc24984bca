"""Other libraries' masks as ours."""

import weakref
from typing import NamedTuple

import torch
from torch import Tensor


def may_look(name: str, mask: Tensor) -> Tensor:
    """Boolean, True where a query may look, from a boolean mask of that meaning or an additive one."""
    if mask.dtype == torch.bool:
        return mask
    least = torch.finfo(mask.dtype).min
    if not torch.compiler.is_compiling() and not bool(((mask == 0) | (mask <= least)).all()):
        raise ValueError(
            f"{name} must be boolean, or additive with 0 and -inf (or the least number) only, got other numbers; "
            "biases on single pairs have no meaning for robust densities"
        )
    return mask == 0


class Read(NamedTuple):
    """What a mask `[B, 1, T, S]` turned out to be."""

    mask: Tensor | None
    is_causal: bool
    keys: int
    """Keys that any query sees: a static cache is longer than that."""


_last: list[tuple[weakref.ref[Tensor], int, Read]] = []


def read(mask: Tensor | None, queries: int, keys: int) -> Read:
    """Recognise padding and causal masks, which have quicker ways than a mask of every pair.

    A model passes the same mask to all of its layers: it is looked at once. Rows that see nothing are not compared.
    Anything else, as packed documents, chunks or windows, stays the mask of every pair that it is.
    """
    if mask is None or torch.compiler.is_compiling():
        return Read(mask, False, keys)
    # A mask that was written to is another mask; tensors of inference mode do not count their changes.
    version = -1 if mask.is_inference() else mask._version
    if version >= 0 and _last and _last[0][0]() is mask and _last[0][1] == version:
        return _last[0][2]
    result = _read(may_look("attention_mask", mask), queries)
    _last[:] = [(weakref.ref(mask), version, result)]
    return result


def _read(mask: Tensor, queries: int) -> Read:
    last = mask[:, :, -1:, :]
    seen = mask.flatten(0, 2).any(0).nonzero()
    keys = int(seen[-1]) + 1 if len(seen) else 1
    mask, last = mask[..., :keys], last[..., :keys]
    if queries == 1 or mask.shape[-2] == 1:
        return Read(last, False, keys)
    if mask.shape[1] != 1:
        return Read(mask, False, keys)
    if bool((mask == last).all()):
        return Read(None if bool(last.all()) else last, False, keys)
    shift = keys - queries
    if shift >= 0:
        causal = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril(shift)
        # A query that sees nothing is padding: causal or not, its output has no meaning.
        if bool(((mask == (causal & last)) | ~mask.any(-1, keepdim=True)).all()):
            return Read(None if bool(last.all()) else last, True, keys)
    return Read(mask, False, keys)
