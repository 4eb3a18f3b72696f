"""A picture of a replay: tokens per second against the threshold, a line a sum, with host and oracles."""

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dloop.bench.plot import COLOURS
from dloop.gate import FixedGate
from dloop.gates.costs import Costs
from dloop.gates.walk import Figures

Found = Mapping[str, tuple[FixedGate | None, Figures]]


def draw(found: Found, costs: Costs, path: Path) -> None:
    figure_class: Any = importlib.import_module("matplotlib.figure").Figure  # no pyplot: no window, no state
    figure = figure_class(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for over, colour in zip(("last", "all"), COLOURS, strict=False):
        points = sorted(
            (gate.threshold, result.tokens_per_s)
            for name, (gate, result) in found.items()
            if gate is not None and name.startswith("fixed:") and gate.over == over and math.isfinite(gate.threshold)
        )
        if points:
            axes.plot(*zip(*points, strict=True), "o-", color=colour, label=f"fixed gate, sum of {over}", markersize=4)
    for name in (name for name in found if name.startswith("auto")):
        axes.axhline(found[name][1].tokens_per_s, color="#888888", linewidth=1, label=name)
    for name, style in (("host", ":"), ("oracle:paper", "--"), ("oracle:hindsight", "-.")):
        axes.axhline(found[name][1].tokens_per_s, color="#333333", linestyle=style, linewidth=1, label=name)
    axes.set_xlabel("threshold g")
    axes.set_ylabel("tokens/s, by the costs")
    axes.set_title(costs.source, fontsize=8)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
