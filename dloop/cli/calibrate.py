"""`dloop calibrate`: its flags, without torch. The work is in `dloop.cli.calibrate_run`."""

from dataclasses import dataclass
from pathlib import Path

from dloop.cli.args import option
from dloop.cli.costing import GATES, OUTPUT, Costed, check_costed, check_thresholds


@dataclass(frozen=True, kw_only=True)
class Command(Costed):
    """Is a gate's score true? How well it tells the stages that will be accepted whole, and what its thresholds do.

    For first, second, later and all stages of every start: AUROC, precision and recall at an operating point, expected
    calibration error and Brier score of exp(score) as a probability; the same ranking by other features where the
    trace has them. Summed over the last stage, a stage is judged where its prefix was accepted; summed over all, the
    whole chain is. Prints Markdown.
    """

    at: float = option(-0.5, "the operating point: precision and recall of opening from this score on", group=GATES)
    loop_gate: tuple[float, ...] = option(
        (-0.1, -0.25, -0.5, -0.75, -1.0, -1.5, -2.0, -3.0), "thresholds of the sweep, joined by commas", group=GATES
    )
    plot: Path | None = option(None, "draw reliability, ROC and sweep here: .png, .svg or .pdf", group=OUTPUT)


def run(command: Command) -> int | None:
    check(command)
    from dloop.cli.calibrate_run import calibrate  # torch and transformers only from here on

    return calibrate(command)


def check(command: Command) -> None:
    """What can be told before the trace is read."""
    check_thresholds("loop-gate", command.loop_gate)
    check_thresholds("at", (command.at,))
    check_costed(command, command.plot)
