"""DSpark: next-token rows, corrected left to right by a small Markov head; a confidence head beside it.

Source: deepseek-ai/DeepSpec (architecture, key names, equations).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dloop.drafters.config import DSparkConfig
from dloop.drafters.path import PathModel
from dloop.types import Vocabulary


class MarkovHead(nn.Module):
    """A bias on the logits that depends on the previous token: low-rank, optionally gated or recurrent."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.kind = config.markov_head_type
        rank, hidden = config.markov_rank, config.hidden_size
        self.markov_w1 = nn.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size or config.vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def step(
        self, hidden: Float[Tensor, "... D"], previous: Float[Tensor, "... r"], state: Float[Tensor, "... r"] | None
    ) -> tuple[Float[Tensor, "... r"], Float[Tensor, "... r"] | None]:
        """(what `markov_w2` turns into the bias, the next state) for one row; only "rnn" has a state (None: zero)."""
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, previous], -1))) * previous, state
        if self.kind == "rnn":
            state = torch.zeros_like(previous) if state is None else state
            update, candidate, output = self.joint_proj(torch.cat([state, previous, hidden], -1)).chunk(3, -1)
            keep = torch.sigmoid(update)
            return torch.tanh(output), keep * state + (1 - keep) * torch.tanh(candidate)
        return previous, state

    def bias_rows(
        self, hidden: Float[Tensor, "... k D"], previous: Float[Tensor, "... k r"]
    ) -> Float[Tensor, "... k r"]:
        """All rows of a block with known previous tokens (training); the state starts at zero in every block."""
        if self.kind != "rnn":
            return self.step(hidden, previous, None)[0]
        rows, state = list[Tensor](), None
        for index in range(hidden.shape[-2]):
            row, state = self.step(hidden[..., index, :], previous[..., index, :], state)
            rows.append(row)
        return torch.stack(rows, -2)


class ConfidenceHead(nn.Module):
    """Estimates the chance that a row's token is accepted; one logit a row."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(config.hidden_size + (config.markov_rank if self.with_markov else 0), 1)

    def forward(self, hidden: Float[Tensor, "... D"], previous: Float[Tensor, "... r"] | None) -> Float[Tensor, "..."]:
        inputs = hidden if previous is None or not self.with_markov else torch.cat([hidden, previous], -1)
        logits = self.proj(inputs)[..., 0]
        return logits.to(torch.promote_types(logits.dtype, torch.float32))


class DSpark(PathModel):
    """The DSpark drafter; row j predicts the token at a+j+1, so a stage of B rows gives B tokens."""

    tells_confidence = True
    config: DSparkConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None

    @property
    def output(self) -> Float[Tensor, "W r"]:
        assert self.markov_head is not None
        return self.markov_head.markov_w2.weight

    def read(
        self,
        row: int,
        hidden: Float[Tensor, "... D"],
        previous: Int[Tensor, "..."],
        state: Float[Tensor, "... r"] | None,
        vocabulary: Vocabulary,
    ) -> tuple[Float[Tensor, "... r"] | None, Float[Tensor, "... r"] | None]:
        """The Markov head reads the previous token; only "rnn" has a state."""
        head = self.markov_head
        return (None, None) if head is None else head.step(hidden, head.markov_w1(previous), state)

    def teacher_forced(
        self, hidden: Float[Tensor, "... k D"], previous: Int[Tensor, "... k"], vocabulary: Vocabulary
    ) -> tuple[Float[Tensor, "... k W"], Float[Tensor, "... k"] | None]:
        """(corrected logits, confidence logits) of whole blocks whose previous tokens are known."""
        logits = F.linear(hidden, vocabulary.head)
        embedded = None
        if self.markov_head is not None:
            embedded = self.markov_head.markov_w1(previous)
            logits = logits + self.markov_head.markov_w2(self.markov_head.bias_rows(hidden, embedded))
        confidence = None if self.confidence_head is None else self.confidence_head(hidden, embedded)
        return logits, confidence
