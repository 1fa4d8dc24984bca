"""Triton kernels on a GPU: checks against the float64 reference first, then times beside SDPA, then JSON.

    python benchmarks/kernels.py check  [--quick]        errors, bits, poisoned buffers
    python benchmarks/kernels.py time                    ratios to SDPA's best backend, and each kernel's share
    python benchmarks/kernels.py sweep KERNEL [KERNEL]   block shapes of single kernels

Kernels compile in several processes first (`--jobs`); results go to $OUT/kernels-*.json, or the working directory.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

Shape = tuple[int, int, int, int]
BIG: Shape = (4, 16, 4096, 64)
VIT: Shape = (256, 3, 197, 64)
TEXT: Shape = (96, 8, 256, 16)
LONG: Shape = (4, 16, 1024, 64)
LOSSES = {"huber": 0.2, "hampel": 0.2, "welsch": 0.5, "tukey": 0.8}


def inputs(
    batch: int, heads: int, queries: int, width: int, dtype: torch.dtype, *, keys: int | None = None,
    kv_heads: int | None = None, value_width: int | None = None, seed: int = 0, strided: bool = False,
    values: float = 0.3,
) -> list[Tensor]:  # fmt: skip
    """(q, k, v, gradient of the output), drawn on the device. Values are close enough for the joint Gram to matter."""
    keys, kv_heads, value_width = keys or queries, kv_heads or heads, value_width or width
    generator = torch.Generator(device="cuda").manual_seed(seed)
    found = []
    for h, n, d, size in (
        (heads, queries, width, 1.0),
        (kv_heads, keys, width, 1.0),
        (kv_heads, keys, value_width, values),
        (heads, queries, value_width, 1.0),
    ):
        x = torch.randn(batch, n, h, d, generator=generator, device="cuda") * size
        x = x.to(dtype).transpose(1, 2)
        found.append(x if strided else x.contiguous())
    return found


def learnt(name: str, width: int, dtype: torch.dtype) -> list[Tensor]:
    """What a method learns beside q, k and v: Fourier's radius."""
    return [torch.linspace(0.5, 1.5, width, device="cuda").to(dtype)] if name.startswith("fourier") else []


def variables(tensors: list[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """The tensors that get a gradient: all but the fourth, which is the gradient of the output."""
    return [x.detach().to(dtype or x.dtype).requires_grad_() for x in (*tensors[:3], *tensors[4:])]


def gradients(f: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    x = variables(tensors, dtype)
    out = f(*x)
    return [out.detach(), *torch.autograd.grad(out, x, tensors[3].to(dtype))]


def pairs(name: str, keys: int, batch: int, pad: bool) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """(kernel, reference) of a case by name: method[-loss][-causal]."""
    from robust_attention._triton import fourier, ops
    from robust_attention.ops.fourier import Fourier
    from robust_attention.ops.kde import KDE
    from robust_attention.ops.mom import MoM
    from robust_attention.ops.rkde import RKDE
    from robust_attention.robust import losses

    method, *rest = name.split("-")
    causal = "causal" in rest
    mask = real = None
    if pad:
        real = torch.ones(batch, keys, dtype=torch.bool, device="cuda")
        real[0, keys - keys // 3 :] = False
        real[-1, : keys // 4] = False
        mask = real[:, None, None]
    if method == "kde":
        return (
            lambda q, k, v: ops.kde(q, k, v, real, causal),
            lambda q, k, v: KDE().attend(q, k, v, mask, causal, "reference"),
        )
    if method == "mom":
        mom = MoM()
        counts = mom.draw(keys, device=torch.device("cuda"))
        return (
            lambda q, k, v: ops.mom(q, k, v, counts, real, causal),
            lambda q, k, v: mom.attend(q, k, v, mask, causal, "reference", counts=counts),
        )
    if method == "fourier":
        one = torch.ones((), device="cuda")
        return (
            lambda q, k, v, radius=one: fourier.fourier(q, k, v, radius, real, causal),
            lambda q, k, v, radius=one: Fourier().attend(q, k, v, mask, causal, "reference", radius=radius),
        )
    loss = rest[0] if rest and rest[0] in LOSSES else "huber"
    rkde = RKDE(loss=getattr(losses, loss.capitalize())(LOSSES[loss]))
    return (
        lambda q, k, v: ops.rkde(q, k, v, real, causal, loss=loss, a=LOSSES[loss]),
        lambda q, k, v: rkde.attend(q, k, v, mask, causal, "reference"),
    )


def check_one(case: tuple[Any, ...]) -> dict[str, Any]:
    """Errors of one case over their limits (a value above 1 fails)."""
    name, dtype, batch, heads, queries, width, more = case
    torch.backends.cuda.matmul.allow_tf32 = False
    more = dict(more)
    pad = more.pop("pad", False)
    again = more.pop("again", 1)
    result: dict[str, Any] = {
        "case": f"{name} {str(dtype)[6:]} {batch}x{heads}x{queries}x{width} {more}{' pad' if pad else ''}"
    }
    try:
        tensors = inputs(batch, heads, queries, width, dtype, **more) + learnt(name, width, dtype)
        kernel, reference = pairs(name, tensors[1].shape[2], batch, pad)
        want = gradients(reference, tensors, torch.float64)
        plain = gradients(reference, tensors, dtype)
        # Memory that the allocator hands out next holds NaN.
        torch.full((sum(x.numel() for x in tensors) * 4,), torch.nan, device="cuda")
        found = gradients(kernel, tensors, dtype)
        worst = {}
        for what, got, w, p in zip(("out", "dq", "dk", "dv", "dR"), found, want, plain, strict=False):
            factor = 1.5 if what == "out" else 2
            error = (got.double() - w).abs().max().item() if got.isfinite().all() else float("nan")
            own = (p.double() - w).abs().max().item()
            top = w.abs().max()
            ulp = torch.finfo(dtype).eps * (2.0 ** torch.floor(torch.log2(top))).item() if top > 0 else 0.0
            worst[what] = error / max(factor * own + 2 * ulp, 1e-30)
        result["errors"] = worst
        result["ok"] = all(x <= 1 for x in worst.values())
        for _ in range(again - 1):
            repeat = gradients(kernel, tensors, dtype)
            if not all(torch.equal(a, b) for a, b in zip(found, repeat, strict=True)):
                result["ok"], result["error"] = False, "bits differ between runs"
                break
    except Exception as error:  # a case that cannot run is a failed case
        result["ok"], result["error"] = False, f"{type(error).__name__}: {error}"[:300]
    return result


def check_cases(quick: bool) -> list[tuple[Any, ...]]:
    names = ("kde", "kde-causal", "mom", "mom-causal", "rkde", "rkde-causal", "fourier", "fourier-causal")
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    found: list[tuple[Any, ...]] = []
    sizes = (129, 256) if quick else (1, 2, 17, 127, 129, 197, 257)
    for name, dtype, n in itertools.product(names, dtypes, sizes):
        if quick and dtype != torch.bfloat16 and n == 256:
            continue
        found.append((name, dtype, 2, 2, n, 64, {"strided": n % 3 == 0, "pad": n % 2 == 1 and n > 100, "again": 3}))
    for name, width in itertools.product(names, (16, 40, 128) if quick else (16, 32, 40, 80, 96, 128)):
        found.append((name, torch.bfloat16, 2, 4, 150, width, {"kv_heads": 2, "strided": True}))
    for name in names:
        found.append((name, torch.float32, 1, 4, 90, 16, {"kv_heads": 2, "keys": 140, "value_width": 48}))
        found.append((name, torch.bfloat16, 1, 2, 150, 64, {"keys": 70, "value_width": 32}))
        found.append((name, torch.bfloat16, 1, 2, 1024, 64, {"again": 100}))
        if not quick:
            found.append((name, torch.float16, 1, 2, 150, 128, {"kv_heads": 1, "keys": 300}))
            found.append((name, torch.float32, 1, 2, 150, 128, {}))
            found.append((name, torch.float32, 1, 2, 1000, 64, {}))
    for loss, causal in itertools.product(("hampel", "welsch", "tukey"), ("", "-causal")):
        found.append((f"rkde-{loss}{causal}", torch.bfloat16, 2, 2, 197, 64, {}))
        found.append((f"rkde-{loss}{causal}", torch.float32, 2, 2, 100, 16, {}))
    # The shapes that are timed, with fewer samples and heads: the reference keeps tensors for each coordinate.
    found += [("fourier", torch.bfloat16, 8, *VIT[1:], {}), ("fourier", torch.bfloat16, 1, 1, *LONG[2:], {})]
    return found


def work(cases: list[Any], function: Callable[[Any], Any], jobs: int) -> list[Any]:
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        return pool.map(function, cases, chunksize=1)


def check(quick: bool, jobs: int, seconds: float) -> bool:
    """Every case, in several processes; cases that do not start within `seconds` are counted as missing."""
    start = time.time()
    cases = check_cases(quick)
    random.Random(0).shuffle(cases)
    results = []
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        for result in pool.imap_unordered(check_one, cases):
            results.append(result)
            if not result["ok"]:
                print(
                    "BAD", result["case"], result.get("error") or {k: round(v, 2) for k, v in result["errors"].items()}
                )
            if time.time() - start > seconds:
                pool.terminate()
                break
    large = check_large()
    results += large
    write("check", results)
    passed = sum(r["ok"] for r in results)
    names = ("out", "dq", "dk", "dv", "dR")
    top = {w: max((r["errors"][w] for r in results if w in r.get("errors", ())), default=0.0) for w in names}
    print(
        f"checks: {passed} of {len(results)} pass, {len(cases) + len(large) - len(results)} not run, "
        f"{time.time() - start:.0f} s; largest error over its limit {top}"
    )
    return passed == len(results)


def check_large() -> list[dict[str, Any]]:
    """More than 2³¹ scores, and tensors of more than 2³¹ entries."""
    found = []
    for name in ("kde", "mom", "rkde", "kde-causal", "rkde-causal", "fourier"):
        result: dict[str, Any] = {"case": f"{name}, 3.4e9 scores"}
        try:
            n = 41000
            q, k, v, _ = inputs(1, 2, n, 16, torch.bfloat16)
            kernel, reference = pairs(name, n, 1, False)
            out = kernel(q, k, v)
            if name == "rkde":  # the reference would need the whole Gram: one head by chunks
                out, own = out[:, 1, -8:], _rkde_rows(q[0, 1, -8:].double(), k[0, 1].double(), v[0, 1].double())[None]
            elif "rkde" in name:
                # The first queries see little: the reference on a short prefix.
                out, own = out[:, :, :200], reference(*(x[:, :, :200].double() for x in (q, k, v)))
            elif "causal" in name:
                out, own = out[:, :, -8:], reference(*(x.double() for x in (q[:, :, -8:], k, v)))
            else:
                out, own = out[:, :, -8:], reference(*(x.double() for x in (q[:, :, -8:], k, v)))
            error = (out.double() - own).abs().max().item()
            result["ok"] = error <= 2.5 * torch.finfo(torch.bfloat16).eps * own.abs().max().item()
            result["error"] = f"error {error:.2e}, largest {own.abs().max().item():.2e}"
        except Exception as error:
            result["ok"], result["error"] = False, f"{type(error).__name__}: {error}"[:200]
        found.append(result)
        print("large", result)
    for name in ("kde", "rkde", "mom"):
        result = {"case": f"{name}, tensors of 2.2e9 entries"}
        try:
            tensors = inputs(140_000, 4, 31, 128, torch.bfloat16)
            kernel, _ = pairs(name, 31, 140_000, False)
            many = [x[-3:] for x in gradients(kernel, tensors, torch.bfloat16)]
            few = gradients(kernel, [x[-3:] for x in tensors], torch.bfloat16)
            result["ok"] = all(torch.equal(a, b) for a, b in zip(many, few, strict=True))
        except Exception as error:
            result["ok"], result["error"] = False, f"{type(error).__name__}: {error}"[:200]
        found.append(result)
        print("large", result)
        torch.cuda.empty_cache()
    return found


def _rkde_rows(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """RKDE with Huber's 0.2 for a few queries `[T, D]` of one head, the Grams in chunks of rows."""
    unit = torch.nn.functional.normalize(k, dim=-1)
    variance = k.shape[-1] ** 0.5
    sums = torch.zeros(2, len(k), dtype=k.dtype, device=k.device)
    for part in torch.arange(len(k), device=k.device).split(2000):
        marginal = torch.exp((unit[part] @ unit.T - 1) / variance)
        apart = v[part].square().sum(-1)[:, None] + v.square().sum(-1) - 2 * v[part] @ v.T
        sums += torch.stack((marginal.sum(0), (marginal * torch.exp(-apart / (2 * variance))).sum(0)))
    r = sums / len(k)
    distance = (1 - 2 * r + r.mean(-1, keepdim=True)).clamp(min=0).sqrt()
    psi = torch.where(distance > 0.2, 0.2 / distance, 1)
    marginal, joint = psi / psi.sum(-1, keepdim=True)
    p = torch.exp(q @ unit.T / variance)
    return (p * joint) @ v / (p @ marginal)[:, None]


def median_ms(f: Callable[[], Any]) -> float:
    """Median over replays of a CUDA graph, each of enough calls that launch gaps vanish."""
    from triton.testing import do_bench, do_bench_cudagraph

    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            return float(do_bench_cudagraph(f, rep=40, return_mode="median"))
    except Exception as error:
        print(f"  (no graph: {str(error)[:100]})")
        torch.cuda.synchronize()
        return float(do_bench(f, warmup=10, rep=60, return_mode="median"))


def both_ms(f: Callable[..., Tensor], tensors: list[Tensor]) -> tuple[float, float]:
    x = variables(tensors)
    with torch.no_grad():
        forward = median_ms(lambda: f(*x))
    return forward, median_ms(lambda: torch.autograd.grad(f(*x), x, tensors[3]))


def sdpa(backend: Any, causal: bool) -> Callable[..., Tensor]:
    from torch.nn.attention import sdpa_kernel

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel([backend]):
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    return run


def memory(f: Callable[..., Tensor], backward: bool) -> float:
    """Peak MiB above the inputs at 1×16×16384×64, bfloat16."""
    tensors = inputs(1, 16, 16384, 64, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    if backward:
        q, k, v = (x.detach().requires_grad_() for x in tensors[:3])
        torch.autograd.grad(f(q, k, v), (q, k, v), tensors[3])
    else:
        with torch.no_grad():
            f(*tensors[:3])
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def profile(f: Callable[..., Tensor], tensors: list[Tensor]) -> dict[str, float]:
    """Microseconds of each kernel in one forward and backward."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    x = variables(tensors)
    for _ in range(3):
        torch.autograd.grad(f(*x), x, tensors[3])
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CUDA]) as trace:
        for _ in range(5):
            torch.autograd.grad(f(*x), x, tensors[3])
        torch.cuda.synchronize()
    found = {e.key[:60]: e.device_time_total / 5 for e in trace.key_averages() if e.device_time_total > 0}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


TIMED = (
    ("kde", BIG), ("rkde", BIG), ("rkde-causal", BIG), ("mom", BIG), ("kde-causal", BIG),
    ("kde", VIT), ("rkde", VIT), ("mom", VIT),
    ("kde-causal", TEXT), ("rkde-causal", TEXT), ("mom-causal", TEXT),
    ("fourier", VIT), ("fourier", LONG),
)  # fmt: skip


def warm(case: tuple[str, Shape]) -> None:
    name, shape = case
    tensors = inputs(*shape, torch.bfloat16) + learnt(name, shape[3], torch.bfloat16)
    gradients(pairs(name, shape[2], shape[0], False)[0], tensors, torch.bfloat16)


def timings(jobs: int) -> None:
    from torch.nn.attention import SDPBackend

    from robust_attention._triton import ops

    work(list(TIMED), warm, jobs)
    rows: list[dict[str, Any]] = []
    base: dict[Any, tuple[float, float]] = {}
    for name, shape in TIMED:
        causal = "causal" in name
        tensors = inputs(*shape, torch.bfloat16)
        if (shape, causal) not in base:
            found = {}
            for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION):
                try:
                    found[backend.name] = both_ms(sdpa(backend, causal), tensors)
                except Exception as error:
                    print("  ", backend.name, str(error)[:80])
            base[shape, causal] = tuple(min(x[i] for x in found.values()) for i in (0, 1))  # type: ignore[assignment]
            print(f"SDPA {shape} causal={causal}: " + ", ".join(f"{k} {a:.3f}/{b:.3f}" for k, (a, b) in found.items()))
        forward, both = base[shape, causal]
        tensors += learnt(name, shape[3], torch.bfloat16)
        kernel = pairs(name, shape[2], shape[0], False)[0]
        variants = {"triton": kernel}
        if name.startswith("kde"):
            variants["sdpa"] = lambda q, k, v, causal=causal: ops.kde_by_sdpa(q, k, v, None, causal)
        for label, f in variants.items():
            ms = both_ms(f, tensors)
            row = {
                "case": name, "shape": shape, "by": label, "forward_ms": ms[0], "both_ms": ms[1],
                "forward_ratio": ms[0] / forward, "both_ratio": ms[1] / both,
            }  # fmt: skip
            if label == "triton":
                row["kernels_us"] = profile(f, tensors)
            rows.append(row)
            print(
                f"{name:12} {'x'.join(map(str, shape)):14} {label:9} {ms[0]:8.4f} {ms[1]:8.4f} ms  "
                f"ratio {row['forward_ratio']:.2f} {row['both_ratio']:.2f}"
            )
            if label == "triton":
                print("      " + ", ".join(f"{k[:34]} {v:.0f}" for k, v in list(row["kernels_us"].items())[:9]))
        del tensors
    backend = SDPBackend.CUDNN_ATTENTION
    for name in ("sdpa", "kde", "rkde", "mom", "rkde-causal", "fourier"):
        f = sdpa(backend, False) if name == "sdpa" else pairs(name, 16384, 1, False)[0]
        try:
            used = [memory(f, backward) for backward in (False, True)]
        except Exception as error:
            print(name, str(error)[:100])
            continue
        rows.append({"case": name, "shape": (1, 16, 16384, 64), "peak_mib": used})
        print(f"memory 1x16x16384x64 {name:12} {used[0]:7.0f} {used[1]:7.0f} MiB")
    for shape, extra in itertools.product((BIG, VIT), (8, 16)):
        q, k, v, grad = inputs(*shape, torch.bfloat16)
        wide = [torch.nn.functional.pad(x, (0, extra)) for x in (v, grad)]
        try:
            ms = both_ms(sdpa(backend, False), [q, k, *wide])
            print(f"cuDNN with {64 + extra} value columns, {shape}: {ms[0]:.3f} {ms[1]:.3f}")
            rows.append({"case": "identity A, cuDNN", "shape": shape, "columns": 64 + extra, "ms": ms})
        except Exception as error:
            print(f"cuDNN with {64 + extra} value columns: {str(error)[:100]}")
    write("time", rows)


# ------------------------------------------------------------------ block shapes

KERNELS: dict[str, tuple[str, str, list[tuple[str, Shape]]]] = {
    # kernel: (module, function, cases)
    "forward": ("attention", "_forward", [("kde", BIG), ("kde", VIT), ("mom-causal", TEXT)]),
    "queries": ("attention", "_backward_queries", [("mom", VIT), ("mom-causal", TEXT)]),
    "keys": ("attention", "_backward_keys", [("mom", VIT), ("mom-causal", TEXT)]),
    "sums": ("gram", "_row_sums", [("rkde", BIG), ("rkde", VIT)]),
    "backward": ("gram", "_gram_backward", [("rkde", BIG), ("rkde", VIT)]),
    "choose": ("medians", "_choose", [("mom-causal", TEXT)]),
    "prefix": ("causal", "_prefix", [("rkde-causal", BIG), ("rkde-causal", TEXT)]),
    "attend": ("causal", "_attend", [("rkde-causal", BIG), ("rkde-causal", TEXT)]),
    "c-queries": ("causal", "_queries", [("rkde-causal", BIG), ("rkde-causal", TEXT)]),
    "c-keys": ("causal", "_keys", [("rkde-causal", BIG), ("rkde-causal", TEXT)]),
    "f-forward": ("fourier", "_forward", [("fourier", VIT), ("fourier", LONG)]),
    "f-queries": ("fourier", "_backward_queries", [("fourier", VIT), ("fourier", LONG)]),
    "f-keys": ("fourier", "_backward_keys", [("fourier", VIT), ("fourier", LONG)]),
}


def sweep_configs(kernel: str) -> list[tuple[int, int, int, int]]:
    if kernel.startswith("f-"):
        # (kept, met): queries and keys, but keys and queries in the keys' kernel.
        sizes = (
            (128, 16, 4),
            (128, 32, 4),
            (128, 32, 8),
            (64, 16, 2),
            (64, 16, 4),
            (64, 32, 2),
            (64, 32, 4),
            (32, 32, 2),
        )
        return [(n, m, w, s) if kernel == "f-keys" else (m, n, w, s) for m, n, w in sizes for s in (1, 2)]
    if kernel in ("prefix", "attend", "c-queries", "c-keys"):
        return [
            (64, 64, 4, 1),
            (64, 64, 4, 2),
            (64, 64, 8, 1),
            (64, 64, 8, 2),
            (32, 32, 4, 1),
            (32, 32, 4, 2),
            (32, 32, 2, 2),
        ]
    if kernel == "sums":
        return [
            (m, n, w, s)
            for m, n, w in ((64, 64, 4), (128, 64, 8), (64, 32, 4), (128, 32, 4), (128, 32, 8))
            for s in (2, 3)
        ]
    if kernel == "backward":
        return [
            (m, n, w, s)
            for m, n, w in ((64, 64, 4), (128, 64, 8), (64, 32, 4), (128, 32, 8), (128, 32, 4))
            for s in (1, 2, 3)
        ]
    if kernel == "keys":
        return [
            (m, n, w, s)
            for m, n, w in ((64, 128, 8), (64, 64, 4), (32, 128, 4), (32, 128, 8), (128, 64, 8), (32, 64, 4))
            for s in (2, 3)
        ]
    return [
        (m, n, w, s)
        for m, n, w in ((128, 64, 4), (128, 64, 8), (128, 128, 8), (64, 64, 4), (128, 32, 4), (128, 32, 8), (64, 32, 4))
        for s in (2, 3)
    ]


def apply_config(kernel: str, config: tuple[int, int, int, int]) -> None:
    from robust_attention._triton import attention, causal, fourier, gram, medians

    if kernel.startswith("f-"):
        for width in (64, 128):
            fourier.TILES[kernel.removeprefix("f-"), width] = config
        return
    if kernel in ("prefix", "attend", "c-queries", "c-keys"):
        for name in ("keys", "rows") if kernel == "c-keys" else (kernel.removeprefix("c-"),):
            causal.WARPS[name], causal.STAGES[name] = config[2], config[3]
        causal.BLOCK = config[0]
    elif kernel in ("sums", "backward"):
        for width in (16, 64):
            gram.TILES[kernel, width] = config
    elif kernel == "choose":
        m, n, warps, stages = config
        medians.tile = lambda *_: {"BLOCK_M": m, "BLOCK_N": n, "num_warps": warps, "num_stages": stages}
    else:
        for width in (16, 64):
            attention.TILES[kernel, width] = config


def sweep_one(job: tuple[str, int, tuple[int, int, int, int], bool]) -> dict[str, Any]:
    """One kernel, one case, one configuration: the time of its launches alone (0 where only compiling)."""
    import importlib

    from triton.testing import do_bench

    kernel, case, config, measure = job
    module_name, function, cases = KERNELS[kernel]
    name, shape = cases[case]
    module = importlib.import_module(f"robust_attention._triton.{module_name}")
    apply_config(kernel, config)
    launches: list[Any] = []
    real = module.launch

    def spy(which: Any, grid: Any, *args: Any, **meta: Any) -> Any:
        found = real(which, grid, *args, **meta)
        if which.__name__ == function:
            launches.append((lambda: real(which, grid, *args, **meta), found))
        return found

    result: dict[str, Any] = {"kernel": kernel, "case": f"{name} {'x'.join(map(str, shape))}", "config": config}
    try:
        module.launch = spy
        tensors = inputs(*shape, torch.bfloat16) + learnt(name, shape[3], torch.bfloat16)
        gradients(pairs(name, shape[2], shape[0], False)[0], tensors, torch.bfloat16)
        torch.cuda.synchronize()
        result["registers"], result["spills"] = launches[0][1].n_regs, launches[0][1].n_spills
        if measure:
            result["us"] = [1000 * do_bench(f, warmup=5, rep=20, return_mode="median") for f, _ in launches]
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}"[:120]
    finally:
        module.launch = real
    return result


def sweep(kernels: list[str], jobs: int) -> None:
    tasks = [(k, c, cfg, False) for k in kernels for c in range(len(KERNELS[k][2])) for cfg in sweep_configs(k)]
    start = time.time()
    compiled = work(tasks, sweep_one, jobs)
    print(f"compiled {len(tasks)} in {time.time() - start:.0f} s")
    rows = []
    for task, seen in zip(tasks, compiled, strict=True):
        rows.append(seen if "error" in seen else sweep_one((*task[:3], True)))
        if "error" in rows[-1] and "OutOfResources" not in rows[-1]["error"]:
            print(rows[-1])
    write("sweep", rows)
    good = [r for r in rows if "us" in r]
    for key, group in itertools.groupby(good, key=lambda r: (r["kernel"], r["case"])):
        best = sorted(group, key=lambda r: statistics.fmean(r["us"]))[: 7 if key[1].startswith("rkde-causal") else 4]
        text = "; ".join(
            f"{r['config']} {'+'.join(f'{u:.0f}' for u in r['us'])} r{r['registers']} s{r['spills']}" for r in best
        )
        print(f"{key[0]:9} {key[1]:24} {text}")


def write(name: str, rows: Any) -> None:
    path = Path(os.environ.get("OUT", ".")) / f"kernels-{name}.json"
    path.write_text(
        json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, default=str)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time", "sweep"))
    parser.add_argument("kernels", nargs="*")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop checking after this long")
    args = parser.parse_args()
    if args.what == "check":
        sys.exit(0 if check(args.quick, args.jobs, args.seconds) else 1)
    if args.what == "time":
        timings(args.jobs)
    else:
        sweep(args.kernels or list(KERNELS), args.jobs)


if __name__ == "__main__":
    main()
