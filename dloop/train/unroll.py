"""The training objective of autoregressive drafters: a long unroll of the deployed chain, from every position at once.

Step i of the unroll continues every row by one drafted token: it reads the row's own state of step i-1 and the
ground-truth token, and sees the rows of step 0 up to its own and its own rows of the steps since. That is the chain
decoding runs, so a loop stage is nothing but more steps.
Sources: EAGLE-3's training-time test; SpecForge (shifts, masks, weights); the published README (lengths).
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from dloop.drafters.chain import ChainModel
from dloop.drafters.memory import KeyValues
from dloop.targets.hf import BatchFeatures
from dloop.train import pieces
from dloop.train.anchors import Anchors
from dloop.train.batch import TrainBatch
from dloop.train.flex_unroll import causal, flexed
from dloop.train.losses import Sums
from dloop.train.objective import Loss, Objective, TotalWeights
from dloop.train.pieces import Worked, even, recomputed
from dloop.types import Vocabulary
from dloop.vocabulary import capped, target_logits

DECAY = 0.8  # step i weighs DECAY^i, beyond the host's depth too
ROWS = 512  # of one piece of attention: bounds the scores that are held at once


class Teacher(NamedTuple):
    """What the target says about the token that each row predicts: the row of token t predicts the one at t+2."""

    states: Float[Tensor, "B T D"]  # the target's, after the final norm, whose law it is
    head: Float[Tensor, "W D"]  # the target's, of the words that the drafter's head knows
    counted: Bool[Tensor, "B T"]  # label rows whose likeliest token the head knows
    choice: Int[Tensor, "B T"]  # that token


@dataclass
class Unroll:
    """The chains of all rows of a batch. Gradients flow through the states and through all keys and values."""

    model: ChainModel
    vocabulary: Vocabulary
    tokens: Int[Tensor, "B T"]
    positions: Int[Tensor, "#B T"]
    states: Float[Tensor, "B T _"]  # the target's; from the first step on, those that the last one gave
    memory: list[KeyValues] = field(default_factory=list[KeyValues])  # one a step
    steps: int = 0  # done
    recompute: bool = False  # a step anew for the gradient
    mask: BlockMask | None = None  # of the first step's rows, for flex attention; None: dense

    @classmethod
    def begin(
        cls, model: ChainModel, vocabulary: Vocabulary, batch: TrainBatch, features: Float[Tensor, "B T F"]
    ) -> "Unroll":
        """Chains that start from the target's features of every position."""
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)[None]
        if batch.offsets is not None:
            positions = positions + batch.offsets[:, None]
        return cls(model, vocabulary, batch.tokens, positions, model.first(features))

    def forward(self) -> Float[Tensor, "B T D"]:
        """Run the next step of all chains; the states it gives."""
        step = self.steps
        tokens = F.pad(self.tokens[:, step + 1 :], (0, min(step + 1, self.tokens.shape[1])))
        embedded = F.embedding(tokens, self.vocabulary.embedding)
        read = self.model.handed(self.states) if step else self.states
        run = partial(recomputed, self._rows) if self.recompute else self._rows
        self.states, own = run(read, embedded, self.places(), tuple(self.memory))
        self.memory += own
        self.steps += 1
        return self.states

    def places(self) -> Int[Tensor, "#B T"]:
        """Where the rows of the next step stand."""
        return self.positions + self.steps

    def _rows(
        self,
        read: Float[Tensor, "B T _"],
        embedded: Float[Tensor, "B T _"],
        places: Int[Tensor, "#B T"],
        memory: tuple[KeyValues, ...],
    ) -> tuple[Float[Tensor, "B T D"], list[KeyValues]]:
        """(states of the next step, its own keys and values), after the steps in `memory`."""
        found: list[KeyValues] = []

        def attend(queries: Tensor, own: KeyValues) -> Tensor:
            found.append(own)
            first, *later = (*memory, own)
            if self.mask is None or not later:  # the first step's kernel holds no scores either
                return joint(queries, first, later)
            return flexed(queries, first, later, self.mask)

        return self.model.rows(read, embedded, places, attend), found


def joint(queries: Float[Tensor, "B H T d"], first: KeyValues, later: Sequence[KeyValues]) -> Float[Tensor, "B H T d"]:
    """One softmax over the first step's rows, causally, and over the row's own rows of the later steps.

    Scores of T x T are never held: rows go in pieces, computed anew for the gradient.
    """
    if not later:
        return F.scaled_dot_product_attention(queries, *first, is_causal=True, enable_gqa=True)
    pieces: list[Tensor] = []
    for start in range(0, queries.shape[2], ROWS):
        stop = min(start + ROWS, queries.shape[2])
        seen = KeyValues(*(x[:, :, :stop] for x in first))
        own = [KeyValues(*(x[:, :, start:stop] for x in step)) for step in later]
        pieces.append(recomputed(mix, queries[:, :, start:stop], seen, own))
    return torch.cat(pieces, 2)


def mix(queries: Float[Tensor, "B H n d"], seen: KeyValues, own: Sequence[KeyValues]) -> Float[Tensor, "B H n d"]:
    """`joint` for n rows, the last ones of `seen`. Heads of a group share keys."""
    grouped = queries.unflatten(1, (seen.keys.shape[1], -1)) * queries.shape[-1] ** -0.5
    count, width = queries.shape[2], seen.keys.shape[2]
    causal = torch.ones(count, width, dtype=torch.bool, device=queries.device).tril(width - count)
    past = (grouped @ seen.keys[:, :, None].transpose(-1, -2)).masked_fill(~causal, float("-inf"))
    since = torch.stack([(grouped * step.keys[:, :, None]).sum(-1) for step in own], -1)
    scores = torch.cat([past, since], -1)
    weights = scores.to(torch.promote_types(scores.dtype, torch.float32)).softmax(-1).to(seen.values.dtype)
    mixed = weights[..., :width] @ seen.values[:, :, None]
    for index, step in enumerate(own):
        mixed = mixed + weights[..., width + index, None] * step.values[:, :, None]
    return mixed.flatten(1, 2)


class UnrollObjective(Objective):
    """Cross-entropy with the target's law over the head's vocabulary, step i weighing DECAY^i, as a mean over all rows.

    `depth` is the unroll's length. The host's part are the steps of one stage, the loop's part those beyond.
    """

    terms = ("ce",)
    reads_teacher = True
    model: ChainModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def forward(
        self,
        batch: TrainBatch,
        features: BatchFeatures,
        depth: int,
        anchors: Anchors | None = None,
        totals: TotalWeights | None = None,
    ) -> Loss:
        own = self.total_weights([(batch, anchors or self.draw(batch))], depth)
        rows = totals or own
        done = self.unrolled(batch, features, depth)
        host, loop = (part.sum()[None] for part in (done.terms * decay(done.terms)).tensor_split([self.stage_len]))
        beyond = Sums(loop, own.loop) if depth > self.stage_len else None
        return Loss(done.value / rows.host, Sums(host, own.host), beyond)

    def compile_parts(self) -> None:
        super().compile_parts()
        self.model.compile_layers()

    @property
    def stage_len(self) -> int:
        """Steps that are the host's own."""
        return self.model.config.stage_len

    def draw(self, batch: TrainBatch) -> Anchors:
        """None: an unroll starts from every row."""
        none = batch.tokens[:, :0]
        return Anchors(none, none.bool())

    def total_weights(self, parts: Sequence[tuple[TrainBatch, Anchors]], depth: int) -> TotalWeights:
        """All rows count alike, labels or not; padding is no row."""
        rows = torch.stack([batch.lengths.sum() for batch, _ in parts]).sum().float()
        return TotalWeights(rows, rows)

    def step_sums(self, batch: TrainBatch, features: BatchFeatures, length: int) -> Float[Tensor, " length"]:
        """The cross-entropy of each step, summed over the counted rows. Beyond the end of a text nothing counts."""
        return self.unrolled(batch, features, length).terms

    def unrolled(self, batch: TrainBatch, features: BatchFeatures, length: int) -> Worked:
        """The cross-entropies of all steps, step i weighing DECAY^i; its terms are those of the steps, unweighed.

        Pieces go by the teacher's rows: the law of a row is made once for all steps that are measured with it.
        """
        unroll, teacher = self.begin(batch, features), self.teacher(batch, features)
        count, width = batch.tokens.shape
        near = [unroll.forward()[:, : max(0, width - step)] for step in range(length)]
        sizes = even(width, max(1, pieces.ROWS // count))
        ends = list(itertools.accumulate(sizes))
        steps = [states.split(sizes_behind(step, ends), 1) for step, states in enumerate(near)]
        held: dict[int, Tensor] = {}  # the law of the piece at hand

        def work(number: int, states: Tensor) -> Worked:
            index, step = divmod(number, length)
            where = slice(ends[index] - sizes[index], ends[index])
            if index not in held:
                held.clear()
                held[index] = self.law_of(teacher.states[:, where], teacher.head)
            rows = sizes[index] - states.shape[1]  # the first teacher rows have no row so many steps before
            found = self.row_sums(states, held[index][:, rows:], teacher.counted[:, where][:, rows:])
            terms = F.pad(found[None], (step, length - 1 - step))
            return Worked(found * DECAY**step, terms)

        parts = [steps[step][index] for index in range(len(sizes)) for step in range(length)]
        return self.summed(work, parts, list(self.model.parameters()))

    def begin(self, batch: TrainBatch, features: BatchFeatures) -> Unroll:
        """The chains of a batch."""
        chains = Unroll.begin(self.model, self.vocabulary, batch, self.model.reads(features.taps, features.last))
        chains.recompute = self.settings.recompute
        if self.settings.attention == "flex":
            chains.mask = causal(batch.tokens.shape[1], batch.tokens.device)
        return chains

    def row_sums(
        self, states: Float[Tensor, "B n D"], laws: Float[Tensor, "B n _"], counted: Bool[Tensor, "B n"]
    ) -> Float[Tensor, ""]:
        """All work on the vocabulary, in one place: what a compiler should fuse."""
        logits = self.model.logits(states, self.vocabulary)
        logp = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
        return torch.where(counted, -(laws * logp).sum(-1), 0.0).sum()

    @torch.no_grad()
    def law_of(self, states: Float[Tensor, "B n D"], head: Float[Tensor, "W D"]) -> Float[Tensor, "B n W"]:
        """The target's law over the words of this head."""
        logits = capped(F.linear(states, head), self.vocabulary.softcap)
        return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)

    @torch.no_grad()
    def teacher(self, batch: TrainBatch, features: BatchFeatures) -> Teacher:
        """The target's law one position on. A text's last row has none: as in the public trainer its logits are zeros,
        which are uniform and choose token 0.
        """
        head, kept = self.vocabulary.head, self.model.kept
        count, width = batch.tokens.shape
        ended = torch.arange(width, device=head.device) >= batch.lengths[:, None] - 1
        following = F.pad(features.last[:, 1:], (0, 0, 0, 1)).masked_fill(ended[..., None], 0.0)
        parts = following.split(max(1, pieces.ROWS // count), 1)
        choice = torch.cat([target_logits(part, self.vocabulary).argmax(-1) for part in parts], 1)
        choice = choice.masked_fill(ended, 0)
        known = torch.ones(len(head), dtype=torch.bool, device=head.device)
        if kept is not None:
            known = torch.zeros_like(known).index_fill(0, kept, True)
        shift = self.settings.loss_mask_shift
        labelled = F.pad(batch.loss_mask[:, shift:], (0, shift))
        return Teacher(following, head if kept is None else head[kept], known[choice] & labelled, choice)


def decay(steps: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """What each step weighs."""
    return DECAY ** torch.arange(len(steps), device=steps.device, dtype=steps.dtype)


def sizes_behind(step: int, ends: Sequence[int]) -> list[int]:
    """How many rows of a step are measured with each piece of the teacher's rows, which end at `ends`."""
    bounds = [max(0, end - step) for end in (0, *ends)]
    return [last - first for first, last in itertools.pairwise(bounds)]
