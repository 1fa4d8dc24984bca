"""How sure an accuracy is, and whether two accuracies on the same examples differ. Plain Python: lists of floats."""

import math
from collections.abc import Sequence

# The quantile of the normal distribution that leaves 2.5 % on either side.
_Z95 = 1.959963984540054


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
    right and wrong over a few draws are; by the normal limit elsewhere.
    """
    sizes = [abs(d) for d in differences if d != 0]
    total = abs(sum(differences))
    if not sizes:
        return 1.0
    for parts in range(1, 21):
        whole = [round(size * parts) for size in sizes]
        if all(abs(size * parts - number) < 1e-4 for size, number in zip(sizes, whole, strict=True)):
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
