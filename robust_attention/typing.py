"""The legend for shapes and the names of implementations.

B batch, H query heads, T queries, S keys, D key width, E value width, M blocks (median of means), mixture
components or random features, N samples of a density.

Grouped queries: Hkv key-value heads, Hkv divides H. Inside, heads are split as H = K·G (K = Hkv key-value heads, G
query heads that share one), so that one broadcast serves every method: `logit_BKGTS`.
Suffixes spell shapes out where they help; a lower-case letter may be 1 there: `visible_bkgtS`.
"""

from typing import Literal

Impl = Literal["auto", "reference", "streamed", "triton"]
"""reference: the plain formula. streamed: the same without a tensor of the size T·S. triton: fused GPU kernels."""
Keys = Literal["unit", "own"]
WeightGrad = Literal["full", "stop"]
Draw = Literal["bootstrap", "subsample", "partition", "poisson"]
