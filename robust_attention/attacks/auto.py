"""AutoAttack (Croce and Hein, 2020): the original code, from the package pyautoattack, with its own budget."""

import importlib.util
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from robust_attention import _checks
from robust_attention.attacks._gradient import Logits, Radius, check_ball, check_call, radius_of

AutoAttackName = Literal["apgd-ce", "apgd-dlr", "apgd-t", "fab", "fab-t", "square"]

STANDARD: tuple[AutoAttackName, ...] = ("apgd-ce", "apgd-t", "fab-t", "square")
RANDOM: tuple[AutoAttackName, ...] = ("apgd-ce", "apgd-dlr")

# The difference of logits ratio sorts this many logits.
_CLASSES_NEEDED = {"apgd-dlr": 3, "apgd-t": 4}
_TARGETS = 9

# What the original code warns of, by words of its messages.
_FLAGS = {
    "randomized defense": "randomised",
    "zero gradient": "zero gradient",
    "dynamic defense": "optimisation at inference",
    "probability distribution": "probabilities, not logits",
}


class AutoAttacked(NamedTuple):
    """What AutoAttack found."""

    images: Tensor
    """Adversarial where one was found, otherwise the image itself."""
    broken_by: Tensor
    """`[N]`, int64 on the CPU: the place in `attacks` of the one that broke the image; -1: none did; -2: the image is
    not read as its label before any attack."""
    attacks: tuple[AutoAttackName, ...]
    """Which ran, in this order, each on what the ones before it had left."""
    flags: tuple[str, ...]
    """What the original code found suspicious."""


def autoattack(
    logits: Logits,
    images: Tensor,
    labels: Tensor,
    *,
    eps: Radius,
    seed: int,
    attacks: tuple[AutoAttackName, ...] | None = None,
    random: bool = False,
    eot: int = 20,
    queries: int = 5000,
    clip: bool = True,
    batch_size: int = 250,
) -> AutoAttacked:
    """Try the attacks in turn, each on the images that the ones before it have left.

    Args:
        logits: Maps images `[B, C, H, W]` to logits. Parameters of an `nn.Module` get no gradients; those behind any
            other callable may.
        images: In [0, 1].
        eps: Radius in units of the images. One a channel, `[C]`, only without clipping: the original code knows
            neither. It is then shown stretched images, so that its own clipping meets nothing.
        seed: Of all that is drawn. The global random state is left as it was.
        attacks: None for the standard version, or for `rand`'s two if `random`. With two or three classes, where the
            ratio of logits is not defined, apgd-t gives way to apgd-dlr or to nothing.
        random: The model draws at random: gradients are means over `eot` calls, as in version `rand`.
        queries: Of the Square attack; 5000 is the standard.
        clip: Keep the results in [0, 1].
    """
    check_call(images, 1, "ce")
    radius = radius_of(eps, images)
    require_autoattack()
    with torch.no_grad():
        classes = logits(images[:1]).shape[1] if len(images) else 0
    chosen = _chosen(attacks, random, classes)
    names = tuple(dict.fromkeys(chosen))
    broken_by = torch.full((len(images),), -1)
    attacked = images.clone()
    if not len(images):
        return AutoAttacked(attacked, broken_by, names, ())
    stretch = _Stretch(images, radius, clip)
    with _seeded_and_quiet(images.device) as messages, _frozen(logits):
        suite = _suite(lambda x: logits(stretch.back(x)), images.device, stretch.eps, seed, classes)
        suite.apgd.eot_iter = eot if random else 1
        suite.square.n_queries = queries
        suite.version = "rand" if random else "custom"
        left = stretch.forth(images)
        right = _read(suite, left, batch_size) == labels
        broken_by[~right.cpu()] = -2
        for place, name in enumerate(names):
            still = (broken_by == -1).nonzero().flatten().to(images.device)
            if not len(still):
                break
            suite.attacks_to_run = [name]
            found, answer = suite.run_standard_evaluation(left[still], labels[still], batch_size=batch_size)
            fell = answer != labels[still]
            broken_by[still[fell].cpu()] = place
            attacked[still[fell]] = stretch.back(found[fell])
    flags = tuple(flag for words, flag in _FLAGS.items() if any(words in text for text in messages))
    # Stretching there and back rounds; the ball is kept exactly.
    low, high = images - radius, images + radius
    return AutoAttacked(check_ball(attacked.clamp(low, high), images, radius, clip), broken_by, names, flags)


def require_autoattack() -> None:
    """Say what to install if the original code is not there."""
    if importlib.util.find_spec("pyautoattack") is None:
        raise ImportError("pyautoattack is not installed; pip install 'robust-attention[autoattack]'")


def _chosen(attacks: tuple[AutoAttackName, ...] | None, random: bool, classes: int) -> tuple[AutoAttackName, ...]:
    if attacks is None:
        wanted = RANDOM if random else STANDARD
        if classes < 4:
            wanted = tuple("apgd-dlr" if name == "apgd-t" else name for name in wanted)
        return tuple(name for name in wanted if classes >= _CLASSES_NEEDED.get(name, 2))
    for name in attacks:
        _checks.one_of("attacks", name, get_args(AutoAttackName))
        if 0 < classes < (needed := _CLASSES_NEEDED.get(name, 2)):
            raise ValueError(f"{name} must have at least {needed} classes, got {classes}; leave it out")
    if not attacks:
        raise ValueError("attacks must name at least one, got none; pass None for the standard version")
    return attacks


class _Stretch:
    """Images as the original code wants them: one eps for all channels, and nothing that it could clip wrongly."""

    def __init__(self, images: Tensor, radius: Tensor, clip: bool) -> None:
        self.clip = clip
        if clip:
            if radius.ndim and bool((radius != radius.flatten()[0]).any()):
                raise ValueError(
                    f"eps must be one number where results are clipped, got {radius.flatten().tolist()}; "
                    "pass clip=False or the smallest"
                )
            self.eps = float(radius.flatten()[0])
            return
        zero = radius == 0
        if bool(zero.any()) and not bool(zero.all()):
            raise ValueError(
                f"eps must be above 0 in every channel or 0 in all, got {radius.flatten().tolist()}; "
                "the original code knows one eps only"
            )
        self.unit = torch.where(zero, 1, radius)
        # In units of the radius; one unit of room at either end.
        self.low = float((images / self.unit).min()) - 1
        self.width = float((images / self.unit).max()) + 1 - self.low
        self.eps = 0.0 if bool(zero.all()) else 1 / self.width

    def forth(self, images: Tensor) -> Tensor:
        return images if self.clip else (images / self.unit - self.low) / self.width

    def back(self, images: Tensor) -> Tensor:
        return images if self.clip else (images * self.width + self.low) * self.unit


def _suite(logits: Logits, device: torch.device, eps: float, seed: int, classes: int) -> Any:
    original = importlib.import_module("pyautoattack")
    suite = original.AutoAttack(logits, device=device, eps=eps, norm="Linf", seed=seed, version="standard")
    suite.apgd_targeted.n_target_classes = min(_TARGETS, classes - 1)
    suite.fab.n_target_classes = min(_TARGETS, classes - 1)
    return suite


@torch.no_grad()
def _read(suite: Any, images: Tensor, batch_size: int) -> Tensor:
    return torch.cat([suite.get_logits(part).argmax(dim=1) for part in images.split(batch_size)])


@contextmanager
def _seeded_and_quiet(device: torch.device) -> Iterator[list[str]]:
    """Meanwhile, what happens to the global random state is undone, and what is logged is collected."""
    messages: list[str] = []
    logger, tracer = logging.getLogger("auto-attack"), sys.gettrace()

    def collect(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            messages.append(record.getMessage())
        return False

    logger.addFilter(collect)
    try:
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            yield messages
    finally:
        logger.removeFilter(collect)
        # Its search for optimisation at inference takes a debugger's or a coverage tool's tracer away.
        sys.settrace(tracer)


@contextmanager
def _frozen(logits: Logits) -> Iterator[None]:
    """Meanwhile, parameters want no gradient: one of the attacks would leave its own in them."""
    wanting = [p for p in logits.parameters() if p.requires_grad] if isinstance(logits, nn.Module) else []
    for parameter in wanting:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in wanting:
            parameter.requires_grad_(True)
