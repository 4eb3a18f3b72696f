"""Run functions of blocks of integers; on a GPU they are captured once for each layout and replayed afterwards."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dloop.fast.rows import Integers, Layout, blank

T = TypeVar("T")
MOST_GRAPHS = 256  # of one memory: laws of sampling are many, and each captured graph holds memory of its own
CAPTURING = threading.RLock()  # a capture spoils one that another thread is in the midst of


@dataclass(frozen=True)
class Forward(Generic[T]):
    """A function of a block of integers on the device, and the block."""

    layout: Layout
    block: Integers
    fn: Callable[[Int[Tensor, " n"]], T]

    def now(self, device: torch.device) -> T:
        """Without a graph."""
        return self.fn(torch.from_numpy(self.block).to(device))


@dataclass(frozen=True)
class Captured(Generic[T]):
    """One captured graph: it copies its integers to the device, then fills the tensors that it gives."""

    host: Integers  # in pinned memory
    block: Int[Tensor, " n"]  # what the graph copies them to: it must stay
    copied: torch.cuda.Event  # the host's block may be overwritten
    graph: torch.cuda.CUDAGraph
    out: T


class Graphs:
    """Captured functions of one memory. What a call returns is overwritten by the next call with the same key.

    Of more than `MOST_GRAPHS`, the one that was used least recently is forgotten.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device = device
        self.enabled = enabled
        # the one used last stands last
        self._captured: dict[tuple[str, tuple[Layout, ...]], Captured[object]] = {}
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    def clear(self) -> None:
        """Forget all graphs: the tensors they write to have moved."""
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None  # the old one dies with its graphs

    def __call__(self, name: str, forward: Forward[T], *before: Forward[None]) -> T:
        """`before` in their order, then `forward`: one copy to the device and one launch for all.

        A graph is captured with empty blocks of the layouts, which touch no memory.
        """
        forwards = [*before, forward]
        if not self.enabled:
            return cast(T, [each.now(self.device) for each in forwards][-1])
        key = name, tuple(each.layout for each in forwards)
        found = self._captured.pop(key, None)
        if found is None:
            found = self._capture(forwards)
            if len(self._captured) >= MOST_GRAPHS:  # a capture waits for the device, so that none is replayed now
                del self._captured[next(iter(self._captured))]
        self._captured[key] = found
        found.copied.synchronize()
        np.concatenate([each.block for each in forwards], out=found.host)
        found.graph.replay()
        return cast(T, found.out)

    def _capture(self, forwards: Sequence[Forward[T] | Forward[None]]) -> Captured[object]:
        empty = [blank(each.layout)[0] for each in forwards]
        host = torch.from_numpy(np.concatenate(empty)).pin_memory()
        block, copied = host.to(self.device), torch.cuda.Event(external=True)
        parts = block.split([len(each) for each in empty])

        def run() -> object:
            block.copy_(host, non_blocking=True)
            copied.record()
            return [each.fn(part) for each, part in zip(forwards, parts, strict=True)][-1]

        graph, out = self.capture(run)
        return Captured(host=host.numpy(), block=block, copied=copied, graph=graph, out=out)

    def capture(self, fn: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture a function of device memory alone; it runs once before, and once is not to matter."""
        with CAPTURING:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # compiles the kernels and lets libraries allocate, which a capture may not
                fn()
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                out = fn()
            return graph, out
