"""What one stage proposes: measured on the device, then brought to the host in one copy."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dloop.sampling import Drawn
from dloop.types import Stage, Vocabulary
from dloop.vocabulary import spread


class Proposal(NamedTuple):
    """The k tokens of one stage (or of many, batched in front), still on the device."""

    tokens: Int[Tensor, "... k"]
    logp: Float[Tensor, "... k"]  # of the token, float32
    top_logp: Float[Tensor, "... k"]  # of the row's most likely token, float32
    probs: Float[Tensor, "... k V"] | None  # the law the tokens were drawn from; None: nothing was drawn


class Unbuilt(NamedTuple):
    """A tree, still on the device: its numbers in one tensor for one copy, and what the host makes of them."""

    numbers: Float64[Tensor, " n"]
    build: Callable[[list[float]], Stage]

    def read(self) -> Stage:
        """Bring it to the host."""
        return self.build(self.numbers.tolist())  # sync


def measure(logits: Float[Tensor, "... k W"], drawn: Drawn) -> Proposal:
    """Float32 log-probabilities over all that the head knows, un-tempered, and the laws the tokens were drawn from."""
    logp = logits.float().log_softmax(-1)
    return Proposal(
        tokens=drawn.token,
        logp=logp.gather(-1, drawn.token[..., None])[..., 0],
        top_logp=logp.max(-1).values,
        probs=drawn.probs,
    )


def named(proposal: Proposal, vocabulary: Vocabulary) -> Proposal:
    """A proposal over the head's own words, told in the target's ids and over the target's vocabulary."""
    if (kept := vocabulary.kept) is None:
        return proposal
    probs = proposal.probs if proposal.probs is None else spread(proposal.probs, kept, len(vocabulary.embedding))
    return proposal._replace(tokens=kept[proposal.tokens], probs=probs)


def stacked(rows: list[Drawn]) -> Drawn:
    """The rows of a stage that were drawn one after the other."""
    probs = [row.probs for row in rows if row.probs is not None]
    return Drawn(torch.stack([row.token for row in rows], -1), torch.stack(probs, -2) if probs else None)


def pack(proposal: Proposal) -> Float64[Tensor, "... 3 k"]:
    """Tokens and log-probabilities in one tensor; float64 holds token ids and float32 values exactly."""
    return torch.stack([proposal.tokens.double(), proposal.logp.double(), proposal.top_logp.double()], -2)


def read_out(proposal: Proposal) -> Stage:
    """Bring a stage to the host in one copy."""
    return to_stage(pack(proposal).tolist(), proposal.probs)  # sync


def to_stage(packed: list[list[float]], probs: Float[Tensor, "k V"] | None = None) -> Stage:
    """A chain, from what `pack` gave for it."""
    tokens, logp, top_logp = packed
    return Stage(
        tokens=[int(token) for token in tokens],
        parents=list(range(-1, len(tokens) - 1)),
        logp=logp,
        spine=list(range(len(tokens))),
        score=sum(top_logp),
        probs=probs,
    )
