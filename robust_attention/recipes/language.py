"""What a cell of the language study is: every setting of its text, its model, its training and its evaluation."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import robust_attention as ra
from robust_attention import _checks
from robust_attention.models.lm import LMConfig
from robust_attention.training.fit import FitConfig

TextSet = Literal["generated", "files"]
Part = Literal["valid", "test"]


@dataclass(frozen=True, kw_only=True)
class TextData:
    """Which texts."""

    name: TextSet
    """generated: made by a small grammar in the package; files: read from `root`."""
    root: str = ""
    """Folder that the files below are in."""
    train: str = ""
    """File to learn from: words apart by spaces, one line a paragraph; `.xz` is unpacked."""
    valid: str = ""
    """File that choices are made on."""
    test: str = ""
    """File that results are for."""
    lines: int = 2000
    """Lines of the generated text to learn from; the other parts have a tenth of them each."""
    tokenizer: str = ""
    """A JSON file of the `tokenizers` library in `root`; empty numbers whole words."""
    min_count: int = 1
    """Words that the training text has less often count as `<unk>`."""
    max_size: int | None = None
    """Most words; None for no limit."""

    def __post_init__(self) -> None:
        _checks.one_of("name", self.name, get_args(TextSet))
        _checks.whole("lines", self.lines, least=10)


@dataclass(frozen=True, kw_only=True)
class LanguageEvaluation:
    """What is tried on a trained model."""

    parts: tuple[Part, ...] = ("valid", "test")
    """Texts that it is scored on."""
    num_tokens: int | None = None
    """First tokens of each text to score; None for all."""
    stride: int = 1
    """Of the sliding window; 1 is the published protocol."""
    batch_size: int = 16
    """Windows at a time."""
    shares: tuple[float, ...] = (0.015, 0.05)
    """Shares of the words that are swapped at random."""
    draws: int = 1
    """Draws of a random method that a loss averages over; the first is the one of its seed."""
    greedy_lines: int = 0
    """First lines of each text that words are swapped in by the greedy attack; 0 leaves it out."""
    greedy_queries: int = 256
    """Its queries a line."""
    blocks: int = 100
    """Runs of consecutive targets whose means are stored for paired tests."""

    def __post_init__(self) -> None:
        for name in ("stride", "batch_size", "draws", "greedy_queries", "blocks"):
            _checks.whole(name, getattr(self, name), least=1)
        _checks.whole("greedy_lines", self.greedy_lines, least=0)
        for part in self.parts:
            _checks.one_of("parts", part, get_args(Part))


@dataclass(frozen=True, kw_only=True)
class LanguageConfig:
    """Everything that one cell does."""

    row: str
    """Its row in the tables."""
    seed: int
    """Initial weights, order of the text, draws, swaps: rows with equal seeds are paired."""
    data: TextData
    """Texts to learn from and to be tried on."""
    model: LMConfig
    """Sizes of the model; `vocab_size` is replaced by what the text has."""
    method: ra.Method | tuple[ra.Method, ...] = field(default_factory=ra.Softmax)
    """Its attention, or one for each block."""
    fit: FitConfig = field(default_factory=FitConfig)
    """How to train; an example is a segment of as many tokens as the context. Its seed is replaced by `seed`."""
    evaluation: LanguageEvaluation = field(default_factory=LanguageEvaluation)
    """What is tried."""


def classes() -> dict[str, type]:
    """What the configuration of a cell may be made of."""
    made = (LanguageConfig, LanguageEvaluation, TextData, LMConfig, FitConfig)
    losses = (ra.Huber, ra.Hampel, ra.Welsch, ra.Tukey)
    return {cls.__name__: cls for cls in (*made, *losses, *ra.methods().values())}
