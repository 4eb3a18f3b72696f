"""The memory of a block drafter on the fast path, and what is computed over it in one forward."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dloop.drafters.block import BlockDrafter
from dloop.drafters.proposal import Proposal, Unbuilt, pack
from dloop.fast.graphs import Forward
from dloop.fast.ops import Ops
from dloop.fast.rows import BlockRows, RowBatch, Run, pack_block
from dloop.fast.runner import Runner
from dloop.fast.stack import run_stack
from dloop.fast.weights import Stack
from dloop.kernels.shapes import HeadWeights
from dloop.sampling import Draw, salted_gumbel
from dloop.trees.shape import TreeShape
from dloop.types import Sampling, Stage

START_STAGES = 16  # stages of a round whose states are kept before the buffer first grows
MOST_WAITING = 64  # context rows of one text: a stage's graph is not captured again for every length of a prompt
MOST_GRAPHED = 512  # context rows that go through a graph at once; those of a longer prompt do not


class Manner(NamedTuple):
    """What stages drafted in one forward share."""

    law: Sampling | None  # whatever the seed; None: the most likely tokens
    trees: TreeShape | None  # None: chains
    nodes: int  # of a tree


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

    def add_context(self, slot: int, position: int, count: int) -> "Block":
        """A run of verified positions, which a store keeps where they stand."""
        run = Run(slot, len(self.rows.token), count, position)
        self.add(run, [0] * count, range(position, position + count), [-1] * count)
        return self


class Staged(NamedTuple):
    """What a stage's forward leaves of every sequence: packed proposals of chains, or the numbers of trees."""

    packed: Float64[Tensor, "S ..."]
    probs: Float[Tensor, "S k V"] | None = None  # the laws that tokens were drawn from
    build: Callable[[list[float]], Stage] | None = None  # a tree from its numbers


class Staging(NamedTuple):
    """A stage that is ready to be drafted."""

    name: str
    drafting: Forward[Staged]
    before: list[Forward[None]]


class FastBlockMemory(Runner):
    """A static store, the final states of the stages drafted since the last verification, and the graphs over both."""

    def __init__(self, drafter: BlockDrafter, stack: Stack, slots: int, context: int) -> None:
        super().__init__(stack, slots, context)
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

    def has_room(self, slot: int, rows: int, stages: int) -> bool:
        """Whether nothing has to move for so many rows and stages."""
        return slot < self.store.slots and rows <= self.store.capacity and stages <= self.states.shape[1]

    def state_row(self, slot: int, stage: int, row: int) -> int:
        """Where a stage's row is kept, counted over all slots."""
        _, stages, size, _ = self.states.shape
        return (slot * stages + stage) * size + row

    def read(self, contexts: Block) -> None:
        """Store context rows whose features stand in `features`, in this order."""
        self.graphs("read", self._context(contexts, self.features))

    def read_long(self, context: Block, taps: Float[Tensor, "n F"]) -> None:
        """Store more context rows than `features` has."""
        self._context(context, taps, kernels=False).now(self.graphs.device)

    def _context(self, contexts: Block, taps: Float[Tensor, "m F"], kernels: bool | None = None) -> Forward[None]:
        def forward(ops: Ops, batch: RowBatch) -> None:
            states = taps[: len(batch.token)]
            fc = ops.linear(states, self.drafter.model.fc.weight)
            blank_rows = torch.zeros(len(states), fc.shape[-1], dtype=states.dtype, device=states.device)
            gain = self.drafter.model.hidden_norm.weight
            self._project(ops, ops.add_norm(blank_rows, fc, gain, self.stack.eps), batch)

        return self.forward(contexts.runs, partial(pack_block, contexts.rows), forward, kernels)

    def fill(self, gaps: Block) -> None:
        """Store kept final states as context of positions nobody has verified yet."""
        self.graphs("fill", self._fill(gaps))

    def _fill(self, gaps: Block) -> Forward[None]:
        def forward(ops: Ops, batch: RowBatch) -> None:
            self._project(ops, self._states[self._kept(batch)], batch)

        return self.forward(gaps.runs, partial(pack_block, gaps.rows), forward)

    def stage(self, staging: Staging) -> Staged:
        """What `staging` says, in one graph."""
        return self.graphs(staging.name, staging.drafting, *staging.before)

    def staging(self, contexts: Block, gaps: Block, stages: Block, manner: Manner) -> Staging:
        """Read context rows whose features stand in `features`; store kept final states as context of positions nobody
        has verified yet; then draft one stage for each run and keep its own.
        """
        drafter, size = self.drafter, self.drafter.config.block_size

        def forward(ops: Ops, batch: RowBatch) -> Staged:
            hidden = run_stack(ops, self.stack, drafter.vocabulary.embedding, batch, self.store)[1]
            self._states.index_copy_(0, self._kept(batch), hidden)
            if manner.trees is not None:
                return self._trees(hidden, batch, manner.trees, manner.nodes, len(stages.runs))
            if manner.law is not None:
                return self._drawn(hidden, batch, manner.law, len(stages.runs))
            anchors = batch.token[: len(hidden) // size * size : size].long()
            return Staged(ops.propose(hidden, anchors, drafter.model, drafter.vocabulary))

        name, before = str(manner), list[Forward[None]]()
        if manner.law is not None or manner.trees is not None:
            name += f" {len(stages.runs)}"  # rows that fill a bucket up are not drawn for
        if contexts.runs:
            name, before = f"read, {name}", [self._context(contexts, self.features)]
        if gaps.runs:
            name = f"fill, {name}"
            before.append(self._fill(gaps))
        return Staging(name, self.forward(stages.runs, partial(pack_block, stages.rows), forward), before)

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
        return Staged(torch.stack([pack(one) for one in found]), torch.stack(probs))

    def _trees(self, hidden: Float[Tensor, "R D"], batch: RowBatch, shape: TreeShape, nodes: int, count: int) -> Staged:
        """One tree after the other: their expansions are over a few tokens."""
        drafter, size = self.drafter, self.drafter.config.block_size
        found: list[Unbuilt] = []
        for first in range(0, count * size, size):
            rows, anchor = hidden[first : first + size], batch.token[first].long()
            found.append(drafter.model.tree(rows, anchor, drafter.vocabulary, shape, nodes))
        return Staged(torch.stack([tree.numbers for tree in found]), build=found[0].build)

    @property
    def _states(self) -> Float[Tensor, "n D"]:
        return self.states.flatten(0, 2)

    def _kept(self, batch: RowBatch) -> Int[Tensor, " R"]:
        """The rows' places among the kept states; -1 is the last one."""
        return batch.state.long().remainder(len(self._states))

    def _project(self, ops: Ops, states: Float[Tensor, "R D"], batch: RowBatch) -> None:
        """Every layer's keys and values of context or gap rows: joined as they are, without an input norm."""
        heads = self.stack.heads
        skip = heads.queries * heads.dim
        for index, layer in enumerate(self.stack.layers):
            bias = None if layer.head.bias is None else layer.head.bias[skip:]
            weights = HeadWeights(bias, layer.head.query_gain, layer.head.key_gain)
            parts = ops.linear(states, layer.qkv[skip:])
            ops.rope_store(parts, weights, heads._replace(queries=0), batch, self.store.layer(index))
