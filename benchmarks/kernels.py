"""The Triton kernels' acceptance on a GPU: one command, one JSON.

    python benchmarks/kernels.py [--quick] [--jobs 14] [--seconds 540] [--only cases laws large]

Cases: every kernel through the public verb, forward and every gradient, against the float64 reference, allowed 1.5 (2
for gradients) times the error of the plain formula in the same dtype plus two ulps; odd lengths, views that are not
contiguous, padding, grouped and cross attention, head sizes 16 to 128, poisoned buffers, and the same bits in every
repeat. Laws: equal blocks on CPU and GPU, opcheck, torch.compile(fullgraph=True), autocast, activation checkpointing,
vmap. Large: more than 2³¹ scores, and tensors of more than 2³¹ entries. Times are the business of `robust-attention
bench`, tiles of `benchmarks/tiles.py`.

Results go to $OUT/kernels.json (or the working directory) as they come. `--tiny` is a few of each, for Triton's
interpreter on a CPU (TRITON_INTERPRET=1): whether this script runs, not whether the kernels are right on a GPU.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import robust_attention as ra
from robust_attention._files import write_json
from robust_attention._provenance import provenance
from robust_attention.bench.check import Attend, check, gradients, inputs
from robust_attention.bench.record import sources
from robust_attention.robust.blocks import lower_median

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOSSES = {"huber": 0.2, "hampel": 0.2, "welsch": 0.5, "tukey": 0.8}
METHODS: dict[str, ra.Method] = {
    "kde": ra.KDE(),
    **{f"rkde-{name}": ra.RKDE(loss=getattr(ra, name.capitalize())(a)) for name, a in LOSSES.items()},
    "rkde-stop": ra.RKDE(weight_grad="stop"),
    "rkde-narrow": ra.RKDE(bandwidth=1.5, weight_bandwidth=0.7, value_bandwidth=3.0),
    "mom": ra.MoM(),
    "mom-poisson": ra.MoM(draw="poisson", blocks=4),
    "spkde": ra.SPKDE(),
    "fourier": ra.Fourier(),
}
FULL_ONLY = ("rkde-stop", "spkde")
"""Their causal form has no kernel."""
MAIN = ("kde", "rkde-huber", "mom", "fourier")
FEW = 20
"""Points of a law at the tiny scale, where one method stands for all."""


# ------------------------------------------------------------------ cases


@dataclass(frozen=True, kw_only=True)
class Case:
    """One kernel at one shape."""

    method: str
    shape: tuple[int, int, int, int]
    """B, H, S, D."""
    causal: bool = False
    dtype: str = "bfloat16"
    queries: int | None = None
    kv_heads: int | None = None
    value_width: int | None = None
    strided: bool = False
    padded: bool = False
    repeats: int = 2
    bare: bool = False
    """The kernel itself where the verb would take SDPA: KDE without a mask."""


def cases(scale: str) -> list[Case]:
    """All cases of a scale: tiny, quick or full."""
    if scale == "tiny":
        both = partial(Case, dtype="float32", repeats=1)
        return [
            *(both(method=name, shape=(1, 1, 9, 16), strided=True) for name in (*MAIN, "spkde")),
            both(method="rkde-huber", shape=(2, 2, 19, 16), causal=True, kv_heads=1, padded=True, repeats=2),
        ]
    quick = scale == "quick"
    found: list[Case] = []
    kinds = [(name, causal) for name in METHODS for causal in (False, True) if not (causal and name in FULL_ONLY)]
    main = [(name, causal) for name, causal in kinds if name in MAIN or name == "spkde"]
    lengths = (17, 129) if quick else (1, 2, 17, 127, 129, 197, 257)
    for (name, causal), dtype, n in itertools.product(main, ("bfloat16", "float16", "float32"), lengths):
        more = {"strided": n % 4 == 1, "padded": n % 2 == 1 and n > 100}
        found.append(Case(method=name, causal=causal, shape=(2, 2, n, 64), dtype=dtype, **more))
    for name, causal in main:
        both = partial(Case, method=name, causal=causal)
        found += [
            both(shape=(2, 4, 150, d), kv_heads=2, strided=True)
            for d in ((16, 128) if quick else (16, 32, 40, 80, 96, 128))
        ]
        found.append(both(shape=(1, 4, 140, 16), dtype="float32", queries=90, kv_heads=2, value_width=48))
        found.append(both(shape=(1, 2, 70, 64), queries=150, value_width=32))
        found.append(both(shape=(1, 2, 1024 if name != "spkde" else 256, 64), repeats=20 if quick else 100))
    for name, causal in kinds:
        if name not in MAIN:
            found.append(Case(method=name, causal=causal, shape=(2, 2, 197, 64)))
            found.append(Case(method=name, causal=causal, shape=(2, 2, 100, 16), dtype="float32"))
    found += [Case(method="kde", shape=(2, 2, n, 64), bare=True, repeats=100) for n in (129, 256, 1024)]
    # The shapes that are timed, with fewer samples and heads.
    return [*found, Case(method="fourier", shape=(8, 3, 197, 64)), Case(method="fourier", shape=(1, 1, 1024, 64))]


def verb(name: str, impl: str, causal: bool, pad: Tensor | None = None) -> Attend:
    """A method as a function of q, k, v, and R for Fourier."""
    method, mask = METHODS[name], None if pad is None else pad[:, None, None]
    if name == "fourier":
        return lambda q, k, v, radius: method.attend(q, k, v, mask, causal, impl, radius=radius)  # type: ignore[arg-type, call-arg]
    return lambda q, k, v: method.attend(q, k, v, mask, causal, impl)  # type: ignore[arg-type]


def drawn(case: Case) -> list[Tensor]:
    tensors = inputs(
        case.shape, getattr(torch, case.dtype), DEVICE, queries=case.queries, kv_heads=case.kv_heads,
        value_width=case.value_width, strided=case.strided,
    )  # fmt: skip
    if case.method == "fourier":
        tensors.append(torch.linspace(0.5, 1.5, case.shape[3], device=DEVICE).to(tensors[0].dtype))
    return tensors


def padding(case: Case) -> Tensor | None:
    if not case.padded:
        return None
    batch, _, keys, _ = case.shape
    pad = torch.ones(batch, keys, dtype=torch.bool, device=DEVICE)
    pad[0, keys - keys // 3 :] = False
    pad[-1, : keys // 4] = False
    return pad


def check_case(case: Case) -> dict[str, Any]:
    """Errors of one case over their limits (above 1 fails)."""
    torch.backends.cuda.matmul.allow_tf32 = False
    found: dict[str, Any] = {"part": "cases", **asdict(case)}
    try:
        pad = padding(case)
        kernel = verb(case.method, "triton", case.causal, pad)
        if case.bare:
            from robust_attention._triton import ops

            kernel = ops.kde
        judged = check(kernel, verb(case.method, "reference", case.causal, pad), drawn(case), repeats=case.repeats)
        return found | {"errors_over_limit": judged.worst, "outcome": judged.reason}
    except Exception as error:  # a case that cannot run is a failed case
        return found | {"outcome": f"{type(error).__name__}: {error}"[:300]}


# ------------------------------------------------------------------ laws


def law_equal_blocks(n: int) -> str:
    """Each query's block is the one that float64 on the CPU chooses; ties go to the lower block."""
    from robust_attention._triton import ops

    near = 0
    twice = ra.MoM().draw(n)
    twice[3] = twice[1]
    for counts, dtype in itertools.product(
        (ra.MoM().draw(n), ra.MoM(blocks=4, draw="partition").draw(n), ra.MoM(draw="poisson").draw(n), twice),
        (torch.float32, torch.bfloat16, torch.float16),
    ):
        if DEVICE == "cpu" and (dtype != torch.float32 or counts is twice):
            continue  # the interpreter's product may round equal columns differently
        q, k, *_ = inputs((1, 2, n, 16), dtype, DEVICE)
        visible = torch.ones(n, n, dtype=torch.bool).tril()
        unit = torch.nn.functional.normalize(k.cpu().double(), dim=-1)
        p = torch.exp(q.cpu().double() @ unit.mT / 4) * visible
        density = p @ counts.double().T / counts.sum(-1)
        if counts is twice:
            density[..., 3] = density[..., 1]  # exactly, however the product rounds them
        wanted, some = lower_median(density, (visible.double() @ counts.double().T > 0).expand(density.shape))
        wanted = torch.where(some, wanted, len(counts))
        chosen = ops._mom_forward(q, k, k, counts.to(DEVICE), None, True, 4.0, False, False)[3].cpu().long()
        differ = chosen != wanted
        if differ.any():  # unequal densities that are closer than float32 can tell: rounding decides
            one, other = (density.gather(-1, x.clamp(max=len(counts) - 1)[..., None])[differ] for x in (chosen, wanted))
            if not bool((((one / other - 1).abs() < 1e-5) & (one != other)).all()):
                return f"{int(differ.sum())} of {differ.numel()} blocks differ, {counts.shape[0]} blocks, {dtype}"
            near += int(differ.sum())
    return "passed" if near == 0 else f"passed ({near} differ by less than float32 resolves)"


def law_equal_draws(n: int) -> str:
    for kind, keys in itertools.product(("bootstrap", "subsample", "partition", "poisson"), (1, 17, 3 * n)):
        method = ra.MoM(draw=kind)
        if not torch.equal(method.draw(keys), method.draw(keys, device=torch.device(DEVICE)).cpu()):
            return f"{kind} draws of {keys} keys differ"
    return "passed"


def _same_bits(n: int, change: Callable[[Attend], Attend]) -> str:
    """A changed way of calling gives the same bits, forward and backward."""
    for name, causal in itertools.product((*MAIN, "spkde") if n > FEW else ("spkde",), (False, True)):
        if causal and name in FULL_ONLY:
            continue
        tensors = drawn(Case(method=name, shape=(1, 1, n // 2, 16), dtype="float32"))
        plain = verb(name, "triton", causal)
        both = (gradients(attend, tensors, torch.float32) for attend in (plain, change(plain)))
        if not all(torch.equal(a, b) for a, b in zip(*both, strict=True)):
            return f"{name}, causal {causal}: other bits"
    return "passed"


def law_autocast(n: int) -> str:
    def change(plain: Attend) -> Attend:
        def inside(*x: Tensor) -> Tensor:
            with torch.autocast(DEVICE, torch.bfloat16):
                return plain(*x)

        return inside

    return _same_bits(n, change)


def law_activation_checkpointing(n: int) -> str:
    from torch.utils.checkpoint import checkpoint

    return _same_bits(n, lambda plain: lambda *x: checkpoint(plain, *x, use_reentrant=False))


def law_compile(n: int) -> str:
    """Through the public verb, as one graph: what it gives uncompiled, to four ulps of the largest entry.

    SPKDE is left out: its programmes look at the data.
    """
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    for name, causal in itertools.product(MAIN if n > FEW else ("rkde-huber",), (False, True)):
        torch._dynamo.reset()
        tensors, plain = (
            drawn(Case(method=name, shape=(1, 1, n // 2, 16), dtype="float32")),
            verb(name, "triton", causal),
        )
        compiled = torch.compile(plain, backend=backend, fullgraph=True)
        both = (gradients(attend, tensors, torch.float32) for attend in (plain, compiled))
        for one, other in zip(*both, strict=True):
            if not bool((one - other).abs().max() <= 4 * torch.finfo(torch.float32).eps * one.abs().max()):
                return f"{name}, causal {causal}: compiled is off by {float((one - other).abs().max()):.1e}"
    return "passed"


def law_opcheck(n: int) -> str:
    from robust_attention._triton import causal, fourier, ops

    keys = n // 3
    q, k, v, grad = inputs((1, 2, keys, 16), torch.float32, DEVICE, queries=5, kv_heads=1)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    one = torch.ones(16, device=DEVICE)
    rkde = (q, k, v, None, "huber", 0.2, 4.0, 4.0, 4.0)
    counts = ra.MoM().draw(keys, device=torch.device(DEVICE))
    operators: list[tuple[Any, tuple[Any, ...]]] = [
        (ops._weighted_forward, (q, k, v, None, None, None, True, 4.0)),
        (ops._rkde_forward, rkde),
        (causal._forward, rkde),
        (ops._mom_forward, (q, k, v, counts, None, False, 4.0, False, True)),
        (ops._unit_keys, (k,)),
        (fourier._fourier_forward, (q, k, v, one.clone().requires_grad_(), None, True, 4)),
    ]
    for operator, values in operators[: None if n > FEW else 1]:
        torch.library.opcheck(operator, values)
    with torch.no_grad():
        torch.library.opcheck(ops._rkde_backward, (grad, *rkde[:4], *ops._rkde_forward(*rkde), *rkde[4:], True))
        torch.library.opcheck(causal._backward, (grad, *rkde[:4], *causal._forward(*rkde), *rkde[4:]))
    return "passed"


def law_vmap_loops(n: int) -> str:
    q, k, v, _ = inputs((2, 1, n // 3, 16), torch.float32, DEVICE)
    from robust_attention._triton import ops

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that it loops
        mapped = torch.func.vmap(ops.kde)(q[:, None], k[:, None], v[:, None])
    return "passed" if torch.equal(mapped[:, 0], ops.kde(q, k, v)) else "vmap differs from a loop"


LAWS: dict[str, Callable[[int], str]] = {
    "equal blocks": law_equal_blocks,
    "equal draws": law_equal_draws,
    "autocast": law_autocast,
    "activation checkpointing": law_activation_checkpointing,
    "compile": law_compile,
    "opcheck": law_opcheck,
    "vmap": law_vmap_loops,
}


# ------------------------------------------------------------------ large


def large(scale: str) -> Iterator[tuple[str, Callable[[], str]]]:
    """More than 2³¹ scores (41,000² for two heads), and more than 2³¹ entries a tensor; small numbers for `tiny`."""
    keys, shape = (19, (4, 1, 5, 16)) if scale == "tiny" else (41_000, (140_000, 4, 31, 128))
    for name, causal in itertools.product(MAIN, (False, True)):
        yield f"{name}{' causal' if causal else ''}, {2 * keys**2:.1e} scores", partial(many_scores, name, causal, keys)
    for name in ("kde", "rkde-huber", "mom"):
        yield f"{name}, tensors of {math.prod(shape):.1e} entries", partial(many_entries, name, shape)


@torch.no_grad()
def many_scores(name: str, causal: bool, keys: int) -> str:
    """The last queries against float64, which is streamed: no tensor of all scores is made."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    q, k, v, _, *owned = drawn(Case(method=name, shape=(1, 2, keys, 16), dtype=str(dtype).removeprefix("torch.")))
    out = verb(name, "triton", causal)(q, k, v, *owned)[:, :, -8:]
    exact = verb(name, "streamed", causal)(*(x.double() for x in (q[:, :, -8:], k, v, *owned)))
    error, top = float((out.double() - exact).abs().max()), float(exact.abs().max())
    limit = 2.5 * max(torch.finfo(dtype).eps, 2e-6) * top
    return "passed" if error <= limit else f"error {error:.2e} above {limit:.2e}"


def many_entries(name: str, shape: tuple[int, int, int, int]) -> str:
    """The last samples have the bits that they have alone."""
    dtype = torch.float32 if DEVICE == "cpu" else torch.bfloat16
    tensors = inputs(shape, dtype, DEVICE)
    kernel = verb(name, "triton", False)
    together = [x[-3:].clone() for x in gradients(kernel, tensors, dtype)]
    alone = gradients(kernel, [x[-3:] for x in tensors], dtype)
    same = all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    return "passed" if same else "other bits than alone"


# ------------------------------------------------------------------ the run


def settled(part: str, name: str, task: Callable[[], str]) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        outcome = task()
    except Exception as error:  # what cannot run has failed
        outcome = f"{type(error).__name__}: {error}"[:300]
    if DEVICE == "cuda":
        torch.cuda.empty_cache()
    return {"part": part, "name": name, "outcome": outcome, "seconds": round(time.perf_counter() - start, 1)}


def results(scale: str, jobs: int, only: list[str]) -> Iterator[dict[str, Any]]:
    """Every result as it comes; cases in several processes, so that kernels compile side by side."""
    if "laws" in only:
        n = FEW if scale == "tiny" else 500
        yield from (settled("laws", name, partial(law, n)) for name, law in LAWS.items())
    if "large" in only:
        yield from (settled("large", name, task) for name, task in large(scale))
    if "cases" in only:
        found = cases(scale)
        random.Random(0).shuffle(found)  # where time runs out, it runs out for all of them alike
        if jobs == 1:
            yield from map(check_case, found)
        else:
            with multiprocessing.get_context("spawn").Pool(jobs) as pool:
                yield from pool.imap_unordered(check_case, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer lengths, widths and repeats")
    parser.add_argument("--tiny", action="store_true", help="a few of each, for the interpreter on a CPU")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile and check cases")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long; the rest counts as not run")
    parser.add_argument("--only", nargs="+", default=["cases", "laws", "large"], choices=("cases", "laws", "large"))
    args = parser.parse_args()
    if DEVICE == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("kernels need a CUDA device, or TRITON_INTERPRET=1 (with --tiny) on a CPU; got neither")
    scale = "tiny" if args.tiny else "quick" if args.quick else "full"
    expected = sum(
        {"laws": len(LAWS), "large": len(list(large(scale))), "cases": len(cases(scale))}[x] for x in args.only
    )
    path, start = Path(os.environ.get("OUT", ".")) / "kernels.json", time.perf_counter()
    record: dict[str, Any] = {
        "study": "kernels",
        "scale": scale,
        "sources": sources(),
        **provenance(DEVICE),
        "rows": [],
    }
    for row in results(scale, args.jobs, args.only):
        record["rows"].append(row)
        if not row["outcome"].startswith("passed"):
            print("FAILED", json.dumps(row), flush=True)
        late = time.perf_counter() - start > args.seconds
        if late or len(record["rows"]) % 20 == 0 or len(record["rows"]) == expected:
            record |= summary(record["rows"], expected, time.perf_counter() - start)
            write_json(path, record)
        if late:
            break
    print(json.dumps({key: record[key] for key in ("passed", "failed", "not_run", "worst", "seconds")}))
    sys.exit(0 if record["failed"] == 0 and record["not_run"] == 0 else 1)


def summary(rows: list[dict[str, Any]], expected: int, seconds: float) -> dict[str, Any]:
    passed = sum(row["outcome"].startswith("passed") for row in rows)
    worst: dict[str, float] = {}
    for row in rows:
        for name, value in row.get("errors_over_limit", {}).items():
            worst[name] = max(worst.get(name, 0.0), value)
    return {
        "passed": passed,
        "failed": len(rows) - passed,
        "not_run": expected - len(rows),
        "worst": worst,
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    main()
