"""What a training objective of any family offers the trainer, and what it is made of."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._dynamo import config as dynamo

from dloop.drafters.host import HostModel
from dloop.targets.hf import BatchFeatures
from dloop.train.anchors import Anchors
from dloop.train.batch import TrainBatch
from dloop.train.losses import DSparkWeights, Sums
from dloop.train.parallel import ALONE, Share
from dloop.train.pieces import in_pieces
from dloop.types import Vocabulary

VARIANTS = 32  # of one compiled function: with and without gradients, in two layouts, of any number of keys


class Loss(NamedTuple):
    """What one step minimises, and its parts; `loop` is None without a loop stage."""

    total: Float[Tensor, ""]
    host: Sums
    loop: Sums | None


class TotalWeights(NamedTuple):
    """What the rows of a whole step weigh: the denominators of all its parts."""

    host: Float[Tensor, ""]
    loop: Float[Tensor, ""]


@dataclass(frozen=True, kw_only=True)
class ObjectiveSettings:
    """What the loss is made of; the published defaults. What only one family reads carries its name in the comment."""

    num_anchors: int = 512
    loss_decay_gamma: float | None = 4.0
    dloop_loss_weight: float = 0.25  # DSpark, Domino
    position_offset_max: int = 0  # 0: every sample begins at position 0
    weights: DSparkWeights = DSparkWeights()  # DSpark
    lambda_base_start: float = 1.0  # Domino, host training
    lambda_base_decay_ratio: float = 0.5  # Domino, host training
    attention: Literal["dense", "flex"] = "dense"  # of packed stages, and of an unroll over keys of its own
    recompute: bool = False  # stages and steps anew for the gradient, in place of keeping what they computed
    share: Share = ALONE  # of the processes that share a batch
    loss_mask_shift: int = 0  # EAGLE-3: the row of token t counts if token t + shift is a label


class Objective(nn.Module):
    """Host loss and loop loss of one step: the module to wrap, so that all of a step runs inside one forward."""

    terms: ClassVar[tuple[str, ...]]
    reads_teacher: ClassVar[bool] = False
    model: HostModel
    summed = staticmethod(in_pieces)  # how the work on the vocabulary is done

    def __init__(self, model: HostModel, vocabulary: Vocabulary, settings: ObjectiveSettings) -> None:
        super().__init__()
        self.model = model
        self.vocabulary = vocabulary
        self.settings = settings

    @abstractmethod
    def forward(
        self,
        batch: TrainBatch,
        features: BatchFeatures,
        depth: int,
        anchors: Anchors | None = None,
        totals: TotalWeights | None = None,
    ) -> Loss:
        """`depth`: how deep this step goes, in the family's unit. `totals`: the weights of all parts of a step; the
        losses of its parts then add up. None: this batch is all.
        """

    @abstractmethod
    def draw(self, batch: TrainBatch) -> Anchors:
        """Where this step's rows start."""

    @abstractmethod
    def total_weights(self, parts: Sequence[tuple[TrainBatch, Anchors]], depth: int) -> TotalWeights:
        """What all rows of a step weigh. Needs labels alone, so that it is known before the first forward."""

    def compile_parts(self) -> None:
        """Let a compiler fuse what most of a step is: here the work on the vocabulary, in every family's `row_sums`."""
        dynamo.recompile_limit = max(dynamo.recompile_limit, VARIANTS)
        name = "row_sums"
        setattr(self, name, torch.compile(getattr(self, name)))

    def begin_host_step(self, step: int, num_steps: int) -> None:
        """Set what changes over the steps of a host training; loop training never calls it."""
