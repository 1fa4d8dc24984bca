"""Median of means over blocks of keys: what MoM and FourierMoM share."""

from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._call import Call, log_weight, masked_log_softmax, masked_softmax
from robust_attention.ops._method import Method
from robust_attention.robust.blocks import draw_blocks, lower_median
from robust_attention.typing import Draw


class Drawing(str):
    """The name of a way to draw, which also draws: `method.draw == "bootstrap"`, `method.draw(num_keys)`."""

    method: "BlockMethod"

    def __call__(
        self, num_keys: int, *, generator: torch.Generator | None = None, device: torch.device | None = None
    ) -> Tensor:
        """Integer `[blocks, num_keys]`: how often each block holds each key.

        Args:
            generator: take a fresh seed from this generator; None uses the method's own seed, so that the same
                call gives the same blocks on every device.
        """
        _checks.whole("num_keys", num_keys, least=0)
        seed = self.method.seed
        if generator is not None:
            seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        return self.method.counts(num_keys, seed, device)


class _DrawField:
    """Takes a plain name, gives a `Drawing` that knows its method."""

    def __get__(self, instance: "BlockMethod | None", owner: type) -> Drawing:
        if instance is None:
            return Drawing("bootstrap")  # what dataclasses read as the default
        drawing = Drawing(instance.kind)
        drawing.method = instance
        return drawing

    def __set__(self, instance: "BlockMethod", value: str) -> None:
        _checks.one_of("draw", value, get_args(Draw))
        instance.__dict__["_kind"] = str(value)


@dataclass(frozen=True)
class BlockMethod(Method):
    """Blocks I_1 … I_M of keys; each query attends within the block of its own median density.

        p_l(i) = (1/|I_l|) Σ_{j ∈ I_l ∩ V(i)} κ(q_i, k_j),   l* = lower median over the blocks that see a key

    Block l holds key j `counts[l, j]` times. Ties go to the lower block. Where no block sees a key: plain kernel
    attention over V(i). The choice of the block has no gradient.
    """

    stochastic: ClassVar[bool] = True
    key_tensors: ClassVar[tuple[str, ...]] = ("counts",)
    blocks: int = 5
    """Blocks of keys, drawn once a call and shared by samples, heads and queries."""
    fraction: float = 0.8
    """Keys a block, as a share of all; the paper takes 0.8. A partition ignores it."""
    draw: Any = _DrawField()  # a `Draw` to the constructor, a `Drawing` to who reads it
    """"bootstrap" (with replacement), "subsample" (without; blocks overlap) or "partition" (disjoint blocks)."""
    seed: int = 0
    """Seed of the draw where none is passed in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.whole("blocks", self.blocks, least=1)
        _checks.positive("fraction", self.fraction)
        _checks.whole("seed", self.seed, least=0, most=2**63 - 1)
        if self.draw != "bootstrap" and self.fraction > 1:
            raise ValueError(
                f"fraction must be at most 1 for draw={str(self.draw)!r} (no key twice in a block), "
                f"got {self.fraction!r}; use fraction=1.0 or draw='bootstrap'"
            )

    @property
    def kind(self) -> Draw:
        """The name of the way to draw, as a plain string."""
        name: Draw = self.__dict__["_kind"]
        return name

    def counts(self, num_keys: int, seed: int, device: torch.device | None = None) -> Tensor:
        size = max(1, int(self.fraction * num_keys + 0.5))
        return draw_blocks(num_keys, self.blocks, size, self.kind, seed, device)

    def _counts_of(self, call: Call, counts: Tensor | None) -> Tensor:
        """The counts to use `[M, S]`: those passed in, checked, or the method's own."""
        keys = call.k_BK1SD.shape[-2]
        if counts is None:
            return self.counts(keys, self.seed, call.k_BK1SD.device)
        if counts.dim() != 2 or counts.shape[1] != keys or counts.shape[0] == 0:
            raise ValueError(
                f"counts must be [blocks, S] = [any, {keys}], got {list(counts.shape)}; pass method.draw({keys})"
            )
        if counts.dtype.is_floating_point or counts.dtype.is_complex or counts.dtype == torch.bool:
            raise ValueError(f"counts must be integers, got {counts.dtype}; pass counts.long()")
        if not torch.compiler.is_compiling() and bool((counts < 0).any()):
            raise ValueError(
                f"counts must not be negative, got {int(counts.min())}; pass how often each block holds each key"
            )
        return counts.to(call.k_BK1SD.device)

    def _within_median_block(self, call: Call, logit_BKGTS: Tensor, counts_MS: Tensor) -> Tensor:
        counts = counts_MS.to(logit_BKGTS.dtype)
        with torch.no_grad():
            log_count = log_weight(counts)
            density = [
                masked_log_softmax(logit_BKGTS + block, call.visible_bkgtS)[1].squeeze(-1) for block in log_count
            ]
            sees = [(call.visible_bkgtS & (block > 0)).any(-1).expand_as(density[0]) for block in counts]
            log_size = log_weight(counts.sum(-1))
            chosen_BKGT, any_BKGT = lower_median(torch.stack(density, -1) - log_size, torch.stack(sees, -1))
            in_block = torch.where(any_BKGT[..., None], counts[chosen_BKGT], 1)
        return masked_softmax(logit_BKGTS + log_weight(in_block), call.visible_bkgtS) @ call.v_BK1SE
