"""Sanity checks of an evaluation under attack: whether its numbers can be true, or gradients are only hidden."""

import math
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

import torch
from torch import Tensor

from robust_attention.attacks._gradient import loss_gradient
from robust_attention.eval.accuracy import Reader, Right, Variant
from robust_attention.eval.measure import Protocol, Setting

Role = Literal["clean", "white", "transfer", "spsa", "random", "auto", "sum"]
"""`white`: through the gradient of the model itself. `sum`: what survives several attacks."""

# Two calls on the same images may differ by rounding, no more.
_SAME = 1e-4


@dataclass(kw_only=True)
class Found:
    """What one attack (or none) has left of a model, and what is to be thought of it."""

    label: str
    """PGD-20, SPSA ..."""
    role: Role
    protocol: Protocol
    variant: Variant
    eps: float
    right: Right
    """Against the truth; and `held`: whether the answer is still the label that the attack aimed at."""
    settings: dict[str, Setting] = field(default_factory=dict)
    broken_by_square: Tensor | None = None
    """`[N]`, bool: images that fell to the Square attack after withstanding AutoAttack's other attacks."""
    failed: list[str] = field(default_factory=list)

    def mark(self, check: str) -> None:
        """Note that a check has failed."""
        if check not in self.failed:
            self.failed.append(check)


def above(higher: Tensor, lower: Tensor) -> bool:
    """Whether the first of two results on the same images is higher by more than chance.

    Both are `[draws, N]`, of the same N. True if the mean of the paired differences exceeds half a point and 2.5 of
    its standard errors under the hypothesis that both are alike, sqrt(Σd²)/N.
    """
    number = min(higher.shape[1], lower.shape[1])
    difference = higher[:, :number].double().mean(dim=0) - lower[:, :number].double().mean(dim=0)
    excess = difference.mean().item()
    return excess > max(0.005, 2.5 * math.sqrt(difference.square().sum().item()) / number)


def check_model(reader: Reader, images: Tensor, labels: Tensor) -> list[str]:
    """Checks of the gradient and of the answers themselves, at the images as they are and with draws fixed.

    `zero gradient`: for more than 1 % of the images the gradient is 0 in every pixel, or not a number.
    `undeclared randomness`: two calls differ by more than rounding, though no attention draws.
    `answers not finite`: some logit is not a number.
    """
    failed = []
    differing = num_zero = torch.zeros((), device=reader.device)
    with reader.drawing("known" if reader.stochastic else "plain"):
        for part, label in zip(images.split(reader.batch_size), labels.split(reader.batch_size), strict=True):
            x, y = part.to(reader.device), label.to(reader.device)
            _, gradient = loss_gradient(reader, x, y, 1)
            num_zero = num_zero + (gradient.abs().amax((1, 2, 3)) == 0).sum()
            with torch.no_grad():
                once, again = reader(x), reader(x)
            differing = torch.maximum(differing, (once - again).abs().max() / once.abs().max().clamp(min=_SAME))
    if num_zero.item() > 0.01 * len(images):
        failed.append("zero gradient")
    if differing.item() > _SAME:
        failed.append("undeclared randomness")
    if not differing.isfinite():
        failed.append("answers not finite")
    return failed


def check_attacks(found: list[Found]) -> None:
    """Compare attacks with each other and over eps, and mark the results that cannot be all that there is.

    `PGD above FGSM`: many steps must not be weaker than one.
    `SPSA below white box`, `Square below white box`, `transfer below white box`: whoever sees the gradient must not be
    weaker than whoever does not. The white box is what survives every attack through the model's own gradient.
    `random below PGD`: nor weaker than guessing.
    `rises with eps`: a larger ball holds the smaller one.
    All compare the labels that attacks aimed at, see `above` for when.
    """

    def case(entry: Found) -> tuple[str, str, float]:
        return entry.protocol, entry.variant, entry.eps

    def curve(entry: Found) -> tuple[str, str, str]:
        return entry.protocol, entry.variant, entry.label

    for _, entries in groupby(sorted(found, key=case), key=case):
        _compare(list(entries))
    clean = {(entry.protocol, entry.variant): entry for entry in found if entry.role == "clean"}
    for _, entries in groupby(sorted(found, key=curve), key=curve):
        rising = sorted(entries, key=lambda entry: entry.eps)
        smaller = [clean[rising[0].protocol, rising[0].variant]] if rising[0].role != "clean" else []
        for entry in rising:
            if any(above(entry.right["held"], other.right["held"]) for other in smaller):
                entry.mark("rises with eps")
            smaller.append(entry)


def _compare(entries: list[Found]) -> None:
    """One protocol, one kind of draw, one eps."""
    white = [entry for entry in entries if entry.role == "white"]
    sums = [entry for entry in entries if entry.role == "sum"]
    if not white:
        return
    survived = survivors([entry.right["held"] for entry in white])
    by_label = {entry.label: entry for entry in white}
    pgd = next((entry for label, entry in by_label.items() if _is_pgd(label)), None)

    def mark(check: str, *others: Found) -> None:
        for entry in (*others, *sums):
            entry.mark(check)

    if pgd and "FGSM" in by_label and above(pgd.right["held"], by_label["FGSM"].right["held"]):
        mark("PGD above FGSM", pgd, by_label["FGSM"])
    for entry in entries:
        held = entry.right["held"]
        if entry.role in ("spsa", "transfer") and above(survived, held):
            name = "SPSA" if entry.role == "spsa" else entry.role
            mark(f"{name} below white box", entry, *white)
        if entry.role == "random" and pgd and above(pgd.right["held"], held):
            mark("random below PGD", entry, *white)
        if entry.broken_by_square is not None:
            both = survived[:, : len(entry.broken_by_square)]
            if above(both, both & ~entry.broken_by_square):
                mark("Square below white box", entry, *white)


def _is_pgd(label: str) -> bool:
    return label.startswith("PGD-") and " " not in label


def survivors(results: list[Tensor]) -> Tensor:
    """What is right after every attack that was tried on it, in each draw: `[draws, N]`.

    Attacks that tried the first images only say nothing of the others.
    """
    survived = max(results, key=lambda result: result.shape[1]).clone()
    for result in results:
        survived[:, : result.shape[1]] &= result
    return survived


def checks_made(entries: list[Found]) -> list[str]:
    """The checks that the attacks at one eps allow, for the record."""
    roles = {entry.role for entry in entries}
    has_pgd = any(_is_pgd(entry.label) for entry in entries)
    possible = {
        "zero gradient": True,
        "undeclared randomness": True,
        "eps = 1": True,
        "monotone in eps": True,
        "PGD <= FGSM": has_pgd and any(entry.label == "FGSM" for entry in entries),
        "white box <= SPSA": {"white", "spsa"} <= roles,
        "white box <= Square": "white" in roles and any(entry.broken_by_square is not None for entry in entries),
        "white box <= transfer": {"white", "transfer"} <= roles,
        "PGD <= random": has_pgd and "random" in roles,
    }
    return [name for name, made in possible.items() if made]
