"""How large the trees of a round are: the published flags as one value."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TreeShape:
    """Budgets count nodes without the root. `budget` is at least 1; `stage_budget` 0: further stages are chains."""

    budget: int  # of a round's first stage
    stage_budget: int = 0  # of each further stage
    topk: int = 10  # DDTree: candidates at each depth; EAGLE-3: width of the beam, and children of each of its nodes
    width: int = 12  # DARTree: nodes at each depth of the supertree
    beta: float = -0.2  # DARTree: what each depth adds to a node's rank, at most 0
    candidates: int = 64  # DARTree: tokens of each position that the head corrects
    expansion: int = 64  # DARTree: most children of a node

    def nodes(self, index: int) -> int:
        """The budget of a round's stage `index`; 0: a chain."""
        return self.stage_budget if index else self.budget
