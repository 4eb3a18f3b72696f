"""What `dloop calibrate` does: read a trace, judge the score of its stages, sweep the threshold."""

import json
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np

from dloop.bench.reporting import save
from dloop.cli.calibrate import Command
from dloop.cli.calibrate_page import page
from dloop.cli.replay_run import costs_of, source_of, stages_of
from dloop.gate import NEVER_OPENS, FixedGate, GateSum
from dloop.gates import calibration
from dloop.gates.calibration import GROUPS, Bin, Openings, Stages
from dloop.gates.costs import Costs
from dloop.gates.trace import Trace, load
from dloop.gates.walk import figures, gate_depths, walk
from dloop.records import SCHEMA, Json, dumps, number, plain


def calibrate(command: Command) -> int:
    """The document, or Markdown."""
    if command.plot is not None:
        from dloop.bench.plot import check_plot

        check_plot(command.plot)
    trace = load(command.trace)
    most = stages_of(command, trace)
    costs = costs_of(command, trace, most)
    stages: dict[GateSum, Stages] = {over: calibration.stages_of(trace, over, most) for over in command.gate_sum}
    made = document(command, trace, costs, most, stages)
    print(dumps(made) if command.json else page(made))
    if command.output is not None:  # last: a file that cannot be written must not cost the figures
        save(command.output, json.dumps(made, indent=1, allow_nan=False) + "\n")
    if command.plot is not None:
        from dloop.cli.calibrate_plot import draw

        draw(made, stages, command.plot)
    return 0


def document(
    command: Command, trace: Trace, costs: Costs | None, most: int, stages: dict[GateSum, Stages]
) -> dict[str, Json]:
    """Everything."""
    return {
        "schema": SCHEMA,
        "trace": str(command.trace),
        "source": source_of(command.trace),
        "family": trace.ground.family,
        "stage_len": trace.ground.stage_len,
        "max_stages": most,
        "texts": len(trace.texts),
        "starts": trace.starts,
        "costs": None if costs is None else {name: plain(value) for name, value in asdict(costs).items()},
        "at": number(command.at),
        "features": {name: calibration.POOLS[name].about for name in calibration.known(trace)},
        "features_left_out": [name for name in trace.features if name not in calibration.POOLS],
        "scores": {over: {g: judged(found.of(g), command.at) for g in GROUPS} for over, found in stages.items()},
        "sweep": [row for over in command.gate_sum for row in sweep(command, trace, costs, over, most)],
    }


def judged(stages: Stages, at: float) -> Json:
    """One group's statistics; null is what is undefined, and `undefined` says why."""
    score, whole = stages.score, stages.whole
    opening, probability = calibration.point(score, whole, at), np.exp(score)
    curve = calibration.reliability(probability, whole)
    return {
        "stages": len(whole),
        "whole": opening.true,
        "undefined": why_undefined(len(whole), opening.true),
        "auroc": calibration.auroc(score, whole),
        "opened": opening.opened,
        "precision": opening.precision,
        "recall": opening.recall,
        "predicted": float(probability.mean()) if len(whole) else None,
        "observed": opening.true / len(whole) if len(whole) else None,
        "ece": calibration.ece(curve),
        "brier": calibration.brier(probability, whole),
        "reliability": [bin_json(each) for each in curve],
        "features": {name: feature_auroc(values, whole) for name, values in stages.figures.items()},
        "feature_points": {n: feature_point(values, whole, opening.opened) for n, values in stages.figures.items()},
    }


def bin_json(found: Bin) -> Json:
    """A bin; the means of an empty one are null."""
    means = {"predicted": found.predicted, "observed": found.observed}
    return {"low": found.low, "high": found.high, "count": found.count, **means}


def why_undefined(count: int, whole: int) -> str | None:
    """Why there is no AUROC; None where there is one."""
    if not count:
        return "no such stage in the trace"
    if whole in (0, count):
        return f"{'all' if whole else 'none'} of {count} accepted whole, so there is nothing to tell apart"
    return None


def feature_auroc(values: np.ndarray, whole: np.ndarray) -> float | None:
    """None too where the drafter has no such feature."""
    return None if np.isnan(values).any() else calibration.auroc(values, whole)


def feature_point(values: np.ndarray, whole: np.ndarray, count: int) -> Json:
    """A feature's openings where it opens as often as the score; null where the drafter has no such feature."""
    if np.isnan(values).any():
        return None
    found = calibration.point_of(values, whole, count)
    return {"opened": found.opened, "precision": found.precision}


def sweep(command: Command, trace: Trace, costs: Costs | None, over: GateSum, most: int) -> list[Json]:
    """Decoding under the host and under every threshold."""
    thresholds: Sequence[float] = (NEVER_OPENS, *sorted({command.at, *command.loop_gate}, reverse=True))
    return [swept(FixedGate(each, over), trace, costs, most) for each in thresholds]


def swept(gate: FixedGate, trace: Trace, costs: Costs | None, most: int) -> Json:
    """All texts under one gate: what it opened, how often rightly, and what came of it."""
    walks = [walk(text, gate_depths(text, gate, most), trace.ground.stage_len) for text in trace.texts]
    found, asked = figures(walks, costs), Openings(0, 0, 0)
    for text, rounds in zip(trace.texts, walks, strict=True):
        asked += calibration.openings(text, rounds, most)
    return {
        "gate_sum": gate.over,
        "threshold": None if gate.threshold == NEVER_OPENS else number(gate.threshold),  # null: the host
        "acceptance_length": number(found.acceptance_length),
        "asked": asked.asked,
        "opened": asked.opened,
        "opened_rate": asked.opened / asked.asked if asked.asked else None,
        "precision": asked.right / asked.opened if asked.opened else None,
        "stages_per_round": number(found.stages_per_round),
        "tokens_per_ms": found.tokens / found.ms if found.ms else None,
    }
