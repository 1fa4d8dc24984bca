"""Text from a language model, one token after the other."""

import torch
from torch import Generator, Tensor

from robust_attention import _checks
from robust_attention.models.lm import LanguageModel, Past


@torch.no_grad()
def generate(
    model: LanguageModel,
    prompt: Tensor,
    number: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: Generator | None = None,
    banned: tuple[int, ...] = (),
    cached: bool = True,
) -> Tensor:
    """Continue each row of a prompt `[B, T]` by `number` tokens; returns both, int64 `[B, T + number]` on the CPU.

    The model sees up to its context. Once the text is longer, it goes on with the last half of that, so that most
    tokens still cost one pass over one token.

    Args:
        temperature: divides the logits; 0 takes the most likely token.
        top_k: draws among the k most likely tokens only.
        generator: a CPU one, which all draws come from; needed unless temperature is 0.
        banned: tokens that are never chosen.
        cached: decode with caches where the blocks' methods allow it; False computes every token's pass anew, with
            the same result to rounding.
    """
    _check(model, prompt, number, temperature, top_k, generator)
    device, context = next(model.parameters()).device, model.config.context
    tokens, past = prompt.cpu(), None
    start = max(0, tokens.shape[1] - context)
    before = model.training
    model.eval()
    try:
        for _ in range(number):
            if tokens.shape[1] - start > context:
                start, past = tokens.shape[1] - max(1, context // 2), None
            logits, past = _next(model, tokens[:, start:].to(device), past, cached and not model.whole_only)
            logits[:, list(banned)] = -torch.inf
            tokens = torch.cat((tokens, _chosen(logits.float().cpu(), temperature, top_k, generator)), dim=1)
    finally:
        model.train(before)
    return tokens


def _next(
    model: LanguageModel, seen: Tensor, past: list[Past] | None, cached: bool
) -> tuple[Tensor, list[Past] | None]:
    if not cached:
        logits: Tensor = model(seen, last=1)
        return logits[:, 0], None
    return model.decode(seen if past is None else seen[:, -1:], past)


def _chosen(logits: Tensor, temperature: float, top_k: int | None, generator: Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    # The largest logit at 0: a tiny temperature then leaves it alone, instead of making NaN.
    above = (logits - logits.amax(dim=-1, keepdim=True)).double() / temperature
    return torch.multinomial(above.softmax(dim=-1).float(), 1, generator=generator)


def _check(
    model: LanguageModel,
    prompt: Tensor,
    number: int,
    temperature: float,
    top_k: int | None,
    generator: Generator | None,
) -> None:
    if prompt.ndim != 2 or prompt.dtype != torch.int64 or 0 in prompt.shape:
        raise ValueError(
            f"prompt must be int64 [B, T] with at least one token, got {prompt.dtype} {list(prompt.shape)}; "
            "encode a text, or begin with the token that ends lines"
        )
    model.check_range(prompt.cpu())
    _checks.whole("number", number, least=1)
    if temperature != 0:
        _checks.positive("temperature", temperature)
        if generator is None:
            raise ValueError("generator must be given to draw tokens, got None; or set temperature=0")
    if top_k is not None:
        _checks.whole("top_k", top_k, least=1)
