"""DFlash: each row predicts the token at its own position; row 0 holds the anchor and predicts nothing.

Source: z-lab/dflash (architecture, key names, decoding), which has no head beyond the backbone's.
"""

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.drafters.block import BlockModel
from dloop.drafters.config import BlockConfig, Json, Reader, read_block, with_taps
from dloop.drafters.proposal import Proposal, measure
from dloop.sampling import GREEDY, Draw
from dloop.types import Vocabulary


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
        return measure(logits, draw.rows(logits))

    def teacher_forced(
        self, hidden: Float[Tensor, "... B D"], previous: Int[Tensor, "... k"], vocabulary: Vocabulary
    ) -> tuple[Float[Tensor, "... k V"], None]:
        """(logits, nothing beside them); no row reads a previous token."""
        return F.linear(self.predicting(hidden), vocabulary.head), None
