"""The benchmark measures what it says, only what passed its check, and keeps every row."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from cases import problem
from torch import Tensor

import robust_attention as ra
from robust_attention.bench import published, run
from robust_attention.bench.check import check, inputs
from robust_attention.bench.measure import median_ms, peak_mib
from robust_attention.plots import bench as plots


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    out = tmp_path_factory.mktemp("bench")
    return run.run("smoke", run.SCALES["smoke"], out, lambda line: None), out


def test_smoke_scale_stores_every_row(record: tuple[dict, Path]) -> None:
    rows = record[0]["rows"]
    assert json.loads((record[1] / "bench.json").read_text()) == record[0]
    assert {row["kind"] for row in rows} == {"operator", "growing", "decode", "step"}
    assert {row["impl"] for row in rows} == {"CPU", "auto", "reference", "published", "default", "cache"}
    assert all(row["ms"] > 0 for row in rows)
    checked = [row for row in rows if row["kind"] == "operator" and row["impl"] == "auto"]
    assert checked
    assert all(row["check"] == "passed" for row in checked)
    for row in rows:
        if row["kind"] == "operator":
            base = [r for r in rows if r["method"] == "SDPA" and (r["what"], r["mode"]) == (row["what"], row["mode"])]
            assert row["ratio"] == pytest.approx(row["ms"] / base[0]["ms"])
    assert record[0]["ceilings"].keys() == {"tflops", "tbytes", "texp"}


def test_a_wrong_implementation_is_not_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = run.attend_with

    def wrong(method: ra.Method, impl: str, causal: bool) -> object:
        attend = right(method, impl, causal)  # type: ignore[arg-type]
        return attend if impl != "auto" else lambda q, k, v: attend(q, k, v) * 1.001

    monkeypatch.setattr(run, "attend_with", wrong)
    scale = dataclasses.replace(run.SCALES["smoke"], operators=(("KDE", (1, 2, 64, 16), False),), growing=(), steps=())
    rows = run.run("smoke", scale, tmp_path, lambda line: None)["rows"]
    bad = [row for row in rows if row["impl"] == "auto"]
    assert len(bad) == 2
    for row in bad:
        assert "ms" not in row
        assert row["check"].startswith("errors over their limits: {'out': ")
        assert row["errors_over_limit"]["out"] > 1


def test_check_sees_nan_and_accepts_the_reference() -> None:
    tensors = inputs((1, 2, 20, 8), torch.float32, "cpu")
    reference = run.attend_with(ra.KDE(), "reference", False)
    assert check(reference, reference, tensors).passed
    assert not check(lambda q, k, v: reference(q, k, v) * float("nan"), reference, tensors).passed
    assert not check(lambda q, k, v: reference(q, k, v * 1.01), reference, tensors, backward=False).passed


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
        {"kind": "growing", "method": "A", "impl": "auto", "keys": n, "ms": 3e-6 * n**2, "peak_mib": 0.5 * n}
        for n in (64, 128, 256, 512)
    ]
    (found,) = run.exponents(rows)
    assert found["ms"] == pytest.approx(2)
    assert found["peak_mib"] == pytest.approx(1)


def test_table_and_plots_come_from_the_record_alone(record: tuple[dict, Path], tmp_path: Path) -> None:
    stored = json.loads(json.dumps(record[0]))
    table = plots.table(stored)
    lines = [line for line in table.splitlines() if line.startswith("| RKDE")]
    assert len(lines) == 4  # causal forward, with gradients, decode, training step
    assert all(path.stat().st_size > 10_000 for path in plots.draw(stored, tmp_path))
