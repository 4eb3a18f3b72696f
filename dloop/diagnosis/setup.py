"""A drafter as it is run, so that one thing at a time can be run otherwise; nothing is written, no weight is copied."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from dloop.drafters.block import BlockDrafter, BlockModel, RMSNorm
from dloop.drafters.config import BlockConfig, DSparkConfig
from dloop.drafters.dspark import DSpark
from dloop.drafters.families import build
from dloop.drafters.proposal import Proposal
from dloop.sampling import GREEDY, Draw
from dloop.types import Vocabulary


class Tap(NamedTuple):
    """One slab of `fc`'s input: a target layer's output (-1: the embedding's), raw or after the target's final norm."""

    layer: int
    normed: bool = False


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a drafter is run."""

    model: BlockModel
    vocabulary: Vocabulary
    taps: tuple[Tap, ...]
    row_offset: int = 0  # of the rotary positions of block rows against those of the context

    @classmethod
    def of(cls, drafter: BlockDrafter) -> "Setup":
        """As configured."""
        taps = tuple(Tap(layer) for layer in drafter.taps)
        return cls(model=drafter.model, vocabulary=drafter.vocabulary, taps=taps)

    def configured(self, config: BlockConfig) -> "Setup":
        """The same weights under another config."""
        return replace(self, model=rebuilt(self.model, config))

    def gained(self, gain: Float[Tensor, " D"] | None) -> "Setup":
        """With another gain of `hidden_norm`; None: without that norm."""
        model = rebuilt(self.model, self.model.config)
        size, eps = model.config.hidden_size, model.config.rms_norm_eps
        if gain is None:
            model.hidden_norm = NoNorm(size, eps)
        else:
            model.hidden_norm = RMSNorm(size, eps)
            model.hidden_norm.weight = nn.Parameter(gain, requires_grad=False)
        return replace(self, model=model)

    def reordered(self, order: list[int]) -> "Setup":
        """With its layers in another order."""
        model = rebuilt(self.model, self.model.config)
        model.layers = nn.ModuleList([model.layers[index] for index in order])
        return replace(self, model=model)


class NoNorm(RMSNorm):
    """A norm left out."""

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        return x


class SamePosition(DSpark):
    """DSpark whose rows are read as same-position rows: row 0, the anchor's own, predicts nothing."""

    def propose(
        self, hidden: Float[Tensor, "... B D"], anchor: Int[Tensor, "..."], vocabulary: Vocabulary, draw: Draw = GREEDY
    ) -> Proposal:
        return super().propose(self.predicting(hidden), anchor, vocabulary, draw)

    def teacher_forced(
        self, hidden: Float[Tensor, "... B D"], previous: Int[Tensor, "... k"], vocabulary: Vocabulary
    ) -> tuple[Float[Tensor, "... k V"], Float[Tensor, "... k"] | None]:
        return super().teacher_forced(self.predicting(hidden), previous, vocabulary)


def rebuilt(model: BlockModel, config: BlockConfig) -> BlockModel:
    """A model of this config on the same weights."""
    with torch.device("meta"):
        if isinstance(config, DSparkConfig) and config.label_shift == 1:
            other = SamePosition(config)
        else:
            other = build(config)
    assert isinstance(other, BlockModel)
    other.load_state_dict(model.state_dict(), assign=True)
    return other.eval().requires_grad_(False)
