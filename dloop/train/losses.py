"""Losses as sums and weights, so that the parts of a step are normalised by one total weight."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

EPSILON = 1e-6  # added to every denominator, as in the public implementation


class DSparkSums(NamedTuple):
    """Weighted sums over the rows of one stage. Source: DeepSpec's DSpark loss."""

    ce: Float[Tensor, ""]
    l1: Float[Tensor, ""]
    confidence: Float[Tensor, ""]
    weight: Float[Tensor, ""]

    def mean(self, weights: "DSparkWeights", weight: Float[Tensor, ""] | None = None) -> Float[Tensor, ""]:
        """The mixed terms over these rows' own weight, or over `weight`: that of all parts of a step."""
        total = weights.ce * self.ce + weights.l1 * self.l1 + weights.confidence * self.confidence
        return total / ((self.weight if weight is None else weight) + EPSILON)


@dataclass(frozen=True, kw_only=True)
class DSparkWeights:
    """How the three terms are mixed; the published values."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0


def dspark_sums(
    logits: Float[Tensor, "n V"],
    confidence: Float[Tensor, " n"] | None,
    teacher: Float[Tensor, "n V"],
    labels: Int[Tensor, " n"],
    weights: Float[Tensor, " n"],
) -> DSparkSums:
    """Cross-entropy, L1 distance to the teacher's law, and the confidence head's error, in float32.

    The confidence target is the chance that a draw from the drafter is accepted: 1 - L1 / 2, without gradient.
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
    # A row of weight 0 may hold anything, infinities of a padded position included: select, then weigh.
    counted = weights > 0
    ce, l1, error = (torch.where(counted, term, 0.0) for term in (ce, l1, error))
    return DSparkSums((weights * ce).sum(), (weights * l1).sum(), (weights * error).sum(), weights.sum())


def decay_weights(labelled: Bool[Tensor, "... k"], gamma: float | None, prefix: bool) -> Float[Tensor, "... k"]:
    """exp(-j / gamma) for row j of a stage where there is a label; `prefix`: only up to the first gap in the labels."""
    mask = labelled.cumprod(-1) if prefix else labelled
    steps = torch.arange(labelled.shape[-1], device=labelled.device, dtype=torch.float32)
    decay = torch.exp(-steps / gamma) if gamma is not None else torch.ones_like(steps)
    return mask.float() * decay
