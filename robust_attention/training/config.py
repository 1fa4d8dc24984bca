"""How to train: one frozen record, saved beside the run."""

from dataclasses import dataclass
from typing import Literal, get_args

from robust_attention import _checks

Precision = Literal["float32", "bfloat16"]
Parallel = Literal["auto", "none", "ddp", "fsdp"]

MAY_CHANGE = frozenset(
    {"micro_batch", "compile", "parallel", "save_every", "save_seconds", "keep", "report_every", "validate_every"}
)
"""Fields that a run may be resumed with other values of: they say how it is computed, not what."""


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """How to train."""

    epochs: int = 30
    """Passes over the examples."""
    batch_size: int = 64
    """Examples a step, over all processes together; a last, smaller batch of an epoch is used too."""
    micro_batch: int | None = None
    """Most examples that one process has in flight; gradients are added up to the batch. None: its whole share of the
    batch. Halved by itself when the GPU's memory does not suffice."""
    learning_rate: float = 2e-3
    """Peak of the schedule."""
    final_learning_rate: float = 0.0
    """Where the cosine ends, as a share of the peak."""
    weight_decay: float = 0.05
    """AdamW's, on matrices only."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW's: how long the means of the gradient and of its square remember."""
    warmup: float = 0.1
    """Share of the steps over which the learning rate rises."""
    clip: float | None = 1.0
    """Largest norm of a gradient; None leaves it as it is."""
    ema: float = 0.0
    """Decay per step of the averaged weights, which the model ends with; 0 for none. See `Ema`."""
    precision: Precision = "float32"
    """bfloat16: autocast for the forward pass; parameters, gradients and AdamW stay in float32."""
    compile: bool = False
    """Whether torch.compile speeds up the model."""
    parallel: Parallel = "auto"
    """Among the processes that torchrun started: ddp (each holds the model), fsdp (each holds a part of it), none
    (each trains alone). auto is ddp where there are several."""
    seed: int = 0
    """Fixes the order of the examples, their augmentation, and all that the model draws."""
    save_every: int = 0
    """Steps between checkpoints; 0: at the end, on SIGTERM, and by the clock."""
    save_seconds: float = 600.0
    """Seconds between checkpoints by the clock; 0 for none."""
    keep: int = 2
    """Newest checkpoints that stay."""
    report_every: int = 10
    """Steps between looks at the loss, each of which waits for the GPU: the report, and the check for NaN."""
    validate_every: int = 1
    """Epochs between validations; the last epoch has one anyway."""

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "keep", "report_every", "validate_every"):
            _checks.whole(name, getattr(self, name), least=1)
        for name in ("seed", "save_every"):
            _checks.whole(name, getattr(self, name), least=0)
        if self.micro_batch is not None:
            _checks.whole("micro_batch", self.micro_batch, least=1)
        _checks.positive("clip", self.clip, optional=True)
        for name in ("learning_rate", "weight_decay", "save_seconds"):
            if getattr(self, name) != 0:
                _checks.positive(name, getattr(self, name))
        for name, value in (("final_learning_rate", self.final_learning_rate), ("warmup", self.warmup)):
            if not 0 <= value <= 1:
                raise ValueError(f"{name} must be a share from 0 to 1, got {value!r}; pass for example {name}=0.1")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1, got {self.betas!r}; (0.9, 0.999) is usual")
        if not 0 <= self.ema < 1:
            raise ValueError(f"ema must lie from 0 to below 1, got {self.ema!r}; 0.999 is usual, 0 turns it off")
        if not isinstance(self.compile, bool):
            raise ValueError(f"compile must be True or False, got {self.compile!r}; pass compile=True")
        _checks.one_of("precision", self.precision, get_args(Precision))
        _checks.one_of("parallel", self.parallel, get_args(Parallel))
