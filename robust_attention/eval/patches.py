"""How much each patch counts in a vision transformer, before any query is asked."""

from typing import Any, cast

import torch
from torch import Generator, Tensor

from robust_attention.models.vit import ViT


@torch.no_grad()
def patch_weights(model: ViT, images: Tensor, *, draws: int, generator: Generator, block: int = 0) -> Tensor:
    """How much a block counts each patch: `[B, P]`, mean 1 over the patches.

    Robust weights: those of the joint density, which multiply the values, averaged over heads. A method that draws
    blocks: how often a patch is in a query's block, over heads, queries and draws. All others: 1.

    Args:
        images: `[B, C, S, S]` in [0, 1].
        draws: how often a method that draws is asked.
        generator: where those draws come from; others leave it alone.
        block: which block of the model.
    """
    if not 0 <= block < model.config.depth:
        raise ValueError(f"block must be from 0 to {model.config.depth - 1}, got {block}; count from the front")
    q, k, v = model.projections(images)[block]
    attend = model.attentions[block].attend
    method = cast(Any, attend.method)
    if hasattr(method, "weights"):
        weight_BHS = method.weights(k, v)[0]
    elif method.stochastic:
        owned = {name: getattr(attend, name) for name in attend.owned}
        # With the identity as values, the output is the attention itself; it is positive inside the chosen block.
        identity = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
        weight_BHS = k.new_zeros(k.shape[:3])
        for _ in range(draws):
            counts = method.draw(k.shape[2], generator=generator, device=k.device)
            weight_BHS += (method.attend(q, k, identity, counts=counts, **owned) > 0).to(k.dtype).mean(dim=2)
    else:
        weight_BHS = k.new_ones(k.shape[:3])
    weight_BP = weight_BHS.mean(dim=1)[:, -model.config.num_patches :]
    return weight_BP / weight_BP.mean(dim=1, keepdim=True)
