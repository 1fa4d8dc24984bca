"""Settings beyond the paper's, for the question whether some member of the family earns its keep.

The paper's kernel is wide: with unit keys and σ² = √D the marginal Gram is nearly constant, and so are RKDE's weights.
These rows give the weights kernels of their own, narrower for keys than for values, in every block or in the first.
"""

import math
from dataclasses import replace
from typing import TypeVar

import robust_attention as ra
from robust_attention.recipes.vision import VisionConfig

KEY_SHARE = 0.05
"""σ_w² of the keys' part of the weights' Grams, as a share of √D."""
VALUE_RATIO = 64.0
"""σ² of the values' part over that of the keys' part."""


M = TypeVar("M", ra.RKDE, ra.SPKDE)


def narrow(method: M, base: VisionConfig, share: float = KEY_SHARE, ratio: float = VALUE_RATIO) -> M:
    """The method with these bandwidths for the weights, for the width of this model's heads."""
    variance = share * math.sqrt(base.model.dim / base.model.num_heads)
    return replace(method, weight_bandwidth=math.sqrt(variance), value_bandwidth=math.sqrt(ratio * variance))


def spkde_narrow(base: VisionConfig) -> VisionConfig:
    return replace(base, row="spkde-narrow", method=narrow(ra.SPKDE(beta=1.4), base))


def spkde_mild(base: VisionConfig) -> VisionConfig:
    """A smaller β keeps more keys."""
    return replace(base, row="spkde-mild", method=narrow(ra.SPKDE(beta=1.15), base))


def spkde_first(base: VisionConfig) -> VisionConfig:
    """Robust weights where patches enter, plain kernels above."""
    first = narrow(ra.SPKDE(beta=1.4), base)
    return replace(base, row="spkde-first", method=(first, *[ra.KDE()] * (base.model.depth - 1)))


def spkde_first_softmax(base: VisionConfig) -> VisionConfig:
    """Robust weights where patches enter, softmax above."""
    first = narrow(ra.SPKDE(beta=1.4), base)
    return replace(base, row="spkde-first-softmax", method=(first, *[ra.Softmax()] * (base.model.depth - 1)))


def rkde_narrow(base: VisionConfig) -> VisionConfig:
    """A redescending loss, three sweeps."""
    return replace(base, row="rkde-narrow", method=narrow(ra.RKDE(loss=ra.Tukey(a=1.0), sweeps=3), base))


def mom_partition(base: VisionConfig) -> VisionConfig:
    """Disjoint blocks, as the theorem wants them."""
    return replace(base, row="mom-partition", method=ra.MoM(blocks=3, draw="partition"))


ROWS = {
    "spkde-narrow": ("SPKDE, narrow", spkde_narrow),
    "spkde-mild": ("SPKDE, narrow, β = 1.15", spkde_mild),
    "spkde-first": ("SPKDE, narrow, first block; KDE", spkde_first),
    "spkde-first-softmax": ("SPKDE, narrow, first block; softmax", spkde_first_softmax),
    "rkde-narrow": ("RKDE (Tukey), narrow", rkde_narrow),
    "mom-partition": ("MoM, disjoint blocks", mom_partition),
}
"""Rows that a study runs when they are named."""
