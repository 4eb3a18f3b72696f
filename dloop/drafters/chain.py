"""Autoregressive drafters: one row a token, fed with the state of the row before; and their decoding memory.

Source of the rows and of what is kept: SafeAILab/EAGLE (EAGLE-3); the loop stage simply goes on.
"""

import itertools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.drafters.host import HostDrafter, HostModel
from dloop.drafters.layers import attend
from dloop.drafters.memory import KeyValues, SlotMemory
from dloop.drafters.proposal import Proposal, measure, read_out, stacked
from dloop.drafters.watched import level_of, link_of
from dloop.loop import Drafter
from dloop.sampling import Draw, Drawn
from dloop.stop import NOTHING, Watch, watch_of
from dloop.trees.beam import Children, Frontier, beam, best_children, packed
from dloop.trees.dynamic import candidates, deepest_path, frontier_places, rerank
from dloop.trees.tree import with_spine
from dloop.types import Features, Stage, StageRequest, Vocabulary
from dloop.vocabulary import spread, told

# From rotated queries and the rows' own keys and values to what each head mixed: the caller knows what a row sees.
Attend = Callable[[Float[Tensor, "B H n d"], KeyValues], Float[Tensor, "B H n d"]]


class ChainModel(HostModel):
    """Weights of an autoregressive drafter. W is the size of the vocabulary that its head computes.

    The row at position t joins a state of position t with the embedding of the token at t+1, and predicts the one at
    t+2. Rows of verified positions read the target's features, drafted ones the state of the row before.
    """

    def reads(self, taps: Float[Tensor, "*n F"], last: Float[Tensor, "*n D"]) -> Float[Tensor, "*n _"]:
        """What of the target's features its rows read: the tapped layers, or the last state."""
        return taps

    @abstractmethod
    def first(self, features: Float[Tensor, "B n F"]) -> Float[Tensor, "B n D"]:
        """The states that rows of verified positions read."""

    def handed(self, states: Float[Tensor, "B n _"]) -> Float[Tensor, "B n _"]:
        """What of the states that rows gave the next ones read."""
        return states

    @abstractmethod
    def rows(
        self,
        states: Float[Tensor, "B n D"],
        embedded: Float[Tensor, "B n D"],
        positions: Int[Tensor, "#B n"],
        attend: Attend,
    ) -> Float[Tensor, "B n D"]:
        """The one row arithmetic: what each row hands to the next one. Training and decoding differ in `attend`."""

    @abstractmethod
    def logits(self, states: Float[Tensor, "... D"], vocabulary: Vocabulary) -> Float[Tensor, "... W"]:
        """Over the head's own vocabulary; `vocabulary` is the target's, for those that share its head."""

    def compile_layers(self) -> None:
        """Let a compiler fuse what runs between the matrix products, where that is offered; names and weights stay."""

    @property
    @abstractmethod
    def kept(self) -> Int[Tensor, " W"] | None:
        """The target's ids of the tokens in the head's vocabulary; None: all, each with its own id."""

    def told(self, tokens: Int[Tensor, "*k"]) -> Int[Tensor, "*k"]:
        """The target's ids of tokens of the head's vocabulary."""
        return told(tokens, self.kept)

    def propose(self, logits: Float[Tensor, "k W"], drawn: Drawn) -> Proposal:
        """A stage from its rows' logits and picks: measured over the head's vocabulary, told in the target's ids."""
        found = measure(logits, drawn)
        probs = None if found.probs is None else self.spread(found.probs)
        return found._replace(tokens=self.told(found.tokens), probs=probs)

    def spread(self, probs: Float32[Tensor, "k W"]) -> Float32[Tensor, "k V"]:
        """A law over the target's vocabulary: tokens that the head does not know have no chance."""
        return spread(probs, self.kept, self.config.vocab_size)


@dataclass(frozen=True)
class ChainDrafter(HostDrafter):
    """A loaded autoregressive drafter; `depth` tokens a stage, as published by default."""

    model: ChainModel
    depth: int | None = None

    @property
    def stage_len(self) -> int:
        published = self.config.stage_len if self.trees is None else self.config.tree_len
        return published if self.depth is None else self.depth

    @property
    def max_positions(self) -> None:
        """Angles are computed for any position: a small number in the config is no limit of the weights."""
        return None

    def at_depth(self, depth: int) -> "ChainDrafter":
        """The same drafter with stages of so many tokens."""
        return replace(self, depth=depth)

    def open(self) -> Drafter:
        return ChainMemory(self)


@dataclass
class SlotState:
    """One sequence. The row of a verified position waits for the token after it: `tokens` and `features` are the
    positions without a committed row; after a round's first stage only the last, whose row stands in the tail.
    """

    features: Float[Tensor, "n F"]
    memory: SlotMemory = field(default_factory=SlotMemory)
    tokens: list[int] = field(default_factory=list[int])
    hidden: Float[Tensor, "1 1 D"] | None = None  # of the row that gave the last drafted token

    @property
    def verified(self) -> int:
        """Positions that `extend` brought."""
        return self.memory.committed + len(self.tokens)


class ChainMemory:
    """The drafting side of the loop for autoregressive families. Law: committed rows + a speculative tail.

    Committed rows are made of the target's features and verified tokens alone. Rows made from drafted states, and the
    row that reads an anchor nobody has verified yet, are the tail: `extend` and the next round's first stage drop them.
    """

    def __init__(self, drafter: ChainDrafter) -> None:
        self.drafter = drafter
        self.slots: dict[int, SlotState] = {}

    @property
    def stage_len(self) -> int:
        return self.drafter.stage_len

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        """Only stores: the rows are made by the next `draft`, in the same forward as its first token."""
        read = self.drafter.model.reads(features.taps, features.last)
        if position == 0:
            self.slots[slot] = SlotState(read[:0])
        state = self.slots[slot]
        state.memory.drop_tail()
        assert state.verified == position
        state.tokens += tokens
        state.features = torch.cat([state.features, read])  # a copy: a target may answer into the same memory again

    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        """One stage a request; this twin answers them one after the other."""
        return [self._stage(request) for request in requests]

    @torch.no_grad()
    def _stage(self, request: StageRequest) -> Stage:
        state, nodes = self.slots[request.slot], self.drafter.nodes(request.index)
        anchor = state.verified + request.index * self.stage_len  # its position
        token = torch.tensor([request.anchor], device=state.features.device)
        if request.index == 0:
            state.hidden = self._read(state, token)
        else:
            assert state.hidden is not None
            state.hidden = self._rows(state, self.drafter.model.handed(state.hidden), token, anchor - 1)
        watch = watch_of(request, self.stage_len)
        if not nodes:
            return self._chain(state, anchor, Draw(request.sampling, anchor + 1), watch)
        assert request.sampling is None
        return self._tree(state, token[0], anchor, nodes, watch)

    def _chain(self, state: SlotState, anchor: int, draw: Draw, watch: Watch | None) -> Stage:
        """The stage after the row that read the anchor: one more row a token."""
        assert state.hidden is not None
        model, logits, drawn = self.drafter.model, list[Tensor](), list[Drawn]()
        for row in range(self.stage_len):
            if row:
                token = model.told(drawn[-1].token)[None]
                state.hidden = self._rows(state, model.handed(state.hidden), token, anchor + row - 1)
            logits.append(model.logits(state.hidden[0, 0], self.drafter.vocabulary))
            drawn.append(draw(logits[-1], row))
            if watch is not None and watch.ends(link_of(watch, logits[-1], drawn[-1].token, state.hidden[0, 0])):
                break
        if not (kept := len(drawn) if watch is None else watch.kept):
            return NOTHING
        stage = read_out(model.propose(torch.stack(logits[:kept]), stacked(drawn[:kept])))
        return stage if watch is None else replace(stage, cut=watch.is_cut)

    def _tree(self, state: SlotState, token: Int[Tensor, ""], anchor: int, nodes: int, watch: Watch | None) -> Stage:
        """EAGLE-3's dynamic tree; its spine is the best path of full depth, whose rows alone stay in the tail."""
        assert state.hidden is not None and self.drafter.trees is not None
        model, topk, base = self.drafter.model, self.drafter.trees.topk, state.memory.length
        made, seen = [state.hidden[0]], token.new_zeros(1, 0, dtype=torch.bool)

        def expand(depth: int, frontier: Frontier) -> Children | None:
            nonlocal seen
            if watch is not None and watch.is_cut:
                return None
            if depth:
                count = len(frontier.tokens)
                own = torch.eye(count, dtype=torch.bool, device=token.device)
                seen = torch.cat([seen[frontier.parents], own], 1)
                mask = F.pad(seen, (base, 0), value=True)
                states, position = made[-1][frontier.parents][None], anchor + depth - 1
                at = torch.full((1, count), position, device=token.device)
                made.append(self._attend(state, states, frontier.tokens, at, mask)[0])
            logits = model.logits(made[-1], self.drafter.vocabulary)
            children = best_children(logits.float().log_softmax(-1), model.kept, topk)
            if watch is None:
                return children
            watch.ends(level_of(watch, logits[0], made[-1][0], frontier, children))
            return children if watch.kept > depth else None

        levels = beam(token, self.stage_len, topk, expand)
        if not levels:
            return NOTHING
        parts = packed(levels).tolist()  # sync
        pool = candidates(levels, parts)
        path = deepest_path(pool, levels)
        logp = [pool.logp[node] for node in path]
        stage = with_spine(rerank(pool, nodes), [pool.tokens[node] for node in path], logp, sum(logp))
        if watch is not None and watch.is_cut:  # no stage follows, so that nothing of the tail is read any more
            return replace(stage, cut=True)
        state.hidden = self._keep_path(state, base, made, frontier_places(levels, parts, path))
        return stage

    def _keep_path(
        self, state: SlotState, base: int, made: list[Float[Tensor, "_ D"]], places: list[int]
    ) -> Float[Tensor, "1 1 D"]:
        """Drop the beam's rows but those of the path, one a level; give the state of the last."""
        starts = itertools.accumulate((len(rows) for rows in made[1:]), initial=base)
        state.memory.keep(base, [start + place for start, place in zip(starts, places, strict=False)])
        return made[-1][(places or [0])[-1]][None, None]

    def _read(self, state: SlotState, anchor: Int[Tensor, " 1"]) -> Float[Tensor, "1 1 D"]:
        """Make the rows of all waiting positions; the last, which reads the anchor, stays in the tail."""
        state.memory.drop_tail()
        tokens = torch.cat([torch.tensor(state.tokens[1:], device=anchor.device, dtype=anchor.dtype), anchor])
        features = self.drafter.model.first(state.features[None])
        hidden = self._rows(state, features, tokens, state.memory.committed)
        state.memory.commit(short=1)
        state.tokens, state.features = state.tokens[-1:], state.features[-1:].clone()
        return hidden[:, -1:]

    def _rows(
        self, state: SlotState, states: Float[Tensor, "1 n D"], tokens: Int[Tensor, " n"], position: int
    ) -> Float[Tensor, "1 n D"]:
        """Rows from this position on; each sees what is in memory, the rows before it and itself."""
        before, count = state.memory.length, len(tokens)
        positions = torch.arange(position, position + count, device=tokens.device)[None]
        mask = None
        if before and count > 1:
            mask = torch.ones(count, before + count, dtype=torch.bool, device=tokens.device).tril(before)
        return self._attend(state, states, tokens, positions, mask)

    def _attend(
        self,
        state: SlotState,
        states: Float[Tensor, "1 n D"],
        tokens: Int[Tensor, " n"],
        positions: Int[Tensor, "1 n"],
        mask: Bool[Tensor, "n S"] | None,
    ) -> Float[Tensor, "1 n D"]:
        """Append rows; `mask` (True = visible) covers memory and rows. None: one row, or the first ones, causal."""
        embedded = F.embedding(tokens, self.drafter.vocabulary.embedding)[None]
        return self.drafter.model.rows(states, embedded, positions, partial(append_and_look, state.memory, mask))


def append_and_look(
    memory: SlotMemory, mask: Bool[Tensor, "n S"] | None, queries: Float[Tensor, "1 H n d"], own: KeyValues
) -> Float[Tensor, "1 H n d"]:
    """Append rows to the memory; what they see of it and of one another."""
    before = memory.length
    memory.append([own])
    if not before:
        return F.scaled_dot_product_attention(queries, *own, is_causal=True, enable_gqa=True)
    return attend(queries, memory.layers()[0], None if mask is None else mask[None, None])
