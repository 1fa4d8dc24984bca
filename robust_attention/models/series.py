"""A transformer that classifies time series, with any attention of the registry, written to be read top to bottom."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Generator, Tensor, nn

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.models._blocks import given_to, one_for_each
from robust_attention.nn import Attention
from robust_attention.ops import Method

Pool = Literal["flatten", "mean"]
_norm = partial(nn.LayerNorm, eps=1e-5)


@dataclass(frozen=True, kw_only=True)
class SeriesTransformerConfig:
    """Sizes of the model; those of the layers are the published ones."""

    channels: int = 1
    """Channels of a series."""
    length: int = 64
    """Most tokens."""
    num_classes: int = 2
    """Width of the logits."""
    window: int = 1
    """Consecutive steps whose mean is one token; more than 1 shortens very long series."""
    dim: int = 512
    """Width of a token."""
    depth: int = 2
    """Blocks."""
    num_heads: int = 8
    """Attention heads; divides `dim`."""
    hidden: int = 2048
    """Width of a block's hidden layer."""
    dropout: float = 0.1
    """Share of numbers zeroed in training, after the embedding, in every branch and before the classifier."""
    pool: Pool = "flatten"
    """What the classifier reads: all tokens side by side, as published, or their mean."""

    def __post_init__(self) -> None:
        for name in ("channels", "length", "num_classes", "window", "dim", "depth", "num_heads", "hidden"):
            _checks.whole(name, getattr(self, name), least=1)
        _checks.one_of("pool", self.pool, get_args(Pool))
        if self.dim % self.num_heads:
            raise ValueError(
                f"num_heads must divide dim = {self.dim}, got {self.num_heads}; choose another number of heads"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie from 0 to below 1, got {self.dropout}; 0.1 is usual")


class Seen(NamedTuple):
    """What one block's attention looks at: `[B, H, L, D]` each, and `[B, 1, 1, L]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor


class SeriesBlock(nn.Module):
    """Attention, then two layers on each token; the sum of a branch and the stream is normalised."""

    def __init__(self, config: SeriesTransformerConfig, method: Method) -> None:
        super().__init__()
        self.attn = Attention(config.dim, config.num_heads, method=method, max_len=config.length)
        self.norm1 = _norm(config.dim)
        self.fc1 = nn.Linear(config.dim, config.hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(config.hidden, config.dim)
        self.norm2 = _norm(config.dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BLC: Tensor, mask_B11L: Tensor) -> Tensor:
        x_BLC = self.norm1(x_BLC + self.drop(self.attn(x_BLC, attn_mask=mask_B11L)))
        branch = self.fc2(self.drop(self.act(self.fc1(x_BLC))))
        out: Tensor = self.norm2(x_BLC + self.drop(branch))
        return out


class SeriesTransformer(nn.Module):
    """A transformer over the steps of a series.

        series [B, L, C], mask [B, L]  ->  logits [B, num_classes]

    Standardisation is inside, by `standardise`; a channel of standard deviation 0 reads 0. Hidden steps take no part,
    whatever their values: every batch is padded to the model's own length, so that what a series gives is a function
    of its visible steps alone. That holds for methods that draw blocks of keys too, whose draw depends on the number of
    keys, padding included: blocks are drawn over all `length` places, and those that hold no visible step of a series
    have no vote in its median.

    Args:
        config: sizes.
        method: the attention of every block, or one method for each.
    Random streams: building takes nothing from the global one. Weights come from `init_weights`, draws of a random
        method from `robust_attention.nn.set_draws`, dropout from PyTorch's global stream.
    Reference: Zerveas et al., 2021, with the layers of Wu et al.'s Flowformer (2022), which the paper's table adapts:
        learnt positions, norms after the sums, GELU before a classifier that reads all tokens side by side.
    Departs: padding is hidden inside attention (Flowformer lets tokens attend to it); the embedding is not multiplied
        by √dim, but drawn so that tokens start with variance 1; weights have variance 1/fan-in.
    """

    channel_mean: Tensor
    channel_scale: Tensor

    def __init__(self, config: SeriesTransformerConfig, method: Method | Sequence[Method]) -> None:
        super().__init__()
        methods = one_for_each(method, config.depth)
        self.config = config
        # PyTorch's layers draw weights from the global stream as they are made; ours are drawn anew below.
        with torch.random.fork_rng(devices=[]):
            self.embed = nn.Linear(config.channels, config.dim)
            self.pos_embed = nn.Parameter(torch.empty(1, config.length, config.dim))
            self.blocks = nn.ModuleList(SeriesBlock(config, each) for each in methods)
            self.norm = _norm(config.dim)
            self.act = nn.GELU()
            self.drop = nn.Dropout(config.dropout)
            read = config.dim * (config.length if config.pool == "flatten" else 1)
            self.head = nn.Linear(read, config.num_classes)
        self.register_buffer("channel_mean", torch.zeros(config.channels))
        self.register_buffer("channel_scale", torch.ones(config.channels))
        self.init_weights(Generator().manual_seed(0))

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each block."""
        return [block.attn for block in self.blocks]  # type: ignore[misc]

    @torch.no_grad()
    def standardise(self, mean: Tensor, std: Tensor) -> None:
        """Read every channel as (value − mean)/std from now on, `[C]` each; as 0 where std is 0."""
        self.channel_mean.copy_(mean)
        self.channel_scale.copy_(torch.where(std > 0, 1 / torch.where(std > 0, std, 1), 0))

    def forward(self, series: Tensor, mask: Tensor | None = None) -> Tensor:
        """Classify `[B, L, C]`; `mask` `[B, L]` is True where there is a step, None where there is one everywhere."""
        x_BLC, mask_BL = self.tokens(series, mask)
        hide = mask_BL[:, None, None]
        for block in self.blocks:
            x_BLC = block(x_BLC, hide)
        x_BLC = self.drop(self.act(self.norm(x_BLC))).masked_fill(~mask_BL[..., None], 0)
        if self.config.pool == "flatten":
            logits: Tensor = self.head(x_BLC.flatten(1))
        else:
            logits = self.head(x_BLC.sum(1) / mask_BL.sum(1, keepdim=True).clamp(min=1))
        return logits

    def tokens(self, series: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Standardised, padded to the model's length, averaged over windows, embedded: `[B, length, dim]`, its mask."""
        config = self.config
        steps = config.length * config.window
        mask = series.new_ones(series.shape[:2], dtype=torch.bool) if mask is None else mask
        _check(series, mask, config.channels, steps)
        missing = steps - series.shape[1]
        seen = nn.functional.pad(mask, (0, missing)).unflatten(1, (config.length, config.window))
        # Hidden values are forgotten before anything is computed with them: they may be NaN.
        x = torch.where(mask[..., None], series.to(self.channel_mean.dtype) - self.channel_mean, 0)
        x = nn.functional.pad(x * self.channel_scale, (0, 0, 0, missing)).unflatten(1, seen.shape[1:])
        x = x.sum(2) / seen.sum(2).clamp(min=1)[..., None]
        tokens: Tensor = self.drop(self.embed(x) + self.pos_embed)
        return tokens, seen.any(2)

    def projections(self, series: Tensor, mask: Tensor | None = None) -> list[Seen]:
        """What each block's attention sees, for looking at the weights that steps get."""
        seen = given_to((attention.attend for attention in self.attentions), lambda: self(series, mask))
        return [Seen(*given[:4]) for given in seen]

    @torch.no_grad()
    def init_weights(self, generator: Generator) -> None:
        """Draw every weight from `generator`: models of one config get equal weights, whatever their methods."""
        for name, parameter in self.named_parameters():
            if ".attend." in name:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                std = 0.02 if name == "pos_embed" else math.prod(parameter.shape[1:]) ** -0.5
                drawn = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(drawn.normal_(std=std, generator=generator))
        number = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        config = self.config
        for place, attention in enumerate(self.attentions):
            attend, own = attention.attend, Generator().manual_seed(mix(number, "block", place))
            width = config.dim // config.num_heads
            made = attend.method.initial_tensors(config.num_heads, width, config.length, config.length, own)
            for name in attend.owned:
                getattr(attend, name).copy_(made[name])


def _check(series: Tensor, mask: Tensor, channels: int, steps: int) -> None:
    if series.dim() != 3 or series.shape[2] != channels or not series.is_floating_point():
        raise ValueError(
            f"series must be floating-point [B, L, C] with C = {channels}, got {series.dtype} {list(series.shape)}; "
            "put the channels last"
        )
    if series.shape[1] > steps:
        raise ValueError(
            f"series must not be longer than the model's {steps} steps, got {series.shape[1]}; cut them, or build the "
            "model with a larger length or window"
        )
    if mask.shape != series.shape[:2] or mask.dtype != torch.bool:
        raise ValueError(
            f"mask must be boolean [B, L] = {list(series.shape[:2])}, True where there is a step, got {mask.dtype} "
            f"{list(mask.shape)}"
        )
