"""`dloop replay`: its flags, without torch. The work is in `dloop.cli.replay_run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option, required
from dloop.errors import UserError

GATES, COSTS, OUTPUT = "gates", "costs", "output"


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Try gates on a trace, exactly and without a model: acceptance, stages, and with costs tokens per second.

    What is replayed are the rounds that decoding the same texts would have, one for one. With costs come the bounds:
    the paper's oracle, which goes on exactly while everything drafted is right, and the hindsight optimum, the least
    time that any choice of stages could take. Costs are those of one sequence: a file of `dloop latency`, or two
    numbers each.
    """

    trace: Path = required("a trace that dloop trace record wrote: .npz", group="data")
    loop_gate: tuple[float | Literal["auto", "auto:full"], ...] = option(
        (1.0, -0.25, -0.5, -0.75, -1.0, -1.5, float("-inf")),
        "gates to try, joined by commas: thresholds, and with costs auto and auto:full, which go on learning from text "
        "to text",
        group=GATES,
    )
    gate_sum: tuple[Literal["last", "all"], ...] = option(
        ("last", "all"), "what is summed: the last stage, or all of them; or both in turn", group=GATES
    )
    max_stages: int | None = option(None, "most stages of a round; by default as in the trace", group=GATES)
    stop_rule: list[str] = option(
        [],
        "stop rules to try on a block drafter, one stage a round: NAME or NAME:param=value,...; needs figures of rows",
        group=GATES,
    )

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
    plot: Path | None = option(None, "draw tokens/s against the threshold here: .png, .svg or .pdf", group=OUTPUT)


def run(command: Command) -> int | None:
    check(command)
    from dloop.cli.replay_run import replay  # torch and transformers only from here on

    return replay(command)


def check(command: Command) -> None:
    """What can be told before the trace is read."""
    if not command.loop_gate or any(gate != gate for gate in command.loop_gate):
        raise UserError("--loop-gate must be thresholds joined by commas, such as 1.0,-0.5,-inf, or auto")
    if not command.gate_sum:
        raise UserError("--gate-sum must be last, all, or last,all")
    if command.max_stages is not None and command.max_stages < 1:
        raise UserError(f"--max-stages {command.max_stages} must be at least 1")
    check_costs(command)
    for path in filter(None, (command.output, command.plot)):
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise UserError(f"{path} must be a file in a folder that is there")


def check_costs(command: Command) -> None:
    """Costs are given once, whole, and where something needs them."""
    has_costs = bool(command.stage_ms) or command.costs is not None
    if bool(command.stage_ms) != bool(command.verify_ms):
        raise UserError("--stage-ms and --verify-ms are costs together; give both, or --costs FILE")
    if command.stage_ms and command.costs is not None:
        raise UserError("--costs and --stage-ms both say what a round costs; give one")
    if command.cost_context is not None and command.costs is None:
        raise UserError("--cost-context picks from --costs FILE, which is not given")
    if command.plot is not None and not has_costs:
        raise UserError("--plot draws tokens/s, which need --costs FILE, or --stage-ms and --verify-ms")
    if any(isinstance(gate, str) for gate in command.loop_gate) and not has_costs:
        raise UserError("--loop-gate auto weighs times; give --costs FILE, or --stage-ms and --verify-ms")
