"""The level-by-level expansion that DARTree and EAGLE-3's dynamic tree share, on the device.

Sources: magneto0124/DARTree, SafeAILab/EAGLE.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from jaxtyping import Float32, Float64, Int
from torch import Tensor


class Children(NamedTuple):
    """The best children of every node of a frontier, each row in falling order."""

    tokens: Int[Tensor, "f e"]
    logp: Float32[Tensor, "f e"]


class Frontier(NamedTuple):
    """The nodes of one depth that are expanded, the best first."""

    tokens: Int[Tensor, " f"]
    parents: Int[Tensor, " f"]  # places in the frontier before; 0 for the root, which is the first frontier
    scores: Float32[Tensor, " f"]  # summed log-probability of the path


class LevelSize(NamedTuple):
    """How much of a level there is."""

    children: int
    kept: int
    width: int  # children of each node of the frontier before


class Level(NamedTuple):
    """All children of one frontier, row by row, and which of them are the next one."""

    tokens: Int[Tensor, " n"]
    logp: Float32[Tensor, " n"]
    scores: Float32[Tensor, " n"]
    kept: Int[Tensor, " f"]  # indices, the best first
    width: int  # children of each node of the frontier before

    @property
    def size(self) -> LevelSize:
        return LevelSize(len(self.tokens), len(self.kept), self.width)


# The depth of the frontier (0: the root) comes first; None: go no deeper.
Expand = Callable[[int, Frontier], Children | None]


def beam(anchor: Int[Tensor, ""], depths: int, width: int, expand: Expand) -> list[Level]:
    """Expand the root, then at each depth the `width` best children, until there are `depths` levels, or no more."""
    frontier = Frontier(anchor[None], torch.zeros_like(anchor)[None], torch.zeros((1,), device=anchor.device))
    levels: list[Level] = []
    for depth in range(depths):
        if (children := expand(depth, frontier)) is None:
            break
        scores = (frontier.scores[:, None] + children.logp).flatten()
        # Stable: of equals the earlier child, on every device.
        kept = scores.sort(descending=True, stable=True).indices[:width]
        each, tokens = children.tokens.shape[1], children.tokens.flatten()
        levels.append(Level(tokens, children.logp.flatten(), scores, kept, each))
        frontier = Frontier(tokens[kept], kept // each, scores[kept])
    return levels


def best_children(logp: Float32[Tensor, "f c"], ids: Int[Tensor, " c"] | None, count: int) -> Children:
    """Each row's `count` best candidates; `ids` names the candidates, None: they are the whole vocabulary."""
    found = logp.topk(min(count, logp.shape[-1]), -1)
    return Children(found.indices if ids is None else ids[found.indices], found.values)


def packed(levels: list[Level]) -> Float64[Tensor, "4 n"]:
    """Tokens, log-probabilities, scores, and each level's `kept` filled up with -1: one tensor for one copy."""
    kept = [torch.nn.functional.pad(level.kept, (0, len(level.tokens) - len(level.kept)), value=-1) for level in levels]
    rows = [[level.tokens for level in levels], [level.logp for level in levels], [level.scores for level in levels]]
    return torch.stack([torch.cat(row).double() for row in (*rows, kept)])
