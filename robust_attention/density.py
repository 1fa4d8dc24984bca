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
from robust_attention.robust.losses import Huber

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
            raise ValueError(f"X must hold at least one point [N, D], got {list(points.shape)}; pass more data")
        self.bandwidth_ = _bandwidth(self.bandwidth, points)
        self.n_features_in_ = points.shape[1]
        self._points = points
        if isinstance(method, MoM):
            counts = method.counts(len(points), method.seed, points.device).double()
            # A block without points estimates nothing, so it has no vote.
            weights = counts[counts.sum(-1) > 0]
            self._weights = weights / weights.sum(-1, keepdim=True)
        else:
            # Around the first point: an offset that all share costs no digits then.
            gram = torch.exp(squared_distances(points - points[:1]) / (-2 * self.bandwidth_**2))
            self._weights = method.density_weights(gram)
        self.weights_ = _like(X, self._weights)
        return self

    def score_samples(self, X: Any) -> Any:
        """log p at the points `[N, D]`, as `[N]`."""
        if not hasattr(self, "_points"):
            raise ValueError("fit must be called before score_samples, got an estimator without points; call fit(X)")
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
        # Around the first point: an offset that all share costs no digits then.
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
    # A copy: what the caller does to his data later is not ours to follow. Arrays copy themselves, whatever their
    # strides and flags.
    raw = X.detach() if isinstance(X, Tensor) else torch.as_tensor(X.copy() if hasattr(X, "strides") else X)
    if raw.is_complex():
        raise ValueError(f"{name} must be real, got {raw.dtype}; pass real and imaginary parts as two columns")
    points = raw.double().clone()
    if points.dim() != 2 or points.shape[1] == 0:
        raise ValueError(f"{name} must be [N, D], got {list(points.shape)}; pass {name}.reshape(-1, 1) for one feature")
    if not bool(points.isfinite().all()):
        raise ValueError(f"{name} must be finite, got NaN or Inf; drop those rows")
    return points


def _like(X: Any, result: Tensor) -> Any:
    if isinstance(X, Tensor):
        return result
    try:
        return result.numpy()
    except RuntimeError:  # torch without NumPy
        return result


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
        raise ValueError(f"bandwidth={bandwidth!r} needs points that differ, got {count} equal ones; pass a number")
    return spread * factor


def contaminated_normal(seed: int = 0, clean: int = 1000, outliers: int = 100, steps: int = 91) -> dict[str, Any]:
    """The paper's density figure as numbers: a standard normal in the plane, contaminated by a gamma distribution.

    Bandwidth by Scott's rule for all. RKDE takes one sweep (as in the paper) with Huber's threshold at the median
    distance from the plain mean, because distances have another scale at this bandwidth than in an attention layer;
    SPKDE the paper's β = 1.4; MoM the paper's bootstrap of 80 % in 5 blocks.
    """
    # NumPy is not needed for the library, and torch's gamma takes no generator: a gamma of whole shape is a sum of
    # exponentials.
    g = torch.Generator().manual_seed(seed)
    shape, scale = 9, 0.5
    normal = torch.randn(clean, 2, generator=g, dtype=torch.float64)
    gamma = -scale * torch.rand(outliers, 2, shape, generator=g, dtype=torch.float64).clamp(min=1e-300).log().sum(-1)
    points = torch.cat([normal, gamma])

    sigma = _bandwidth("scott", points)
    gram = torch.exp(squared_distances(points - points[:1]) / (-2 * sigma**2))
    from_mean = (1 - 2 * gram.mean(1) + gram.mean()).clamp(min=0).sqrt()
    methods: dict[str, DensityMethod] = {
        "KDE": KDE(),
        "RKDE": RKDE(Huber(float(from_mean.median()))),
        "SPKDE": SPKDE(1.4),
        "MoM": MoM(),
    }
    line = torch.linspace(-4, 8, steps, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    truth = torch.exp(-grid.square().sum(-1) / 2) / (2 * math.pi)
    cell = float(line[1] - line[0]) ** 2
    surfaces, errors, mass = {"truth": truth}, {}, {}
    for name, method in methods.items():
        estimate = RobustKernelDensity(method, sigma).fit(points)
        surfaces[name] = estimate.score_samples(grid).exp()
        errors[name] = float((surfaces[name] - truth).square().sum() * cell)
        weights = torch.as_tensor(estimate.weights_)
        mass[name] = float(weights.reshape(-1, len(points))[:, clean:].sum(-1).mean())
    return {
        "seed": seed,
        "bandwidth": sigma,
        "methods": {name: repr(method) for name, method in methods.items()},
        "integrated_squared_error": errors,
        "outlier_mass": mass,
        "line": line.tolist(),
        "surfaces": {name: surface.reshape(steps, steps).tolist() for name, surface in surfaces.items()},
        "clean": normal.tolist(),
        "outliers": gamma.tolist(),
    }
