"""A small vision transformer (pre-norm), to read from top to bottom; its attention is one of our methods."""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, cast

import torch
from torch import Generator, Tensor, nn

from robust_attention.ops import Method


class _Drawn(Protocol):
    """What `stochastic` promises of a method."""

    def draw(self, num_keys: int, *, generator: Generator | None, device: torch.device) -> Tensor: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *, counts: Tensor) -> Tensor: ...


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """Sizes of the model."""

    image_size: int = 8
    """Pixels along a side."""
    patch_size: int = 2
    """Pixels along a patch's side; one patch is one token."""
    channels: int = 1
    """Colour channels."""
    num_classes: int = 10
    """Width of the logits."""
    dim: int = 64
    """Width of a token."""
    depth: int = 2
    """Blocks."""
    num_heads: int = 2
    """Attention heads; divides `dim`."""
    mlp_ratio: float = 2.0
    """Width of a block's hidden layer over `dim`."""
    pool: Literal["cls", "mean"] = "cls"
    """What the classifier reads: a token of its own, which sees patches through attention only, or the mean."""

    def __post_init__(self) -> None:
        if self.patch_size < 1 or self.image_size % self.patch_size:
            raise ValueError(f"patch_size must divide image_size = {self.image_size}, got {self.patch_size}")
        if self.num_heads < 1 or self.dim % self.num_heads:
            raise ValueError(f"num_heads must divide dim = {self.dim}, got {self.num_heads}")

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class Projected(NamedTuple):
    """What one block's attention looks at: `[B, H, N, D]` each, the class token first where there is one."""

    q: Tensor
    k: Tensor
    v: Tensor


class Attention(nn.Module):
    """Project, attend by the method, project back."""

    def __init__(self, config: ViTConfig, method: Method) -> None:
        super().__init__()
        self.method = method
        self.num_heads = config.num_heads
        self.qkv = nn.Linear(config.dim, 3 * config.dim)
        self.out = nn.Linear(config.dim, config.dim)

    def forward(self, x_BNC: Tensor, generator: Generator | None) -> Tensor:
        q, k, v = self.project(x_BNC)
        if self.method.stochastic:
            drawn = cast(_Drawn, self.method)
            counts = drawn.draw(k.shape[2], generator=generator, device=k.device)
            h_BHND = drawn.attend(q, k, v, counts=counts)
        else:
            h_BHND = self.method.attend(q, k, v)
        mixed: Tensor = self.out(h_BHND.transpose(1, 2).flatten(2))
        return mixed

    def project(self, x_BNC: Tensor) -> Projected:
        batch, num_tokens, dim = x_BNC.shape
        qkv = self.qkv(x_BNC).reshape(batch, num_tokens, 3, self.num_heads, dim // self.num_heads)
        return Projected(*qkv.permute(2, 0, 3, 1, 4))


class Block(nn.Module):
    """Attention, then two layers on each token; both see normalised tokens and add to the stream."""

    def __init__(self, config: ViTConfig, method: Method) -> None:
        super().__init__()
        hidden = int(config.dim * config.mlp_ratio)
        self.attention_norm = nn.LayerNorm(config.dim)
        self.attention = Attention(config, method)
        self.mlp_norm = nn.LayerNorm(config.dim)
        self.mlp = nn.Sequential(nn.Linear(config.dim, hidden), nn.GELU(), nn.Linear(hidden, config.dim))

    def forward(self, x_BNC: Tensor, generator: Generator | None) -> Tensor:
        x_BNC = x_BNC + self.attention(self.attention_norm(x_BNC), generator)
        return x_BNC + self.mlp(self.mlp_norm(x_BNC))


class ViT(nn.Module):
    """A vision transformer with robust attention.

        images [B, C, H, W] in [0, 1]  ->  logits [B, num_classes]

    Normalisation of the pixels is inside, so that an attack's eps is in units of the images.
    """

    def __init__(self, config: ViTConfig, method: Method) -> None:
        super().__init__()
        self.config = config
        self.method = method
        patch = config.patch_size
        # PyTorch's layers draw weights from the global stream as they are made; ours are drawn anew below.
        with torch.random.fork_rng(devices=[]):
            self._make_layers(config, method, patch)
        self.init_weights(torch.Generator().manual_seed(0))

    def _make_layers(self, config: ViTConfig, method: Method, patch: int) -> None:
        self.embed = nn.Conv2d(config.channels, config.dim, kernel_size=patch, stride=patch)
        num_tokens = config.num_patches + (config.pool == "cls")
        self.position = nn.Parameter(torch.empty(1, num_tokens, config.dim))
        self.cls = nn.Parameter(torch.empty(1, 1, config.dim)) if config.pool == "cls" else None
        self.blocks = nn.ModuleList(Block(config, method) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.dim)
        self.head = nn.Linear(config.dim, config.num_classes)

    def forward(self, images: Tensor, generator: Generator | None = None) -> Tensor:
        """Classify.

        Args:
            images: `[B, C, H, W]` in [0, 1].
            generator: A random method draws its blocks from it, afresh at every call. Without one it uses the
                draw that its own seed fixes: good for looking at a trained model, refused in training, where
                one draw would be learned by heart. Other methods ignore it.
        """
        if self.training and self.method.stochastic and generator is None:
            raise ValueError(
                f"generator must be given to train with {type(self.method).__name__}, which draws at random, "
                "got None; pass generator=torch.Generator().manual_seed(0), or call model.eval() first"
            )
        x_BNC = self.tokens(images)
        for block in self.blocks:
            x_BNC = block(x_BNC, generator)
        x_BNC = self.norm(x_BNC)
        return self.head(x_BNC[:, 0] if self.cls is not None else x_BNC.mean(dim=1))

    def tokens(self, images: Tensor) -> Tensor:
        """Embed the patches row by row, behind the class token if there is one."""
        x_BNC = self.embed(images * 2 - 1).flatten(2).transpose(1, 2)
        if self.cls is not None:
            x_BNC = torch.cat([self.cls.expand(len(images), -1, -1), x_BNC], dim=1)
        return x_BNC + self.position

    def projections(self, images: Tensor) -> list[Projected]:
        """The queries, keys and values that each block's attention sees, for looking at the weights they get."""
        seen, x_BNC = [], self.tokens(images)
        for block in self.blocks:
            assert isinstance(block, Block)
            seen.append(block.attention.project(block.attention_norm(x_BNC)))
            x_BNC = block(x_BNC, None)
        return seen

    @torch.no_grad()
    def init_weights(self, generator: Generator) -> None:
        """Draw every weight from `generator`: models of one config get equal weights, whatever their method."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif "norm" in name:
                parameter.fill_(1.0)
            elif name in ("position", "cls"):
                parameter.normal_(std=0.02, generator=generator)
            else:
                fan_in = math.prod(parameter.shape[1:])
                parameter.normal_(std=fan_in**-0.5, generator=generator)
