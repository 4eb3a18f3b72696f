"""Where training stages start: anchors drawn from the tokens the target wrote."""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Anchors(NamedTuple):
    """Anchor positions in increasing order; slots beyond the number of candidates are not kept and weigh nothing."""

    positions: Int[Tensor, "B A"]
    keep: Bool[Tensor, "B A"]


def sample_anchors(
    loss_mask: Bool[Tensor, "B T"], num_anchors: int, keys: Float[Tensor, "B T_1"] | None = None
) -> Anchors:
    """Draw anchors uniformly without replacement among positions whose own and next token are both labels.

    `keys` (in [0, 1), one for each position but the last) decide the draw; drawn afresh if not given.
    No host copy. Source: DeepSpec's sampler.
    """
    candidates = loss_mask[:, :-1] & loss_mask[:, 1:]
    if keys is None:
        keys = torch.rand(candidates.shape, device=loss_mask.device)
    ranked = keys.masked_fill(~candidates, 2.0)
    if num_anchors > ranked.shape[1]:  # more slots than positions: the surplus is never kept
        ranked = torch.nn.functional.pad(ranked, (0, num_anchors - ranked.shape[1]), value=2.0)
    chosen = ranked.topk(num_anchors, dim=1, largest=False)
    keep = chosen.values < 1.5
    positions = chosen.indices.masked_fill(~keep, loss_mask.shape[1])
    positions, order = positions.sort(dim=1)
    keep = keep.gather(1, order)
    return Anchors(positions.masked_fill(~keep, 0), keep)
