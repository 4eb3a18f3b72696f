"""Drafters that live on what their target remembers: the keys and values it lends, and its last state.

Source: the released Gemma 4 assistants. Their own library shows them one row of a rejected token; here they see
verified positions alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.drafters.chain import ChainDrafter, ChainMemory, SlotState
from dloop.drafters.gemma4 import Assistant
from dloop.drafters.layers import attend
from dloop.drafters.memory import KeyValues, SlotMemory
from dloop.lent import LentKind, of_rows
from dloop.loop import Drafter
from dloop.types import Features


@dataclass(frozen=True)
class AssistantDrafter(ChainDrafter):
    """A loaded Gemma 4 assistant."""

    model: Assistant  # pyright: ignore[reportIncompatibleVariableOverride]

    def open(self) -> Drafter:
        return AssistantMemory(self)


@dataclass
class LentState(SlotState):
    """One sequence: what the target lent, by kind of layer, and as `features` its last state alone."""

    lent: dict[str, SlotMemory] = field(default_factory=dict[str, SlotMemory])

    @property
    def verified(self) -> int:
        return next((memory.committed for memory in self.lent.values()), 0)


class AssistantMemory(ChainMemory):
    """Law: committed rows, and no tail: what a step makes is its state, which the next step alone reads."""

    drafter: AssistantDrafter

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        """Only stores."""
        if position == 0:
            self.slots[slot] = LentState(features.last[:0])
        state = self.slots[slot]
        assert isinstance(state, LentState) and state.verified == position and len(features.last) == len(tokens)
        for kind, pair in of_rows(features.taps[None], self.drafter.config.borrows).items():
            memory = state.lent.setdefault(kind, SlotMemory())
            memory.append([KeyValues(*pair)])
            memory.commit()
        state.features = features.last[-1:].clone()  # a target may answer into the same memory again

    def _read(self, state: SlotState, anchor: Int[Tensor, " 1"]) -> Float[Tensor, "1 1 D"]:
        """The first step of a round: the state that gave the anchor."""
        return self._rows(state, self.drafter.model.first(state.features[None]), anchor, state.verified)

    def _rows(
        self, state: SlotState, states: Float[Tensor, "1 1 T"], tokens: Int[Tensor, " 1"], position: int
    ) -> Float[Tensor, "1 1 D"]:
        """One step. It stands at the anchor's place, however many steps came before."""
        assert isinstance(state, LentState)
        look = partial(look_at, state.lent, self.drafter.config.borrows)
        embedded = F.embedding(tokens, self.drafter.vocabulary.embedding)[None]
        at = torch.full((1, 1), state.verified, device=tokens.device)
        return self.drafter.model.rows(states, embedded, at, look)


def look_at(
    lent: dict[str, SlotMemory], kinds: Mapping[str, LentKind], queries: Float[Tensor, "1 H 1 d"], kind: str
) -> Float[Tensor, "1 H 1 d"]:
    """What queries see of the keys and values lent by layers of a kind."""
    keys, values = lent[kind].layers()[0]
    near = slice(-(kinds[kind].window or len(keys[0, 0])), None)
    return attend(queries, KeyValues(keys[:, :, near], values[:, :, near]), scale=1.0)
