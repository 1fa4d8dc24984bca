"""What turns gradients into weights: the schedule, which weights decay, their moving average, the order of examples."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from robust_attention._seeds import mix
from robust_attention.training.config import FitConfig
from robust_attention.training.parallel import local


def schedule(step: int, num_steps: int, warmup: float, final: float = 0.0) -> float:
    """Factor of the learning rate at a step counted from 0: a line up to 1, then half a cosine down to `final`."""
    num_warmup = max(1, round(warmup * num_steps))
    if step < num_warmup:
        return (step + 1) / num_warmup
    cosine = 0.5 * (1 + math.cos(math.pi * (step - num_warmup) / max(1, num_steps - num_warmup)))
    return final + (1 - final) * cosine


class Plan:
    """Which examples each step takes: a function of the step and the seed alone, so that a resumed run goes on."""

    def __init__(self, num_examples: int, config: FitConfig) -> None:
        if num_examples < 1:
            raise ValueError("examples must hold at least one example, got none; check where they were read from")
        self.num_examples = num_examples
        self.config = config
        self.steps_per_epoch = math.ceil(num_examples / config.batch_size)
        self.num_steps = config.epochs * self.steps_per_epoch
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def indices(self, step: int) -> Tensor:
        """The examples of one step, of all processes together."""
        epoch, place = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mix(self.config.seed, "order", epoch))
            self._epoch, self._order = epoch, torch.randperm(self.num_examples, generator=generator)
        return self._order[place * self.config.batch_size :][: self.config.batch_size]

    def epoch_to_validate(self, steps_done: int) -> int | None:
        """The epoch, counted from 1, that ends here and is due for validation."""
        epoch, place = divmod(steps_done, self.steps_per_epoch)
        due = place == 0 and (epoch % self.config.validate_every == 0 or epoch == self.config.epochs)
        return epoch if due else None

    def learning_rate(self, step: int) -> float:
        config = self.config
        factor = schedule(step, self.num_steps, config.warmup, config.final_learning_rate)
        return config.learning_rate * factor


def adamw(model: nn.Module, config: FitConfig, device: torch.device) -> torch.optim.AdamW:
    """AdamW on what can be trained, its own fused kernel on CUDA.

    Biases, norms, positions and class tokens (parameters of shape [1, ...]) are not decayed: shrinking them does not
    regularise.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"parameters must be float32 to be trained, got {parameter.dtype} in {name}; call model.float(), and "
                "ask for precision='bfloat16'"
            )
    if not trained:
        raise ValueError("model must have parameters that require a gradient, got none; nothing would be trained")
    groups = [
        {"params": [p for p in trained if _is_matrix(p)], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if not _is_matrix(p)], "weight_decay": 0.0},
    ]
    fused = True if device.type == "cuda" else None
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and parameter.shape[0] > 1


class Ema:
    """Averaged weights (parameters and buffers, by name): after step t, counted from 0,

        average ← d average + (1 - d) weights,    d = min(decay, (1 + t) / (10 + t))

    so that the first weights, which know nothing, are soon forgotten. Buffers of floats are averaged alike, others
    copied. Under FSDP each process averages the part that it holds.
    """

    def __init__(self, weights: dict[str, Tensor], decay: float) -> None:
        self.decay = decay
        self.weights = weights
        self.averages = {name: tensor.detach().clone() for name, tensor in weights.items()}
        self._floats = [name for name, tensor in weights.items() if tensor.is_floating_point()]
        self._others = [name for name, tensor in weights.items() if not tensor.is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        decay = min(self.decay, (1 + step) / (10 + step))
        averages = [local(self.averages[name]) for name in self._floats]
        torch._foreach_lerp_(averages, [local(self.weights[name]) for name in self._floats], 1 - decay)
        for name in self._others:
            self.averages[name].copy_(self.weights[name])

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """The model holds the averages meanwhile."""
        kept = {name: tensor.detach().clone() for name, tensor in self.weights.items()}
        self._fill(self.averages)
        try:
            yield
        finally:
            self._fill(kept)

    @torch.no_grad()
    def _fill(self, source: dict[str, Tensor]) -> None:
        for name, tensor in self.weights.items():
            local(tensor).copy_(local(source[name]))
