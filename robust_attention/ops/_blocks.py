"""Median of means over blocks of keys: what MoM and FourierMoM share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from robust_attention import _checks
from robust_attention.ops._cache import Cache
from robust_attention.ops._call import Call, in_rows, log_weight, masked_log_softmax, masked_softmax
from robust_attention.ops._method import Method
from robust_attention.robust.blocks import draw_blocks, lower_median, poisson_blocks
from robust_attention.typing import Draw

_VANISHING = 1e-20  # a block's share of a query's largest term, below which it is looked at more closely


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
        if generator is not None and not isinstance(generator, torch.Generator):
            raise ValueError(
                f"generator must be a torch.Generator, got {generator!r}; pass torch.Generator().manual_seed(0)"
            )
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
    """"bootstrap" (with replacement), "subsample" (without; blocks overlap), "partition" (disjoint blocks) or "poisson"
    (each count on its own, with mean `fraction`: a longer sequence keeps the blocks of its prefix, as decoding needs;
    |I_l| is then the expected size)."""
    seed: int = 0
    """Seed of the draw where none is passed in."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _checks.whole("blocks", self.blocks, least=1)
        _checks.positive("fraction", self.fraction)
        _checks.whole("seed", self.seed, least=0, most=2**63 - 1)
        if self.draw in ("subsample", "partition") and self.fraction > 1:
            raise ValueError(
                f"fraction must be at most 1 for draw={str(self.draw)!r} (no key twice in a block), "
                f"got {self.fraction!r}; use fraction=1.0 or draw='bootstrap'"
            )

    @property
    def kind(self) -> Draw:
        """The name of the way to draw, as a plain string."""
        name: Draw = self.__dict__["_kind"]
        return name

    def counts(self, num_keys: int, seed: int | Tensor, device: torch.device | None = None) -> Tensor:
        if self.kind == "poisson":
            return poisson_blocks(num_keys, self.blocks, self.fraction, seed, device)
        size = max(1, int(self.fraction * num_keys + 0.5))
        return draw_blocks(num_keys, self.blocks, size, self.kind, seed, device)

    def _checked_counts(self, counts: Tensor | None, keys: int, device: torch.device) -> Tensor:
        """The counts to use `[M, S]`: those passed in, checked, or the method's own."""
        if counts is None:
            return self.counts(keys, self.seed, device)
        _checks.tensor("counts", counts)
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
        return counts.to(device)

    def _within_median_block(self, call: Call, logit: Callable[[Call], Tensor], counts: Tensor | None) -> Tensor:
        """Attend within each query's median block; `logit` gives log κ `[B, K, G, T, S]`."""
        counts_MS = self._checked_counts(counts, call.k_BK1SD.shape[-2], call.k_BK1SD.device)
        return _attend_in_blocks(call, logit(call), counts_MS, self._log_size(counts_MS).to(call.q_BKGTD.dtype))

    def _within_median_block_in_rows(
        self, call: Call, logit: Callable[[Call], Tensor], counts: Tensor | None, *, bounded: bool
    ) -> Tensor:
        """The same, chunks of queries one after the other: no tensor of the size T·S.

        `bounded` promises that logits of one query rarely differ by more than an exponential can hold.
        """
        counts_MS = self._checked_counts(counts, call.k_BK1SD.shape[-2], call.k_BK1SD.device)
        log_size_M = self._log_size(counts_MS).to(call.q_BKGTD.dtype)
        attend = _attend_in_bounded_blocks if bounded else _attend_in_blocks
        return in_rows(lambda rows: attend(rows, logit(rows), counts_MS[:, : rows.k_BK1SD.shape[-2]], log_size_M))(call)

    def _decode(
        self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, padding: Tensor | None, past: int, **owned: Any
    ) -> Tensor:
        if self.kind != "poisson":
            raise ValueError(
                f'decoding needs draw="poisson", whose blocks of a prefix do not depend on what follows, '
                f"got draw={str(self.draw)!r}; use dataclasses.replace(method, draw='poisson')"
            )
        return super()._decode(q, k, v, cache, padding, past, **owned)

    def _log_size(self, counts_MS: Tensor) -> Tensor:
        """log |I_l|. For "poisson" the expected size, the same for all: it must not depend on keys to come."""
        if self.kind == "poisson":
            return torch.zeros(len(counts_MS), device=counts_MS.device)
        return log_weight(counts_MS.sum(-1).double())


def _attend_in_blocks(call: Call, logit_BKGTS: Tensor, counts_MS: Tensor, log_size_M: Tensor) -> Tensor:
    counts, visible = counts_MS.to(logit_BKGTS.dtype), call.visible_bkgtS
    with torch.no_grad():
        log_count = log_weight(counts)
        density = [masked_log_softmax(logit_BKGTS + block, visible)[1].squeeze(-1) for block in log_count]
        sees = [(visible & (block > 0)).any(-1).expand_as(density[0]) for block in counts]
        chosen_BKGT, any_BKGT = lower_median(torch.stack(density, -1) - log_size_M, torch.stack(sees, -1))
        in_block = torch.where(any_BKGT[..., None], counts[chosen_BKGT], 1)
    return masked_softmax(logit_BKGTS + log_weight(in_block), visible) @ call.v_BK1SE


def _attend_in_bounded_blocks(call: Call, logit_BKGTS: Tensor, counts_MS: Tensor, log_size_M: Tensor) -> Tensor:
    """`_attend_in_blocks` with one exponential a score; queries with a block that vanishes take the long way."""
    counts, visible = counts_MS.to(logit_BKGTS.dtype), call.visible_bkgtS
    held = torch.where(visible, logit_BKGTS, -torch.inf)
    top = held.amax(-1, keepdim=True)
    p = torch.exp(held - torch.where(top > -torch.inf, top, 0))
    density = p @ counts.mT
    sees = (visible.to(counts.dtype) @ counts.mT > 0).expand_as(density)
    chosen, any_sees = lower_median(density.log() - log_size_M, sees)
    p = p * torch.where(any_sees[..., None], counts[chosen], 1)
    total = p.sum(-1, keepdim=True)
    out = p @ call.v_BK1SE / torch.where(total > 0, total, 1)
    weak = (sees & (density < _VANISHING)).any(-1, keepdim=True)
    if bool(weak.any()):
        out = torch.where(weak, _attend_in_blocks(call, logit_BKGTS, counts_MS, log_size_M), out)
    return out
