"""`dloop report`: its flags, without torch, and the order of its work; the work is in `dloop.bench`."""

from dataclasses import dataclass
from pathlib import Path

from dloop.bench.paper.names import KNOWN, SETS, chosen
from dloop.cli.args import Common, option
from dloop.errors import UserError, refuse_output

OUTPUT = "output"
OF_TABLES = {"calibrations": "A6", "train_runs": "A7"}


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Tell what `dloop bench` measured: a table a target, a row a set and setting, means over sets, 95 % intervals.

    Settings are named by gate and drafter: baseline; host and loop (gate closed, open) for a drafter as released;
    trained and dloop for one trained with a loop stage; tree, tree_loop, ... with a tree. --name names what the records
    do not tell. Speed-ups are given only against a baseline of the same machine, dtype, samples and length. --tables
    prints the paper's tables instead, of these results; what nothing was measured for is told in one line.
    """

    results: list[str] = option([], "folders that dloop bench wrote, at any level; default: results", group="data")
    name: list[str] = option(
        [], "FOLDER=SETTING for the runs at or below a folder; * stands for any part of one name", group="data"
    )
    calibrations: list[str] = option([], "files that dloop calibrate --output wrote, for table A6", group="data")
    train_runs: list[str] = option([], "folders that dloop train wrote, for table A7", group="data")
    compare: list[str] = option([], "two settings A B: B against A on the same prompts, paired", group="data")
    tables: tuple[str, ...] = option(
        (SETS,),
        f"{SETS}: a row a set and setting; the paper's {', '.join(KNOWN)}; all of the paper's: all",
        group=OUTPUT,
    )
    gain: Path | None = option(None, "write the published list (gain-NAME.json) here", group=OUTPUT)
    markdown: Path | None = option(None, "write the tables as a page here", group=OUTPUT)
    plot: Path | None = option(None, "draw the speed-ups here: .png, .svg or .pdf", group=OUTPUT)


def run(command: Command) -> int | None:
    names = chosen(command.tables)
    for field, table in OF_TABLES.items():
        if getattr(command, field) and table not in names:
            raise UserError(f"--{field.replace('_', '-')} is for table {table}; add --tables {table}, or leave it out")
    if command.compare and len(command.compare) != 2:
        raise UserError(f"--compare takes two settings, not {' '.join(command.compare)}")
    for flag in ("gain", "markdown", "plot"):
        refuse_output(getattr(command, flag), f"--{flag}")
    from dloop.bench.reporting import report  # NumPy and torch only from here on

    return report(command, names)
