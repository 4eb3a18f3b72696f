"""The target's logits from its last states, with the soft cap that some targets put on them; and a draft vocabulary,
which is the part of the target's that a drafter can name: its words are numbered 0..W-1, in the order of their ids.
"""

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Float32, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.types import Vocabulary


def target_logits(
    states: Float[Tensor, "... D"], vocabulary: Vocabulary, kept: Int[Tensor, " W"] | None = None
) -> Float[Tensor, "... W"]:
    """Over the vocabulary that the head has, or over these of its rows."""
    head = vocabulary.head
    return capped(F.linear(states, head if kept is None else head[kept]), vocabulary.softcap)


def capped(logits: Float[Tensor, "... W"], softcap: float | None) -> Float[Tensor, "... W"]:
    """Bent towards plus and minus `softcap`; None: as they are."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap


def narrowed(vocabulary: Vocabulary, kept: Int[Tensor, " W"] | None) -> Vocabulary:
    """The vocabulary whose head has a copy of these rows alone; None, or a narrowed one: as it is."""
    if kept is None or vocabulary.kept is not None:
        return vocabulary
    return replace(vocabulary, head=vocabulary.head[kept], kept=kept)


def told(words: Int[Tensor, "*k"], kept: Int[Tensor, " W"] | None) -> Int[Tensor, "*k"]:
    """The target's ids of words of a draft vocabulary."""
    return words if kept is None else kept[words]


def numbered(tokens: Int[Tensor, "*k"], kept: Int[Tensor, " W"] | None) -> tuple[Int[Tensor, "*k"], Bool[Tensor, "*k"]]:
    """(numbers of the target's tokens in a draft vocabulary, some word's of one that it lacks; whether it has them)."""
    if kept is None:
        return tokens, torch.ones_like(tokens, dtype=torch.bool)
    found = torch.searchsorted(kept, tokens.contiguous()).clamp(max=len(kept) - 1)
    return found, kept[found] == tokens


def spread(
    probs: Float32[Tensor, "... W"], kept: Int[Tensor, " W"] | None, vocab_size: int
) -> Float32[Tensor, "... V"]:
    """A law over the target's vocabulary: tokens that the draft vocabulary lacks have no chance."""
    if kept is None:
        return probs
    return probs.new_zeros(*probs.shape[:-1], vocab_size).index_copy_(-1, kept, probs)
