"""What is small enough to keep of each drafted row beside its log-probability, and cheap: block drafters' twins alone.

The hidden states of a stage are in hand where its tokens are read out; the head is computed once more from them.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from dloop.drafters.block import BlockDrafter
from dloop.drafters.host import HostDrafter
from dloop.drafters.watched import Laws, figures
from dloop.types import Stage, StageRequest

FEATURES = (
    "entropy",  # nats, of the row's law over all that the drafter can name
    "margin",  # log-probability of the likeliest token less that of the second
    "confidence",  # DSpark's confidence logit; nan where there is no such head
)


@dataclass(frozen=True)
class Watched(BlockDrafter):
    """The same drafter; it notes the features of every stage that is read."""

    notes: list[Float[Tensor, "k F"]] = field(default_factory=list[Tensor])

    @torch.no_grad()
    def read_stage(
        self, hidden: Float[Tensor, "B D"], anchor: Int[Tensor, ""], request: StageRequest, position: int
    ) -> Stage:
        stage = super().read_stage(hidden, anchor, request, position)
        self.notes.append(features_of(self.laws(hidden, anchor, stage.tokens)))
        return stage

    def rows(self) -> Float32[np.ndarray, "stages k F"]:
        """The features of all stages so far, at least one, in their order; they are forgotten."""
        found = torch.stack(self.notes).cpu().numpy()
        self.notes.clear()
        return found


def watched(drafter: HostDrafter) -> HostDrafter:
    """The drafter, watched where its stages show their rows: the fast path's do not, nor do autoregressive ones."""
    if type(drafter) is not BlockDrafter:  # a subclass may read its stages elsewhere
        return drafter
    return Watched(**vars(drafter))


def features_of(laws: Laws) -> Float32[Tensor, "k F"]:
    """Float32 figures of a stage's rows."""
    _, margin, entropy = figures(laws.logits).unbind(-1)
    beside = torch.full_like(entropy, torch.nan) if laws.confidence is None else laws.confidence.float()
    return torch.stack([entropy, margin, beside], -1)
