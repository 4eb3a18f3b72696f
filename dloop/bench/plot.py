"""A picture of a report: the speed-ups of every set, a bar a setting, with their intervals."""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dloop.bench.pages import heading, label, mean_name
from dloop.bench.report import MEAN, Row, Table
from dloop.errors import UserError

KINDS = (".png", ".svg", ".pdf")
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#555555")  # Okabe and Ito


def check_plot(path: Path) -> None:
    """Raises UserError before anything is read, for a picture that cannot be drawn."""
    if path.suffix not in KINDS:
        raise UserError(f"--plot {path} must end in {', '.join(KINDS)}")
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise UserError("--plot needs matplotlib; install the extra: pip install 'dloop-decoding[plot]'") from error


def plot(made: Sequence[Table], path: Path) -> None:
    """Draw one panel a table. Raises UserError where there is no speed-up to draw."""
    tables = [table for table in made if any(row.figures.speedup.value is not None for row in table.rows)]
    if not tables:
        raise UserError("--plot has no speed-up to draw; measure the baseline with dloop bench --baseline")
    figure_class: Any = importlib.import_module("matplotlib.figure").Figure  # no pyplot: no window, no state
    widest = max(len({row.dataset for row in table.rows}) + bool(table.means) for table in tables)
    bars = max(len(table.columns) for table in tables)
    figure = figure_class(
        figsize=(max(6.4, 1.2 + widest * (0.35 + 0.22 * bars)), 3.6 * len(tables)), layout="constrained"
    )
    for axes, table in zip(figure.subplots(len(tables), squeeze=False)[:, 0], tables, strict=True):
        draw(axes, table)
    figure.savefig(path, dpi=150)


def draw(axes: Any, table: Table) -> None:
    """One table's bars, grouped by set; the dashed line is the baseline."""
    rows = [row for row in [*table.rows, *table.means] if row.family is not None]
    groups = list(dict.fromkeys(row.dataset for row in rows))
    families = {row.family for row in rows if row.family is not None}
    names = list(dict.fromkeys(label(row.family, row.setting, families) for row in rows))
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        mine = [row for row in rows if label(row.family, row.setting, families) == name and row.figures.speedup.value]
        places = [groups.index(row.dataset) + (index - (len(names) - 1) / 2) * width for row in mine]
        heights = [row.figures.speedup.value for row in mine]
        axes.bar(places, heights, width * 0.92, label=name, color=COLOURS[index % len(COLOURS)], zorder=2)
        axes.errorbar(
            places, heights, yerr=errors(mine), fmt="none", ecolor="#222222", elinewidth=1, capsize=2, zorder=3
        )
    axes.axhline(1.0, color="#222222", linewidth=1, linestyle="--", zorder=4)
    axes.set_xticks(range(len(groups)), [mean_name(table) if name == MEAN else name for name in groups])
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title(heading(table.condition).replace(", ", "\n", 1), fontsize=9)
    axes.grid(axis="y", color="#dddddd", zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=min(len(names), 4), loc="upper center", bbox_to_anchor=(0.5, -0.08))


def errors(rows: Sequence[Row]) -> list[list[float]]:
    """Distances from the bars' ends to the bounds, never negative; 0 where there is no interval."""
    found: list[list[float]] = [[], []]
    for value, low, high in (row.figures.speedup for row in rows):
        assert value is not None
        found[0].append(max(0.0, value - (value if low is None else low)))
        found[1].append(max(0.0, (value if high is None else high) - value))
    return found
