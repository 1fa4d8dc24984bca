"""A study's figures and Markdown tables, from its `report.json` alone."""

from pathlib import Path
from typing import Any

COLOURS = {
    "vit": "#555555",
    "transformer": "#555555",
    "deit": "#999999",
    "rvt": "#bbbbbb",
    "fourierformer": "#cc79a7",
    "kde": "#56b4e9",
    "rkde-huber": "#0072b2",
    "rkde-hampel": "#004c78",
    "spkde": "#d55e00",
    "mom": "#009e73",
    "fourierformer-mom": "#e69f00",
}
"""Okabe and Ito's palette, baselines in greys."""
_MARKS = "osD^vPX*<>"


def draw(report: dict[str, Any], out: Path) -> list[Path]:
    """Accuracy against eps, accuracy against the share of contamination, and clean against robust accuracy."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    for data, part in report["data"].items():
        for name, curves, label in (
            ("attacks", part["eps_curves"], "eps · 255"),
            ("contamination", part["share_curves"], report["labels"].get("share", "")),
        ):
            if curves:
                made.append(_curves(report, data, curves, label, out / f"{data}-{name}.png"))
        if part["scatter"]:
            made.append(_scatter(report, data, part["scatter"], out / f"{data}-clean-robust.png"))
    return made


def _curves(report: dict[str, Any], data: str, curves: dict[str, Any], label: str, path: Path) -> Path:
    """One panel for each attack or kind: a line a row, with its interval."""
    from matplotlib import pyplot as plt

    columns = len(curves) if len(curves) <= 3 else 2 if len(curves) == 4 else 3
    lines = -(-len(curves) // columns)
    size = (4.2 * columns, 1 + 3.4 * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis in axes.flat[len(curves) :]:
        axis.set_visible(False)
    for axis, (kind, rows) in zip(axes.flat, curves.items(), strict=False):
        for row, points in rows.items():
            x = [point["x"] for point in points]
            y = [100 * point["mean"] for point in points]
            errors = [[100 * (p["mean"] - p["low"]) for p in points], [100 * (p["high"] - p["mean"]) for p in points]]
            axis.errorbar(x, y, errors, **_style(report, row), lw=1.6, ms=4, elinewidth=0.7, capsize=2)
        axis.set_xticks(sorted({point["x"] for points in rows.values() for point in points}))
        axis.set_title(kind)
        axis.set_xlabel(label)
        _tidy(axis)
    for line in axes:
        line[0].set_ylabel("right, %")
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3 if columns == 2 else 5, frameon=False, fontsize=9)
    over = report["labels"]["examples"]
    figure.suptitle(f"{data}: mean over seeds, 95 % interval over seeds and {over}", fontsize=12)
    return _save(figure, path)


def _scatter(report: dict[str, Any], data: str, points: dict[str, dict[str, Any]], path: Path) -> Path:
    """Clean accuracy against accuracy under contamination and under all attacks, a point a row."""
    from matplotlib import pyplot as plt

    panels = list(dict.fromkeys(name for by in points.values() for name in by if name != "clean"))
    figure, axes = plt.subplots(1, len(panels), figsize=(5.2 * len(panels), 4.6), squeeze=False, layout="constrained")
    for axis, panel in zip(axes[0], panels, strict=True):
        for row, by in points.items():
            if panel in by and "clean" in by:
                x, y = by["clean"], by[panel]
                axis.errorbar(
                    [100 * x["mean"]],
                    [100 * y["mean"]],
                    [[100 * (y["mean"] - y["low"])], [100 * (y["high"] - y["mean"])]],
                    [[100 * (x["mean"] - x["low"])], [100 * (x["high"] - x["mean"])]],
                    **_style(report, row) | {"ls": "none"},
                    ms=7,
                    elinewidth=0.8,
                )
        axis.set_xlabel("clean, %")
        axis.set_ylabel(f"{panel}, %")
        _tidy(axis)
    handles, names = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(data, fontsize=12)
    return _save(figure, path)


def _style(report: dict[str, Any], row: str) -> dict[str, Any]:
    """A colour and a mark for each row; variants of a random row have their row's, and broken lines."""
    order, base = list(report["names"]), row.split(", ", maxsplit=1)[0]
    place = order.index(base) if base in order else len(order)
    return {
        "color": COLOURS.get(base, "#8c564b"),
        "marker": _MARKS[place % len(_MARKS)],
        "label": report["names"].get(row, row),
        "ls": "-" if row == base else "--" if row.endswith("known draw") else ":",
    }


def _tidy(axis: Any) -> None:
    axis.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _save(figure: Any, path: Path) -> Path:
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def texts(report: dict[str, Any]) -> dict[str, str]:
    """File name -> content, for whichever study the report is of."""
    if report["study"] == "timeseries":
        from robust_attention.plots import series

        return {"report.md": series.markdown(report)}
    return {"report.md": markdown(report), "ledger.md": ledger(report)}


def markdown(report: dict[str, Any]) -> str:
    """Every table of the report, with what its marks mean."""
    parts = [f"# {report['title']}\n", report["about"], ""]
    for data, part in report["data"].items():
        parts.append(f"## {data}\n")
        for name, table in part["tables"].items():
            if table["rows"]:
                parts += [f"### {name}\n", table_lines(report, table), ""]
    parts += ["## How to read it\n", *(f"- {note}" for note in report["notes"]), ""]
    if report["failed_runs"]:
        parts += ["## Runs that failed\n", *(f"- `{run['cell']}`: {run['error']}" for run in report["failed_runs"]), ""]
    return "\n".join(parts)


def table_lines(report: dict[str, Any], table: dict[str, Any]) -> str:
    head = ["", *(_head(table, column) for column in table["columns"])]
    lines = ["| " + " | ".join(head) + " |", "| --- |" + " ---: |" * len(table["columns"])]
    for row in table["rows"]:
        cells = [_cell(row["cells"].get(column), table.get("unit", "per cent")) for column in table["columns"]]
        lines.append(f"| {report['names'].get(row['row'], row['row'])} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _head(table: dict[str, Any], column: str) -> str:
    """A column's name, and on how many examples it stands where these are fewer than elsewhere."""
    numbers = {name: _largest(table, name) for name in table["columns"]}
    few = numbers[column] and numbers[column] < max(numbers.values())
    return f"{column} (n = {numbers[column]})" if few else column


def _largest(table: dict[str, Any], column: str) -> int:
    return max((row["cells"][column]["n"] for row in table["rows"] if column in row["cells"]), default=0)


def _cell(cell: dict[str, Any] | None, unit: str) -> str:
    """A mean, half its interval, and its marks; shares in per cent, losses in nats."""
    if cell is None:
        return ""
    scale, digits = (100, 1) if unit == "per cent" else (1, 3)
    marks = {"better": " ▲", "worse": " ▼"}.get(cell["verdict"] or "", "") + (" †" if cell["failed"] else "")
    # No-break spaces: a number and its interval stay on one line of a narrow column.
    half = "" if cell["low"] is None else f"\u00a0±\u00a0{scale * (cell['high'] - cell['low']) / 2:.{digits}f}"
    return f"{scale * cell['mean']:.{digits}f}{half}{marks}"


def ledger(report: dict[str, Any]) -> str:
    """The paper's number, ours, and what may be concluded, row by row."""
    parts = ["# Ledger\n", report["ledger"]["about"], ""]
    heads = report["ledger"]["heads"]
    for table in report["ledger"]["tables"]:
        parts += [f"## {table['title']}\n", f"| {' | '.join(heads)} |", "| --- | ---: | ---: | ---: | ---: | --- |"]
        for line in table["lines"]:
            cells = [
                line["name"],
                line["paper"],
                line["paper_gain"],
                line["ours"],
                line["ours_gain"],
                line["conclusion"],
            ]
            parts.append("| " + " | ".join(cells) + " |")
        parts.append("")
    return "\n".join(parts)
