"""What every tree policy returns, the one cut that they share, and how a stage's spine is kept beside its tree."""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from dloop.types import Stage


class Tree(NamedTuple):
    """Drafted nodes in topological order; the root, the stage's anchor, is not among them."""

    tokens: list[int]
    parents: list[int]  # index within the tree; -1: the root
    logp: list[float]  # natural log, of each token given the path above
    scores: list[float]  # what the policy ranks by: the path's summed log-probability

    @property
    def depths(self) -> list[int]:
        """1 for the root's children."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 + (depths[parent] if parent >= 0 else 0))
        return depths


def keep_best(pool: Tree, priority: Sequence[float], budget: int) -> Tree:
    """The `budget` nodes of highest priority, renumbered in the pool's order; of equals the earlier one stays.

    What is left is a tree as long as no node's priority exceeds its parent's.
    """
    kept = sorted(heapq.nsmallest(budget, range(len(priority)), key=lambda node: (-priority[node], node)))
    place = {node: index for index, node in enumerate(kept)} | {-1: -1}
    return Tree(
        tokens=[pool.tokens[node] for node in kept],
        parents=[place[pool.parents[node]] for node in kept],
        logp=[pool.logp[node] for node in kept],
        scores=[pool.scores[node] for node in kept],
    )


def with_spine(tree: Tree, tokens: Sequence[int], logp: Sequence[float], score: float) -> Stage:
    """A stage of this tree whose spine is the path with these tokens; nodes that it lacks stand last, in reserve."""
    children = {edge: node for node, edge in enumerate(zip(tree.parents, tree.tokens, strict=True))}
    parents, spine, here = list(tree.parents), list[int](), -1
    for token in tokens:
        node = children.get((here, token), len(parents))
        if node == len(parents):
            parents.append(here)
        spine.append(node)
        here = node
    reserve = len(parents) - len(tree.parents)
    missing = slice(len(tokens) - reserve, None)
    return Stage(
        tokens=[*tree.tokens, *tokens[missing]],
        parents=parents,
        logp=[*tree.logp, *logp[missing]],
        spine=spine,
        score=score,
        reserve=reserve,
    )
