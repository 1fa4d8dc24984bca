"""The time-series study's tables as Markdown, from its report alone. Its figures are those of `plots.study.draw`."""

from typing import Any

from robust_attention.plots.study import table_lines


def markdown(report: dict[str, Any]) -> str:
    """Every table of the report, with what its marks mean."""
    names = report["names"]
    parts = [f"# {report['title']}\n", report["about"], ""]
    for data, part in report["data"].items():
        parts.append(f"## {data}\n\n{part['n']} test cases: one case is {100 * part['one_case']:.2f} points.\n")
        for name, table in part["tables"].items():
            parts += [f"### {name}\n", table_lines(report, table), ""]
        if part["pairs"]:
            parts += [_pairs(part["pairs"], names), ""]
    for ranks in report["ranks"]:
        parts += [_ranks(ranks, names), ""]
    if report["ledger"]:
        parts += [_ledger(report["ledger"], names), ""]
    parts += ["## How to read it\n", *(f"- {note}" for note in report["notes"]), ""]
    if report["failed_runs"]:
        parts += ["## Runs that failed\n", *(f"- `{run['cell']}`: {run['error']}" for run in report["failed_runs"]), ""]
    return "\n".join(parts)


def _pairs(pairs: list[dict[str, Any]], names: dict[str, str]) -> str:
    head = ["against its twin", "on", "gain, points", "gain, cases", "series better : worse", "McNemar p (Holm)", ""]
    rows = [
        [
            names.get(pair["row"], pair["row"]),
            pair["column"],
            f"{100 * pair['gain']:+.1f}",
            f"{pair['gain_in_cases']:+.1f}",
            f"{pair['better']} : {pair['worse']}",
            f"{pair['p_holm']:.3g}",
            pair["verdict"],
        ]
        for pair in pairs
    ]
    return _lines(head, rows)


def _ranks(ranks: dict[str, Any], names: dict[str, str]) -> str:
    ordered = sorted(ranks["mean_ranks"].items(), key=lambda item: item[1])
    title = (
        f"## Mean ranks: {ranks['column']}\n\nOver {', '.join(ranks['problems'])}; "
        f"critical difference {ranks['critical_difference']:.2f}.\n\n"
    )
    return title + _lines(["row", "mean rank"], [[names.get(row, row), f"{rank:.2f}"] for row, rank in ordered])


def _ledger(lines: list[dict[str, str]], names: dict[str, str]) -> str:
    head = ["row", "problem", "paper", "paper − its twin", "ours, best epoch on test", "ours", "ours − its twin", ""]
    keys = ("problem", "paper", "paper_gain", "best", "ours", "ours_gain", "conclusion")
    rows = [[names.get(line["row"], line["row"]), *(line[key] for key in keys)] for line in lines]
    return "## Ledger: Table 5\n\n" + _lines(head, rows)


def _lines(head: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * (len(head) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
