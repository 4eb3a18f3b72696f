"""Which runs a table shows: by what their settings are called, and by what all runs of a setting share."""

from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias, cast

from dloop.bench.naming import Column
from dloop.bench.report import ORDER, Found
from dloop.bench.results import Condition, Result

Runs: TypeAlias = Sequence[Result]
Families: TypeAlias = Mapping[str, Found]
CHAINS = ("host", "host_as_long", "loop", "trained", "dloop")
TREES = ("tree", "tree_loop", "tree_trained", "tree_dloop")


def base(column: Column) -> str:
    """What a setting is called without its further flags."""
    return column.setting.partition(",")[0]


def order(column: Column) -> tuple[int, str]:
    """The host first, DLoop last, with further flags after without; then names of the user's."""
    return ORDER.index(base(column)) if base(column) in ORDER else len(ORDER), column.setting


def grouped(found: Found, wanted: Callable[[Column, Runs], bool]) -> dict[Condition, dict[str, Found]]:
    """The drafters' settings that are wanted, by condition and by family: what stands together shares its sets."""
    groups: dict[Condition, dict[str, dict[Column, Mapping[str, Result]]]] = {}
    for column in sorted(found, key=lambda column: (column.condition, column.family or "", order(column))):
        runs = found[column]
        if column.family is not None and wanted(column, [*runs.values()]):
            groups.setdefault(column.condition, {}).setdefault(column.family, {})[column] = runs
    return {condition: dict(families) for condition, families in groups.items()}


def flag(runs: Runs, name: str) -> object:
    """What all runs of a setting were given for a flag; None too where a user's name covers several values."""
    values = [setting_of(run).get(name) for run in runs]
    return values[0] if all(value == values[0] for value in values) else None


def setting_of(run: Result) -> Mapping[str, object]:
    """All flags of a run."""
    return cast(Mapping[str, object], run.summary["setting"])


def has_rule(runs: Runs) -> bool:
    """Whether a stop rule ends the stages of any of these runs."""
    return any(setting_of(run).get("stop_rule") is not None for run in runs)
