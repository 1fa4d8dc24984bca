"""What a model reads right: on clean images and on contaminated ones; random methods are asked several times."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Generator, Tensor, nn

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.data.contaminate import KINDS, Kind, contaminate
from robust_attention.data.images import Images
from robust_attention.eval.measure import Measurement, Protocol, Setting, pack
from robust_attention.nn.draws import eval_draw, is_stochastic, set_draws

Variant = Literal["plain", "fresh", "known"]
"""Of a model that draws nothing there is one result. A random one is asked with fresh draws, and with its own fixed
draw, which an attacker knows."""

Right = dict[str, Tensor]
"""For each metric, whether each image was right in each draw: `[draws, N]`, bool, on the CPU."""

BLOCK = 500
"""Images that are contaminated together, whatever the batch size: what happens to one depends on its place alone."""


def clean_accuracy(
    model: nn.Module, images: Tensor | Images, labels: Tensor, *, seed: int, draws: int = 20, batch_size: int = 256
) -> list[Measurement]:
    """Accuracy and, with more than five classes, top-5 on images as they are; see `contaminations`."""
    check_labels(images, labels)
    rows = []
    with prepared(model):
        reader = Reader(model, seed=seed, batch_size=batch_size)
        for variant in reader.variants:
            with reader.drawing(variant):
                parts = [
                    reader.right(images_at(images, first, last), labels[first:last], first, number_of(variant, draws))
                    for first, last in spans(len(labels), batch_size)
                ]
            rows += measured(joined(parts), "clean", variant, {"seed": seed, "batch_size": batch_size})
    return rows


def contaminations(
    model: nn.Module,
    images: Tensor | Images,
    labels: Tensor,
    *,
    patch_size: int,
    seed: int,
    kinds: Sequence[Kind] = KINDS,
    shares: Sequence[float] = (0.1, 0.25),
    draws: int = 20,
    batch_size: int = 256,
) -> list[Measurement]:
    """Accuracy and, with more than five classes, top-5 where a share of the patches is overwritten.

    Args:
        model: Maps images in [0, 1] to logits. Left as it is found.
        images: `[N, C, H, W]`, float in [0, 1] or uint8, or a data set, which is read block by block.
        labels: `[N]`.
        patch_size: See `contaminate`; the model's own makes whole tokens outliers.
        seed: What happens to an image is a function of it, of the image's place and, for patches of other images, of
            the images of the same block of 500. Models compared on one seed are paired.
        draws: Fresh draws of a model that draws at random.
        batch_size: Images a call. Models that draw at random share a draw in a call: their numbers depend on it.
    """
    check_labels(images, labels)
    found: dict[tuple[Kind, float, Variant], list[Right]] = {}
    with prepared(model):
        reader = Reader(model, seed=seed, batch_size=batch_size)
        for first, last in _blocks(len(labels)):
            block = images_at(images, first, last)
            for kind in kinds:
                for share in shares:
                    generator = Generator().manual_seed(mix(seed, "contaminate", first))
                    spoilt = contaminate(block, kind=kind, share=share, patch_size=patch_size, generator=generator)
                    for variant in reader.variants:
                        right = reader.right(
                            spoilt.images, labels[first:last], first, number_of(variant, draws), variant
                        )
                        found.setdefault((kind, share, variant), []).append(right)
    rows = []
    for (kind, share, variant), parts in found.items():
        settings: dict[str, Setting] = {"kind": kind, "share": share, "patch_size": patch_size}
        settings |= {"seed": seed, "batch_size": batch_size}
        rows += measured(joined(parts), f"{kind} {100 * share:g}%", variant, settings)
    return rows


class Reader:
    """A model that is being asked: logits of images on its device, and draws that are functions of the seed.

    The model should be `prepared`.
    """

    def __init__(self, model: nn.Module, *, seed: int, batch_size: int) -> None:
        _checks.whole("batch_size", batch_size, least=1)
        self.model, self.seed, self.batch_size = model, seed, batch_size
        self.stochastic = is_stochastic(model)
        self.variants: tuple[Variant, ...] = ("fresh", "known") if self.stochastic else ("plain",)
        owned = next(model.parameters(), next(model.buffers(), None))
        self.device = torch.device("cpu") if owned is None else owned.device

    def __call__(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        if torch.is_grad_enabled() and images.requires_grad:
            # Where no gradient gets through, attacks are to find zeros, which the checks name, rather than stop.
            logits = logits + 0 * images.flatten(1).sum(dim=1, keepdim=True)
        return logits

    @contextmanager
    def drawing(self, variant: Variant) -> Iterator[None]:
        """Meanwhile, a random model draws as the variant says."""
        with eval_draw(self.model, "fresh" if variant == "fresh" else "fixed"):
            yield

    def draw(self, *purpose: int | str) -> None:
        """Let the next draws be a function of the seed and the purpose alone."""
        if self.stochastic:
            set_draws(self.model, mix(self.seed, *purpose))

    @torch.no_grad()
    def right(
        self,
        images: Tensor,
        labels: Tensor,
        first: int,
        draws: int,
        variant: Variant | None = None,
        aims: Tensor | None = None,
    ) -> Right:
        """Whether the images, which begin at place `first` of their set, are read right, in each of some draws.

        Args:
            variant: None if `drawing` is in force.
            aims: Labels of an attack; `held` then says whether they are still the answer.
        """
        if variant is not None:
            with self.drawing(variant):
                return self.right(images, labels, first, draws, None, aims)
        parts: list[dict[str, list[Tensor]]] = []
        for begin, end in spans(len(images), self.batch_size):
            part, label = images[begin:end].to(self.device), labels[begin:end].to(self.device)
            scores: dict[str, list[Tensor]] = {}
            for number in range(draws):
                self.draw("answer", number, first + begin)
                logits = self.model(part)
                for metric, score in _scores(logits, label).items():
                    scores.setdefault(metric, []).append(score)
                if aims is not None:
                    scores.setdefault("held", []).append(logits.argmax(dim=1) == aims[begin:end].to(self.device))
            parts.append(scores)
        # Taken off the device at the end, so that it is waited for once.
        return {
            metric: torch.cat([torch.stack(scores[metric]) for scores in parts], dim=1).cpu() for metric in parts[0]
        }

    @torch.no_grad()
    def answers(self, images: Tensor, first: int) -> Tensor:
        """The class that the model reads, in the first draw that `right` makes."""
        self.draw("answer", 0, first)
        answer: Tensor = self.model(images.to(self.device)).argmax(dim=1)
        return answer


def _scores(logits: Tensor, labels: Tensor) -> Right:
    # An answer that is not a number is no right answer, whatever argmax makes of it.
    finite = logits.isfinite().all(dim=1)
    scores = {"accuracy": (logits.argmax(dim=1) == labels) & finite}
    if logits.shape[1] > 5:
        scores["top5"] = (logits.topk(5, dim=1).indices == labels[:, None]).any(dim=1) & finite
    return scores


def measured(
    right: Right,
    condition: str,
    variant: Variant,
    settings: dict[str, Setting],
    *,
    protocol: Protocol = "pixel",
    failed: tuple[str, ...] = (),
) -> list[Measurement]:
    """The rows of a table: one a metric; with fresh draws the mean over them and, image by image, the worst of them."""
    rows = []
    for metric in ("accuracy", "top5"):
        if metric not in right:
            continue
        number = len(right[metric])
        tried = {"plain": "", "fresh": "", "known": ", known draw"}
        shown = [(condition + tried[variant], right[metric])]
        if variant == "fresh":
            shown.append((f"{condition}, worst of {number} draws", right[metric].all(dim=0)[None]))
        for name, result in shown:
            rows.append(
                Measurement(
                    metric=metric,
                    condition=name,
                    protocol=protocol,
                    value=result.double().mean().item(),
                    n=result.shape[1],
                    right=pack(result),
                    settings=settings if variant == "plain" else {**settings, "draws": number},
                    failed=failed,
                )
            )
    return rows


def number_of(variant: Variant, draws: int) -> int:
    """How often a model is asked: once if it answers the same again."""
    _checks.whole("draws", draws, least=1)
    return draws if variant == "fresh" else 1


def joined(parts: list[Right]) -> Right:
    """The results of one batch after the other."""
    return {metric: torch.cat([part[metric] for part in parts], dim=1) for metric in parts[0]}


def spans(number: int, size: int) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) of each batch."""
    for first in range(0, number, size):
        yield first, min(first + size, number)


def _blocks(number: int) -> Iterator[tuple[int, int]]:
    """Spans of 500 images; a last one of a single image, which has no neighbours, is joined to the one before."""
    for first, last in spans(number, BLOCK):
        if last == number - 1:
            yield first, number
        elif last - first > 1 or number == 1:
            yield first, last


def images_at(images: Tensor | Images, first: int, last: int) -> Tensor:
    """Images of a span, as numbers in [0, 1]."""
    part = images[first:last] if isinstance(images, Tensor) else images.read(torch.arange(first, last))
    return part if part.is_floating_point() else part.float() / 255


def check_labels(images: Tensor | Images, labels: Tensor) -> None:
    """There are images, and a label for each."""
    if isinstance(images, Tensor) and images.ndim != 4:
        raise ValueError(f"images must be [N, C, H, W], got {list(images.shape)}; add the missing dimensions")
    if len(images) == 0:
        raise ValueError("images must hold at least one, got none; nothing can be measured on them")
    if labels.shape != (len(images),) or labels.is_floating_point():
        raise ValueError(
            f"labels must be whole numbers, one an image: [{len(images)}], got {list(labels.shape)} of {labels.dtype}"
        )


@contextmanager
def prepared(*models: nn.Module | None) -> Iterator[None]:
    """Meanwhile, models are in evaluation mode and their parameters want no gradient: attacks need the images'."""
    modules = [module for model in models if model is not None for module in model.modules()]
    training = [module for module in modules if module.training]
    wanting = [p for model in models if model is not None for p in model.parameters() if p.requires_grad]
    try:
        for module in training:
            module.training = False
        for parameter in wanting:
            parameter.requires_grad_(False)
        yield
    finally:
        for module in training:
            module.training = True
        for parameter in wanting:
            parameter.requires_grad_(True)
