"""The density figure: the true density and four estimates of it from contaminated points. Numbers in, PNG out."""

from pathlib import Path
from typing import Any

TITLES = {
    "truth": "True density",
    "KDE": "KDE",
    "RKDE": "RKDE",
    "SPKDE": "SPKDE",
    "MoM": "MoM",
}


def draw(result: dict[str, Any], path: Path) -> Path:
    """Draw what `robust_attention.density.contaminated_normal` returns."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    errors = result["integrated_squared_error"]
    best = min(errors, key=errors.__getitem__)
    peak = max(max(row) for row in result["surfaces"]["truth"])
    levels = [peak * share for share in (0.01, 0.03, 0.08, 0.2, 0.4, 0.6, 0.8, 1.0)]
    line = result["line"]
    figure, axes = plt.subplots(1, 5, figsize=(17, 4.3), sharex=True, sharey=True, layout="constrained")
    for axis, (name, title) in zip(axes, TITLES.items(), strict=True):
        # Rows of a surface run along x: transpose for matplotlib.
        surface = [list(column) for column in zip(*result["surfaces"][name], strict=True)]
        axis.scatter(*zip(*result["clean"], strict=True), s=3, color="#9a9a9a", alpha=0.35, linewidths=0)
        axis.scatter(*zip(*result["outliers"], strict=True), s=12, color="#d55e00", marker="x", linewidths=0.9)
        axis.contour(line, line, surface, levels=levels, cmap="viridis", linewidths=1.4)
        axis.set_aspect("equal")
        axis.set_xlim(-4, 8)
        axis.set_ylim(-4, 8)
        axis.set_xticks([-4, 0, 4, 8])
        axis.set_yticks([-4, 0, 4, 8])
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
        if name == "truth":
            axis.set_title(f"{title}\n{len(result['clean'])} normal, {len(result['outliers'])} outliers", fontsize=12)
            continue
        change = 100 * (errors[name] / errors["KDE"] - 1)
        note = "" if name == "KDE" else f" ({change:+.0f} %)"
        axis.set_title(
            f"{title}: ISE {errors[name]:.4f}{note}\n"
            f"{100 * result['outlier_mass'][name]:.1f} % of its mass on outliers",
            fontsize=12,
            fontweight="bold" if name == best else "normal",
        )
    figure.suptitle(
        "Density from contaminated points: contours, and integrated squared error (ISE, lower is better)",
        fontsize=13,
        x=0.01,
        ha="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    return path
