"""One process of several, as torchrun starts them: who it is, and waiting for the others."""

import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed

from dloop.errors import UserError

PATIENCE = timedelta(days=7)  # a rank with long answers may keep the others waiting


@dataclass(frozen=True)
class Ranks:
    """This process among `world`. Results travel through files; only the waiting needs a connection."""

    rank: int
    world: int
    local: int

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def wait(self) -> None:
        """Go on when all ranks are here."""
        if self.world > 1:
            distributed.barrier()

    def device(self, given: str) -> str:
        """One GPU a process; a device with a number is taken as it is."""
        kind = given if given != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
        return f"cuda:{self.local}" if kind == "cuda" and self.world > 1 else kind


@contextmanager
def joined() -> Generator[Ranks, None, None]:
    """Join the other ranks, if there are any. Raises UserError where torchrun's variables are incomplete."""
    values = [os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"))]
    try:
        rank, world, local = int(values[0]), int(values[1]), int(os.environ.get("LOCAL_RANK", values[0]))
    except ValueError as error:
        raise UserError(f"RANK={values[0]} or WORLD_SIZE={values[1]} is no number; start with torchrun") from error
    if world > 1:
        missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing or not 0 <= rank < world:
            raise UserError(
                f"RANK={rank}, WORLD_SIZE={world}, missing: {missing}; start with torchrun --nproc_per_node={world}"
            )
        distributed.init_process_group("gloo", timeout=PATIENCE)
    try:
        yield Ranks(rank, world, local)
    finally:
        if world > 1:
            distributed.destroy_process_group()
