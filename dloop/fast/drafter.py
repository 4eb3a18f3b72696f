"""Block drafters on the fast path: a whole stage, heads included, in one forward over flat rows of many sequences."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import torch

from dloop.drafters.block import BlockDrafter
from dloop.drafters.gap import GapRow, new_gap_rows
from dloop.drafters.proposal import to_stage
from dloop.fast.drafter_memory import MOST_GRAPHED, MOST_WAITING, Block, FastBlockMemory, Manner, Staged, Staging
from dloop.fast.lease import lease
from dloop.fast.rows import Run
from dloop.fast.runner import Arrival
from dloop.fast.target import START_CONTEXT
from dloop.fast.weights import Stack, drafter_stack
from dloop.trees.shape import TreeShape
from dloop.types import Features, Stage, StageRequest


@dataclass(frozen=True)
class FastBlockDrafter(BlockDrafter):
    """A loaded block drafter on the fast path. The twin's weights become views of the fused ones."""

    obeys_rules = False
    memories: "list[FastBlockMemory]" = field(default_factory=list["FastBlockMemory"], compare=False, repr=False)

    @classmethod
    def of(cls, twin: BlockDrafter) -> "FastBlockDrafter":
        """The same drafter on the fast path. Raises UserError for what it does not compute."""
        fast = cls(name=twin.name, family=twin.family, model=twin.model, vocabulary=twin.vocabulary, folder=twin.folder)
        _ = fast.stack
        return fast

    @cached_property
    def stack(self) -> Stack:
        """Fused weights."""
        return drafter_stack(self.model, self.name)

    def with_trees(self, trees: TreeShape | None) -> "FastBlockDrafter":
        """The same drafter with stages of this shape; weights, stores and graphs are shared."""
        other = replace(self, trees=trees)
        vars(other)["stack"] = self.stack
        return other

    def open(self, slots: int = 1, context: int = START_CONTEXT) -> "DrafterSession":
        """Memory for one session; stores and graphs of ended sessions are taken over."""
        return lease(
            self.memories,
            lambda _memory: True,
            lambda: FastBlockMemory(self, self.stack, slots, min(context, self.config.max_positions)),
            lambda memory: DrafterSession(memory, self),
        )


class Ready(NamedTuple):
    """The next stage of one sequence, made ready before its anchor is known."""

    request: StageRequest  # anchor 0
    length: int  # rows of its slot, the gap included
    staging: Staging


class DrafterSession:
    """One session's use of a memory, under the loop's law: committed rows + a speculative tail."""

    def __init__(self, memory: FastBlockMemory, drafter: FastBlockDrafter) -> None:
        self.memory = memory
        self.drafter = drafter
        self.committed: dict[int, int] = {}
        self.length: dict[int, int] = {}
        self.waiting = Block()  # context rows that the next stage's forward will read
        self.ahead: dict[int, int] = {}  # stages whose gap is stored already, by slot
        self.ready: Ready | None = None
        self.foreseen: Features | None = None  # whose rows are stored already, from the committed ones on

    @property
    def stage_len(self) -> int:
        return self.drafter.config.stage_len

    @property
    def is_ahead(self) -> bool:
        """Whether the device can be given work before the host knows that it is needed: for one sequence alone."""
        return len(self.committed) == 1 and self.memory.overlaps

    @torch.no_grad()
    def read_ahead(self, slot: int, position: int, features: Features) -> None:
        """Store all rows that a verification may accept while it runs; `extend` says which of them stay."""
        if self.is_ahead and len(features.taps) <= MOST_WAITING:
            self.extend(slot, position, [0] * len(features.taps), features)
            self.committed[slot], self.foreseen = position, features

    @torch.no_grad()
    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        if position == 0:
            self.committed[slot] = 0
        assert self.committed[slot] == position
        count, foreseen = len(tokens), self.foreseen
        self.foreseen = self.ready = None  # the states may move where another slot needs room
        if foreseen is not None and self.is_ahead and foreseen.taps.data_ptr() == features.taps.data_ptr():
            self.committed[slot] = self.length[slot] = position + count
            return
        if len(self.waiting.rows.token) + count > MOST_GRAPHED or any(run.slot == slot for run in self.waiting.runs):
            self._read()
        self.memory.make_room(slot, position + count)
        self.committed[slot] = self.length[slot] = position + count
        if count > MOST_GRAPHED:
            self.memory.read_long(Block().add_context(slot, position, count), features.taps)
            return
        first = len(self.waiting.rows.token)
        self.memory.features[first : first + count].copy_(features.taps)  # the target's next answer overwrites them
        self.waiting.add_context(slot, position, count)
        if count > MOST_WAITING or len(self.committed) == 1:  # alone: the device reads while the host goes on
            self._read()

    def _read(self) -> None:
        """Store the context rows that wait."""
        if self.waiting.runs:
            self.memory.read(self.waiting)
        self.waiting = Block()

    @torch.no_grad()
    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        """One stage for each request: all that are drafted in one manner in one forward."""
        for request in requests:
            if request.index == 0:
                self.length[request.slot] = self.committed[request.slot]
                self.ahead.pop(request.slot, None)
                self.ready = None
        stages: dict[int, Stage] = {}
        for manner in dict.fromkeys(self._manner(request) for request in requests):
            alike = [request for request in requests if self._manner(request) == manner]
            stages |= {request.slot: stage for request, stage in zip(alike, self._stages(alike, manner), strict=True)}
        return [stages[request.slot] for request in requests]

    def _manner(self, request: StageRequest) -> Manner:
        law, nodes = request.sampling, self.drafter.nodes(request.index)
        return Manner(None if law is None else replace(law, seed=0), self.drafter.trees if nodes else None, nodes)

    def _stages(self, requests: Sequence[StageRequest], manner: Manner) -> list[Stage]:
        staged = self._stage_made_ready(requests, manner) or self._stage(requests, manner)
        arrival = Arrival(staged.packed[: len(requests)])
        self._go_ahead(requests)
        packed = arrival.wait()
        if staged.probs is None:
            return list(map(staged.build or to_stage, packed))
        laws = staged.probs[: len(requests)].clone()  # the next stage is drawn in the same memory
        return [to_stage(one, law) for one, law in zip(packed, laws, strict=True)]

    def _start(self, request: StageRequest) -> int:
        """The anchor's position."""
        return self.committed[request.slot] + request.index * self.stage_len

    def _stage(self, requests: Sequence[StageRequest], manner: Manner) -> Staged:
        gaps, stages = self._gaps(requests), Block()
        for request in requests:
            self._add_stage(stages, request)
            if request.sampling is not None:
                self.memory.seed(request.slot, request.sampling.seed)
        contexts, self.waiting = self.waiting, Block()
        return self.memory.stage(self.memory.staging(contexts, gaps, stages, manner))

    def _add_stage(self, stages: Block, request: StageRequest) -> None:
        """A stage's rows, behind what its slot holds."""
        config, slot, start = self.drafter.config, request.slot, self._start(request)
        size = config.block_size
        stages.add(
            Run(slot, len(stages.rows.token), size, self.length[slot]),
            [request.anchor, *[config.mask_token_id] * (size - 1)],
            range(start, start + size),
            [self.memory.state_row(slot, request.index, row) for row in range(size)],
        )

    def _stage_made_ready(self, requests: Sequence[StageRequest], manner: Manner) -> Staged | None:
        """The stage that `_go_ahead` made ready, if it is the one."""
        ready, self.ready = self.ready, None
        if ready is None or [replace(each, anchor=0) for each in requests] != [ready.request]:
            return None
        (request,) = requests
        self.length[request.slot] = ready.length
        ready.staging.drafting.block[0] = request.anchor  # the first row's token
        return self.memory.stage(ready.staging)

    def _gaps(self, requests: Sequence[StageRequest]) -> Block:
        """The earlier stages' own final states, as context of the positions nobody has verified yet; room for all."""
        new = {request.slot: self._new_gap(request.index) for request in requests}
        for request in requests:  # before any row's place is told: the states move where they grow
            rows = self.length[request.slot] + len(new[request.slot]) + self.drafter.config.block_size
            self.memory.make_room(request.slot, rows, request.index + 1)
        stored = {request.slot for request in requests if self.ahead.get(request.slot) == request.index}
        block = self._gap_rows({slot: gap for slot, gap in new.items() if slot not in stored})
        for slot, gap in new.items():
            self.length[slot] += len(gap)
        return block

    def _go_ahead(self, requests: Sequence[StageRequest]) -> None:
        """While the device drafts for one sequence alone: ask for the gap of a further stage, and make the stage ready.

        The host's decision takes longer than that. If the stage never comes, the next `extend` writes over it.
        """
        if not self.is_ahead:
            return
        (asked,) = requests
        request = replace(asked, anchor=0, index=asked.index + 1)
        slot, gap = request.slot, self._new_gap(request.index)
        if gap:
            self.memory.fill(self._gap_rows({slot: gap}))  # no more than the stage before had room for
            self.ahead[slot] = request.index
        before, length = self.length[slot], self.length[slot] + len(gap)
        if self.memory.has_room(slot, length + self.drafter.config.block_size, request.index + 1):
            self.length[slot], stages = length, Block()
            self._add_stage(stages, request)
            self.length[slot] = before
            self.ready = Ready(request, length, self.memory.staging(Block(), Block(), stages, self._manner(request)))

    def _new_gap(self, index: int) -> list[GapRow]:
        config = self.drafter.config
        return new_gap_rows(config.gap_rows, index, config.stage_len, config.label_shift)

    def _gap_rows(self, gaps: dict[int, list[GapRow]]) -> Block:
        """Rows of these gaps, behind what their slots hold."""
        block = Block()
        for slot, gap in gaps.items():
            if not gap:  # as after a stage of one token, which has no state between its two anchors
                continue
            block.add(
                Run(slot, len(block.rows.token), len(gap), self.length[slot]),
                [0] * len(gap),
                [self.committed[slot] + row.offset for row in gap],
                [self.memory.state_row(slot, row.stage, row.row) for row in gap],
            )
        return block
