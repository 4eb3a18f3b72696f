"""EAGLE-3's dynamic tree: of all children that a beam scored, the best by path.

Source: SafeAILab/EAGLE (EAGLE-2's expansion and re-ranking).
"""

from dloop.trees.beam import Level
from dloop.trees.tree import Tree, keep_best


def candidates(levels: list[Level], packed: list[list[float]]) -> Tree:
    """Every scored child, level by level and row by row, from what `beam.packed` gave for these levels."""
    tokens, logp, scores, kept = packed
    parents, start, frontier = list[int](), 0, [-1]
    for level in levels:
        parents += [parent for parent in frontier for _ in range(level.width)]
        frontier = [start + int(child) for child in kept[start : start + len(level.kept)]]
        start += len(level.tokens)
    return Tree([int(token) for token in tokens], parents, logp, scores)


def rerank(pool: Tree, budget: int) -> Tree:
    """The `budget` best nodes by path."""
    return keep_best(pool, pool.scores, budget)


def deepest_path(pool: Tree, levels: list[Level]) -> list[int]:
    """The nodes of the best path of full depth, the root's child first."""
    start = len(pool.tokens) - len(levels[-1].tokens)
    node = max(range(start, len(pool.tokens)), key=lambda child: (pool.scores[child], -child))
    path: list[int] = []
    while node >= 0:
        path.append(node)
        node = pool.parents[node]
    return path[::-1]


def frontier_places(levels: list[Level], packed: list[list[float]], path: list[int]) -> list[int]:
    """Where the nodes of a path, all but the last, stand in their frontiers."""
    places, start = list[int](), 0
    for level, node in zip(levels[:-1], path[:-1], strict=True):
        kept = packed[3][start : start + len(level.kept)]
        places.append(kept.index(node - start))
        start += len(level.tokens)
    return places
