"""The best fixed gate, sum and stage cap of a trace under given costs, by exact replay of a grid.

The best of many on some texts flatters itself there; what it gains on others is told by leaving out a text at a time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from dloop.gate import ALWAYS_OPEN, NEVER_OPENS, FixedGate, GateSum
from dloop.gates.costs import Costs
from dloop.gates.trace import Trace
from dloop.gates.walk import Walk, capped, gate_depths, walk

Times = Float64[np.ndarray, "texts settings"]  # milliseconds


@dataclass(frozen=True)
class Setting:
    """A fixed gate and the most stages of a round."""

    gate: FixedGate
    max_stages: int

    @property
    def is_host(self) -> bool:
        return self.gate.threshold == NEVER_OPENS

    @property
    def flags(self) -> str:
        """As `dloop generate` and `dloop bench` take them."""
        if self.is_host:
            return f"--loop-gate {NEVER_OPENS}"
        return f"--loop-gate {self.gate.threshold:.12g} --gate-sum {self.gate.over} --max-stages {self.max_stages}"


def grid(thresholds: Sequence[float], sums: Sequence[GateSum], max_stages: int) -> list[Setting]:
    """The host, then every gate: shallow caps and strict thresholds first, so that these win a tie."""
    strict = sorted({each for each in thresholds if each <= 0}, reverse=True)
    gates = [
        FixedGate(each, over)
        for each in strict
        for over in sums
        if each != ALWAYS_OPEN or over == sums[0]  # which always opens, whatever is summed
    ]
    host = Setting(FixedGate(NEVER_OPENS), max_stages)
    return [host, *(Setting(gate, cap) for cap in range(2, max_stages + 1) for gate in gates)]


def walks_of(trace: Trace, settings: Sequence[Setting]) -> list[list[Walk]]:
    """For every setting, all texts' rounds."""
    k, deepest = trace.ground.stage_len, max(each.max_stages for each in settings)
    gates = dict.fromkeys(each.gate for each in settings)
    depths = {gate: [gate_depths(text, gate, deepest) for text in trace.texts] for gate in gates}
    return [
        [
            walk(text, capped(text, depth, each.max_stages), k)
            for text, depth in zip(trace.texts, depths[each.gate], strict=True)
        ]
        for each in settings
    ]


def times(walks: Sequence[Sequence[Walk]], costs: Costs) -> Times:
    """Milliseconds of every text under every setting."""
    return np.array([[rounds.ms(costs) for rounds in texts] for texts in walks]).T


def best(ms: Times) -> int:
    """The setting that takes the least time for all texts; the first of these that tie."""
    return int(ms.sum(0).argmin())


def held_out(ms: Times) -> Int64[np.ndarray, " texts"]:
    """For each of at least two texts the setting that is best on all others."""
    return (ms.sum(0) - ms).argmin(1)


@dataclass(frozen=True)
class RowCost:
    """A verification of so many rows."""

    rows: int
    ms: float
    each_more_ms: float | None  # of a row more, from here to the next entry; None at the end
    pays_from: float | None  # tokens that such a row must bring a round to be worth its time at the host's pace


def row_costs(costs: Costs, tokens_per_ms: float) -> list[RowCost]:
    """Verification at the numbers of rows that were measured: what a longer draft, or a node of a tree, costs."""
    more = (np.diff(costs.verify_ms) / np.diff(costs.rows)).tolist()
    known = [
        RowCost(rows, ms, each, each * tokens_per_ms)
        for rows, ms, each in zip(costs.rows, costs.verify_ms, more, strict=False)
    ]
    return [*known, RowCost(costs.rows[-1], costs.verify_ms[-1], None, None)]
