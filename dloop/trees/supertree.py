"""DARTree: a supertree of fixed width for heads that read drafted tokens, then its best nodes.

Source: magneto0124/DARTree (pruned variant); arXiv 2608.13524.
"""

from dloop.trees.beam import LevelSize
from dloop.trees.tree import Tree, keep_best


def supertree(levels: list[LevelSize], packed: list[list[float]]) -> Tree:
    """The frontiers, depth by depth and the best first, from what `beam.packed` gave for these levels."""
    tokens, logp, scores, kept = packed
    tree, start, before = Tree([], [], [], []), 0, -1
    for level in levels:
        first = len(tree.tokens)
        for child in (int(place) for place in kept[start : start + level.kept]):
            tree.tokens.append(int(tokens[start + child]))
            tree.parents.append(before + child // level.width)
            tree.logp.append(logp[start + child])
            tree.scores.append(scores[start + child])
        start, before = start + level.children, first
    return tree


def prune(tree: Tree, budget: int, beta: float) -> Tree:
    """The `budget` best of score + beta * depth; beta <= 0, so that no node outranks its parent."""
    priority = [score + beta * depth for score, depth in zip(tree.scores, tree.depths, strict=True)]
    return keep_best(tree, priority, budget)
