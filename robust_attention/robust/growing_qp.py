"""Simplex QPs whose points come one after the other (decoding, causal prefixes): O(n²) a point instead of O(n³).

With A the support of the last answer x and H = (G_AA)⁻¹, a point more takes a few products with G and H:

    the new row g of G:  c ← c + g,  q = (β/n) c
    minimise on A:       x ← x + H r + λ H1,  r = (q − Gx)_A,  λ such that Σx = 1
    exchange:            what has x_j < 0 leaves A, what is outside with (Gx − q)_j < λ enters, several at once
        s enters:        H ← H + w wᵀ/d,  w = [H g_s; −1],  d = 1 − g_sᵀ H g_s     (one row more of a factor)
        s leaves:        H ← H − H_s H_sᵀ/H_ss

Where every point counts, because the optimum is inside the simplex, x is the closed form (β/n)1 − (β−1) h/(1ᵀh) with
h = G⁻¹1. Elsewhere few points change at a time. An answer counts when its Frank–Wolfe gap is small; a problem without
one after some rounds goes to the solver (`qp_solver`), alone, and its H is made anew.

Numerics: everything is float64. The residual r is taken from G itself, so errors that H gathers do not reach the
answer; where there are too many of them the gap shows it, and the solver takes over.
Memory: 16 C² bytes a programme, C the number of points rounded up to a multiple of 64.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional as F

from robust_attention.robust.kirwls import uniform
from robust_attention.robust.qp_solver import chunks, factored, restricted, solve_batch

_BLOCK = 64  # points that room is made for at a time
_CHANGES = 8  # points that may leave, and enter, in one round: fixed, so that no problem's shapes depend on another's
_ROUNDS = 8
_GROUP_ENTRIES = {"cpu": 2**20}  # entries of the Grams that take their rounds together
_LARGEST_GROUP = 2**28


@dataclass
class GrowingQP:
    """P programmes over the points met so far, in buffers with room for C of them; moved on in place."""

    gram: Tensor
    """G, `[P, C, C]`, 0 where no point is yet."""
    inverse: Tensor
    """H, `[P, C, C]`, 0 outside the support."""
    support: Tensor
    """A, bool `[P, C]`. The last place is never taken: it stands for "none" where places are listed."""
    visible: Tensor
    """Points that count, bool `[P, C]`."""
    sums: Tensor
    """c_j = Σ_m G_mj over the visible points m, `[P, C]`."""
    weights: Tensor
    """x, `[P, C]`, 0 outside the support."""
    image: Tensor
    """Gx, `[P, C]`, kept up to date on the support."""

    @classmethod
    def start(cls, gram: Tensor, visible: Tensor, beta: float, aim: float) -> Self:
        """From a Gram `[P, n, n]` and its visible points `[P, n]`; n may be 0."""
        room = _BLOCK - gram.shape[-1] % _BLOCK
        wide, seen = F.pad(gram.double(), (0, room, 0, room)), F.pad(visible, (0, room))
        sums = (wide * seen[:, None]).sum(-1)
        found = cls(
            gram=wide,
            inverse=torch.zeros_like(wide),
            support=torch.zeros_like(seen),
            visible=seen,
            sums=sums,
            weights=torch.zeros_like(sums),
            image=torch.zeros_like(sums),
        )
        found._solve(seen.any(-1).nonzero().squeeze(-1), beta, aim)
        return found

    def grow(self, row: Tensor, seen: Tensor, beta: float, aim: float) -> tuple[Tensor, Tensor]:
        """Take in one point.

        Args:
            row: its row of the Gram `[P, n]`, its own entry (1) last.
            seen: whether it counts, bool `[P]`.
            beta: scale β ≥ 1 of the mean, the same in every call.
            aim: Frank–Wolfe gap to work towards.
        Returns: weights `[P, n]` and gaps `[P]`, float64.
        """
        size = row.shape[-1]
        self._append(row.double(), seen)
        mean = uniform(self.visible, torch.float64)
        target = beta * self.sums / self.visible.sum(-1, keepdim=True).clamp(min=1)
        # Where the mean itself is optimal (β = 1, one point, all points equal) it is the answer among many.
        gap = _gap((1 / beta - 1) * target, mean, self.visible)
        flat = gap <= 4 * size * torch.finfo(torch.float64).eps
        found = torch.full_like(gap, torch.inf)
        step = max(1, _GROUP_ENTRIES.get(row.device.type, _LARGEST_GROUP) // self.gram.shape[-1] ** 2)
        for first in range(0, len(row), step):
            part = slice(first, first + step)
            found[part] = self._rounds(part, target[part], ~flat[part], aim)
        missed = (~flat & found.isinf()).nonzero().squeeze(-1)
        if len(missed):
            self._solve(missed, beta, aim)
            found[missed] = _gap(self.image[missed] - target[missed], self.weights[missed], self.visible[missed])
        weights = torch.where(flat[:, None], mean, self.weights)
        return weights[:, :size], torch.where(flat, gap, found).clamp(min=0)

    def _append(self, row: Tensor, seen: Tensor) -> None:
        new = row.shape[-1] - 1
        if row.shape[-1] == self.gram.shape[-1]:
            self.gram, self.inverse = (F.pad(x, (0, _BLOCK, 0, _BLOCK)) for x in (self.gram, self.inverse))
            for name in ("support", "visible", "sums", "weights", "image"):
                setattr(self, name, F.pad(getattr(self, name), (0, _BLOCK)))
        self.gram[:, new, : new + 1] = row
        self.gram[:, : new + 1, new] = row
        self.visible[:, new] = seen
        self.sums[:, : new + 1] += row * seen[:, None]
        self.sums[:, new] = (row * self.visible[:, : new + 1]).sum(-1)

    def _rounds(self, part: slice, target: Tensor, wanted: Tensor, aim: float) -> Tensor:
        """Minimise and exchange until the gaps are reached. Returns the gaps; inf where they are not."""
        weights, image, support, held = self.weights[part], self.image[part], self.support[part], self.visible[part]
        found = torch.full_like(target[:, 0], torch.inf)
        going = wanted & support.any(-1)
        for left in reversed(range(_ROUNDS)):
            if not going.any():
                break
            one = support.double()
            moved = torch.stack(((target - image) * one, one), 1) @ self.inverse[part]
            short, of_one = moved.unbind(1)
            price = (1 - (weights + short).sum(-1, keepdim=True)) / of_one.sum(-1, keepdim=True)
            weights.copy_(torch.where(going[:, None], weights + short + price * of_one, weights))
            image.copy_(torch.where(going[:, None], _times(weights, self.gram[part]), image))
            slope = image - target
            leaving = support & (weights < 0)
            gap = _gap(slope, weights, held)
            good = going & ~leaving.any(-1) & (gap <= aim)
            found = torch.where(good, gap, found)
            going = going & ~good
            if left and going.any():
                price = (slope * weights).sum(-1, keepdim=True)
                entering = held & ~support & (slope < price - aim)
                going = going & self._exchange(part, leaving & going[:, None], entering & going[:, None], slope)
        return found

    def _exchange(self, part: slice, leaving: Tensor, entering: Tensor, slope: Tensor) -> Tensor:
        """Change the support, and H with it, by at most `_CHANGES` points each way. Returns where that went well."""
        gram, inverse, support = self.gram[part], self.inverse[part], self.support[part]
        weights, image = self.weights[part], self.image[part]
        out, gone = _worst(leaving, weights)
        into, come = _worst(entering, slope)
        # H − XᵀX is the inverse without those that leave.
        rows = _rows(inverse, out)
        x, well = _divide(_columns(rows, out), gone, rows)
        support.scatter_(1, out, False)
        # With those that enter: + VᵀV.
        wanted = _rows(gram, into)
        near = wanted * support[:, None] * come[..., None]
        solved = (near @ inverse - (near @ x.mT) @ x) * support[:, None]
        schur = _columns(wanted, into) - near @ solved.mT
        v, well_too = _divide(schur, come, solved.scatter(2, into[..., None], -come[..., None].double()))
        good = well & well_too
        both = torch.cat((x, v), 1) * good[:, None, None]
        inverse.baddbmm_(both.mT, torch.cat((-x, v), 1) * good[:, None, None])
        places = out[..., None]
        inverse.scatter_(1, places.expand(-1, -1, inverse.shape[-1]), 0)
        inverse.scatter_(2, places.mT.expand(-1, inverse.shape[-1], -1), 0)
        support.scatter_(1, into, come & good[:, None])
        image -= (_rows(gram, out) * weights.gather(1, out)[..., None]).sum(1)
        weights.scatter_(1, out, 0)
        return good

    def _solve(self, index: Tensor, beta: float, aim: float) -> None:
        """Some problems from nothing: weights by the solver, and H of their support."""
        for part in chunks(index, self.gram.shape[-1]):
            gram, held = self.gram[part], self.visible[part]
            weights = solve_batch(restricted(gram, held), held, beta, aim)
            support = weights > 0
            inverse = torch.cholesky_inverse(factored(restricted(gram, support)))
            self.weights[part], self.image[part], self.support[part] = weights, _times(weights, gram), support
            self.inverse[part] = torch.where(support[:, :, None] & support[:, None, :], inverse, 0)


def prefix_weights(gram: Tensor, index: Tensor, numbers: Tensor, beta: float, aim: float) -> Tensor:
    """Weights of the first n points, for the Grams `index` of `[P, S, S]` and each n of their rows of numbers `[p, R]`.

    Returns: `[p, R, S]`, float64; rows of 0 for n = 0.
    """
    size = gram.shape[-1]
    found = gram.new_zeros(*numbers.shape, size)
    step = max(1, _LARGEST_GROUP // 2 // size**2)
    for first in range(0, len(index), step):
        part = slice(first, first + step)
        rows, number = gram[index[part]], numbers[part]
        growing = GrowingQP.start(rows[:, :0, :0], torch.ones_like(number[:, :0], dtype=torch.bool), beta, aim)
        everyone = torch.ones_like(number[:, 0], dtype=torch.bool)
        table = rows.new_zeros(len(rows), size + 1, size)
        for n in range(1, size + 1):
            table[:, n, :n], _ = growing.grow(rows[:, n - 1, :n], everyone, beta, aim)
        found[part] = table.gather(1, number[..., None].expand(-1, -1, size))
    return found


def _gap(slope: Tensor, weights: Tensor, held: Tensor) -> Tensor:
    least = torch.where(held, slope, torch.inf).amin(-1)
    return (slope * weights).sum(-1) - torch.where(least.isinf(), 0, least)


def _times(vector: Tensor, matrix: Tensor) -> Tensor:
    # Two rows: with one, a batch of one is multiplied by another routine. Columns would take three times as long.
    return (torch.stack((vector, vector), 1) @ matrix)[:, 0]


def _worst(mask: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Places `[P, K]` of the lowest values under the mask, and which of them are meant; the others are the last one."""
    lowest, place = torch.where(mask, value, torch.inf).topk(_CHANGES, largest=False)
    meant = lowest < torch.inf
    return torch.where(meant, place, mask.shape[-1] - 1), meant


def _rows(matrix: Tensor, places: Tensor) -> Tensor:
    return matrix.gather(1, places[..., None].expand(-1, -1, matrix.shape[-1]))


def _columns(rows: Tensor, places: Tensor) -> Tensor:
    return rows.gather(2, places[:, None].expand(-1, rows.shape[1], -1))


def _divide(block: Tensor, meant: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """L⁻¹ rows with block = LLᵀ, in the places that are meant; 0 elsewhere. And whether the block could be factored."""
    inside = meant[:, :, None] & meant[:, None, :]
    eye = torch.eye(block.shape[-1], dtype=block.dtype, device=block.device)
    factor, failed = torch.linalg.cholesky_ex(torch.where(inside, block, eye))
    good = failed == 0
    factor = torch.where(good[:, None, None], factor, eye)
    solved = torch.linalg.solve_triangular(factor, rows * meant[..., None], upper=False)
    return solved * good[:, None, None], good
