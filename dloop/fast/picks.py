"""The target's choice at T > 0 as one graph: fifty small operations on a row of logits are all launches."""

from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dloop.fast.graphs import Graphs
from dloop.judge import pick
from dloop.sampling import Sampling, choose, salt

MOST_ROWS = 64  # of a graph: more rows are bound by arithmetic
MOST_GRAPHS = 64

Key = tuple[int, torch.Size, Sampling]


class GraphedPicks:
    """`judge.pick` for logits that stand at the same addresses again and again, as a captured forward's do.

    A graph reads an address, whatever stands there: it is replayed only for logits at the very address, of the very
    shape, that it was captured for.
    """

    def __init__(self, device: torch.device) -> None:
        self.graphs = Graphs(device, enabled=True)
        self._captured: dict[Key, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, logits: Float[Tensor, "n V"], sampling: Sampling, positions: list[int]) -> list[int]:
        if sampling.is_greedy or len(logits) > MOST_ROWS:
            return pick(logits, sampling, positions)
        key = (logits.data_ptr(), logits.shape, replace(sampling, seed=0))
        found = self._captured.get(key)
        if found is None:
            if len(self._captured) == MOST_GRAPHS:
                self._captured.clear()
            found = self._captured[key] = self._capture(logits, sampling)
        graph, numbers, out = found
        numbers.copy_(torch.tensor([[salt(sampling.seed)] * len(logits), positions]))
        graph.replay()
        return out.tolist()  # sync

    def _capture(self, logits: Float[Tensor, "n V"], sampling: Sampling) -> tuple[torch.cuda.CUDAGraph, Tensor, Tensor]:
        numbers: Int64[Tensor, "2 n"] = torch.zeros(2, len(logits), dtype=torch.int64, device=logits.device)
        graph, out = self.graphs.capture(lambda: choose(logits, sampling, numbers[0], numbers[1]))
        return graph, numbers, out
