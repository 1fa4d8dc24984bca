"""RKDE attention: keys and values far from the others in the kernel's Hilbert space count less."""

from dataclasses import dataclass
from typing import ClassVar, Self

from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._method import register
from robust_attention.ops._weighted import WeightedKernel
from robust_attention.robust.kirwls import kirwls
from robust_attention.robust.losses import Hampel, Huber, Loss, Tukey, Welsch

PAPER_LOSS = Huber(0.2)


@register("rkde")
@dataclass(frozen=True)
class RKDE(WeightedKernel[None]):
    """Eq. 11 with weights from sweeps of KIRWLS, started from uniform weights on the visible keys.

        r_j = Σ_m ω_m G_mj,  c = Σ_m ω_m r_m,  d_j = sqrt(1 − 2r_j + c),  ω_j ← ψ(d_j) / Σ_m ψ(d_m)

    Reference: eq. 5, 11 and B.2 of the paper; Kim and Scott, 2012.
    Departs: where every ψ is 0 the weights are uniform (the paper does not say). The released code has another sign
        in d_j, and so weights outliers up; the equations are what is implemented.
    """

    equation: ClassVar[str] = "eq. 5, 11"
    summary: ClassVar[str] = "outliers weighted down by a robust loss (KIRWLS)"
    formula: ClassVar[str] = "Σ_j ωᴶ_j κ(q_i,k̂_j) v_j / Σ_j ωᴹ_j κ(q_i,k̂_j), ω from KIRWLS"

    loss: Loss = PAPER_LOSS
    """Huber, Hampel, Welsch or Tukey, with its threshold a."""
    sweeps: int = 1
    """Sweeps of KIRWLS; the paper takes one. 0 is plain kernel attention."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.loss, Loss):
            raise ValueError(
                f"loss must be Huber, Hampel, Welsch or Tukey, got {self.loss!r}; pass for example loss=Huber(a=0.2)"
            )
        _checks.whole("sweeps", self.sweeps, least=0)

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        return (
            cls(),
            cls(loss=Hampel(0.2)),
            cls(loss=Welsch(0.5), sweeps=2),
            cls(loss=Tukey(0.8), sweeps=3),
            cls(loss=Huber(0.3), weight_bandwidth=0.7, value_bandwidth=3.0, bandwidth=1.5),
        )

    def _solve(self, gram: Tensor, visible: Tensor, prefixes: bool) -> tuple[Tensor, None]:
        return kirwls(gram, visible, self.loss, self.sweeps), None

    def density_weights(self, gram: Tensor) -> Tensor:
        """Weights of the N points of a Gram `[N, N]`."""
        return kirwls(gram, gram.new_ones(1, gram.shape[-1]).bool(), self.loss, self.sweeps)[0]
