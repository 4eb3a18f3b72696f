"""`dloop tune`: its flags, without torch. The work is in `dloop.cli.tune_run`."""

from dataclasses import dataclass
from pathlib import Path

from dloop.cli.args import option
from dloop.cli.costing import GATES, OUTPUT, Costed, check_costed, check_thresholds
from dloop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Command(Costed):
    """Find the best fixed gate of a pair on a trace, under given costs, and write it down beside the drafter.

    Every threshold, sum and stage cap is replayed exactly. The gain over the host is told on texts that had no say in
    the choice, each in turn; where its interval includes 1, the host's own gate is written down instead. Nothing reads
    the choice by itself: the flags to use are printed. Traces are chains, so no tree budget is chosen. Prints Markdown.
    """

    loop_gate: tuple[float, ...] = option(
        (-0.02, -0.05, -0.1, -0.15, -0.25, -0.35, -0.5, -0.75, -1.0, -1.5, -2.0, -3.0, -5.0, float("-inf")),
        "thresholds to try, joined by commas; the host is always tried",
        group=GATES,
    )
    output: Path | None = option(None, "write the choice to this file instead of the drafter's folder", group=OUTPUT)
    draft_model: Path | None = option(
        None, "the drafter's folder, where the choice goes; by default what the trace's record names", group=OUTPUT
    )


def run(command: Command) -> int | None:
    check(command)
    from dloop.cli.tune_run import tune  # torch and transformers only from here on

    return tune(command)


def check(command: Command) -> None:
    """What can be told before the trace is read."""
    check_thresholds("loop-gate", command.loop_gate)
    check_costed(command, None)
    if command.costs is None and not command.stage_ms:
        raise UserError("dloop tune weighs times; give --costs FILE, or --stage-ms and --verify-ms")
    if command.draft_model is not None and command.output is not None:
        raise UserError("--draft-model and --output both say where the choice goes; give one")
