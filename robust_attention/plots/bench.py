"""The benchmark's plots and table, from its JSON alone."""

from pathlib import Path
from typing import Any

COLOURS = {
    "SDPA": "#555555",
    "KDE": "#56b4e9",
    "RKDE": "#0072b2",
    "SPKDE": "#d55e00",
    "MoM": "#009e73",
    "Fourier": "#cc79a7",
}


def table(record: dict[str, Any]) -> str:
    """The headline as Markdown: time over SDPA's by method and case, then the exponents in the length."""
    rows = [row for row in record["rows"] if row["kind"] != "growing"]
    best = {(row["kind"], row["what"], row["mode"]): row for row in rows if row["method"] == "SDPA"}
    groups: dict[tuple[str, str, str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["method"] != "SDPA":
            groups.setdefault((row["method"], row["kind"], row["what"], row["mode"]), {})[row["impl"]] = row
    lines = [
        f"{record['hardware']}, {record['dtype']}, torch {record['versions']['torch']}, {record['date']}",
        "",
        "| method | case | SDPA's best | time / SDPA | published algorithm / SDPA | peak MiB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for (method, *case), by in groups.items():
        mine = by.get("auto") or by.get("cache") or {}
        base = best.get((case[0], case[1], case[2]), {})
        lines.append(
            f"| {method} | {case[1]}, {case[2]} | {base.get('impl', '–')}, {_number(base.get('ms'))} ms "
            f"| {_ratio(mine)} | {_ratio(by.get('published', {}))} | {_number(mine.get('peak_mib'))} |"
        )
    return "\n".join(lines + _exponents(record))


def _exponents(record: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "| method | implementation | mode | time ∝ N^a, a | memory ∝ N^b, b | from N |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    found = record.get("exponents", [])
    for e in found:
        least = e["ms_from"] or e["peak_mib_from"] or "–"
        lines.append(
            f"| {e['method']} | {e['impl']} | {e['mode']} | {_number(e['ms'])} | {_number(e['peak_mib'])} | {least} |"
        )
    return lines if found else []


def _ratio(row: dict[str, Any]) -> str:
    failed = row.get("check", "passed") != "passed"
    return "not timed: failed its check" if failed else _number(row.get("ratio"))


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}" if x < 100 else f"{x:.0f}"


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """`bench-growth.png` (time and memory over N) and `bench-steps.png` (iterations a second and memory of models), of
    what the record holds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, kind, make in (("growth", "growing", _growth), ("steps", "step", _steps)):
        rows = [row for row in record["rows"] if row["kind"] == kind and row.get("ms")]
        if rows:
            figure = make(plt, record, rows)
            paths.append(folder / f"bench-{name}.png")
            figure.savefig(paths[-1], dpi=110)
            plt.close(figure)
    return paths


def _growth(plt: Any, record: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    # SDPA's best backend may change with the length: one line all the same.
    rows = [row | {"impl": "best"} if row["method"] == "SDPA" else row for row in rows]
    mode = rows[-1]["mode"]  # with gradients, where they were measured
    rows = [row for row in rows if row["mode"] == mode]
    slopes = {(e["method"], e["impl"]): e for e in record["exponents"] if e["mode"] == mode}
    for axis, key, title in ((axes[0], "ms", "Time, ms"), (axes[1], "peak_mib", "Peak memory above the inputs, MiB")):
        for method, impl in dict.fromkeys((r["method"], r["impl"]) for r in rows):
            points = [(r["keys"], r[key]) for r in rows if (r["method"], r["impl"]) == (method, impl) and r.get(key)]
            slope = slopes[method, impl][key]
            note = "" if slope is None else f", ∝ N^{slope:.1f}"
            old = " (published)" if impl == "published" else ""
            style = {"ls": "--", "marker": "x"} if old else {"ls": "-", "marker": "o"}
            if points:
                axis.plot(*zip(*points, strict=True), label=method + old + note, color=COLOURS[method], ms=4, **style)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xticks(sorted({r["keys"] for r in rows}), [str(n) for n in sorted({r["keys"] for r in rows})])
        axis.set_xlabel("keys and queries, N")
        axis.set_title(f"{title} ({mode})", loc="left")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"{record['hardware']}, {record['dtype']}", fontsize=9, x=0.99, ha="right")
    return figure


def _steps(plt: Any, record: dict[str, Any], rows: list[dict[str, Any]]) -> Any:
    rows = [row | {"iterations_per_second": 1000 / row["ms"]} for row in rows]
    models = list(dict.fromkeys(r["what"] for r in rows))
    methods = list(dict.fromkeys(r["method"] for r in rows))
    keys = [("iterations_per_second", "Training steps a second (more is better)")]
    if any(r.get("peak_mib") for r in rows):
        keys.append(("peak_mib", "Peak memory, MiB (less is better)"))
    figure, axes = plt.subplots(1, len(keys), figsize=(6.5 * len(keys), 4.4), layout="constrained", squeeze=False)
    width = 0.8 / len(methods)
    for axis, (key, title) in zip(axes[0], keys, strict=True):
        for number, method in enumerate(methods):
            found = {r["what"]: r.get(key) for r in rows if r["method"] == method}
            places = [i + (number - (len(methods) - 1) / 2) * width for i, m in enumerate(models) if found.get(m)]
            heights = [found[m] for m in models if found.get(m)]
            bars = axis.bar(places, heights, width, label=method, color=COLOURS[method])
            axis.bar_label(bars, fmt="%.3g", fontsize=7)
        axis.set_xticks(range(len(models)), models, fontsize=8)
        axis.set_title(title, loc="left")
        axis.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"{record['hardware']}, {record['dtype']}", fontsize=9, x=0.99, ha="right")
    return figure
