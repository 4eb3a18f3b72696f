"""The race of `dloop demo` told: a table, what differs and why, one answer token by token; or one JSON document."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dloop.certificate.margins import NEAR_TIE, Difference
from dloop.cli.answer import WIDE
from dloop.cli.demo import PROMPTS, Command
from dloop.cli.race import Headroom, Pair, Race, Run
from dloop.records import (
    SCHEMA,
    hardware,
    looped_tokens,
    mean_of,
    number,
    plain,
    repetition_share,
    round_record,
    stage_counts,
    versions,
)
from dloop.trace import trace

COLUMNS = ("", "", "tau", "tok/s", "speed-up", "stages", "2nd on", "repeats", "text")
OVERALL = "all"
WAY_STYLES = {"plain": "", "host": "cyan", "loop": "green"}


@dataclass(frozen=True, kw_only=True)
class Row:
    """The figures of one way, for one prompt or for all."""

    prompt: str
    way: str
    acceptance_length: float  # mean over answers of the mean over rounds of accepted + 1
    tokens_per_s: float  # after the first token
    speedup: float
    stages_mean: float
    stages: dict[int, int]  # rounds by number of stages
    round_cost: float  # time of a round in rounds of plain decoding: the acceptance length that breaks even
    second_stage_share: float  # of the text's tokens: drafted in the second or a later stage
    repetition_share: float  # of 8-grams that stood in the answer before
    same: int  # answers equal to plain decoding's
    answers: int


def rows_of(runs: Sequence[Run]) -> list[Row]:
    kinds = list(dict.fromkeys(run.prompt for run in runs))
    ways = list(dict.fromkeys(run.way for run in runs))
    rows = [row_of(kind, way, [run for run in runs if run.prompt == kind]) for kind in kinds for way in ways]
    return rows + [row_of(OVERALL, way, runs) for way in ways]


def row_of(kind: str, way: str, runs: Sequence[Run]) -> Row:
    mine = [run for run in runs if run.way == way]
    texts = [run.answer.generation for run in mine]
    rounds = [round for text in texts for round in text.rounds]
    plain_runs = [run for run in runs if run.way == "plain"]
    return Row(
        prompt=kind,
        way=way,
        acceptance_length=mean_of([text.acceptance_length for text in texts]),
        tokens_per_s=speed(mine),
        speedup=ratio(speed(mine), speed(plain_runs)),
        stages_mean=mean_of([round.stages for round in rounds]),
        stages=stage_counts(rounds),
        round_cost=ratio(round_s(mine), round_s(plain_runs)),
        second_stage_share=ratio(looped_tokens(rounds), sum(len(text.tokens) for text in texts)),
        repetition_share=mean_of([repetition_share(text.tokens) for text in texts]),
        same=sum(run.difference is None for run in mine),
        answers=len(mine),
    )


def speed(runs: Sequence[Run]) -> float:
    return ratio(sum(len(run.answer.generation.tokens) - 1 for run in runs), sum(run.answer.decode_s for run in runs))


def round_s(runs: Sequence[Run]) -> float:
    return ratio(sum(run.answer.decode_s for run in runs), sum(len(run.answer.generation.rounds) for run in runs))


def ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def report(console: Console, pair: Pair, command: Command, done: Race) -> None:
    rows = rows_of(done.runs)
    console.print(heading(pair, command))
    console.print(table_of(rows, done.runs))
    console.print(explanation(), style="dim")
    console.print()
    console.print(cost(rows))
    if done.headroom:
        console.print(room(done.headroom))
    for line in verdict(pair, command, done):
        console.print(line)
    shown = most_looped(done.runs)
    console.print()
    console.print(Text.assemble(("How the loop wrote it: ", "bold"), PROMPTS[shown.prompt]))
    console.print()
    generation = shown.answer.generation
    console.print(trace(generation.first, generation.rounds, pair.tokenizer.show, scores=console.width >= WIDE))


def heading(pair: Pair, command: Command) -> Text:
    target, drafter = pair.target, pair.drafter
    machine = hardware(target.device)
    where = machine["gpu"] or f"{machine['cpu']}, threads: {machine['threads']}"
    return Text.assemble(
        (f"{target.name} + {drafter.name}", "bold"),
        f" ({drafter.family}, stages of {drafter.stage_len} tokens, loop gate {command.loop_gate:g}); ",
        f"{command.dtype} on {where}; at most {command.max_new_tokens} tokens an answer",
    )


def table_of(rows: Sequence[Row], runs: Sequence[Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if index in (0, 1, 8) else "right", no_wrap=True)
    for row, following in zip(rows, [*rows[1:], None], strict=True):
        is_plain, style = row.way == "plain", WAY_STYLES[row.way]
        table.add_row(
            row.prompt if is_plain else "",
            Text(row.way, style),
            f"{row.acceptance_length:.2f}",
            f"{row.tokens_per_s:.1f}",
            Text(f"{row.speedup:.2f}x", style),
            "" if is_plain else f"{row.stages_mean:.1f}, max {max(row.stages, default=0)}",
            "" if is_plain else f"{row.second_stage_share:.0%}",
            f"{row.repetition_share:.0%}",
            text_of(row, runs),
            style="bold" if row.prompt == OVERALL else "",
            end_section=following is not None and following.prompt != row.prompt,
        )
    return table


def text_of(row: Row, runs: Sequence[Run]) -> str:
    if row.way == "plain":
        return ""
    if row.prompt == OVERALL:
        return f"{row.same} of {row.answers}"
    (run,) = (run for run in runs if run.prompt == row.prompt and run.way == row.way)
    return "same" if run.difference is None else f"same to {run.difference.index}"


def explanation() -> str:
    return (
        "tau: mean over rounds of accepted + 1. tok/s: prefill left out; speed-up: over plain, in this run. "
        "stages: mean and largest number before a verification. 2nd on: share of the text drafted in a second or "
        "later stage. repeats: share of 8-grams seen before in the answer (repetition flatters every drafter). "
        "text: compared with plain decoding's."
    )


def cost(rows: Sequence[Row]) -> Text:
    """What the drafter must give before it pays."""
    costs = [f"{row.round_cost:.2f} ({row.way})" for row in rows if row.prompt == OVERALL and row.way != "plain"]
    return Text(f"Break-even: a round takes as long as {' or '.join(costs)} plain tokens; a tau beyond that is gain.")


def room(found: Headroom) -> Text:
    """How much of what a gate can give this one gives."""
    return Text(
        f"Gate: tau {found.closed:.2f} closed, {found.gated:.2f} as set, {found.oracle:.2f} by the oracle, which knows "
        "when a stage is right (replay of plain decoding's texts)."
    )


def verdict(pair: Pair, command: Command, done: Race) -> list[Text]:
    """Whether the texts are plain decoding's, and what rounding has to do with it."""
    ways: dict[tuple[str, Difference], list[str]] = {}
    for run in done.runs:
        if run.difference:
            ways.setdefault((run.prompt, run.difference), []).append(run.way)
    lines = [
        line_of(pair, f"{kind}, {' and '.join(who)}", difference, command.dtype)
        for (kind, difference), who in ways.items()
    ]
    if not lines:
        lines = [lossless(f"every text is plain decoding's, in {command.dtype}.")]
    if (control := done.control) is None:
        return lines
    if control.difference:
        return [*lines, line_of(pair, f"{control.prompt} in float32", control.difference, "float32")]
    length = len(control.answer.generation.tokens)
    return [*lines, lossless(f"in float32 the loop's '{control.prompt}' is plain decoding's, all {length} tokens.")]


def lossless(what: str) -> Text:
    return Text.assemble(("Lossless: ", "bold green"), what)


def line_of(pair: Pair, who: str, difference: Difference, dtype: str) -> Text:
    plain_token, other_token = (pair.tokenizer.show([token]) for token in (difference.plain, difference.other))
    where = (
        f"{who}: token {difference.index} is {other_token!r}, not {plain_token!r}; "
        f"plain decoding's own logits of the two are {difference.gap:.3f} apart, "
    )
    if difference.gap <= NEAR_TIE[dtype]:
        return Text.assemble(("Near-tie: ", "bold yellow"), where, f"within {dtype}'s rounding ({NEAR_TIE[dtype]:g}).")
    return Text.assemble(("Mismatch: ", "bold red"), where, f"more than {dtype} rounds: this is a fault.")


def most_looped(runs: Sequence[Run]) -> Run:
    """The loop's answer with most of its text from second and later stages."""
    loops = [run for run in runs if run.way == "loop"]
    return max(loops, key=lambda run: looped_tokens(run.answer.generation.rounds) / len(run.answer.generation.tokens))


def document(pair: Pair, command: Command, done: Race) -> dict[str, object]:
    """The same as `report`, and every round besides."""
    target, drafter = pair.target, pair.drafter
    return {
        "schema": SCHEMA,
        "target": target.name,
        "draft": drafter.name,
        "family": drafter.family,
        "setting": {"loop_gate": number(command.loop_gate), "max_new_tokens": command.max_new_tokens},
        "rows": [plain(asdict(row)) for row in rows_of(done.runs)],
        "acceptance_length_by_gate": done.headroom and done.headroom._asdict(),
        "runs": [run_json(run, command.dtype) for run in done.runs],
        "float32_control": run_json(done.control, "float32") if done.control else None,
        "lossless": not done.faults(command.dtype),
        "versions": versions(),
        "hardware": hardware(target.device),
        "dtype": command.dtype,
        "device": str(target.device),
        "engine": target.engine,
        "attention": target.attention,
    }


def run_json(run: Run, dtype: str) -> dict[str, object]:
    generation = run.answer.generation
    return {
        "prompt": PROMPTS[run.prompt],
        "prompt_ids": run.answer.prompt_ids,
        "way": run.way,
        "text": run.answer.text,
        "first": generation.first,
        "tokens": generation.tokens,
        "finish_reason": generation.finish_reason,
        "decode_s": run.answer.decode_s,
        "difference": asdict(run.difference) | {"near_tie": NEAR_TIE[dtype]} if run.difference else None,
        "rounds": [round_record(round) for round in generation.rounds],
    }
