"""The legend for shapes and the names of implementations.

B batch, H query heads, Hkv key-value heads (divides H), T queries, S keys, D key width, E value width,
M blocks (median of means) or mixture components, N samples of a density.
Suffixes spell shapes out where they help: `logit_BHTS`, `count_MS`.
"""

from typing import Literal

Impl = Literal["auto", "reference"]
WeightGrad = Literal["full", "stop"]
