"""What `dloop report` does: read, name, sum up, and write what was asked for."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from dloop.bench.compare import Difference, compare
from dloop.bench.gain import gain_list
from dloop.bench.naming import columns, parse_names
from dloop.bench.pages import page, show
from dloop.bench.paper import shape
from dloop.bench.paper.build import Sources, paper
from dloop.bench.paper.names import SETS
from dloop.bench.paper.scores import read_calibrations
from dloop.bench.paper.shape import records
from dloop.bench.paper.training import read_runs
from dloop.bench.plot import check_plot, plot
from dloop.bench.report import Row, Table, tables
from dloop.bench.results import read_results
from dloop.bench.store import write
from dloop.cli.report import OF_TABLES, Command
from dloop.errors import UserError
from dloop.records import SCHEMA, Json, dumps, plain

RESULTS = "results"


def report(command: Command, names: Sequence[str]) -> int:
    """Nothing is written before everything was read and found to be in order. `names`: of the tables to print."""
    if command.plot is not None:
        check_plot(command.plot)
    wanted = [name for name in names if name != SETS]
    found = columns(read_results(folders(command, wanted)), parse_names(command.name), gates_apart=bool(wanted))
    everything = tables(found)
    made = everything if SETS in names else []
    differences = compare(found, *command.compare) if command.compare else []
    calibrations, runs = read_calibrations(command.calibrations), read_runs(command.train_runs, found)
    papers = paper(wanted, Sources(found=found, calibrations=calibrations, runs=runs))
    if command.gain is not None:
        lines = ",\n ".join(dumps(entry) for entry in gain_list(everything, found))
        save(command.gain, f"[{lines}]\n")
    if command.markdown is not None:
        save(command.markdown, page(made, differences, command.compare, shape.page(papers)))
    if command.plot is not None:
        plot(everything, command.plot)
    if command.json:
        print(dumps(document(made, differences, command.compare) | ({"paper": records(papers)} if wanted else {})))
    else:
        show(made, differences, command.compare, Console(highlight=False))
        shape.show(papers, Console(highlight=False))
    return 0


def folders(command: Command, wanted: Sequence[str]) -> list[str]:
    """Where results are read: as given, else in `results`, which tables of other records do without."""
    spare = bool(wanted) and set(wanted) <= set(OF_TABLES.values()) and not command.name
    return command.results or ([] if spare and not Path(RESULTS).is_dir() else [RESULTS])


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
