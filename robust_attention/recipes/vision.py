"""What a cell of the vision study is: every setting of its data, its model, its training and its evaluation."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import robust_attention as ra
from robust_attention import _checks
from robust_attention.data.augment import Augment
from robust_attention.data.contaminate import KINDS, Kind
from robust_attention.data.corruptions import KINDS as CORRUPTION_KINDS
from robust_attention.eval.adversarial import AttackPlan
from robust_attention.models.config import ViTConfig
from robust_attention.models.convnet import ConvNetConfig
from robust_attention.training.fit import FitConfig

Part = Literal["test", "validation"]
ImageSet = Literal["digits", "cifar10", "tiny-imagenet", "imagenet"]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, and how many of them."""

    name: ImageSet
    """digits come with the package; the others are read from `root`."""
    root: str = ""
    """Folder of the image set."""
    size: int
    """Pixels along a side."""
    num_train: int | None = None
    """Images to learn from; None means all but those for validation."""
    validation: float = 0.0
    """Share of every class that is held out of the training set, with a fixed seed; digits have a part of their own."""
    damaged: Literal["fail", "skip"] = "fail"
    """What to do with a file that cannot be decoded; skipped ones are counted in the results."""
    cache: str = ""
    """Folder for decoded images, for sets that memory does not hold."""

    def __post_init__(self) -> None:
        _checks.one_of("name", self.name, get_args(ImageSet))
        _checks.whole("size", self.size, least=1)
        if self.num_train is not None:
            _checks.whole("num_train", self.num_train, least=1)
        if not 0 <= self.validation < 1:
            raise ValueError(f"validation must lie from 0 to below 1, got {self.validation!r}; 0.1 holds out a tenth")
        _checks.one_of("damaged", self.damaged, ("fail", "skip"))


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is tried on a trained model."""

    part: Part = "test"
    """The images it is tried on; choices between settings are made on validation images."""
    num_clean: int | None = None
    """Images for clean accuracy and contamination; None means all."""
    kinds: tuple[Kind, ...] = KINDS
    """Contaminations of single patches."""
    shares: tuple[float, ...] = (0.1, 0.25)
    """Shares of patches to overwrite."""
    corruptions: tuple[str, ...] = ()
    """Kinds of corruption of the whole image, for the mean corruption error."""
    severities: tuple[int, ...] = (1, 2, 3, 4, 5)
    """Their severities."""
    num_corrupted: int | None = None
    """Images that are corrupted; None means all."""
    num_attacked: int | None = None
    """Images that are attacked; None means all, 0 none."""
    plan: AttackPlan = field(default_factory=AttackPlan)
    """The attacks."""
    draws: int = 5
    """Fresh draws that an accuracy of a random method averages over, where it is not attacked."""
    batch_size: int = 250
    """Images at a time; a random method draws once for each batch."""

    def __post_init__(self) -> None:
        _checks.one_of("part", self.part, get_args(Part))
        for kind in self.kinds:
            _checks.one_of("kinds", kind, KINDS)
        for corruption in self.corruptions:
            _checks.one_of("corruptions", corruption, CORRUPTION_KINDS)
        for share in self.shares:
            if not 0 < share <= 1:
                raise ValueError(f"shares must lie above 0 and up to 1, got {share!r}; 0.1 is a tenth of the patches")
        for severity in self.severities:
            _checks.whole("severities", severity, least=1, most=5)
        for name in ("num_clean", "num_corrupted", "num_attacked"):
            if getattr(self, name) is not None:
                _checks.whole(name, getattr(self, name), least=0 if name == "num_attacked" else 2)
        for name in ("draws", "batch_size"):
            _checks.whole(name, getattr(self, name), least=1)


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """Everything that one cell does."""

    row: str
    """Its row in the tables."""
    seed: int
    """Initial weights, order of images, augmentation, draws, attacks: rows with equal seeds are paired."""
    data: DataConfig
    """Images to learn from and to be tried on."""
    model: ViTConfig
    """Sizes of the model."""
    method: ra.Method | tuple[ra.Method, ...] = field(default_factory=ra.Softmax)
    """Its attention, or one for each block."""
    augment: Augment = field(default_factory=Augment)
    """What is done to training images."""
    fit: FitConfig = field(default_factory=FitConfig)
    """How to train; its seed is replaced by `seed`."""
    teacher: ConvNetConfig | None = None
    """A network that is trained first, and whose decisions a distilled model learns too."""
    evaluation: Evaluation = field(default_factory=Evaluation)
    """What is tried."""


def classes() -> dict[str, type]:
    """What the configuration of a cell may be made of."""
    made = (VisionConfig, Evaluation, DataConfig, ViTConfig, ConvNetConfig, Augment, FitConfig, AttackPlan)
    losses = (ra.Huber, ra.Hampel, ra.Welsch, ra.Tukey)
    return {cls.__name__: cls for cls in (*made, *losses, *ra.methods().values())}
