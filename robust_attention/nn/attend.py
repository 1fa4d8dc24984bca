"""A method as a module: with the tensors that it learns and the draws that it makes."""

from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from robust_attention import _checks
from robust_attention.ops import Method
from robust_attention.ops._blocks import BlockMethod
from robust_attention.ops._cache import Cache

EvalDraw = Literal["fixed", "fresh"]


class Attend(nn.Module):
    """`q, k, v -> output` by one method.

    Args:
        method: any method of the registry.
        kv_heads, width: heads of the keys and their width, for the tensors that the method owns.
        max_len: longest sequence, for methods with a tensor over positions (PositionScaled).
        eval_draw: what a method that draws does in evaluation: "fixed" uses the draw of its own seed, "fresh" a new
            one at every call. In training every call draws afresh.
    Parameters: none for Softmax, KDE, RKDE, SPKDE and MoM.
    Draws: number n of a module is a function of the method's seed and n alone. `num_draws` counts them; it is not part
        of the state dict, so that checkpoints of the replaced module load: whoever resumes a run stores it beside.
    """

    def __init__(
        self,
        method: Method,
        *,
        kv_heads: int,
        width: int,
        max_len: int | None = None,
        eval_draw: EvalDraw = "fixed",
    ) -> None:
        super().__init__()
        if not isinstance(method, Method):
            raise ValueError(f"method must be one of robust_attention's, got {method!r}; pass for example ra.RKDE()")
        _checks.one_of("eval_draw", eval_draw, get_args(EvalDraw))
        self.method = method
        self.eval_draw: EvalDraw = eval_draw
        self.max_len = max_len
        if "table" in method.key_tensors and max_len is None:
            raise ValueError(
                f"max_len must be given for {type(method).__name__}, whose table runs over positions, got None; "
                "pass the longest sequence"
            )
        length = max_len or 1
        made = method.initial_tensors(kv_heads, width, length, length, torch.Generator().manual_seed(0))
        self.owned = tuple(made)
        self.num_draws: Tensor
        for name in self.owned:
            if name in method.constant_tensors:
                self.register_buffer(name, made[name])
            else:
                self.register_parameter(name, nn.Parameter(made[name]))
        self.register_buffer("num_draws", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """See `Method.attend`."""
        extra = self.tensors(q.shape[2], k.shape[2], k.device)
        return self.method.attend(q, k, v, attn_mask, is_causal, **extra)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, cache: Cache, padding: Tensor | None = None) -> Tensor:
        """See `Method.decode`."""
        extra = self.tensors(q.shape[2], k.shape[2], k.device)
        extra.pop("counts", None)  # a decoding draw is a function of the seed
        return self.method.decode(q, k, v, cache, padding, **extra)

    def tensors(self, queries: int, keys: int, device: torch.device) -> dict[str, Any]:
        """What `attend` takes besides q, k and v, for this call."""
        found: dict[str, Any] = {name: getattr(self, name) for name in self.owned}
        if "table" in found:
            if self.max_len is not None and keys > self.max_len:
                raise ValueError(
                    f"sequences must not be longer than max_len = {self.max_len}, got {keys} keys; make it larger"
                )
            # The last query belongs to the last key.
            found["table"] = found["table"][:, keys - queries : keys, :keys]
        if isinstance(self.method, BlockMethod) and (self.training or self.eval_draw == "fresh"):
            found["counts"] = self.method.counts(keys, self._next_seed(), device)
        return found

    def _next_seed(self) -> Tensor:
        """A seed of 62 bits: the method's, moved on by a large odd number for each draw."""
        assert isinstance(self.method, BlockMethod)
        # Inside a backward pass activation checkpointing computes a forward anew: it must meet the same blocks.
        again = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        with torch.no_grad():
            self.num_draws += 0 if again else 1
        return (self.num_draws * 0x9E3779B97F4A7C1 + self.method.seed) & (2**62 - 1)

    def extra_repr(self) -> str:
        draws = f", eval_draw={self.eval_draw!r}" if self.method.stochastic else ""
        return f"{self.method!r}{draws}"
