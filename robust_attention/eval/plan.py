"""Which attacks an evaluation tries, and how hard."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_args

from torch import Generator, Tensor, nn

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.attacks._gradient import Loss, Radius
from robust_attention.attacks.auto import AutoAttackName
from robust_attention.attacks.fgsm import fgsm
from robust_attention.attacks.pgd import STEP, pgd
from robust_attention.attacks.random_search import random_search
from robust_attention.attacks.spsa import spsa
from robust_attention.eval.accuracy import Reader
from robust_attention.eval.checks import Role
from robust_attention.eval.measure import Protocol, Setting
from robust_attention.nn.draws import attends, eval_draw, with_methods
from robust_attention.ops import Method

AttackName = Literal["fgsm", "pgd", "pgd-margin", "spsa", "random"]
ATTACKS: tuple[AttackName, ...] = get_args(AttackName)


@dataclass(frozen=True, kw_only=True)
class AttackPlan:
    """Which attacks to try, and how hard. The defaults are the project's protocol."""

    eps: tuple[float, ...] = (1 / 255,)
    """Radii of the max-norm ball; several make a curve."""
    protocols: tuple[Protocol, ...] = ("pixel",)
    """`pixel`: in [0, 1], true labels, clipped. `paper`: radii on normalised images, unclipped, the model's own labels;
    for columns beside published numbers only."""
    which: tuple[AttackName, ...] = ATTACKS
    """Attacks to try. Where there is `pgd`, it is tried with robust weights detached and from the plain twin too."""
    autoattack: bool | tuple[AutoAttackName, ...] = False
    """The original AutoAttack: its standard version (`rand` under fresh draws), or the attacks named."""
    pgd_steps: int = 20
    """Steps of PGD."""
    step_share: float = STEP
    """Step size of PGD as a share of eps; the paper's is 0.15."""
    restarts: int = 1
    """Random starts of PGD."""
    spsa_steps: int = 100
    """Steps of SPSA."""
    spsa_samples: int = 64
    """Pairs of answers a step of SPSA; more for larger images."""
    random_tries: int = 50
    """Points of the random search."""
    square_queries: int = 5000
    """Queries of AutoAttack's Square attack; its standard is 5000."""
    eot: int = 20
    """Draws over which gradients of a random model are averaged."""
    draws: int = 20
    """Fresh draws in which a random model is then asked."""
    costly_first: int | None = None
    """Try SPSA and AutoAttack on the first so many images only; the others count in `all attacks` by what was tried on
    them. None: on all."""
    checks_first: int = 256
    """Images for the check at eps = 1 and for the checks of the gradient."""

    def __post_init__(self) -> None:
        for name in ("pgd_steps", "restarts", "spsa_steps", "spsa_samples", "random_tries", "square_queries"):
            _checks.whole(name, getattr(self, name), least=1)
        for name in ("eot", "draws", "checks_first"):
            _checks.whole(name, getattr(self, name), least=1)
        if self.costly_first is not None:
            _checks.whole("costly_first", self.costly_first, least=1)
        for eps in self.eps:
            _checks.positive("eps", eps)
        if not self.eps or len(set(self.eps)) < len(self.eps):
            raise ValueError(f"eps must name each radius once, at least one, got {self.eps}; pass for example (1/255,)")
        for protocol in self.protocols:
            _checks.one_of("protocols", protocol, get_args(Protocol))
        for name in self.which:
            _checks.one_of("which", name, ATTACKS)
        if not self.protocols or not (self.which or self.autoattack):
            raise ValueError("a plan must name at least one protocol and one attack, got none; see AttackPlan's fields")


@dataclass(frozen=True)
class Attack:
    """One attack of a plan, on one model."""

    label: str
    """PGD-20, SPSA ..."""
    role: Role
    make: Callable[[Tensor, Tensor, Radius, bool, int, int], Tensor]
    """Images, labels, radius, clip, place of the first image in its set, EOT samples -> attacked images."""
    settings: Callable[[float], dict[str, Setting]]
    """What it depends on, by eps."""
    costly: bool = False


def attacks_of(plan: AttackPlan, reader: Reader, twin: Reader | None) -> list[Attack]:
    """The attacks that a plan means for a model and, if there is one, its plain twin."""
    made = {"fgsm": _fgsm, "spsa": _spsa, "random": _random}
    attacks: list[Attack] = []
    for name in plan.which:
        if name in made:
            attacks.append(made[name](plan, reader))
        else:
            attacks.append(pgd_of(plan, reader, loss="ce" if name == "pgd" else "margin"))
        if name == "pgd" and _weighted(reader.model):
            attacks.append(pgd_of(plan, reader, gradient="stop"))
        if name == "pgd" and twin is not None:
            attacks.append(pgd_of(plan, reader, twin=twin))
    return attacks


def pgd_of(
    plan: AttackPlan,
    reader: Reader,
    *,
    loss: Loss = "ce",
    gradient: Literal["full", "stop"] = "full",
    twin: Reader | None = None,
) -> Attack:
    """PGD, through the full gradient, past the weights of robust methods, or against the twin."""

    def make(x: Tensor, y: Tensor, radius: Radius, clip: bool, first: int, samples: int) -> Tensor:
        # All kinds of PGD, at every eps, begin at the same points of the unit ball.
        starts = [Generator().manual_seed(mix(reader.seed, "start", first + i)) for i in range(len(x))]
        target = reader if twin is None else twin
        with weights(reader.model, gradient), _fresh(twin):
            return pgd(
                target,
                x,
                y,
                eps=radius,
                generator=starts,
                steps=plan.pgd_steps,
                step_size=plan.step_share * radius,
                restarts=plan.restarts,
                samples=samples if twin is None else plan.eot if twin.stochastic else 1,
                loss=loss,
                clip=clip,
            )

    def settings(eps: float) -> dict[str, Setting]:
        kind = gradient if twin is None else "transfer"
        own: dict[str, Setting] = {"steps": plan.pgd_steps, "step_size": plan.step_share * eps}
        return own | {"restarts": plan.restarts, "loss": loss, "gradient": kind}

    label = f"PGD-{plan.pgd_steps}" + {"ce": "", "margin": " margin"}[loss]
    if twin is not None:
        return Attack(f"{label} transfer", "transfer", make, settings)
    return Attack(label + {"full": "", "stop": " detached"}[gradient], "white", make, settings)


def _fgsm(plan: AttackPlan, reader: Reader) -> Attack:
    def make(x: Tensor, y: Tensor, radius: Radius, clip: bool, first: int, samples: int) -> Tensor:
        return fgsm(reader, x, y, eps=radius, samples=samples, clip=clip)

    return Attack("FGSM", "white", make, lambda eps: {"steps": 1, "step_size": eps, "loss": "ce", "gradient": "full"})


def _spsa(plan: AttackPlan, reader: Reader) -> Attack:
    def make(x: Tensor, y: Tensor, radius: Radius, clip: bool, first: int, samples: int) -> Tensor:
        return spsa(
            reader,
            x,
            y,
            eps=radius,
            generator=Generator().manual_seed(mix(reader.seed, "directions")),
            steps=plan.spsa_steps,
            samples=plan.spsa_samples,
            clip=clip,
            batch_size=4 * reader.batch_size,
        )

    queries = plan.spsa_steps * (2 * plan.spsa_samples + 1)
    return Attack(
        "SPSA",
        "spsa",
        make,
        lambda eps: {"steps": plan.spsa_steps, "samples": plan.spsa_samples, "queries": queries, "loss": "margin"},
        costly=True,
    )


def _random(plan: AttackPlan, reader: Reader) -> Attack:
    def make(x: Tensor, y: Tensor, radius: Radius, clip: bool, first: int, samples: int) -> Tensor:
        generator = Generator().manual_seed(mix(reader.seed, "points"))
        return random_search(reader, x, y, eps=radius, generator=generator, tries=plan.random_tries, clip=clip)

    settings: dict[str, Setting] = {"queries": plan.random_tries, "loss": "margin"}
    return Attack(f"random-{plan.random_tries}", "random", make, lambda eps: settings)


def _weighted(model: nn.Module) -> bool:
    return any("weight_grad" in _settings(module.method) for module in attends(model))


def _settings(method: Method) -> set[str]:
    return {entry.name for entry in fields(method)}


@contextmanager
def weights(model: nn.Module, gradient: Literal["full", "stop"]) -> Iterator[None]:
    """Meanwhile, gradients flow through the weights of robust methods or stop there."""

    def change(method: Method) -> Method:
        choice: dict[str, Any] = {"weight_grad": gradient} if "weight_grad" in _settings(method) else {}
        return replace(method, **choice) if choice else method

    with with_methods(model, change):
        yield


@contextmanager
def _fresh(twin: Reader | None) -> Iterator[None]:
    if twin is None:
        yield
    else:
        with eval_draw(twin.model, "fresh"):
            yield
