"""What a table of the paper is, whatever it shows; its cells as text, its records as JSON."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Console

from dloop.bench.pages import markdown, show_table
from dloop.bench.paper.names import KNOWN
from dloop.bench.report import Estimate
from dloop.bench.table import figure


class Gain(NamedTuple):
    """The two figures that the paper gives of every setting and set; None: not measured."""

    speedup: Estimate
    tau: Estimate


Cell = str | int | float | Gain | None


class Field(NamedTuple):
    """A column: its name, and how its numbers are written; no form: words."""

    name: str
    form: str = ""


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows under one heading: what was measured under one condition."""

    heading: str
    fields: Sequence[Field]  # words first
    rows: Sequence[Sequence[Cell]]
    notes: Sequence[str] = ()
    legend: Sequence[str] = ()  # what each setting is; told once, below all tables


@dataclass(frozen=True)
class PaperTable:
    """One table; without parts there is nothing to print, and `KNOWN` says what it needs."""

    number: str
    parts: Sequence[Part]

    @property
    def title(self) -> str:
        """Its number and what it shows."""
        return f"{'' if self.number == 'F1' else f'Table {self.number}: '}{KNOWN[self.number].title}"

    @property
    def missing(self) -> str | None:
        """What is not there; None where there are rows."""
        return None if self.parts else f"nothing to print; it needs {KNOWN[self.number].needs}"


def show(made: Sequence[PaperTable], console: Console) -> None:
    """Print the tables, and a line for each that there are no figures for."""
    for table in made:
        if table.missing:
            console.print(f"{table.title}: {table.missing}", soft_wrap=True)
            continue
        console.print(table.title, style="bold", soft_wrap=True)
        for part in table.parts:
            console.print(part.heading, soft_wrap=True)
            words = sum(not field.form for field in part.fields)
            show_table([field.name for field in part.fields], texts(part), console, left=words)
            for note in part.notes:
                console.print(note, style="dim")
        console.print()
    for line in legend(made):
        console.print(line, style="dim")


def page(made: Sequence[PaperTable]) -> list[str]:
    """The same as lines of Markdown."""
    lines: list[str] = []
    for table in made:
        lines += [f"## {table.title}", ""]
        lines += [f"{table.missing}.", ""] if table.missing else []
        for part in table.parts:
            lines += [f"### {part.heading}", "", *markdown([field.name for field in part.fields], texts(part)), ""]
            lines += [f"- {note}" for note in part.notes] + [""] * bool(part.notes)
    settings = legend(made)
    return lines + (["## Settings", "", *(f"- {line}" for line in settings)] if settings else [])


def legend(made: Sequence[PaperTable]) -> list[str]:
    """What all settings are, each once."""
    return list(dict.fromkeys(line for table in made for part in table.parts for line in part.legend))


def texts(part: Part) -> list[list[str]]:
    """All rows, every cell as it is read."""
    return [[spelled(cell, field.form) for cell, field in zip(row, part.fields, strict=True)] for row in part.rows]


def spelled(cell: Cell, form: str) -> str:
    """A cell; a dash for what was not measured."""
    if isinstance(cell, Gain):
        return f"{figure(cell.speedup.value, form)} / {figure(cell.tau.value, form)}"
    if isinstance(cell, str):
        return cell
    return figure(cell, form)


def records(made: Sequence[PaperTable]) -> list[dict[str, object]]:
    """The same as JSON; a gain holds value, low and high of both figures."""
    return [
        {
            "table": table.number,
            "title": table.title,
            "missing": table.missing,
            "parts": [
                {
                    "heading": part.heading,
                    "columns": [field.name for field in part.fields],
                    "rows": [[record(cell) for cell in row] for row in part.rows],
                    "notes": list(part.notes),
                    "settings": list(part.legend),
                }
                for part in table.parts
            ],
        }
        for table in made
    ]


def record(cell: Cell) -> object:
    """A cell's value."""
    return {name: list(each) for name, each in cell._asdict().items()} if isinstance(cell, Gain) else cell
