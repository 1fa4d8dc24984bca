"""What a model gets right, and how much each patch counts in it; random methods are asked several times."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Generator, Tensor

from robust_attention.attacks._gradient import Logits
from robust_attention.models.vit import ViT

# A random method's draw is shared by a batch: in small batches, no draw decides over many images.
BATCH = 64


def logits_of(model: ViT, generator: Generator | None, tell: Callable[[], None] | None = None) -> Logits:
    """The model as attacks want it: a random method draws afresh from `generator` at every call, or keeps the draw of
    its own seed if that is None. `tell` is called after each call."""

    def logits(images: Tensor) -> Tensor:
        answer: Tensor = model(images, generator=generator)
        if tell is not None:
            tell()
        return answer

    return logits


def correct(logits: Logits, images: Tensor, labels: Tensor, *, draws: int = 1) -> Tensor:
    """Whether each image is read right: `[draws, N]`, 0 or 1, each row from calls of its own."""
    rows = []
    with torch.no_grad():
        for _ in range(draws):
            right = [
                logits(part).argmax(dim=1) == label
                for part, label in zip(images.split(BATCH), labels.split(BATCH), strict=True)
            ]
            rows.append(torch.cat(right).float())
    return torch.stack(rows)


def attacked(attack: Callable[[Tensor, Tensor], Tensor], images: Tensor, labels: Tensor) -> Tensor:
    """Attack images batch by batch."""
    return torch.cat([attack(*part) for part in zip(images.split(BATCH), labels.split(BATCH), strict=True)])


@torch.no_grad()
def patch_weights(model: ViT, images: Tensor, *, draws: int, generator: Generator) -> Tensor:
    """How much the first block counts each patch before any query is asked: `[B, P]`, mean 1 over the patches.

    Robust weights: those of the joint density, which multiply the values, averaged over heads. A method that draws
    blocks: how often a patch is in a query's block, over heads, queries and draws. All others: 1.
    """
    q, k, v = model.projections(images)[0]
    method = cast(Any, model.method)
    if hasattr(method, "weights"):
        weight_BHS = method.weights(k, v)[0]
    elif method.stochastic:
        # With the identity as values, the output is the attention itself; it is positive inside the chosen block.
        identity = torch.eye(k.shape[2]).expand(*k.shape[:2], -1, -1)
        total = torch.zeros(k.shape[:3])
        for _ in range(draws):
            counts = method.draw(k.shape[2], generator=generator)
            total += (method.attend(q, k, identity, counts=counts) > 0).float().mean(dim=2)
        weight_BHS = total
    else:
        weight_BHS = torch.ones(k.shape[:3])
    weight_BP = weight_BHS.mean(dim=1)[:, -model.config.num_patches :]
    return weight_BP / weight_BP.mean(dim=1, keepdim=True)
