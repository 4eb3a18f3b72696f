"""Target features of a batch; or of a whole data set, computed once and kept in device memory.

For a small target and many epochs the frozen target is most of a step; a cache made in the process is never stale.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dloop.errors import UserError
from dloop.targets.hf import BatchFeatures, HFTarget
from dloop.train.batch import TokenFile, TrainBatch

SHARE = 0.6  # of the free device memory; the rest is for the step


def features_of(
    target: HFTarget, taps: tuple[int, ...], batch: TrainBatch, *, last: bool = True, compiled: bool = False
) -> BatchFeatures:
    """The target's features of a batch, computed on the spot, at the positions its samples stand at.

    `last`: whether the state after the final norm is needed too. `compiled`: fuse the layers.
    """
    positions = None
    if batch.offsets is not None:
        positions = batch.offsets[:, None] + torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return target.features(batch.tokens, taps, positions=positions, last=last, compiled=compiled)


@dataclass(frozen=True)
class CachedFeatures:
    """Call it like `HFTarget.features` with a batch of the data it was made from."""

    rows: Float[Tensor, "n W"]  # taps, and last state if asked for, of every token in the order of the token file
    tapped: int  # width of the taps

    def __call__(self, batch: TrainBatch) -> BatchFeatures:
        width = batch.tokens.shape[1]
        where = batch.starts[:, None] + torch.arange(width, device=batch.starts.device)
        found = self.rows[where.clamp(max=len(self.rows) - 1)]  # beyond a sample's end: anything, nobody looks there
        return BatchFeatures(taps=found[..., : self.tapped], last=found[..., self.tapped :])


def cache_features(
    target: HFTarget, data: TokenFile, taps: tuple[int, ...], batch_size: int, *, last: bool = True
) -> CachedFeatures:
    """Run the target once over all samples. Raises UserError if the features do not fit the device."""
    tapped = target.width_of(taps)
    width = tapped + (target.hidden_size if last else 0)
    needed = len(data.flat) * width * target.dtype.itemsize
    free = torch.cuda.mem_get_info(target.device)[0] if target.device.type == "cuda" else needed / SHARE
    if needed > SHARE * free:
        raise UserError(
            f"the features of {len(data.flat)} tokens need {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free; "
            "leave out --cache-features"
        )
    rows = torch.zeros(len(data.flat), width, dtype=target.dtype, device=target.device)
    order = np.argsort(data.lens.sum(1), kind="stable")  # like lengths together: little padding
    for start in range(0, len(order), batch_size):
        batch = data.collate(order[start : start + batch_size]).to(target.device)
        features = target.features(batch.tokens, taps, last=last)
        real = torch.arange(batch.tokens.shape[1], device=target.device) < batch.lengths[:, None]
        where = (batch.starts[:, None] + torch.arange(batch.tokens.shape[1], device=target.device))[real]
        rows[where] = torch.cat([features.taps[real], features.last[real]], -1)
    return CachedFeatures(rows, tapped)
