"""The training objective of block drafters: the host's own loss, and one loop stage in the deployed layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dloop.drafters.dspark import DSpark
from dloop.targets.hf import BatchFeatures
from dloop.train.anchors import Anchors, sample_anchors
from dloop.train.batch import TrainBatch
from dloop.train.losses import DSparkSums, DSparkWeights, decay_weights, dspark_sums
from dloop.train.packed import PackedStages
from dloop.types import Vocabulary


class Loss(NamedTuple):
    """What one step minimises, and its parts; `loop` is None without a loop stage."""

    total: Float[Tensor, ""]
    host: DSparkSums
    loop: DSparkSums | None


class TotalWeights(NamedTuple):
    """What the rows of a whole step weigh: the denominators of all its parts."""

    host: Float[Tensor, ""]
    loop: Float[Tensor, ""]


class StageRows(NamedTuple):
    """One stage of n chains, k rows each."""

    hidden: Float[Tensor, "n k D"]
    teacher: Float[Tensor, "n k D"]  # the target's own state at the row's position, after the final norm
    previous: Int[Tensor, "n k"]
    labels: Int[Tensor, "n k"]
    weights: Float[Tensor, "n k"]


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What the loss is made of; the published defaults."""

    num_anchors: int = 512
    loss_decay_gamma: float | None = 4.0
    dloop_loss_weight: float = 0.25
    weights: DSparkWeights = DSparkWeights()


class DSparkObjective(nn.Module):
    """Host loss plus one loop stage: the module to wrap, so that all stages of a step run inside one forward.

    loss = (1 - w) * host + w * loop with w = `dloop_loss_weight`; each side is normalised by its own weights, summed
    over the parts of a step.
    Source: the published README's training table; DeepSpec for the host loss.
    """

    def __init__(self, model: DSpark, vocabulary: Vocabulary, settings: ObjectiveSettings) -> None:
        super().__init__()
        self.model = model
        self.vocabulary = vocabulary
        self.settings = settings

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
        stages = PackedStages.begin(self.model, self.vocabulary, batch.tokens, features.taps, anchors)
        host_weight, loop_weight = (None, None) if totals is None else totals
        host = self.stage_sums(stages.forward(), 0, stages, batch, features)
        if depth == 0:
            return Loss(host.mean(self.settings.weights, host_weight), host, None)
        for _ in range(depth - 1):
            stages.forward()  # middle stages only hand on hidden states
        loop = self.stage_sums(stages.forward(), depth, stages, batch, features)
        share = self.settings.dloop_loss_weight
        weights = self.settings.weights
        total = (1 - share) * host.mean(weights, host_weight) + share * loop.mean(weights, loop_weight)
        return Loss(total, host, loop)

    def draw(self, batch: TrainBatch) -> Anchors:
        """Fresh anchors for a batch."""
        return sample_anchors(batch.loss_mask, self.settings.num_anchors)

    def total_weights(self, parts: Sequence[tuple[TrainBatch, Anchors]], depth: int) -> TotalWeights:
        """What all rows of a step weigh. Needs labels alone, so that it is known before the first forward."""
        host, loop = (
            torch.stack([self.row_weights(stage_index, anchors, batch).sum() for batch, anchors in parts]).sum()
            for stage_index in (0, depth)
        )
        return TotalWeights(host, loop)

    def row_weights(self, stage_index: int, anchors: Anchors, batch: TrainBatch) -> Float[Tensor, "B A k"]:
        """How much each row of a stage counts."""
        _, labelled = self.labels(self.row_positions(stage_index, anchors) + 1, anchors, batch)
        return decay_weights(labelled, self.settings.loss_decay_gamma, prefix=True)

    def row_positions(self, stage_index: int, anchors: Anchors) -> Int[Tensor, "B A k"]:
        """Where the rows of a stage stand."""
        config = self.model.config
        starts = anchors.positions + stage_index * config.stage_len
        return starts[..., None] + torch.arange(config.block_size, device=starts.device)

    def stage_sums(
        self,
        hidden: Float[Tensor, "B A R D"],
        stage_index: int,
        stages: PackedStages,
        batch: TrainBatch,
        features: BatchFeatures,
    ) -> DSparkSums:
        """Row j of a stage that starts at s: previous token x_{s+j}, the teacher's law at s+j, label x_{s+j+1}."""
        at = self.row_positions(stage_index, stages.anchors)
        labels, _ = self.labels(at + 1, stages.anchors, batch)
        previous, _ = self.labels(at, stages.anchors, batch)
        width = batch.tokens.shape[1]
        where = at.clamp(max=width - 1).flatten(1)[..., None].expand(-1, -1, features.last.shape[-1])
        rows = StageRows(
            hidden=hidden.flatten(0, 1),
            teacher=features.last.gather(1, where).unflatten(1, at.shape[1:]).flatten(0, 1),
            previous=previous.flatten(0, 1),
            labels=labels.flatten(0, 1),
            weights=self.row_weights(stage_index, stages.anchors, batch).flatten(0, 1),
        )
        return self.row_sums(rows)

    def row_sums(self, rows: StageRows) -> DSparkSums:
        """All work on the vocabulary, in one place: what a compiler should fuse."""
        logits, confidence = self.model.teacher_forced(rows.hidden, rows.previous, self.vocabulary)
        with torch.no_grad():
            teacher = F.linear(rows.teacher, self.vocabulary.head)
        return dspark_sums(
            logits.flatten(0, 1),
            None if confidence is None else confidence.flatten(),
            teacher.flatten(0, 1),
            rows.labels.flatten(),
            rows.weights.flatten(),
        )

    def labels(
        self, positions: Int[Tensor, "B A k"], anchors: Anchors, batch: TrainBatch
    ) -> tuple[Int[Tensor, "B A k"], Tensor]:
        """(tokens at these positions, whether they are labels of a kept anchor)."""
        width = batch.tokens.shape[1]
        inside = positions.clamp(max=width - 1).flatten(1)
        tokens = batch.tokens.gather(1, inside).view_as(positions)
        marked = batch.loss_mask.gather(1, inside).view_as(positions)
        return tokens, marked & (positions < width) & anchors.keep[..., None]
