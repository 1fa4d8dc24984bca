"""Robust density estimates in their own right, in scikit-learn's manner and without depending on it."""

import math
from typing import Any, Self

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops.kde import KDE
from robust_attention.ops.mom import MoM
from robust_attention.ops.rkde import RKDE
from robust_attention.ops.spkde import SPKDE
from robust_attention.robust.blocks import lower_median
from robust_attention.robust.gram import squared_distances

DensityMethod = KDE | RKDE | SPKDE | MoM
_CHUNK_ENTRIES = 2**24


class RobustKernelDensity:
    """Gaussian kernel density whose points are weighted, or divided into blocks, by one of the attention methods.

        p(x) = Σ_j ω_j N(x; x_j, σ²I)                   KDE (ω = 1/N), RKDE, SPKDE
        p(x) = lower median over blocks l of (1/|I_l|) Σ_{j∈I_l} N(x; x_j, σ²I)         MoM

    Args:
        method: KDE(), RKDE(...), SPKDE(...) or MoM(...); of their settings only those of the weights or blocks count,
            the bandwidth is the one given here.
        bandwidth: σ, or a rule: "scott" or "silverman", with the mean standard deviation of the columns.
    After `fit`:
        weights_: `[N]`, summing to 1; for MoM `[blocks, N]`, one such row a block.
        bandwidth_: the σ in use.
    Arrays and tensors are taken alike; what comes in as an array comes out as one. Computed in float64.
    """

    def __init__(self, method: DensityMethod | None = None, bandwidth: float | str = "scott") -> None:
        self.method = method
        self.bandwidth = bandwidth

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """The constructor's arguments."""
        return {"method": self.method, "bandwidth": self.bandwidth}

    def set_params(self, **params: Any) -> Self:
        """Change the constructor's arguments; takes effect with the next `fit`."""
        for name, value in params.items():
            if name not in ("method", "bandwidth"):
                raise ValueError(f"the parameters are method and bandwidth, got {name!r}; pass one of those")
            setattr(self, name, value)
        return self

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the weights of the points `[N, D]`. `y` is ignored."""
        method = KDE() if self.method is None else self.method
        if not isinstance(method, DensityMethod):
            raise ValueError(
                f"method must be KDE, RKDE, SPKDE or MoM, got {method!r}; other methods define no density of their own"
            )
        points = _as_points("X", X)
        if len(points) == 0:
            raise ValueError(
                f"X must hold at least one point [N, D], got {list(points.shape)}; pass more data"
            )
        self.bandwidth_ = _bandwidth(self.bandwidth, points)
        self.n_features_in_ = points.shape[1]
        self._points = points
        if isinstance(method, MoM):
            counts = method.draw(len(points), device=points.device).double()
            # A block without points estimates nothing, so it has no vote.
            weights = counts[counts.sum(-1) > 0]
            self._weights = weights / weights.sum(-1, keepdim=True)
        else:
            gram = torch.exp(squared_distances(points) / (-2 * self.bandwidth_**2))
            self._weights = method.density_weights(gram)
        self.weights_ = _like(X, self._weights)
        return self

    def score_samples(self, X: Any) -> Any:
        """log p at the points `[N, D]`, as `[N]`."""
        if not hasattr(self, "_points"):
            raise ValueError(
                "fit must be called before score_samples, got an estimator without points; call fit(X)"
            )
        samples = _as_points("X", X).to(self._points.device)
        if samples.shape[1] != self.n_features_in_:
            raise ValueError(
                f"X must have {self.n_features_in_} columns as in fit, got {samples.shape[1]}; pass the same features"
            )
        rows = max(1, _CHUNK_ENTRIES // len(self._points))
        parts = [self._log_density(part) for part in samples.split(rows)]
        return _like(X, torch.cat(parts) if parts else samples.new_zeros(0))

    def score(self, X: Any, y: Any = None) -> float:
        """Total log-likelihood of the points."""
        return float(self.score_samples(torch.as_tensor(X)).sum())

    def _log_density(self, samples: Tensor) -> Tensor:
        size = self.n_features_in_
        variance = self.bandwidth_**2
        # Distances by differences from the first point: translation costs no digits then.
        origin = self._points[:1]
        x, p = samples - origin, self._points - origin
        distance = (x.square().sum(-1)[:, None] + p.square().sum(-1) - 2 * x @ p.mT).clamp(min=0)
        log_kernel = -distance / (2 * variance) - 0.5 * size * math.log(2 * math.pi * variance)
        if self._weights.dim() == 1:
            return torch.logsumexp(log_kernel + self._weights.log(), -1)
        blocks = torch.stack([torch.logsumexp(log_kernel + block.log(), -1) for block in self._weights], -1)
        chosen, _ = lower_median(blocks, torch.ones_like(blocks, dtype=torch.bool))
        return blocks.gather(-1, chosen[:, None]).squeeze(-1)


def _as_points(name: str, X: Any) -> Tensor:
    points = torch.as_tensor(X).detach().double()
    if points.dim() != 2 or points.shape[1] == 0:
        raise ValueError(
            f"{name} must be [N, D], got {list(points.shape)}; pass {name}.reshape(-1, 1) for one feature"
        )
    if not bool(points.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or Inf; drop those rows")
    return points


def _like(X: Any, result: Tensor) -> Any:
    return result if isinstance(X, Tensor) else result.numpy()


def _bandwidth(bandwidth: float | str, points: Tensor) -> float:
    if not isinstance(bandwidth, str):
        _checks.positive("bandwidth", bandwidth)
        return float(bandwidth)
    _checks.one_of("bandwidth", bandwidth, ("scott", "silverman"))
    count, size = points.shape
    spread = float(points.std(0).mean()) if count > 1 else 0.0
    factor = count ** (-1 / (size + 4))
    if bandwidth == "silverman":
        factor *= ((size + 2) / 4) ** (-1 / (size + 4))
    if not spread * factor > 0:
        raise ValueError(
            f"bandwidth={bandwidth!r} needs points that differ, got {count} equal ones; pass a number"
        )
    return spread * factor
