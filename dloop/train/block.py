"""The training objectives of block drafters: the host's own loss, and one loop stage in the deployed layout."""

import itertools
from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from dloop.drafters.block import BlockModel
from dloop.targets.hf import BatchFeatures
from dloop.train import pieces
from dloop.train.anchors import Anchors, sample_anchors
from dloop.train.batch import TrainBatch
from dloop.train.flex import Attention, FlexStages
from dloop.train.losses import (
    EPSILON,
    Sums,
    cross_entropy,
    decay_weights,
    dspark_sums,
    lambda_base,
    weighted,
)
from dloop.train.objective import Loss, Objective, ObjectiveSettings, TotalWeights
from dloop.train.packed import PackedStages
from dloop.train.pieces import Worked, even
from dloop.types import Vocabulary
from dloop.vocabulary import narrowed, numbered, target_logits

STAGES: dict[Attention, type[PackedStages]] = {"dense": PackedStages, "flex": FlexStages}


class StageRows(NamedTuple):
    """One stage of n chains: B rows of which k predict a token each."""

    hidden: Float[Tensor, "n B D"]
    teacher: Float[Tensor, "n k D"] | None  # the target's state one position before each label, after the final norm
    previous: Int[Tensor, "n k"]
    labels: Int[Tensor, "n k"]  # among the words that the drafter can name
    weights: Float[Tensor, "n k"]

    def part(self, hidden: Float[Tensor, "m B D"], where: slice) -> "StageRows":
        """Some of the chains, with these states of theirs."""
        teacher = None if self.teacher is None else self.teacher[where]
        return StageRows(hidden, teacher, self.previous[where], self.labels[where], self.weights[where])


class BlockObjective(Objective):
    """Host loss plus one loop stage.

    loss = (1 - w) * host + w * loop with w = `dloop_loss_weight`; each side is normalised by its own weights, summed
    over the parts of a step. Families say what a row's terms are and how they mix. With a draft vocabulary all laws,
    the teacher's too, are over its words alone: the softmax of their logits, which is the target's law given that the
    token is one of them.
    Source: the published README's training table.
    """

    prefix: ClassVar[bool] = False  # whether rows count only up to a stage's first token that is not a label
    model: BlockModel  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, model: BlockModel, vocabulary: Vocabulary, settings: ObjectiveSettings) -> None:
        super().__init__(model, narrowed(vocabulary, model.kept), settings)

    @abstractmethod
    def row_sums(self, rows: StageRows) -> Sums:
        """All work on the vocabulary, in one place: what a compiler should fuse."""

    @abstractmethod
    def mix(self) -> Sequence[float | Float[Tensor, ""]]:
        """What each term counts."""

    def forward(
        self,
        batch: TrainBatch,
        features: BatchFeatures,
        depth: int,
        anchors: Anchors | None = None,
        totals: TotalWeights | None = None,
    ) -> Loss:
        """`depth` 0 is the host objective alone; k > 0 adds the loop stage k. Middle stages hand on hidden states.

        `totals`: the weights of all parts of a step; the losses of its parts then add up. None: this batch is all.
        """
        anchors = self.draw(batch) if anchors is None else anchors
        stages = STAGES[self.settings.attention].begin(
            self.model, self.vocabulary, batch.tokens, features.taps, anchors, offsets=batch.offsets
        )
        stages.recompute = self.settings.recompute
        host, sums = self.stage_sums(stages.forward(), 0, stages, batch, features)
        if depth == 0:
            return Loss(host / ((totals.host if totals else sums.weight) + EPSILON), sums, None)
        for _ in range(depth - 1):
            stages.forward()  # middle stages only hand on hidden states
        loop, more = self.stage_sums(stages.forward(), depth, stages, batch, features)
        return Loss(self.combine(host, loop, totals or TotalWeights(sums.weight, more.weight)), sums, more)

    def combine(self, host: Float[Tensor, ""], loop: Float[Tensor, ""], totals: TotalWeights) -> Float[Tensor, ""]:
        """The mixed terms of both sides as one number."""
        share = self.settings.dloop_loss_weight
        return (1 - share) * host / (totals.host + EPSILON) + share * loop / (totals.loop + EPSILON)

    def compile_parts(self) -> None:
        super().compile_parts()
        self.model.compile_layers()

    def mixed(self, terms: Float[Tensor, " t"]) -> Float[Tensor, ""]:
        """The weighted sum of the terms."""
        parts = [share * term for share, term in zip(self.mix(), terms.unbind(), strict=True)]
        return torch.stack(parts).sum()

    def draw(self, batch: TrainBatch) -> Anchors:
        """Fresh anchors for a batch."""
        share, (count, width) = self.settings.share, batch.loss_mask.shape
        keys = torch.rand(count * share.world, width - 1, device=batch.loss_mask.device)
        return sample_anchors(batch.loss_mask, self.settings.num_anchors, share.rows(keys))

    def total_weights(self, parts: Sequence[tuple[TrainBatch, Anchors]], depth: int) -> TotalWeights:
        host, loop = (
            torch.stack([self.row_weights(stage_index, anchors, batch).sum() for batch, anchors in parts]).sum()
            for stage_index in (0, depth)
        )
        return TotalWeights(host, loop)

    def row_weights(self, stage_index: int, anchors: Anchors, batch: TrainBatch) -> Float[Tensor, "B A k"]:
        """How much each row of a stage counts: none whose label the drafter cannot name."""
        labels, labelled = self.labels(self.row_positions(stage_index, anchors) + 1, anchors, batch)
        labelled = labelled & numbered(labels, self.vocabulary.kept)[1]
        return decay_weights(labelled, self.settings.loss_decay_gamma, prefix=self.prefix)

    def row_positions(self, stage_index: int, anchors: Anchors) -> Int[Tensor, "B A k"]:
        """Where the token before each label of a stage stands."""
        k = self.model.config.stage_len
        starts = anchors.positions + stage_index * k
        return starts[..., None] + torch.arange(k, device=starts.device)

    def stage_sums(
        self,
        hidden: Float[Tensor, "B A R D"],
        stage_index: int,
        stages: PackedStages,
        batch: TrainBatch,
        features: BatchFeatures,
    ) -> tuple[Float[Tensor, ""], Sums]:
        """(the mixed terms, with gradients; the terms). Label j of a stage that starts at s is x_{s+j+1}; previous
        token and teacher's law stand at s+j.
        """
        at = self.row_positions(stage_index, stages.anchors)
        labels, _ = self.labels(at + 1, stages.anchors, batch)
        previous, _ = self.labels(at, stages.anchors, batch)
        rows = StageRows(
            hidden=hidden.flatten(0, 1),
            teacher=states_at(features.last, at).flatten(0, 1) if self.reads_teacher else None,
            previous=previous.flatten(0, 1),
            labels=numbered(labels, self.vocabulary.kept)[0].flatten(0, 1),
            weights=self.row_weights(stage_index, stages.anchors, batch).flatten(0, 1),
        )
        sizes = even(len(rows.hidden), max(1, pieces.ROWS // self.model.config.stage_len))
        ends = list(itertools.accumulate(sizes))

        def work(number: int, states: Tensor) -> Worked:
            terms = self.row_sums(rows.part(states, slice(ends[number] - sizes[number], ends[number]))).terms
            return Worked(self.mixed(terms), terms)

        done = self.summed(work, rows.hidden.split(sizes), list(self.model.parameters()))
        return done.value, Sums(done.terms, rows.weights.sum())

    def labels(
        self, positions: Int[Tensor, "B A k"], anchors: Anchors, batch: TrainBatch
    ) -> tuple[Int[Tensor, "B A k"], Tensor]:
        """(tokens at these positions, whether they are labels of a kept anchor)."""
        width = batch.tokens.shape[1]
        inside = positions.clamp(max=width - 1).flatten(1)
        tokens = batch.tokens.gather(1, inside).view_as(positions)
        marked = batch.loss_mask.gather(1, inside).view_as(positions)
        return tokens, marked & (positions < width) & anchors.keep[..., None]


class DSparkObjective(BlockObjective):
    """Cross-entropy, distance to the teacher's law and the confidence head's error. Source: DeepSpec."""

    terms = ("ce", "l1", "confidence")
    prefix = True
    reads_teacher = True

    def row_sums(self, rows: StageRows) -> Sums:
        logits, confidence = self.model.teacher_forced(rows.hidden, rows.previous, self.vocabulary)
        assert rows.teacher is not None
        with torch.no_grad():
            teacher = target_logits(rows.teacher, self.vocabulary)
        return dspark_sums(
            logits.flatten(0, 1),
            None if confidence is None else confidence.flatten(),
            teacher.flatten(0, 1),
            rows.labels.flatten(),
            rows.weights.flatten(),
        )

    def mix(self) -> Sequence[float]:
        weights = self.settings.weights
        return weights.ce, weights.l1, weights.confidence


class DFlashObjective(BlockObjective):
    """Cross-entropy; host and loop rows share one mean. Sources: SpecForge; the published README for the mean."""

    terms = ("ce",)

    def row_sums(self, rows: StageRows) -> Sums:
        logits, _ = self.model.teacher_forced(rows.hidden, rows.previous, self.vocabulary)
        return weighted([cross_entropy(logits.flatten(0, 1), rows.labels.flatten())], rows.weights.flatten())

    def mix(self) -> Sequence[float]:
        return (1.0,)

    def combine(self, host: Float[Tensor, ""], loop: Float[Tensor, ""], totals: TotalWeights) -> Float[Tensor, ""]:
        return (host + loop) / (totals.host + totals.loop + EPSILON)


class DominoObjective(BlockObjective):
    """Cross-entropy of the corrected logits, in host training mixed with that of the backbone's own by a falling share
    lambda. Source: SpecForge.
    """

    terms = ("ce", "base_ce")
    lambda_base: Tensor

    def __init__(self, model: BlockModel, vocabulary: Vocabulary, settings: ObjectiveSettings) -> None:
        super().__init__(model, vocabulary, settings)
        # on the device, so that captured steps see it; loop training never sets it
        self.register_buffer("lambda_base", torch.zeros((), device=vocabulary.head.device), persistent=False)
        self.learns_base = False  # a second gradient through the vocabulary, for nothing while lambda stays 0

    def row_sums(self, rows: StageRows) -> Sums:
        corrected, base = self.model.teacher_forced(rows.hidden, rows.previous, self.vocabulary)
        assert base is not None
        labels = rows.labels.flatten()
        final_ce = cross_entropy(corrected.flatten(0, 1), labels)
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.learns_base):
            base_ce = cross_entropy(base.flatten(0, 1), labels)
        return weighted([final_ce, base_ce], rows.weights.flatten())

    def mix(self) -> Sequence[Float[Tensor, ""]]:
        return 1 - self.lambda_base, self.lambda_base

    def begin_host_step(self, step: int, num_steps: int) -> None:
        start, ratio = self.settings.lambda_base_start, self.settings.lambda_base_decay_ratio
        self.set_lambda(lambda_base(step, num_steps, start, ratio))

    def set_lambda(self, value: float) -> None:
        """The share of the uncorrected loss from here on."""
        self.learns_base = value > 0
        self.lambda_base.fill_(value)


def states_at(states: Shaped[Tensor, "B T D"], positions: Int[Tensor, "B A k"]) -> Shaped[Tensor, "B A k D"]:
    """The states at these positions; beyond the end the last one, whose row weighs nothing."""
    where = positions.clamp(max=states.shape[1] - 1).flatten(1)[..., None].expand(-1, -1, states.shape[-1])
    return states.gather(1, where).unflatten(1, positions.shape[1:])
