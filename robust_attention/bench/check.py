"""Is it right? Errors of an implementation against the float64 reference, beside the plain formula's own."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from robust_attention.ops import Method

Attend = Callable[..., Tensor]
"""From q, k, v, and what the method learns beside them, to the output."""
NAMES = ("out", "dq", "dk", "dv", "d_owned")


class Checked(NamedTuple):
    """Each error over what it may be: at most 1 passes."""

    worst: dict[str, float]
    repeatable: bool = True
    """Every repeat gave the same bits."""

    @property
    def passed(self) -> bool:
        return self.repeatable and all(value <= 1 for value in self.worst.values())  # NaN fails

    @property
    def reason(self) -> str:
        """ "passed", or what is wrong."""
        if self.passed:
            return "passed"
        return f"errors over their limits: {self.worst}" if self.repeatable else "bits differ between runs"


def inputs(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str,
    seed: int = 0,
    queries: int | None = None,
    *,
    kv_heads: int | None = None,
    value_width: int | None = None,
    strided: bool = False,
) -> list[Tensor]:
    """q, k, v and a gradient of the output for B, H, S, D. Values are close enough for the joint Gram to matter.

    With `strided` they are laid out as a projection leaves them, `[B, N, H, D]`.
    """
    batch, heads, keys, width = shape
    queries, kv_heads, value_width = queries or keys, kv_heads or heads, value_width or width
    generator = torch.Generator(device=device).manual_seed(seed)
    found = []
    for h, n, d, size in (
        (heads, queries, width, 1.0),
        (kv_heads, keys, width, 1.0),
        (kv_heads, keys, value_width, 0.3),
        (heads, queries, value_width, 1.0),
    ):
        x = (torch.randn(batch, n, h, d, generator=generator, device=device) * size).to(dtype).transpose(1, 2)
        found.append(x if strided else x.contiguous())
    return found


def variables(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """What gets a gradient: all but the fourth tensor, which is the gradient of the output."""
    return [x.detach().to(dtype).requires_grad_() for x in (*tensors[:3], *tensors[4:])]


def gradients(attend: Attend, tensors: list[Tensor], dtype: torch.dtype, backward: bool = True) -> list[Tensor]:
    """The output, and with `backward` the gradients of q, k, v and of what follows the gradient in `tensors`."""
    leaves = variables(tensors, dtype)
    if not backward:
        with torch.no_grad():
            return [attend(*leaves)]
    out = attend(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3].to(dtype))]


def check(
    attend: Attend, reference: Attend, tensors: list[Tensor], *, backward: bool = True, repeats: int = 1
) -> Checked:
    """Largest errors over their limits: 1.5 (output) or 2 (gradients) times the plain formula's, plus two ulps."""
    dtype = tensors[0].dtype
    exact = gradients(reference, tensors, torch.float64, backward)
    plain = gradients(reference, tensors, dtype, backward)
    poison(tensors)
    found = gradients(attend, tensors, dtype, backward)
    worst = {}
    for name, mine, own, true in zip(NAMES, found, plain, exact, strict=False):
        top = true.abs().max()
        ulp = float(torch.finfo(dtype).eps * 2 ** torch.floor(torch.log2(top))) if top > 0 else 0.0
        error, allowed = float((mine.double() - true).abs().max()), float((own.double() - true).abs().max())
        worst[name] = error / max((1.5 if name == "out" else 2.0) * allowed + 2 * ulp, 1e-30)
    for _ in range(repeats - 1):
        poison(tensors)
        again = gradients(attend, tensors, dtype, backward)
        if not all(torch.equal(a, b) for a, b in zip(found, again, strict=True)):
            return Checked(worst, repeatable=False)
    return Checked(worst)


def poison(tensors: list[Tensor]) -> None:
    """Memory that the allocator hands out next holds NaN: an entry that nobody writes shows. On a GPU only."""
    if tensors[0].is_cuda:
        torch.full((4 * sum(x.numel() for x in tensors),), torch.nan, device=tensors[0].device)


def agrees(attend: Attend, reference: Attend, tensors: list[Tensor]) -> Checked:
    """Is it the same formula? In float64, over the last half of the queries: the published median of means counts
    blocks that see nothing of a short prefix."""
    with torch.no_grad():
        wide = [x.double() for x in tensors[:3]]
        mine, true = (f(*wide)[:, :, tensors[0].shape[2] // 2 :] for f in (attend, reference))
    return Checked({"out": float((mine - true).abs().max() / true.abs().max()) / 1e-6})


def by_tokens(method: Method, prompt: int) -> Attend:
    """Causal attention by `method.decode`: a prompt, then one token after the other."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cache = method.cache()
        stops = [prompt, *range(prompt + 1, k.shape[2] + 1)]
        parts = zip([0, *stops], stops, strict=False)
        return torch.cat([method.decode(q[:, :, a:b], k[:, :, :b], v[:, :, :b], cache) for a, b in parts], 2)

    return attend
