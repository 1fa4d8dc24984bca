"""What the benchmarks report: top-k, mCE, accuracy among some classes, and AUPR for images of no class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from robust_attention._checks import whole

Errors = Mapping[str, Sequence[float] | float]
"""Of each kind of corruption: the error at each severity, or their mean; shares from 0 to 1."""

ALEXNET_ERRORS: Errors = MappingProxyType(
    {
        "gaussian_noise": 0.886428,
        "shot_noise": 0.894468,
        "impulse_noise": 0.922640,
        "defocus_blur": 0.819880,
        "glass_blur": 0.826268,
        "motion_blur": 0.785948,
        "zoom_blur": 0.798360,
        "snow": 0.866816,
        "frost": 0.826572,
        "fog": 0.819324,
        "brightness": 0.564592,
        "contrast": 0.853204,
        "elastic_transform": 0.646056,
        "pixelate": 0.717840,
        "jpeg_compression": 0.606500,
    }
)
"""AlexNet on ImageNet-C, the mean over the five severities: the baseline that mCE is published with (Hendrycks and
Dietterich 2019). It is for ImageNet-C's images at 224 pixels and no others."""


def right_in_top(logits: Tensor, labels: Tensor, k: int = 1) -> Tensor:
    """Whether the label is among the `k` largest logits: bool `[N]` for `[N, K]`.

    Equal logits rank in the order of the classes, as argmax has it; NaN ranks above all, and a NaN label is wrong.
    """
    _check(logits, labels)
    whole("k", k, 1, logits.shape[1])
    own = logits.gather(1, labels[:, None])
    number = torch.arange(logits.shape[1], device=logits.device)
    ahead = ~(logits <= own) | ((logits == own) & (number < labels[:, None]))
    return ahead.sum(1) < k


def masked_right(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Whether the label has the largest logit among the classes of the mask: bool `[N]`. For ImageNet-A and -R.

    Args:
        logits: `[N, K]`, of all classes.
        labels: `[N]`, numbers among all K classes, each in the mask.
        mask: `[K]`, True at the classes that may be answered.
    """
    _check(logits, labels)
    _check_mask(logits, mask)
    if not bool(mask[labels].all()):
        outside = labels[~mask[labels]]
        raise ValueError(
            f"every label must be a class of the mask, but {int(outside[0])} is not ({len(outside)} of {len(labels)} "
            "labels in all); number the labels among all classes of the model"
        )
    among = mask.cumsum(0) - 1  # a class's number among those of the mask
    return right_in_top(logits[:, mask], among[labels])


def mce(errors: Errors, baseline: Errors = ALEXNET_ERRORS) -> float:
    """Mean corruption error in per cent of a baseline's: 100 is as bad as the baseline.

        mCE = 100 · mean over kinds c of (Σ_s E_{s,c}) / (Σ_s B_{s,c})

    Args:
        errors: Top-1 errors, from 0 to 1, of each kind at severities 1 to 5.
        baseline: The same of the baseline, for the same kinds; a mean instead of five numbers will do.

    Say beside the number what the baseline was (`baseline_name`): AlexNet's errors belong to ImageNet-C. On other
    images, or corruptions that were generated, take another model's errors on the same ones.
    """
    if not errors or set(errors) != set(baseline):
        odd = sorted(set(errors) ^ set(baseline))
        raise ValueError(
            f"errors and baseline must have the same kinds, at least one; {', '.join(odd[:3]) or 'none'} "
            f"({len(odd)} in all) is in one only; measure all kinds, or compare with a baseline of the measured ones"
        )
    shares = [_mean(kind, "errors", errors[kind]) / _mean(kind, "baseline", baseline[kind]) for kind in errors]
    return 100 * sum(shares) / len(shares)


def baseline_name(baseline: Errors) -> str:
    """What to write beside an mCE."""
    published = dict(baseline) == dict(ALEXNET_ERRORS)
    return "AlexNet on ImageNet-C, as published" if published else "a baseline of our own"


def average_precision(scores: Tensor, positive: Tensor) -> float:
    """Area under the precision-recall curve: Σ over thresholds of (recall gained) · (precision there).

    Examples of equal score pass the threshold together, so their order does not matter.

    Args:
        scores: `[N]`, large for what should be found.
        positive: bool `[N]`, what should be found; at least one.
    """
    if scores.ndim != 1 or scores.shape != positive.shape or positive.dtype != torch.bool:
        raise ValueError(
            f"scores and positive must be [N], positive bool, got {list(scores.shape)} and {list(positive.shape)} "
            f"of {positive.dtype}"
        )
    if not bool(positive.any()) or bool(scores.isnan().any()):
        raise ValueError(
            f"there must be a positive example and no score may be NaN, got {int(positive.sum())} positive and "
            f"{int(scores.isnan().sum())} NaN of {len(scores)}"
        )
    scores, order = scores.double().sort(descending=True)
    found = positive[order].cumsum(0).double()
    last = torch.ones_like(positive)
    last[:-1] = scores[1:] != scores[:-1]  # the last example of each threshold
    passed = (torch.arange(len(scores), device=scores.device) + 1)[last]
    found = found[last]
    gained = found.diff(prepend=found.new_zeros(1)) / found[-1]
    return float((gained * found / passed).sum())


def aupr(inside: Tensor, outside: Tensor, mask: Tensor | None = None) -> float:
    """How well low confidence tells images of no class from others: AUPR, 0 to 1. For ImageNet-O.

    The score of an image is minus its largest softmax probability, in float64; images of no class are the positive
    ones. Guessing gives their share.

    Args:
        inside: Logits `[N, K]` of images of known classes.
        outside: Logits `[M, K]` of images of none.
        mask: `[K]`, True at the classes that count: the published protocol takes ImageNet-O's 200, both times, and
            for `inside` the validation images of these.
    """
    if inside.ndim != 2 or outside.ndim != 2 or inside.shape[1] != outside.shape[1]:
        raise ValueError(
            f"inside and outside must be logits [N, K] and [M, K], got {list(inside.shape)} and {list(outside.shape)}"
        )
    logits = torch.cat([inside, outside.to(inside)])
    if mask is not None:
        _check_mask(logits, mask)
        logits = logits[:, mask]
    anomaly = -logits.double().softmax(1).amax(1)
    positive = torch.arange(len(logits), device=logits.device) >= len(inside)
    return average_precision(anomaly, positive)


def _mean(kind: str, what: str, errors: Sequence[float] | float) -> float:
    values = [errors] if isinstance(errors, (int, float)) else list(errors)
    right = len(values) in (1, 5) and all(0 <= value <= 1 for value in values)
    if not right or (what == "baseline" and sum(values) == 0):
        raise ValueError(
            f"{what} of {kind} must be 5 shares from 0 to 1 (or their mean), got {values}; divide per cent by 100"
            + (" and take a baseline that errs" if right else "")
        )
    return sum(values) / len(values)


def _check(logits: Tensor, labels: Tensor) -> None:
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or labels.dtype != torch.int64:
        raise ValueError(
            f"logits must be [N, K] and labels [N], int64, got {list(logits.shape)} and {list(labels.shape)} "
            f"of {labels.dtype}"
        )


def _check_mask(logits: Tensor, mask: Tensor) -> None:
    if mask.shape != logits.shape[1:] or mask.dtype != torch.bool or not bool(mask.any()):
        raise ValueError(
            f"mask must be bool, one a class, [{logits.shape[1]}], with some True, got {list(mask.shape)} of "
            f"{mask.dtype} with {int(mask.sum())}; class_mask makes one from lists of classes"
        )
