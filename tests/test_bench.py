"""The benchmark measures what it says, only what passed its check, and keeps every row."""

import dataclasses
import importlib.util
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from cases import problem
from torch import Tensor

import robust_attention as ra
from robust_attention.bench import baseline, published, run, scales
from robust_attention.bench import record as records
from robust_attention.bench.check import check, inputs
from robust_attention.bench.measure import median_ms, peak_mib
from robust_attention.plots import bench as plots

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
SMOKE = scales.SCALES["smoke"]


def quiet(line: str) -> None:
    pass


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("bench")
    return run.run("smoke", SMOKE, out, quiet), out


def test_smoke_scale_stores_every_row(record: tuple[dict, Path]) -> None:
    rows = record[0]["rows"]
    assert json.loads((record[1] / "bench.json").read_text()) == record[0]
    assert {row["kind"] for row in rows} == set(scales.KINDS)
    assert {row["impl"] for row in rows} == {"CPU", "auto", "reference", "published", "cache"}
    assert {row["method"] for row in rows if row["kind"] == "decode"} == {"SDPA", "KDE", "RKDE", "MoM", "SPKDE"}
    for row in rows:
        assert row["ms"] > 0
        assert row["check"] == "passed"  # every kind of row stands behind one
        assert row["errors_over_limit"]
        (base,) = (r for r in rows if r["method"] == "SDPA" and all(r[x] == row[x] for x in ("kind", "what", "mode")))
        assert row["ratio"] == pytest.approx(row["ms"] / base["ms"])
    assert record[0]["ceilings"].keys() == {"tflops", "tbytes", "texp"}
    assert {line["method"] for line in record[0]["exponents"]} == {"SDPA", "KDE", "RKDE", "MoM"}


@pytest.mark.parametrize("kind", scales.KINDS)
def test_a_wrong_implementation_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    right, decode = run.attend_with, ra.RKDE.decode

    def wrong(method: ra.Method, impl: str, causal: bool) -> object:
        attend = right(method, impl, causal)  # type: ignore[arg-type]
        return attend if impl != "auto" else lambda q, k, v: attend(q, k, v) * 1.001

    monkeypatch.setattr(run, "attend_with", wrong)
    monkeypatch.setattr(ra.RKDE, "decode", lambda *x, **more: decode(*x, **more) * 1.001)
    scale = dataclasses.replace(
        SMOKE, operators=(("RKDE", (1, 2, 64, 16), False),), growing=(64,), decode=((2, 64, ("RKDE",)),)
    )
    rows = run.run("smoke", scale, tmp_path, quiet, [kind])["rows"]
    bad = [row for row in rows if row["impl"] in ("auto", "cache") and row["method"] == "RKDE"]
    assert bad
    for row in bad:
        assert "ms" not in row
        assert row["check"].startswith("errors over their limits: {'out': ")
        assert row["errors_over_limit"]["out"] > 1
    assert any("ms" in row for row in rows)  # SDPA is
    if kind != "growing":
        table = plots.table({**json.loads((tmp_path / "bench.json").read_text())})
        assert "not timed: failed its check" in table


def test_a_wrong_published_algorithm_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = published.rkde
    monkeypatch.setattr(published, "rkde", lambda *x: 1.001 * eager(*x))
    rows = run.run("smoke", dataclasses.replace(SMOKE, growing=(64,)), tmp_path, quiet, ["growing"])["rows"]
    (bad,) = (row for row in rows if (row["method"], row["impl"]) == ("RKDE", "published"))
    assert "ms" not in bad


def test_a_benchmark_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = run.run("smoke", SMOKE, tmp_path, said.append, ["decode"])["rows"]
    cut = json.loads((tmp_path / "bench.json").read_text())
    cut["rows"] = cut["rows"][:-2]
    (tmp_path / "bench.json").write_text(json.dumps(cut))
    second = run.run("smoke", SMOKE, tmp_path, said.append, ["step", "decode"])["rows"]
    assert second[: len(cut["rows"])] == cut["rows"]  # kept, not timed again
    assert [row["method"] for row in second if row["kind"] == "decode"] == [row["method"] for row in first]
    assert {row["kind"] for row in second} == {"decode", "step"}
    assert f"{len(cut['rows'])} rows of an earlier run are kept" in said
    monkeypatch.setattr(records, "sources", lambda: "other code")
    third = run.run("smoke", SMOKE, tmp_path, said.append, ["step"])["rows"]
    assert {row["kind"] for row in third} == {"step"}
    assert "of another sources: put aside as bench-2" in said[-3]
    (aside,) = tmp_path.glob("bench-2*.json")
    assert json.loads(aside.read_text())["rows"] == second


def test_bench_fails_clearly(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"only must be .*, got 'decoding'"):
        run.run("smoke", SMOKE, tmp_path, quiet, ["decoding"])
    (tmp_path / "bench.json").write_text("[")
    with pytest.raises(ValueError, match=r"bench.json must hold a benchmark's JSON, got .*; move it away"):
        run.run("smoke", SMOKE, tmp_path, quiet, ["step"])


def test_the_best_backend_that_runs_is_the_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    using = ""

    @contextmanager
    def named(name: str) -> Iterator[None]:
        nonlocal using
        using = name
        yield

    right = baseline.sdpa(False)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if using == "refuses":
            raise RuntimeError("no kernel for this shape\nand more")
        return right(q, k, v) * (2 if using == "wrong" else 1)

    monkeypatch.setattr(baseline, "backends", lambda device: [(n, partial(named, n)) for n in times | {"refuses": 0}])
    monkeypatch.setattr(baseline, "sdpa", lambda causal: attend)
    times = {"wrong": 1.0, "slow": 3.0, "best": 2.0}
    small = inputs((1, 2, 20, 8), torch.float32, "cpu")
    found = baseline.fastest(small, False, True, lambda: times[using], lambda: 10 * times[using])
    assert (found.name, found.ms, found.peak_mib) == ("best", 2.0, 20.0)
    assert found.all_ms == {"slow": 3.0, "best": 2.0}
    assert found.refused["refuses"] == "no kernel for this shape"
    assert found.refused["wrong"].startswith("errors over their limits")
    times = {"wrong": 1.0}
    assert baseline.fastest(small, False, True, lambda: 1.0, None).entries()["check"].startswith("no backend runs")


def test_check_sees_nan_and_accepts_the_reference() -> None:
    tensors = inputs((1, 2, 20, 8), torch.float32, "cpu")
    reference = run.attend_with(ra.KDE(), "reference", False)
    assert check(reference, reference, tensors).passed
    assert not check(lambda q, k, v: reference(q, k, v) * float("nan"), reference, tensors).passed
    assert not check(lambda q, k, v: reference(q, k, v * 1.01), reference, tensors, backward=False).passed


def test_check_sees_bits_that_change() -> None:
    tensors = inputs((1, 2, 20, 8), torch.float32, "cpu")
    reference = run.attend_with(ra.KDE(), "reference", False)
    calls = itertools.count()

    def restless(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        values = v.clone()
        if next(calls) == 2:
            values.register_hook(lambda grad: grad * (1 + 2e-7))  # one gradient of the third call alone
        return reference(q, k, values)

    found = check(restless, reference, tensors, repeats=3)
    assert not found.passed
    assert found.reason == "bits differ between runs"


def test_inputs_may_be_strided_grouped_and_of_other_widths() -> None:
    q, k, v, grad = inputs((2, 4, 9, 8), torch.float16, "cpu", queries=5, kv_heads=2, value_width=6, strided=True)
    assert [tuple(x.shape) for x in (q, k, v, grad)] == [(2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 6), (2, 4, 5, 6)]
    assert not any(x.is_contiguous() for x in (q, k, v, grad))
    plain = inputs((2, 4, 9, 8), torch.float16, "cpu", queries=5, kv_heads=2, value_width=6)
    assert all(torch.equal(a, b) and b.is_contiguous() for a, b in zip((q, k, v, grad), plain, strict=True))


@pytest.mark.parametrize("causal", [False, True])
def test_published_algorithms_compute_the_paper(causal: bool) -> None:
    p = problem(ra.KDE(), H=2, Hkv=2, T=30, S=30)
    counts = ra.MoM().draw(30)
    pairs = [(published.kde, ra.KDE(), {}), (published.rkde, ra.RKDE(), {})]
    if not causal:  # its median counts blocks that see nothing of a short prefix
        pairs.append((published.mom, ra.MoM(), {"counts": counts}))
    for eager, method, more in pairs:
        exact = method.attend(p.q, p.k, p.v, is_causal=causal, impl="reference")
        torch.testing.assert_close(eager(p.q, p.k, p.v, causal, **more), exact, rtol=1e-9, atol=1e-10)


def test_peak_memory_counts_what_lives_at_once() -> None:
    x = torch.randn(2**18)  # 1 MiB

    def three_then_one() -> Tensor:
        a, b = x + 1, x + 2
        c = a * b
        del a, b
        return c + 1

    assert peak_mib(three_then_one, "cpu") == pytest.approx(3, abs=0.01)
    assert peak_mib(lambda: x.view(2, -1)[0] + 1, "cpu") == pytest.approx(0.5, abs=0.01)


def test_median_time_is_of_the_call() -> None:
    import time

    assert 10 <= median_ms(lambda: time.sleep(0.01), "cpu", 0.05) < 200


def test_exponents_are_slopes_of_logarithms() -> None:
    rows = [
        {"kind": "growing", "mode": "forward", "impl": impl, "keys": n, "ms": 3e-6 * n**2, "peak_mib": 0.5 * n} | method
        for n, impl in ((512, "FLASH"), (64, "FLASH"), (128, "CUDNN"), (256, "CUDNN"))
        for method in ({"method": "SDPA"}, {"method": "A", "impl": "auto"})
    ]
    for found in run.exponents([*rows, {"kind": "growing", "method": "A", "check": "failed"}]):
        assert found["impl"] == {"SDPA": "best", "A": "auto"}[found["method"]]
        assert found["ms"] == pytest.approx(2)
        assert found["peak_mib"] == pytest.approx(1)
        assert found["ms_from"] == 256  # the upper half of the lengths


def test_table_and_plots_come_from_the_record_alone(record: tuple[dict, Path], tmp_path: Path) -> None:
    stored = json.loads(json.dumps(record[0]))
    table = plots.table(stored)
    lines = [line for line in table.splitlines() if line.startswith("| RKDE")]
    assert len(lines) == 6  # causal forward, with gradients, decode, training step; two exponents
    assert all(path.stat().st_size > 10_000 for path in plots.draw(stored, tmp_path))
    part = stored | {"rows": [row for row in stored["rows"] if row["kind"] == "decode"], "exponents": []}
    assert plots.draw(part, tmp_path) == []
    assert "time ∝" not in plots.table(part)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = importlib.util.spec_from_file_location("kernels", BENCHMARKS / "kernels.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "kernels", module)
    found.loader.exec_module(module)
    return module


def test_the_acceptance_of_kernels_fails_what_is_wrong(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    verb = kernels.verb
    for factor, outcome in ((1.0, "passed"), (1.001, "errors over their limits")):
        monkeypatch.setattr(
            kernels, "verb",
            lambda name, impl, causal, pad=None, factor=factor: (
                verb(name, "reference", causal, pad) if impl == "reference"
                else lambda *x: factor * verb(name, "reference", causal, pad)(*x)
            ),
        )  # fmt: skip
        for case in kernels.cases("tiny"):
            assert kernels.check_case(case)["outcome"].startswith(outcome)
    monkeypatch.setattr(kernels, "verb", lambda *_: 1 / 0)
    assert kernels.check_case(kernels.cases("tiny")[0])["outcome"] == "ZeroDivisionError: division by zero"
    assert kernels.settled("laws", "x", lambda: 1 / 0)["outcome"] == "ZeroDivisionError: division by zero"
    assert kernels.summary([{"outcome": "passed"}, {"outcome": "no"}], 5, 1.0) | {"worst": 0} == {
        "passed": 1, "failed": 1, "not_run": 3, "worst": 0, "seconds": 1.0,
    }  # fmt: skip


def test_the_acceptance_covers_what_it_says(kernels: ModuleType) -> None:
    cases = kernels.cases("full")
    assert len(set(cases)) == len(cases)
    plain = [case for case in cases if case.shape[3] == 64 and case.queries is None]
    for name, dtype in itertools.product(kernels.MAIN, ("bfloat16", "float16", "float32")):
        for causal in (False, True):
            found = {case.shape[2] for case in plain if (case.method, case.dtype, case.causal) == (name, dtype, causal)}
            assert {1, 2, 17, 127, 129, 197, 257} <= found
    for name in kernels.METHODS:
        mine = [case for case in cases if case.method == name]
        assert {case.causal for case in mine} == {False} | ({True} - {name in kernels.FULL_ONLY})
    for name in kernels.MAIN:
        mine = [case for case in cases if case.method == name]
        assert max(case.repeats for case in mine) == 100
        assert {16, 128} <= {case.shape[3] for case in mine}
        assert any(case.strided for case in mine)
        assert any(case.padded for case in mine)
        assert any(case.kv_heads for case in mine)
    assert len(kernels.cases("quick")) < len(cases) / 2


def test_the_acceptance_of_kernels_runs_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OUT": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "kernels.py", "--tiny", "--jobs", "1"],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    found = json.loads((tmp_path / "kernels.json").read_text())
    assert (found["failed"], found["not_run"]) == (0, 0)
    assert found["passed"] == len(found["rows"]) >= 20
    assert {row["part"] for row in found["rows"]} == {"cases", "laws", "large"}


def test_the_acceptance_of_kernels_fails_clearly_without_a_device(tmp_path: Path) -> None:
    environment = {key: x for key, x in os.environ.items() if key != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "kernels.py", "--tiny"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "kernels need a CUDA device, or TRITON_INTERPRET=1" in done.stderr
