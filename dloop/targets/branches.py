"""Rows that branch: who sees whom, and which of a cache's rows a verdict keeps."""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class KeyValueLayer(Protocol):
    """What transformers stores for one attention layer of one sequence."""

    keys: Float[Tensor, "1 H n d"]
    values: Float[Tensor, "1 H n d"]


def is_chain(parents: list[int]) -> bool:
    """Whether each row follows the one before it."""
    return all(parent == row - 1 for row, parent in enumerate(parents))


def ancestry(base: int, parents: list[int]) -> np.ndarray:
    """[n, base + n], true where a row sees: `base` committed positions, its ancestors and itself."""
    seen = np.zeros((len(parents), base + len(parents)), bool)
    seen[:, :base] = True
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] = seen[parent]
        seen[row, base + row] = True
    return seen


def depths(parents: list[int]) -> np.ndarray:
    """[n], how many of the rows a row follows."""
    found = np.zeros(len(parents), int)
    for row, parent in enumerate(parents):
        found[row] = found[parent] + 1 if parent >= 0 else 0
    return found


def shorten(layers: list[KeyValueLayer], base: int, path: list[int]) -> None:
    """Keep the first `base` positions and then the rows of `path`: a slice for a chain, a gather for a branch.

    Works on the layers' tensors: the meaning of `DynamicCache.crop` changed between transformers releases.
    """
    prefix = path == list(range(len(path)))
    for layer in layers:
        keys, values = layer.keys, layer.values
        if prefix:
            layer.keys, layer.values = keys[..., : base + len(path), :], values[..., : base + len(path), :]
        else:
            kept = torch.tensor([*range(base), *(base + row for row in path)], device=keys.device)
            layer.keys, layer.values = keys.index_select(-2, kept), values.index_select(-2, kept)
