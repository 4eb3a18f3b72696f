"""Domino: the backbone's logits, corrected left to right by a recurrent state over the tokens before.

Sources: SpecForge (architecture, key names, training form), jianuo-huang/Domino (decoding, what missing keys mean).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dloop.drafters.config import BlockConfig, Json, Reader, read_block, with_taps
from dloop.drafters.path import PathModel
from dloop.types import Vocabulary

OLD_PREFIX = "logit_head."  # early checkpoints nest the head's tensors under it


@dataclass(frozen=True, kw_only=True)
class DominoConfig(BlockConfig):
    """Domino: the sizes of the correction, and how many leading rows go without it."""

    family: ClassVar[str] = "domino"
    architecture: ClassVar[str] = "DominoDraftModel"

    emb_dim: int  # E, between the two projections
    gru_hidden_dim: int  # G
    pure_draft_prefix_len: int

    def method(self) -> dict[str, object]:
        return {
            "projector_type": "domino",
            "pure_draft_prefix_len": self.pure_draft_prefix_len,
            "emb_dim": self.emb_dim,
            "gru_hidden_dim": self.gru_hidden_dim,
            "shift_label": self.label_shift == 0,
        }


def read_domino(raw: Json, source: str) -> DominoConfig:
    """Parse any published form. What early files leave out means what it means to the published code: a state as wide
    as `emb_dim`, no uncorrected row, same-position labels. Raises UserError naming the key that is missing or wrong.
    """
    reader = with_taps(Reader(raw, source))
    for key in ("use_bias_gate", "use_bias_norm"):
        if reader.has(key) and reader.boolean(key):
            raise reader.fail(f"{key}=True is an experimental Domino head, which is not supported; use a released one")
    next_token = reader.has("shift_label") and reader.boolean("shift_label")
    prefix = reader.integer("pure_draft_prefix_len") if reader.has("pure_draft_prefix_len") else 0
    return DominoConfig(
        **read_block(reader, label_shift=0 if next_token else 1),  # pyright: ignore[reportArgumentType]
        emb_dim=reader.integer("emb_dim"),
        gru_hidden_dim=reader.integer("gru_hidden_dim" if reader.has("gru_hidden_dim") else "emb_dim"),
        pure_draft_prefix_len=prefix,
    )


def present_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of early checkpoints under the names of later ones."""
    return {name.removeprefix(OLD_PREFIX): value for name, value in tensors.items()}


class PrefixGRU(nn.Module):
    """One GRU layer without biases, a step at a time; gates in PyTorch's order r, z, n."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__()
        self.weight_ih_l0 = nn.Parameter(torch.empty(3 * size, inputs).uniform_(-(size**-0.5), size**-0.5))
        self.weight_hh_l0 = nn.Parameter(torch.empty(3 * size, size).uniform_(-(size**-0.5), size**-0.5))

    def project(self, tokens: Float[Tensor, "... D"]) -> Float[Tensor, "... G3"]:
        """The token's share of the gates, apart from any state."""
        return F.linear(tokens, self.weight_ih_l0)

    def step(self, projected: Float[Tensor, "... G3"], state: Float[Tensor, "... G"] | None) -> Float[Tensor, "... G"]:
        """The state after one more token; None: the zero state every stage starts from."""
        if state is None:
            state = torch.zeros_like(projected[..., : self.weight_hh_l0.shape[1]])
        reset, update, new = projected.chunk(3, -1)
        held_reset, held_update, held_new = F.linear(state, self.weight_hh_l0).chunk(3, -1)
        keep = torch.sigmoid(update + held_update)
        candidate = torch.tanh(new + torch.sigmoid(reset + held_reset) * held_new)
        return (1 - keep) * candidate + keep * state


class Domino(PathModel):
    """The Domino drafter; with next-token rows a stage of B rows gives B tokens, else B-1."""

    config: DominoConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: DominoConfig) -> None:
        super().__init__(config)
        self.prefix_gru = PrefixGRU(config.hidden_size, config.gru_hidden_dim)
        self.embed_proj = nn.Sequential(
            nn.Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False),
            nn.SiLU(),
            nn.Linear(config.emb_dim, config.draft_vocab_size or config.vocab_size, bias=False),
        )

    def correction(self, rows: Float[Tensor, "... D"], states: Float[Tensor, "... G"]) -> Float[Tensor, "... W"]:
        """What the tokens before add to a row's logits."""
        return self.embed_proj(torch.cat([rows, states], -1))

    @property
    def output(self) -> Float[Tensor, "W E"]:
        return cast(nn.Linear, self.embed_proj[-1]).weight

    def read(
        self,
        row: int,
        hidden: Float[Tensor, "... D"],
        previous: Int[Tensor, "..."],
        state: Float[Tensor, "... G"] | None,
        vocabulary: Vocabulary,
    ) -> tuple[Float[Tensor, "... E"] | None, Float[Tensor, "... G"]]:
        """The state reads the anchor and every token drafted after it; leading rows go uncorrected."""
        state = self.prefix_gru.step(self.prefix_gru.project(F.embedding(previous, vocabulary.embedding)), state)
        if row < self.config.pure_draft_prefix_len:
            return None, state
        return self.embed_proj[:-1](torch.cat([hidden, state], -1)), state

    def teacher_forced(
        self, hidden: Float[Tensor, "... B D"], previous: Int[Tensor, "... k"], vocabulary: Vocabulary
    ) -> tuple[Float[Tensor, "... k W"], Float[Tensor, "... k W"]]:
        """(corrected logits, the backbone's own) of whole stages whose previous tokens are known."""
        rows, pure = self.predicting(hidden), self.config.pure_draft_prefix_len
        base = F.linear(rows, vocabulary.head)
        states = self.states(previous, vocabulary)
        corrected = base[..., pure:, :] + self.correction(rows[..., pure:, :], states[..., pure:, :])
        return torch.cat([base[..., :pure, :], corrected], -2), base

    def states(self, previous: Int[Tensor, "... k"], vocabulary: Vocabulary) -> Float[Tensor, "... k G"]:
        """The recurrent state of every row."""
        projected = self.prefix_gru.project(F.embedding(previous, vocabulary.embedding))
        states, state = list[Tensor](), None
        for row in projected.unbind(-2):
            state = self.prefix_gru.step(row, state)
            states.append(state)
        return torch.stack(states, -2)
