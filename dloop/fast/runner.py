"""What the memories of all drafters on the fast path share: a static store, and how a forward over it runs."""

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor

from dloop.fast.graphs import Forward, Graphs
from dloop.fast.lease import Leased
from dloop.fast.ops import Ops, kernel_ops, supports
from dloop.fast.plain import PlainOps
from dloop.fast.rows import Integers, Layout, RowBatch, Run, bucket_of
from dloop.fast.stack import Memory
from dloop.fast.target import columns_of
from dloop.fast.weights import Stack
from dloop.sampling import DRAFT_STREAM, salt

T = TypeVar("T")
Pack = Callable[[list[Run], Layout], Integers]  # the rows' integers, in the layout that was found for them


class Runner(Leased):
    """A static store and the graphs over it. One session at a time may use it."""

    def __init__(self, stack: Stack, slots: int, context: int) -> None:
        self.stack = stack
        self.store = Memory.empty(stack, slots, context)
        device = stack.gain.device
        self.kernels = supports(stack.gain.dtype, device, stack.heads)
        self.graphs = Graphs(device, enabled=self.kernels)
        self.seeds: dict[int, int] = {}
        # one slot more takes what nobody reads
        self.salts: Int64[Tensor, " slots"] = torch.zeros(self.store.slots + 1, dtype=torch.int64, device=device)

    @property
    def overlaps(self) -> bool:
        """Whether the device works on its own while the host goes on."""
        return self.graphs.enabled

    def for_slots(self, old: Shaped[Tensor, "fewer ..."]) -> Shaped[Tensor, "slots ..."]:
        """A copy with room for all slots there are."""
        new = old.new_zeros(self.store.slots + 1, *old.shape[1:])
        new[: len(old)] = old
        return new

    def make_room(self, slot: int, rows: int) -> bool:
        """Let the store hold this many rows of this slot; whether it moved, and took the graphs with it."""
        if not self.store.make_room(slot, rows):
            return False
        if self.store.slots >= len(self.salts):
            self.salts = self.for_slots(self.salts)
        self.graphs.clear()
        return True

    def seed(self, slot: int, seed: int) -> None:
        """What this slot's draws depend on."""
        if self.seeds.get(slot) != seed:
            self.salts[slot] = salt(seed, DRAFT_STREAM)
            self.seeds[slot] = seed

    def blank(self, *shape: int) -> Float[Tensor, "..."]:
        """Zeros of the weights' type, on their device."""
        return self.stack.gain.new_zeros(shape)

    def forward(
        self, runs: list[Run], pack: Pack, fn: Callable[[Ops, RowBatch], T], kernels: bool | None = None, depth: int = 0
    ) -> Forward[T]:
        """What computes `fn` of the rows of these runs, through kernels or plain operations.

        `depth`: most ancestors of a tree's row; 0: the rows are chains.
        """
        kernels = self.kernels if kernels is None else kernels
        count = sum(run.count for run in runs)
        columns = columns_of(self.stack.heads, max(run.count for run in runs))
        size = bucket_of(count) if kernels else count
        layout = Layout(rows=size, tile_rows=columns.rows, tree=depth > 0, depth=depth or None)
        ops: Ops = kernel_ops(columns.count) if kernels else PlainOps()
        return Forward(layout, pack(runs, layout), partial(apply, fn, ops, layout, runs))


class Arrival:
    """Numbers on their way to the host: whatever the device is asked for after them, they do not wait for."""

    def __init__(self, numbers: Float64[Tensor, "..."]) -> None:
        self.numbers, self.here = numbers, None
        if numbers.is_cuda:
            self.numbers = torch.empty_like(numbers, device="cpu", pin_memory=True)
            self.numbers.copy_(numbers, non_blocking=True)
            self.here = torch.cuda.Event()
            self.here.record()

    def wait(self) -> list[Any]:
        """The numbers, as nested lists."""
        if self.here is not None:
            self.here.synchronize()
        return self.numbers.tolist()


def apply(fn: Callable[[Ops, RowBatch], T], ops: Ops, layout: Layout, runs: list[Run], block: Tensor) -> T:
    """`fn` of the rows that a block of integers on the device describes."""
    return fn(ops, layout.views(block, runs))
