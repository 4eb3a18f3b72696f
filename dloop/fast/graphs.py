"""Run functions of blocks of integers; on a GPU they are captured once for each layout and replayed afterwards."""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from dloop.fast.rows import Integers, Layout, blank

T = TypeVar("T")
MOST_GRAPHS = 256  # of one memory: laws of sampling are many, and each captured graph holds memory of its own
CAPTURING = threading.RLock()  # a capture spoils one that another thread is in the midst of


class Parts:
    """A captured function as graphs that are launched one after the other.

    A launch costs the host about half a microsecond a kernel, and the first kernel starts when all are launched. Of a
    function that was cut early the device runs the first part while the host launches the next.
    """

    capturing = threading.local()  # `now`: those that are being captured in this thread

    def __init__(self, begin: Callable[[torch.cuda.CUDAGraph], AbstractContextManager[None]]) -> None:
        self.begin = begin
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self._open = ExitStack()

    def capture(self, fn: Callable[[], T]) -> T:
        """What `fn` gives: memory that every replay fills anew."""
        with self._open:
            self._begin()
            self.capturing.now = self
            try:
                return fn()
            finally:
                self.capturing.now = None

    def cut(self) -> None:
        """End a graph and begin the next."""
        self._open.close()
        self._begin()

    def _begin(self) -> None:
        graph = torch.cuda.CUDAGraph()
        self._open.enter_context(self.begin(graph))
        self.graphs.append(graph)

    def replay(self) -> None:
        """Launch all parts."""
        for graph in self.graphs:
            graph.replay()


def cut() -> None:
    """Where a function that may be under capture can be cut in two."""
    if (now := getattr(Parts.capturing, "now", None)) is not None:
        now.cut()


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
    """A captured function of a block of integers, and the tensors that it fills."""

    host: Int[Tensor, " n"]  # in pinned memory, where the graphs fetch the integers
    block: Int[Tensor, " n"]  # what they fetch them to: it must stay
    done: torch.cuda.Event  # the host's block may be overwritten
    parts: Parts
    out: T

    def replay(self, blocks: Sequence[Integers]) -> T:
        """The function of these integers."""
        self.done.synchronize()
        np.concatenate(blocks, out=self.host.numpy())
        self.parts.replay()
        self.done.record()
        return self.out


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
        """`before` in their order, then `forward`: one block of integers and one replay for all.

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
        return cast(T, found.replay([each.block for each in forwards]))

    def _capture(self, forwards: Sequence[Forward[T] | Forward[None]]) -> Captured[object]:
        from dloop.kernels import fetch  # needs Triton, as all that is captured

        empty = [blank(each.layout)[0] for each in forwards]
        host = torch.from_numpy(np.concatenate(empty)).pin_memory()
        block = host.to(self.device)
        pieces = block.split([len(each) for each in empty])

        def run() -> object:
            fetch.launch(host, block, pdl=True)
            return [each.fn(piece) for each, piece in zip(forwards, pieces, strict=True)][-1]

        parts, out = self.capture(run)
        return Captured(host=host, block=block, done=torch.cuda.Event(), parts=parts, out=out)

    def capture(self, fn: Callable[[], T]) -> tuple[Parts, T]:
        """Capture a function of device memory alone; it runs once before, and once is not to matter."""
        with CAPTURING:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):  # compiles the kernels and lets libraries allocate, which a capture may not
                fn()
            torch.cuda.current_stream(self.device).wait_stream(side)
            parts = Parts(partial(torch.cuda.graph, pool=self._pool))
            return parts, parts.capture(fn)
