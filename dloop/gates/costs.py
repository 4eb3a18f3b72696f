"""What a round costs: milliseconds of its stages and of its verification, measured or given.

A round of S stages of k tokens takes first + (S - 1) later + S loop + extend + verify(1 + S k): the drafter's stages,
the loop's own work on the host, reading the verified rows, and the target's forward. Times between measured numbers of
rows are interpolated; beyond the last one nothing is known, and nothing is assumed.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import numpy as np
from jaxtyping import Float64, Int64

from dloop.errors import UserError
from dloop.records import Json

Way = Literal["fast", "twin"]
STAGES = {  # where a latency file has a family's stages
    "dspark": ("first", "later"),
    "dflash": ("dflash_first", "dflash_later"),
    "domino": ("domino_first", "domino_later"),
    "eagle3": ("eagle3_chain", "eagle3_later"),
}
Times = dict[str, dict[str, Json]]
BLOCK_FAMILIES = ("dflash", "dspark", "domino")


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Milliseconds."""

    first_ms: float  # a round's first stage
    later_ms: float  # each further one
    rows: tuple[int, ...]  # of verifications, increasing
    verify_ms: tuple[float, ...]  # of so many rows
    loop_ms: float = 0.0  # host work of a stage
    extend_ms: float = 0.0  # a round's verified rows, read by the drafter
    source: str = "given"

    def verify(self, rows: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """One verification of so many rows. Raises UserError beyond the table."""
        if rows.size and (rows.max() > self.rows[-1] or rows.min() < self.rows[0]):
            raise UserError(
                f"a verification of {rows.min()} to {rows.max()} rows lies outside the costs of {self.source}, "
                f"{self.rows[0]} to {self.rows[-1]} rows; lower --max-stages, or measure with dloop latency --rows"
            )
        return np.interp(rows, self.rows, self.verify_ms)

    def round_ms(self, stages: Int64[np.ndarray, " n"], stage_len: int) -> Float64[np.ndarray, " n"]:
        """Rounds of so many stages; one without any costs its verification and the reading."""
        return self.draft_ms(stages) + self.rest_ms(1 + stages * stage_len)

    def rest_ms(self, rows: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """All but the drafting of rounds that verify so many rows."""
        return self.extend_ms + self.verify(rows)

    def draft_ms(self, stages: Int64[np.ndarray, " n"]) -> Float64[np.ndarray, " n"]:
        """The drafting side of rounds of so many stages."""
        further = self.later_ms * np.maximum(stages - 1, 0)
        return np.where(stages > 0, self.first_ms, 0.0) + further + self.loop_ms * stages

    @property
    def plain_ms(self) -> float:
        """A token of plain decoding: one row."""
        return float(self.verify(np.array([1]))[0])


def given_costs(stage_ms: tuple[float, ...], verify_ms: tuple[float, ...], most_rows: int) -> Costs:
    """Costs by hand: (first, later) stage; (one row, each further row), linear. Raises UserError."""
    for name, values in (("stage-ms", stage_ms), ("verify-ms", verify_ms)):
        if len(values) != 2 or not all(np.isfinite(value) and value >= 0 for value in values):
            shown = ",".join(map(str, values))
            raise UserError(f"--{name} {shown} must be two numbers from 0 on, joined by a comma, such as 0.97,0.95")
    base, slope = verify_ms
    return Costs(
        first_ms=stage_ms[0],
        later_ms=stage_ms[1],
        rows=(1, max(2, most_rows)),
        verify_ms=(base, base + slope * (max(2, most_rows) - 1)),
        source=f"--stage-ms {stage_ms[0]:g},{stage_ms[1]:g} --verify-ms {base:g},{slope:g}",
    )


def read_costs(path: Path, family: str, way: Way, context: int | None, near: int) -> Costs:
    """The costs of one context in a file of `dloop latency`: the one named, else the nearest to `near` tokens.

    Raises UserError where the file lacks what is needed.
    """
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--costs {path} cannot be read ({error}); give a file of dloop latency --output") from error
    entry = entry_at(entries, context, near, path)
    if family not in STAGES:
        raise UserError(f"--costs {path} has no stages of {family}; give --stage-ms and --verify-ms")
    try:
        rows = {int(count): number(row, way) for count, row in cast(Times, entry["rows"]).items()}
        stages = cast(Times, entry["stage_ms"])
        if not rows:
            raise ValueError("no rows")
        counts, is_block = sorted(rows), family in BLOCK_FAMILIES
        (first, later), drafts = stages_in(stages, family, cast(Times, entry)["drafter"]["stage_len"])
        return Costs(
            first_ms=number(stages[first], way),
            later_ms=number(stages[later], way),
            rows=tuple(counts),
            verify_ms=tuple(rows[count] for count in counts),
            loop_ms=number(stages["host"], "loop"),
            extend_ms=number(stages["extend"], way) if is_block else 0.0,  # EAGLE-3 reads in its stage
            source=f"{path.name}: {entry['shape']} after {entry['context']} tokens on {entry['gpu']}, {way}{drafts}",
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"--costs {path} lacks the {way} times of {family} ({type(error).__name__}: {error}); "
            "give a whole file of dloop latency"
        ) from error


def stages_in(stages: Times, family: str, dspark_len: Json) -> tuple[tuple[str, str], str]:
    """(The names of a family's first and further stage, what is to be told of them.) Files that are older than the
    times of a block family have DSpark's, whose backbone is the same.
    """
    names = STAGES[family]
    if family not in BLOCK_FAMILIES:
        return names, ""
    if names[0] not in stages:
        return STAGES["dspark"], f", DSpark's stages of {dspark_len} tokens in place of {family}'s"
    return names, f", stages of {stages[names[0]].get('stage_len', dspark_len)} tokens"


def entry_at(entries: object, context: int | None, near: int, path: Path) -> dict[str, Json]:
    """The object of one context."""
    found = cast(list[dict[str, Json]], entries if isinstance(entries, list) else [])
    contexts = {cast(int, each["context"]): each for each in found if "context" in each}
    if not contexts:
        raise UserError(f"--costs {path} is no file of dloop latency; give one that it wrote without --replay")
    if context is not None and context not in contexts:
        raise UserError(f"--cost-context {context} is not in {path}; it has {', '.join(map(str, contexts))}")
    return contexts[min(contexts, key=lambda each: abs(each - near)) if context is None else context]


def number(row: Mapping[str, Json], way: Way | Literal["loop"]) -> float:
    """One way's milliseconds. Raises ValueError where it was not measured."""
    value = row[f"{way}_ms"]
    if not isinstance(value, int | float):
        raise ValueError(f"{way}_ms is {value}")
    return float(value)
