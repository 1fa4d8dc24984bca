"""Triton kernels in Triton's interpreter, in a process of its own: it must be switched on before they are imported.

Run as a script, this file prints one JSON line a case; pytest runs it once and asks for each. Buffers that PyTorch
hands out hold NaN (`fill_uninitialized_memory`), so that an entry nobody writes shows. On a GPU the full set of cases
runs compiled: `python benchmarks/kernels.py check`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

LOSSES = {"huber": 0.2, "hampel": 0.2, "welsch": 0.5, "tukey": 0.8}

# method[-loss][-causal]: (batch, heads, kv_heads, queries, keys, width, value width, dtype, padded, strided)
CASES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "kde": ("kde", (1, 2, 1, 70, 70, 16, 16, "float32", False, True)),
    "kde pad": ("kde", (2, 2, 1, 17, 70, 20, 24, "float32", True, False)),
    "kde causal": ("kde-causal", (1, 2, 2, 129, 129, 16, 16, "float32", False, False)),
    "kde causal, more keys": ("kde-causal", (1, 2, 1, 17, 70, 24, 16, "float32", False, True)),
    "kde causal, more queries": ("kde-causal", (1, 1, 1, 90, 70, 16, 32, "float32", False, False)),
    "kde causal pad": ("kde-causal", (2, 1, 1, 70, 70, 16, 16, "float32", True, False)),
    "kde by sdpa": ("kde-sdpa", (1, 2, 1, 70, 70, 20, 16, "float32", False, True)),
    "kde by sdpa, causal": ("kde-sdpa-causal", (1, 2, 2, 70, 70, 16, 16, "bfloat16", False, False)),
    "kde one": ("kde-causal", (1, 1, 1, 1, 1, 16, 16, "float32", False, False)),
    "kde half": ("kde-causal", (1, 2, 1, 70, 70, 32, 32, "float16", False, False)),
    "kde bfloat16": ("kde", (1, 2, 1, 17, 17, 16, 16, "bfloat16", False, False)),
    "kde far queries": ("kde-causal", (1, 1, 1, 70, 70, 16, 16, "float32", True, False)),
    "rkde huber": ("rkde-huber", (1, 2, 1, 17, 129, 16, 16, "float32", False, True)),
    "rkde hampel": ("rkde-hampel", (1, 1, 1, 2, 2, 16, 16, "float32", False, False)),
    "rkde welsch": ("rkde-welsch", (2, 2, 1, 17, 70, 20, 24, "float32", True, False)),
    "rkde tukey": ("rkde-tukey", (1, 1, 1, 70, 70, 16, 16, "float32", False, False)),
    "rkde half": ("rkde-huber", (1, 2, 2, 17, 70, 16, 16, "float16", False, False)),
    "rkde bfloat16": ("rkde-huber", (1, 2, 2, 17, 17, 16, 16, "bfloat16", False, False)),
    "rkde causal huber": ("rkde-huber-causal", (1, 2, 1, 129, 129, 16, 16, "float32", False, True)),
    "rkde causal hampel": ("rkde-hampel-causal", (1, 1, 1, 70, 70, 16, 16, "float32", False, False)),
    "rkde causal welsch": ("rkde-welsch-causal", (2, 1, 1, 70, 70, 20, 24, "float32", True, False)),
    "rkde causal tukey": ("rkde-tukey-causal", (1, 1, 1, 17, 70, 16, 16, "float32", False, False)),
    "rkde causal, more queries": ("rkde-huber-causal", (1, 1, 1, 90, 70, 16, 16, "float32", False, False)),
    "rkde causal two": ("rkde-huber-causal", (1, 1, 1, 2, 2, 16, 16, "float32", False, False)),
    "rkde causal half": ("rkde-huber-causal", (1, 2, 1, 70, 70, 16, 16, "float16", False, False)),
    "mom": ("mom", (1, 2, 1, 70, 129, 16, 16, "float32", False, True)),
    "mom pad": ("mom", (2, 1, 1, 17, 70, 20, 24, "float32", True, False)),
    "mom causal": ("mom-causal", (1, 2, 1, 70, 70, 16, 16, "float32", False, False)),
    "mom causal, more queries": ("mom-causal", (1, 1, 1, 90, 70, 16, 16, "float32", True, False)),
    "mom half": ("mom", (1, 2, 2, 17, 70, 16, 16, "float16", False, False)),
}  # fmt: skip
# The interpreter has no fused multiply-add, which a GPU's compiler puts between a logit and its exponential.
SLACK = {"kde far queries": 2.0, "rkde causal two": 2.0}
OTHERS = (
    "weights get gradients", "same bits", "chosen blocks", "future nan", "compile", "opcheck", "vmap loops",
    "no second derivative", "public verb", "public refusals", "autocast", "activation checkpointing",
)  # fmt: skip


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=300, check=False,
        cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    found = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            found.update(json.loads(line))
    if not found:
        raise AssertionError(done.stderr[-2000:])
    return found


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_in_interpreter(results: dict[str, str], name: str) -> None:
    assert results.get(name) == "ok", results.get(name, "did not run")


# ------------------------------------------------------------------ the process


def _main() -> None:
    import warnings

    import torch
    from torch import Tensor

    from robust_attention._triton import causal, ops
    from robust_attention.ops.kde import KDE
    from robust_attention.ops.mom import MoM
    from robust_attention.ops.rkde import RKDE
    from robust_attention.robust import losses

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # and so `fill_uninitialized_memory`
    Method = Callable[..., Tensor]

    def inputs(
        batch: int, heads: int, kv_heads: int, queries: int, keys: int, width: int, value_width: int, dtype: str,
        padded: bool, strided: bool,
    ) -> list[Tensor]:  # fmt: skip
        generator = torch.Generator().manual_seed(queries * 1000 + keys)
        shapes = ((heads, queries, width, 1.0), (kv_heads, keys, width, 1.0), (kv_heads, keys, value_width, 0.4),
                  (heads, queries, value_width, 1.0))  # fmt: skip
        found = []
        for h, n, d, size in shapes:
            x = (torch.randn(batch, n, h, d, generator=generator) * size).to(getattr(torch, dtype)).transpose(1, 2)
            found.append(x if strided else x.contiguous())
        return found

    def methods(name: str, batch: int, keys: int, padded: bool) -> tuple[Method, Method]:
        kind, *rest = name.split("-")
        is_causal = "causal" in rest
        real = mask = None
        if padded:
            real = torch.ones(batch, keys, dtype=torch.bool)
            real[0, keys - keys // 3 :] = False
            real[-1, : keys // 4] = False
            mask = real[:, None, None]
        if kind == "kde":
            kde = ops.kde_by_sdpa if "sdpa" in rest else ops.kde
            return lambda *x: kde(*x, real, is_causal), lambda *x: KDE().attend(*x, mask, is_causal)
        if kind == "mom":
            method = MoM()
            counts = method.draw(keys)
            return (
                lambda *x: ops.mom(*x, counts, real, is_causal),
                lambda *x: method.attend(*x, mask, is_causal, counts=counts),
            )
        loss = rest[0]
        rkde = RKDE(loss=getattr(losses, loss.capitalize())(LOSSES[loss]))
        return (
            lambda *x: ops.rkde(*x, real, is_causal, loss=loss, a=LOSSES[loss]),
            lambda *x: rkde.attend(*x, mask, is_causal),
        )

    def gradients(f: Method, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors[:3])
        out = f(q, k, v)
        return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))]

    def compare(name: str) -> str:
        which, shape = CASES[name]
        tensors = inputs(*shape)
        if "far" in name:
            tensors[0] *= 30  # past the bound where the running maximum is needed
        kernel, reference = methods(which, shape[0], shape[4], shape[8])
        dtype = tensors[0].dtype
        wanted = gradients(reference, tensors, torch.float64)
        plain = gradients(reference, tensors, dtype)
        found = gradients(kernel, tensors, dtype)
        for what, got, want, own, factor in zip(
            ("out", "dq", "dk", "dv"), found, wanted, plain, (1.5, 2, 2, 2), strict=True
        ):
            if not got.isfinite().all():
                return f"{what} is not finite"
            error, base = ((x.double() - want).abs().max().item() for x in (got, own))
            largest = want.abs().max().clamp(min=1e-30)
            limit = (
                SLACK.get(name, 1) * factor * base
                + 2 * torch.finfo(dtype).eps * 2 ** torch.floor(torch.log2(largest)).item()
            )
            if not error <= limit:
                return f"{what}: {error:.3g} above {limit:.3g}"
        return "ok"

    def weights_get_gradients() -> str:
        q, k, v, grad = inputs(1, 2, 1, 17, 70, 16, 16, "float32", False, False)
        weights = [torch.rand(1, 1, 70) + 0.5 for _ in range(2)]

        def plain(q: Tensor, k: Tensor, v: Tensor, joint: Tensor, marginal: Tensor) -> Tensor:
            p = torch.exp(q @ torch.nn.functional.normalize(k, dim=-1).mT / 4)
            return (p * joint[:, :, None]) @ v / (p * marginal[:, :, None]).sum(-1, keepdim=True)

        both = []
        for f in (plain, ops.weighted):
            x = [t.clone().requires_grad_() for t in (q, k, v, *weights)]
            both.append([f(*x).detach(), *torch.autograd.grad(f(*x), x, grad)])
        worst = max((a - b).abs().max().item() for a, b in zip(*both, strict=True))
        return "ok" if worst < 2e-6 else f"off by {worst}"

    def same_bits() -> str:
        for name in ("rkde welsch", "rkde causal hampel", "mom causal"):
            which, shape = CASES[name]
            kernel, _ = methods(which, shape[0], shape[4], shape[8])
            first, second = (gradients(kernel, inputs(*shape), torch.float32) for _ in range(2))
            if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
                return name
        return "ok"

    def chosen_blocks() -> str:
        from robust_attention.robust.blocks import lower_median

        q, k, *_ = inputs(1, 2, 2, 70, 70, 16, 16, "float32", False, False)
        # Ties are for the GPU (benchmarks/kernels.py): the interpreter's product may round equal columns differently.
        for counts in (MoM().draw(70), MoM(blocks=4, draw="partition").draw(70), MoM(draw="poisson").draw(70)):
            logit = q.double() @ torch.nn.functional.normalize(k.double(), dim=-1).mT / 4
            visible = torch.ones(70, 70, dtype=torch.bool).tril()
            p = torch.exp(logit) * visible
            density = (p @ counts.double().T / counts.sum(-1)).log()
            want, any_seen = lower_median(density, (visible.double() @ counts.double().T > 0).expand(density.shape))
            want = torch.where(any_seen, want, len(counts))
            choice, kept = ops._mom_forward(q, k, k, counts, None, True, 4.0, False, True)[3::2]
            if not torch.equal(choice.long(), want):
                return f"{(choice != want).sum()} of {want.numel()} differ"
            if not torch.allclose(kept.double(), density, atol=1e-5):
                return "densities differ"
        return "ok"

    def future_nan() -> str:
        for is_nan in (1, 2):
            q, k, v, _ = inputs(1, 1, 1, 70, 70, 16, 16, "float32", False, False)
            clean = ops.kde(q, k, v, None, True)
            (k if is_nan == 1 else v)[0, 0, 40, 3] = torch.nan if is_nan == 1 else torch.inf
            out = ops.kde(q, k, v, None, True)
            if not torch.equal(out[:, :, :40], clean[:, :, :40]) or not out[:, :, 40:].isnan().all():
                return "a bad key reached the past, or not the future"
        return "ok"

    def compiles() -> str:
        for name in ("kde causal", "rkde huber", "rkde causal, more queries", "mom causal"):
            which, shape = CASES[name]
            kernel, _ = methods(which, shape[0], shape[4], shape[8])
            compiled = torch.compile(kernel, backend="aot_eager", fullgraph=True)
            tensors = inputs(*shape)
            pairs = zip(
                gradients(kernel, tensors, torch.float32), gradients(compiled, tensors, torch.float32), strict=True
            )
            if not all(torch.equal(a, b) for a, b in pairs):
                return name
        return "ok"

    def opchecks() -> str:
        q, k, v, grad = inputs(1, 2, 1, 5, 7, 16, 16, "float32", False, False)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        rkde = (q, k, v, None, "huber", 0.2, 4.0, 4.0, 4.0)
        arguments: list[tuple[Any, tuple[Any, ...]]] = [
            (ops._weighted_forward, (q, k, v, None, None, None, True, 4.0)),
            (ops._rkde_forward, rkde),
            (causal._forward, rkde),
            (ops._mom_forward, (q, k, v, MoM().draw(7), None, False, 4.0, False, True)),
            (ops._unit_keys, (k,)),
        ]
        for operator, values in arguments:
            torch.library.opcheck(operator, values)
        with torch.no_grad():
            out = ops._rkde_forward(*rkde)
            torch.library.opcheck(ops._rkde_backward, (grad, *rkde[:4], *out, *rkde[4:], True))
            out = causal._forward(*rkde)
            torch.library.opcheck(causal._backward, (grad, *rkde[:4], *out, *rkde[4:]))
        return "ok"

    def vmap_loops() -> str:
        q, k, v, _ = inputs(2, 1, 1, 5, 5, 16, 16, "float32", False, False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch says that it loops
            mapped = torch.func.vmap(ops.kde)(q[:, None], k[:, None], v[:, None])
        return "ok" if torch.equal(mapped[:, 0], ops.kde(q, k, v)) else "differs from a loop"

    def no_second_derivative() -> str:
        q, k, v, _ = inputs(1, 1, 1, 5, 5, 16, 16, "float32", False, False)
        q.requires_grad_()
        (first,) = torch.autograd.grad(ops.kde(q, k, v).square().sum(), q, create_graph=True)
        try:
            torch.autograd.grad(first.sum(), q)
        except RuntimeError:
            return "ok"
        return "did not raise"

    import robust_attention as ra

    public = [ra.KDE(), *(ra.RKDE(getattr(ra, n.capitalize())(a)) for n, a in LOSSES.items()), ra.SPKDE(), ra.MoM()]
    public += [ra.RKDE(weight_grad="stop"), ra.SPKDE(1.1), ra.MoM(draw="poisson", blocks=4), ra.KDE(bandwidth=1.0)]
    public += [ra.RKDE(bandwidth=1.5, weight_bandwidth=0.7, value_bandwidth=3.0)]

    def public_verb() -> str:
        for method in public:
            for mask in (None, torch.tensor([[True] * 9 + [False] * 14, [False] * 3 + [True] * 20])[:, None, None]):
                q, k, v, grad = inputs(2, 4, 2, 17, 23, 16, 24, "float32", False, True)
                runs = [False, True]
                if isinstance(method, ra.SPKDE) or getattr(method, "weight_grad", "full") == "stop":
                    runs = [False]  # no causal kernel
                for causal_ in runs:
                    both = []
                    for impl, dtype in (("reference", torch.float64), ("triton", torch.float32)):
                        x = [t.to(dtype).requires_grad_() for t in (q, k, v)]
                        out = method.attend(*x, attn_mask=mask, is_causal=causal_, impl=impl)  # type: ignore[arg-type]
                        both.append([out, *torch.autograd.grad(out, x, grad.to(dtype))])
                    for want, got in zip(*both, strict=True):
                        off = ((got - want).abs().max() / want.abs().max().clamp(min=1e-3)).item()
                        if not off < 2e-5:
                            return f"{method}, mask {mask is not None}, causal {causal_}: off by {off:.2g}"
        return "ok"

    def public_refusals() -> str:
        q, k, v, _ = inputs(1, 2, 2, 17, 17, 16, 16, "float32", False, False)
        square = torch.ones(17, 17, dtype=torch.bool).tril()
        cases: list[tuple[Any, dict[str, Any], str]] = [
            (ra.KDE(), {"attn_mask": square}, "masks of keys alone"),
            (ra.RKDE(sweeps=2), {}, "one sweep, got sweeps=2"),
            (ra.SPKDE(), {"is_causal": True}, "one visible set a sample"),
            (ra.MoM(blocks=64), {}, "up to 31 blocks, got 64"),
            (ra.RKDE(weight_grad="stop"), {"is_causal": True}, 'weight_grad="full"'),
        ]
        for method, arguments, words in cases:
            try:
                method.attend(q, k, v, impl="triton", **arguments)
            except ValueError as error:
                if words not in str(error):
                    return f"{method}: {error}"
            else:
                return f"{method} ran"
            if not torch.equal(
                method.attend(q, k, v, **arguments), method.attend(q, k, v, impl="reference", **arguments)
            ):
                return f"{method}: auto is not the reference"
        try:
            ra.KDE().attend(q.double(), k.double(), v.double(), impl="triton")
        except ValueError as error:
            return "ok" if "float16, bfloat16 and float32" in str(error) else str(error)
        return "float64 ran"

    def autocast() -> str:
        for method in public[:2]:
            tensors = inputs(1, 2, 2, 17, 17, 16, 16, "float32", False, False)
            outside = gradients(lambda *x, m=method: m.attend(*x, impl="triton"), tensors, torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                inside = gradients(lambda *x, m=method: m.attend(*x, impl="triton"), tensors, torch.float32)
            if not all(torch.equal(a, b) for a, b in zip(outside, inside, strict=True)):
                return f"{method} differs"
        return "ok"

    def activation_checkpointing() -> str:
        from torch.utils.checkpoint import checkpoint

        for method in (ra.RKDE(), ra.MoM(), ra.SPKDE()):
            tensors = inputs(1, 2, 2, 17, 17, 16, 16, "float32", False, False)

            def verb(q: Tensor, k: Tensor, v: Tensor, m: Any = method) -> Tensor:
                return m.attend(q, k, v, impl="triton")

            kept = gradients(verb, tensors, torch.float32)
            again = gradients(lambda *x, f=verb: checkpoint(f, *x, use_reentrant=False), tensors, torch.float32)
            if not all(torch.equal(a, b) for a, b in zip(kept, again, strict=True)):
                return f"{method} differs"
        return "ok"

    tasks: dict[str, Callable[[], str]] = {name: (lambda name=name: compare(name)) for name in CASES}  # type: ignore[misc]
    tasks |= dict(
        zip(
            OTHERS,
            (weights_get_gradients, same_bits, chosen_blocks, future_nan, compiles, opchecks, vmap_loops,
             no_second_derivative, public_verb, public_refusals, autocast, activation_checkpointing),
            strict=True,
        )
    )  # fmt: skip
    import time

    for name, task in tasks.items():
        start = time.time()
        try:
            outcome = task()
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"[:600]
        print(json.dumps({name: outcome}), flush=True)
        print(f"  {name}: {time.time() - start:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent.parent))
    _main()
