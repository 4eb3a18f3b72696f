"""What the best gates there could be would draft, knowing the text: the paper's oracle, and the hindsight optimum."""

import numpy as np

from dloop.gates.costs import Costs
from dloop.gates.trace import Text
from dloop.gates.walk import Depths, accepted_at, capped


def paper_depths(text: Text, stage_len: int, max_stages: int) -> Depths:
    """Another stage follows exactly while everything drafted so far is accepted.

    It knows what is accepted, not what a stage costs nor what the next one brings. Source: paper's oracle.
    """
    return capped(text, 1 + text.accepted // stage_len, max_stages)


def hindsight_depths(text: Text, costs: Costs, stage_len: int, max_stages: int) -> Depths:
    """The stages at every start that cover the rest of the text in the least time; the fewest of these that tie.

    Dynamic programming from the end of the text: V(i) = min over s of T(s) + V(i + N(i, s)), with N = accepted + 1.
    At least one stage is drafted wherever one can be: decoding does so before any gate is asked.
    """
    n, most = len(text), most_stages(text, max_stages)
    counts = [accepted_at(text, np.full(n, s, np.int64), stage_len) for s in range(most + 1)]
    nexts = np.minimum(np.arange(n)[:, None] + np.stack(counts, 1) + 1, n)
    round_ms = costs.round_ms(np.arange(most + 1), stage_len)
    depths, left_ms = np.zeros(n, np.int64), np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        top = min(int(text.stages[i]), most)
        least = min(1, top)
        total = round_ms[least : top + 1] + left_ms[nexts[i, least : top + 1]]
        depths[i] = least + int(total.argmin())
        left_ms[i] = total.min()
    return depths


def most_stages(text: Text, max_stages: int) -> int:
    """The deepest draft of any start."""
    return int(min(max_stages, text.stages.max(initial=0)))
