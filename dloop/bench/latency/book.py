"""The file of a run: a list of objects, one a context, written anew after every finished setting.

Keys as published in docs/results/latency-*.json: shape, context, gpu, rows (by their number, in a string), stage_ms.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, cast

from dloop.bench.latency.timing import Ceilings, Spread
from dloop.bench.store import differences, write
from dloop.errors import UserError, refuse_output
from dloop.records import Json

IDENTITY = ("schema", "shape", "gpu", "dtype", "drafter", "repeats", "hardware", "versions", "commit")
RESULTS = ("summary.json", "rounds.jsonl")
PUBLISHED = ("latency-", "gain-", "gate-")


class RowJson(TypedDict):
    """Milliseconds of one verification; fast_ms is null where the fast path does not compute the model."""

    stock_ms: float
    twin_ms: float
    fast_ms: float | None
    floor_ms: float


class Entry(TypedDict):
    """Everything measured after one context."""

    schema: int
    shape: str
    context: int  # tokens
    gpu: str  # the CPU's name where there is no GPU
    dtype: str
    parameters: int
    drafter: dict[str, Json]
    fast: str  # the fast path's attention, or why there is no fast path
    repeats: int
    rows: dict[str, RowJson]
    quartiles_ms: dict[str, dict[str, list[float]]]  # rows -> way -> first and third quartile
    stage_ms: dict[str, Json]
    peers: dict[str, Json]  # empty unless asked for
    ceilings: dict[str, float]  # what the floors are made of
    hardware: dict[str, Json]
    versions: dict[str, str]
    commit: str | None


@dataclass
class Book:
    """The entries of a run, on record as soon as they are known; without a file they are kept in memory."""

    path: Path | None
    entries: list[Entry] = field(default_factory=list[Entry])

    def entry(self, blank: Entry) -> Entry:
        """The entry of this context: an earlier run's if there is one, else the blank one, put on record."""
        found = next((entry for entry in self.entries if entry["context"] == blank["context"]), None)
        if found is None:
            self.entries.append(blank)
        return found or blank

    def save(self) -> None:
        """Write all of it or nothing."""
        if self.path is not None:
            save(self.path, self.entries)


def save(path: Path, value: object) -> None:
    """Write one JSON document. Raises UserError where that is not possible."""
    try:
        write(path, json.dumps(value, indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise UserError(f"--output {path} cannot be written ({error.strerror}); choose another file") from error


def check_output(path: Path | None, *, resume: bool) -> None:
    """Raises UserError before anything is measured, if the result could not be written."""
    if path is None:
        if resume:
            raise UserError("--resume needs --output FILE, the file of the run to continue")
        return
    refuse_output(path, "--output")
    if path.exists() and not resume:
        raise UserError(f"--output {path} exists; add --resume to continue it, or choose another file")


def check_apart(path: Path | None) -> None:
    """Synthetic numbers stay away from measured ones. Raises UserError for a place where results lie."""
    if path is None:
        return
    folder = path.resolve().parent
    beside = [name for name in RESULTS if (folder / name).exists()]
    beside += [found.name for prefix in PUBLISHED for found in folder.glob(f"{prefix}*.json")]
    if path.name.startswith(PUBLISHED) or path.name in RESULTS or "results" in folder.parts or beside:
        why = f"beside {beside[0]}" if beside else "where results are kept"
        raise UserError(f"--output {path} is {why}; synthetic acceptance is no result: choose another name and folder")


def resumed(path: Path | None, *, resume: bool) -> Book:
    """The book to write in, with what an earlier run left there."""
    if path is None or not resume or not path.exists():
        return Book(path)
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        entries = None
    if not isinstance(entries, list) or not all(is_entry(entry) for entry in cast(list[object], entries)):
        raise UserError(f"--output {path} is no file of dloop latency; remove it or choose another")
    return Book(path, cast(list[Entry], entries))


def is_entry(value: object) -> bool:
    """Whether it has every key of an entry."""
    return isinstance(value, dict) and Entry.__required_keys__ <= set(cast(dict[str, object], value))


def check_same(book: Book, blank: Entry) -> None:
    """Raises UserError where the file holds another machine's, another shape's or another version's numbers."""
    for entry in book.entries:
        before, now = (cast(Mapping[str, object], whole) for whole in (entry, blank))
        if different := differences(before, {key: now[key] for key in IDENTITY}):
            raise UserError(
                f"--output {book.path} holds a run with another {', '.join(different)}; choose another file, "
                "or leave out --resume and remove it"
            )


def row_json(spreads: Mapping[str, Spread], floor_ms: float) -> RowJson:
    """Medians."""
    return {
        "stock_ms": spreads["stock"].median,
        "twin_ms": spreads["twin"].median,
        "fast_ms": spreads["fast"].median if "fast" in spreads else None,
        "floor_ms": floor_ms,
    }


def stage_json(spreads: Mapping[str, Spread], floor_ms: float) -> dict[str, Json]:
    """Medians and quartiles of a piece of the drafting side."""
    fast = spreads["fast"].median if "fast" in spreads else None
    return {
        "twin_ms": spreads["twin"].median,
        "fast_ms": fast,
        "floor_ms": floor_ms,
        "quartiles_ms": {name: [found.low, found.high] for name, found in spreads.items()},
    }


def ceilings_of(entry: Entry) -> Ceilings:
    """The ceilings an entry's floors are made of."""
    return Ceilings(**entry["ceilings"])
