"""KIRWLS weights from Grams that never exist at once: tiles of rows, one after the other.

The two Grams belong to unit keys (marginal) and to keys with values (joint):

    G_mj = exp(−‖k̂_m − k̂_j‖²/(2σ_w²)),    G^joint_mj = G_mj · exp(−‖v_m − v_j‖²/(2σ_v²))

Each is symmetric, so that where every query sees the same points each pair is met once. A tile is one product and one
exponential: −‖x‖²/2 of either point rides along as two more columns (−∞ for hidden points). For inference: nothing
here has a gradient.

Numerics: a distance of values cancels if they lie far from 0. Products of values are float64 where that could show
(beyond ‖v‖²/(2σ_v²) = 16, head by head; always for prefixes, where a far value to come must not change the past).
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from robust_attention.robust.gram import matmul
from robust_attention.robust.kirwls import reweight
from robust_attention.robust.losses import Loss

_NEAR = 16.0


class Points(NamedTuple):
    """P problems of S points, prepared: rows @ columnsᵀ is the exponent of a Gram."""

    key_rows: Tensor
    """[k̂/σ_w, −‖k̂‖²/(2σ_w²), 1], `[P, S, D + 2]`; −∞ in the place of the halves of hidden points."""
    key_columns: Tensor
    """[k̂/σ_w, 1, −‖k̂‖²/(2σ_w²)], likewise."""
    value_rows: Tensor
    value_columns: Tensor
    visible: Tensor
    """1 where a point counts, 0 where it is hidden, `[P, S]`."""


def points(
    unit_keys: Tensor, values: Tensor, visible: Tensor, variance: float, value_variance: float, *, exact: bool
) -> Points:
    """Prepare `[P, S, D]`, `[P, S, E]` and boolean `[P, S]`; `exact` takes values to float64."""
    seen = visible.to(unit_keys.dtype)
    hidden = torch.where(visible, 0.0, -torch.inf).to(unit_keys.dtype)
    key_rows, key_columns = _sides(unit_keys / variance**0.5, hidden)
    scaled = (values.double() if exact else values) / value_variance**0.5
    value_rows, value_columns = _sides(scaled, torch.zeros_like(scaled[..., 0]))
    return Points(key_rows, key_columns, value_rows, value_columns, seen)


def _sides(x: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    half = x.square().sum(-1, keepdim=True) / -2 + hidden[..., None]
    one = torch.ones_like(half)
    return torch.cat((x, half, one), -1), torch.cat((x, one, half), -1)


def gram_tiles(p: Points, start: int, stop: int, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Both Grams for the rows start … stop and the columns first … last; 0 where either point is hidden."""
    exponent = matmul(p.key_rows[..., start:stop, :], p.key_columns[..., first:last, :].mT)
    joint = matmul(p.value_rows[..., start:stop, :], p.value_columns[..., first:last, :].mT)
    joint = joint.to(exponent.dtype).add_(exponent)
    return exponent.exp_(), joint.exp_()


def kirwls_weights(
    unit_keys: Tensor,
    values: Tensor,
    visible: Tensor,
    variance: float,
    value_variance: float,
    loss: Loss,
    sweeps: int,
    rows: int,
) -> tuple[Tensor, Tensor]:
    """Marginal and joint weights `[P, S]` of problems whose every query sees the same points."""
    settings = variance, value_variance
    near = values.square().sum(-1).amax(-1) <= 2 * value_variance * _NEAR
    marginal = unit_keys.new_empty(unit_keys.shape[:-1])
    joint = torch.empty_like(marginal)
    for exact in (False, True):
        index = (near != exact).nonzero().squeeze(-1)
        if len(index):
            part = points(unit_keys[index], values[index], visible[index], *settings, exact=exact)
            marginal[index], joint[index] = _kirwls(part, loss, sweeps, rows)
    return marginal, joint


def row_sums(p: Points, rows: int) -> tuple[Tensor, Tensor]:
    """Σ_m G_mj over the visible points of both Grams, `[P, S]`; 0 for hidden points."""
    sums = [torch.zeros_like(p.visible), torch.zeros_like(p.visible)]
    size = p.visible.shape[-1]
    for first in range(0, size, rows):
        last = min(size, first + rows)
        for tile, total in zip(gram_tiles(p, first, last, first, size), sums, strict=True):
            total[..., first:last] += tile.sum(-1)
            # The mirror image of all but the tile's own square is met here too.
            total[..., last:] += tile[..., last - first :].sum(-2)
    return sums[0], sums[1]


def _kirwls(p: Points, loss: Loss, sweeps: int, rows: int) -> tuple[Tensor, Tensor]:
    number = p.visible.sum(-1, keepdim=True).clamp(min=1)
    start = p.visible / number
    weights = [start, start]
    for sweep in range(sweeps):
        overlaps = [r / number for r in row_sums(p, rows)] if sweep == 0 else _products(p, weights, rows)
        weights = [
            reweight(1 - 2 * r + (w * r).sum(-1, keepdim=True), p.visible, loss, start)
            for r, w in zip(overlaps, weights, strict=True)
        ]
    return weights[0], weights[1]


def _products(p: Points, weights: list[Tensor], rows: int) -> list[Tensor]:
    """G ω of both Grams, each with weights of its own."""
    size = p.visible.shape[-1]
    found = [torch.zeros_like(p.visible), torch.zeros_like(p.visible)]
    for first in range(0, size, rows):
        last = min(size, first + rows)
        for tile, weight, product in zip(gram_tiles(p, first, last, first, size), weights, found, strict=True):
            product[..., first:last] += (tile @ weight[..., first:, None]).squeeze(-1)
            product[..., last:] += (weight[..., None, first:last] @ tile[..., last - first :]).squeeze(-2)
    return found


def causal_weights(p: Points, loss: Loss, rows: int, begin: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
    """One sweep for every prefix: (start, stop, marginal, joint) with weights `[P, stop − start, stop]`.

        C_ij = Σ_{m≤i} G_mj,  T_i = Σ_{j≤i} C_ij,  d²_ij = 1 − 2C_ij/n_i + T_i/n_i²

    Prefixes that end before `begin` are summed but not given.
    """
    size = p.visible.shape[-1]
    sums = [torch.zeros_like(p.visible), torch.zeros_like(p.visible)]
    seen = p.visible.cumsum(-1)
    position = torch.arange(size, device=seen.device)
    for start in range(0, size, rows):
        stop = min(size, start + rows)
        number = seen[..., start:stop, None].clamp(min=1)
        held = p.visible[..., None, :stop] * (position[:stop] <= position[start:stop, None])
        weights = []
        for tile, total in zip(gram_tiles(p, start, stop, 0, stop), sums, strict=True):
            # What the columns of this tile got from earlier rows, they have not been told yet.
            total[..., start:stop] = tile[..., :start].sum(-1)
            if stop > begin:
                running = tile.cumsum(-2) + total[..., None, :stop]
                whole = (running * held).sum(-1, keepdim=True)
                squared = 1 - 2 * running / number + whole / number.square()
                weights.append(reweight(squared, held, loss, held / number))
            total[..., :stop] += tile.sum(-2)
        if stop > begin:
            yield start, stop, weights[0], weights[1]
