"""EAGLE-3's dynamic tree for many sequences at once, on their device; `trees/dynamic.py` says the same for one.

Source: SafeAILab/EAGLE (EAGLE-2's expansion and re-ranking).
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

from dloop.trees.tree import Tree, with_spine
from dloop.types import Stage


class Frontier(NamedTuple):
    """The nodes of one depth that each of G beams expands, the best first."""

    nodes: Int[Tensor, "G f"]  # in the pool; -1: the root
    tokens: Int[Tensor, "G f"]  # the root's is known to the row that was made of it
    parents: Int[Tensor, "G f"]  # places in the frontier before
    scores: Float32[Tensor, "G f"]  # summed log-probability of the path


class Pool(NamedTuple):
    """Every child that was scored, level by level and row by row."""

    tokens: Int[Tensor, "G n"]
    parents: Int[Tensor, "G n"]  # in the pool; -1: the root
    logp: Float32[Tensor, "G n"]
    scores: Float32[Tensor, "G n"]

    def of(self, nodes: Int[Tensor, "G m"]) -> "Pool":
        """These nodes alone; their parents are still those of the whole pool."""
        return Pool(*(part.gather(1, nodes) for part in self))


class Beams:
    """G beams of one width, which is also the number of children of each node."""

    def __init__(self, width: int, groups: Int[Tensor, " G"]) -> None:
        """`groups` says only how many, and where."""
        root = torch.zeros_like(groups)[:, None]
        self.width = width
        self.frontiers = [Frontier(root - 1, root, root, root.float())]
        self.levels: list[Pool] = []

    def grow(self, logits: Float[Tensor, "G f W"], kept: Int[Tensor, " W"]) -> Frontier:
        """Score the last frontier's children, whose laws these are; `kept`: the target's ids of the W tokens."""
        last, start = self.frontiers[-1], sum(level.tokens.shape[1] for level in self.levels)
        found = logits.float().log_softmax(-1).topk(self.width, -1)
        scores = (last.scores[..., None] + found.values).flatten(1)
        tokens, parents = kept[found.indices].flatten(1), last.nodes.repeat_interleave(self.width, 1)
        self.levels.append(Pool(tokens, parents, found.values.flatten(1), scores))
        best = scores.sort(dim=-1, descending=True, stable=True).indices[:, : self.width]
        chosen = self.levels[-1].of(best)
        self.frontiers.append(Frontier(best + start, chosen.tokens, best // self.width, chosen.scores))
        return self.frontiers[-1]

    def finish(self, budget: int) -> tuple[Float64[Tensor, "G n"], Int[Tensor, "G d"]]:
        """(what `to_tree` reads of each beam, where the nodes of its best path of full depth stand in their frontiers).

        The places leave out the path's last node, which no frontier held.
        """
        pool = Pool(*(torch.cat(parts, 1) for parts in zip(*self.levels, strict=True)))
        best = pool.scores.sort(dim=-1, descending=True, stable=True).indices[:, :budget].sort(-1).values
        tree = pool.of(best)
        parents = torch.where(tree.parents < 0, -1, torch.searchsorted(best, tree.parents.contiguous()))
        path = self._deepest(pool)
        spine = pool.of(path)
        parts = (tree.tokens, parents, tree.logp, spine.tokens, spine.logp)
        places = [
            (frontier.nodes == path[:, depth : depth + 1]).int().argmax(1)
            for depth, frontier in enumerate(self.frontiers[1:-1])
        ]
        packed = torch.cat([part.double() for part in parts], 1)
        return packed, torch.stack(places, 1) if places else path[:, :0]

    def _deepest(self, pool: Pool) -> Int[Tensor, "G levels"]:
        """The nodes of the best path of full depth, the root's child first; of equals the earlier one."""
        last = self.levels[-1].scores
        path = [pool.tokens.shape[1] - last.shape[1] + last.argmax(1, keepdim=True)]
        for _ in self.levels[1:]:
            path.append(pool.parents.gather(1, path[-1]))
        return torch.cat(path[::-1], 1)


def to_tree(packed: list[float], depth: int) -> Stage:
    """A stage, from what `finish` gave for it after `depth` levels."""
    count = (len(packed) - 2 * depth) // 3
    tokens, parents = ([int(value) for value in packed[start : start + count]] for start in (0, count))
    logp, spine_logp = packed[2 * count : 3 * count], packed[3 * count + depth :]
    spine = [int(token) for token in packed[3 * count : 3 * count + depth]]
    return with_spine(Tree(tokens, parents, logp, []), spine, spine_logp, sum(spine_logp))
