"""DDTree: the most probable prefixes under per-depth laws that do not depend on one another.

Source: liranringel/ddtree (best-first construction, order of the nodes); arXiv 2604.12989.
"""

from heapq import heappop, heappush, heapreplace

from dloop.trees.tree import Tree


def best_first(logp: list[list[float]], tokens: list[list[int]], budget: int) -> Tree:
    """The `budget` most probable prefixes, in falling order; of equals the one of smaller ranks comes first.

    Args:
        logp: [depths][candidates], natural log, each depth's candidates in falling order.
        tokens: [depths][candidates], their ids.
        budget: most nodes.

    A node is taken off the heap before its next sibling and its first child are put on: O(budget log budget).
    """
    tree = Tree([], [], [], [])
    # (cost, ranks, parent): cost is minus the path's log-probability, ranks say which candidate at each depth.
    heap: list[tuple[float, tuple[int, ...], int]] = [(-logp[0][0], (0,), -1)] if logp else []
    while heap and len(tree.tokens) < budget:
        cost, ranks, parent = heap[0]
        depth, rank = len(ranks) - 1, ranks[-1]
        row = logp[depth]
        if rank + 1 < len(row):
            heapreplace(heap, (cost + row[rank] - row[rank + 1], (*ranks[:-1], rank + 1), parent))
        else:
            heappop(heap)
        if depth + 1 < len(logp):
            heappush(heap, (cost - logp[depth + 1][0], (*ranks, 0), len(tree.tokens)))
        tree.tokens.append(tokens[depth][rank])
        tree.parents.append(parent)
        tree.logp.append(row[rank])
        tree.scores.append(-cost)
    return tree
