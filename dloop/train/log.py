"""The log of a run: a CSV line every few steps, and the breaker that ends a run which has left the finite numbers."""

import csv
import io
import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.data.answers import whole
from dloop.errors import UserError
from dloop.train.checkpoint import Progress

CSV = "train.csv"  # in the output folder
FIXED = ("step", "epoch", "rate", "step_ms")  # columns before a family's own
logger = logging.getLogger("dloop")


class Record(NamedTuple):
    """One line of the log: means over the steps since the line before; `values` in the order of `columns`."""

    step: int
    epoch: int
    rate: float
    step_ms: float
    values: list[float]


class Log:
    """Collects steps on the device; writes a CSV line and reads the numbers back once a line."""

    def __init__(
        self, path: Path | None, names: tuple[str, ...], begun: Progress, samples: Callable[[int], Sequence[int]]
    ) -> None:
        """`path`: None writes nothing. `begun`: where a resumed run goes on; what was logged beyond is dropped.
        `samples`: those of a 0-based step. Raises UserError where an earlier log is damaged.
        """
        self.path, self.samples = path, samples
        if path is not None:
            begin(path, names, begun.step)
        self.pending = list(begun.pending)
        self.resumed = len(self.pending)  # steps of another sitting, which took no time in this one
        self.started = time.perf_counter()

    def add(self, values: Float[Tensor, " c"]) -> None:
        self.pending.append(values)

    def check(self, step: int) -> list[float]:
        """The means since the last line. Raises RuntimeError if one is not finite."""
        if not self.pending:
            return []
        steps = torch.stack(self.pending)
        values = steps.mean(0).tolist()  # sync
        if not all(map(math.isfinite, values)):
            broken = (~steps.isfinite().all(1)).tolist().index(True)
            at = step - len(steps) + broken
            raise RuntimeError(
                f"the loss or its gradient is not finite at step {at + 1}, whose batch are the samples "
                f"{', '.join(map(str, self.samples(at)))} (from 0); no checkpoint of it is written: lower the learning "
                "rate, or look at these samples"
            )
        return values

    def line(self, step: int, epoch: int, rate: float) -> Record:
        """Write the means since the last line. Raises RuntimeError if one is not finite."""
        values = self.check(step)
        elapsed = (time.perf_counter() - self.started) * 1000 / (len(self.pending) - self.resumed)
        self.pending, self.resumed = [], 0
        self.started = time.perf_counter()
        if self.path is None:
            return Record(step, epoch, rate, elapsed, values)
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow((step, epoch, f"{rate:.3e}", f"{elapsed:.1f}", *(f"{v:.5f}" for v in values)))
        return Record(step, epoch, rate, elapsed, values)


def begin(path: Path, names: tuple[str, ...], done: int) -> None:
    """Write the header, and of an earlier log the lines up to `done`. Raises UserError where it is damaged."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    csv.writer(text).writerows([(*FIXED, *names), *earlier(path, names, done)])
    with whole(path) as file:
        file.write(text.getvalue().encode())


def earlier(path: Path, names: tuple[str, ...], done: int) -> list[list[str]]:
    """The lines up to `done` of a log that a killed run left; one that it did not finish is none.

    Raises UserError where another is damaged.
    """
    if not done or not path.exists():
        return []
    header = (*FIXED, *names)
    lines = path.read_bytes().decode(errors="replace").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        logger.warning(f"{path}: its last line, {lines.pop()!r}, was not finished and is left out")
    rows = [line.rstrip("\r\n").split(",") for line in lines]  # numbers and names: nothing is quoted
    for number, row in enumerate(rows, 1):
        if not (is_line(row, len(header)) if number > 1 else tuple(row) == header):
            raise UserError(
                f"{path}, line {number} is damaged ({','.join(row)[:50]!r}); mend it, or move the file away to go on "
                "with a new one"
            )
    return [row for row in rows[1:] if int(row[0]) <= done]


def is_line(row: list[str], width: int) -> bool:
    """Whether these are the fields of a log's line: a step, then numbers."""
    try:
        return len(row) == width and int(row[0]) > 0 and all(math.isfinite(float(value)) for value in row[1:])
    except ValueError:
        return False
