"""The flags of the commands that read a trace under costs, and what can be told of them before it is read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option, required
from dloop.errors import UserError, refuse_output

GATES, COSTS, OUTPUT = "gates", "costs", "output"


@dataclass(frozen=True, kw_only=True)
class Costed(Common):
    """A trace, and what a round costs."""

    trace: Path = required("a trace that dloop trace record wrote: .npz", group="data")
    gate_sum: tuple[Literal["last", "all"], ...] = option(
        ("last", "all"), "what is summed: the last stage, or all of them; or both in turn", group=GATES
    )
    max_stages: int | None = option(None, "most stages of a round; by default as in the trace", group=GATES)

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


def check_costed(command: Costed, plot: Path | None) -> None:
    """Sums, stages, costs that are given once and whole, and files that can be written."""
    if not command.gate_sum:
        raise UserError("--gate-sum must be last, all, or last,all")
    if command.max_stages is not None and command.max_stages < 1:
        raise UserError(f"--max-stages {command.max_stages} must be at least 1")
    if bool(command.stage_ms) != bool(command.verify_ms):
        raise UserError("--stage-ms and --verify-ms are costs together; give both, or --costs FILE")
    if command.stage_ms and command.costs is not None:
        raise UserError("--costs and --stage-ms both say what a round costs; give one")
    if command.cost_context is not None and command.costs is None:
        raise UserError("--cost-context picks from --costs FILE, which is not given")
    refuse_output(command.output, "--output")
    refuse_output(plot, "--plot")


def check_thresholds(name: str, thresholds: tuple[float, ...]) -> None:
    """Numbers up to 0: log-probabilities are, so that above it no gate opens."""
    if not thresholds or not all(each <= 0 for each in thresholds):
        raise UserError(f"--{name} must be thresholds from 0 down, joined by commas, such as -0.25,-0.5,-inf")
