"""Run a function of one block of integers; on a GPU it is captured once for each layout and replayed afterwards."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar, cast

import torch
from jaxtyping import Int
from torch import Tensor

from dloop.fast.rows import Integers, Layout, blank

T = TypeVar("T")


@dataclass
class Captured(Generic[T]):
    """One captured graph: its input on the host and on the device, and the tensors each replay fills."""

    host: Int[Tensor, " n"]  # pinned
    block: Int[Tensor, " n"]
    copied: torch.cuda.Event  # the host's block may be overwritten
    graph: torch.cuda.CUDAGraph
    out: T


class Graphs:
    """Captured functions of one memory. What a call returns is overwritten by the next call with the same key."""

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self.device = device
        self.enabled = enabled
        self._captured: dict[tuple[str, Layout], Captured[object]] = {}
        self._pool = torch.cuda.graph_pool_handle() if enabled else None

    def clear(self) -> None:
        """Forget all graphs: the tensors they write to have moved."""
        self._captured.clear()
        self._pool = torch.cuda.graph_pool_handle() if self.enabled else None  # the old one dies with its graphs

    def __call__(self, name: str, layout: Layout, block: Integers, fn: Callable[[Int[Tensor, " n"]], T]) -> T:
        """fn(block on the device). A graph is captured with an empty block of the layout, which touches no memory."""
        if not self.enabled:
            return fn(torch.from_numpy(block).to(self.device))
        found = self._captured.get((name, layout))
        if found is None:
            captured = self._capture(fn, blank(layout)[0])
            found = self._captured[name, layout] = cast(Captured[object], captured)
        found.copied.synchronize()
        found.host.numpy()[:] = block
        found.block.copy_(found.host, non_blocking=True)
        found.copied.record()
        found.graph.replay()
        return cast(T, found.out)

    def _capture(self, fn: Callable[[Int[Tensor, " n"]], T], empty: Integers) -> Captured[T]:
        host = torch.from_numpy(empty).pin_memory()
        block = host.to(self.device)
        graph, out = self.capture(lambda: fn(block))
        return Captured(host=host, block=block, copied=torch.cuda.Event(), graph=graph, out=out)

    def capture(self, fn: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """Capture a function of device memory alone; it runs once before, and once is not to matter."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # compiles the kernels and lets libraries allocate, which a capture may not
            fn()
        torch.cuda.current_stream(self.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            out = fn()
        return graph, out
