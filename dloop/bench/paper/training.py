"""Table A7: training runs by their depths and losses, what a step of each took, and what their drafters bring."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import cast

from dloop import checkpoint
from dloop.bench.naming import CHECKPOINT, Column
from dloop.bench.paper.choose import Runs
from dloop.bench.paper.gains import Shape, gains
from dloop.bench.paper.shape import Cell, Field, Part
from dloop.bench.report import Found
from dloop.bench.results import Result
from dloop.errors import UserError
from dloop.records import SCHEMA

GIB = 2**30
TYPES = {"family": str, "target": str, "depths": list, "losses": str, "steps": int, "setting": dict, "hardware": dict}
FIELDS = [
    Field("family"),
    Field("run"),
    Field("depths"),
    Field("losses on"),
    Field("loop weight"),
    Field("steps", "d"),
    Field("ms/step", ".1f"),
    Field("peak GiB", ".2f"),
]
NOTES = [
    "depths: stages beyond the first, or steps of an unroll, of which a step draws one. ms/step: median over the lines "
    "of train.csv. peak GiB: allocated by the first process, measures of checkpoints included",
    "stages between the first and the drawn one have no loss in this trainer: of block drafters, intermediate "
    "supervision is not measured",
]


@dataclass(frozen=True, kw_only=True)
class TrainRun:
    """A folder that `dloop train` wrote."""

    folder: Path
    about: Mapping[str, object]  # run.json
    step_ms: float | None  # None: no line was logged
    checkpoints: frozenset[str]  # their hashes, of those that results may be of

    @property
    def depths(self) -> str:
        """As --ttt-length-dist is typed."""
        return ",".join(map(str, cast(Sequence[int], self.about["depths"])))

    @property
    def losses(self) -> str:
        return cast(str, self.about["losses"])


def read_runs(folders: Sequence[str], found: Found) -> list[TrainRun]:
    """Raises UserError for a folder without a run's record, or with a damaged one."""
    names = {Path(str(run.summary["draft"])).name for runs in found.values() for run in runs.values()}
    return [read_run(Path(folder), {name for name in names if CHECKPOINT.fullmatch(name)}) for folder in folders]


def read_run(folder: Path, names: set[str]) -> TrainRun:
    """One run; only checkpoints of these names are hashed, which reads all their weights."""
    way_out = "give the --output-dir of a dloop train"
    path = folder / "run.json"
    try:
        about: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--train-runs {folder}: {path.name} cannot be read ({error}); {way_out}") from error
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise UserError(f"--train-runs {folder}: {path.name} is no record of schema {SCHEMA}; {way_out}")
    record = cast(Mapping[str, object], about)
    if wrong := [name for name, kind in TYPES.items() if not isinstance(record.get(name), kind)]:
        raise UserError(f"--train-runs {folder}: {path.name}: {', '.join(wrong)} missing or ill-typed; {way_out}")
    kept = [folder / name for name in sorted(names) if (folder / name / "config.json").is_file()]
    hashes = frozenset(checkpoint.sha256(each) for each in kept)
    return TrainRun(folder=folder, about=record, step_ms=step_ms(folder / "train.csv"), checkpoints=hashes)


def step_ms(path: Path) -> float | None:
    """The median over the log's lines, of which the first ones warm up. Raises UserError where it is damaged."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            times = [float(line["step_ms"]) for line in csv.DictReader(file)]
        if not all(map(math.isfinite, times)):
            raise ValueError("a step_ms is no finite number")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({type(error).__name__}: {error}); leave this run out") from error
    return median(times) if times else None


def training(found: Found, runs: Sequence[TrainRun]) -> list[Part]:
    """What each run took, then what its checkpoints bring where they were measured."""
    if not runs:
        return []
    owners = {digest: run for run in runs for digest in run.checkpoints}
    measured = gains(found, shape_of(owners))
    known = {
        run.folder for results in found.values() for each in results.values() if (run := owners.get(hash_of(each)))
    }
    unknown = [str(run.folder) for run in runs if run.folder not in known]
    lost = [f"no results of a checkpoint of {', '.join(unknown)}"] if unknown else []
    silent = [f"{run.folder}: {why}" for run in runs if (why := why_no_peak(run))]
    cost = Part(heading="training", fields=FIELDS, rows=[row(run) for run in runs], notes=[*NOTES, *lost, *silent])
    return [cost, *measured]


def row(run: TrainRun) -> list[Cell]:
    """What a run trained, and what it took."""
    about = run.about
    weight = cast(Mapping[str, object], about["setting"]).get("dloop_loss_weight")
    mixes = run.losses.startswith("first stage and") and about["family"] != "dflash"
    peak = None if why_no_peak(run) else cast(int, about["peak_memory_bytes"]) / GIB
    lead: list[Cell] = [cast(str, about["family"]), str(run.folder), run.depths, run.losses]
    return [*lead, str(weight) if mixes else None, cast(int, about["steps"]), run.step_ms, peak]


def why_no_peak(run: TrainRun) -> str | None:
    """Why there is no peak memory."""
    if cast(Mapping[str, object], run.about["hardware"]).get("gpu") is None:
        return "no peak memory: on a CPU the record holds that of the whole process since its start"
    return None if isinstance(run.about.get("peak_memory_bytes"), int) else "no peak memory: no sitting of it ended"


def hash_of(result: Result) -> str:
    """The drafter's weights."""
    return str(cast(Mapping[str, object], result.summary["checkpoint_sha256"])["draft"])


def shape_of(owners: Mapping[str, TrainRun]) -> Shape:
    """A row a setting whose drafter one of these runs wrote."""

    def run_of(runs: Runs) -> TrainRun | None:
        found = {hash_of(each) for each in runs}
        return owners.get(found.pop()) if len(found) == 1 else None

    def lead(column: Column, runs: Runs) -> Sequence[Cell]:
        run = run_of(runs)
        assert run is not None
        return [str(run.folder), run.depths, run.losses]

    fields = ("run", "depths", "losses on")
    return Shape(wanted=lambda column, runs: run_of(runs) is not None, fields=fields, lead=lead)
