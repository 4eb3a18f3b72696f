"""`dloop replay`: its flags, without torch. The work is in `dloop.cli.replay_run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import option
from dloop.cli.costing import GATES, OUTPUT, Costed, check_costed
from dloop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Command(Costed):
    """Try gates on a trace, exactly and without a model: acceptance, stages, and with costs tokens per second.

    What is replayed are the rounds that decoding the same texts would have, one for one. With costs come the bounds:
    the paper's oracle, which goes on exactly while everything drafted is right, and the hindsight optimum, the least
    time that any choice of stages could take. Costs are those of one sequence: a file of `dloop latency`, or two
    numbers each.
    """

    loop_gate: tuple[float | Literal["auto", "auto:full"], ...] = option(
        (1.0, -0.25, -0.5, -0.75, -1.0, -1.5, float("-inf")),
        "gates to try, joined by commas: thresholds, and with costs auto and auto:full, which go on learning from text "
        "to text",
        group=GATES,
    )
    stop_rule: list[str] = option(
        [],
        "stop rules to try on a block drafter, one stage a round: NAME or NAME:param=value,...; needs figures of rows",
        group=GATES,
    )
    plot: Path | None = option(None, "draw tokens/s against the threshold here: .png, .svg or .pdf", group=OUTPUT)


def run(command: Command) -> int | None:
    check(command)
    from dloop.cli.replay_run import replay  # torch and transformers only from here on

    return replay(command)


def check(command: Command) -> None:
    """What can be told before the trace is read."""
    if not command.loop_gate or any(gate != gate for gate in command.loop_gate):
        raise UserError("--loop-gate must be thresholds joined by commas, such as 1.0,-0.5,-inf, or auto")
    check_costed(command, command.plot)
    has_costs = bool(command.stage_ms) or command.costs is not None
    if command.plot is not None and not has_costs:
        raise UserError("--plot draws tokens/s, which need --costs FILE, or --stage-ms and --verify-ms")
    if any(isinstance(gate, str) for gate in command.loop_gate) and not has_costs:
        raise UserError("--loop-gate auto weighs times; give --costs FILE, or --stage-ms and --verify-ms")
