"""The language study's report: losses in nats, what a swap adds to them, and the paper's Tables 1 and 4 beside them."""

import math
from pathlib import Path
from typing import Any

from robust_attention.recipes import han2023_language_tables as paper
from robust_attention.study import store
from robust_attention.study.language_run import LANGUAGE
from robust_attention.study.report import (
    Column,
    Entry,
    Result,
    Results,
    about,
    entry,
    failed_runs,
    load,
    mixed_settings,
    table,
    verdict,
)

TWIN = "transformer"
BEFORE, AFTER, RISE = ", clean targets, before the swap", ", clean targets", ", rise on clean targets"
FEW_SEEDS = 3


def language_report(out: Path) -> dict[str, Any]:
    """Everything that tables show, from the cells in `out`."""
    results = load(out)
    for data in results.data:
        for row in results.rows(data):
            _add_rises(results, data, row)
    return {
        "title": "Language study",
        "about": about(results),
        "names": LANGUAGE.labels,
        "labels": {},
        "data": {data: _of_text(results, data) for data in results.data},
        "ledger": {
            "about": _LEDGER,
            "heads": ["row", "paper", "paper / Transformer", "ours", "ours / Transformer", "what may be concluded"],
            "tables": [_ledger(results, data) for data in results.data],
        },
        "failed_runs": failed_runs(store.read(store.result_files(out))),
        "notes": [*(note.format(shares=_shares(results)) for note in _NOTES), *mixed_settings(results, TWIN)],
    }


_NOTES = (
    "Nats a word, mean over seeds ± half a 95 % interval over seeds and runs of consecutive words; lower is better. "
    "exp of it is the perplexity.",
    "▲ better, ▼ worse than the softmax twin of equal seeds: both the paired sign-flip test over runs of words "
    "(Holm-corrected over the table) and the interval say so. Unmarked: no difference detected.",
    "A line loses at least one word, so more than asked are swapped where lines are short. Swapped were: {shares}.",
    "rise on clean targets: what the loss of the very words that a swap leaves alone rises by when others before them "
    "are swapped. A single perplexity hides that nearly all of its rise sits in the swapped words themselves.",
)
_LEDGER = (
    "Perplexities. The paper's models learnt WikiText-103; ours another text, and a shorter one, so only ratios to the "
    "plain twin may be compared. The paper gives no intervals, and some of its losses do not fit its perplexities."
)


def _shares(results: Results) -> str:
    """What was really swapped of the words that may be, condition by condition."""
    found: dict[str, float] = {}
    for (data, _, column), seeds in results.by_key.items():
        if column.condition.endswith("all targets"):
            name = f"{data}, {column.condition.removesuffix(', all targets')}"
            found[name] = next(iter(seeds.values())).settings["swapped_share"]
    return "; ".join(f"{name}: {share:.1%}" for name, share in found.items()) or "none"


def _add_rises(results: Results, data: str, row: str) -> None:
    """What swaps add to the loss of words that they leave alone, target by target."""
    for column in results.columns(data):
        if not column.condition.endswith(BEFORE):
            continue
        name = column.condition.removesuffix(BEFORE)
        before = results.of(data, row, column)
        after = results.of(data, row, column._replace(condition=name + AFTER))
        for seed in sorted(set(before) & set(after)):
            a, b = after[seed], before[seed]
            examples = [x - y for x, y in zip(a.examples, b.examples, strict=True)]
            rise = Result(a.value - b.value, a.n, examples, a.settings, a.failed)
            results.by_key[data, row, Column("loss", name + RISE)][seed] = rise


def _of_text(results: Results, data: str) -> dict[str, Any]:
    columns = [c for c in results.columns(data) if not c.condition.endswith(BEFORE)]
    clean = [c for c in columns if c.condition.startswith("clean")]
    rises = [c for c in columns if c.condition.endswith(RISE)]
    swapped = [c for c in columns if c not in clean and c not in rises]
    tables = {
        "Clean text, and what a swap adds to words that it leaves alone": table(results, data, clean + rises, TWIN),
        "After a swap": table(results, data, swapped, TWIN),
    }
    for one in tables.values():
        one["unit"] = "nats"
    return {"tables": tables, "eps_curves": {}, "share_curves": {}, "scatter": {}}


def _ledger(results: Results, data: str) -> dict[str, Any]:
    """Table 1, or Table 4 for the medium model, beside ours."""
    printed = paper.TABLE_4 if data.endswith("medium") else paper.TABLE_1
    lines = []
    for title, column in _pairs(results, data):
        for row in results.rows(data):
            ours = entry(results, data, row, column, TWIN)
            if ours is None:
                continue
            number, twin = paper.number(printed, title, row), paper.number(printed, title, TWIN)
            ratio = None if number is None or twin is None else number / twin
            lines.append(
                {
                    "name": f"{LANGUAGE.labels.get(row, row)}: {column.condition}",
                    "paper": "" if number is None else f"{number:.2f}",
                    "paper_gain": "" if ratio is None or row == TWIN else f"{ratio:.3f}",
                    "ours": f"{_exp(ours.estimate.mean, 2)} ({ours.seeds} seeds)",
                    "ours_gain": "" if ours.gain is None else "{} [{}, {}]".format(*(_exp(g, 3) for g in ours.gain)),
                    "conclusion": _conclusion(ours, ratio, row, column),
                }
            )
    return {"title": f"{data} beside Table {4 if printed is paper.TABLE_4 else 1}", "lines": lines}


def _exp(nats: float, digits: int) -> str:
    return f"{math.exp(nats):.{digits}f}" if nats < 20 else "above e^20"


def _pairs(results: Results, data: str) -> list[tuple[str, Column]]:
    """The paper's columns and ours: clean, and all targets after the smallest swap."""
    found = []
    for part in ("valid", "test"):
        found += [(f"clean {part}, perplexity", c) for c in results.columns(data) if c.condition == f"clean {part}"]
        swaps = [c for c in results.columns(data) if c.condition.endswith(f"{part}, all targets")]
        found += [(f"swap {part}, perplexity", c) for c in swaps[:1]]
    return found


def _conclusion(ours: Entry, ratio: float | None, row: str, column: Column) -> str:
    if row == TWIN:
        return "the twin that rows are compared with"
    if ours.gain is None:
        return "nothing: no twin of the same seed"
    sign = verdict(ours.gain, ours.p, column)
    if ours.paired_seeds < FEW_SEEDS:
        return f"{sign} over runs of words of {ours.paired_seeds} seed(s): too few seeds to conclude"
    if ratio is None:
        return f"{sign}; no row of the paper"
    said = "better" if ratio < 1 else "worse"
    if sign == "no difference detected":
        return f"printed {said}; ours detects no difference"
    return f"printed {said}, ours {sign}: " + ("the same sign" if sign == said else "the sign is not confirmed")
