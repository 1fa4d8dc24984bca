"""A causal transformer over words (pre-norm), to read from top to bottom; its attention is one of our methods."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from robust_attention import _checks
from robust_attention._seeds import mix
from robust_attention.models._blocks import given_to, one_for_each
from robust_attention.models._next_word import next_word_losses
from robust_attention.models.vit import Projected
from robust_attention.nn import Attention
from robust_attention.ops import Method
from robust_attention.ops._blocks import BlockMethod
from robust_attention.ops._cache import Cache


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """Sizes of a language model. The defaults are the paper's small one, but for the vocabulary."""

    vocab_size: int = 256
    """Words."""
    context: int = 256
    """Most tokens that the model sees at once."""
    dim: int = 128
    """Width of a token."""
    depth: int = 16
    """Blocks."""
    num_heads: int = 8
    """Attention heads; divides `dim`."""
    hidden: int = 2048
    """Width of a block's hidden layer."""
    dropout: float = 0.1
    """Share of numbers zeroed in training, after the embedding and in every branch."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "context", "dim", "depth", "num_heads", "hidden"):
            _checks.whole(name, getattr(self, name), least=1)
        if self.dim % self.num_heads or self.dim % 2:
            raise ValueError(
                f"dim must be even and divisible by num_heads = {self.num_heads}, got {self.dim}; choose another"
            )
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie from 0 to below 1, got {self.dropout}; 0.1 is usual")


def lm_small(**overrides: Any) -> LMConfig:
    """16 layers of width 128 with a context of 256; 44 M parameters with WikiText-103's words, 10 M without."""
    return LMConfig(**overrides)


def lm_medium(**overrides: Any) -> LMConfig:
    """16 layers of width 256 with a context of 384; 90 M parameters with WikiText-103's words, 21 M without."""
    return LMConfig(**{"dim": 256, "context": 384, **overrides})


class Past(NamedTuple):
    """What one block remembers of earlier tokens while decoding."""

    k: Tensor | None
    v: Tensor | None
    cache: Cache


class Block(nn.Module):
    """Attention, then two layers on each token; both see normalised tokens and add to the stream."""

    def __init__(self, config: LMConfig, method: Method) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.dim)
        self.attn = Attention(
            config.dim, config.num_heads, method=method, qkv_bias=False, proj_bias=False, max_len=config.context
        )
        self.norm2 = nn.LayerNorm(config.dim)
        self.fc1 = nn.Linear(config.dim, config.hidden)
        self.fc2 = nn.Linear(config.hidden, config.dim)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self._rest(x_BTC, self.attn(self.norm1(x_BTC), is_causal=True))

    def decode(self, x_BTC: Tensor, past: Past) -> tuple[Tensor, Past]:
        """`forward` for the newest tokens alone."""
        attn = self.attn
        q, k, v = attn.qkv(self.norm1(x_BTC)).unflatten(-1, (3, attn.num_heads, -1)).permute(2, 0, 3, 1, 4)
        if past.k is not None and past.v is not None:
            k, v = torch.cat((past.k, k), 2), torch.cat((past.v, v), 2)
        out = attn.attend.decode(q, k, v, past.cache)
        return self._rest(x_BTC, attn.proj(out.transpose(1, 2).flatten(2))), Past(k, v, past.cache)

    def _rest(self, x_BTC: Tensor, attended_BTC: Tensor) -> Tensor:
        x_BTC = x_BTC + self.drop(attended_BTC)
        return x_BTC + self.drop(self.fc2(self.drop(F.relu(self.fc1(self.norm2(x_BTC))))))


class LanguageModel(nn.Module):
    """A causal language model with robust attention: `tokens [B, T] -> logits [B, T, V]` of the next token.

    The output's matrix is the embedding's, with a bias of its own. Positions are fixed sines and cosines, as in the
    source of the paper's models, so there is nothing to learn for them.

    Args:
        config: sizes.
        method: the attention of every block, or one method for each.
    Causality: no output depends on a later token, not even through robust weights or through the choice of a block,
        and its gradient with respect to one is exactly 0. Blocks of MoM and FourierMoM must not depend on how long the
        sequence is: use draw="poisson". Other draws are made for the whole context, to which shorter inputs are
        padded on the right.
    Random streams: building takes nothing from the global one. Weights come from `init_weights`, draws of a random
        method from `robust_attention.nn.draws.set_draws`, dropout from PyTorch's global stream.
    Departs: pre-norm, the exact softmax (the source's is adaptive), and first weights scaled by their fan-in.
    """

    positions: Tensor

    def __init__(self, config: LMConfig, method: Method | Sequence[Method]) -> None:
        super().__init__()
        methods = one_for_each(method, config.depth)
        self.config = config
        # PyTorch's layers draw weights from the global stream as they are made; ours are drawn anew below.
        with torch.random.fork_rng(devices=[]):
            self.embed = nn.Embedding(config.vocab_size, config.dim)
            self.drop = nn.Dropout(config.dropout)
            self.blocks = nn.ModuleList(Block(config, method) for method in methods)
            self.norm = nn.LayerNorm(config.dim)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.register_buffer("positions", _sinusoids(config.context, config.dim), persistent=False)
        self.whole_only = any(isinstance(m, BlockMethod) and m.kind != "poisson" for m in methods)
        self.init_weights(Generator().manual_seed(0))

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each block."""
        return [cast(Block, block).attn for block in self.blocks]

    @property
    def methods(self) -> tuple[Method, ...]:
        """The method of each block, as it attends now."""
        return tuple(attention.attend.method for attention in self.attentions)

    def forward(self, tokens: Tensor, targets: Tensor | None = None, last: int | None = None) -> Tensor:
        """Logits `[B, T, V]`, or with `targets [B, T]` the losses in nats `[B, T]`, which take little memory.

        Args:
            tokens: int64 `[B, T]`, T up to the context.
            last: only of so many last positions.
        """
        x_BTC = self.hidden(self.embedded(tokens))
        if last is not None:
            x_BTC = x_BTC[:, -last:]
        if targets is None:
            return F.linear(x_BTC, self.embed.weight, self.bias)
        if targets.shape != tokens.shape:
            raise ValueError(
                f"targets must be one for each token, {list(tokens.shape)}, got {list(targets.shape)}; "
                "pass the text one place further"
            )
        targets = targets[:, -x_BTC.shape[1] :]
        flat = next_word_losses(x_BTC.flatten(0, 1), self.embed.weight, self.bias, targets.flatten())
        # Not a view: FSDP2's hooks on what a model returns would be lost by a change in place, and it warns of them.
        return flat.unflatten(0, x_BTC.shape[:-1]).clone()

    def embedded(self, tokens: Tensor, start: int = 0) -> Tensor:
        """Tokens as the first block sees them `[B, T, C]`, the first one at position `start`."""
        if tokens.ndim != 2 or tokens.dtype != torch.int64 or not 1 <= start + tokens.shape[1] <= self.config.context:
            raise ValueError(
                f"tokens must be int64 [B, T] with T from 1 to the context of {self.config.context}, got "
                f"{tokens.dtype} {list(tokens.shape)}; cut the text into windows"
            )
        if tokens.device.type == "cpu" and not torch.compiler.is_compiling():
            self.check_range(tokens)
        # Entries of the embedding have variance 1/C, which suits the output: the stream wants 1.
        x_BTC = self.embed(tokens) * self.config.dim**0.5
        embedded: Tensor = self.drop(x_BTC + self.positions[start : start + tokens.shape[1]])
        return embedded

    def hidden(self, x_BTC: Tensor) -> Tensor:
        """From embedded tokens to what the output reads, `[B, T, C]`."""
        length = x_BTC.shape[1]
        if self.whole_only and length < self.config.context:
            x_BTC = F.pad(x_BTC, (0, 0, 0, self.config.context - length))
        for block in self.blocks:
            x_BTC = block(x_BTC)
        normed: Tensor = self.norm(x_BTC[:, :length])
        return normed

    def decode(self, tokens: Tensor, past: list[Past] | None = None) -> tuple[Tensor, list[Past]]:
        """Logits `[B, V]` after the newest tokens, and what to pass along with the next ones."""
        if self.whole_only:
            raise ValueError('decoding needs draw="poisson" in every block, got another draw; call the model instead')
        if past is None:
            past = [Past(None, None, attention.attend.method.cache()) for attention in self.attentions]
        seen = past[0].k
        x_BTC, after = self.embedded(tokens, 0 if seen is None else seen.shape[2]), []
        for block, before in zip(self.blocks, past, strict=True):
            x_BTC, now = cast(Block, block).decode(x_BTC, before)
            after.append(now)
        return F.linear(self.norm(x_BTC[:, -1]), self.embed.weight, self.bias), after

    def projections(self, tokens: Tensor) -> list[Projected]:
        """The queries, keys and values that each block's attention sees, for looking at the weights they get."""
        attends = (attention.attend for attention in self.attentions)
        return [Projected(*given[:3]) for given in given_to(attends, lambda: self.hidden(self.embedded(tokens)))]

    def check_range(self, tokens: Tensor) -> None:
        """Refuse tokens that are no words of the model; on a GPU it waits for them."""
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.config.vocab_size:
            raise ValueError(
                f"tokens must lie from 0 to vocab_size - 1 = {self.config.vocab_size - 1}, got {low} to {high}; "
                "encode the text with the vocabulary that the model learnt from"
            )

    @torch.no_grad()
    def init_weights(self, generator: Generator) -> None:
        """Draw every weight from `generator`: models of one config get equal weights, whatever their methods.

        Weights are normal with variance 1/fan-in, over 2·depth where they write to the stream, which therefore keeps
        its size at any depth; embeddings have variance 1/dim. What a method learns besides comes from a stream of its
        own for each block.
        """
        for name, parameter in self.named_parameters():
            if ".attend." in name:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                writes = name.endswith(("attn.proj.weight", "fc2.weight"))
                std = (parameter.shape[-1] * (2 * self.config.depth if writes else 1)) ** -0.5
                drawn = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(drawn.normal_(std=std, generator=generator))
        number = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        heads, length = self.config.num_heads, self.config.context
        for place, attention in enumerate(self.attentions):
            attend, own = attention.attend, Generator().manual_seed(mix(number, "block", place))
            made = attend.method.initial_tensors(heads, self.config.dim // heads, length, length, own)
            for name in attend.owned:
                getattr(attend, name).copy_(made[name])


def next_word_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """The loss for `fit`: the mean over the targets of `(inputs, targets)`, in nats."""
    losses: Tensor = model(batch[0], targets=batch[1])
    return losses.mean()


def _sinusoids(length: int, dim: int) -> Tensor:
    """`[length, dim]`: sines, then cosines, of dim/2 frequencies from 1 down to 1/10,000."""
    rate = torch.exp(torch.arange(0, dim, 2) * (-math.log(10_000.0) / dim))
    angle = torch.arange(length)[:, None] * rate
    return torch.cat((angle.sin(), angle.cos()), dim=1)
