"""The vision study's report: its tables, its curves and the ledger beside the paper, as one JSON."""

from pathlib import Path
from typing import Any

from robust_attention.recipes import han2023_tables as paper
from robust_attention.study import store
from robust_attention.study.report import (
    CONTAMINATION,
    CORRUPTION,
    LOWER_IS_BETTER,
    MCE,
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
from robust_attention.study.studies import VISION

TWIN = "vit"
KERNEL, KERNEL_TABLE = "kde", "Contaminated patches, compared with KDE: what robust weights add to their kernel"
ALL = "all attacks"
CLEAN = Column("accuracy", "clean")


def vision_report(out: Path) -> dict[str, Any]:
    """Everything that `plots.study` draws, from the cells in `out`."""
    results = with_derived(load(out), TWIN)
    names = dict(VISION.labels)
    for row in dict.fromkeys(row for data in results.data for row in results.rows(data)):
        base, comma, variant = row.partition(", ")
        names.setdefault(row, names.get(base, base) + comma + variant)
    return {
        "title": "Vision study",
        "labels": {"share": "patches overwritten, %", "examples": "images"},
        "about": about(results),
        "names": names,
        "data": {data: _of_data(results, data) for data in results.data},
        "ledger": {
            "about": _LEDGER,
            "heads": _HEADS,
            "tables": [_ledger(results, data, names) for data in results.data],
        },
        "failed_runs": failed_runs(store.read(store.result_files(out))),
        "notes": [*_NOTES, *mixed_settings(results, TWIN)],
    }


_NOTES = (
    "Per cent, mean over seeds ± half a 95 % interval over seeds and images; mCE in per cent of the softmax twin's.",
    "▲ better, ▼ worse than the softmax twin (KDE, where a table says so) of equal seeds: both the paired sign-flip "
    "test over images (Holm-corrected over the table) and the interval over seeds and images say so. Unmarked: no "
    "difference detected.",
    "† a sanity check failed for some seed; the row is not to be believed as it stands (the JSON lines name it).",
    "Methods that draw at random: the mean over fresh draws; then a row for the draw that the attacker knows, and one "
    "for images that are right in every one of several draws.",
    "all attacks: images that survive every attack that was tried on them, each on its own; costly attacks are tried "
    "on the first images only (n in a column's head), and say nothing of the others.",
    "eps is in units of images in [0, 1]; columns marked (paper) use the published tables' protocol instead.",
)

_HEADS = ["row", "paper", "paper − ViT", "ours", "ours − ViT", "what may be concluded"]
_LEDGER = (
    "The paper's models learnt ImageNet at 224 pixels; ours learnt small images at lab scale, so numbers stand beside "
    "each other and are not comparable. What can be compared is the sign of a row's difference to its plain twin. "
    "The paper gives no intervals; two published logs of one method differ by 0.7 points."
)


def _of_data(results: Results, data: str) -> dict[str, Any]:
    tried = [c for c in conditions(results, data, "eps") if _setting(results, data, c, "eps") != 1]
    tried.sort(key=lambda c: (_setting(results, data, c, "eps"), attack_of(c) == ALL))
    attacks = [c for c in tried if c.protocol == "pixel"]
    published = [c for c in tried if c.protocol == "paper"]
    shares = [c for c in conditions(results, data, "share") if c != CONTAMINATION]
    top5 = [Column("top5", c.condition, c.protocol) for c in (CLEAN, *attacks)]
    top5 = [c for c in top5 if any(results.of(data, row, c) for row in results.rows(data))]
    tables = {
        "Attacks": table(results, data, [CLEAN, *attacks], TWIN),
        "Attacks, published protocol": table(results, data, published, TWIN),
        "Attacks, top 5": table(results, data, top5, TWIN),
        "Contaminated patches": table(results, data, [CLEAN, *shares, CONTAMINATION], TWIN),
        **(
            {KERNEL_TABLE: table(results, data, [CLEAN, *shares, CONTAMINATION], KERNEL)}
            if shares and KERNEL in results.rows(data)
            else {}
        ),
        "Corruptions": table(results, data, [CLEAN, CORRUPTION, MCE], TWIN),
    }
    return {
        "tables": tables,
        "eps_curves": _curves(results, data, {c: attack_of(c) for c in attacks if _main(attack_of(c))}, "eps", 255.0),
        "share_curves": _curves(
            results, data, {c: str(_setting(results, data, c, "kind")) for c in shares}, "share", 100.0
        ),
        "scatter": _scatter(results, data, attacks),
    }


def attack_of(column: Column) -> str:
    """PGD-20 of "PGD-20 1/255"."""
    return column.condition.rsplit(" ", 1)[0]


def _main(attack: str) -> bool:
    """Attacks that have a panel of their own; the others are parts of `all attacks`."""
    return attack in ("FGSM", ALL) or (attack.startswith(("PGD-", "SPSA")) and " " not in attack)


def _curves(
    results: Results, data: str, panels: dict[Column, str], axis: str, scale: float
) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Panel → row → points, the clean accuracy at 0 among them."""
    curves: dict[str, dict[str, list[dict[str, float]]]] = {}
    for column, panel in panels.items():
        for row in results.rows(data):
            one = entry(results, data, row, column, TWIN)
            if one is None:
                continue
            points = curves.setdefault(panel, {}).setdefault(row, [])
            if not points and (clean := entry(results, data, row, CLEAN, TWIN)) is not None:
                points.append({"x": 0.0, **clean.estimate._asdict()})
            strength = float(_setting(results, data, column, axis))
            points.append({"x": scale * strength, **one.estimate._asdict()})
    for rows in curves.values():
        for points in rows.values():
            points.sort(key=lambda point: point["x"])
    return curves


def _scatter(results: Results, data: str, attacks: list[Column]) -> dict[str, dict[str, Any]]:
    worst = [c for c in attacks if c.condition.startswith(ALL)]
    shown = [CLEAN, CONTAMINATION, *worst[:2]]
    points: dict[str, dict[str, Any]] = {}
    for row in (row for row in results.rows(data) if ", " not in row):
        for column in shown:
            if (one := entry(results, data, row, column, TWIN)) is not None:
                points.setdefault(row, {})[name_of(column)] = one.estimate._asdict()
    return points if any(len(by) > 1 for by in points.values()) else {}


def _ledger(results: Results, data: str, names: dict[str, str]) -> dict[str, Any]:
    """Rows of the paper's Tables 2 and 3 beside ours on one image set."""
    lines = []
    pairs = [
        (printed, title, column, scale)
        for printed, title, column, scale in _pairs(results, data)
        if any(results.of(data, row, column) for row in results.rows(data))
    ]
    for printed, title, column, scale in pairs:
        twin_number = paper.number(printed, title, TWIN)
        for row in results.rows(data):
            ours = entry(results, data, row, column, TWIN)
            if ours is None or ", " in row:
                continue
            number = paper.number(printed, title, row)
            gain = None if number is None or twin_number is None else number - twin_number
            lines.append(
                {
                    "name": f"{names.get(row, row)}: {title}",
                    "paper": "" if number is None else f"{number:.2f}",
                    "paper_gain": "" if gain is None or row == TWIN else f"{gain:+.2f}",
                    "ours": f"{scale * ours.estimate.mean:.1f} ({ours.seeds} seeds)",
                    "ours_gain": _gain(ours, scale),
                    "conclusion": _conclusion(ours, gain, row, column),
                }
            )
    missing = ", ".join(title for title in paper.TABLE_3 if not title.startswith("ImageNet-C"))
    return {"title": f"{data} beside Tables 2 and 3", "lines": lines, "not_run": missing}


def _pairs(results: Results, data: str) -> list[tuple[dict[str, tuple[float, ...]], str, Column, float]]:
    """Column of the paper → ours: at eps = 1/255 where we have it, else at the smallest eps."""
    found: list[tuple[dict[str, tuple[float, ...]], str, Column, float]] = [
        (paper.TABLE_2, "clean, top 1", CLEAN, 100.0),
        (paper.TABLE_2, "clean, top 5", Column("top5", "clean"), 100.0),
    ]
    attacks = {
        name: column
        for column in conditions(results, data, "eps")
        if column.protocol == "pixel" and abs(_setting(results, data, column, "eps") - 1 / 255) < 1e-6
        for name in ("FGSM", "PGD", "SPSA")
        if attack_of(column).split("-")[0] == name and _main(attack_of(column))
    }
    for name, column in attacks.items():
        found.append((paper.TABLE_2, f"{name}, top 1", column, 100.0))
        found.append((paper.TABLE_2, f"{name}, top 5", Column("top5", column.condition), 100.0))
    found.append((paper.TABLE_3, "ImageNet-C, mCE", MCE, 100.0))
    return found


def _setting(results: Results, data: str, column: Column, name: str) -> Any:
    for row in results.rows(data):
        for result in results.of(data, row, column).values():
            return result.settings.get(name)
    return None


def _gain(ours: Entry, scale: float) -> str:
    if ours.gain is None:
        return ""
    mean, low, high = (scale * number for number in ours.gain)
    return f"{mean:+.1f} [{low:+.1f}, {high:+.1f}]"


def _conclusion(ours: Entry, paper_gain: float | None, row: str, column: Column) -> str:
    """What our numbers allow to say about the sign that the paper prints."""
    if row == TWIN:
        return "the twin that rows are compared with"
    if ours.failed:
        return f"nothing: {', '.join(ours.failed)}"
    if ours.gain is None:
        return "nothing: a single number" if ours.single else "nothing: no twin of the same seed and images"
    sign = verdict(ours.gain, ours.p, column)
    if ours.paired_seeds < 3:
        return f"{sign} over images of {ours.paired_seeds} seed(s): too few seeds to conclude"
    if paper_gain is None:
        return f"{sign}; no row of the paper"
    printed = "better" if (paper_gain > 0) != (column.metric in LOWER_IS_BETTER) else "worse"
    if sign == "no difference detected":
        return f"printed {printed}; ours detects no difference"
    return f"printed {printed}, ours {sign}: " + ("the same sign" if sign == printed else "the sign is not confirmed")
