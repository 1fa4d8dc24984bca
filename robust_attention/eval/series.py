"""What a classifier of time series gets right, and the guesses behind it."""

import torch
from torch import Tensor, nn

from robust_attention._seeds import mix
from robust_attention.data.series import Series
from robust_attention.nn.draws import eval_draw, is_stochastic, set_draws


@torch.no_grad()
def logits_of(model: nn.Module, series: Series, device: torch.device, batch_size: int) -> Tensor:
    """`[N, num_classes]`, float32 on the CPU, of a model in evaluation mode on `device`."""
    found = []
    for indices in torch.arange(len(series)).split(batch_size):
        part = series.take(indices)
        found.append(model(part.values.to(device), part.mask.to(device)).float())
    return torch.cat(found).cpu()


def right(model: nn.Module, series: Series, device: torch.device, batch_size: int) -> Tensor:
    """`[N]`, whether each series is classified right, with the fixed draw of a method that draws."""
    return logits_of(model, series, device, batch_size).argmax(1) == series.labels


def rights(model: nn.Module, series: Series, device: torch.device, batch_size: int, draws: int, seed: int) -> Tensor:
    """`[draws, N]` with fresh draws of a method that draws, made from `seed`; `[1, N]` for all others."""
    if not is_stochastic(model):
        return right(model, series, device, batch_size)[None]
    found = []
    with eval_draw(model, "fresh"):
        for draw in range(draws):
            set_draws(model, mix(seed, "evaluate", draw))
            found.append(right(model, series, device, batch_size))
    return torch.stack(found)
