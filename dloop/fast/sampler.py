"""The target's choices and verdicts at T > 0 as graphs: fifty small operations on some rows are all launches."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dloop.fast.graphs import Graphs, Parts
from dloop.judge import Sampler, numbers_of, rejected
from dloop.sampling import Sampling, choose, salt
from dloop.types import Draft

MOST_ROWS = 64  # of a graph: more rows are bound by arithmetic
MOST_GRAPHS = 64

Key = tuple[str, int, torch.Size, Sampling]


@dataclass(frozen=True)
class Captured:
    """One graph: what it reads beside the logits, and what it fills."""

    graph: Parts
    numbers: Int64[Tensor, "m n"]
    q: Float[Tensor, "n-1 V"] | None
    out: Int64[Tensor, " _"]


class GraphedSampler(Sampler):
    """The same for logits that stand at the same addresses again and again, as a captured forward's do.

    A graph reads an address, whatever stands there: it is replayed only for logits at the very address, of the very
    shape, that it was captured for.
    """

    def __init__(self, device: torch.device) -> None:
        self.graphs = Graphs(device, enabled=True)
        self._captured: dict[Key, Captured] = {}
        self._q: Float[Tensor, "m V"] | None = None  # of all graphs: they run one after the other

    @torch.no_grad()
    def pick(self, logits: Float[Tensor, "n V"], sampling: Sampling, positions: list[int]) -> list[int]:
        if sampling.is_greedy or len(logits) > MOST_ROWS:
            return super().pick(logits, sampling, positions)

        def capture() -> Captured:
            numbers: Int64[Tensor, "2 n"] = torch.zeros(2, len(logits), dtype=torch.int64, device=logits.device)
            graph, out = self.graphs.capture(lambda: choose(logits, sampling, *numbers))
            return Captured(graph, numbers, None, out)

        found = self._find("pick", logits, sampling, capture)
        found.numbers.copy_(torch.tensor([[salt(sampling.seed)] * len(logits), positions]))
        found.graph.replay()
        return found.out.tolist()  # sync

    @torch.no_grad()
    def reject(self, logits: Float[Tensor, "n V"], sampling: Sampling, draft: Draft) -> list[int]:
        if len(logits) > MOST_ROWS or not draft.probs:
            return super().reject(logits, sampling, draft)

        def capture() -> Captured:
            numbers: Int64[Tensor, "4 n"] = torch.zeros(4, len(logits), dtype=torch.int64, device=logits.device)
            if self._q is None:
                self._q = torch.empty(MOST_ROWS - 1, logits.shape[1], device=logits.device)
            q = self._q[: len(logits) - 1]
            graph, out = self.graphs.capture(lambda: rejected(logits, q, sampling, numbers))
            return Captured(graph, numbers, q, out)

        found = self._find("reject", logits, sampling, capture)
        found.numbers.copy_(numbers_of(draft, sampling))
        torch.cat(draft.probs, out=found.q)
        found.graph.replay()
        return found.out.tolist()  # sync

    def _find(
        self, name: str, logits: Float[Tensor, "n V"], sampling: Sampling, capture: Callable[[], Captured]
    ) -> Captured:
        key = name, logits.data_ptr(), logits.shape, replace(sampling, seed=0)
        if key not in self._captured:
            if len(self._captured) == MOST_GRAPHS:
                self._captured.clear()
                self.graphs.clear()
            self._captured[key] = capture()
        return self._captured[key]
