"""What a run's setting is called in reports: baseline, host, loop, trained, dloop ..., or a name of the user's."""

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple, cast

from dloop.bench.results import Condition, Result
from dloop.errors import UserError

LOOP_AWARE = "demo"  # the shipped drafter's model card says so; of other drafters the records do not tell
CHECKPOINT = re.compile(r"epoch_\d+_step_\d+")  # as the trainer names its folders
WORD = re.compile(r"[\w.=+,:-]+")
ELSEWHERE = {"loop-gate", "dtype", "temperature", "max-new-tokens", "top-k", "top-p"}
OF_OPEN_GATES = {"max-stages", "gate-sum", "stage-tree-budget", "gap-rows"}
WAY_OUT = "tell them apart with --name FOLDER=SETTING"


class Name(NamedTuple):
    """A pattern for folders and the setting that all runs at or below them are."""

    pattern: str
    setting: str


class Column(NamedTuple):
    """One setting of one family under one condition."""

    condition: Condition
    family: str | None
    setting: str


def parse_names(given: Sequence[str]) -> list[Name]:
    """--name FOLDER=SETTING; folders may hold = themselves (`loop-gate=-0.5`), settings may not."""
    names: list[Name] = []
    for text in given:
        pattern, mark, setting = text.rpartition("=")
        if not mark or not pattern or not WORD.fullmatch(setting):
            raise UserError(f"--name {text!r} is not FOLDER=SETTING; such as 'results/*/*/*/loop-gate=-0.5=dloop'")
        names.append(Name(pattern.rstrip("/"), setting))
    return names


def columns(
    results: Sequence[Result], names: Sequence[Name], *, gates_apart: bool = False
) -> dict[Column, dict[str, Result]]:
    """Every run under its column and its set. `gates_apart`: automatic names tell thresholds apart.

    Raises UserError where two runs have one place, or one column two kinds of run that nobody named.
    """
    given = [given_name(result, names) for result in results]
    if unused := sorted(name for name in names if not any(is_below(run.folder, name.pattern) for run in results)):
        raise UserError(f"--name {unused[0].pattern} names no folder of results; quote patterns with a *")
    settings = [name or automatic(result) for name, result in zip(given, results, strict=True)]
    automatic_ones = [pair for pair, name in zip(zip(results, settings, strict=True), given, strict=True) if not name]
    swept = sweeps(automatic_ones) if gates_apart else set[Column]()
    found: dict[Column, dict[str, Result]] = {}
    for result, name, setting in zip(results, given, settings, strict=True):
        column = Column(result.condition, result.family, setting)
        if not name and column in swept:
            column = column._replace(setting=f"{setting},loop-gate={spelled_gate(result)}")
        runs = found.setdefault(column, {})
        others = [] if name else [run for run in runs.values() if kind(run) != kind(result)]
        if clash := [runs[result.dataset]] if result.dataset in runs else others:
            where = f"{column.setting!r} of {result.target} ({result.dataset})"
            raise UserError(f"{clash[0].folder} and {result.folder} would both be {where}; {WAY_OUT}")
        runs[result.dataset] = result
    return found


def given_name(result: Result, names: Sequence[Name]) -> str | None:
    """What the user calls a run. Raises UserError where that is two things."""
    used = [name for name in names if is_below(result.folder, name.pattern)]
    if len({name.setting for name in used}) > 1:
        told = " and ".join(f"{name.pattern}={name.setting}" for name in used)
        raise UserError(f"{result.folder} is named twice, by --name {told}; leave one of them out")
    return used[0].setting if used else None


def sweeps(named: Iterable[tuple[Result, str]]) -> set[Column]:
    """The columns that runs of several thresholds would share."""
    gates: dict[Column, set[object]] = {}
    for result, setting in named:
        gates.setdefault(Column(result.condition, result.family, setting), set()).add(gate_of(result))
    return {column for column, found in gates.items() if len(found) > 1}


def gate_of(result: Result) -> object:
    """The recorded --loop-gate: a number, `inf` or `-inf`, or the name of a gate that learns."""
    return cast(Mapping[str, object], result.summary["setting"])["loop_gate"]


def spelled_gate(result: Result) -> str:
    """A threshold as in the folders' names."""
    return str(gate_of(result)).removesuffix(".0")


def is_below(folder: Path, pattern: str) -> bool:
    """Whether the pattern fits the folder or one it lies in, as given or in full; * crosses no slash."""
    wanted = Path(pattern).parts
    for path in (folder, folder.resolve()):
        parts = path.parts[: len(wanted)]
        if len(parts) == len(wanted) and all(fnmatchcase(*pair) for pair in zip(parts, wanted, strict=True)):
            return True
    return False


def kind(result: Result) -> tuple[object, object]:
    """What must be the same over all sets of a column: the drafter's weights, and the flags."""
    weights = cast(Mapping[str, object], result.summary["checkpoint_sha256"])["draft"]
    return weights or result.summary["draft"], result.summary["setting_name"]


def automatic(result: Result) -> str:
    """The name that the records give. Raises UserError where they do not tell enough."""
    if result.is_baseline:
        return "baseline"
    draft, setting = cast(str, result.summary["draft"]), cast(Mapping[str, object], result.summary["setting"])
    if CHECKPOINT.fullmatch(Path(draft).name):
        raise UserError(
            f"{result.folder}: whether {draft} was trained with a loop stage is not on record; name this run with "
            "--name FOLDER=SETTING (trained or dloop, host or loop, ...)"
        )
    aware, looping, tree = draft == LOOP_AWARE, opens(setting["loop_gate"]), setting["tree_budget"] not in ("host", 0)
    names = {(False, False): "host", (False, True): "loop", (True, False): "trained", (True, True): "dloop"}
    name = names[aware, looping]
    if tree:
        name = "tree" if name == "host" else f"tree_{name}"
    changed = [part.partition("=") for part in cast(str, result.summary["setting_name"]).split(",")]
    learns = (
        {"loop-gate"} if isinstance(setting["loop_gate"], str) and setting["loop_gate"].startswith("auto") else set()
    )
    left_out = ELSEWHERE - learns | (set() if looping else OF_OPEN_GATES) | ({"tree-budget"} if tree else set())
    return ",".join([name, *("".join(part) for part in changed if part[1] and part[0] not in left_out)])


def opens(gate: object) -> bool:
    """Whether a recorded gate can open: log-probabilities are at most 0."""
    return gate != "inf" and not (isinstance(gate, int | float) and gate > 0)
