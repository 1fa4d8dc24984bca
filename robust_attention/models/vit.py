"""A vision transformer (pre-norm), to read from top to bottom; its attention is one of our methods.

Parameters are named as in timm's vision transformer, so that checkpoints load both ways.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Generator, Tensor, nn

from robust_attention._seeds import mix
from robust_attention.models._blocks import given_to, one_for_each
from robust_attention.models.config import ViTConfig
from robust_attention.nn import Attention
from robust_attention.ops import Method

_norm = partial(nn.LayerNorm, eps=1e-6)


class Projected(NamedTuple):
    """What one block's attention looks at: `[B, H, N, D]` each, the tokens of the heads first where there are any."""

    q: Tensor
    k: Tensor
    v: Tensor


class PatchEmbed(nn.Module):
    """Cut images into patches, row by row, and make each a token: `[B, C, H, W] -> [B, P, dim]`."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        patch = config.patch_size
        self.proj = nn.Conv2d(config.channels, config.dim, kernel_size=patch, stride=patch)

    def forward(self, images: Tensor) -> Tensor:
        embedded: Tensor = self.proj(images)
        return embedded.flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    """Two layers on each token."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        hidden = int(config.dim * config.mlp_ratio)
        self.fc1 = nn.Linear(config.dim, hidden)
        self.act = nn.GELU()
        self.drop = nn.Dropout(config.dropout)
        self.fc2 = nn.Linear(hidden, config.dim)

    def forward(self, x_BNC: Tensor) -> Tensor:
        out: Tensor = self.fc2(self.drop(self.act(self.fc1(x_BNC))))
        return out


class Block(nn.Module):
    """Attention, then two layers on each token; both see normalised tokens and add to the stream."""

    def __init__(self, config: ViTConfig, method: Method, drop_path: float) -> None:
        super().__init__()
        qk_norm = _norm if config.qk_norm else None
        self.norm1 = _norm(config.dim)
        self.attn = Attention(
            config.dim, config.num_heads, method=method, q_norm=qk_norm, k_norm=qk_norm, max_len=config.num_tokens
        )
        self.norm2 = _norm(config.dim)
        self.mlp = Mlp(config)
        self.drop = nn.Dropout(config.dropout)
        self.drop_path = drop_path

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BNC = x_BNC + self._sometimes(self.drop(self.attn(self.norm1(x_BNC))))
        return x_BNC + self._sometimes(self.drop(self.mlp(self.norm2(x_BNC))))

    def _sometimes(self, branch_BNC: Tensor) -> Tensor:
        """Stochastic depth: in training an image skips the branch at random, and the others make up for it."""
        if not self.training or self.drop_path == 0:
            return branch_BNC
        keep = 1 - self.drop_path
        return branch_BNC * (branch_BNC.new_empty(len(branch_BNC), 1, 1).bernoulli_(keep) / keep)


class ViT(nn.Module):
    """A vision transformer with robust attention.

        images [B, C, S, S] in [0, 1]  ->  logits [B, num_classes]

    Normalisation of the pixels is inside, so that an attack's eps is in units of the images.

    Args:
        config: sizes.
        method: the attention of every block, or one method for each.
    Random streams: building takes nothing from the global one. Weights come from `init_weights`, draws of a random
        method from `robust_attention.nn.set_draws`, dropout and stochastic depth from PyTorch's global stream.
    Departs: with pool="mean" there is no class token, and the tokens are normalised before their mean is taken (timm
        normalises the mean). The table of PositionScaled has one page a head, as RVT's, and covers the extra tokens.
    """

    pixel_mean: Tensor
    pixel_std: Tensor

    def __init__(self, config: ViTConfig, method: Method | Sequence[Method]) -> None:
        super().__init__()
        methods = one_for_each(method, config.depth)
        self.config = config
        # PyTorch's layers draw weights from the global stream as they are made; ours are drawn anew below.
        with torch.random.fork_rng(devices=[]):
            self._make_layers(config, methods)
        for name, given in (("pixel_mean", config.mean), ("pixel_std", config.std)):
            values = torch.tensor(given or (0.5,) * config.channels).reshape(-1, 1, 1)
            # Not in the state dict: the configuration says it, and other libraries' checkpoints do not hold it.
            self.register_buffer(name, values, persistent=False)
        self.init_weights(torch.Generator().manual_seed(0))

    def _make_layers(self, config: ViTConfig, methods: list[Method]) -> None:
        self.patch_embed = PatchEmbed(config)
        self.cls_token = nn.Parameter(torch.empty(1, 1, config.dim)) if config.pool == "cls" else None
        self.dist_token = nn.Parameter(torch.empty(1, 1, config.dim)) if config.distilled else None
        self.pos_embed = nn.Parameter(torch.empty(1, config.num_tokens, config.dim))
        self.pos_drop = nn.Dropout(config.dropout)
        rates = [config.drop_path * place / max(1, config.depth - 1) for place in range(config.depth)]
        self.blocks = nn.ModuleList(Block(config, *pair) for pair in zip(methods, rates, strict=True))
        self.norm = _norm(config.dim)
        self.head = nn.Linear(config.dim, config.num_classes)
        self.head_dist = nn.Linear(config.dim, config.num_classes) if config.distilled else None
        for attention in self.attentions:
            if "table" in attention.attend.owned:
                table = attention.attend.get_parameter("table").detach()
                attention.attend.table = nn.Parameter(table.repeat(config.num_heads, 1, 1))

    @property
    def attentions(self) -> list[Attention]:
        """The attention of each block."""
        return [block.attn for block in self.blocks]  # type: ignore[misc]

    @property
    def methods(self) -> tuple[Method, ...]:
        """The method of each block, as it attends now."""
        return tuple(attention.attend.method for attention in self.attentions)

    def forward(self, images: Tensor, heads: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """Classify.

        Args:
            images: `[B, C, S, S]` in [0, 1].
            heads: give the logits of the class token and of the distillation token apart, for the loss. Otherwise a
                distilled model gives their mean.
        """
        x_BNC = self.tokens(images)
        for block in self.blocks:
            x_BNC = block(x_BNC)
        x_BNC = self.norm(x_BNC)
        logits: Tensor = self.head(x_BNC.mean(dim=1) if self.cls_token is None else x_BNC[:, 0])
        if self.head_dist is None:
            if heads:
                raise ValueError("heads must be False where there is one head, got True; build with distilled=True")
            return logits
        distilled: Tensor = self.head_dist(x_BNC[:, 1])
        return (logits, distilled) if heads else (logits + distilled) / 2

    def tokens(self, images: Tensor) -> Tensor:
        """Normalise, embed the patches row by row behind the extra tokens, and add the positions."""
        config = self.config
        wanted = (config.channels, config.image_size, config.image_size)
        if images.shape[1:] != wanted or not images.is_floating_point():
            raise ValueError(
                f"images must be floating-point [B, {', '.join(map(str, wanted))}] in [0, 1], got {images.dtype} "
                f"{list(images.shape)}; resize them, or divide 8-bit images by 255"
            )
        weight = self.patch_embed.proj.weight
        x_BNC = self.patch_embed(((images - self.pixel_mean) / self.pixel_std).to(weight.dtype))
        extra = [token.expand(len(images), -1, -1) for token in (self.cls_token, self.dist_token) if token is not None]
        tokens: Tensor = self.pos_drop(torch.cat([*extra, x_BNC], dim=1) + self.pos_embed)
        return tokens

    def projections(self, images: Tensor) -> list[Projected]:
        """The queries, keys and values that each block's attention sees, for looking at the weights they get."""
        seen = given_to((attention.attend for attention in self.attentions), lambda: self(images))
        return [Projected(*given[:3]) for given in seen]

    @torch.no_grad()
    def init_weights(self, generator: Generator) -> None:
        """Draw every weight from `generator`: models of one config get equal weights, whatever their methods.

        Weights are normal with variance 1/fan-in, which keeps the size of what passes through at any width (the usual
        0.02 is meant for about 1,000 channels); tokens and positions have 0.02. What a method learns besides comes
        from a stream of its own for each block.
        """
        for name, parameter in self.named_parameters():
            if ".attend." in name:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            else:
                token = name in ("pos_embed", "cls_token", "dist_token")
                std = 0.02 if token else math.prod(parameter.shape[1:]) ** -0.5
                drawn = torch.empty(parameter.shape, device=generator.device)
                parameter.copy_(drawn.normal_(std=std, generator=generator))
        number = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        for place, attention in enumerate(self.attentions):
            self._init_owned(attention, Generator().manual_seed(mix(number, "block", place)))

    def _init_owned(self, attention: Attention, generator: Generator) -> None:
        """What a method owns, as it starts: made once for each head where there is a page for each."""
        attend, heads, tokens = attention.attend, self.config.num_heads, self.config.num_tokens
        width = self.config.dim // heads
        made = [attend.method.initial_tensors(heads, width, tokens, tokens, generator) for _ in range(heads)]
        for name in attend.owned:
            own = getattr(attend, name)
            pages = [part[name] for part in made]
            own.copy_(pages[0] if pages[0].shape == own.shape else torch.cat(pages))
