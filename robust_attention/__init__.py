"""Transformer attention that survives contaminated and adversarial input, by robust kernel density estimation.

import robust_attention as ra
out = ra.RKDE(loss=ra.Huber(a=0.2)).attend(q, k, v)
"""

from robust_attention import density, nn
from robust_attention._version import __version__
from robust_attention.adapters import restore, robustify, weights_of
from robust_attention.ops import Method, methods, register
from robust_attention.ops._blocks import BlockMethod
from robust_attention.ops._cache import Cache
from robust_attention.ops.fourier import Fourier, FourierMoM
from robust_attention.ops.kde import KDE
from robust_attention.ops.mgk import MGK
from robust_attention.ops.mom import MoM
from robust_attention.ops.performer import Performer
from robust_attention.ops.position_scaled import PositionScaled
from robust_attention.ops.rkde import RKDE
from robust_attention.ops.softmax import Softmax
from robust_attention.ops.spkde import SPKDE
from robust_attention.robust.losses import Hampel, Huber, Loss, Tukey, Welsch

__all__ = [
    "KDE",
    "MGK",
    "RKDE",
    "SPKDE",
    "BlockMethod",
    "Cache",
    "Fourier",
    "FourierMoM",
    "Hampel",
    "Huber",
    "Loss",
    "Method",
    "MoM",
    "Performer",
    "PositionScaled",
    "Softmax",
    "Tukey",
    "Welsch",
    "__version__",
    "density",
    "methods",
    "nn",
    "register",
    "restore",
    "robustify",
    "weights_of",
]
