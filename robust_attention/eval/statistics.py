"""How sure an accuracy is, and whether two accuracies on the same examples differ. Plain Python: lists of floats."""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

# The quantile of the normal distribution that leaves 2.5 % on either side.
_Z95 = 1.959963984540054
_MOST_WORK = 4_000_000


def binomial_interval(accuracy: float, num_examples: int) -> tuple[float, float]:
    """95 % interval of an accuracy over independent examples (Wilson's score interval).

    For a random model whose accuracy is a mean over draws it is, if anything, too wide.
    """
    if not 0 <= accuracy <= 1:
        raise ValueError(f"accuracy must lie between 0 and 1, got {accuracy}; divide per cents by 100")
    if num_examples < 1:
        raise ValueError(f"num_examples must be at least 1, got {num_examples}")
    square = _Z95**2 / num_examples
    middle = (accuracy + square / 2) / (1 + square)
    half = _Z95 / (1 + square) * math.sqrt(accuracy * (1 - accuracy) / num_examples + square / (4 * num_examples))
    return max(0.0, middle - half), min(1.0, middle + half)


def sign_flip_p(differences: Sequence[float]) -> float:
    """Two-sided p of a paired sign-flip test that the differences have mean 0.

    Under the null each difference keeps its size and has a random sign, so their sum has mean 0 and variance Σd².
    Computed exactly, by convolution, where all differences are multiples of 1/20 or of a coarser fraction, as means of
    right and wrong over a few draws are, and not too many to count; by the normal limit elsewhere.
    """
    sizes = [abs(d) for d in differences if d != 0]
    total = abs(sum(differences))
    if not sizes:
        return 1.0
    for parts in range(1, 21):
        whole = [round(size * parts) for size in sizes]
        on_lattice = all(abs(size * parts - number) < 1e-4 for size, number in zip(sizes, whole, strict=True))
        if on_lattice and len(whole) * sum(whole) <= _MOST_WORK:
            return _lattice_p(whole, round(total * parts))
    return math.erfc(total / math.sqrt(2 * sum(size**2 for size in sizes)))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for being many (Holm): reject where the result is at most the level."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _lattice_p(sizes: list[int], total: int) -> float:
    # ways[s]: how many choices of signs leave the positive ones with sum s; the signed sum is then 2 s - sum(sizes).
    ways = [1]
    for size in sizes:
        longer = ways + [0] * size
        for place, number in enumerate(ways):
            longer[place + size] += number
        ways = longer
    whole = sum(sizes)
    return sum(number for place, number in enumerate(ways) if abs(2 * place - whole) >= total) / 2 ** len(sizes)


class Estimate(NamedTuple):
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


def mean_interval(results: Sequence[Sequence[float]]) -> Estimate:
    """The mean over seeds and examples `[seeds][examples]`, and an interval that covers other seeds and examples.

    Variance: that of the seeds' means over their number, plus that of the examples' means over theirs; Student's t with
    Satterthwaite's degrees of freedom. With one seed the interval is over examples alone: another seed moves it too.
    Pass differences to a paired twin for the interval of a gain.
    """
    num_seeds, num_examples = len(results), len(results[0]) if results else 0
    if num_seeds < 1 or num_examples < 1 or any(len(row) != num_examples for row in results):
        raise ValueError(f"results must be [seeds][examples], one length for all, got {[len(row) for row in results]}")
    seeds = [math.fsum(row) / num_examples for row in results]
    mean = math.fsum(seeds) / num_seeds
    examples = [math.fsum(column) / num_seeds for column in zip(*results, strict=True)]
    between, within = _variance(seeds, mean) / num_seeds, _variance(examples, mean) / num_examples
    terms = [(between, num_seeds - 1), (within, num_examples - 1)]
    variance = sum(term for term, _ in terms)
    if variance == 0:
        return Estimate(mean, mean, mean)
    freedom = variance**2 / sum(term**2 / max(1, degrees) for term, degrees in terms)
    half = student_quantile(round(min(max(1.0, freedom), 1000.0), 3)) * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half)


@lru_cache(maxsize=4096)
def student_quantile(freedom: float) -> float:
    """The number that Student's t of so many degrees of freedom, 1 to 1000, exceeds with probability 2.5 %."""
    low, high = 0.0, 700.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_tail(middle, freedom) > 0.025 else (low, middle)
    return (low + high) / 2


def _student_tail(t: float, freedom: float) -> float:
    # P(T > t): with T = sqrt(f) tan θ the density becomes cos^(f-1) θ, smooth on a bounded interval (Simpson's rule).
    start, parts = math.atan(t / math.sqrt(freedom)), 400
    width = (math.pi / 2 - start) / parts

    def density(theta: float) -> float:
        return math.exp((freedom - 1) * math.log(max(math.cos(theta), 1e-300)))

    total = sum((1 if i in (0, parts) else 4 if i % 2 else 2) * density(start + i * width) for i in range(parts + 1))
    norm = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - math.log(math.pi) / 2
    return math.exp(norm) * total * width / 3


def _variance(values: Sequence[float], mean: float) -> float:
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1) if len(values) > 1 else 0.0
