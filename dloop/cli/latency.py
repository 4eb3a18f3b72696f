"""`dloop latency`: its flags, without torch. The work is in `dloop.bench.latency`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.bench.latency.shapes import shape_of
from dloop.cli.args import Common, option
from dloop.errors import UserError

WHAT, ROUNDS, OUTPUT = "what is measured", "whole rounds, in place of rows", "output"
ROWS_ONLY = ("peers", "plot", "resume")


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Time a model of a named shape with random weights: verification, drafting stages, whole rounds.

    For each number of rows and each context: a stock forward (transformers, eager), the slow twin, the fast path, and
    the floor: what its bytes and operations cost at the bandwidth and the matrix rate measured in the same run. No
    checkpoint is read. With --replay or --synthetic-acceptance, whole rounds go through the slow and the fast loop.
    """

    shape: str = option("qwen3-4b", "the sizes of a published model, e.g. qwen3-8b, llama-3.1-8b, smollm2", group=WHAT)
    rows: tuple[int, ...] = option((1, 16, 64, 256), "rows of a verification", group=WHAT)
    context: tuple[int, ...] = option((1024, 4096, 16384), "tokens that are committed before", group=WHAT)
    repeats: int = option(20, "timings of each, in turns", group=WHAT)
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic", group=WHAT)
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one", group=WHAT)
    seed: int = option(0, "of prompts and drawn rounds", group=WHAT)
    peers: tuple[Literal["transformers", "dflash", "flashspec"], ...] = option(
        (), "other tools to run on the same weights, prompts and machine", group=WHAT
    )

    replay: Path | None = option(None, "a rounds.jsonl of dloop bench: its stages and acceptance", group=ROUNDS)
    replay_rounds: int = option(256, "most rounds to replay; rounds to draw after each context", group=ROUNDS)
    synthetic_acceptance: float | None = option(
        None, "draw acceptance: the chance of each drafted token; not lossless, never a result", group=ROUNDS
    )
    synthetic_stages: int = option(2, "stages of each drawn round", group=ROUNDS)

    output: Path | None = option(None, "write the numbers here, after every finished setting", group=OUTPUT)
    resume: bool = option(False, "continue --output where a run stopped", group=OUTPUT)
    plot: Path | None = option(None, "draw milliseconds against rows here: .png, .svg or .pdf", group=OUTPUT)


def run(command: Command) -> int | None:
    check(command)
    from dloop.bench.latency.run import latency  # torch and transformers only from here on

    return latency(command)


def check(command: Command) -> None:
    """Raises UserError for what makes no sense, before torch is imported."""
    shape_of(command.shape)
    for name in ("rows", "context"):
        values: tuple[int, ...] = getattr(command, name)
        if not values or min(values) < 1 or len(set(values)) < len(values):
            given = ",".join(map(str, values)) or '""'
            raise UserError(f"--{name} {given} must be different whole numbers from 1 on, joined by commas")
    for name in ("repeats", "replay_rounds", "synthetic_stages"):
        if getattr(command, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(command, name)} must be at least 1")
    chance = command.synthetic_acceptance
    if chance is not None and not 0 <= chance <= 1:
        raise UserError(f"--synthetic-acceptance {chance} must lie in [0, 1]: it is the chance of a token")
    if chance is not None and command.replay is not None:
        raise UserError("--replay and --synthetic-acceptance both say what is accepted; give one")
    if chance is not None or command.replay is not None:
        given = [f"--{name}" for name in ROWS_ONLY if getattr(command, name)]
        if given:
            raise UserError(f"{', '.join(given)} means nothing where whole rounds are replayed; leave it out")
