"""The target's logits from its last states: its head, and the soft cap that some targets put on it."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from dloop.types import Vocabulary


def target_logits(
    states: Float[Tensor, "... D"], vocabulary: Vocabulary, kept: Int[Tensor, " W"] | None = None
) -> Float[Tensor, "... W"]:
    """Over the whole vocabulary, or over these tokens."""
    head = vocabulary.head
    return capped(F.linear(states, head if kept is None else head[kept]), vocabulary.softcap)


def capped(logits: Float[Tensor, "... W"], softcap: float | None) -> Float[Tensor, "... W"]:
    """Bent towards plus and minus `softcap`; None: as they are."""
    return logits if softcap is None else torch.tanh(logits / softcap) * softcap
