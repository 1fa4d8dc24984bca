"""The time-series study's report: a table a problem, exact tests, ranks over problems, the paper's Table 5."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from robust_attention.eval.rank import critical_difference, mcnemar, mean_ranks
from robust_attention.eval.statistics import holm
from robust_attention.recipes.han2023_series import PAPER_NAMES, ROWS, TABLE_5
from robust_attention.study import store
from robust_attention.study.report import (
    CONTAMINATION,
    LEVEL,
    Column,
    Entry,
    Results,
    about,
    conditions,
    entry,
    failed_runs,
    load,
    mixed_settings,
    name_of,
    table,
    verdict,
    with_derived,
)
from robust_attention.study.series import BEST_ON_TEST

TWIN = "transformer"
KERNEL, KERNEL_TABLE = "kde", "Compared with KDE: what robust weights add to their kernel"
CLEAN = Column("accuracy", "clean")
BEST = Column(BEST_ON_TEST, "clean")
FEW_SEEDS = 3


def series_report(out: Path) -> dict[str, Any]:
    """Everything that tables and figures show, from the cells in `out`."""
    results = with_derived(load(out), TWIN)
    names = {row: label for row, (label, _) in ROWS.items()}
    return {
        "title": "Time-series study",
        "labels": {"share": "contaminated, %", "examples": "series"},
        "about": about(results),
        "names": names,
        "data": {data: _of_problem(results, data) for data in results.data},
        "ranks": [ranks for column in (CLEAN, BEST, CONTAMINATION) if (ranks := _ranks(results, column))],
        "ledger": [line for data in results.data for line in _ledger(results, data)],
        "failed_runs": failed_runs(store.read(store.result_files(out))),
        "notes": [*_NOTES, *mixed_settings(results, TWIN)],
    }


_NOTES = (
    "Per cent, mean over seeds ± half a 95 % interval over seeds and series. The epoch is chosen on validation series; "
    f'"{BEST_ON_TEST}" is what published tables print, and flatters.',
    "▲ better, ▼ worse than the row that the table compares with, at equal seeds: both the paired sign-flip test over "
    "series (Holm-corrected over the table) and the interval over seeds and series say so. Unmarked: no difference "
    "detected.",
    "McNemar: series that one of the two gets right in more of the seeds that both have, by an exact test, "
    "Holm-corrected over the problem. With one seed it is McNemar's test as it is known.",
    "A gain below one case, given for every problem, is no gain of any series at all in a single run.",
    "Mean ranks count from 1, the best; two rows differ at the level of 5 % where their mean ranks are further apart "
    "than the critical difference (Nemenyi).",
)


def _of_problem(results: Results, data: str) -> dict[str, Any]:
    shares = [column for column in conditions(results, data, "share") if column != CONTAMINATION]
    columns = [CLEAN, BEST, *shares, *([CONTAMINATION] if shares else [])]
    first = next(iter(results.of(data, results.rows(data)[0], CLEAN).values()))
    return {
        "n": first.n,
        "one_case": 1 / first.n,
        "tables": {
            "Compared with the softmax twin": table(results, data, columns, TWIN),
            **({KERNEL_TABLE: table(results, data, columns, KERNEL)} if KERNEL in results.rows(data) else {}),
        },
        "pairs": _pairs(results, data),
        "eps_curves": {},
        "share_curves": _curves(results, data, shares),
        "scatter": _scatter(results, data) if shares else {},
    }


def _pairs(results: Results, data: str) -> list[dict[str, Any]]:
    """Every row against its twin, on clean and on contaminated series, by McNemar's exact test."""
    found = []
    for row in results.rows(data):
        for column in (CLEAN, CONTAMINATION):
            ours, twins = results.of(data, row, column), results.of(data, TWIN, column)
            both = sorted(set(ours) & set(twins))
            if row == TWIN or not both:
                continue
            left, right = (
                [sum(each) / len(both) for each in zip(*(of[seed].examples for seed in both), strict=True)]
                for of in (ours, twins)
            )
            test = mcnemar(left, right)
            gain = sum(left) - sum(right)
            found.append(
                {
                    "row": row,
                    "column": name_of(column),
                    "seeds": len(both),
                    "gain": gain / len(left),
                    "gain_in_cases": gain,
                    "better": test.left_only,
                    "worse": test.right_only,
                    "p": test.p,
                }
            )
    for pair, p in zip(found, holm([pair["p"] for pair in found]), strict=True):
        pair["p_holm"] = p
        pair["verdict"] = "no difference detected" if p >= LEVEL else "better" if pair["gain"] > 0 else "worse"
    return found


def _ranks(results: Results, column: Column) -> dict[str, Any] | None:
    """Mean ranks of the rows that every problem has, over the problems that have the column."""
    problems = [data for data in results.data if results.of(data, TWIN, column)]
    rows = [row for row in ROWS if all(results.of(data, row, column) for data in problems)]
    if not problems or len(rows) < 2:
        return None
    scores = []
    for data in problems:
        found = [entry(results, data, row, column, TWIN) for row in rows]
        scores.append([one.estimate.mean for one in found if one is not None])
    return {
        "column": name_of(column),
        "problems": problems,
        "mean_ranks": dict(zip(rows, mean_ranks(scores), strict=True)),
        "critical_difference": critical_difference(len(rows), len(problems), LEVEL),
    }


def _curves(results: Results, data: str, columns: list[Column]) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Kind → row → points over the share of contamination, the clean accuracy at 0 among them."""
    curves: dict[str, dict[str, list[dict[str, float]]]] = {}
    for row in results.rows(data):
        clean = entry(results, data, row, CLEAN, TWIN)
        for column in columns:
            one = entry(results, data, row, column, TWIN)
            if one is None or clean is None:
                continue
            settings = next(iter(results.of(data, row, column).values())).settings
            points = curves.setdefault(str(settings["kind"]), {}).setdefault(row, [{"x": 0, **_estimate(clean)}])
            points.append({"x": 100 * float(settings["share"]), **_estimate(one)})
    for rows in curves.values():
        for points in rows.values():
            points.sort(key=lambda point: point["x"])
    return curves


def _estimate(one: Entry) -> dict[str, float]:
    return one.estimate._asdict()


def _scatter(results: Results, data: str) -> dict[str, dict[str, Any]]:
    points: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in results.rows(data):
        for column in (CLEAN, CONTAMINATION):
            if (one := entry(results, data, row, column, TWIN)) is not None:
                points[row][name_of(column)] = _estimate(one)
    return dict(points)


def _ledger(results: Results, data: str) -> list[dict[str, str]]:
    """The paper's number, its difference to its own twin, ours by the same choice of the epoch and by validation."""
    name = PAPER_NAMES.get(data)
    lines = []
    for row in results.rows(data) if name else []:
        best, clean = (entry(results, data, row, column, TWIN) for column in (BEST, CLEAN))
        if best is None or clean is None:
            continue
        paper = TABLE_5.get(row, {}).get(str(name))
        gain = None if paper is None or row == TWIN else paper - TABLE_5[TWIN][str(name)]
        ours = "" if clean.gain is None else f"{100 * clean.gain.mean:+.1f} [{100 * clean.gain.low:+.1f}, "
        lines.append(
            {
                "problem": data,
                "row": row,
                "paper": "" if paper is None else f"{paper:.2f}",
                "paper_gain": "" if gain is None else f"{gain:+.2f}",
                "best": f"{100 * best.estimate.mean:.1f}",
                "ours": f"{100 * clean.estimate.mean:.1f} ({clean.seeds} seeds)",
                "ours_gain": ours and ours + f"{100 * (clean.gain or clean.estimate).high:+.1f}]",
                "conclusion": _conclusion(clean, gain, row),
            }
        )
    return lines


def _conclusion(ours: Entry, paper_gain: float | None, row: str) -> str:
    """What our numbers allow to say about the sign that the paper prints."""
    if row == TWIN:
        return "the twin that rows are compared with"
    sign = verdict(ours.gain, ours.p, CLEAN)
    if sign is None:
        return "nothing: no twin of the same seed"
    if ours.paired_seeds < FEW_SEEDS:
        return f"{sign} over series of {ours.paired_seeds} seed(s): too few seeds to conclude"
    if paper_gain is None:
        return f"{sign}; no row of the paper"
    printed = "better" if paper_gain > 0 else "worse"
    if sign == "no difference detected":
        return f"printed {printed}; ours detects no difference"
    return f"printed {printed}, ours {sign}: " + ("the same sign" if sign == printed else "the sign is not confirmed")
