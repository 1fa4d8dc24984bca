"""Mean ranks, critical differences and McNemar's test, against published numbers and against counting."""

import itertools

import pytest

from robust_attention.eval.rank import critical_difference, mcnemar, mean_ranks


def test_mean_ranks_count_from_the_highest_score_and_share_ties() -> None:
    assert mean_ranks([[0.9, 0.5, 0.7], [0.2, 0.4, 0.3]]) == [2.0, 2.0, 2.0]
    assert mean_ranks([[0.9, 0.9, 0.7, 0.1]]) == [1.5, 1.5, 3.0, 4.0]
    assert mean_ranks([[1, 1, 1]]) == [2.0, 2.0, 2.0]
    # 75.25 of 90, added up in two orders.
    assert mean_ranks([[0.836111111111111, 0.8361111111111111]]) == [1.5, 1.5]


def test_mean_ranks_sum_to_the_same_whatever_the_ties() -> None:
    for row in itertools.product((0.1, 0.2, 0.3), repeat=4):
        assert sum(mean_ranks([row])) == 10


@pytest.mark.parametrize(
    ("methods", "quantile"),
    # Demšar (2006), Table 5, level 0.05: the studentised range over √2.
    [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (7, 2.949), (8, 3.031), (9, 3.102), (10, 3.164)],
)
def test_critical_difference_has_the_published_quantiles(methods: int, quantile: float) -> None:
    found = critical_difference(methods, 14) / (methods * (methods + 1) / (6 * 14)) ** 0.5
    assert found == pytest.approx(quantile, abs=1.1e-3)


def test_critical_difference_of_six_problems_and_seven_methods_is_as_wide_as_documented() -> None:
    assert critical_difference(7, 6) == pytest.approx(3.68, abs=5e-3)
    assert critical_difference(4, 14, level=0.10) == pytest.approx(2.291 * (20 / 84) ** 0.5, abs=1e-3)


def test_mcnemar_counts_coins() -> None:
    left, right = [1, 1, 1, 1, 1, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1, 1]
    found = mcnemar(left, right)
    assert (found.left_only, found.right_only) == (5, 1)
    assert found.p == pytest.approx(2 * (1 + 6) / 64)
    assert mcnemar(right, left).p == found.p


def test_mcnemar_says_nothing_where_nothing_differs() -> None:
    assert mcnemar([1, 0], [1, 0]) == (0, 0, 1.0)
    assert mcnemar([1, 0], [0, 1]).p == 1.0
    assert mcnemar([0.7, 0.3], [0.1 + 0.6, 0.1 + 0.2]) == (0, 0, 1.0)  # equal but for rounding


def test_mcnemar_counts_a_case_once_whatever_the_share_of_seeds() -> None:
    assert mcnemar([0.6, 0.5, 1.0], [0.5, 0.5, 0.0])[:2] == (2, 0)


def test_rank_statistics_fails_clearly() -> None:
    with pytest.raises(ValueError, match="one length for all"):
        mean_ranks([[1, 2], [1]])
    with pytest.raises(ValueError, match="must be finite"):
        mean_ranks([[1, float("nan")]])
    with pytest.raises(ValueError, match="one result for each case"):
        mcnemar([1], [1, 0])
    with pytest.raises(ValueError, match="level must lie"):
        critical_difference(3, 5, level=1.5)
