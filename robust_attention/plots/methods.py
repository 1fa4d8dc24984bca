"""One figure a method: how much an outlying key counts as it moves away. Numbers in, PNGs out."""

from pathlib import Path
from typing import Any

from robust_attention.plots.bench import COLOURS

_STYLES = ("-", "--", ":")
_GREY = "#8a8a8a"


def draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Draw what `robust_attention.eval.influence.outlier_shares` returns: `<method>.png` for each method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, labels in record["curves"].items():
        figure, axes = plt.subplots(1, 2, figsize=(6.6, 3.5), sharey=True, layout="constrained")
        _panel(axes[0], record, "keys", labels)
        _panel(axes[1], record, "values", labels)
        axes[0].set_title("the key turned away", loc="left", fontsize=11)
        axes[0].set_xlabel("angle from the other keys")
        axes[0].set_xticks([0, 60, 120, 180], ["0°", "60°", "120°", "180°"])
        axes[0].set_ylabel("share of the output")
        axes[1].set_title("its value moved away", loc="left", fontsize=11)
        axes[1].set_xlabel("offset of the value")
        axes[0].set_ylim(bottom=0)
        axes[0].yaxis.set_major_formatter(lambda y, _: f"{100 * y:.0f} %")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=2, frameon=False)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=130, metadata={"Software": None}, pil_kwargs={"optimize": True})
        plt.close(figure)
    return paths


def _panel(axis: Any, record: dict[str, Any], what: str, labels: list[str]) -> None:
    panel, baseline = record[what], record["baseline"]
    axis.axhline(record["even_share"], color="#cccccc", lw=1, label="an even share")
    if baseline not in labels:
        axis.plot(panel["x"], panel["shares"][baseline], color=_GREY, lw=2, label=baseline)
    for label, style in zip(labels, _STYLES, strict=False):
        colour = _GREY if label == baseline else COLOURS.get(label.split(",")[0], "#7b3294")
        axis.plot(panel["x"], panel["shares"][label], color=colour, ls=style, lw=2.4, label=label)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
