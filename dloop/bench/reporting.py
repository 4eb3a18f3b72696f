"""What `dloop report` does: read, name, sum up, and write what was asked for."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dloop.bench.compare import Difference, compare
from dloop.bench.gain import gain_list
from dloop.bench.naming import columns, parse_names
from dloop.bench.pages import page, show
from dloop.bench.plot import check_plot, plot
from dloop.bench.report import Row, Table, tables
from dloop.bench.results import read_results
from dloop.bench.store import write
from dloop.cli.report import Command
from dloop.errors import UserError
from dloop.records import SCHEMA, Json, dumps, plain


def report(command: Command) -> int:
    """Nothing is written before everything was read and found to be in order."""
    if command.plot is not None:
        check_plot(command.plot)
    found = columns(read_results(command.results or ["results"]), parse_names(command.name))
    made = tables(found)
    differences = compare(found, *command.compare) if command.compare else []
    if command.gain is not None:
        lines = ",\n ".join(dumps(entry) for entry in gain_list(made, found))
        save(command.gain, f"[{lines}]\n")
    if command.markdown is not None:
        save(command.markdown, page(made, differences, command.compare))
    if command.plot is not None:
        plot(made, command.plot)
    if command.json:
        print(dumps(document(made, differences, command.compare)))
    else:
        show(made, differences, command.compare, Console(highlight=False))
    return 0


def save(path: Path, text: str) -> None:
    """Write a file. Raises UserError where that is not possible."""
    try:
        write(path, text)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); choose another file") from error


def document(made: Sequence[Table], differences: Sequence[Difference], pair: Sequence[str]) -> dict[str, Json]:
    """Everything as one JSON document."""
    listed = [
        {
            **table.condition._asdict(),
            "rows": [record(row) for row in table.rows],
            "means": [record(row) for row in table.means],
            "mean_sets": table.mean_sets,
            "settings": [
                {
                    "family": c.family,
                    "setting": c.setting,
                    "draft": run.summary["draft"],
                    "flags": run.summary["setting_name"],
                }
                for c, run in table.columns.items()
            ],
        }
        for table in made
    ]
    compared = {"a": pair[0], "b": pair[1], "rows": [dataclasses.asdict(row) for row in differences]} if pair else None
    whole = {"schema": SCHEMA, "tables": listed, "compare": compared}
    return {key: plain(value) for key, value in whole.items()}


def record(row: Row) -> dict[str, object]:
    """A row, every estimate as its value and interval."""
    return {**dataclasses.asdict(row), "figures": {name: list(e) for name, e in row.figures._asdict().items()}}
