"""A picture of a calibration: reliability, ROC, and the sweep of the threshold."""

import importlib
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dloop.bench.plot import COLOURS
from dloop.gate import GateSum
from dloop.gates import calibration
from dloop.gates.calibration import Stages

NAMES = {"last": "last stage, given its prefix", "all": "whole chain"}


def draw(made: Mapping[str, Any], stages: Mapping[GateSum, Stages], path: Path) -> None:
    figure_class: Any = importlib.import_module("matplotlib.figure").Figure  # no pyplot: no window, no state
    figure = figure_class(figsize=(12.6, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    for over, colour in zip(stages, COLOURS, strict=False):
        everything = made["scores"][over]["all"]
        draw_reliability(panels[0], everything, NAMES[over], colour)
        draw_roc(panels[1], stages[over], float(made["at"]), everything["auroc"], colour)
        draw_sweep(panels[2], [row for row in made["sweep"] if row["gate_sum"] == over], over, colour)
    for axes, x, y in zip(panels, ("exp(score)", "false positive rate", "threshold g"), titles(made), strict=True):
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        axes.grid(color="#dddddd", linewidth=0.6)
        if axes is not panels[2]:
            axes.plot([0, 1], [0, 1], color="#999999", linewidth=0.8, linestyle=":")
            axes.set_aspect("equal")
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)


def titles(made: Mapping[str, Any]) -> tuple[str, str, str]:
    """What the three panels show upwards."""
    return "share accepted whole", "true positive rate", "tokens/ms, by the costs" if made["costs"] else "tau"


def draw_reliability(axes: Any, found: Mapping[str, Any], name: str, colour: str) -> None:
    """Observed against predicted; a point's area is its bin's count, which stands beside it."""
    below = name == NAMES["last"]  # numbers of two curves must not cover each other
    bins = [each for each in found["reliability"] if each["count"]]
    if not bins:
        return
    most = max(each["count"] for each in bins)
    x, y = [each["predicted"] for each in bins], [each["observed"] for each in bins]
    axes.plot(x, y, "-", color=colour, linewidth=1, label=f"{name}, ECE {found['ece']:.3f}")
    axes.scatter(x, y, s=[8 + 80 * each["count"] / most for each in bins], color=colour, alpha=0.7)
    for each in bins:
        where = (each["predicted"], each["observed"])
        beside: Any = {"xytext": (5, -10), "ha": "left"} if below else {"xytext": (-5, 6), "ha": "right"}
        axes.annotate(str(each["count"]), where, textcoords="offset points", fontsize=6, color=colour, **beside)


def draw_roc(axes: Any, stages: Stages, at: float, area: float | None, colour: str) -> None:
    """The curve, and the operating point on it; a note where one class is missing."""
    curve = calibration.roc(stages.score, stages.whole)
    if area is None:
        axes.plot([], [], "-", color=colour, label="AUROC undefined: one class alone")
        return
    axes.plot(*zip(*curve, strict=True), "-", color=colour, linewidth=1.2, label=f"AUROC {area:.3f}")
    opened = calibration.point(stages.score, stages.whole, at)
    false = len(stages.whole) - opened.true
    axes.plot((opened.opened - opened.right) / false, opened.recall, "o", color=colour, label=f"g = {at}")


def draw_sweep(axes: Any, rows: list[Mapping[str, Any]], over: str, colour: str) -> None:
    """Speed, or without costs the acceptance length, against the threshold; the host as a line."""
    key = "acceptance_length" if rows[0]["tokens_per_ms"] is None else "tokens_per_ms"
    known = [(float(row["threshold"]), row[key]) for row in rows[1:] if math.isfinite(float(row["threshold"]))]
    if known:
        axes.plot(*zip(*known, strict=True), "o-", color=colour, markersize=4, label=f"sum of {over}")
    if "host" not in axes.get_legend_handles_labels()[1]:  # the same for both sums
        axes.axhline(rows[0][key], color="#333333", linestyle=":", linewidth=1, label="host")
