"""Tuning of the Triton kernels on a GPU: block shapes of single kernels, and where a call's time goes.

    python benchmarks/tiles.py sweep [KERNEL ...] [--jobs 14]    times of every configuration, the best ones printed
    python benchmarks/tiles.py profile                           microseconds of each kernel at the target's shapes

Results go to $OUT/tiles-*.json (or the working directory). Check with `benchmarks/kernels.py` first.
"""

import argparse
import importlib
import itertools
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from kernels import Case, drawn, verb

from robust_attention._files import write_json
from robust_attention._provenance import provenance
from robust_attention.bench.check import gradients

BIG, VIT, TEXT, LONG = (4, 16, 4096, 64), (256, 3, 197, 64), (96, 8, 256, 16), (4, 16, 1024, 64)
Config = tuple[int, int, int, int]
"""Rows, columns, warps, stages."""
RKDE = Case(method="rkde-huber", shape=BIG)
VIT_RKDE, TEXT_MOM = Case(method="rkde-huber", shape=VIT), Case(method="mom", shape=TEXT, causal=True)
CAUSAL = [Case(method="rkde-huber", shape=shape, causal=True) for shape in (BIG, TEXT)]
FOURIER = [Case(method="fourier", shape=shape) for shape in (VIT, LONG)]
MOM = Case(method="mom", shape=VIT)
# kernel: (module, function, cases)
KERNELS: dict[str, tuple[str, str, list[Case]]] = {
    "forward": ("attention", "_forward", [RKDE, VIT_RKDE, TEXT_MOM]),
    "queries": ("attention", "_backward_queries", [MOM, TEXT_MOM]),
    "keys": ("attention", "_backward_keys", [MOM, TEXT_MOM]),
    "sums": ("gram", "_row_sums", [RKDE, VIT_RKDE]),
    "backward": ("gram", "_gram_backward", [RKDE, VIT_RKDE]),
    "choose": ("medians", "_choose", [TEXT_MOM]),
    "prefix": ("causal", "_prefix", CAUSAL),
    "attend": ("causal", "_attend", CAUSAL),
    "c-queries": ("causal", "_queries", CAUSAL),
    "c-keys": ("causal", "_keys", CAUSAL),
    "f-forward": ("fourier", "_forward", FOURIER),
    "f-queries": ("fourier", "_backward_queries", FOURIER),
    "f-keys": ("fourier", "_backward_keys", FOURIER),
}
SQUARES = ((64, 64, 4), (128, 64, 8), (64, 32, 4), (128, 32, 4), (128, 32, 8))


def configs(kernel: str) -> list[Config]:
    """What to try."""
    stages: tuple[int, ...] = (2, 3)
    if kernel.startswith("f-"):
        # (kept, met): queries and keys, but keys and queries in the keys' kernel.
        sizes = [
            (128, 16, 4),
            (128, 32, 4),
            (128, 32, 8),
            (64, 16, 2),
            (64, 16, 4),
            (64, 32, 2),
            (64, 32, 4),
            (32, 32, 2),
        ]
        shapes, stages = [(n, m, w) if kernel == "f-keys" else (m, n, w) for m, n, w in sizes], (1, 2)
    elif KERNELS[kernel][0] == "causal":
        shapes, stages = [(64, 64, 4), (64, 64, 8), (32, 32, 4), (32, 32, 2)], (1, 2)
    elif kernel in ("sums", "backward"):
        shapes, stages = list(SQUARES), (2, 3) if kernel == "sums" else (1, 2, 3)
    elif kernel == "keys":
        shapes = [(64, 128, 8), (64, 64, 4), (32, 128, 4), (32, 128, 8), (128, 64, 8), (32, 64, 4)]
    else:
        shapes = [*SQUARES, (128, 64, 4), (128, 128, 8)]
    return [(m, n, w, s) for m, n, w in shapes for s in stages]


def apply(kernel: str, config: Config) -> None:
    """Make a kernel use a configuration."""
    from robust_attention._triton import attention, causal, fourier, gram, medians

    module = KERNELS[kernel][0]
    if module == "fourier":
        fourier.TILES |= {(kernel.removeprefix("f-"), width): config for width in (64, 128)}
    elif module == "causal":
        for name in ("keys", "rows") if kernel == "c-keys" else (kernel.removeprefix("c-"),):
            causal.WARPS[name], causal.STAGES[name] = config[2], config[3]
        causal.BLOCK = config[0]
    elif module == "medians":
        medians.tile = lambda *_: dict(zip(("BLOCK_M", "BLOCK_N", "num_warps", "num_stages"), config, strict=True))
    else:
        tiles = gram.TILES if module == "gram" else attention.TILES
        tiles |= {(kernel, width): config for width in (16, 64)}


def launches_of(job: tuple[str, Case, Config, bool]) -> dict[str, Any]:
    """One kernel, one case, one configuration: registers, spills, and microseconds of its launches where measured."""
    from triton.testing import do_bench

    kernel, case, config, measure = job
    module_name, function, _ = KERNELS[kernel]
    module = importlib.import_module(f"robust_attention._triton.{module_name}")
    apply(kernel, config)
    launches: list[Any] = []
    real = module.launch

    def spy(which: Any, grid: Any, *args: Any, **meta: Any) -> Any:
        found = real(which, grid, *args, **meta)
        if which.__name__ == function:
            launches.append((lambda: real(which, grid, *args, **meta), found))
        return found

    row: dict[str, Any] = {"kernel": kernel, "case": f"{case.method} {case.shape} {case.causal}", "config": config}
    try:
        module.launch = spy
        gradients(verb(case.method, "triton", case.causal), drawn(case), torch.bfloat16)
        torch.cuda.synchronize()
        row |= {"registers": launches[0][1].n_regs, "spills": launches[0][1].n_spills}
        if measure:
            row["us"] = [1000 * do_bench(f, warmup=5, rep=20, return_mode="median") for f, _ in launches]
    except Exception as error:  # a configuration may not fit
        row["error"] = f"{type(error).__name__}: {error}"[:120]
    finally:
        module.launch = real
    return row


def sweep(kernels: list[str], jobs: int) -> None:
    tasks = [(kernel, case, config) for kernel in kernels for case in KERNELS[kernel][2] for config in configs(kernel)]
    start = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        compiled = pool.map(launches_of, [(*task, False) for task in tasks], chunksize=1)
    print(f"compiled {len(tasks)} in {time.perf_counter() - start:.0f} s")
    rows = [seen if "error" in seen else launches_of((*task, True)) for task, seen in zip(tasks, compiled, strict=True)]
    write("sweep", rows)
    timed = [row for row in rows if "us" in row]
    for key, group in itertools.groupby(timed, key=lambda row: (row["kernel"], row["case"])):
        best = sorted(group, key=lambda row: statistics.fmean(row["us"]))[:5]
        print(*key, *(f"{r['config']} {sum(r['us']):.0f} us, {r['spills']} spills" for r in best), sep="; ")


def profile() -> None:
    """Microseconds of each kernel in one forward and backward."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace_of

    rows = []
    for case in dict.fromkeys(case for _, _, found in KERNELS.values() for case in found):
        tensors, attend = drawn(case), verb(case.method, "triton", case.causal)
        for _ in range(3):
            gradients(attend, tensors, torch.bfloat16)
        torch.cuda.synchronize()
        with trace_of(activities=[ProfilerActivity.CUDA]) as trace:
            for _ in range(5):
                gradients(attend, tensors, torch.bfloat16)
            torch.cuda.synchronize()
        found = {e.key[:60]: e.device_time_total / 5 for e in trace.key_averages() if e.device_time_total > 0}
        found = dict(sorted(found.items(), key=lambda item: -item[1]))
        rows.append({"method": case.method, "shape": case.shape, "causal": case.causal, "us": found})
        print(case.method, case.shape, *(f"{name[:34]} {us:.0f}" for name, us in list(found.items())[:9]), sep="; ")
    write("profile", rows)


def write(name: str, rows: list[dict[str, Any]]) -> None:
    write_json(Path(os.environ.get("OUT", ".")) / f"tiles-{name}.json", {"rows": rows, **provenance("cuda")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sweep", "profile"))
    parser.add_argument("kernels", nargs="*", help=f"of {', '.join(KERNELS)}; all if left out")
    parser.add_argument("--jobs", type=int, default=8)
    args = parser.parse_args()
    if args.what == "profile":
        profile()
    else:
        sweep(args.kernels or list(KERNELS), args.jobs)


if __name__ == "__main__":
    main()
