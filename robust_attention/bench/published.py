"""The published algorithms in eager PyTorch, to be timed: every T × S matrix written out, in the input's dtype.

The equations are the paper's (the released code has another sign in the distance); what is kept of the release is its
way of working: explicit matrices, no fusion, no care for memory.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def kde(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Eq. 3."""
    weight = _kernel(q, F.normalize(k, dim=-1), causal)
    return weight @ v / weight.sum(-1, keepdim=True)


def rkde(q: Tensor, k: Tensor, v: Tensor, causal: bool, a: float = 0.2) -> Tensor:
    """Eq. 11, Huber's loss, one sweep; under a causal mask the weights are a T × S matrix, as in the paper."""
    keys = F.normalize(k, dim=-1)
    kernel = _kernel(q, keys, causal)
    joint = _weights(torch.cat((v, keys), -1), k.shape[-1] ** 0.5, causal, a)
    marginal = _weights(keys, k.shape[-1] ** 0.5, causal, a)
    return (kernel * joint) @ v / (kernel * marginal).sum(-1, keepdim=True)


def mom(q: Tensor, k: Tensor, v: Tensor, causal: bool, counts: Tensor) -> Tensor:
    """Eq. 16: the median block of each query, then attention with the other keys masked."""
    kernel = _kernel(q, F.normalize(k, dim=-1), causal)
    density = torch.stack([(kernel * count).sum(-1) / count.sum() for count in counts.to(kernel.dtype)], -1)
    chosen = density.argsort(-1)[..., (len(counts) - 1) // 2]
    weight = kernel * counts.to(kernel.dtype)[chosen]
    return weight @ v / weight.sum(-1, keepdim=True).clamp(min=torch.finfo(weight.dtype).tiny)


def _kernel(q: Tensor, keys: Tensor, causal: bool) -> Tensor:
    # The query's own length cancels in every quotient.
    logit = q @ keys.mT / q.shape[-1] ** 0.5
    if causal:
        logit = logit.masked_fill(~torch.ones_like(logit, dtype=torch.bool).tril(), -torch.inf)
    return torch.exp(logit - logit.detach().amax(-1, keepdim=True))


def _weights(x: Tensor, variance: float, causal: bool, a: float) -> Tensor:
    square = x.square().sum(-1)
    gram = torch.exp((2 * x @ x.mT - square[..., :, None] - square[..., None, :]) / (2 * variance))
    seen = torch.ones_like(gram)
    if causal:
        seen = seen.tril()
    start = seen / seen.sum(-1, keepdim=True)
    overlap = start @ gram
    size = (start * overlap).sum(-1, keepdim=True)
    distance = (1 - 2 * overlap + size).clamp(min=1e-12).sqrt()
    psi = torch.where(distance > a, a / distance, torch.ones_like(distance)) * seen
    return psi / psi.sum(-1, keepdim=True)
