"""The demo: the vision study at its smoke scale, five rows of it, with a picture and plain words.

Twins share their initial weights, the order of their batches and every spoilt image, so that whatever differs between
them is their attention.
"""

import os
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Generator, Tensor

from robust_attention._config import override
from robust_attention._files import prepare_folder, write_json
from robust_attention._provenance import provenance
from robust_attention.data.contaminate import Kind, contaminate
from robust_attention.eval.adversarial import radius_name
from robust_attention.eval.patches import patch_weights
from robust_attention.models.vit import ViT
from robust_attention.recipes import han2023_vision as recipes
from robust_attention.recipes.vision import VisionConfig
from robust_attention.study import report
from robust_attention.study.grid import Cell
from robust_attention.study.run import run_cells
from robust_attention.study.studies import VISION
from robust_attention.study.vision import images_of, load_model

NAMES = {"vit": "softmax", "kde": "KDE", "rkde-huber": "RKDE", "spkde": "SPKDE", "mom": "MoM"}
"""Rows of the study, and what the demo calls them."""
TABLE_SHARES = (0.2, 0.4)
"""Shares of overwritten patches that the table shows; the picture shows all."""
_SHOWN_ATTACKS = ("FGSM", "PGD-20", "PGD-20 transfer", "all attacks")
_AT_ONE = "PGD-20 1"
"""A check, at eps = 1, and no result."""
EXAMPLE_KIND: Kind = "noise"


def demo_cells(seed: int = 0, settings: dict[str, Any] | None = None) -> list[Cell]:
    """One cell a twin; the slowest first, so that no core idles at the end."""
    base = override(recipes.digits_demo(seed), settings or {})
    return [
        Cell(
            name=f"digits/{row}/{seed}",
            labels={"data": "digits", "row": row, "seed": seed},
            config=recipes.ROWS[row][1](base),
        )
        for row in sorted(NAMES, key=lambda row: row != "spkde")
    ]


def run(cells: list[Cell], out: Path, console: Console, *, jobs: int | None = None) -> dict[str, Any]:
    """Run the cells, leave `demo.json`, `demo.png` and the twins in `out`, and return what the JSON holds."""
    # Minutes of training come next: whatever can be known to fail, a missing matplotlib or a full disk, fails now.
    import matplotlib  # noqa: F401
    import safetensors  # noqa: F401

    from robust_attention.plots import demo as picture

    prepare_folder(out)
    started = time.perf_counter()
    config: VisionConfig = cells[0].config
    console.print(
        f"{len(cells)} twins, equal but for their attention, learn digits of {config.model.num_patches} patches; "
        "then digits that they have not seen are spoilt and attacked."
    )
    failed = run_cells(VISION, cells, out, console, device=torch.device("cpu"), jobs=jobs or os.cpu_count() or 1)
    if failed:
        raise ValueError(f"every cell must end, but {', '.join(failed)} failed; cells*.jsonl in {out} says how")
    record = collect(out, cells)
    record["seconds"] = round(time.perf_counter() - started, 1)
    write_json(out / "demo.json", record)
    image = picture.draw(out / "demo.json", out / "demo.png")
    console.print(table(record))
    console.print("\n".join(record["notes"]), highlight=False)
    console.print(f"\n{record['seconds']:.0f} s. The picture: {image}", highlight=False, soft_wrap=True)
    return record


def load_twins(folder: Path) -> dict[str, ViT]:
    """The twins that a demo left in `folder`, ready to look at."""
    runs = folder / "runs" / "digits"
    found = {name: sorted((runs / row).glob("*/config.json")) for row, name in NAMES.items()}
    if not all(found.values()):
        raise ValueError(
            f"--model must be a folder that `robust-attention demo` wrote, got {folder}; "
            f"run robust-attention demo --out {folder}"
        )
    twins = {}
    for name, configs in found.items():
        model = load_model(configs[0].parent)
        assert isinstance(model, ViT)
        twins[name] = model
    return twins


def collect(out: Path, cells: list[Cell]) -> dict[str, Any]:
    """Every number of the demo, ready for JSON."""
    config: VisionConfig = cells[0].config
    wanted = {cell.name for cell in cells}
    results = report.load(out, wanted)
    columns = [c for c in results.columns("digits") if c.metric == "accuracy" and report.name_of(c) != _AT_ONE]
    shown = report.table(results, "digits", sorted(columns, key=lambda c: c.condition.startswith("all attacks")))
    by_row = {row["row"]: row["cells"] for row in shown["rows"]}
    records = {record["row"]: record for record in results.records}
    record: dict[str, Any] = {
        "study": "demo",
        "protocol": "pixel",
        **provenance(),
        "baseline": NAMES["vit"],
        "kinds": list(config.evaluation.kinds),
        "shares": list(config.evaluation.shares),
        "table_shares": [share for share in TABLE_SHARES if share in config.evaluation.shares],
        "patch_size": config.model.patch_size,
        "image_size": config.model.image_size,
        "methods": [
            {"name": name, "settings": records[row]["config"]["method"], "seconds": records[row]["seconds"]}
            | {"training": records[row]["training"]}
            for row, name in NAMES.items()
        ],
        "cells": [
            {"method": name, "trial": column, **_kind_of(results, row, column), **by_row[row][column]}
            for row, name in NAMES.items()
            for column in shown["columns"]
            if column in by_row[row]
        ],
        **_weights(out, config, cells[0].labels["seed"]),
    }
    record["notes"] = _notes(record)
    return record


def _kind_of(results: report.Results, row: str, column: str) -> dict[str, Any]:
    """What was done to the images: clean, a kind of contamination, or attack; and how strongly."""
    for (_, of, found), seeds in results.by_key.items():
        if of == row and report.name_of(found) == column:
            settings = next(iter(seeds.values())).settings
            if "share" in settings:
                return {"kind": settings["kind"], "strength": settings["share"]}
            if "eps" in settings:
                return {"kind": "attack", "strength": settings["eps"]}
    return {"kind": "clean", "strength": 0.0}


def _weights(out: Path, config: VisionConfig, seed: int) -> dict[str, Any]:
    """How much each patch counts: over all test images, and on one example."""
    twins, share = load_twins(out), (config.evaluation.shares or (0.2,))[min(1, len(config.evaluation.shares) - 1)]
    test = images_of(config)
    number = torch.arange(min(len(test), config.evaluation.num_clean or len(test)))
    images, labels = test.read(number).float() / 255, test.labels[number]
    ratios: dict[str, dict[str, float]] = {name: {} for name in twins}
    maps: dict[str, Tensor] = {}
    spoilt = {
        kind: contaminate(
            images, kind=kind, share=share, patch_size=config.model.patch_size, generator=Generator().manual_seed(seed)
        )
        for kind in config.evaluation.kinds
    }
    for name, model in twins.items():
        for kind, (worse, hit) in spoilt.items():
            weight = patch_weights(model, worse, draws=40, generator=Generator().manual_seed(seed))
            ratios[name][kind] = (weight[hit].mean() / weight[~hit].mean()).item()
            if kind == EXAMPLE_KIND:
                maps[name] = weight
    # The example is not picked by hand: the first image that every twin reads when it is clean.
    with torch.no_grad():
        readable = torch.stack([model(images).argmax(1) == labels for model in twins.values()]).all(0)
        index = int(readable.byte().argmax())
        worse, hit = spoilt[EXAMPLE_KIND]
        read_as = {name: int(model(worse[index : index + 1]).argmax()) for name, model in twins.items()}
    return {
        "weight_ratio": {"share": share, "of_spoilt_over_clean": ratios},
        "example": {
            "rule": "the first test image that every twin reads when it is clean",
            "index": index,
            "label": int(labels[index]),
            "kind": EXAMPLE_KIND,
            "share": share,
            "clean": images[index, 0].tolist(),
            "spoilt": worse[index, 0].tolist(),
            "hit": hit[index].tolist(),
            "weights": {name: weight[index].tolist() for name, weight in maps.items()},
            "read_as": read_as,
        },
    }


def _notes(record: dict[str, Any]) -> list[str]:
    clean = next(cell for cell in record["cells"] if cell["kind"] == "clean")
    attacked = [cell for cell in record["cells"] if cell["kind"] == "attack"]
    some = f" ({attacked[0]['n']} attacked)" if attacked else ""
    notes = [
        f"Per cent right, ± half a 95 % interval over {clean['n']} images{some}. One training run each: another seed "
        "moves these numbers too.",
        f"▲ better, ▼ worse than {record['baseline']} (paired sign-flip test over images, Holm-corrected, and an "
        "interval without 0); unmarked: no difference detected.",
    ]
    if attacked:
        notes.append(
            f"Attacks move each pixel by at most {radius_name(attacked[0]['strength'])}. transfer: the softmax twin's "
            "adversarial images. all attacks: right under FGSM, PGD, a random search, transfer and, where there are "
            "robust weights, PGD with these held constant."
        )
    for cell in record["cells"]:
        if cell["failed"]:
            notes.append(f"† {cell['method']}, {cell['trial']}: failed {', '.join(cell['failed'])}.")
    return notes


def table(record: dict[str, Any]) -> Table:
    """The record's main numbers, for a terminal."""
    names = [method["name"] for method in record["methods"]]
    cells = {(cell["trial"], cell["method"]): cell for cell in record["cells"]}
    shown = Table(title="Digits read right, %", title_justify="left")
    shown.add_column("", no_wrap=True)
    for name in names:
        shown.add_column(name, justify="right")
    for trial in dict.fromkeys(cell["trial"] for cell in record["cells"]):
        row = [cells.get((trial, name)) for name in names]
        first = next(cell for cell in row if cell is not None)
        if first["kind"] in record["kinds"] and first["strength"] not in record["table_shares"]:
            continue
        name = trial.rsplit(" ", 1)[0] if first["kind"] == "attack" else trial
        if first["kind"] == "attack" and name not in _SHOWN_ATTACKS:
            continue
        shown.add_row(name, *("" if cell is None else _percent(cell) for cell in row))
    return shown


def _percent(cell: dict[str, Any]) -> str:
    mark = {"better": "▲", "worse": "▼"}.get(cell["verdict"] or "", " ")
    half = 50 * (cell["high"] - cell["low"])
    return f"{100 * cell['mean']:.1f}±{half:.1f}{mark}{'†' if cell['failed'] else ''}"
