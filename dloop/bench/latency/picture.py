"""A picture of a run: milliseconds against rows, a panel a context, both axes logarithmic."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dloop.bench.latency.book import Entry
from dloop.bench.plot import COLOURS, check_plot

LINES = {"stock": "o-", "twin": "s-", "fast": "D-", "floor": "--"}


def check_picture(path: Path) -> None:
    """Raises UserError before anything is measured, for a picture that cannot be drawn."""
    check_plot(path)


def draw(entries: Sequence[Entry], path: Path) -> None:
    """Draw all contexts with the same scale."""
    figure_class: Any = importlib.import_module("matplotlib.figure").Figure  # no pyplot: no window, no state
    figure = figure_class(figsize=(1.2 + 3.6 * len(entries), 4.2), layout="constrained")
    panels = figure.subplots(1, len(entries), squeeze=False, sharey=True)[0]
    for axes, entry in zip(panels, entries, strict=True):
        panel(axes, entry)
    panels[0].set_ylabel("one verification, ms")
    first = entries[0]
    figure.suptitle(f"{first['shape']}, {first['dtype']}, random weights, {first['gpu']}", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


def panel(axes: Any, entry: Entry) -> None:
    """One context: medians, with their quartiles as a band."""
    counts = sorted(map(int, entry["rows"]))
    for (name, style), colour in zip(LINES.items(), (*COLOURS[:3], "#333333"), strict=True):
        values = [entry["rows"][str(count)].get(f"{name}_ms") for count in counts]
        if None in values:
            continue
        axes.plot(counts, values, style, color=colour, label=name, markersize=4, linewidth=1.4)
        bounds = [entry["quartiles_ms"][str(count)].get(name) for count in counts]
        if None not in bounds:
            axes.fill_between(counts, *zip(*bounds, strict=True), color=colour, alpha=0.2, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", subs=(2, 3, 5))
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.xaxis.minorticks_off()
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.set_xlabel("rows")
    axes.set_title(f"{entry['context']:,} tokens of context", fontsize=9)
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
