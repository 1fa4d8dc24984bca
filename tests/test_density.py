"""The density estimator on its own."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import robust_attention as ra
from robust_attention.density import RobustKernelDensity
from robust_attention.plots import density as figure


def sample(clean: int = 200, outliers: int = 20) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    far = torch.tensor([6.0, 6.0]) + 1.5 * torch.randn(outliers, 2, generator=g)
    return torch.cat([torch.randn(clean, 2, generator=g), far]).double()


METHODS = [ra.KDE(), ra.RKDE(ra.Tukey(0.9), sweeps=5), ra.SPKDE(1.4), ra.MoM(blocks=51, draw="partition")]


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_density_equals_its_definition(method: ra.density.DensityMethod) -> None:
    x = sample()
    estimate = RobustKernelDensity(method, bandwidth=0.7).fit(x)
    at = x[::17]
    kernel = torch.exp(-(at[:, None] - x[None]).square().sum(-1) / (2 * 0.49)) / (2 * math.pi * 0.49)
    if isinstance(method, ra.MoM):
        counts = method.draw(220).double()
        blocks = kernel @ (counts / counts.sum(1, keepdim=True)).T
        wanted = blocks.sort(-1).values[:, 25]
    else:
        wanted = kernel @ estimate.weights_
    torch.testing.assert_close(estimate.score_samples(at), wanted.log(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(estimate.weights_.sum(-1), torch.ones_like(estimate.weights_.sum(-1)))
    assert math.isclose(estimate.score(at), float(wanted.log().sum()), rel_tol=1e-9)


@pytest.mark.parametrize("method", METHODS[:3], ids=lambda m: type(m).__name__)
def test_density_integrates_to_one(method: ra.density.DensityMethod) -> None:
    line = torch.linspace(-6, 12, 181, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    density = RobustKernelDensity(method, bandwidth=0.5).fit(sample()).score_samples(grid).exp()
    assert abs(float(density.sum()) * 0.01 - 1) < 1e-3


def test_robust_densities_see_less_of_the_outliers() -> None:
    x = sample()
    at_outliers = {
        type(m).__name__: float(RobustKernelDensity(m, bandwidth=0.7).fit(x).score_samples(x[-20:]).exp().mean())
        for m in METHODS
    }
    for name in ("RKDE", "SPKDE", "MoM"):
        assert at_outliers[name] < 0.7 * at_outliers["KDE"], at_outliers


def test_arrays_come_back_as_arrays() -> None:
    x = sample().numpy()
    estimate = RobustKernelDensity(ra.RKDE(), bandwidth="silverman").fit(x)
    assert isinstance(estimate.weights_, np.ndarray)
    assert isinstance(estimate.score_samples(x[:3]), np.ndarray)
    assert estimate.score_samples(x[:0]).shape == (0,)
    assert RobustKernelDensity(**estimate.get_params()).fit(x).score(x) == estimate.score(x)
    assert estimate.set_params(bandwidth=1.0).fit(x).bandwidth_ == 1.0


@pytest.mark.slow
def test_figure_shows_where_robust_density_helps(tmp_path: Path) -> None:
    result = ra.density.contaminated_normal(seed=0)
    errors = result["integrated_squared_error"]
    assert set(errors) == {"KDE", "RKDE", "SPKDE", "MoM"}
    assert min(errors["RKDE"], errors["SPKDE"], errors["MoM"]) < errors["KDE"]
    assert result["outlier_mass"]["SPKDE"] < 0.5 * result["outlier_mass"]["KDE"]
    path = figure.draw(json.loads(json.dumps(result)), tmp_path / "density.png")
    assert path.stat().st_size > 20_000


@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_density_does_not_feel_a_common_offset(method: ra.density.DensityMethod) -> None:
    x = (sample() * 1024).round() / 1024  # so that adding the offset rounds nothing
    near, far = (RobustKernelDensity(method, 0.7).fit(x + offset) for offset in (0.0, 2.0**20))
    torch.testing.assert_close(far.weights_, near.weights_, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(far.score_samples(x + 2.0**20), near.score_samples(x), rtol=1e-9, atol=1e-9)


def test_density_keeps_points_of_its_own_and_takes_any_array() -> None:
    x = sample().numpy().copy()
    estimate = RobustKernelDensity(ra.KDE(), 1.0).fit(x)
    before = estimate.score_samples(x[:3].copy())
    kept = x[:3].copy()
    x[:] = 100
    assert np.array_equal(estimate.score_samples(kept), before)
    tensor = sample()
    estimate = RobustKernelDensity(ra.KDE(), 1.0).fit(tensor)
    tensor.fill_(100)
    assert np.allclose(estimate.score_samples(kept), before)
    frozen = kept[::-1]
    frozen.flags.writeable = False
    assert RobustKernelDensity(ra.KDE(), 1.0).fit(frozen).weights_.shape == (3,)
    with pytest.raises(ValueError, match=r"X must be real, got torch.complex128; pass"):
        RobustKernelDensity(ra.KDE(), 1.0).fit(kept + 1j)
