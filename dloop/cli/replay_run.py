"""What `dloop replay` does: read a trace, walk it under every gate, tell what came of it."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

import numpy as np
from rich.console import Console

from dloop.bench.latency.show import table_of
from dloop.bench.measure import interval
from dloop.bench.reporting import save
from dloop.bench.table import figure
from dloop.cli.costing import Costed
from dloop.cli.data_run import record_of
from dloop.cli.replay import Command
from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS, AutoName, FixedGate
from dloop.gates.costs import Costs, given_costs, read_costs
from dloop.gates.learned import fresh
from dloop.gates.oracle import hindsight_depths, paper_depths
from dloop.gates.played import Ruled, play, walked
from dloop.gates.trace import Trace, load
from dloop.gates.walk import Figures, Walk, figures, gate_depths, walk
from dloop.records import SCHEMA, Json, dumps, number, plain
from dloop.rules.replayed import replay_maker

HOST, PAPER, HINDSIGHT = "host", "oracle:paper", "oracle:hindsight"
SOURCE = ("target", "draft", "family", "dtype", "setting", "commit", "hardware", "output_sha256")


@dataclass(frozen=True)
class Row:
    """All texts under one gate."""

    gate: str
    fixed: FixedGate | None  # None: an oracle, a gate that learns, or a stop rule
    walks: list[Walk]
    figures: Figures


def replay(command: Command) -> int:
    """The document, or a table."""
    if command.plot is not None:
        from dloop.bench.plot import check_plot

        check_plot(command.plot)
    trace = load(command.trace)
    most = stages_of(command, trace)
    costs = costs_of(command, trace, most)
    rows = rows_of(command, trace, costs, most)
    made = document(command, trace, costs, rows)
    if command.json:
        print(dumps(made))
    else:
        show(Console(highlight=False), trace, costs, rows)
    if command.output is not None:  # last: a file that cannot be written must not cost the figures
        save(command.output, json.dumps(made, indent=1, allow_nan=False) + "\n")
    if command.plot is not None:
        from dloop.cli.replay_plot import draw

        assert costs is not None
        draw({row.gate: (row.fixed, row.figures) for row in rows}, costs, command.plot)
    return 0


def stages_of(command: Costed, trace: Trace) -> int:
    """The cap in force. Raises UserError where the trace does not go as deep, or has nothing to replay."""
    most = trace.ground.limits.max_stages
    if command.max_stages is not None and command.max_stages > most:
        raise UserError(
            f"--max-stages {command.max_stages} is deeper than {command.trace}, which was recorded with {most}; "
            "lower it, or record again"
        )
    if not trace.starts:
        raise UserError(f"{command.trace} holds texts of one token alone, and no round to replay; record others")
    return command.max_stages or most


def costs_of(command: Costed, trace: Trace, most: int) -> Costs | None:
    """What the command says a round costs; None if it says nothing."""
    ground = trace.ground
    if command.stage_ms:
        return given_costs(command.stage_ms, command.verify_ms, 1 + most * ground.stage_len)
    if command.costs is None:
        return None
    near = round(float(np.mean([len(text.prompt) + len(text.answer) / 2 for text in trace.texts])))
    return read_costs(command.costs, ground.family, command.cost_engine, command.cost_context, near)


def learned_walks(name: AutoName, trace: Trace, costs: Costs, most: int) -> list[Walk]:
    """Every text under a gate that goes on learning from one to the next, beginning with nothing."""
    k, learner = trace.ground.stage_len, fresh(name, trace.ground.stage_len)
    played = [play(text, trace.ground, learner.gate(), costs, most) for text in trace.texts]
    return [walked(rounds, len(text.prompt), k) for text, rounds in zip(trace.texts, played, strict=True)]


def gates_of(command: Command) -> dict[str, FixedGate]:
    """The host, and every threshold under every sum; what never or always opens is there once, whatever is summed."""
    gates = {HOST: FixedGate(NEVER_OPENS)}
    for over in command.gate_sum:
        for threshold in (gate for gate in command.loop_gate if not isinstance(gate, str)):
            known = threshold > 0 or (threshold == ALWAYS_OPEN and over != command.gate_sum[0])
            if not known:
                gates[f"fixed:{threshold:.12g}" + (",all" if over == "all" else "")] = FixedGate(threshold, over)
    return gates


def rows_of(command: Command, trace: Trace, costs: Costs | None, most: int) -> list[Row]:
    """Every gate: the host, the fixed ones, the oracles."""
    k, texts = trace.ground.stage_len, trace.texts
    rows: list[Row] = []
    for name, gate in gates_of(command).items():
        walks = [walk(text, gate_depths(text, gate, most), k) for text in texts]
        rows.append(Row(name, gate, walks, figures(walks, costs)))
    for name in get_args(AutoName):
        if name not in command.loop_gate:
            continue
        assert costs is not None
        walks = learned_walks(name, trace, costs, most)
        rows.append(Row(name, None, walks, figures(walks, costs)))
    for name in command.stop_rule:
        walks = ruled_walks(name, trace)
        rows.append(Row(name, None, walks, figures(walks, costs)))
    depths = {PAPER: [paper_depths(text, k, most) for text in texts]}
    if costs is not None:
        depths[HINDSIGHT] = [hindsight_depths(text, costs, k, most) for text in texts]
    for name, chosen in depths.items():
        walks = [walk(text, each, k) for text, each in zip(texts, chosen, strict=True)]
        rows.append(Row(name, None, walks, figures(walks, costs)))
    return rows


def ruled_walks(name: str, trace: Trace) -> list[Walk]:
    """Every text under a stop rule, which begins each anew; one stage a round."""
    make, walks = replay_maker(name, trace), list[Walk]()
    for text in trace.texts:
        rounds = play(text, trace.ground, FixedGate(NEVER_OPENS), ruled=Ruled(make(), trace.features))
        walks.append(walked(rounds, len(text.prompt), trace.ground.stage_len))
    return walks


def document(command: Command, trace: Trace, costs: Costs | None, rows: Sequence[Row]) -> dict[str, Json]:
    """Everything, with what is known of the trace where its record lies beside it."""
    ground, plain_speed = trace.ground, None if costs is None else 1000 / costs.plain_ms
    by_name = {row.gate: row.figures for row in rows}
    return {
        "schema": SCHEMA,
        "method": "replay",
        "trace": str(command.trace),
        "source": source_of(command.trace),
        "family": ground.family,
        "stage_len": ground.stage_len,
        "max_stages": stages_of(command, trace),
        "max_new_tokens": ground.limits.max_new_tokens,
        "texts": len(trace.texts),
        "starts": trace.starts,
        "costs": None if costs is None else {name: plain(value) for name, value in asdict(costs).items()},
        "plain_tokens_per_s": plain_speed,
        "gates": [row_json(row, costs, by_name, plain_speed) for row in rows],
    }


def row_json(row: Row, costs: Costs | None, all_rows: dict[str, Figures], plain_speed: float | None) -> Json:
    """One gate's figures; speeds are null without costs."""
    found, host, best = row.figures, all_rows[HOST].tokens_per_s, all_rows.get(HINDSIGHT)
    speed, top = found.tokens_per_s, best.tokens_per_s if best else None
    counts = Counter(int(stages) for each in row.walks for stages in each.stages)
    timed = [] if costs is None else [(1000.0 * each.tokens, each.ms(costs)) for each in row.walks if each.tokens]
    return {
        "gate": row.gate,
        "gate_sum": row.fixed.over if row.fixed and row.gate != HOST else None,
        "threshold": number(row.fixed.threshold) if row.fixed else None,
        "acceptance_length": number(found.acceptance_length),
        "acceptance_length_pooled": number(found.acceptance_length_pooled),
        "stages_per_round": number(found.stages_per_round),
        "stage_counts": {str(stages): counts[stages] for stages in sorted(counts)},
        "output_share_looped": number(found.output_share_looped),
        "tokens": found.tokens,
        "rounds": found.rounds,
        "stages": found.stages,
        "ms": number(found.ms),
        "tokens_per_s": number(speed),
        "interval": interval(timed),  # 95 %, bootstrap over texts; null for fewer than two
        "speedup": speed / plain_speed if speed and plain_speed else None,
        "gain": speed / host if speed and host else None,  # over the host
        "closed": closed(speed, host, top),
    }


def closed(speed: float | None, host: float | None, best: float | None) -> float | None:
    """The share of the way from the host to the hindsight optimum; None where there is none, or no speed."""
    if speed is None or host is None or best is None or best <= host:
        return None
    return (speed - host) / (best - host)


def source_of(path: Path) -> Json:
    """What the record beside a trace says of its making; None if there is none."""
    record = record_of(path)
    if not record.is_file():
        return None
    try:
        whole = json.loads(record.read_text(encoding="utf-8"))
        return {name: whole.get(name) for name in SOURCE}
    except (ValueError, AttributeError, OSError) as error:
        raise UserError(f"{record} is damaged ({error}); remove it, or record the trace again") from error


def show(console: Console, trace: Trace, costs: Costs | None, rows: Sequence[Row]) -> None:
    """A row a gate."""
    ground = trace.ground
    console.print(
        f"{len(trace.texts)} texts, {trace.starts} starts, {ground.family}, stages of {ground.stage_len} tokens; "
        f"costs: {costs.source if costs else 'none given, so no speeds'}"
    )
    by_name = {row.gate: row.figures for row in rows}
    plain_speed = None if costs is None else 1000 / costs.plain_ms
    table = table_of(("gate", "tau", "stages/round", "2nd on", "tokens/s", "over plain", "over host", "closed"))
    for row in rows:
        found = row_json(row, costs, by_name, plain_speed)
        assert isinstance(found, dict)
        forms = {"acceptance_length": ".2f", "stages_per_round": ".2f", "output_share_looped": ".0%"}
        forms |= {"tokens_per_s": ".1f", "speedup": ".3f", "gain": ".3f", "closed": ".0%"}
        table.add_row(row.gate, *(figure(found[name], form) for name, form in forms.items()))
    console.print(table)
    console.print(
        "tau: mean over texts of the mean over rounds of accepted + 1. 2nd on: share of the text drafted in a second "
        "or later stage. closed: share of the way from the host to the hindsight optimum."
    )
