"""Self- and cross-attention with projections, as vision transformers have it."""

from collections.abc import Callable

from torch import Tensor, nn

from robust_attention.nn.attend import Attend, EvalDraw
from robust_attention.ops import Method


class Attention(nn.Module):
    """Project, attend by a method, project back: `[B, N, C] -> [B, N, C]`.

    Parameters are named as in timm's `Attention` (`qkv`, `q_norm`, `k_norm`, `norm`, `proj`), so that its checkpoints
    load; methods that learn something keep it under `attend`.

    Args:
        embed_dim: C.
        num_heads: heads; divides `embed_dim`.
        method: any method of the registry.
        qkv_bias, proj_bias: biases of the projections.
        q_norm, k_norm, norm: build a module from a width, applied to each head's queries, its keys, and the joined
            output; None leaves them out.
        max_len, eval_draw: see `Attend`.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        method: Method,
        qkv_bias: bool = True,
        proj_bias: bool = True,
        q_norm: Callable[[int], nn.Module] | None = None,
        k_norm: Callable[[int], nn.Module] | None = None,
        norm: Callable[[int], nn.Module] | None = None,
        max_len: int | None = None,
        eval_draw: EvalDraw = "fixed",
    ) -> None:
        super().__init__()
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim = {embed_dim}, got {num_heads}; choose another number of heads"
            )
        width = embed_dim // num_heads
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.q_norm = nn.Identity() if q_norm is None else q_norm(width)
        self.k_norm = nn.Identity() if k_norm is None else k_norm(width)
        self.attend = Attend(method, kv_heads=num_heads, width=width, max_len=max_len, eval_draw=eval_draw)
        self.norm = nn.Identity() if norm is None else norm(embed_dim)
        self.proj = nn.Linear(embed_dim, embed_dim, bias=proj_bias)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """`attn_mask`: boolean, True where a query may look; broadcasts to `[B, H, N, N]`."""
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        out = self.attend(self.q_norm(q), self.k_norm(k), v, attn_mask, is_causal)
        projected: Tensor = self.proj(self.norm(out.transpose(1, 2).flatten(2)))
        return projected
