"""DFlash: each row predicts the token at its own position; row 0 holds the anchor and predicts nothing.

Source: z-lab/dflash (architecture, key names, decoding), which has no head beyond the backbone's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.drafters.block import BlockModel
from dloop.drafters.config import BlockConfig, Json, Reader, read_block, with_taps
from dloop.drafters.proposal import Proposal, Unbuilt, measure, named
from dloop.sampling import GREEDY, Draw
from dloop.trees.best_first import best_first
from dloop.trees.shape import TreeShape
from dloop.trees.tree import with_spine
from dloop.types import Stage, Vocabulary
from dloop.vocabulary import told


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(BlockConfig):
    """DFlash: the backbone alone."""

    family: ClassVar[str] = "dflash"
    architecture: ClassVar[str] = "DFlashDraftModel"


def read_dflash(raw: Json, source: str) -> DFlashConfig:
    """Parse z-lab's layout. Raises UserError naming the key that is missing or wrong."""
    return DFlashConfig(**read_block(with_taps(Reader(raw, source)), label_shift=1))  # pyright: ignore[reportArgumentType]


class DFlash(BlockModel):
    """The DFlash drafter; row j predicts the token at a+j, so a stage of B rows gives B-1 tokens."""

    config: DFlashConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def propose(
        self,
        hidden: Float[Tensor, "... B D"],
        anchor: Int[Tensor, "..."],
        vocabulary: Vocabulary,
        draw: Draw = GREEDY,
    ) -> Proposal:
        """All rows at once: none depends on another's token."""
        logits = F.linear(self.predicting(hidden), vocabulary.head)
        return named(measure(logits, draw.rows(logits)), vocabulary)

    def tree(
        self,
        hidden: Float[Tensor, "B D"],
        anchor: Int[Tensor, ""],
        vocabulary: Vocabulary,
        shape: TreeShape,
        nodes: int,
    ) -> Unbuilt:
        """A DDTree; its spine is every depth's most likely token."""
        logp = F.linear(self.predicting(hidden), vocabulary.head).float().log_softmax(-1)
        found = logp.topk(min(shape.topk, logp.shape[-1]), -1)
        tokens = told(found.indices, vocabulary.kept)
        depths, width = tokens.shape

        def build(numbers: list[float]) -> Stage:
            rows = [numbers[start : start + width] for start in range(0, len(numbers), width)]
            tokens, logp = [[int(token) for token in row] for row in rows[:depths]], rows[depths:]
            top = [row[0] for row in logp]
            return with_spine(best_first(logp, tokens, nodes), [row[0] for row in tokens], top, sum(top))

        return Unbuilt(torch.stack([tokens.double(), found.values.double()]).flatten(), build)

    def teacher_forced(
        self, hidden: Float[Tensor, "... B D"], previous: Int[Tensor, "... k"], vocabulary: Vocabulary
    ) -> tuple[Float[Tensor, "... k W"], None]:
        """(logits, nothing beside them); no row reads a previous token."""
        return F.linear(self.predicting(hidden), vocabulary.head), None
