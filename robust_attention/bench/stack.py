"""A training step of a whole model, to be timed: pre-norm transformer blocks on random tokens."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class StackShape:
    """Sizes of a stack of transformer blocks."""

    name: str
    batch: int
    tokens: int
    dim: int
    num_heads: int
    depth: int
    hidden: int
    causal: bool = False


class Block(nn.Module):
    def __init__(self, shape: StackShape, attend: Attend) -> None:
        super().__init__()
        self.num_heads, self.attend = shape.num_heads, attend
        self.first_norm, self.second_norm = nn.LayerNorm(shape.dim), nn.LayerNorm(shape.dim)
        self.qkv, self.out = nn.Linear(shape.dim, 3 * shape.dim), nn.Linear(shape.dim, shape.dim)
        self.up, self.down = nn.Linear(shape.dim, shape.hidden), nn.Linear(shape.hidden, shape.dim)

    def forward(self, x_BNC: Tensor) -> Tensor:
        qkv = self.qkv(self.first_norm(x_BNC)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x_BNC = x_BNC + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        grown: Tensor = x_BNC + self.down(F.gelu(self.up(self.second_norm(x_BNC))))
        return grown


def training_step(shape: StackShape, attend: Attend, device: str) -> Callable[[], None]:
    """A closure that does one step of AdamW; mixed precision (bfloat16) on a GPU."""
    with torch.random.fork_rng(devices=[]):  # drawn on the CPU
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(shape, attend) for _ in range(shape.depth)), nn.LayerNorm(shape.dim)).to(device)
        tokens = torch.randn(shape.batch, shape.tokens, shape.dim).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda", capturable=device == "cuda")

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = model(tokens).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return step
