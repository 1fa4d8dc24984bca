"""What a cell of the time-series study is: every setting of its data, its model, its training and its evaluation."""

from dataclasses import dataclass, field
from typing import Literal

import robust_attention as ra
from robust_attention import _checks
from robust_attention.data.series_contaminate import KINDS, Kind
from robust_attention.data.ts import Missing
from robust_attention.models.series import SeriesTransformerConfig
from robust_attention.training.config import FitConfig


@dataclass(frozen=True, kw_only=True)
class SeriesData:
    """Which problem, and how it is cut."""

    name: str
    """A problem of the archive, or sines, which comes with the package."""
    root: str = ""
    """Folder that holds NAME/NAME_TRAIN.ts."""
    missing: Missing = "fail"
    """What to do with missing values."""
    validation: float = 0.2
    """Share of every class of the training series that chooses the epoch, cut by the seed."""
    folds: int = 0
    """Cross-validate on the TRAIN file with so many folds, cut by the seed; 0 tests on the TEST file."""
    max_tokens: int | None = None
    """Longer series are averaged over windows of consecutive steps, the smallest that do; None leaves them."""

    def __post_init__(self) -> None:
        _checks.whole("folds", self.folds, least=0)
        if self.folds == 1:
            raise ValueError("folds must be 0 or at least 2, got 1; 5 is usual")
        if not 0 < self.validation < 1:
            raise ValueError(f"validation must lie between 0 and 1, got {self.validation}; 0.2 is usual")
        if self.max_tokens is not None:
            _checks.whole("max_tokens", self.max_tokens, least=1)


@dataclass(frozen=True, kw_only=True)
class SeriesEvaluation:
    """What is tried on a trained model."""

    part: Literal["test", "validation"] = "test"
    """The series it is tried on; choices between settings are made on validation series."""
    kinds: tuple[Kind, ...] = KINDS
    """Contaminations."""
    shares: tuple[float, ...] = (0.1, 0.2)
    """Shares of steps or channels that are hit."""
    size: float = 5.0
    """Standard deviations of a spike and of a noisy channel."""
    draws: int = 5
    """Fresh draws that the accuracy of a random method averages over."""
    batch_size: int = 64
    """Series at a time; a random method draws once for each batch."""


@dataclass(frozen=True, kw_only=True)
class SeriesConfig:
    """Everything that one cell does."""

    row: str
    """Its row in the tables."""
    seed: int
    """Cuts, initial weights, order of series, draws, contamination: rows with equal seeds are paired."""
    data: SeriesData
    """Series to learn from and to be tried on."""
    model: SeriesTransformerConfig = field(default_factory=SeriesTransformerConfig)
    """Sizes of the layers; channels, length, window and classes are replaced by those of the data."""
    method: ra.Method | tuple[ra.Method, ...] = field(default_factory=ra.Softmax)
    """Its attention, or one for each block."""
    fit: FitConfig = field(default_factory=FitConfig)
    """How to train; its seed is replaced by `seed`."""
    label_smoothing: float = 0.0
    """Share of every target that is spread over all classes."""
    evaluation: SeriesEvaluation = field(default_factory=SeriesEvaluation)
    """What is tried."""
    keep_weights: bool = True
    """Whether the weights stay on disk when the cell is done; the training checkpoints go in any case."""


def classes() -> dict[str, type]:
    """What the configuration of a cell may be made of."""
    made = (SeriesConfig, SeriesEvaluation, SeriesData, SeriesTransformerConfig, FitConfig)
    losses = (ra.Huber, ra.Hampel, ra.Welsch, ra.Tukey)
    return {cls.__name__: cls for cls in (*made, *losses, *ra.methods().values())}
