"""The studies, by name."""

from robust_attention.recipes import family, han2023_series, han2023_vision, series, vision
from robust_attention.study import cost
from robust_attention.study import series as series_study
from robust_attention.study import vision as vision_study
from robust_attention.study.language_run import LANGUAGE
from robust_attention.study.run import Study

VISION = Study(
    name="vision",
    scales=han2023_vision.SCALES,
    rows=han2023_vision.ROWS,
    variants=family.ROWS,
    seeds=han2023_vision.SEEDS,
    classes=vision.classes,
    work=vision_study.run_cell,
    estimate=cost.estimate,
)
TIMESERIES = Study(
    name="timeseries",
    scales=han2023_series.SCALES,
    rows=han2023_series.ROWS,
    variants={},
    seeds=han2023_series.SEEDS,
    classes=series.classes,
    work=series_study.run_cell,
    under_torchrun=False,
)
STUDIES = {study.name: study for study in (LANGUAGE, TIMESERIES, VISION)}
