"""Robust accuracy that an adversary cannot embarrass: every attack of a plan, what survives all, and checks of both."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from robust_attention._seeds import mix
from robust_attention.attacks._gradient import Radius
from robust_attention.attacks.auto import autoattack, require_autoattack
from robust_attention.data.images import Images
from robust_attention.eval.accuracy import (
    Reader,
    Right,
    Variant,
    check_labels,
    images_at,
    joined,
    measured,
    number_of,
    prepared,
    spans,
)
from robust_attention.eval.checks import Found, Role, check_attacks, check_model, checks_made, survivors
from robust_attention.eval.measure import Measurement, Protocol, Setting
from robust_attention.eval.plan import Attack, AttackPlan, attacks_of, pgd_of, weights

__all__ = ["AttackPlan", "Tell", "attack_all", "radius_name"]

Tell = Callable[[str, float], None]
"""Told what has been done, and which share of the whole is done by then."""


def attack_all(
    model: nn.Module,
    images: Tensor | Images,
    labels: Tensor,
    plan: AttackPlan,
    *,
    seed: int,
    batch_size: int = 256,
    twin: nn.Module | None = None,
    std: tuple[float, ...] | None = None,
    tell: Tell | None = None,
) -> list[Measurement]:
    """Accuracy and, with more than five classes, top-5 under every attack of a plan, and under all of them together.

    Args:
        model: Maps images in [0, 1] to logits. Left as it is found.
        images: `[N, C, H, W]`, float in [0, 1] or uint8, or a data set.
        labels: `[N]`.
        seed: Of every start, direction and draw. An image's starts depend on it and the image's place alone.
        batch_size: Images a call with gradients; SPSA asks four times as many at once. Models that draw at random share
            a draw in a call: their numbers depend on it.
        twin: A plain model of the same task; PGD against it is tried on `model` (transfer).
        std: Standard deviations by which the model divides its channels; the paper protocol needs them.
        tell: Called after each attack.
    Returns: for each protocol and eps a row an attack, `PGD-20 minimum` where PGD has several gradients (full, weights
        detached, transfer), and `all attacks`: the share of images that are read right unattacked and after every
        attack tried. A model that draws at random has three rows for each: the mean over fresh draws and, image by
        image, the worst of them (both against attacks that average over draws), and its own draw, known to the
        attacker. The last row is PGD at eps = 1. `failed` names the checks that a row did not pass, see
        `eval/checks.py`; `settings["checks"]` of `all attacks` those that were made.
    """
    check_labels(images, labels)
    if "paper" in plan.protocols and std is None:
        raise ValueError("std must be given for the paper protocol, got None; pass the model's config.std")
    if plan.autoattack:
        require_autoattack()
    with prepared(model, twin), weights(model, "full"):
        reader = Reader(model, seed=seed, batch_size=batch_size)
        other = None if twin is None else Reader(twin, seed=seed, batch_size=batch_size)
        return _Trial(reader, other, images, labels, plan, std, tell).run()


class _Trial:
    """All attacks of a plan on one model."""

    def __init__(
        self,
        reader: Reader,
        twin: Reader | None,
        images: Tensor | Images,
        labels: Tensor,
        plan: AttackPlan,
        std: tuple[float, ...] | None,
        tell: Tell | None,
    ) -> None:
        self.reader, self.twin, self.plan, self.std, self.tell = reader, twin, plan, std, tell
        self.images, self.labels = images, labels.cpu().long()
        self.attacks = attacks_of(plan, reader, twin)
        cases = len(plan.protocols) * len(reader.variants) * len(plan.eps)
        self.done, self.units = 0, cases * (len(self.attacks) + bool(plan.autoattack)) + 2

    def run(self) -> list[Measurement]:
        number = min(self.plan.checks_first, len(self.labels))
        suspicions = check_model(self.reader, images_at(self.images, 0, number), self.labels[:number])
        self._finished("checks of the model")
        found: list[Found] = []
        for protocol in self.plan.protocols:
            for variant in self.reader.variants:
                with self.reader.drawing(variant):
                    found += self._case(protocol, variant)
        check_attacks(found)
        shown = [entry for entry in found if entry.role != "clean"]
        at_one = self._at_one(number)
        if at_one.right["held"].double().mean() > 0.01:
            suspicions.append("above 1 % at eps = 1")
        if not any((entry.protocol, entry.label, entry.eps) == ("pixel", at_one.label, 1.0) for entry in shown):
            shown.append(at_one)
        return [row for entry in shown for row in _rows(entry, suspicions)]

    def _case(self, protocol: Protocol, variant: Variant) -> list[Found]:
        """Every attack at every eps, by one protocol and one way to draw."""
        aims = self.labels if protocol == "pixel" else self._answers()
        clean = Found(label="clean", role="clean", protocol=protocol, variant=variant, eps=0.0, right={})
        clean.right = self._right(lambda x, y, first: x, aims, variant, len(aims))
        found = [clean]
        for eps in self.plan.eps:
            here: list[Found] = []
            for attack in self.attacks:
                here.append(self._one(attack, aims, protocol, variant, eps, self._limit(attack.costly)))
                self._finished(f"{attack.label} {radius_name(eps)}, {protocol}")
            if self.plan.autoattack:
                here.append(self._autoattack(aims, protocol, variant, eps))
                self._finished(f"AutoAttack {radius_name(eps)}, {protocol}")
            found += [*here, *self._sums(clean, here)]
        return found

    def _one(self, attack: Attack, aims: Tensor, protocol: Protocol, variant: Variant, eps: float, limit: int) -> Found:
        radius, clip, samples = self._radius(protocol, eps), protocol == "pixel", self._samples(variant)

        def attacked(x: Tensor, y: Tensor, first: int) -> Tensor:
            for model in (self.reader, self.twin):
                if model is not None:
                    model.draw("attack", attack.label, first)
            return attack.make(x, y, radius, clip, first, samples)

        right = self._right(attacked, aims, variant, limit)
        return self._found(attack.label, attack.role, protocol, variant, eps, right, attack.settings(eps))

    def _autoattack(self, aims: Tensor, protocol: Protocol, variant: Variant, eps: float) -> Found:
        """The original code sees all images at once: each of its attacks takes on what the ones before have left."""
        limit, chosen = self._limit(True), self.plan.autoattack
        self.reader.draw("attack", "AutoAttack", 0)
        result = autoattack(
            self.reader,
            images_at(self.images, 0, limit).to(self.reader.device),
            aims[:limit].to(self.reader.device),
            eps=self._radius(protocol, eps),
            seed=mix(self.reader.seed, "autoattack"),
            attacks=chosen if isinstance(chosen, tuple) else None,
            random=variant == "fresh",
            eot=self.plan.eot,
            queries=self.plan.square_queries,
            clip=protocol == "pixel",
            batch_size=self.reader.batch_size,
        )
        right = self._right(lambda x, y, first: result.images[first : first + len(x)], aims, variant, limit)
        if variant != "fresh":
            # Some of its points lie so near to the boundary that another batch size may round them across.
            survived = (result.broken_by == -1)[None]
            right["held"] &= survived
            if protocol == "pixel":
                right["accuracy"] &= survived
        settings: dict[str, Setting] = {"attacks": ", ".join(result.attacks), "flags": "; ".join(result.flags)}
        if "square" in result.attacks:
            settings["queries"] = self.plan.square_queries
        found = self._found("AutoAttack", "auto", protocol, variant, eps, right, settings)
        if "square" in result.attacks:
            found.broken_by_square = result.broken_by == result.attacks.index("square")
        return found

    def _sums(self, clean: Found, here: list[Found]) -> Iterator[Found]:
        """What survives all gradients of PGD, and what survives everything."""
        name = f"PGD-{self.plan.pgd_steps}"
        gradients = [entry for entry in here if entry.label in (name, f"{name} detached", f"{name} transfer")]
        sums = [(f"{name} minimum", gradients)] if len(gradients) > 1 else []
        for label, entries in [*sums, ("all attacks", [clean, *here])]:
            settings: dict[str, Setting] = {"attacks": ", ".join(e.label for e in entries if e.role != "clean")}
            if label == "all attacks":
                settings["checks"] = ", ".join(checks_made(here))
            right = {metric: survivors([entry.right[metric] for entry in entries]) for metric in clean.right}
            yield self._found(label, "sum", clean.protocol, clean.variant, here[0].eps, right, settings)

    def _at_one(self, number: int) -> Found:
        variant = self.reader.variants[0]
        with self.reader.drawing(variant):
            found = self._one(pgd_of(self.plan, self.reader), self.labels, "pixel", variant, 1.0, number)
        self._finished("check at eps = 1")
        return found

    def _found(
        self,
        label: str,
        role: Role,
        protocol: Protocol,
        variant: Variant,
        eps: float,
        right: Right,
        settings: dict[str, Setting],
    ) -> Found:
        common: dict[str, Setting] = {"eps": eps, "seed": self.reader.seed, "batch_size": self.reader.batch_size}
        if variant == "fresh":
            common["eot"] = self.plan.eot
        return Found(label=label, role=role, protocol=protocol, variant=variant, eps=eps, right=right,
                     settings=common | settings)  # fmt: skip

    def _right(
        self, attacked: Callable[[Tensor, Tensor, int], Tensor], aims: Tensor, variant: Variant, limit: int
    ) -> Right:
        """What the model makes of the first `limit` images, attacked batch by batch."""
        parts = []
        for first, last in spans(limit, self.reader.batch_size):
            x = images_at(self.images, first, last).to(self.reader.device)
            found = attacked(x, aims[first:last].to(self.reader.device), first)
            draws = number_of(variant, self.plan.draws)
            parts.append(self.reader.right(found, self.labels[first:last], first, draws, aims=aims[first:last]))
        return joined(parts)

    def _answers(self) -> Tensor:
        """The model's own labels of all images."""
        parts = [
            self.reader.answers(images_at(self.images, first, last), first)
            for first, last in spans(len(self.labels), self.reader.batch_size)
        ]
        return torch.cat(parts).cpu()

    def _radius(self, protocol: Protocol, eps: float) -> Radius:
        return eps if protocol == "pixel" or self.std is None else eps * torch.tensor(self.std)

    def _samples(self, variant: Variant) -> int:
        return self.plan.eot if variant == "fresh" else 1

    def _limit(self, costly: bool) -> int:
        most = self.plan.costly_first if costly else None
        return len(self.labels) if most is None else min(most, len(self.labels))

    def _finished(self, what: str) -> None:
        self.done += 1
        if self.tell is not None:
            self.tell(what, self.done / self.units)


def _rows(entry: Found, suspicions: list[str]) -> list[Measurement]:
    failed = (*suspicions, *entry.failed)
    condition = f"{entry.label} {radius_name(entry.eps)}"
    return measured(entry.right, condition, entry.variant, entry.settings, protocol=entry.protocol, failed=failed)


def radius_name(eps: float) -> str:
    """In 255ths where that is shorter: 1/255, 0.5/255; else as it is: 0.1, 1."""
    return min(f"{255 * eps:.6g}/255", f"{eps:.6g}", key=len)
