"""The least that an attention call has to do, and how long that takes at the machine's measured ceilings."""

import torch

from robust_attention.bench.scales import Shape

# (products of T·S·D, exponentials a score) that a forward pass cannot do without, the Grams' symmetry used.
WORK = {
    ("SDPA", False): (2.0, 1.0),
    ("SDPA", True): (2.0, 1.0),
    ("KDE", False): (2.0, 1.0),
    ("KDE", True): (2.0, 1.0),
    ("RKDE", False): (3.0, 2.0),
    ("RKDE", True): (4.0, 3.0),
    ("MoM", False): (3.0, 2.0),
    ("MoM", True): (3.0, 2.0),
}
INSTRUCTIONS = {"Fourier": (20.0, 106.0)}
"""Of one lane for a query, key and coordinate, forward and with gradients: counted on the kernel's page."""


def floor(
    ceilings: dict[str, float], dtype: torch.dtype, name: str, shape: Shape, causal: bool, backward: bool
) -> dict[str, float]:
    """FLOPs, bytes and exponentials that cannot be saved, and the milliseconds that the ceilings make of them."""
    if name in INSTRUCTIONS and "tinstructions" in ceilings:
        batch, heads, keys, width = shape
        number = INSTRUCTIONS[name][backward] * batch * heads * keys**2 * width / (2 if causal else 1)
        return {"instructions": number, "floor_ms": number / ceilings["tinstructions"] / 1e9}
    if (name, causal) not in WORK:
        return {}
    batch, heads, keys, width = shape
    products, exponentials = WORK[name, causal]
    scores = batch * heads * keys * keys / (2 if causal else 1)
    # Backward does 2.5 times the products of forward, and its exponentials once more.
    flops = 2 * scores * width * products * (3.5 if backward else 1)
    exps = scores * exponentials * (2 if backward else 1)
    tensor = batch * heads * keys * width * torch.finfo(dtype).bits / 8
    moved = tensor * (12 if backward else 4)
    ms = 1000 * max(flops / ceilings["tflops"], moved / ceilings["tbytes"], exps / ceilings["texp"]) / 1e12
    return {"flops": flops, "bytes": moved, "exponentials": exps, "floor_ms": ms}
