"""Is one setup better than another, or is it chance? A paired bootstrap over blocks of neighbouring positions.

What is accepted at neighbouring start positions hangs together, because it is about the same tokens: whole blocks of a
text are drawn, not positions. Many probes are tried on one pair, by two measures each, so the interval is wide: with
ALPHA = 0.001 a healthy pair gets a false alarm from one of 30 independent probes with a chance below 3 %, by the
intervals alone; a gain must also be MARGIN of the length as configured.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

ALPHA = 0.001  # two-sided
MARGIN = 0.03
BLOCK = 8  # positions
RESAMPLES = 8000


class Interval(NamedTuple):
    """A mean and its bootstrap interval."""

    mean: float
    low: float
    high: float


def interval_of(texts: list[Float[Tensor, " n"]], alpha: float = ALPHA) -> Interval:
    """The mean of all values of all texts, with an interval from drawing blocks of each text's values."""
    blocks = [block for text in texts for block in text.double().split(BLOCK)]
    sums = torch.stack([block.sum() for block in blocks])
    sizes = torch.tensor([float(len(block)) for block in blocks], dtype=torch.float64)
    drawn = torch.randint(len(blocks), (RESAMPLES, len(blocks)), generator=torch.Generator().manual_seed(0))
    means = sums[drawn].sum(1) / sizes[drawn].sum(1)
    low, high = torch.quantile(means, torch.tensor([alpha / 2, 1 - alpha / 2], dtype=torch.float64)).tolist()
    return Interval(float(sums.sum() / sizes.sum()), low, high)
