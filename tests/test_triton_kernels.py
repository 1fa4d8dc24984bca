"""Triton kernels in Triton's interpreter, in a process of its own: it must be switched on before they are imported.

Run as a script, this file prints one JSON line a case; pytest runs it once and asks for each. Buffers that PyTorch
hands out hold NaN (`fill_uninitialized_memory`), so that an entry nobody writes shows. On a GPU the full set of cases
runs compiled: `python benchmarks/kernels.py`.
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
    "fourier": ("fourier", (1, 2, 1, 70, 129, 3, 16, "float32", False, True)),
    "fourier pad": ("fourier-square", (2, 2, 1, 17, 70, 10, 24, "float32", True, False)),
    "fourier scalar": ("fourier-scalar", (1, 1, 1, 33, 33, 64, 5, "float32", False, False)),
    "fourier causal": ("fourier-causal", (1, 2, 2, 129, 129, 3, 3, "float32", False, True)),
    "fourier causal, more keys": ("fourier-causal-square", (1, 4, 2, 17, 70, 9, 16, "float32", False, True)),
    "fourier causal, more queries": ("fourier-causal", (1, 1, 1, 90, 70, 4, 8, "float32", False, False)),
    "fourier causal pad": ("fourier-causal-scalar", (2, 1, 1, 70, 70, 8, 8, "float32", True, False)),
    "fourier one": ("fourier-causal", (1, 1, 1, 1, 1, 1, 1, "float32", False, False)),
    "fourier two": ("fourier", (1, 1, 1, 2, 2, 128, 128, "float32", False, False)),
    "fourier close": ("fourier", (1, 1, 1, 17, 17, 64, 16, "float32", False, False)),
    "fourier half": ("fourier-causal", (1, 2, 1, 17, 70, 16, 16, "float16", False, False)),
    "fourier bfloat16": ("fourier", (1, 2, 1, 17, 17, 64, 64, "bfloat16", False, False)),
}  # fmt: skip
# The interpreter has no fused multiply-add, which a GPU's compiler puts between a logit and its exponential.
SLACK = {"kde far queries": 2.0, "rkde causal two": 2.0}
OTHERS = (
    "weights get gradients", "same bits", "chosen blocks", "future nan", "compile", "opcheck", "vmap loops",
    "no second derivative", "public verb", "public refusals", "autocast", "activation checkpointing",
    "fourier public verb", "fourier zeros of the sine", "fourier nan", "fourier frozen radius", "fourier far apart",
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

    from robust_attention._triton import causal, fourier, ops
    from robust_attention.ops.fourier import Fourier
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
            return lambda *x: kde(*x, real, is_causal), lambda *x: KDE().attend(*x, mask, is_causal, "reference")
        if kind == "mom":
            method = MoM()
            counts = method.draw(keys)
            return (
                lambda *x: ops.mom(*x, counts, real, is_causal),
                lambda *x: method.attend(*x, mask, is_causal, "reference", counts=counts),
            )
        if kind == "fourier":
            power = 2 if "square" in rest else 4
            return (
                lambda *x: fourier.fourier(*x, real, is_causal, power=power),
                lambda *x: Fourier(power=power).attend(*x[:3], mask, is_causal, "reference", radius=x[3]),
            )
        loss = rest[0]
        rkde = RKDE(loss=getattr(losses, loss.capitalize())(LOSSES[loss]))
        return (
            lambda *x: ops.rkde(*x, real, is_causal, loss=loss, a=LOSSES[loss]),
            lambda *x: rkde.attend(*x, mask, is_causal, "reference"),
        )

    def gradients(f: Method, tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        """(out, gradients) of f at all tensors but the fourth, which is the gradient of out."""
        x = [t.detach().to(dtype).requires_grad_() for t in (*tensors[:3], *tensors[4:])]
        out = f(*x)
        return [out.detach(), *torch.autograd.grad(out, x, tensors[3].to(dtype))]

    def drawn(which: str, shape: tuple[Any, ...]) -> list[Tensor]:
        """The inputs of a case; Fourier learns a radius as well."""
        tensors = inputs(*shape)
        if which.startswith("fourier"):
            radius = torch.tensor(0.8) if "scalar" in which else torch.linspace(0.5, 1.5, shape[5])
            tensors.append(radius.to(tensors[0].dtype))
        return tensors

    def compare(name: str) -> str:
        which, shape = CASES[name]
        tensors = drawn(which, shape)
        if "far" in name:
            tensors[0] *= 30  # past the bound where the running maximum is needed
        if "close" in name:
            tensors[4] *= 0.05  # log κ is small: what is left of a sinc beside 1 counts
        kernel, reference = methods(which, shape[0], shape[4], shape[8])
        dtype = tensors[0].dtype
        wanted = gradients(reference, tensors, torch.float64)
        plain = gradients(reference, tensors, dtype)
        found = gradients(kernel, tensors, dtype)
        for what, got, want, own in zip(("out", "dq", "dk", "dv", "dR"), found, wanted, plain, strict=False):
            factor = 1.5 if what == "out" else 2
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
        for name in ("rkde welsch", "rkde causal hampel", "mom causal", "fourier causal pad"):
            which, shape = CASES[name]
            kernel, _ = methods(which, shape[0], shape[4], shape[8])
            first, second = (gradients(kernel, drawn(which, shape), torch.float32) for _ in range(2))
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
        for name in ("kde causal", "rkde huber", "rkde causal, more queries", "mom causal", "fourier causal pad"):
            which, shape = CASES[name]
            kernel, _ = methods(which, shape[0], shape[4], shape[8])
            compiled = torch.compile(kernel, backend="aot_eager", fullgraph=True)
            tensors = drawn(which, shape)
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
            (fourier._fourier_forward, (q, k, v, torch.ones(16, requires_grad=True), None, True, 4)),
        ]
        for operator, values in arguments:
            torch.library.opcheck(operator, values)
        with torch.no_grad():
            out = ops._rkde_forward(*rkde)
            torch.library.opcheck(ops._rkde_backward, (grad, *rkde[:4], *out, *rkde[4:], True))
            out = causal._forward(*rkde)
            torch.library.opcheck(causal._backward, (grad, *rkde[:4], *out, *rkde[4:]))
            held = (q, k, v, torch.ones(16), torch.ones(1, 7, dtype=torch.bool))
            for learns in (True, False):
                out = fourier._fourier_forward(*held, False, 2)
                torch.library.opcheck(fourier._fourier_backward, (grad, *held, *out, False, 2, learns))
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
            (ra.FourierMoM(), {"radius": torch.tensor(1.0)}, "no kernel chooses blocks by Fourier densities"),
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

    def fourier_public_verb() -> str:
        padding = torch.tensor([[True] * 9 + [False] * 14, [False] * 3 + [True] * 20])[:, None, None]
        vector = torch.linspace(-0.5, 1.5, 5)  # a radius of 0 among them
        for power, mask, causal_, radius in (
            (2, None, False, vector), (4, padding, False, torch.tensor(0.7)), (2, padding, True, torch.ones(1)),
            (4, None, True, vector),
        ):  # fmt: skip
            q, k, v, grad = inputs(2, 4, 2, 17, 23, 5, 24, "float32", False, True)
            both = []
            for impl, dtype in (("reference", torch.float64), ("triton", torch.float32)):
                x = [t.to(dtype).requires_grad_() for t in (q, k, v, radius)]
                out = Fourier(power=power).attend(*x[:3], mask, causal_, impl, radius=x[3])  # type: ignore[arg-type]
                both.append([out, *torch.autograd.grad(out, x, grad.to(dtype))])
            for want, got in zip(*both, strict=True):
                off = ((got - want).abs().max() / want.abs().max().clamp(min=1e-3)).item()
                if got.shape != want.shape or not off < 5e-5:
                    return f"power {power}, mask {mask is not None}, causal {causal_}: off by {off:.2g}"
        for radius in (None, torch.ones(3)):
            try:
                Fourier().attend(q, k, v, impl="triton", radius=radius)
            except ValueError as error:
                if "radius must be" not in str(error):
                    return str(error)
            else:
                return "a wrong radius ran"
        return "ok"

    def fourier_zeros() -> str:
        # Where float32 is nearest to multiples of π (a sine of 1e-7 and less), in every coordinate of some keys.
        one = torch.ones(8)
        q, k, v, grad = inputs(1, 1, 1, 3, 5, 8, 4, "float32", False, False)
        k[:, :, 1], k[:, :, 3] = q[:, :, 1] - torch.pi, 0.0
        q[:, :, 2] = 2 * torch.pi
        for keys in (slice(None), slice(3, 4)):  # among others, and alone: then the weight is 1
            tensors = [q, k[:, :, keys], v[:, :, keys], grad, one]
            want = gradients(lambda *x: Fourier().attend(*x[:3], impl="reference", radius=x[3]), tensors, torch.float64)
            got = gradients(fourier.fourier, tensors, torch.float32)
            for x, y in zip(got, want, strict=True):
                if not (x - y).abs().max() <= 1e-4 * y.abs().max().clamp(min=1e-2):
                    return f"off by {(x - y).abs().max()}"
        # Four coordinates on far zeros, and the product is 0: no weight, no gradient.
        q = torch.full((1, 1, 1, 8), 96079.33)  # 2e-7 from a multiple of π
        found = gradients(
            fourier.fourier, [q, torch.zeros(1, 1, 1, 8), v[:, :, :1], grad[:, :, :1], one], torch.float32
        )
        if not all((x == 0).all() for x in found):
            return "a product of 0 has a weight or a gradient"
        # Beside a key with weight, it has none.
        k = torch.cat([torch.zeros(1, 1, 1, 8), q + 0.5], 2)
        found = gradients(fourier.fourier, [q, k, v[:, :, :2], grad[:, :, :1], one], torch.float32)
        same = torch.allclose(found[0], v[:, :, 1:2]) and all(x.isfinite().all() for x in found)
        return "ok" if same and (found[2][:, :, 0] == 0).all() else "a key of weight 0 counts"

    def fourier_nan() -> str:
        for bad in ("key", "value", "query"):
            x = drawn("fourier", (1, 2, 1, 17, 17, 6, 5, "float32", False, False))
            clean = [t.clone() for t in x]
            sees = torch.arange(17) >= 9 if bad != "query" else torch.arange(17) == 9
            if bad == "query":
                x[0][:, :, 9, 3] = torch.inf
            else:
                x[1 if bad == "key" else 2][:, :, 9, 3] = torch.nan if bad == "key" else -torch.inf
            x[3][:, :, sees] = torch.nan  # as a loss over a NaN gives
            clean[3][:, :, sees] = 0
            causal_kernel, _ = methods("fourier-causal", 1, 17, False)
            got, want = (gradients(causal_kernel, t, torch.float32) for t in (x, clean))
            if not got[0][:, :, sees].isnan().all() or not torch.equal(got[0][:, :, ~sees], want[0][:, :, ~sees]):
                return f"{bad}: reached another query, or not its own"
            if not all(t.isfinite().all() for t in got[1:]) or not torch.equal(got[2][:, :, :9], want[2][:, :, :9]):
                return f"{bad}: gradients"
            if bad == "query":
                continue
            hidden = torch.arange(17) != 9
            got, want = (fourier.fourier(*t[:3], t[4], hidden[None].expand(1, 17)) for t in (x, clean))
            if not torch.equal(got, want):
                return f"{bad}: a hidden key is seen"
        blind = fourier.fourier(*clean[:3], clean[4], torch.zeros(1, 17, dtype=torch.bool))
        return "ok" if (blind == 0).all() else "a query that sees no key is not 0"

    def fourier_frozen_radius() -> str:
        which, shape = CASES["fourier causal, more queries"]
        kernel, _ = methods(which, shape[0], shape[4], shape[8])
        *tensors, radius = drawn(which, shape)
        alone = gradients(lambda *x: kernel(*x, radius), tensors, torch.float32)
        both = gradients(kernel, [*tensors, radius], torch.float32)
        return "ok" if all(torch.equal(a, b) for a, b in zip(alone, both[:4], strict=True)) else "differs"

    def fourier_far_apart() -> str:
        # Beyond the reach a sine has no digits; still numbers, and the mean of equal values is that value.
        q, k, _, grad = inputs(1, 1, 1, 5, 5, 8, 4, "float32", False, False)
        for size in (1e5, 1e10, 1e30):
            found = gradients(
                fourier.fourier, [q * size, k, torch.ones(1, 1, 5, 4), grad, torch.ones(8)], torch.float32
            )
            if not all(x.isfinite().all() for x in found) or not torch.allclose(found[0], torch.ones(())):
                return f"{size}: not finite, or no weight"
        return "ok"

    tasks: dict[str, Callable[[], str]] = {name: (lambda name=name: compare(name)) for name in CASES}  # type: ignore[misc]
    tasks |= dict(
        zip(
            OTHERS,
            (weights_get_gradients, same_bits, chosen_blocks, future_nan, compiles, opchecks, vmap_loops,
             no_second_derivative, public_verb, public_refusals, autocast, activation_checkpointing,
             fourier_public_verb, fourier_zeros, fourier_nan, fourier_frozen_radius, fourier_far_apart),
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
