"""The demo's picture, drawn from the demo's JSON alone."""

import json
from pathlib import Path
from typing import Any

# Okabe and Ito's palette: told apart by colour-blind readers too. The baseline is grey.
COLOURS = {"softmax": "#555555", "KDE": "#56b4e9", "RKDE": "#0072b2", "SPKDE": "#d55e00", "MoM": "#009e73"}
KIND_TITLES = {
    "noise": "noise",
    "flat": "a random grey",
    "foreign": "patches of other digits",
}
_SPOILT = "#cc3377"


def draw(source: Path, path: Path) -> Path:
    """Above: accuracy against the share of spoilt patches. Below: one digit, and how much each patch of it counts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    record = json.loads(source.read_text(encoding="utf-8"))
    kinds = [kind for kind in record["kinds"] if any(cell["kind"] == kind for cell in record["cells"])]
    names = [method["name"] for method in record["methods"]]
    figure = plt.figure(figsize=(13, 7.6), layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    above, below = halves
    above.suptitle("Digits read right, when a share of their patches is overwritten", fontsize=14, fontweight="bold")
    for axis, kind in zip(above.subplots(1, len(kinds), sharey=True, squeeze=False)[0], kinds, strict=True):
        _curves(axis, record, kind, names)
    above.axes[0].set_ylabel("right, %")
    above.axes[-1].legend(frameon=False, loc="upper right", ncols=2)
    share = record["weight_ratio"]["share"]
    below.suptitle(
        f"How much each patch counts (first layer): a digit with {share:.0%} of its patches overwritten",
        fontsize=14,
        fontweight="bold",
    )
    _patches(below, record, [name for name in names if name not in ("softmax", "KDE")])
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def _curves(axis: Any, record: dict[str, Any], kind: str, names: list[str]) -> None:
    for name in names:
        cells = [c for c in record["cells"] if c["method"] == name and (c["kind"] == kind or c["trial"] == "clean")]
        cells.sort(key=lambda cell: cell["strength"])
        x = [100 * cell["strength"] for cell in cells]
        y = [100 * cell["mean"] for cell in cells]
        axis.plot(x, y, marker="o", ms=4, lw=2, color=COLOURS.get(name), label=name)
        if name == record["baseline"]:
            low, high = ([100 * cell[end] for cell in cells] for end in ("low", "high"))
            axis.fill_between(x, low, high, color=COLOURS.get(name), alpha=0.15, lw=0)
    axis.set_title(f"by {KIND_TITLES.get(kind, kind)}")
    axis.set_xlabel("patches overwritten, %")
    axis.set_xticks([100 * share for share in (0.0, *record["shares"])])
    axis.grid(axis="y", alpha=0.3)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _patches(figure: Any, record: dict[str, Any], weighted: list[str]) -> None:
    example = record["example"]
    side, patch = record["image_size"] // record["patch_size"], record["patch_size"]
    axes = figure.subplots(1, 2 + len(weighted), squeeze=False)[0]
    axes[0].imshow(example["clean"], cmap="gray_r", vmin=0, vmax=1)
    axes[0].set_title(f"clean: a {example['label']}")
    axes[1].imshow(example["spoilt"], cmap="gray_r", vmin=0, vmax=1)
    axes[1].set_title(f"overwritten by {KIND_TITLES.get(example['kind'], example['kind'])}")
    ratios = record["weight_ratio"]["of_spoilt_over_clean"]
    shown = None
    for axis, name in zip(axes[2:], weighted, strict=True):
        flat = example["weights"][name]
        grid = [flat[row * side : (row + 1) * side] for row in range(side)]
        shown = axis.imshow(grid, cmap="Blues", vmin=0, vmax=2, extent=(0, side * patch, side * patch, 0))
        ratio = ratios[name][example["kind"]]
        axis.set_title(f"{name}: a spoilt patch counts\n{100 * ratio:.0f} % of a clean one", color=COLOURS.get(name))
    for number, axis in enumerate(axes):
        axis.set_xticks([])
        axis.set_yticks([])
        offset = -0.5 if number < 2 else 0
        for place, hit in enumerate(example["hit"]):
            if hit and number > 0:
                corner = (place % side * patch + offset, place // side * patch + offset)
                axis.add_patch(_square(corner, patch))
    if shown is not None:
        bar = figure.colorbar(shown, ax=axes[2:].tolist(), shrink=0.7, ticks=[0, 1, 2])
        bar.set_label("weight (mean 1)")


def _square(corner: tuple[float, float], size: float) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle(corner, size, size, fill=False, edgecolor=_SPOILT, linewidth=1.6)
