"""Modules around the methods: projections, parameters that a method learns, draws. No mathematics of their own."""

from robust_attention.nn.attend import Attend
from robust_attention.nn.attention import Attention
from robust_attention.nn.draws import attends, eval_draw, is_stochastic, set_draws, with_methods
from robust_attention.nn.encoder import TransformerEncoderLayer
from robust_attention.nn.multihead import MultiheadAttention

__all__ = [
    "Attend",
    "Attention",
    "MultiheadAttention",
    "TransformerEncoderLayer",
    "attends",
    "eval_draw",
    "is_stochastic",
    "set_draws",
    "with_methods",
]
