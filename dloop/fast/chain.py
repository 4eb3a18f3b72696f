"""EAGLE-3 on the fast path: the rows of all waiting positions in one forward, then a whole stage in another.

A row stands in the store where its position is, so what a stage wrote needs no record: the next round writes over it.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.drafters.chain import ChainDrafter
from dloop.drafters.proposal import to_stage
from dloop.fast.beams import to_tree
from dloop.fast.chain_memory import MOST_ROWS, Before, FastChainMemory
from dloop.fast.drafter_memory import MOST_WAITING
from dloop.fast.graphs import Forward
from dloop.fast.lease import lease
from dloop.fast.rows import BlockRows, Run
from dloop.fast.runner import Arrival
from dloop.fast.target import START_CONTEXT
from dloop.fast.weights import ChainStack, chain_stack
from dloop.trees.shape import TreeShape
from dloop.types import Features, Sampling, Stage, StageRequest

log = logging.getLogger("dloop")


@dataclass(frozen=True)
class FastChainDrafter(ChainDrafter):
    """A loaded EAGLE-3 drafter on the fast path. The twin's weights become views of the fused ones."""

    obeys_rules = False
    memories: "list[FastChainMemory]" = field(default_factory=list["FastChainMemory"], compare=False, repr=False)

    @classmethod
    def of(cls, twin: ChainDrafter) -> "FastChainDrafter":
        """The same drafter on the fast path. Raises UserError for what it does not compute."""
        fast = cls(**facts_of(twin))
        _ = fast.stack
        return fast

    @cached_property
    def stack(self) -> ChainStack:
        """Fused weights."""
        return chain_stack(self.model, self.name)

    def with_trees(self, trees: TreeShape | None) -> ChainDrafter:
        """The same drafter with stages of this shape; weights, stores and graphs are shared."""
        known = len(self.stack.kept)
        if trees is not None and trees.topk > known:
            log.info("the twin drafts: a beam of %d is wider than the head's vocabulary of %d", trees.topk, known)
            return replace(ChainDrafter(**facts_of(self)), trees=trees)
        return self._with(replace(self, trees=trees))

    def at_depth(self, depth: int) -> "FastChainDrafter":
        return self._with(replace(self, depth=depth))

    def _with(self, other: "FastChainDrafter") -> "FastChainDrafter":
        vars(other)["stack"] = self.stack
        return other

    def open(self, slots: int = 1, context: int = START_CONTEXT) -> "ChainSession":
        """Memory for one session; stores and graphs of ended sessions are taken over."""
        return lease(
            self.memories,
            lambda _memory: True,
            lambda: FastChainMemory(self.stack, self.vocabulary, slots, context),
            lambda memory: ChainSession(memory, self),
        )


def facts_of(drafter: ChainDrafter) -> dict[str, Any]:
    """What its twin knows too."""
    return {each.name: getattr(drafter, each.name) for each in fields(ChainDrafter)}


@dataclass
class Waiting:
    """One sequence: its rows of verified positions, and the positions without one: each waits for the token after it.

    After a round's first stage only the last still waits; its row, made of an anchor nobody has verified, was a guess.
    """

    features: Float[Tensor, "n F"]
    tokens: list[int] = field(default_factory=list[int])
    committed: int = 0

    @property
    def verified(self) -> int:
        """Positions that `extend` brought."""
        return self.committed + len(self.tokens)


class Manner(NamedTuple):
    """What stages drafted in one forward share."""

    law: Sampling | None  # whatever the seed; None: the most likely tokens
    nodes: int  # of a tree; 0: a chain


class ChainSession:
    """One session's use of a memory, under the loop's law: committed rows + a speculative tail."""

    def __init__(self, memory: FastChainMemory, drafter: FastChainDrafter) -> None:
        self.memory = memory
        self.drafter = drafter
        self.slots: dict[int, Waiting] = {}
        self.ahead: dict[int, tuple[int, int]] = {}  # the stage whose anchor is read already, and the anchor, by slot

    @property
    def stage_len(self) -> int:
        return self.drafter.stage_len

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        """Only stores: the rows of all slots are made together by the next `draft`."""
        if position == 0:
            self.slots[slot] = Waiting(features.taps[:0])
        waiting = self.slots[slot]
        assert waiting.verified == position
        waiting.tokens += tokens
        waiting.features = torch.cat([waiting.features, features.taps])  # a copy: the target's answer does not last

    @torch.no_grad()
    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        """One stage for each request: all that are drafted in one manner in one forward."""
        for request in requests:
            self.memory.make_room(request.slot, self._anchor(request) + self._rows_after(request))
        for request in requests:
            if request.index == 0:
                self.ahead.pop(request.slot, None)
        before = self._read([request for request in requests if request.index == 0])
        before |= self._go_on([request for request in requests if request.index])
        stages: dict[int, Stage] = {}
        for manner in dict.fromkeys(self._manner(request) for request in requests):
            alike = [request for request in requests if self._manner(request) == manner]
            found = (
                self._trees(alike, manner.nodes, before) if manner.nodes else self._chains(alike, manner.law, before)
            )
            before = {}
            stages |= {request.slot: stage for request, stage in zip(alike, found, strict=True)}
        return [stages[request.slot] for request in requests]

    def _manner(self, request: StageRequest) -> Manner:
        law, nodes = request.sampling, self.drafter.nodes(request.index)
        assert law is None or not nodes
        return Manner(None if law is None else replace(law, seed=0), nodes)

    def _rows_after(self, request: StageRequest) -> int:
        """Most rows of a stage from its anchor's position on."""
        trees, nodes = self.drafter.trees, self.drafter.nodes(request.index)
        return self.stage_len * (trees.topk if trees is not None and nodes else 1)

    def _anchor(self, request: StageRequest) -> int:
        """The anchor's position."""
        return self.slots[request.slot].verified + request.index * self.stage_len

    def _read(self, requests: Sequence[StageRequest]) -> dict[str, Forward[None]]:
        """Make the rows of all waiting positions, as many in a forward as it takes; the last reads the anchor.

        What is left to be made in the stage's graph: the last forward, unless it has the many rows of a prompt.
        """
        rows, runs = BlockRows([], [], []), list[Run]()
        for request in requests:
            waiting, done = self.slots[request.slot], 0
            tokens = [*waiting.tokens[1:], request.anchor]
            while done < len(tokens):
                count = min(len(tokens) - done, MOST_ROWS - len(rows.token))
                first, start = len(rows.token), waiting.committed + done
                runs.append(Run(request.slot, first, count, start))
                rows.token.extend(tokens[done : done + count])
                rows.position.extend(range(start, start + count))
                done += count
                rows.state.extend([-1] * (count - 1) + [request.slot if done == len(tokens) else -1])
                self.memory.features[first : first + count].copy_(waiting.features[done - count : done])
                if len(rows.token) == MOST_ROWS:
                    self._now(self.memory.read(rows, runs))
                    rows, runs = BlockRows([], [], []), list[Run]()
            waiting.committed += len(tokens) - 1
            waiting.tokens, waiting.features = waiting.tokens[-1:], waiting.features[-1:].clone()
        if len(rows.token) > MOST_WAITING:
            self._now(self.memory.read(rows, runs))
            return {}
        return {"read": self.memory.read(rows, runs)} if runs else {}

    def _now(self, reading: Forward[None]) -> None:
        self.memory.graphs("read", reading)

    def _go_on(self, requests: Sequence[StageRequest]) -> dict[str, Forward[None]]:
        """What makes the row that reads each further stage's anchor, where there is none yet."""
        ahead = {request.slot: self.ahead.pop(request.slot, None) for request in requests}
        for request in requests:
            if ahead[request.slot] not in (None, (request.index, request.anchor)):  # asked with an anchor of its own
                self.memory.go_back(request.slot)
                ahead[request.slot] = None
        requests = [request for request in requests if ahead[request.slot] is None]
        return {"go on": self.memory.go_on(*self._one_each(requests))} if requests else {}

    def _one_each(self, requests: Sequence[StageRequest]) -> tuple[BlockRows, list[Run]]:
        """Each slot's row that reads the anchor."""
        positions, slots = [self._anchor(request) - 1 for request in requests], [request.slot for request in requests]
        runs = [Run(slot, row, 1, position) for row, (slot, position) in enumerate(zip(slots, positions, strict=True))]
        return BlockRows([request.anchor for request in requests], positions, slots), runs

    def _chains(self, requests: Sequence[StageRequest], law: Sampling | None, before: Before) -> list[Stage]:
        """A chain for each request, brought to the host in one copy."""
        for request in requests:
            if request.sampling is not None:
                self.memory.seed(request.slot, request.sampling.seed)
        drafted = self.memory.chain(*self._one_each(requests), self.stage_len, law, before)
        arrival = Arrival(drafted.packed[: len(requests)])
        alone = len(self.slots) == 1 and self.memory.overlaps
        if alone:  # the host's decision takes longer than that; if the stage never comes, the next round writes over it
            self.memory.go_ahead(*self._one_each([replace(request, index=request.index + 1) for request in requests]))
        packed = arrival.wait()
        if alone:
            (request,), ((tokens, _, _),) = requests, packed
            self.ahead = {request.slot: (request.index + 1, int(tokens[-1]))}
        if drafted.probs is None:
            return [to_stage(one) for one in packed]
        return [
            to_stage(one, self.drafter.model.spread(probs)) for one, probs in zip(packed, drafted.probs, strict=False)
        ]

    def _trees(self, requests: Sequence[StageRequest], nodes: int, before: Before) -> list[Stage]:
        """A tree for each request, brought to the host in one copy."""
        assert self.drafter.trees is not None
        width, rows, runs = self.drafter.trees.topk, BlockRows([], [], []), list[Run]()
        for request in requests:
            anchor = self._anchor(request)
            runs.append(Run(request.slot, len(rows.token), width, anchor))
            for values, value in zip(rows, (request.anchor, anchor, request.slot), strict=True):
                values.extend([value] * width)
        arrival = Arrival(self.memory.trees(rows, runs, self.stage_len, nodes, before)[: len(requests)])
        return [to_tree(one, self.stage_len) for one in arrival.wait()]
