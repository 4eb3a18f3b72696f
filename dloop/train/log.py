"""The log of a run: a CSV line every few steps, and the breaker that ends a run which has left the finite numbers."""

import csv
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor


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
        self, path: Path | None, names: tuple[str, ...], done: int, samples: Callable[[int], Sequence[int]]
    ) -> None:
        """`path`: None writes nothing. `done`: steps a resumed run has; what was logged beyond them is dropped.
        `samples`: those of a 0-based step.
        """
        self.path, self.samples = path, samples
        if path is not None:
            begin(path, names, done)
        self.pending: list[Tensor] = []
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
        elapsed = (time.perf_counter() - self.started) * 1000 / len(self.pending)
        self.pending = []
        self.started = time.perf_counter()
        if self.path is None:
            return Record(step, epoch, rate, elapsed, values)
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow((step, epoch, f"{rate:.3e}", f"{elapsed:.1f}", *(f"{v:.5f}" for v in values)))
        return Record(step, epoch, rate, elapsed, values)


def begin(path: Path, names: tuple[str, ...], done: int) -> None:
    """Write the header, and of an earlier log the lines up to `done`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept: list[list[str]] = []
    if done and path.exists():
        with path.open(newline="") as file:
            kept = [row for row in list(csv.reader(file))[1:] if row and int(row[0]) <= done]
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("step", "epoch", "rate", "step_ms", *names), *kept])
