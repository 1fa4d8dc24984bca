"""One step of training, on any number of processes, in as many pieces as the memory needs."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from robust_attention._seeds import mix
from robust_attention.nn.draws import set_draws
from robust_attention.training.checkpoint import Saved, check_names
from robust_attention.training.config import FitConfig
from robust_attention.training.optimise import Ema, adamw
from robust_attention.training.parallel import Team, put, spread, weights_of, whole

Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]
"""`loss(model, batch)`: a scalar, the mean over the examples of the batch. It calls the model and reads no attribute of
it: what it is given may be a compiled or a sharded form of the model."""


class Examples(Protocol):
    """What is trained on."""

    def __len__(self) -> int: ...

    def batch(self, indices: Tensor, seed: int, device: torch.device) -> Batch:
        """The examples at `indices`, augmented by `seed` alone, on `device`; every tensor has one row an example.

        `indices` are on the CPU. They are one process's share of a batch: what mixes examples mixes among these.
        """
        ...


class Trainer:
    """The model in the form that is trained, its optimiser and its averages: all that a step changes.

    Everything random in step t is a function of the seed, t and the rank, so the state is these tensors alone.
    """

    def __init__(self, model: nn.Module, loss: Loss, config: FitConfig, team: Team) -> None:
        self.loss, self.config, self.team = loss, config, team
        self.model = spread(model, team, config.compile)
        # Looked up once: inside and after a forward pass fully_shard shows other tensors under these names.
        self.weights = weights_of(self.model)
        self.parameters = {name: p for name, p in self.weights.items() if isinstance(p, nn.Parameter)}
        self.buffers = [tensor for name, tensor in self.weights.items() if name not in self.parameters]
        compiled = config.compile and team.mode != "fsdp"  # its blocks are compiled one by one
        self.called: Any = torch.compile(self.model) if compiled else self.model
        self.optimizer = adamw(self.model, config, team.device)
        self.ema = Ema(self.weights, config.ema) if config.ema else None
        share = math.ceil(config.batch_size / team.size)
        self.micro_batch = min(config.micro_batch or share, share)

    def step(self, number: int, indices: Tensor, learning_rate: float, examples: Examples) -> tuple[Tensor, Tensor]:
        """Train on the examples at `indices`; returns the loss (this process's part of it) and the gradient's norm.

        Neither waits for the GPU. When some process runs out of memory, all of them forget the gradients, halve the
        micro-batch and do the step again with the same numbers; running means inside the model (of BatchNorm) have
        then seen part of the batch twice.
        """
        self.model.train()
        mine = indices.tensor_split(self.team.size)[self.team.rank]
        # A last batch may be too small for all: who has none of it computes its first example, with weight 0.
        weight = 1 / len(indices) if len(mine) else 0.0
        mine = mine if len(mine) else indices[:1]
        batch = examples.batch(mine, mix(self.config.seed, "batch", number, self.team.rank), self.team.device)
        if any(len(tensor) != len(mine) for tensor in batch):
            raise ValueError(
                f"examples.batch must return a row for each of its {len(mine)} indices, got shapes "
                f"{[list(tensor.shape) for tensor in batch]}; repeat examples by repeating their indices"
            )
        most = math.ceil(len(indices) / self.team.size)
        while True:
            num_pieces = math.ceil(most / self.micro_batch)
            loss = self._gradients(number, list(_pieces(batch, weight, num_pieces)))
            (out_of_memory,) = self.team.agree(loss is None)
            if not out_of_memory:
                assert loss is not None
                break
            self._halve(number, math.ceil(most / num_pieces))
        norm = self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        # Running means that a forward pass has changed: process 0's count.
        self.team.share_(self.buffers)
        if self.ema is not None:
            self.ema.update(number)
        return loss, norm

    def _gradients(self, number: int, pieces: list[tuple[Batch, float]]) -> Tensor | None:
        """This process's part of the gradient of the batch's mean loss, and of that loss; None if memory ran out.

        A piece counts by its share of the batch, so the sum over pieces and processes is the exact mean, whatever
        their sizes. FSDP2 averages over the processes instead of summing, hence the factor.
        """
        config, device = self.config, self.team.device
        self.optimizer.zero_grad(set_to_none=True)
        seed_torch(mix(config.seed, "torch", number, self.team.rank), device)
        factor = self.team.size if self.team.mode == "fsdp" else 1
        total = torch.zeros((), device=device)
        try:
            for piece, share in pieces:
                set_draws(self.model, mix(config.seed, "draws", number))
                with torch.autocast(device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
                    mean = self.loss(self.called, piece)
                if mean.dim():
                    raise ValueError(
                        "loss must return one number, the mean over its examples, got shape "
                        f"{list(mean.shape)}; end it with .mean()"
                    )
                (mean * (share * factor)).backward()
                total += mean.detach() * share
        except torch.OutOfMemoryError as error:
            if self.team.mode == "fsdp":
                # The others wait for this process inside the model: only a new start can help.
                raise torch.OutOfMemoryError(
                    f"out of memory at step {number + 1} with micro_batch = {self.micro_batch} on process "
                    f"{self.team.rank}; run again with micro_batch={max(1, self.micro_batch // 2)}, and training goes "
                    "on from its newest checkpoint"
                ) from error
            return None
        return total

    def _halve(self, number: int, tried: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        if tried == 1:
            raise torch.OutOfMemoryError(
                f"out of memory at step {number + 1} with a single example on a process; take a smaller model, "
                "precision='bfloat16', more memory, or parallel='fsdp' on several GPUs"
            )
        self.micro_batch = tried // 2
        if self.team.device.type == "cuda":
            torch.cuda.empty_cache()

    def _clip(self) -> Tensor:
        if self.team.mode == "ddp":
            self.team.sum_([p.grad for p in self.parameters.values() if p.grad is not None])
        clip = math.inf if self.config.clip is None else self.config.clip
        return whole(nn.utils.clip_grad_norm_(self.parameters.values(), clip))

    @contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """The model with the weights that it will end with, in evaluation mode; put back afterwards."""
        with nullcontext() if self.ema is None else self.ema.in_model():
            yield self.model.eval()
            # A forward pass without a backward pass leaves gathered weights behind, which training must not meet.
            for module in self.model.modules() if self.team.mode == "fsdp" else ():
                if hasattr(module, "reshard"):
                    cast(Any, module).reshard()

    def state(self) -> dict[str, Tensor]:
        """Everything, whole, on the CPU of process 0; every process must call it."""
        found: dict[str, Tensor] = {}
        for name, tensor in self._tensors().items():
            full = whole(tensor)
            if self.team.rank == 0:
                found[name] = full.to("cpu", copy=True)
        return found

    def load(self, saved: Saved | None, names: list[str]) -> None:
        """Undo `state`, on any number of processes; process 0 passes what it has read, and everybody its names."""
        stepped = set(names)
        for name, parameter in self.parameters.items():
            if f"optimizer.step.{name}" in stepped:
                self.optimizer.state[parameter] = self._fresh_moments(parameter)
        for name, tensor in self._tensors().items():
            put(tensor, None if saved is None else saved.tensors[name], self.team)

    def check(self, saved: Saved) -> None:
        """Refuse a checkpoint of another model."""
        check_names(self.model, saved, self.ema is not None)

    def finish(self, model: nn.Module) -> None:
        """Leave the final weights in the caller's model, on every process, in evaluation mode."""
        final = self.weights if self.ema is None else self.ema.averages
        with torch.no_grad():
            for name, tensor in weights_of(model).items():
                tensor.copy_(whole(final[name]))
        self.optimizer.zero_grad(set_to_none=True)
        model.eval()

    def _tensors(self) -> dict[str, Tensor]:
        found = {f"model.{name}": tensor for name, tensor in self.weights.items()}
        if self.ema is not None:
            found |= {f"ema.{name}": tensor for name, tensor in self.ema.averages.items()}
        for name, parameter in self.parameters.items():
            for key, tensor in sorted(self.optimizer.state.get(parameter, {}).items()):
                found[f"optimizer.{key}.{name}"] = tensor
        return found

    def _fresh_moments(self, parameter: Tensor) -> dict[str, Tensor]:
        """AdamW's state as its first step makes it, to be filled."""
        on_device = self.team.device if self.optimizer.defaults["fused"] else torch.device("cpu")
        with torch.no_grad():
            return {
                "step": torch.zeros((), device=on_device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


def _pieces(batch: Batch, weight: float, number: int) -> Iterator[tuple[Batch, float]]:
    """Micro-batches of nearly equal sizes, each with its share of the whole batch.

    Every process makes the same number of them, as fsdp needs it; who has too few examples fills up with its first,
    which counts nothing.
    """
    for piece in zip(*(tensor.tensor_split(number) for tensor in batch), strict=True):
        if len(piece[0]):
            yield piece, weight * len(piece[0])
        else:
            yield tuple(tensor[:1] for tensor in batch), 0.0


def seed_torch(seed: int, device: torch.device) -> None:
    """Seed PyTorch's own streams, which dropout draws from."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
