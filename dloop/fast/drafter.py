"""Block drafters on the fast path: a whole stage, heads included, in one forward over flat rows of many sequences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import NamedTuple, TypeVar

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.drafters.block import BlockDrafter
from dloop.drafters.gap import new_gap_rows
from dloop.drafters.proposal import Proposal, pack, to_stage
from dloop.fast.lease import lease
from dloop.fast.ops import Ops
from dloop.fast.rows import BlockRows, RowBatch, Run, pack_block
from dloop.fast.runner import Runner
from dloop.fast.stack import run_stack
from dloop.fast.target import START_CONTEXT
from dloop.fast.weights import Stack, drafter_stack
from dloop.kernels.shapes import HeadWeights
from dloop.sampling import Draw, salted_gumbel
from dloop.trees.shape import TreeShape
from dloop.types import Features, Sampling, Stage, StageRequest

T = TypeVar("T")

START_STAGES = 16  # stages of a round whose states are kept before the buffer first grows
MOST_GRAPHED = 512  # context rows of one `extend` that goes through a graph; a prompt does not


@dataclass(frozen=True)
class FastBlockDrafter(BlockDrafter):
    """A loaded block drafter on the fast path. The twin's weights become views of the fused ones."""

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
            lambda: FastBlockMemory(self, slots, min(context, self.config.max_positions)),
            lambda memory: DrafterSession(memory, self),
        )


class Manner(NamedTuple):
    """What stages drafted in one forward share."""

    law: Sampling | None  # whatever the seed; None: the most likely tokens
    tree: bool  # read from the final states afterwards


class Block:
    """Rows of a drafter's forward on the host, run by run."""

    def __init__(self) -> None:
        self.rows = BlockRows([], [], [])
        self.runs: list[Run] = []

    def add(self, run: Run, token: Iterable[int], position: Iterable[int], state: Iterable[int]) -> None:
        """One run more."""
        self.runs.append(run)
        self.rows.token.extend(token)
        self.rows.position.extend(position)
        self.rows.state.extend(state)


class Staged(NamedTuple):
    """What a stage's forward leaves: final states, and all sequences' packed proposals (None: read later)."""

    hidden: Float[Tensor, "R D"]
    packed: Float64[Tensor, "S 3 k"] | None
    probs: Float[Tensor, "S k V"] | None = None  # the laws that tokens were drawn from


class FastBlockMemory(Runner):
    """A static store, the final states of the stages drafted since the last verification, and the graphs over both."""

    def __init__(self, drafter: FastBlockDrafter, slots: int, context: int) -> None:
        super().__init__(drafter.stack, slots, context)
        self.drafter = drafter
        self.features = self.blank(MOST_GRAPHED, drafter.model.fc.weight.shape[1])
        config = drafter.config  # one slot more takes the rows that nobody reads
        self.states = self.blank(slots + 1, START_STAGES, config.block_size, config.hidden_size)

    def make_room(self, slot: int, rows: int, stages: int = 1) -> bool:
        """The same, and the states of this many stages."""
        moved = super().make_room(slot, rows)
        had_slots, had_stages, size, width = self.states.shape
        if self.store.slots >= had_slots or stages > had_stages:
            old, count = self.states, max(stages, had_stages)
            self.states = old.new_zeros(self.store.slots + 1, count, size, width)
            self.states[:had_slots, :had_stages] = old
            self.graphs.clear()
            moved = True
        return moved

    def state_row(self, slot: int, stage: int, row: int) -> int:
        """Where a stage's row is kept, counted over all slots."""
        _, stages, size, _ = self.states.shape
        return (slot * stages + stage) * size + row

    def extend(self, run: Run, position: int, taps: Float[Tensor, "n F"]) -> None:
        """Store the context rows of verified positions."""
        self.make_room(run.slot, run.base + run.count)
        positions = list(range(position, position + run.count))
        rows = BlockRows(token=[0] * run.count, position=positions, state=[-1] * run.count)
        graphed = self.kernels and run.count <= MOST_GRAPHED
        if graphed:
            self.features[: run.count].copy_(taps)
        source = self.features if graphed else taps

        def forward(ops: Ops, batch: RowBatch) -> None:
            states = source[: len(batch.token)]
            fc = ops.linear(states, self.drafter.model.fc.weight)
            blank_rows = torch.zeros(len(states), fc.shape[-1], dtype=states.dtype, device=states.device)
            gain = self.drafter.model.hidden_norm.weight
            self._project(ops, ops.add_norm(blank_rows, fc, gain, self.drafter.stack.eps), batch)

        whole = self.forward([run], partial(pack_block, rows), forward, kernels=graphed)
        if graphed:
            self.graphs("extend", whole)
        else:
            whole.now(self.graphs.device)

    def stage(self, gaps: Block, stages: Block, manner: Manner) -> Staged:
        """Store kept final states as context of positions nobody has verified yet, then draft one stage for each run
        and keep its own.
        """
        drafter, size = self.drafter, self.drafter.config.block_size

        def fill(ops: Ops, batch: RowBatch) -> None:
            self._project(ops, self._states[self._kept(batch)], batch)

        def forward(ops: Ops, batch: RowBatch) -> Staged:
            embedded = F.embedding(batch.token, drafter.vocabulary.embedding)
            hidden = run_stack(ops, drafter.stack, embedded, batch, self.store)[1]
            self._states.index_copy_(0, self._kept(batch), hidden)
            if manner.tree:
                return Staged(hidden, None)
            if manner.law is not None:
                return self._drawn(hidden, batch, manner.law, len(stages.runs))
            anchors = batch.token[: len(hidden) // size * size : size].long()
            return Staged(hidden, ops.propose(hidden, anchors, drafter.model, drafter.vocabulary))

        # rows that fill a bucket up are not drawn for
        name = f"{manner} {len(stages.runs)}" if manner.law else f"{manner}"
        before = [self.forward(gaps.runs, partial(pack_block, gaps.rows), fill)] if gaps.runs else []
        return self.graphs(name, self.forward(stages.runs, partial(pack_block, stages.rows), forward), *before)

    def _drawn(self, hidden: Float[Tensor, "R D"], batch: RowBatch, law: Sampling, count: int) -> Staged:
        """Proposals drawn from their laws, one sequence after the other: the heads' loops are over single tokens."""
        drafter, size = self.drafter, self.drafter.config.block_size
        found: list[Proposal] = []
        salts, steps = self.salts[batch.place.slot.long()], self.drafter.config.stage_len
        for first in range(0, count * size, size):
            where = batch.place.position[first] + torch.arange(1, steps + 1, device=hidden.device)
            noise = salted_gumbel(salts[first].expand(steps), where, drafter.vocabulary.head.shape[0])
            draw = Draw(law, noise=noise)
            anchor = batch.token[first].long()
            found.append(drafter.model.propose(hidden[first : first + size], anchor, drafter.vocabulary, draw))
        probs = [one.probs for one in found if one.probs is not None]
        return Staged(hidden, torch.stack([pack(one) for one in found]), torch.stack(probs))

    @property
    def _states(self) -> Float[Tensor, "n D"]:
        return self.states.flatten(0, 2)

    def _kept(self, batch: RowBatch) -> Int[Tensor, " R"]:
        """The rows' places among the kept states; -1 is the last one."""
        return batch.state.long().remainder(len(self._states))

    def _project(self, ops: Ops, states: Float[Tensor, "R D"], batch: RowBatch) -> None:
        """Every layer's keys and values of context or gap rows: joined as they are, without an input norm."""
        heads = self.drafter.stack.heads
        skip = heads.queries * heads.dim
        for index, layer in enumerate(self.drafter.stack.layers):
            bias = None if layer.head.bias is None else layer.head.bias[skip:]
            weights = HeadWeights(bias, layer.head.query_gain, layer.head.key_gain)
            parts = ops.linear(states, layer.qkv[skip:])
            ops.rope_store(parts, weights, heads._replace(queries=0), batch, self.store.layer(index))


class DrafterSession:
    """One session's use of a memory, under the loop's law: committed rows + a speculative tail."""

    def __init__(self, memory: FastBlockMemory, drafter: FastBlockDrafter) -> None:
        self.memory = memory
        self.drafter = drafter
        self.committed: dict[int, int] = {}
        self.length: dict[int, int] = {}

    @property
    def stage_len(self) -> int:
        return self.drafter.config.stage_len

    @torch.no_grad()
    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        if position == 0:
            self.committed[slot] = 0
        assert self.committed[slot] == position
        self.memory.extend(Run(slot, 0, len(tokens), position), position, features.taps)
        self.committed[slot] = self.length[slot] = position + len(tokens)

    @torch.no_grad()
    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        """One stage for each request: all that are drafted in one manner in one forward."""
        for request in requests:
            if request.index == 0:
                self.length[request.slot] = self.committed[request.slot]
        stages: dict[int, Stage] = {}
        for manner in dict.fromkeys(self._manner(request) for request in requests):
            alike = [request for request in requests if self._manner(request) == manner]
            stages |= {request.slot: stage for request, stage in zip(alike, self._stages(alike, manner), strict=True)}
        return [stages[request.slot] for request in requests]

    def _manner(self, request: StageRequest) -> Manner:
        law = request.sampling
        return Manner(None if law is None else replace(law, seed=0), self.drafter.nodes(request.index) > 0)

    def _stages(self, requests: Sequence[StageRequest], manner: Manner) -> list[Stage]:
        staged = self._stage(requests, manner)
        if staged.packed is not None:
            packed = staged.packed[: len(requests)].tolist()  # sync
            if staged.probs is None:
                return [to_stage(one) for one in packed]
            laws = staged.probs[: len(requests)].clone()  # the next stage is drawn in the same memory
            return [to_stage(one, law) for one, law in zip(packed, laws, strict=True)]
        size, stages = self.drafter.config.block_size, list[Stage]()
        for i, request in enumerate(requests):
            hidden, anchor = staged.hidden[i * size : (i + 1) * size], torch.tensor(request.anchor)
            stages.append(self.drafter.read_stage(hidden, anchor.to(hidden.device), request, self._start(request)))
        return stages

    def _start(self, request: StageRequest) -> int:
        """The anchor's position."""
        return self.committed[request.slot] + request.index * self.stage_len

    def _stage(self, requests: Sequence[StageRequest], manner: Manner) -> Staged:
        config, stages = self.drafter.config, Block()
        size = config.block_size
        gaps = self._gaps(requests)
        for request in requests:
            slot, start = request.slot, self._start(request)
            stages.add(
                Run(slot, len(stages.rows.token), size, self.length[slot]),
                [request.anchor, *[config.mask_token_id] * (size - 1)],
                range(start, start + size),
                [self.memory.state_row(slot, request.index, row) for row in range(size)],
            )
            if request.sampling is not None:
                self.memory.seed(slot, request.sampling.seed)
        return self.memory.stage(gaps, stages, manner)

    def _gaps(self, requests: Sequence[StageRequest]) -> Block:
        """The earlier stages' own final states, as context of the positions nobody has verified yet; room for all."""
        config, block = self.drafter.config, Block()
        shape = config.stage_len, config.label_shift
        new = {request.slot: new_gap_rows(config.gap_rows, request.index, *shape) for request in requests}
        for request in requests:  # before any row's place is told: the states move where they grow
            rows = self.length[request.slot] + len(new[request.slot]) + config.block_size
            self.memory.make_room(request.slot, rows, request.index + 1)
        for slot, gap in new.items():
            if not gap:  # as after a stage of one token, which has no state between its two anchors
                continue
            block.add(
                Run(slot, len(block.rows.token), len(gap), self.length[slot]),
                [0] * len(gap),
                [self.committed[slot] + row.offset for row in gap],
                [self.memory.state_row(slot, row.stage, row.row) for row in gap],
            )
            self.length[slot] += len(gap)
        return block
