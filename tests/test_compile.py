"""`torch.compile(fullgraph=True)` through the public verb, forward and backward."""

import pytest
import torch
from cases import problem
from torch import Tensor

import robust_attention as ra


@pytest.mark.slow
@pytest.mark.parametrize("method", [ra.KDE(), ra.RKDE(), ra.MoM()], ids=lambda m: type(m).__name__)
# Inductor's own modules warn of things that are not ours.
@pytest.mark.filterwarnings("ignore")
def test_method_compiles_as_one_graph(method: ra.Method) -> None:
    torch._dynamo.reset()
    p = problem(method, B=1, H=2, Hkv=1, T=6, S=8).map(Tensor.float)

    @torch.compile(fullgraph=True)
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return method.attend(q, k, v, is_causal=True), method.attend(q, k, v, attn_mask=mask)

    mask = torch.ones(1, 1, 6, 8, dtype=torch.bool).tril(1)
    leaves = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
    plain = [x.clone().requires_grad_() for x in (p.q, p.k, p.v)]
    compiled = attend(*leaves, mask)
    eager = (
        p.attend(q=plain[0], k=plain[1], v=plain[2], is_causal=True),
        p.attend(q=plain[0], k=plain[1], v=plain[2], attn_mask=mask),
    )
    for a, b in zip(compiled, eager, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    sum(x.square().sum() for x in compiled).backward()  # type: ignore[union-attr]
    sum(x.square().sum() for x in eager).backward()  # type: ignore[union-attr]
    for a, b in zip(leaves, plain, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", [ra.KDE(), ra.RKDE(), ra.MoM()], ids=lambda m: type(m).__name__)
@pytest.mark.filterwarnings("ignore")
def test_large_inference_compiles_as_one_graph(method: ra.Method) -> None:
    torch._dynamo.reset()
    p = problem(method, B=1, H=1, Hkv=1, T=520, S=520).map(Tensor.float)  # where eager "auto" streams
    compiled = torch.compile(method.attend, fullgraph=True, backend="aot_eager")
    for is_causal in (False, True):
        with torch.no_grad():
            out = compiled(p.q, p.k, p.v, is_causal=is_causal)
        torch.testing.assert_close(out, p.attend(is_causal=is_causal), rtol=1e-4, atol=1e-5)
