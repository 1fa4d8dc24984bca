"""Is it right? Errors of an implementation against the float64 reference, beside the plain formula's own."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Checked(NamedTuple):
    """Each error over what it may be: at most 1 passes."""

    worst: dict[str, float]

    @property
    def passed(self) -> bool:
        return all(value <= 1 for value in self.worst.values())  # NaN fails


def inputs(
    shape: tuple[int, int, int, int], dtype: torch.dtype, device: str, seed: int = 0, queries: int | None = None
) -> list[Tensor]:
    """q, k, v and a gradient of the output. Values are close enough for the joint Gram to matter."""
    batch, heads, keys, width = shape
    generator = torch.Generator(device=device).manual_seed(seed)
    sizes = ((queries or keys, 1.0), (keys, 1.0), (keys, 0.3), (queries or keys, 1.0))
    return [
        (torch.randn(batch, heads, n, width, generator=generator, device=device) * size).to(dtype) for n, size in sizes
    ]


def gradients(attend: Attend, tensors: list[Tensor], dtype: torch.dtype, backward: bool = True) -> list[Tensor]:
    """The output, and with `backward` the gradients of q, k and v."""
    if not backward:
        with torch.no_grad():
            return [attend(*(x.to(dtype) for x in tensors[:3]))]
    q, k, v = (x.detach().to(dtype).requires_grad_() for x in tensors[:3])
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), tensors[3].to(dtype))]


def check(attend: Attend, reference: Attend, tensors: list[Tensor], *, backward: bool = True) -> Checked:
    """Largest errors over their limits: 1.5 (output) or 2 (gradients) times the plain formula's, plus two ulps."""
    dtype = tensors[0].dtype
    exact = gradients(reference, tensors, torch.float64, backward)
    plain = gradients(reference, tensors, dtype, backward)
    if tensors[0].is_cuda:
        # Memory that the allocator hands out next holds NaN: an entry that nobody writes shows.
        torch.full((4 * sum(x.numel() for x in tensors),), torch.nan, device=tensors[0].device)
    found = gradients(attend, tensors, dtype, backward)
    worst = {}
    for name, factor, mine, own, true in zip(
        ("out", "dq", "dk", "dv"), (1.5, 2.0, 2.0, 2.0), found, plain, exact, strict=False
    ):
        top = true.abs().max()
        ulp = float(torch.finfo(dtype).eps * 2 ** torch.floor(torch.log2(top))) if top > 0 else 0.0
        error, allowed = float((mine.double() - true).abs().max()), float((own.double() - true).abs().max())
        worst[name] = error / max(factor * allowed + 2 * ulp, 1e-30)
    return Checked(worst)
