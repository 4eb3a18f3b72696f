"""Losses as sums and weights, so that the parts of a step are normalised by one total weight."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-6  # added to every denominator, as in the public implementation


class Sums(NamedTuple):
    """Weighted sums of a loss's terms over the rows of one stage, in the family's order, and what the rows weigh."""

    terms: Float[Tensor, " t"]
    weight: Float[Tensor, ""]


def weighted(terms: Sequence[Float[Tensor, " n"]], weights: Float[Tensor, " n"]) -> Sums:
    """Sum each term over the rows.

    A row of weight 0 may hold anything, infinities of a padded position included: select, then weigh.
    """
    counted = torch.where(weights > 0, torch.stack(list(terms)), 0.0)
    return Sums((weights * counted).sum(-1), weights.sum())


def cross_entropy(logits: Float[Tensor, "n V"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Of each row, in float32."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    return F.cross_entropy(logits.to(wide), labels, reduction="none")


@dataclass(frozen=True, kw_only=True)
class DSparkWeights:
    """How DSpark's three terms are mixed; the published values."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0


def dspark_sums(
    logits: Float[Tensor, "n V"],
    confidence: Float[Tensor, " n"] | None,
    teacher: Float[Tensor, "n V"],
    labels: Int[Tensor, " n"],
    weights: Float[Tensor, " n"],
) -> Sums:
    """Cross-entropy, L1 distance to the teacher's law, and the confidence head's error, in float32.

    The confidence target is the chance that a draw from the drafter is accepted: 1 - L1 / 2, without gradient.
    Source: DeepSpec's DSpark loss.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logp = logits.to(wide).log_softmax(-1)
    ce = -logp.gather(-1, labels[:, None])[:, 0]
    l1 = (logp.exp() - teacher.to(wide).softmax(-1)).abs().sum(-1)
    target = (1 - 0.5 * l1.detach()).clamp(min=0)
    error = (
        F.binary_cross_entropy_with_logits(confidence.to(wide), target, reduction="none")
        if confidence is not None
        else torch.zeros_like(l1)
    )
    return weighted((ce, l1, error), weights)


def lambda_base(step: int, num_steps: int, start: float, decay_ratio: float) -> float:
    """The share of Domino's uncorrected loss at a 0-based step of a host training: a line from `start` to 0 that ends
    after int(decay_ratio * num_steps) steps. Source: SpecForge.
    """
    done = min((step + 1) / max(1, int(num_steps * decay_ratio)), 1.0)
    return min(max(start * (1 - done), 0.0), 1.0)


def decay_weights(labelled: Bool[Tensor, "... k"], gamma: float | None, prefix: bool) -> Float[Tensor, "... k"]:
    """exp(-j / gamma) for row j of a stage where there is a label; `prefix`: only up to the first gap in the labels."""
    mask = labelled.cumprod(-1) if prefix else labelled
    steps = torch.arange(labelled.shape[-1], device=labelled.device, dtype=torch.float32)
    decay = torch.exp(-steps / gamma) if gamma is not None else torch.ones_like(steps)
    return mask.float() * decay
