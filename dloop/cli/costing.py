"""What the commands that read a trace under costs share with `dloop replay`; without torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli import replay
from dloop.cli.args import Common, option, required
from dloop.cli.replay import COSTS, OUTPUT
from dloop.errors import UserError

SHARED = ("trace", "gate_sum", "max_stages", "costs", "cost_context", "cost_engine", "stage_ms", "verify_ms", "output")


@dataclass(frozen=True, kw_only=True)
class Costed(Common):
    """A trace, and what a round costs; the flags mean what they mean to `dloop replay`."""

    trace: Path = required("a trace that dloop trace record wrote: .npz", group="data")
    gate_sum: tuple[Literal["last", "all"], ...] = option(
        ("last", "all"), "what is summed: the last stage, or all of them; or both in turn", group="gates"
    )
    max_stages: int | None = option(None, "most stages of a round; by default as in the trace", group="gates")

    costs: Path | None = option(None, "a file of dloop latency --output, of this pair's shape", group=COSTS)
    cost_context: int | None = option(
        None, "which of the file's contexts; by default the nearest to the trace's mean", group=COSTS
    )
    cost_engine: Literal["fast", "twin"] = option("fast", "whose times of the file", group=COSTS)
    stage_ms: tuple[float, ...] = option((), "milliseconds of a round's first stage, and of a further one", group=COSTS)
    verify_ms: tuple[float, ...] = option(
        (), "milliseconds of a verification of one row, and of each row more", group=COSTS
    )
    output: Path | None = option(None, "also write the document of --json to this file", group=OUTPUT)


def as_replay(command: Costed) -> replay.Command:
    """The same choices as a command of `dloop replay`."""
    return replay.Command(**{name: getattr(command, name) for name in SHARED})


def check_thresholds(name: str, thresholds: tuple[float, ...]) -> None:
    """Numbers up to 0: log-probabilities are, so that above it no gate opens."""
    if not thresholds or not all(each <= 0 for each in thresholds):
        raise UserError(f"--{name} must be thresholds from 0 down, joined by commas, such as -0.25,-0.5,-inf")
