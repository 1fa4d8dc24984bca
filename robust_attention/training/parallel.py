"""The processes that train one model together, as `torchrun` starts them; a single process is a team of one.

`ddp`: every process holds the model and takes its slice of each batch; gradients are summed once the whole slice is
done. DistributedDataParallel sums them during the last backward pass instead. That hides the network's time (for 86 M
parameters about 4 ms a step inside a machine, more between machines), but a process that runs out of memory then leaves
the others waiting for ever, and its buckets are laid out anew after the first step, so that a resumed run of three or
more processes adds in another order and is not bitwise the same. Both are promised here.

`fsdp`: FSDP2's `fully_shard` on every block, then on the model. Parameters, gradients, AdamW's means and the averaged
weights are spread over the processes; files hold them whole.
"""

import atexit
import copy
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch import distributed as dist

PATIENCE = timedelta(days=1)
"""How long a process waits for the others. Long, because process 0 may measure a model while the others wait to train
the next one; when one fails, torchrun ends them all at once."""
BUCKET = 2**23
"""Numbers that are summed over the processes at once."""
_ERRORS: dict[str, type[Exception]] = {"OSError": OSError, "ValueError": ValueError, "ImportError": ImportError}


@dataclass(frozen=True)
class Team:
    """Who trains: this process is number `rank` of `size`."""

    mode: Literal["none", "ddp", "fsdp"]
    device: torch.device
    rank: int = 0
    size: int = 1
    control: Any = None
    """A gloo group for what the hosts tell each other, so that no process waits for its GPU to take part."""

    def agree(self, *flags: bool) -> tuple[bool, ...]:
        """Each flag is up for everybody if it is up for anybody."""
        if self.size == 1:
            return flags
        raised = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(raised, dist.ReduceOp.MAX, group=self.control)
        return tuple(bool(flag) for flag in raised.tolist())

    @torch.no_grad()
    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Sum each over the processes, in place, a bucket at a time."""
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            dist.all_reduce(flat, group=self._group(flat))
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))

    @torch.no_grad()
    def share_(self, tensors: Iterable[Tensor]) -> None:
        """Give everybody what process 0 holds, in place."""
        if self.size > 1:
            for tensor in tensors:
                dense = tensor.contiguous()
                dist.broadcast(dense, 0, group=self._group(dense))
                if dense is not tensor:
                    tensor.copy_(dense)

    def on_first(self, act: Callable[[], Any]) -> Any:
        """What `act` returns on process 0, as JSON has it; its error ends every process alike."""
        if self.size == 1:
            return act()
        if self.rank:
            told = json.loads(self._share_text(""))
            if "error" in told:
                raise _ERRORS.get(told["error"], RuntimeError)(told["message"])
            return told["result"]
        try:
            result = act()
        except Exception as error:
            named = next((kind for kind, known in _ERRORS.items() if isinstance(error, known)), "RuntimeError")
            self._share_text(json.dumps({"error": named, "message": str(error)}))
            raise
        self._share_text(json.dumps({"result": result}))
        return result

    def _share_text(self, text: str) -> str:
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        length = torch.tensor(len(data))
        dist.broadcast(length, 0, group=self.control)
        if self.rank:
            data = torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.control)
        return bytes(data.tolist()).decode()

    def _group(self, tensor: Tensor) -> Any:
        return self.control if tensor.device.type == "cpu" else None


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = sum(t.numel() for t in bucket) + tensor.numel() > BUCKET
        if bucket and (full or tensor.dtype != bucket[0].dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def launched() -> bool:
    """Whether torchrun, or a launcher that sets the same variables, started this process."""
    return dist.is_available() and all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))


def rank() -> int:
    """The number of this process among those that torchrun started; 0 without it, who alone writes shared files."""
    return int(os.environ["RANK"]) if launched() else 0


def pick_device(device: torch.device | str | None = None) -> torch.device:
    """The device asked for, else CUDA where there is one; of several GPUs the one that LOCAL_RANK says."""
    picked = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    if picked == torch.device("cuda"):  # which one is left open
        here = os.environ.get("LOCAL_RANK") if launched() else None
        return torch.device("cuda", torch.cuda.current_device() if here is None else int(here))
    return picked


def connect(device: torch.device | str | None = None) -> bool:
    """Connect the processes that torchrun started, nccl between GPUs, gloo between CPUs; whether there was need to."""
    if not launched() or dist.is_initialized():
        return False
    device = pick_device(device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
    atexit.register(_part)
    return True


def _part() -> None:
    """Part in order at the end of the program: threads of gloo that are still running then may abort it.

    Not after an error: parting could wait for a process that is gone.
    """
    if dist.is_initialized() and getattr(sys, "last_value", None) is None:
        dist.destroy_process_group()


@contextmanager
def processes(device: torch.device | str | None = None) -> Iterator[None]:
    """The processes that torchrun started are connected meanwhile; without torchrun nothing happens.

    `fit` connects them by itself and leaves them so. Put this around a whole program, once, if they must find each
    other before, or should part in order. After an error they are not parted: that could wait for one that is gone,
    and torchrun ends them all anyway.
    """
    connected = connect(device)
    yield
    if connected:
        dist.destroy_process_group()


@contextmanager
def join(parallel: str, device: torch.device | str | None = None) -> Iterator[Team]:
    """The team that this process trains in."""
    device = pick_device(device)
    several = launched() and int(os.environ["WORLD_SIZE"]) > 1
    if parallel == "none" or (parallel == "auto" and not several):
        yield Team("none", device)
        return
    if not launched():
        raise ValueError(
            f"parallel = {parallel!r} needs the processes that torchrun starts, got a single plain one; start with "
            "torchrun --nproc-per-node=gpu, or set parallel='auto'"
        )
    connect(device)
    control = dist.new_group(backend="gloo", timeout=PATIENCE)
    mode: Literal["ddp", "fsdp"] = "fsdp" if parallel == "fsdp" else "ddp"
    yield Team(mode, device, dist.get_rank(), dist.get_world_size(), control)
    dist.destroy_process_group(control)


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers that belong to the state dict, each once, by name."""
    stored = model.state_dict(keep_vars=True)
    return {name: tensor for name, tensor in (*model.named_parameters(), *model.named_buffers()) if name in stored}


def spread(model: nn.Module, team: Team, compiled: bool) -> nn.Module:
    """The model as this team trains it: itself on the device, or under fsdp a sharded copy. All start from process 0's.

    Under fsdp the copy is sharded block by block, so that no device ever holds the whole of it. Blocks are the members
    of every nn.ModuleList.
    """
    if team.mode != "fsdp":
        model.to(team.device)
        team.share_(weights_of(model).values())
        return model
    fully_shard = _fully_shard()
    from torch.distributed.device_mesh import init_device_mesh

    team.share_(weights_of(model).values())
    model = copy.deepcopy(model)
    mesh = init_device_mesh(team.device.type, (team.size,))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    blocks = dict.fromkeys(block for blocks in lists for block in blocks if not isinstance(block, nn.ModuleList))
    # Inner blocks first: what a block has sharded, the one around it leaves alone.
    for block in reversed(blocks):
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def _fully_shard() -> Any:
    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:
        try:  # torch 2.5
            from torch.distributed._composable.fsdp import fully_shard  # type: ignore[attr-defined]
        except ImportError as error:
            raise ImportError(
                f"parallel='fsdp' needs torch's fully_shard, which torch {torch.__version__} lacks; install torch 2.6 "
                "or newer, or set parallel='ddp'"
            ) from error
    return fully_shard


def local(tensor: Tensor) -> Tensor:
    """The part of it that this process holds: all of it unless it is sharded."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """All of it, on every process of the team."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@torch.no_grad()
def put(tensor: Tensor, value: Tensor | None, team: Team) -> None:
    """Fill a tensor, sharded or not, with what process 0 has read; the others pass None."""
    if team.rank == 0:
        assert value is not None
        source = value.to(device=tensor.device, dtype=tensor.dtype)
    else:
        source = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if hasattr(tensor, "to_local"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = tensor
        local(tensor).copy_(distribute_tensor(source, sharded.device_mesh, sharded.placements).to_local())
    else:
        team.share_([source])
        tensor.copy_(source)
