"""Metrics against reckoning by hand, by brute force, and on planted examples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from robust_attention.data.corruptions import KINDS
from robust_attention.eval.metrics import (
    ALEXNET_ERRORS,
    aupr,
    average_precision,
    baseline_name,
    masked_right,
    mce,
    right_in_top,
)


def random_logits(number: int = 200, classes: int = 10, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(number, classes, generator=generator)
    return logits, torch.randint(classes, (number,), generator=generator)


# --- top-k


@pytest.mark.parametrize("k", [1, 3, 10])
def test_top_k_equals_sorting(k: int) -> None:
    logits, labels = random_logits()
    expected = [label in row.topk(k).indices for row, label in zip(logits, labels, strict=True)]
    assert right_in_top(logits, labels, k).tolist() == expected


def test_top_one_is_argmax_even_with_ties() -> None:
    logits = torch.randint(3, (500, 6), generator=torch.Generator().manual_seed(0)).float()
    labels = random_logits(500, 6)[1]
    assert torch.equal(right_in_top(logits, labels), logits.argmax(1) == labels)
    constant = torch.zeros(4, 3)
    assert right_in_top(constant, torch.tensor([0, 1, 2, 0])).tolist() == [True, False, False, True]
    assert right_in_top(constant, torch.tensor([0, 1, 2, 0]), 2).tolist() == [True, True, False, True]


def test_nan_is_never_right() -> None:
    logits = torch.tensor([[torch.nan, 0.0, 1.0], [0.0, torch.nan, 1.0], [torch.nan] * 3])
    assert right_in_top(logits, torch.tensor([2, 1, 0])).tolist() == [False, False, False]
    assert right_in_top(logits, torch.tensor([2, 1, 0]), 3).tolist() == [True, False, False]


# --- accuracy among some classes


def test_masked_accuracy_equals_a_loop() -> None:
    logits, labels = random_logits(300)
    mask = torch.tensor([True, False, True, True, False, False, True, False, False, True])
    allowed = mask.nonzero().flatten().tolist()
    logits, labels = logits[mask[labels]], labels[mask[labels]]
    expected = [
        max(allowed, key=lambda number: float(row[number])) == label
        for row, label in zip(logits, labels.tolist(), strict=True)
    ]
    assert 0 < sum(expected) < len(expected)
    assert masked_right(logits, labels, mask).tolist() == expected
    assert torch.equal(masked_right(logits, labels, torch.ones(10, dtype=torch.bool)), right_in_top(logits, labels))


def test_masked_out_classes_have_no_influence() -> None:
    logits = torch.tensor([[9.0, 1.0, 2.0], [9.0, 2.0, 1.0]])
    mask = torch.tensor([False, True, True])
    assert masked_right(logits, torch.tensor([2, 2]), mask).tolist() == [True, False]


# --- mCE


def test_mce_by_hand() -> None:
    errors = {"fog": [0.1, 0.2, 0.3, 0.4, 0.5], "snow": [0.2, 0.2, 0.2, 0.2, 0.2]}
    baseline = {"fog": [0.2, 0.4, 0.6, 0.8, 1.0], "snow": [0.1, 0.1, 0.2, 0.3, 0.3]}
    assert mce(errors, baseline) == pytest.approx(100 * (0.5 + 1.0) / 2)
    # The sums are divided, not each severity: a mean of five will do.
    assert mce({"fog": 0.3, "snow": [0.2] * 5}, {"fog": 0.6, "snow": 0.2}) == pytest.approx(75)


def test_mce_of_alexnet_is_one_hundred() -> None:
    assert set(ALEXNET_ERRORS) == set(KINDS)
    assert mce({kind: [float(ALEXNET_ERRORS[kind])] * 5 for kind in KINDS}) == pytest.approx(100)  # type: ignore[arg-type]
    assert mce(dict.fromkeys(KINDS, 0.0)) == 0


def test_baseline_is_named() -> None:
    assert baseline_name(ALEXNET_ERRORS) == "AlexNet on ImageNet-C, as published"
    assert baseline_name(dict(ALEXNET_ERRORS)) == "AlexNet on ImageNet-C, as published"
    assert baseline_name({"fog": 0.3}) == "a baseline of our own"


# --- average precision and AUPR


def brute_force_precision(scores: list[float], positive: list[bool]) -> float:
    """Try every threshold, from the highest score down."""
    area, before = 0.0, 0.0
    for threshold in sorted(set(scores), reverse=True):
        chosen = [good for score, good in zip(scores, positive, strict=True) if score >= threshold]
        recall = sum(chosen) / sum(positive)
        area += (recall - before) * sum(chosen) / len(chosen)
        before = recall
    return area


@pytest.mark.parametrize("levels", [3, 10, 10**6])
def test_average_precision_equals_trying_every_threshold(levels: int) -> None:
    generator = torch.Generator().manual_seed(levels)
    for _ in range(20):
        scores = torch.randint(levels, (60,), generator=generator).float()
        positive = torch.rand(60, generator=generator) < 0.3
        expected = brute_force_precision(scores.tolist(), positive.tolist())
        assert average_precision(scores, positive) == pytest.approx(expected)
        order = torch.randperm(60, generator=generator)
        assert average_precision(scores[order], positive[order]) == pytest.approx(expected)


def test_average_precision_by_hand() -> None:
    positive = torch.tensor([True, False, True, False])
    assert average_precision(torch.tensor([4.0, 3, 2, 1]), positive) == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert average_precision(torch.tensor([4.0, 1, 3, 2]), positive) == 1
    assert average_precision(torch.zeros(4), positive) == 0.5  # guessing gives the share


def test_aupr_finds_what_was_planted() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.randn(400, 20, generator=generator)
    inside[torch.arange(400), torch.randint(20, (400,), generator=generator)] += 8  # sure of themselves
    outside = torch.randn(100, 20, generator=generator)
    assert aupr(inside, outside) > 0.99
    alike = torch.randn(5000, 20, generator=generator)
    assert aupr(alike[:4000], alike[4000:]) == pytest.approx(0.2, abs=0.03)  # nothing planted: their share
    # Images of no class that the model is sure of: found last.
    assert aupr(outside, inside) == pytest.approx(brute_force(outside, inside))


def brute_force(inside: Tensor, outside: Tensor) -> float:
    scores = [-float(row.double().softmax(0).max()) for row in torch.cat([inside, outside])]
    return brute_force_precision(scores, [False] * len(inside) + [True] * len(outside))


def test_aupr_looks_at_the_classes_of_the_mask_alone() -> None:
    inside, outside = random_logits(50)[0], random_logits(30, seed=1)[0]
    mask = torch.arange(10) < 4
    assert aupr(inside, outside, mask) == pytest.approx(brute_force(inside[:, :4], outside[:, :4]))
    inside[:, 7] = 100  # would make everything certain
    assert aupr(inside, outside, mask) == pytest.approx(brute_force(inside[:, :4], outside[:, :4]))


def test_aupr_tells_very_sure_images_apart() -> None:
    """In float32 both probabilities are 1."""
    inside, outside = torch.tensor([[25.0, 0.0]]), torch.tensor([[20.0, 0.0]])
    assert float(inside.softmax(1).max()) == float(outside.softmax(1).max()) == 1
    assert aupr(inside, outside) == 1
    assert aupr(outside, inside) == 0.5


LOGITS, LABELS = random_logits(4, 3)
FAILS: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: right_in_top(LOGITS, LABELS[:3]),
        r"logits must be \[N, K\] and labels \[N\], int64, got \[4, 3\] and \[3\]",
    ),
    (lambda: right_in_top(LOGITS, LABELS.float()), r"got \[4, 3\] and \[4\] of torch.float32"),
    (lambda: right_in_top(LOGITS, LABELS, 4), r"k must be a whole number from 1 to 3, got 4"),
    (
        lambda: masked_right(LOGITS, torch.tensor([0, 1, 2, 0]), torch.tensor([True, True, False])),
        r"every label must be a class of the mask, but 2 is not \(1 of 4 labels",
    ),
    (lambda: masked_right(LOGITS, LABELS, torch.ones(2) > 0), r"mask must be bool, one a class, \[3\], .* got \[2\]"),
    (lambda: masked_right(LOGITS, LABELS, torch.zeros(3) > 0), r"with some True, got \[3\] of torch.bool with 0"),
    (lambda: mce({"fog": 0.1}), r"same kinds, at least one; .* \(14 in all\) is in one only"),
    (lambda: mce({}, {}), r"at least one; none \(0 in all\)"),
    (lambda: mce({"fog": [10.0] * 5}, {"fog": 0.5}), r"errors of fog must be 5 shares from 0 to 1 .*; divide per cent"),
    (lambda: mce({"fog": [0.1] * 4}, {"fog": 0.5}), r"errors of fog must be 5 shares .* got \[0.1, 0.1, 0.1, 0.1\]"),
    (lambda: mce({"fog": 0.1}, {"fog": 0.0}), r"baseline of fog .* take a baseline that errs"),
    (lambda: mce({"fog": float("nan")}, {"fog": 0.5}), r"errors of fog must be .* got \[nan\]"),
    (lambda: average_precision(torch.ones(3), torch.zeros(3) > 0), r"must be a positive example .* got 0 positive"),
    (lambda: average_precision(torch.tensor([torch.nan]), torch.ones(1) > 0), r"no score may be NaN, .* 1 NaN of 1"),
    (lambda: average_precision(torch.ones(3), torch.ones(3)), r"positive bool, got \[3\] and \[3\] of torch.float32"),
    (lambda: aupr(LOGITS, LOGITS[:, :2]), r"inside and outside must be logits .* got \[4, 3\] and \[4, 2\]"),
]


@pytest.mark.parametrize(("call", "message"), FAILS, ids=range(len(FAILS)))
def test_wrong_arguments_of_metrics_fail_clearly(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
