"""Table A6: what a gate could read, judged by `dloop calibrate` on traces.

Its files are read, not `rounds.jsonl`: a trace has a draft from every position of a text and all scores of it, while
decoding leaves one score, and second stages only where that score was high.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dloop.bench.paper.shape import Cell, Field, Part
from dloop.errors import UserError
from dloop.records import SCHEMA

SCORE = "log-probability, summed"
FIELDS = [
    Field("family"),
    Field("score"),
    Field("of"),
    Field("g"),
    Field("stages", "d"),
    Field("AUROC", ".3f"),
    Field("opened", ".1%"),
    Field("precision", ".1%"),
]
MEANS = {"last": "one stage, given its prefix", "all": "the whole chain"}
NOTE = (
    "stages: drafted from all starts. precision: of the stages opened those accepted whole; the summed log-probability "
    "opens from g on, another score as often as that"
)


@dataclass(frozen=True)
class Calibration:
    """One file of `dloop calibrate --output`."""

    path: Path
    made: Mapping[str, object]


def read_calibrations(paths: Sequence[str]) -> list[Calibration]:
    """Raises UserError for a file that is none."""
    return [read_calibration(Path(path)) for path in paths]


def read_calibration(path: Path) -> Calibration:
    """One file, with everything that the table takes from it."""
    way_out = "give what dloop calibrate --output wrote"
    try:
        made: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--calibrations {path} cannot be read ({error}); {way_out}") from error
    if not isinstance(made, dict) or "scores" not in made or made.get("schema") != SCHEMA:
        raise UserError(f"--calibrations {path} is no calibration of schema {SCHEMA}; {way_out}")
    found = Calibration(path, cast(Mapping[str, object], made))
    try:
        scores([found])
    except (KeyError, TypeError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"--calibrations {path} is damaged, or of an older dloop ({what}); {way_out} anew") from error
    return found


def scores(calibrations: Sequence[Calibration]) -> list[Part]:
    """A part a file: a row a sum and a score."""
    return [
        Part(heading=heading(each), fields=FIELDS, rows=rows_of(each), notes=[NOTE, *undefined(each)])
        for each in calibrations
    ]


def heading(found: Calibration) -> str:
    """Whose trace it is."""
    source = cast(Mapping[str, object] | None, found.made["source"])
    pair = f"{source['target']} + {source['draft']}" if source else "a trace without a record of its making"
    return f"{pair}, {found.path.name}: {found.made['texts']} texts, {found.made['starts']} starts"


def rows_of(found: Calibration) -> list[list[Cell]]:
    """The score that the gate reads, then the others that the trace has; of all stages together."""
    made = found.made
    rows: list[list[Cell]] = []
    for over, groups in cast(Mapping[str, Mapping[str, Mapping[str, object]]], made["scores"]).items():
        judged = groups["all"]
        stages, opened = cast(int, judged["stages"]), cast(int, judged["opened"])
        lead: list[Cell] = [str(made["family"])]
        where: list[Cell] = [MEANS[over], str(made["at"]), stages]
        share = opened / stages if stages else None
        rows.append([*lead, SCORE, *where, number(judged["auroc"]), share, number(judged["precision"])])
        areas = cast(Mapping[str, object], judged["features"])
        points = cast(Mapping[str, Mapping[str, object] | None], judged["feature_points"])
        for name, about in cast(Mapping[str, str], made["features"]).items():
            point = points[name] or {"opened": None, "precision": None}
            often = number(point["opened"])
            share = often / stages if stages and often is not None else None
            rows.append([*lead, f"{name}: {about}", *where, number(areas[name]), share, number(point["precision"])])
    return rows


def number(value: object) -> float | None:
    """A figure; None: undefined. Raises TypeError for anything else."""
    if value is None or isinstance(value, float | int):
        return value
    raise TypeError(f"{value!r} is no number")


def undefined(found: Calibration) -> list[str]:
    """Why there is no AUROC."""
    groups = cast(Mapping[str, Mapping[str, Mapping[str, object]]], found.made["scores"])
    return [f"{MEANS[over]}: {why}" for over, each in groups.items() if (why := each["all"]["undefined"])]
