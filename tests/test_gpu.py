"""The same on the GPU: values, draws, isolation of hidden keys, precision under TF32. Skipped where there is none."""

import pytest
import torch
from cases import every_method, masks, problem
from torch import Tensor

import robust_attention as ra

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", masks(2, 9, 9))
def test_gpu_equals_cpu(method: ra.Method, dtype: torch.dtype, kind: str) -> None:
    p = problem(method, T=33, S=47, D=32).map(lambda x: x.to(dtype))
    cpu_arguments = masks(2, 33, 47)[kind]
    gpu_arguments = {n: a.cuda() if isinstance(a, Tensor) else a for n, a in cpu_arguments.items()}
    g = p.map(lambda x: x.cuda().requires_grad_())
    c = p.map(lambda x: x.clone().requires_grad_())
    on_gpu, on_cpu = g.attend(**gpu_arguments), c.attend(**cpu_arguments)
    tolerance = 1e-9 if dtype == torch.float64 else 2e-4
    torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=tolerance, atol=tolerance)
    on_gpu.square().sum().backward()
    on_cpu.square().sum().backward()
    for a, b in ((g.q, c.q), (g.k, c.k), (g.v, c.v)):
        assert a.grad is not None
        scale = float(b.grad.abs().max())  # type: ignore[union-attr]
        torch.testing.assert_close(a.grad.cpu() / scale, b.grad / scale, rtol=0, atol=10 * tolerance)


def test_draws_are_equal_on_every_device() -> None:
    for draw in ("bootstrap", "subsample", "partition"):
        for seed in range(20):
            method = ra.MoM(draw=draw, seed=seed)
            assert torch.equal(method.draw(197), method.draw(197, device=torch.device("cuda")).cpu())


@every_method
def test_hidden_and_future_keys_on_the_gpu(method: ra.Method) -> None:
    p = problem(method, T=17, S=17, D=32).map(lambda x: x.float().cuda())
    out = p.attend(is_causal=True)
    for fill in (1e30, float("nan"), float("inf")):
        k, v = p.k.clone(), p.v.clone()
        k[:, :, 9:], v[:, :, 9:] = fill, fill
        assert torch.equal(p.attend(k=k, v=v, is_causal=True)[:, :, :9], out[:, :, :9])


def test_weights_keep_their_digits_under_tf32() -> None:
    p = problem(ra.RKDE(), S=60, D=32)
    k, v = p.k.float().cuda(), p.v.float().cuda()
    exact = ra.RKDE().weights(p.k, p.v, is_causal=True)
    torch.set_float32_matmul_precision("high")
    try:
        for method, w in ((ra.RKDE(), ra.RKDE().weights(k, v, is_causal=True)),):
            for mine, wanted in zip(w, exact, strict=True):
                torch.testing.assert_close(mine.cpu().double(), wanted, rtol=1e-4, atol=1e-7), method
    finally:
        torch.set_float32_matmul_precision("highest")


def test_qp_stays_on_the_device_and_reaches_its_gap() -> None:
    g = torch.Generator().manual_seed(0)
    k = torch.randn(8, 3, 197, 64, generator=g).cuda()
    for dtype, most in ((torch.float64, 1e-10), (torch.float32, 5e-6)):
        weights = ra.SPKDE(1.4).weights(k.to(dtype), k.to(dtype))
        for w, info in zip(weights, weights.info, strict=True):
            assert w.is_cuda
            assert float(info.gap.max()) <= most
