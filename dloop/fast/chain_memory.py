"""What EAGLE-3 on the fast path computes with: its store, the states that a row hands to the next, and the forwards."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int, Int64
from torch import Tensor

from dloop.drafters.proposal import measure, pack
from dloop.fast.beams import Beams
from dloop.fast.graphs import Forward
from dloop.fast.ops import Ops
from dloop.fast.rows import BlockRows, RowBatch, Run, pack_steps
from dloop.fast.runner import Runner
from dloop.fast.stack import Step, run_layer
from dloop.fast.weights import ChainStack
from dloop.sampling import Drawn, salted_draw
from dloop.sampling import law as law_of
from dloop.types import Sampling, Vocabulary

MOST_ROWS = 512  # of one forward; a prompt takes several
Before = Mapping[str, Forward[None]]  # what is done first, in the same graph, by name


class Drafted(NamedTuple):
    """What a forward leaves of its rows' tokens: packed as a proposal is, and the laws they were drawn from."""

    packed: Float64[Tensor, "R 3 *k"]
    probs: Float32[Tensor, "R *k W"] | None  # over the head's vocabulary; None: nothing was drawn


class FastChainMemory(Runner):
    """A static store, the last drafted row's state of each slot, and the graphs over both."""

    def __init__(self, stack: ChainStack, vocabulary: Vocabulary, slots: int, context: int) -> None:
        super().__init__(stack, slots, context)
        self.chain_stack = stack
        self.embedding = vocabulary.embedding
        self.features = self.blank(MOST_ROWS, stack.fc.shape[1])
        self.states = self.blank(self.store.slots + 1, len(stack.fc))  # one slot more takes what nobody reads
        self.spare = torch.zeros_like(self.states)  # the states of before `go_ahead`
        self.last: Int64[Tensor, " slots"] = torch.zeros_like(self.salts)  # the token each slot drafted last

    def make_room(self, slot: int, rows: int) -> bool:
        moved = super().make_room(slot, rows)
        if self.store.slots >= len(self.states):
            self.states, self.spare, self.last = map(self.for_slots, (self.states, self.spare, self.last))
        return moved

    def read(self, rows: BlockRows, runs: list[Run]) -> Forward[None]:
        """Rows of verified positions; their features stand in `features`, and states are kept where the rows say."""

        def forward(ops: Ops, batch: RowBatch) -> None:
            parts = ops.linear(self.features[: len(batch.token)], self.chain_stack.fc)
            states = self.features.new_zeros(len(batch.token), len(self.chain_stack.fc))
            # only to add the parts up: pairs are normed as ever
            ops.add_norm(states, parts, self.chain_stack.state_gain, self.chain_stack.eps)
            self._keep(batch, self._rows(ops, batch, states)[0])

        return self.forward(runs, partial(pack_steps, rows, 0), forward)

    def go_on(self, rows: BlockRows, runs: list[Run]) -> Forward[None]:
        """One row of each slot, from the state it kept."""

        def forward(ops: Ops, batch: RowBatch) -> None:
            self._keep(batch, self._rows(ops, batch, self.states[self._kept(batch)])[0])

        return self.forward(runs, partial(pack_steps, rows, 0), forward)

    def go_ahead(self, rows: BlockRows, runs: list[Run]) -> None:
        """`go_on` before the host knows the anchors: the tokens drafted last. `go_back` undoes it."""

        def forward(ops: Ops, batch: RowBatch) -> None:
            kept = self._kept(batch)
            states = self.states[kept]
            self.spare.index_copy_(0, kept, states)
            batch.token.copy_(self.last[kept])
            self._keep(batch, self._rows(ops, batch, states)[0])

        self.graphs("go ahead", self.forward(runs, partial(pack_steps, rows, 0), forward))

    def go_back(self, slot: int) -> None:
        """Take the state of before `go_ahead`."""
        self.states[slot] = self.spare[slot]

    def chain(
        self, rows: BlockRows, runs: list[Run], depth: int, law: Sampling | None, before: Before | None = None
    ) -> Drafted:
        """A stage of `depth` tokens of each slot, from the state it kept of the row that read the anchor.

        `rows` stand at that row. `law`: how tokens are drawn, whatever the seed; None: they are the most likely ones.
        """

        def forward(ops: Ops, batch: RowBatch) -> Drafted:
            stack, live = self.chain_stack, (batch.place.index >= 0).int()
            states = self.states[self._kept(batch)]
            normed = ops.add_norm(states, None, stack.gain, stack.eps)
            found = [self._token(ops, normed, batch, law)]
            for row in range(1, depth):
                batch.token.copy_(found[-1].packed[:, 0])
                batch.moving.add_(live)
                here = replace(batch, runs=[replace(run, base=run.base + row) for run in batch.runs])
                states, normed = self._rows(ops, here, states)
                found.append(self._token(ops, normed, here, law))
            self._keep(batch, states)
            self.last.index_copy_(0, self._kept(batch), found[-1].packed[:, 0].long())
            probs = [row.probs for row in found if row.probs is not None]
            return Drafted(torch.stack([row.packed for row in found], -1), torch.stack(probs, 1) if probs else None)

        name, drafting = f"chain {depth} {law}", self.forward(runs, partial(pack_steps, rows, depth - 1), forward)
        return self.graphs(name + "".join(before or {}), drafting, *(before or {}).values())

    def trees(
        self, rows: BlockRows, runs: list[Run], depth: int, nodes: int, before: Before | None = None
    ) -> Float64[Tensor, "G n"]:
        """A dynamic tree of `depth` levels and `nodes` nodes for each run, from the state its slot kept.

        A run's rows, one each of the beam's width, stand where those of the first level will; all name the run's slot.
        Of what they leave in the store and among the states, only the best path of full depth stays.
        """
        width = runs[0].count

        def forward(ops: Ops, batch: RowBatch) -> Float64[Tensor, "G n"]:
            stack, rows = self.chain_stack, len(batch.token) // width * width
            first, live = batch.place.index[:rows:width].long(), (batch.place.index >= 0).int()
            step = torch.stack([live * width, live, live])
            states = self.states[self._kept(batch)]
            normed = ops.add_norm(states, None, stack.gain, stack.eps)
            beams = Beams(width, first)
            frontier = beams.grow(ops.head(normed, stack.head)[:rows:width, None], stack.kept)
            for level in range(1, depth):
                above = rows_of(frontier.parents, width)
                here = descend(batch, frontier.tokens.flatten(), above, level, step)
                states, normed = self._rows(ops, here, torch.cat([states[above], states[rows:]]))
                frontier = beams.grow(ops.head(normed, stack.head)[:rows].unflatten(0, (-1, width)), stack.kept)
            packed, places = beams.finish(nodes)
            if depth > 1:
                self._keep_path(batch.place.slot[:rows:width].long(), first, places, width)
                self.states.index_copy_(0, self._kept(batch)[:rows:width], states[rows_of(places[:, -1:], width)])
            return packed

        pack = partial(pack_steps, rows, depth)
        name, drafting = f"tree {depth} {width} {nodes}", self.forward(runs, pack, forward, depth=max(1, depth - 1))
        return self.graphs(name + "".join(before or {}), drafting, *(before or {}).values())

    def _keep_path(
        self, slots: Int[Tensor, " G"], first: Int[Tensor, " G"], places: Int[Tensor, "G d"], width: int
    ) -> None:
        """Move the rows of a path, one a level of the beam, together; `first` is -1 where there is no beam."""
        levels = torch.arange(places.shape[1], device=places.device)
        live = (first >= 0)[:, None]  # elsewhere the first row of all, which no path holds, is put where it is
        source = torch.where(live, first[:, None] + levels * width + places, 0)
        target = torch.where(live, first[:, None] + levels, 0)
        for part in self.store.layer(0):
            part[slots[:, None], :, target] = part[slots[:, None], :, source]

    def _token(self, ops: Ops, normed: Float[Tensor, "R D"], batch: RowBatch, law: Sampling | None) -> Drafted:
        """The token after each row."""
        kept = self.chain_stack.kept
        logits = ops.head(normed, self.chain_stack.head)
        if law is None:
            return Drafted(ops.pick(logits, kept), None)
        probs = law_of(logits, law)
        token = salted_draw(probs, self.salts[self._kept(batch)], batch.place.position + 2)
        found = measure(logits, Drawn(token, probs))
        return Drafted(pack(found._replace(tokens=kept[token])).T, probs)

    def _rows(
        self, ops: Ops, batch: RowBatch, states: Float[Tensor, "R D"]
    ) -> tuple[Float[Tensor, "R D"], Float[Tensor, "R D"]]:
        """(what rows that read these states hand on, in the same memory; the same normed, for the head)."""
        stack = self.chain_stack
        gains = stack.layers[0].input_gain, stack.state_gain
        pairs = ops.pair(batch.token, self.embedding, states, gains, stack.eps)
        parts = run_layer(Step(ops, stack, batch, self.store), 0, pairs, states)
        return states, ops.add_norm(states, parts, stack.gain, stack.eps)

    def _keep(self, batch: RowBatch, states: Float[Tensor, "R D"]) -> None:
        self.states.index_copy_(0, self._kept(batch), states)

    def _kept(self, batch: RowBatch) -> Int[Tensor, " R"]:
        """The rows' places among the kept states; -1 is the last one."""
        return batch.state.long().remainder(len(self.states))


def rows_of(places: Int[Tensor, "G m"], width: int) -> Int[Tensor, " rows"]:
    """The rows of places in the beams, each of which has `width` rows."""
    return (places + width * torch.arange(len(places), device=places.device)[:, None]).flatten()


def descend(
    batch: RowBatch, tokens: Int[Tensor, " n"], above: Int[Tensor, " n"], level: int, step: Int[Tensor, "3 R"]
) -> RowBatch:
    """The rows of a beam's level, in place of those before: `above` are their parents' rows, `step` how they move on.

    Level 1 stands where the rows stand already.
    """
    ancestors = batch.tiles.ancestors
    assert ancestors is not None
    count = len(tokens)
    batch.token[:count] = tokens.to(batch.token.dtype)
    if level > 1:
        batch.moving.add_(step)
        ancestors[:count] = ancestors[above]
    ancestors[:count, level - 1] = batch.place.index[:count]
    return replace(batch, runs=[replace(run, base=run.base + (level - 1) * run.count) for run in batch.runs])
