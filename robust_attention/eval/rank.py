"""Several methods on several problems: mean ranks and when they differ; two methods on the same cases. Plain Python."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from robust_attention import _checks


def mean_ranks(scores: Sequence[Sequence[float]]) -> list[float]:
    """The mean rank of each method over the problems, from `scores[problem][method]`: 1 is the highest score.

    Equal scores share the mean of their ranks.
    """
    if not scores or not scores[0] or any(len(row) != len(scores[0]) for row in scores):
        raise ValueError(f"scores must be [problems][methods], one length for all, got {[len(row) for row in scores]}")
    ranks = [_ranks(row) for row in scores]
    return [math.fsum(column) / len(scores) for column in zip(*ranks, strict=True)]


def _ranks(row: Sequence[float]) -> list[float]:
    if not all(math.isfinite(score) for score in row):
        raise ValueError(f"scores must be finite, got {list(row)}; leave out problems that some method did not finish")
    # Those above, and half of the others at the same height.
    # Means of equal counts may differ in their last bit, and are equal.
    held = [round(score, 9) for score in row]
    return [sum(other > score for other in held) + (sum(other == score for other in held) + 1) / 2 for score in held]


def critical_difference(num_methods: int, num_problems: int, level: float = 0.05) -> float:
    """Mean ranks that differ by less do not differ at this level, over all pairs together (Nemenyi; Demšar, 2006).

        CD = q sqrt(k (k + 1) / (6 N)),  q √2 the upper quantile of the range of k standard normals

    With few problems it is wide: six problems tell apart two of seven methods only beyond 3.68 ranks.
    """
    _checks.whole("num_methods", num_methods, least=2)
    _checks.whole("num_problems", num_problems, least=1)
    if not 0 < level < 1:
        raise ValueError(f"level must lie between 0 and 1, got {level!r}; 0.05 is usual")
    quantile = _range_quantile(num_methods, level) / math.sqrt(2)
    return quantile * math.sqrt(num_methods * (num_methods + 1) / (6 * num_problems))


def _range_quantile(number: int, level: float) -> float:
    """What the range of so many standard normals exceeds with probability `level`."""
    low, high = 0.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 - _range_below(middle, number) > level else (low, middle)
    return (low + high) / 2


def _range_below(width: float, number: int) -> float:
    """P(range ≤ width) = k ∫ φ(z) (Φ(z) − Φ(z − width))^(k−1) dz, z the largest of them (Simpson's rule)."""
    start, end, parts = -8.0, 8.0, 320
    step = (end - start) / parts

    def density(z: float) -> float:
        within = (math.erf(z / math.sqrt(2)) - math.erf((z - width) / math.sqrt(2))) / 2
        return number * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi) * within ** (number - 1)

    weights = (1 if i in (0, parts) else 4 if i % 2 else 2 for i in range(parts + 1))
    return step / 3 * math.fsum(weight * density(start + i * step) for i, weight in enumerate(weights))


class McNemar(NamedTuple):
    """Two methods on the same cases."""

    left_only: int
    """Cases that the left one gets right more often."""
    right_only: int
    """Cases that the right one gets right more often."""
    p: float
    """Two-sided and exact: of a coin that falls so unevenly."""


def mcnemar(left: Sequence[float], right: Sequence[float]) -> McNemar:
    """McNemar's exact test on the result of each case: 0 or 1, or the share of seeds in which it was right.

    A case counts for the method with the larger share, whatever the difference; cases with equal shares say nothing.
    """
    if len(left) != len(right) or not left:
        raise ValueError(f"left and right must have one result for each case, got {len(left)} and {len(right)}")
    # Shares of a few seeds are sums of rounded numbers: what is equal may differ in its last bits.
    ups = sum(a > b + 1e-6 for a, b in zip(left, right, strict=True))
    downs = sum(b > a + 1e-6 for a, b in zip(left, right, strict=True))
    number = ups + downs
    tail = sum(math.comb(number, i) for i in range(min(ups, downs) + 1))
    return McNemar(ups, downs, min(1.0, 2 * tail / 2**number))
