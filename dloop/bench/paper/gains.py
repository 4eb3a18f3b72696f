"""Speed-ups and acceptance lengths, a row a setting and a column a set: tables 1, 2, 3, 5, A1 and A5 of the paper."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dloop.bench.naming import OF_OPEN_GATES, Column, kind, opens
from dloop.bench.pages import heading, legend, notes
from dloop.bench.paper.choose import CHAINS, TREES, Families, Runs, base, flag, grouped, has_rule, setting_of
from dloop.bench.paper.shape import Cell, Field, Gain, Part
from dloop.bench.report import Found, Row, Table, place_of_set, table_of
from dloop.bench.results import Condition

CELLS = "cells: speed-up over plain decoding / tau"
PAIR = ("host", "dloop")
LOOPING, AWARE = ("loop", "dloop"), ("trained", "dloop")
OPEN_ONLY = {name.replace("-", "_") for name in OF_OPEN_GATES}


def everything(mine: Found) -> Found:
    """All settings of a family."""
    return mine


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a table shows of the runs at hand."""

    wanted: Callable[[Column, Runs], bool]
    keep: Callable[[Found], Found] = everything  # of one family's settings, in the order of the rows; none: no rows
    fields: Sequence[str] = ()  # words between a setting's name and its figures
    lead: Callable[[Column, Runs], Sequence[Cell]] = lambda column, runs: ()
    expected: Sequence[str] = ()  # settings whose absence is told


def with_parts(mine: Found) -> Found:
    """All settings, where the loop or the training was measured alone."""
    return mine if {base(column) for column in mine} & {"loop", "trained"} else {}


def with_rules(mine: Found) -> Found:
    """All settings, where one has a stop rule."""
    return mine if any(has_rule([*runs.values()]) for runs in mine.values()) else {}


def swept(mine: Found) -> Found:
    """Settings that differ in the threshold alone, the largest first; a closed gate beside those it belongs to."""
    alike = {column: whole for column, runs in mine.items() if (whole := frozen([*runs.values()], {"loop_gate"}))}
    gates = {column: threshold([*mine[column].values()]) for column in alike}
    groups: dict[str, set[float]] = {}
    for column, whole in alike.items():
        if opens(gates[column]):
            groups.setdefault(whole, set()).add(gates[column])
    kept = [column for column, whole in alike.items() if opens(gates[column]) and len(groups[whole]) > 1]
    hosts = {frozen([*mine[column].values()], {"loop_gate", *OPEN_ONLY}) for column in kept}
    kept += [
        column
        for column in alike
        if not opens(gates[column]) and frozen([*mine[column].values()], {"loop_gate", *OPEN_ONLY}) in hosts
    ]
    return {column: mine[column] for column in sorted(kept, key=lambda each: (alike[each], -gates[each]))}


def frozen(runs: Runs, left_out: set[str]) -> str | None:
    """Drafter and flags of a setting in one text; None where its runs differ in them or in the gate."""
    if flag(runs, "loop_gate") is None or len({kind(run)[0] for run in runs}) > 1:
        return None
    facts = {
        repr((kind(run)[0], sorted((name, value) for name, value in setting_of(run).items() if name not in left_out)))
        for run in runs
    }
    return facts.pop() if len(facts) == 1 else None


def threshold(runs: Runs) -> float:
    """The threshold of a fixed gate; infinities are written as words. Raises ValueError for another gate."""
    return float(str(flag(runs, "loop_gate")))


def is_fixed(runs: Runs) -> bool:
    """Whether all runs have one threshold."""
    try:
        threshold(runs)
    except ValueError:
        return False
    return True


def spelled(runs: Runs) -> str:
    """A threshold as it is typed."""
    return f"{threshold(runs):g}" if opens(threshold(runs)) else "closed"


SHAPES = {
    "1": Shape(wanted=lambda column, runs: is_main(column, runs) and column.condition.temperature == 0, expected=PAIR),
    "A1": Shape(wanted=lambda column, runs: is_main(column, runs) and column.condition.temperature > 0, expected=PAIR),
    "2": Shape(
        wanted=lambda column, runs: base(column) in CHAINS and not has_rule(runs),
        keep=with_parts,
        fields=("loop", "trained"),
        lead=lambda column, runs: ["yes" if base(column) in names else "no" for names in (LOOPING, AWARE)],
        expected=[name for name in CHAINS if name != "host_as_long"],
    ),
    "3": Shape(
        wanted=lambda column, runs: base(column) in CHAINS or has_rule(runs),
        keep=with_rules,
        fields=("stop rule",),
        lead=lambda column, runs: [str(flag(runs, "stop_rule")) if has_rule(runs) else "none"],
        expected=PAIR,
    ),
    "5": Shape(
        wanted=lambda column, runs: base(column) in TREES and not has_rule(runs), expected=("tree", "tree_dloop")
    ),
    "A5": Shape(
        wanted=lambda column, runs: is_fixed(runs), keep=swept, fields=("g",), lead=lambda column, runs: [spelled(runs)]
    ),
}


def is_main(column: Column, runs: Runs) -> bool:
    """Whether this is a host or DLoop on it, drafting as the paper's do."""
    return base(column) in PAIR and not has_rule(runs)


def gains(found: Found, shape: Shape) -> list[Part]:
    """A part a condition under which there is something to show."""
    parts: list[Part] = []
    for condition, families in grouped(found, shape.wanted).items():
        kept = {name: mine for name, whole in families.items() if (mine := shape.keep(whole))}
        if kept:
            parts.append(part(condition, kept, found, shape))
    return parts


def part(condition: Condition, families: Families, found: Found, shape: Shape) -> Part:
    """A row a setting, family after family; means are over the sets that all settings of a family have."""
    baselines = [run for runs in found.values() for run in runs.values() if run.is_baseline]
    made = {name: table_of(condition, mine, baselines) for name, mine in families.items()}
    sets = sorted({row.dataset for table in made.values() for row in table.rows}, key=place_of_set)
    last = ["mean"] if any(table.means for table in made.values()) else []
    words = [Field(name) for name in ("family", "setting", *shape.fields)]
    return Part(
        heading=heading(condition),
        fields=[*words, *(Field(name, ".2f") for name in (*sets, *last))],
        rows=[
            [
                name,
                column.setting,
                *shape.lead(column, [*runs.values()]),
                *cells(made[name], column, sets)[: len(sets) + len(last)],
            ]
            for name, mine in families.items()
            for column, runs in mine.items()
        ],
        notes=[CELLS, *(line for name, table in made.items() for line in told(name, table, shape.expected))],
        legend=[line for table in made.values() for line in legend(table)],
    )


def cells(table: Table, column: Column, sets: Sequence[str]) -> list[Cell]:
    """A setting's figures on every set, and their mean; None where it was not measured."""
    mine = {row.dataset: row for row in table.rows if row.setting == column.setting}
    means: Mapping[str, Row] = {row.setting: row for row in table.means}
    rows = [*map(mine.get, sets), means.get(column.setting)]
    return [None if row is None else Gain(row.figures.speedup, row.figures.tau) for row in rows]


def told(name: str, table: Table, expected: Sequence[str]) -> list[str]:
    """What lacks in a family's rows, and why."""
    bases = {base(column) for column in table.columns}
    absent = [setting for setting in expected if setting not in bases]
    part_of = sorted({row.dataset for row in table.rows if not row.complete}, key=place_of_set)
    failed = [f"{row.setting} ({row.dataset}): {row.failures}" for row in table.rows if row.failures]
    lines = [f"not measured: {', '.join(absent)}"] if absent else []
    lines += [f"not the published samples: {', '.join(part_of)}"] if part_of else []
    lines += [f"failed responses: {', '.join(failed)}"] if failed else []
    return [f"{name}: {line}" for line in [*lines, *notes(table)]]
