"""Tables from lines: means and verdicts that planted results must give."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from robust_attention.eval.measure import Measurement, pack
from robust_attention.study import report, store
from robust_attention.study.report import CONTAMINATION, MCE, Column, Results

CLEAN = Column("accuracy", "clean")


def measured(condition: str, right: list[int], metric: str = "accuracy", **settings: Any) -> dict[str, Any]:
    return Measurement(
        metric=metric,
        condition=condition,
        value=sum(right) / len(right),
        n=len(right),
        right=pack(torch.tensor([right])),
        settings=settings,
    ).to_dict()


def line(
    row: str, seed: int, measurements: list[dict[str, Any]], status: str = "done", **config: Any
) -> dict[str, Any]:
    return {
        "config": {"row": row, "seed": seed, "fit": {"epochs": 3}, "model": {"dim": 8, "distilled": False}, **config},
        "cell": f"d/{row}/{seed}",
        "data": "d",
        "row": row,
        "seed": seed,
        "status": status,
        "measurements": measurements,
    }


def drawn(share: float, number: int, seed: int) -> list[int]:
    random = Random(seed)
    return [int(random.random() < share) for _ in range(number)]


def test_a_planted_gain_is_found_and_noise_is_not() -> None:
    lines = []
    for seed in range(4):
        base = drawn(0.6, 400, seed)
        more = [max(a, b) for a, b in zip(base, drawn(0.3, 400, 100 + seed), strict=True)]
        same = drawn(0.6, 400, seed)
        same[seed] = 1 - same[seed]
        lines += [line(row, seed, [measured("clean", x)]) for row, x in (("vit", base), ("up", more), ("same", same))]
    table = report.table(Results(lines), "d", [CLEAN])
    cells = {row["row"]: row["cells"]["clean"] for row in table["rows"]}
    assert cells["vit"]["verdict"] is None
    assert cells["up"]["verdict"] == "better"
    assert cells["same"]["verdict"] == "no difference detected"
    assert cells["up"]["gain"][0] == pytest.approx(cells["up"]["mean"] - cells["vit"]["mean"])
    assert cells["up"]["gain"][1] > 0
    assert cells["up"]["seeds"] == cells["up"]["paired_seeds"] == 4
    assert cells["up"]["low"] < cells["up"]["mean"] < cells["up"]["high"]


def test_seeds_that_disagree_are_no_gain() -> None:
    # Twice as many images right for one seed, as many lost for another: no row is better by that.
    lines = []
    for seed, better in enumerate((True, False)):
        low, high = [0] * 100 + [1] * 100, [1] * 150 + [0] * 50
        lines.append(line("vit", seed, [measured("clean", low if better else high)]))
        lines.append(line("x", seed, [measured("clean", high if better else low)]))
    (_, row) = report.table(Results(lines), "d", [CLEAN])["rows"]
    assert row["cells"]["clean"]["verdict"] == "no difference detected"


def test_only_paired_seeds_are_compared() -> None:
    lines = [line("vit", 0, [measured("clean", [1, 1, 0, 0])])]
    lines += [line("x", seed, [measured("clean", [1, 1, 1, 0])]) for seed in (0, 1)]
    found = report.entry(Results(lines), "d", "x", CLEAN, "vit")
    assert found is not None
    assert (found.seeds, found.paired_seeds) == (2, 1)
    assert found.gain is not None
    assert found.gain.mean == pytest.approx(0.25)


def test_unequal_examples_are_not_paired_and_named() -> None:
    lines = [line("vit", 0, [measured("clean", [1, 1])]), line("x", 0, [measured("clean", [1, 1, 1])], evaluation=3)]
    results = Results(lines)
    (_, row) = report.table(results, "d", [CLEAN])["rows"]
    assert row["cells"]["clean"]["mean"] == 1
    assert row["cells"]["clean"]["gain"] is None
    assert report.mixed_settings(results, "vit") == ["‡ d/x was made with other settings of evaluation than its twin."]


def test_no_image_wrong_is_no_certainty() -> None:
    (row,) = report.table(Results([line("vit", 0, [measured("clean", [0] * 8)])]), "d", [CLEAN])["rows"]
    assert row["cells"]["clean"]["low"] == 0
    assert row["cells"]["clean"]["high"] == pytest.approx(0.3244, abs=1e-4)  # Wilson's for 0 of 8


def test_p_values_are_corrected_over_the_table() -> None:
    lines = [line("vit", 0, [measured(f"c{i}", [0] * 6) for i in range(8)])]
    lines.append(line("x", 0, [measured(f"c{i}", [1] * 6) for i in range(8)]))
    columns = [Column("accuracy", f"c{i}") for i in range(8)]
    one = report.table(Results(lines), "d", columns[:1])["rows"][1]["cells"]["c0"]
    assert one["p_holm"] == pytest.approx(2 / 64)
    assert one["verdict"] == "better"
    many = report.table(Results(lines), "d", columns)["rows"][1]["cells"]["c0"]
    assert many["p_holm"] == pytest.approx(8 * 2 / 64)
    assert many["verdict"] == "no difference detected"


def test_derived_columns_follow_from_the_measured_ones() -> None:
    lines = []
    for row, wrong in (("vit", 40), ("x", 20)):
        right = [0] * wrong + [1] * (100 - wrong)
        spoilt = [measured(f"noise {s}", right, kind="noise", share=s) for s in (0.1, 0.2)]
        worse = [measured(f"{kind} {s}", right, kind=kind, severity=s) for kind in ("fog", "snow") for s in (1, 3)]
        lines.append(line(row, 0, [*spoilt, *worse]))
    results = report.with_derived(Results(lines))
    assert results.of("d", "x", CONTAMINATION)[0].value == pytest.approx(0.8)
    assert results.of("d", "x", CONTAMINATION)[0].examples == [0.0] * 20 + [1.0] * 80
    assert results.of("d", "x", MCE)[0].value == pytest.approx(0.5)
    assert results.of("d", "vit", MCE)[0].value == pytest.approx(1.0)
    (_, row) = report.table(results, "d", [MCE])["rows"]
    assert row["cells"]["corruptions, mce"]["mean"] == pytest.approx(0.5)


def test_a_mean_over_fewer_conditions_is_not_shown() -> None:
    full = [measured(f"noise {s}", [1, 0], kind="noise", share=s) for s in (0.1, 0.2)]
    results = report.with_derived(Results([line("vit", 0, full), line("x", 0, full[:1])]))
    assert results.of("d", "vit", CONTAMINATION)
    assert not results.of("d", "x", CONTAMINATION)


def test_a_random_row_has_its_three_numbers() -> None:
    tried = ("clean", "clean, known draw", "clean, worst of 20 draws")
    shares = zip(tried, ([1, 1], [1, 0], [0, 0]), strict=True)
    lines = [line("vit", 0, [measured("clean", [1, 0])]), line("mom", 0, [measured(*each) for each in shares])]
    results = Results(lines)
    assert results.rows("d") == ["vit", "mom", "mom, known draw", "mom, worst of 20 draws"]
    values = [row["cells"]["clean"]["mean"] for row in report.table(results, "d", [CLEAN])["rows"]]
    assert values == [0.5, 1.0, 0.5, 0.0]


def test_failed_checks_are_carried_into_the_table() -> None:
    marked = {**measured("clean", [1, 0]), "failed": ["PGD ≤ FGSM"]}
    lines = [line("vit", 0, [measured("clean", [1, 0])]), line("vit", 1, [marked])]
    (row,) = report.table(Results(lines), "d", [CLEAN])["rows"]
    assert row["cells"]["clean"]["failed"] == ["PGD ≤ FGSM"]


def test_failed_cells_give_no_numbers(tmp_path: Path) -> None:
    store.append(tmp_path / "cells-1-of-1.jsonl", line("vit", 0, [measured("clean", [1])]))
    store.append(tmp_path / "cells-1-of-1.jsonl", {**line("x", 0, []), "status": "failed", "error": "no luck"})
    assert report.load(tmp_path).rows("d") == ["vit"]
    with pytest.raises(ValueError, match=r"--out must hold cells\*.jsonl"):
        report.load(tmp_path / "none")


def test_rows_of_other_settings_are_named() -> None:
    lines = [line("vit", 0, []), line("same", 0, [], method="other", model={"dim": 8, "distilled": True})]
    assert report.mixed_settings(Results(lines), "vit") == []
    lines.append(line("short", 0, [], fit={"epochs": 1}))
    (note,) = report.mixed_settings(Results(lines), "vit")
    assert note == "‡ d/short was made with other settings of fit than its twin."


def test_losses_are_compared_over_blocks_and_lower_is_better() -> None:
    lines = []
    for seed in range(3):
        for row, loss in (("transformer", 3.0), ("x", 2.9)):
            blocks = [loss + 0.01 * (i % 5) + 0.001 * seed for i in range(40)]
            m = Measurement(metric="loss", condition="clean test", value=loss, n=4000).to_dict()
            lines.append({**line(row, seed, [m]), "blocks": {"clean test": blocks}})
    (_, row) = report.table(Results(lines), "d", [Column("loss", "clean test")], "transformer")["rows"]
    cell = row["cells"]["clean test"]
    assert cell["mean"] == pytest.approx(2.9)  # of the words, not of the blocks
    assert cell["gain"][0] == pytest.approx(-0.1)
    assert cell["verdict"] == "better"
