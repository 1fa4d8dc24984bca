"""The methods do something, to the right keys: outliers lose weight, and settings matter."""

import pytest
import torch
from torch import Tensor

import robust_attention as ra


def cluster(seed: int, outliers: int = 10) -> tuple[Tensor, Tensor]:
    """200 keys of width 64 around a common centre; the first ones point in random directions away from it."""
    g = torch.Generator().manual_seed(seed)
    centre = torch.randn(64, generator=g, dtype=torch.float64)
    k = centre + 0.35 * torch.randn(200, 64, generator=g, dtype=torch.float64)
    k[:outliers] = torch.randn(outliers, 64, generator=g, dtype=torch.float64)
    # Away from the centre: a direction that happens to point towards it is mirrored.
    k[:outliers] -= 2 * centre * (k[:outliers] @ centre / centre.square().sum()).clamp(min=0)[:, None]
    v = torch.randn(64, generator=g, dtype=torch.float64) + 0.35 * torch.randn(
        200, 64, generator=g, dtype=torch.float64
    )
    return k[None, None], v[None, None]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outliers_lose_weight(seed: int, dtype: torch.dtype) -> None:
    k, v = (x.to(dtype) for x in cluster(seed))
    for method, most in ((ra.RKDE(ra.Huber(0.2)), 0.45), (ra.SPKDE(1.05), 0.6), (ra.SPKDE(1.4), 0.0)):
        marginal = method.weights(k, v).marginal
        assert float(marginal[..., :10].mean() / marginal[..., 10:].mean()) <= most, method
        assert marginal.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("loss", [ra.Huber(0.2), ra.Hampel(0.2), ra.Welsch(0.3), ra.Tukey(0.5)])
def test_outlying_values_lose_joint_weight(loss: ra.Loss) -> None:
    k, v = cluster(0, outliers=0)
    v = v.clone()
    v[:, :, :10] += 3.0
    joint, marginal = ra.RKDE(loss, weight_bandwidth=8.0).weights(k, v)
    assert float(joint[..., :10].mean() / joint[..., 10:].mean()) < 0.6
    assert float(marginal[..., :10].mean() / marginal[..., 10:].mean()) > 0.9


@pytest.mark.parametrize("loss", [ra.Huber, ra.Hampel])
def test_threshold_matters(loss: type[ra.Loss]) -> None:
    k, v = cluster(1)
    q = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    narrow, wide = (ra.RKDE(loss(a)).attend(q, k, v) for a in (0.2, 0.6))
    assert float((narrow - wide).abs().max()) >= 1e-3


def test_a_key_sent_far_away_moves_the_output_boundedly() -> None:
    k, v = cluster(3, outliers=0)
    q = torch.randn(1, 1, 8, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    for method in (ra.KDE(), ra.RKDE(), ra.SPKDE(), ra.MoM()):
        before = method.attend(q, k, v)
        k_far = k.clone()
        k_far[:, :, 0] *= -1e6
        assert float((method.attend(q, k_far, v) - before).abs().max()) < 0.1


def test_robust_weights_pull_less_towards_outlying_values() -> None:
    k, v = cluster(4)
    v = v.clone()
    v[:, :, :10] += 20.0
    q = k[:, :, 50:60]
    clean = ra.KDE().attend(q, k[:, :, 10:], v[:, :, 10:])
    error = {m: float((m.attend(q, k, v) - clean).abs().mean()) for m in (ra.KDE(), ra.RKDE(), ra.SPKDE())}
    assert error[ra.RKDE()] < 0.8 * error[ra.KDE()]
    assert error[ra.SPKDE()] < 0.5 * error[ra.KDE()]


def test_stopped_weights_are_constants_to_the_gradient() -> None:
    k, v = cluster(5)
    q = k[:, :, :4].clone()
    for full, stop in ((ra.RKDE(), ra.RKDE(weight_grad="stop")), (ra.SPKDE(), ra.SPKDE(weight_grad="stop"))):
        grads = []
        for method in (full, stop):
            leaf = k.clone().requires_grad_()
            (grad,) = torch.autograd.grad(method.attend(q, leaf, v).square().sum(), leaf)
            grads.append(grad)
        joint, marginal = full.weights(k, v)
        leaf = k.clone().requires_grad_()
        unit = leaf / leaf.norm(dim=-1, keepdim=True)
        kernel = torch.exp(q @ unit.mT / 8)
        out = (kernel * joint[:, :, None]) @ v / (kernel * marginal[:, :, None]).sum(-1, keepdim=True)
        (wanted,) = torch.autograd.grad(out.square().sum(), leaf)
        torch.testing.assert_close(grads[1], wanted, rtol=1e-8, atol=1e-12)
        assert float((grads[0] - grads[1]).abs().max()) > 1e-6
