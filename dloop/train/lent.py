"""The training objective of drafters that read keys and values lent by their target.

A step has none of its own, so there is nothing to carry from step to step but the state: every step of row t stands at
position t + 1, where its anchor does, and sees what the target kept of the positions up to t.
Sources: the released Gemma 4 assistants (positions, windows); EAGLE-3's training-time test (shifts, weights).
"""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dloop.drafters.layers import attend
from dloop.drafters.memory import KeyValues
from dloop.lent import of_rows
from dloop.targets.hf import BatchFeatures
from dloop.train import unroll
from dloop.train.batch import TrainBatch
from dloop.train.pieces import recomputed
from dloop.train.unroll import Unroll, UnrollObjective


@dataclass
class LentUnroll(Unroll):
    """The chains of all rows of a batch, over the same keys and values at every step."""

    lent: dict[str, KeyValues] = field(default_factory=dict[str, KeyValues])

    def places(self) -> Int[Tensor, "#B T"]:
        return self.positions + 1

    def _rows(
        self,
        read: Float[Tensor, "B T _"],
        embedded: Float[Tensor, "B T _"],
        places: Int[Tensor, "#B T"],
        memory: tuple[KeyValues, ...],
    ) -> tuple[Float[Tensor, "B T D"], list[KeyValues]]:
        return self.model.rows(read, embedded, places, self._attend), []  # pyright: ignore[reportArgumentType]

    def _attend(self, queries: Float[Tensor, "B H T d"], kind: str) -> Float[Tensor, "B H T d"]:
        """In pieces of rows, computed anew for the gradient; of a window no more keys than its rows see."""
        window = self.model.config.borrows[kind].window
        pieces: list[Tensor] = []
        for start in range(0, queries.shape[2], unroll.ROWS):
            stop = min(start + unroll.ROWS, queries.shape[2])
            first = 0 if window is None else max(0, start + 1 - window)
            near = KeyValues(*(part[:, :, first:stop] for part in self.lent[kind]))
            pieces.append(recomputed(behind, queries[:, :, start:stop], near, window))
        return torch.cat(pieces, 2)


def behind(queries: Float[Tensor, "B H n d"], seen: KeyValues, window: int | None) -> Float[Tensor, "B H n d"]:
    """Rows that stand at the last n of the keys' places; each sees its own place and, of a window, those before."""
    count, width = queries.shape[2], seen.keys.shape[2]
    places = torch.arange(width, device=queries.device)
    ages = places[width - count :, None] - places
    visible = (ages >= 0) & (ages < (window or width))
    return attend(queries, seen, visible[None, None], scale=1.0)


class AssistantObjective(UnrollObjective):
    """Cross-entropy with the target's law over all its words, whose logits may be bent; the head is the drafter's."""

    def begin(self, batch: TrainBatch, features: BatchFeatures) -> Unroll:
        if self.settings.attention == "flex":
            raise ValueError("rows over lent keys attend in dense pieces; see check_flex")
        chains = LentUnroll.begin(self.model, self.vocabulary, batch, features.last)
        assert isinstance(chains, LentUnroll)
        pairs = of_rows(features.taps, self.model.config.borrows)
        chains.recompute = self.settings.recompute
        chains.lent = {kind: KeyValues(*pair) for kind, pair in pairs.items()}
        return chains
