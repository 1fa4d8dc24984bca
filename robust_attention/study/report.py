"""From the lines of a study to its tables: means, intervals, paired comparisons. Reads JSON, knows no model."""

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from robust_attention.eval.measure import Measurement, unpack
from robust_attention.eval.metrics import mce
from robust_attention.eval.statistics import Estimate, binomial_interval, holm, mean_interval, sign_flip_p
from robust_attention.study import store

LEVEL = 0.05


class Column(NamedTuple):
    """What one column of a table holds."""

    metric: str
    condition: str
    protocol: str = "pixel"


Key = tuple[str, str, Column]
"""Image set, row, column."""


class Result(NamedTuple):
    """One seed's number."""

    value: float
    n: int
    examples: list[float]
    """The result of each example; the one number itself where there are none."""
    settings: dict[str, Any]
    failed: tuple[str, ...]


class Results:
    """Every cell that is done, by image set and row, seeds in order."""

    def __init__(self, records: Iterable[dict[str, Any]]) -> None:
        self.records = [record for record in records if record["status"] == "done"]
        self.by_key: dict[Key, dict[int, Result]] = defaultdict(dict)
        for record in self.records:
            for stored in record["measurements"]:
                m = Measurement.from_dict(stored)
                condition, row = variant_of(m.condition, record["row"])
                column = Column(m.metric, condition, m.protocol)
                examples = _examples(m, record.get("blocks", {}))
                result = Result(m.value, m.n, examples, m.settings, m.failed)
                self.by_key[record["data"], row, column][record["seed"]] = result

    @property
    def data(self) -> list[str]:
        return list(dict.fromkeys(record["data"] for record in self.records))

    def rows(self, data: str) -> list[str]:
        """In the order of the cells; a random row is followed by its variants (see `variant_of`)."""
        rows = list(dict.fromkeys(record["row"] for record in self.records if record["data"] == data))
        found = dict.fromkeys(row for of, row, _ in self.by_key if of == data)
        return [row for first in rows for row in found if row.split(", ")[0] == first]

    def columns(self, data: str) -> list[Column]:
        """In the order in which they were measured."""
        return list(dict.fromkeys(column for found, _, column in self.by_key if found == data))

    def of(self, data: str, row: str, column: Column) -> dict[int, Result]:
        return self.by_key.get((data, row, column), {})


def _examples(m: Measurement, blocks: dict[str, list[float]]) -> list[float]:
    """What the paired tests range over: examples, means over runs of them, or the one number that there is."""
    if m.right is not None:
        return unpack(m.right).tolist()
    return blocks.get(m.condition) or [m.value]


class Entry(NamedTuple):
    """One number of a table."""

    estimate: Estimate
    seeds: int
    n: int
    failed: tuple[str, ...]
    """Checks that failed for any seed."""
    gain: Estimate | None
    """Difference to the twin over the seeds that both have."""
    paired_seeds: int
    single: bool
    """Whether a seed has one number only, not one for each example."""
    p: float | None
    """Of the paired sign-flip test over examples, before correction."""


def variant_of(condition: str, row: str) -> tuple[str, str]:
    """A random method's numbers for a known draw and for the worst of several go into rows of their own."""
    found = re.fullmatch(r"(.+), (known draw|worst of \d+ draws)", condition)
    return (condition, row) if found is None else (found[1], f"{row}, {found[2]}")


def load(out: Path, only: Collection[str] | None = None) -> Results:
    """The results in a folder or file; of the cells in `only`, if given."""
    files = store.result_files(out)
    if not files:
        raise ValueError(f"--out must hold cells*.jsonl of a study, got {out}; run robust-attention study NAME first")
    results = Results(record for record in store.read(files) if only is None or record["cell"] in only)
    if not results.records:
        raise ValueError(f"some cell must be done to be reported, got none in {out}; its lines say what failed")
    return results


def about(results: Results) -> str:
    """How many cells on what, in a sentence."""
    seeds: dict[tuple[str, str], set[int]] = defaultdict(set)
    for record in results.records:
        seeds[record["data"], record["row"]].add(record["seed"])
    number = [len(of) for of in seeds.values()]
    hardware = sorted({record["hardware"] for record in results.records})
    commits = sorted({str(record["commit"]) for record in results.records})
    return (
        f"{len(results.records)} cells, {_range(number)} seeds a row, on {', '.join(hardware)}; "
        f"commits {', '.join(commits)}."
    )


_OF_ROW = ("row", "method", "teacher", "seed")
_OF_MODEL = ("distilled", "num_heads", "qk_norm")


def mixed_settings(results: Results, twin: str) -> list[str]:
    """A note for each row that was made with other settings than its twin: they are not compared for their method."""
    twins = {(of["data"], of["seed"]): _shared(of) for of in results.records if of["row"] == twin}
    found: dict[str, list[str]] = {}
    for record in results.records:
        other, ours = twins.get((record["data"], record["seed"])), _shared(record)
        differ = [] if other is None else [name for name in ours if ours[name] != other.get(name)]
        if differ:
            found.setdefault(f"{record['data']}/{record['row']}", differ)
    return [
        f"‡ {cell} was made with other settings of {', '.join(names)} than its twin." for cell, names in found.items()
    ]


def _shared(record: dict[str, Any]) -> dict[str, Any]:
    """What a row's configuration should have in common with its twin's."""
    config = {name: value for name, value in record.get("config", {}).items() if name not in _OF_ROW}
    if isinstance(config.get("model"), dict):
        config["model"] = {name: value for name, value in config["model"].items() if name not in _OF_MODEL}
    return config


def _range(numbers: list[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def failed_runs(records: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    """Cells without a result, and why."""
    return [{"cell": r["cell"], "error": r["error"]} for r in records if r["status"] == "failed"]


def entry(results: Results, data: str, row: str, column: Column, twin: str) -> Entry | None:
    """A row's number in one column, compared with its twin's seed by seed and example by example."""
    found, other = results.of(data, row, column), results.of(data, twin, column)
    if not found:
        return None
    # Cells of other settings may have other examples: they are not paired, and `mixed_settings` names them.
    both = sorted(s for s in set(found) & set(other) if len(found[s].examples) == len(other[s].examples))
    failed = tuple(dict.fromkeys(name for m in found.values() for name in m.failed))
    rows = [result.examples for result in found.values()]
    single = len(rows[0]) == 1
    gain, p = None, None
    if row != twin and both and not (len(both) == 1 and single):
        differences = [
            [a - b for a, b in zip(found[seed].examples, other[seed].examples, strict=True)] for seed in both
        ]
        gain = mean_interval(differences)
        p = sign_flip_p([math.fsum(each) / len(both) for each in zip(*differences, strict=True)])
    number = next(iter(found.values())).n
    estimate = mean_interval(rows)
    # Runs of words may differ in length: the mean is that of the words, the interval's width that of the runs.
    shift = math.fsum(result.value for result in found.values()) / len(found) - estimate.mean
    estimate = Estimate(*(number + shift for number in estimate))
    if column.metric in SHARES:  # an interval of a share ends where shares do
        estimate = Estimate(estimate.mean, max(0.0, estimate.low), min(1.0, estimate.high))
        if not single:  # no images wrong are no proof that none ever is: never narrower than Wilson's
            low, high = binomial_interval(min(1.0, max(0.0, estimate.mean)), number)
            estimate = Estimate(estimate.mean, min(estimate.low, low), max(estimate.high, high))
    return Entry(estimate, len(found), number, failed, gain, len(both), single, p)


def table(results: Results, data: str, columns: Sequence[Column], twin: str = "vit") -> dict[str, Any]:
    """Rows × columns of one image set, ready for JSON; p-values are corrected over the whole table (Holm)."""
    entries = {
        (row, column): found
        for row in results.rows(data)
        for column in columns
        if (found := entry(results, data, row, column, twin)) is not None
    }
    tested = [key for key, found in entries.items() if found.p is not None]
    adjusted = dict(zip(tested, holm([entries[key].p or 0.0 for key in tested]), strict=True))
    rows = []
    for row in dict.fromkeys(row for row, _ in entries):
        cells = {}
        for column in columns:
            if (row, column) not in entries:
                continue
            found = entries[row, column]
            p = adjusted.get((row, column))
            one = found.seeds == 1 and found.single  # one number has no interval
            cells[name_of(column)] = {
                **found.estimate._asdict(),
                **({"low": None, "high": None} if one else {}),
                "seeds": found.seeds,
                "n": found.n,
                "failed": list(found.failed),
                "gain": None if found.gain is None else list(found.gain),
                "paired_seeds": found.paired_seeds,
                "p_holm": p,
                "verdict": verdict(found.gain, p, column),
            }
        rows.append({"row": row, "cells": cells})
    return {"data": data, "twin": twin, "columns": [name_of(column) for column in columns], "rows": rows}


def verdict(gain: Estimate | None, p: float | None, column: Column) -> str | None:
    """better, worse or no difference detected: both the corrected test and the interval must say so."""
    if gain is None or p is None:
        return None
    if p >= LEVEL or gain.low <= 0 <= gain.high:
        return "no difference detected"
    return "better" if (gain.mean > 0) != (column.metric in LOWER_IS_BETTER) else "worse"


LOWER_IS_BETTER = {"mce", "error", "loss"}
SHARES = {"accuracy", "top5", "error"}


def with_derived(results: Results, twin: str = "vit") -> Results:
    """Add what follows from measured accuracies: mean over contaminations, mean corruption error over the twin's."""
    for data in results.data:
        for row in results.rows(data):
            _add_means(results, data, row)
            _add_mce(results, data, row, twin)
    return results


CONTAMINATION = Column("accuracy", "contamination, mean")
CORRUPTION = Column("accuracy", "corruption, mean")
MCE = Column("mce", "corruptions")


def conditions(results: Results, data: str, setting: str) -> list[Column]:
    """Accuracies whose settings hold this name: share (contamination), severity (corruption), eps (attacks)."""
    found = [
        column
        for (of, _, column), seeds in results.by_key.items()
        if of == data and column.metric == "accuracy" and all(setting in m.settings for m in seeds.values())
    ]
    return list(dict.fromkeys(found))


def _add_means(results: Results, data: str, row: str) -> None:
    for setting, target in (("share", CONTAMINATION), ("severity", CORRUPTION)):
        per_seed: dict[int, list[Result]] = defaultdict(list)
        columns = [c for c in conditions(results, data, setting) if c not in (CONTAMINATION, CORRUPTION)]
        for column in columns:
            for seed, m in results.of(data, row, column).items():
                per_seed[seed].append(m)
        for seed, parts in per_seed.items():
            # A mean over fewer conditions than the others have would compare different things.
            if len(parts) == len(columns):
                results.by_key[data, row, target][seed] = _mean(parts, setting)


def _mean(parts: list[Result], setting: str) -> Result:
    value = math.fsum(part.value for part in parts) / len(parts)
    examples = [math.fsum(each) / len(parts) for each in zip(*(part.examples for part in parts), strict=True)]
    failed = tuple(dict.fromkeys(name for part in parts for name in part.failed))
    return Result(value, parts[0].n, examples, {"of": len(parts), "setting": setting}, failed)


def _add_mce(results: Results, data: str, row: str, twin: str) -> None:
    columns = [c for c in conditions(results, data, "severity") if c != CORRUPTION]
    for seed in results.of(data, row, columns[0]) if columns else ():
        errors, baseline = (_errors(results, data, of, seed, columns) for of in (row, twin))
        if errors and baseline:
            value = mce(errors, baseline) / 100
            results.by_key[data, row, MCE][seed] = Result(value, len(errors), [value], {"baseline": twin}, ())


def _errors(results: Results, data: str, row: str, seed: int, columns: list[Column]) -> dict[str, float] | None:
    """The mean error of each kind over its severities, None if one is missing."""
    errors: dict[str, list[float]] = defaultdict(list)
    for column in columns:
        found = results.of(data, row, column).get(seed)
        if found is None:
            return None
        errors[str(found.settings["kind"])].append(1 - found.value)
    return {kind: math.fsum(values) / len(values) for kind, values in errors.items()}


def name_of(column: Column) -> str:
    """How a column is headed."""
    plain = column.condition if column.metric in ("accuracy", "loss") else f"{column.condition}, {column.metric}"
    return plain if column.protocol == "pixel" else f"{plain} ({column.protocol})"
