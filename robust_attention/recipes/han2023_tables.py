"""Numbers that the paper prints for images, in per cent: Table 2 (attacks) and Table 3 (benchmarks), ImageNet."""

ROWS = (
    "vit",
    "deit",
    "rvt",
    "fourierformer",
    "rkde-huber",
    "rkde-hampel",
    "spkde",
    "mom",
    "fourierformer-mom",
)

TABLE_2: dict[str, tuple[float, ...]] = {
    "clean, top 1": (72.23, 74.32, 74.37, 73.25, 72.83, 72.94, 73.22, 71.94, 72.58),
    "clean, top 5": (91.13, 93.72, 93.89, 91.66, 91.44, 91.63, 91.95, 91.08, 91.34),
    "FGSM, top 1": (52.61, 53.24, 53.67, 53.08, 55.83, 55.92, 56.03, 55.76, 53.25),
    "FGSM, top 5": (82.26, 84.07, 84.11, 83.95, 85.89, 85.97, 86.12, 85.23, 84.12),
    "PGD, top 1": (41.84, 41.72, 43.39, 41.34, 44.15, 44.23, 44.51, 43.78, 41.38),
    "PGD, top 5": (76.49, 76.43, 77.26, 76.19, 79.06, 79.16, 79.47, 78.85, 76.41),
    "SPSA, top 1": (48.34, 49.56, 51.43, 48.79, 52.42, 52.48, 52.64, 49.38, 48.82),
    "SPSA, top 5": (79.36, 80.14, 80.98, 79.57, 82.03, 82.07, 82.33, 80.02, 79.68),
}
"""FGSM, PGD and SPSA at eps = 1/255."""

TABLE_3: dict[str, tuple[float, ...]] = {
    "ImageNet-C, mCE": (71.14, 70.26, 68.57, 71.07, 68.69, 68.55, 68.34, 69.11, 70.62),
    "ImageNet-A, top 1": (0.18, 0.73, 9.45, 0.69, 6.98, 6.34, 8.29, 2.29, 2.42),
    "ImageNet-O, AUPR": (18.31, 19.56, 22.14, 18.47, 25.61, 26.14, 28.42, 28.08, 28.86),
    "ImageNet-R, error": (96.89, 94.23, 63.12, 94.15, 64.33, 62.16, 61.39, 76.44, 74.15),
    "ImageNet-Sketch, top 1": (37.13, 41.68, 50.07, 38.36, 45.63, 45.76, 50.13, 36.92, 39.44),
}
"""mCE is relative to AlexNet; lower is better for mCE and error."""


def number(table: dict[str, tuple[float, ...]], column: str, row: str) -> float | None:
    """The paper's number, None for a row that the paper does not have."""
    return table[column][ROWS.index(row)] if row in ROWS else None
