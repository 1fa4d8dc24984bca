"""One input, tinted by how much each method trusts its parts. Numbers in, PNG or HTML out."""

import html
from pathlib import Path
from typing import Any

_SPOILT = "#cc3377"


def draw_image(found: dict[str, Any], path: Path) -> Path:
    """The picture, and beside it one map a method."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    image, patch = found["image"], found["patch_size"]
    size = len(image)
    side = size // patch
    names = list(found["maps"])
    figure, axes = plt.subplots(1, 1 + len(names), figsize=(3.1 * (1 + len(names)), 3.9), layout="constrained")
    true = "" if found["label"] is None else f": a {found['label']}"
    axes[0].imshow(image, cmap="gray_r", vmin=0, vmax=1, extent=(0, size, size, 0))
    axes[0].set_title(f"input{true}")
    shown = None
    for axis, name in zip(axes[1:], names, strict=True):
        flat = found["maps"][name]
        axis.imshow(image, cmap="gray_r", vmin=0, vmax=1, extent=(0, size, size, 0))
        grid = [flat[row * side : (row + 1) * side] for row in range(side)]
        shown = axis.imshow(grid, cmap="Blues", vmin=0, vmax=2, alpha=0.65, extent=(0, size, size, 0))
        what = "attention of the class token" if name == "softmax" else "weight of each patch"
        axis.set_title(f"{name} reads a {found['read_as'][name]}\n{what}")
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
        for place, hit in enumerate(found["hit"] or []):
            if hit:
                corner = (place % side * patch, place // side * patch)
                axis.add_patch(plt.Rectangle(corner, patch, patch, fill=False, edgecolor=_SPOILT, linewidth=1.5))
    if shown is not None:
        figure.colorbar(shown, ax=axes.tolist(), shrink=0.7, ticks=[0, 1, 2], label="mean 1")
    if found["hit"]:
        figure.supxlabel("framed: overwritten patches", fontsize=9, color=_SPOILT)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def draw_series(found: dict[str, Any], path: Path) -> Path:
    """The channels over time, once a map, each step tinted by what it counts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names, window = list(found["maps"]), found["window"]
    length = len(found["series"])
    figure, axes = plt.subplots(
        len(names), 1, figsize=(11, 1.2 + 2.6 * len(names)), sharex=True, squeeze=False, layout="constrained"
    )
    shown = None
    for axis, name in zip(axes[:, 0], names, strict=True):
        for channel in zip(*found["series"], strict=True):
            axis.plot(range(length), channel, lw=1, color="#222222", alpha=0.75)
        low, high = axis.get_ylim()
        extent = (-0.5, window * len(found["maps"][name]) - 0.5, low, high)
        shown = axis.imshow(
            [found["maps"][name]], cmap="Blues", vmin=0, vmax=2, extent=extent, aspect="auto", alpha=0.8, zorder=0
        )
        axis.set_xlim(-0.5, length - 0.5)
        axis.set_title(name)
    axes[-1, 0].set_xlabel("step")
    true = "" if found["label"] is None else f", labelled {found['label']}"
    figure.suptitle(f"{found['model']}: read as {found['read_as']}{true}")
    if shown is not None:
        figure.colorbar(shown, ax=axes[:, 0].tolist(), ticks=[0, 1, 2], label="mean 1")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return path


def write_text(found: dict[str, Any], path: Path) -> Path:
    """One self-contained page: the text once a method, each word tinted by its weight."""
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>Weights of {html.escape(found['model'])}</title>",
        "<style>body{font:17px/1.9 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;color:#222}",
        "span{padding:.15em .2em;border-radius:.25em}h2{font-size:1rem;margin:1.6rem 0 .2rem}",
        "p.s{color:#666;font-size:.8rem;line-height:1.4;margin:.2rem 0;overflow-wrap:anywhere}</style>",
        f"<h1 style='font-size:1.3rem'>What each method trusts, in {html.escape(found['model'])}</h1>",
        "<p class='s'>Blue counts more than the mean word, red less; a struck word counts less than half. "
        "Hover over a word for its weight (mean 1).</p>",
    ]
    for name, weights in found["maps"].items():
        parts.append(f"<h2>{html.escape(name)}</h2><p class='s'>{html.escape(found['settings'][name])}</p><p>")
        for word, weight in zip(found["words"], weights, strict=True):
            tint = min(abs(weight - 1), 1.0)
            colour = "0,114,178" if weight >= 1 else "213,94,0"
            strike = ";text-decoration:line-through" if weight < 0.5 else ""
            joined = word[2:] if word.startswith("##") else " " + word
            parts.append(
                f"<span style='background:rgba({colour},{tint * 0.7:.2f}){strike}' title='{weight:.2f}'>"
                f"{html.escape(joined)}</span>"
            )
        parts.append("</p>")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts) + "</html>\n", encoding="utf-8")
    return path
