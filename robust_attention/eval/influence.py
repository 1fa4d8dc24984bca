"""How much one outlying key counts as it moves away from the others: the numbers behind the figure of each method."""

import math
from typing import Any

import torch
from torch import Generator, Tensor
from torch.nn import functional as F

from robust_attention.ops import Method, methods
from robust_attention.ops.fourier import FourierMoM
from robust_attention.ops.mom import MoM
from robust_attention.ops.rkde import RKDE
from robust_attention.ops.softmax import Softmax
from robust_attention.ops.spkde import SPKDE
from robust_attention.robust.losses import Tukey

PROBLEMS, KEYS, QUERIES, WIDTH = 128, 32, 16, 16
SPREAD = 0.7
"""Of each coordinate of a key around the direction that all keys share."""

_VARIANTS: dict[type[Method], dict[str, Method]] = {
    FourierMoM: {"partition": FourierMoM(draw="partition")},
    MoM: {"partition": MoM(draw="partition")},
    RKDE: {"Tukey(0.8)": RKDE(Tukey(0.8))},
    SPKDE: {"weight_bandwidth=0.7, value_bandwidth=3": SPKDE(weight_bandwidth=0.7, value_bandwidth=3.0)},
}
"""Settings that a figure shows besides the default ones."""


def outlier_shares(seed: int = 0, steps: int = 25) -> dict[str, Any]:
    """The share of one outlying key in the output, by every method: turned away, and with its value moved away.

    The keys of a head lie around one direction, at length √D; queries point anywhere. One key is replaced: by one at
    an angle from that direction with a value like the others, then by one among the others whose value is moved. The
    share is A_io/Σ_j A_ij of `Method.coefficients`, averaged over queries and problems. The outlier stands in another
    place in each problem, so that blocks of keys that a call draws once are averaged over too.
    """
    angles = [180 * step / (steps - 1) for step in range(steps)]
    offsets = [8 * step / (steps - 1) for step in range(steps)]
    record: dict[str, Any] = {
        "seed": seed,
        "even_share": 1 / KEYS,
        "keys": {"x": angles, "shares": {}},
        "values": {"x": offsets, "shares": {}},
        "curves": {},
    }
    problem = _Problem(seed)
    for name, cls in methods().items():
        curves = {cls.__name__: cls()}
        curves |= {f"{cls.__name__}, {words}": method for words, method in _VARIANTS.get(cls, {}).items()}
        record["curves"][name] = list(curves)
        for label, method in curves.items():
            record["keys"]["shares"][label] = [problem.share(method, angle=math.radians(x)) for x in angles]
            record["values"]["shares"][label] = [problem.share(method, offset=x) for x in offsets]
    record["baseline"] = Softmax.__name__
    return record


class _Problem:
    """Fixed keys, values and queries; only the outlier moves."""

    def __init__(self, seed: int) -> None:
        g = Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, dtype=torch.float64)

        self.q = normal(PROBLEMS, 1, QUERIES, WIDTH)
        self.k = SPREAD * normal(PROBLEMS, 1, KEYS, WIDTH)
        self.k[..., 0] += math.sqrt(WIDTH)
        self.v = 0.5 * normal(PROBLEMS, 1, KEYS, WIDTH)
        # A right angle from the common direction, and where the value goes.
        self.aside = F.normalize(normal(PROBLEMS, WIDTH - 1), dim=-1)
        self.away = F.normalize(normal(PROBLEMS, WIDTH), dim=-1)
        self.place = torch.arange(PROBLEMS) % KEYS
        self.seed = seed

    def share(self, method: Method, *, angle: float | None = None, offset: float = 0.0) -> float:
        """With the outlying key at `angle` (None: where it was) and its value moved by `offset`."""
        every = torch.arange(PROBLEMS)
        k, v = self.k.clone(), self.v.clone()
        if angle is not None:
            along = self.aside.new_full((PROBLEMS, 1), math.cos(angle))
            k[every, 0, self.place] = math.sqrt(WIDTH) * torch.cat((along, math.sin(angle) * self.aside), -1)
        v[every, 0, self.place] += offset * self.away
        made = method.initial_tensors(1, WIDTH, QUERIES, KEYS, Generator().manual_seed(self.seed))
        owned: dict[str, Any] = {name: x.double() for name, x in made.items()}
        coefficients = method.coefficients(self.q, k, v, **owned)
        shares = coefficients / coefficients.sum(-1, keepdim=True)
        # Six decimals: the last bits of sums differ between machines.
        return round(float(shares[every, 0, :, self.place].mean()), 6)
