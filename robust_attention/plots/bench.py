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
    """The headline as Markdown: time over SDPA's, by method and case."""
    groups: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in record["rows"]:
        if row["kind"] != "growing" and row["method"] != "SDPA":
            groups.setdefault((row["method"], row["what"] + ", " + row["mode"]), {})[row["impl"]] = row
    lines = [
        "| method | case | time / SDPA | published algorithm / SDPA | peak MiB |",
        "| --- | --- | --- | --- | --- |",
    ]
    for (method, case), by in groups.items():
        mine = by.get("auto") or by.get("cache") or {}
        lines.append(
            f"| {method} | {case} | {_number(mine.get('ratio'))} | {_number(by.get('published', {}).get('ratio'))} "
            f"| {_number(mine.get('peak_mib'))} |"
        )
    head = f"{record['device']}, {record['dtype']}, torch {record['versions']['torch']}, {record['date']}"
    return "\n".join([head, "", *lines])


def _number(x: float | None) -> str:
    return "–" if x is None else f"{x:.2f}" if x < 100 else f"{x:.0f}"


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """`bench-growth.png` (time and memory over N) and `bench-steps.png` (iterations a second and memory of models)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, figure in (("growth", _growth(plt, record)), ("steps", _steps(plt, record))):
        paths.append(folder / f"bench-{name}.png")
        figure.savefig(paths[-1], dpi=110)
        plt.close(figure)
    return paths


def _growth(plt: Any, record: dict[str, Any]) -> Any:
    figure, axes = plt.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    rows = [r for r in record["rows"] if r["kind"] == "growing"]
    slopes = {(e["method"], e["impl"]): e for e in record["exponents"]}
    for axis, key, title in ((axes[0], "ms", "Time, ms"), (axes[1], "peak_mib", "Peak memory above the inputs, MiB")):
        for method, impl in dict.fromkeys((r["method"], r["impl"]) for r in rows):
            points = [(r["keys"], r[key]) for r in rows if (r["method"], r["impl"]) == (method, impl) and r[key]]
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
        axis.set_title(f"{title} ({rows[0]['mode']})", loc="left")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"{record['device']}, {record['dtype']}", fontsize=9, x=0.99, ha="right")
    return figure


def _steps(plt: Any, record: dict[str, Any]) -> Any:
    rows = [r for r in record["rows"] if r["kind"] == "step"]
    models = list(dict.fromkeys(r["what"] for r in rows))
    methods = list(dict.fromkeys(r["method"] for r in rows))
    keys = [("iterations_per_second", "Training steps a second (more is better)")]
    if any(r["peak_mib"] for r in rows):
        keys.append(("peak_mib", "Peak memory, MiB (less is better)"))
    figure, axes = plt.subplots(1, len(keys), figsize=(6.5 * len(keys), 4.4), layout="constrained", squeeze=False)
    width = 0.8 / len(methods)
    for axis, (key, title) in zip(axes[0], keys, strict=True):
        for number, method in enumerate(methods):
            found = {r["what"]: r[key] for r in rows if r["method"] == method}
            places = [i + (number - (len(methods) - 1) / 2) * width for i, m in enumerate(models) if found.get(m)]
            heights = [found[m] for m in models if found.get(m)]
            bars = axis.bar(places, heights, width, label=method, color=COLOURS[method])
            axis.bar_label(bars, fmt="%.3g", fontsize=7)
        axis.set_xticks(range(len(models)), models, fontsize=8)
        axis.set_title(title, loc="left")
        axis.legend(frameon=False, fontsize=8)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    figure.suptitle(f"{record['device']}, {record['dtype']}", fontsize=9, x=0.99, ha="right")
    return figure
