"""What `dloop tune` does: replay a grid of fixed gates, choose one or none, write down which and why."""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from dloop import checkpoint
from dloop.bench.measure import interval
from dloop.bench.reporting import save
from dloop.cli.data_run import record_of
from dloop.cli.replay_run import costs_of, source_of, stages_of
from dloop.cli.tune import Command
from dloop.cli.tune_page import page
from dloop.errors import UserError, refuse_folder
from dloop.gates.costs import Costs
from dloop.gates.trace import Trace, load
from dloop.gates.tuning import Setting, Times, best, grid, held_out, row_costs, times, walks_of
from dloop.gates.walk import Figures, Walk, figures
from dloop.load import DEMO
from dloop.records import SCHEMA, Json, dumps, number, plain

FILE = "dloop_tune.json"
TREES = (
    "A trace holds chains, so no tree budget is chosen. What a verified row costs says how many tokens a round one "
    "more, such as a node of a tree, must bring to pay."
)


@dataclass(frozen=True)
class Choice:
    """What the grid says, and what is recommended."""

    best: Setting
    gain: float  # over the host, on the texts that chose it: it flatters
    held_out_gain: float | None  # on texts that had no say; None for fewer than two
    interval: list[float] | None  # of held_out_gain
    pays: bool
    reason: str


def tune(command: Command) -> int:
    """The document, or Markdown; and the file."""
    trace = load(command.trace)
    most = stages_of(command, trace)
    costs = costs_of(command, trace, most)
    assert costs is not None
    if costs.plain_ms <= 0:
        raise UserError(f"by {costs.source} a verification of one row takes no time; give costs above 0")
    place = command.output or beside_drafter(command)
    settings = grid(command.loop_gate, command.gate_sum, most)
    walks = walks_of(trace, settings)
    made = document(command, trace, costs, settings, walks)
    print(dumps(made) if command.json else page(made, place))
    save(place, json.dumps(made, indent=1, allow_nan=False) + "\n")
    return 0


def beside_drafter(command: Command) -> Path:
    """Where the choice goes. Raises UserError where that is no folder of ours to write to, or another drafter's."""
    name, sha256 = drafter_of(command.trace)
    folder = command.draft_model or Path(name or "")
    way_out = "give --output FILE, or --draft-model FOLDER"
    if folder == Path() or name == "demo" and command.draft_model is None or folder.resolve() == DEMO:
        raise UserError(f"the drafter is {name or 'not named beside the trace'}, whose folder is left alone; {way_out}")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"the drafter {folder} is no folder that can be written to; {way_out}")
    if sha256 is not None and checkpoint.sha256(folder) != sha256:
        raise UserError(f"the weights in {folder} are not those of the trace; record another, or {way_out}")
    refuse_folder(folder / FILE, "--output")
    return folder / FILE


def drafter_of(path: Path) -> tuple[str | None, str | None]:
    """The drafter's name and the hash of its weights, as the record beside a trace has them; None without one."""
    record = record_of(path)
    if source_of(path) is None:
        return None, None
    whole = json.loads(record.read_text(encoding="utf-8"))
    return whole.get("draft"), (whole.get("checkpoint_sha256") or {}).get("draft")


def chosen(settings: Sequence[Setting], ms: Times) -> Choice:
    """The best of the grid, its gain where it had no say, and whether that is one."""
    index, host = best(ms), ms[:, 0]
    gain = float(host.sum() / ms[:, index].sum())
    if len(ms) < 2:
        reason = "a single text gives no interval of the gain, so the loop is not recommended; trace more texts"
        return Choice(settings[index], gain, None, None, False, reason)
    others = ms[np.arange(len(ms)), held_out(ms)]
    held, bounds = float(host.sum() / others.sum()), interval(list(zip(host.tolist(), others.tolist(), strict=True)))
    assert bounds is not None
    pays = index != 0 and bounds[0] > 1
    return Choice(settings[index], gain, held, bounds, pays, reason_of(settings[index], held, bounds, len(ms)))


def reason_of(setting: Setting, gain: float, bounds: Sequence[float], texts: int) -> str:
    """The choice in a sentence."""
    if setting.is_host:
        return "no gate of the grid takes less time than the host's own"
    low, high = bounds
    told = f"{gain:.3f} times the host's tokens/s (95 % {low:.3f} to {high:.3f}) on {texts} texts that had no say in it"
    if low > 1:
        return f"{setting.flags} takes the least time of all; so chosen, a gate reaches {told}"
    verb = "includes 1" if high >= 1 else "is below 1"
    return (
        f"{setting.flags} takes the least time here, but so chosen a gate reaches {told}, which {verb}: keep the host"
    )


def document(
    command: Command, trace: Trace, costs: Costs, settings: Sequence[Setting], walks: Sequence[list[Walk]]
) -> dict[str, Json]:
    """Everything."""
    ms, tokens = times(walks, costs), sum(rounds.tokens for rounds in walks[0])
    choice = chosen(settings, ms)
    recommended = choice.best if choice.pays else settings[0]
    with command.trace.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    return {
        "schema": SCHEMA,
        "recommended": {**setting_json(recommended), "flags": recommended.flags},
        "pays": choice.pays,
        "reason": choice.reason,
        "best": {**setting_json(choice.best), "flags": choice.best.flags, "gain": choice.gain},
        "held_out_gain": choice.held_out_gain,
        "interval": choice.interval,
        "host_tokens_per_s": 1000 * tokens / float(ms[:, 0].sum()),
        "plain_tokens_per_s": 1000 / costs.plain_ms,
        "trees": TREES,
        "row_costs": [plain(asdict(each)) for each in row_costs(costs, tokens / float(ms[:, 0].sum()))],
        "costs": {name: plain(value) for name, value in asdict(costs).items()},
        "trace": str(command.trace),
        "trace_sha256": sha256,
        "source": source_of(command.trace),
        "family": trace.ground.family,
        "stage_len": trace.ground.stage_len,
        "max_stages": settings[0].max_stages,
        "texts": len(trace.texts),
        "starts": trace.starts,
        "curve": curve_json(settings, [figures(texts, costs) for texts in walks]),
    }


def setting_json(setting: Setting) -> dict[str, Json]:
    """A setting by the names of its flags."""
    return {
        "loop_gate": number(setting.gate.threshold),
        "gate_sum": setting.gate.over,
        "max_stages": setting.max_stages,
    }


def curve_json(settings: Sequence[Setting], found: Sequence[Figures]) -> list[Json]:
    """The grid, over all texts."""
    host = found[0].tokens_per_s
    return [
        {
            **setting_json(setting),
            "acceptance_length": number(each.acceptance_length),
            "stages_per_round": number(each.stages_per_round),
            "tokens_per_s": number(each.tokens_per_s),
            "gain": each.tokens_per_s / host if each.tokens_per_s and host else None,
        }
        for setting, each in zip(settings, found, strict=True)
    ]
