"""Several processes, one run: every process takes its rows of each batch, and all sums are taken over all of them.

`ddp` keeps all weights in every process and adds up gradients; `fsdp` keeps a share of weights, gradients and optimiser
state in each (torch.distributed.fsdp.fully_shard), and has whole weights during a step alone.
"""

import atexit
import os
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Literal, NamedTuple, cast

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from dloop.errors import UserError

Parallel = Literal["ddp", "fsdp"]
BUCKET = 2**24  # gradients that travel together
# Lives as long as the process. Sharded weights keep gloo's threads running to the very end; one that lets go of a
# tensor of Python's only then waits for an interpreter that is gone, and aborts the process.
NUMBER = torch.zeros((), dtype=torch.int64, device="cpu")


class Share(NamedTuple):
    """Which of so many processes this is."""

    rank: int = 0
    world: int = 1

    def rows(self, x: Tensor) -> Tensor:
        """This process's rows of what is drawn for the batch of all: the draws do not depend on how it is shared."""
        return x[self.rank :: self.world]


ALONE = Share()


def from_environment() -> Share:
    """As torchrun says. Raises UserError where it says half of it."""
    world = os.environ.get("WORLD_SIZE") or "1"
    if world == "1":
        return ALONE
    missing = [name for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(f"WORLD_SIZE={world} without {missing[0]}: start several processes with torchrun")
    return Share(int(os.environ["RANK"]), int(world))


def join(share: Share, device: torch.device, minutes: int) -> None:
    """Meet the other processes, unless they have met."""
    if share.world == 1 or dist.is_initialized():
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, rank=share.rank, world_size=share.world, timeout=timedelta(minutes=minutes))
    atexit.register(dist.destroy_process_group)


def total_of(x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """The sum over all processes."""
    if dist.is_initialized():
        x = x.clone()
        dist.all_reduce(x)
    return x


def most_of(number: int) -> int:
    """The largest of all processes' numbers. Host memory alone: no GPU is waited for."""
    if not dist.is_initialized():
        return number
    NUMBER.fill_(number)
    dist.all_reduce(NUMBER, dist.ReduceOp.MAX)
    return int(NUMBER)


def any_of(flag: int) -> bool:
    """Whether any process says so; all learn the same."""
    return bool(most_of(flag))


def wait() -> None:
    """Until all are here."""
    any_of(0)


def add_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Leave the sum over all processes in every gradient; sharded ones are sums already."""
    if not dist.is_initialized():
        return
    bucket: list[Tensor] = []
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            continue
        if parameter.grad is None:  # of the same tensors everywhere, but a missing one would stop the others
            parameter.grad = torch.zeros_like(parameter)
        bucket.append(parameter.grad)
        if sum(map(Tensor.numel, bucket)) >= BUCKET:
            reduce_together(bucket)
            bucket = []
    reduce_together(bucket)


def reduce_together(gradients: list[Tensor]) -> None:
    """One collective for all of them."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def shard(module: nn.Module) -> None:
    """Leave a share of every parameter here. Gradients are added, not averaged: losses have the totals of all."""
    fully_shard(module)
    assert isinstance(module, FSDPModule)
    module.set_gradient_divide_factor(1.0)
    module.set_force_sum_reduction_for_comms(True)  # gloo knows no scaled sum


def gathered(value: object) -> object:
    """The same nested dicts and lists with whole tensors. All processes must call it."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if isinstance(value, Mapping):
        return {key: gathered(item) for key, item in cast(Mapping[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [gathered(item) for item in cast(list[object], value)]
    return value


def whole(x: Tensor) -> Tensor:
    """All of a tensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def local(x: Tensor) -> Tensor:
    """What this process holds of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def like(value: Tensor, example: Tensor) -> Tensor:
    """A whole tensor, shared out as another of its shape is."""
    if isinstance(example, DTensor) and value.shape == example.shape:
        return distribute_tensor(value.to(example.device), example.device_mesh, example.placements)
    return value
