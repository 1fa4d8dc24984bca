"""Intervals and p-values, each against published numbers or brute force."""

import math
from itertools import product
from random import Random

import pytest

from robust_attention.eval.statistics import binomial_interval, holm, mean_interval, sign_flip_p, student_quantile

# Newcombe (1998), table I, method 3: right, of, lower and upper end.
PUBLISHED = [
    (81, 263, 0.2553, 0.3662),
    (15, 148, 0.0624, 0.1605),
    (0, 20, 0.0000, 0.1611),
    (1, 29, 0.0061, 0.1718),
]


@pytest.mark.parametrize(("right", "number", "low", "high"), PUBLISHED)
def test_interval_equals_published_ones(right: int, number: int, low: float, high: float) -> None:
    assert binomial_interval(right / number, number) == pytest.approx((low, high), abs=5e-5)
    mirrored = binomial_interval(1 - right / number, number)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


@pytest.mark.parametrize("accuracy", [0.0, 0.03, 0.5, 0.97, 1.0])
@pytest.mark.parametrize("number", [1, 10, 540])
def test_ends_of_the_interval_are_1_96_deviations_away(accuracy: float, number: int) -> None:
    low, high = binomial_interval(accuracy, number)
    assert 0 <= low <= accuracy <= high + 1e-15 <= 1 + 1e-15
    for end in (low, high):
        if 1e-9 < end < 1 - 1e-9:
            assert abs(accuracy - end) / math.sqrt(end * (1 - end) / number) == pytest.approx(1.959964, rel=1e-6)


@pytest.mark.parametrize(
    ("accuracy", "number", "message"),
    [
        (97.0, 10, r"accuracy must lie between 0 and 1, got 97.0; divide per cents by 100"),
        (-0.1, 10, r"accuracy must lie between 0 and 1, got -0.1"),
        (math.nan, 10, r"accuracy must lie between 0 and 1, got nan"),
        (0.5, 0, r"num_examples must be at least 1, got 0"),
    ],
)
def test_interval_fails_clearly(accuracy: float, number: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        binomial_interval(accuracy, number)


def enumerated(differences: list[float]) -> float:
    """The share of all signs whose sum is at least as far from 0."""
    least = abs(sum(differences)) - 1e-9
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in product((-1, 1), repeat=len(differences))
    ]
    return sum(total >= least for total in sums) / len(sums)


@pytest.mark.parametrize("seed", range(20))
def test_sign_flip_p_of_whole_differences_equals_enumeration(seed: int) -> None:
    random = Random(seed)
    differences = [float(random.choice((-1, 0, 1, 1))) for _ in range(random.randrange(1, 11))]
    assert sign_flip_p(differences) == pytest.approx(enumerated(differences), abs=1e-12)
    assert sign_flip_p([-d for d in differences]) == sign_flip_p(differences)


@pytest.mark.parametrize("shift", [0.0, 0.2, 0.4])
def test_sign_flip_p_of_many_other_differences_is_near_enumeration(shift: float) -> None:
    random = Random(0)
    differences = [random.uniform(-1, 1) + shift for _ in range(15)]
    assert sign_flip_p(differences) == pytest.approx(enumerated(differences), abs=0.02)


@pytest.mark.parametrize("number", [1, 2, 4, 7])
def test_sign_flip_p_of_few_other_differences_equals_enumeration(number: int) -> None:
    differences = [0.2] * number  # means over five draws, say
    assert sign_flip_p(differences) == pytest.approx(enumerated(differences), abs=1e-9)


def test_sign_flip_p_without_differences_is_one() -> None:
    assert sign_flip_p([]) == sign_flip_p([0.0, 0.0]) == sign_flip_p([1.0, -1.0]) == 1


def test_sign_flip_p_is_exact_far_out() -> None:
    assert sign_flip_p([1.0] * 500) == pytest.approx(2.0**-499, rel=1e-9, abs=0)


def test_holm_equals_a_hand_computed_example() -> None:
    # In order: 4 · 0.005, 3 · 0.01, 2 · 0.03; then 1 · 0.04, which may not be below the one before.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.02, 0.7]) == pytest.approx([1.0, 0.06, 1.0])
    assert holm([0.02, 0.02]) == pytest.approx([0.04, 0.04])
    assert holm([0.03]) == [0.03]
    assert holm([]) == []


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (5, 2.5706), (30, 2.0423), (1000, 1.9623)]
)
def test_student_quantile_equals_the_tables(freedom: float, quantile: float) -> None:
    assert student_quantile(freedom) == pytest.approx(quantile, abs=1e-4)


def test_mean_interval_of_one_seed_is_the_examples_own() -> None:
    right = [1.0] * 60 + [0.0] * 40
    mean, low, high = mean_interval([right])
    half = student_quantile(99) * math.sqrt(0.24 / 99)
    assert (mean, low, high) == pytest.approx((0.6, 0.6 - half, 0.6 + half), abs=1e-6)


def test_mean_interval_of_equal_examples_is_the_seeds_own() -> None:
    mean, low, high = mean_interval([[value] * 50 for value in (1.0, 2.0, 3.0)])
    half = student_quantile(2) / math.sqrt(3)
    assert (mean, low, high) == pytest.approx((2, 2 - half, 2 + half), abs=1e-6)
    assert mean_interval([[0.5] * 4] * 3) == (0.5, 0.5, 0.5)


def test_mean_interval_covers_what_it_says() -> None:
    random, covered, rounds = Random(0), 0, 150
    for _ in range(rounds):
        examples = [random.gauss(0, 1) for _ in range(40)]
        seeds = [random.gauss(0, 0.2) for _ in range(4)]
        rows = [[example + seed + random.gauss(0, 0.5) for example in examples] for seed in seeds]
        _, low, high = mean_interval(rows)
        covered += low <= 0 <= high
    assert 0.93 <= covered / rounds <= 1


def test_mean_interval_of_unequal_rows_fails_clearly() -> None:
    with pytest.raises(ValueError, match="one length for all"):
        mean_interval([[1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="one length for all"):
        mean_interval([])


def test_sign_flip_p_of_thousands_is_quick_and_near_the_exact_one() -> None:
    differences = [0.05] * 1000 + [-0.05] * 930
    assert sign_flip_p(differences) == pytest.approx(math.erfc(70 / math.sqrt(2 * 1930)), rel=0.06)
    assert sign_flip_p([0.05 * (i % 20) - 0.4 for i in range(20000)]) < 1e-10
