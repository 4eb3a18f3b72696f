"""How `dloop train` shows its records: a bar on a terminal, a tracker where one is asked for."""

import sys
from collections.abc import Iterator
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dloop.train.log import Record
from dloop.train.trainer import TrainSettings


@runtime_checkable
class Tracker(Protocol):
    """Where numbers go beside train.csv."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None: ...

    def close(self) -> None: ...


def follow(stream: Iterator[Record], settings: TrainSettings, done: int) -> list[Record]:
    """Show the records as they come; quiet when standard error is not a terminal, but for one line each."""
    records: list[Record] = []
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("training", total=settings.num_steps, completed=done)
        for record in stream:
            records.append(record)
            progress.update(task, completed=record.step, description=describe(record))
    return records


def tracked(stream: Iterator[Record], tracker: Tracker | None, names: tuple[str, ...]) -> Iterator[Record]:
    """The same records, handed to the tracker on the way."""
    for record in stream:
        if tracker is not None:
            values = zip(("rate", "step_ms", *names), (record.rate, record.step_ms, *record.values), strict=True)
            for name, value in values:
                tracker.add_scalar(name, value, record.step)
        yield record


def describe(record: Record) -> str:
    """One line for the progress bar."""
    return f"loss {record.values[0]:.3f}  rate {record.rate:.1e}  {record.step_ms:.0f} ms/step"
