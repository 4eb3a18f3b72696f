"""The published list of a campaign: `gain-*.json`, one object a target, family, set, setting and temperature."""

from collections.abc import Mapping, Sequence

from dloop.bench.naming import WAY_OUT, Column
from dloop.bench.report import Row, Table
from dloop.bench.results import Result
from dloop.errors import UserError
from dloop.records import Json

Key = tuple[str, str | None, str, str, float]


def gain_list(made: Sequence[Table], found: Mapping[Column, Mapping[str, Result]]) -> list[dict[str, Json]]:
    """All rows of all tables, no means. `full_acceptance_rate`: of first stages; `gpu`: the machine, a CPU's name too.

    Raises UserError where two runs have one key, as from two GPUs or with two lengths.
    """
    listed: dict[Key, dict[str, Json]] = {}
    folders: dict[Key, Result] = {}
    for table in made:
        for row in table.rows:
            entry = entry_of(table, row)
            key = (table.condition.target, row.family, row.dataset, row.setting, table.condition.temperature)
            run = found[Column(table.condition, row.family, row.setting)][row.dataset]
            if key in listed:
                shown = ", ".join(str(part) for part in key)
                raise UserError(f"--gain: {folders[key].folder} and {run.folder} are both ({shown}); {WAY_OUT}")
            listed[key], folders[key] = entry, run
    return list(listed.values())


def entry_of(table: Table, row: Row) -> dict[str, Json]:
    """One object of the list."""
    figures = row.figures
    return {
        "target": table.condition.target,
        "family": row.family,
        "dataset": row.dataset,
        "setting": row.setting,
        "tau": figures.tau.value,
        "tokens_per_s": figures.tokens_per_s.value,
        "speedup": figures.speedup.value,
        "full_acceptance_rate": row.full_acceptance_rate,
        "n": row.n,
        "temperature": table.condition.temperature,
        "gpu": table.condition.machine,
    }
