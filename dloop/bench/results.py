"""Results folders read back: the summaries of `dloop bench` below some folders, and what each sample gave."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Float

from dloop.bench.loops import Looped, looped
from dloop.bench.measure import Response
from dloop.bench.speedup import Summary, machine
from dloop.bench.store import read_samples
from dloop.errors import UserError
from dloop.records import SCHEMA, Json

NEEDED = {
    "target": str,
    "draft": str | None,
    "family": str | None,
    "dataset": str,
    "setting_name": str,
    "setting": dict,
    "setting.temperature": float | int,
    "setting.top_k": int,
    "setting.top_p": float | int,
    "setting.max_new_tokens": int,
    "setting.loop_gate": float | int | str,  # infinities are written as text
    "setting.tree_budget": int | str,
    "acceptance_length": float | int | None,
    "tokens_per_s": float | int | None,
    "time_per_output_token_ms": float | int | None,
    "speedup": float | int | None,
    "speedup_reason": str | None,
    "full_acceptance_rate": dict,
    "output_share_looped": float | int | None,
    "repetition_share": float | int | None,
    "subset": dict,
    "subset.complete": bool,
    "samples": list,
    "rounds": int,
    "stages": int,
    "tokens": int,
    "failures": int,
    "failure_messages": list,
    "data_sha256": str,
    "template_sha256": str | None,
    "checkpoint_sha256": dict,
    "checkpoint_sha256.target": str | None,
    "checkpoint_sha256.draft": str | None,
    "hardware": dict,
    "hardware.gpu": str | None,
    "hardware.cpu": str | None,
    "hardware.threads": int,
    "versions": dict,
    "dtype": str,
    "engine": str,
}
MISSING = object()
CONDITION = ("temperature", "top_k", "top_p", "max_new_tokens")
COUNT, TAU, MS, TOKENS, SECONDS = range(5)  # columns of a sample's sums


class Condition(NamedTuple):
    """What figures must share to stand in one table."""

    target: str
    machine: str
    dtype: str
    temperature: float
    top_k: int
    top_p: float
    max_new_tokens: int


class SampleKey(NamedTuple):
    """One sample of a set, and the prompt it began with."""

    sample: int
    prompt_sha256: str | None


@dataclass(frozen=True)
class Result:
    """One folder of results: a setting on a set."""

    folder: Path
    summary: Summary
    samples: dict[SampleKey, Float[np.ndarray, " 5"]]  # sums over a sample's responses: COUNT .. SECONDS
    looped: Sequence[Looped] = ()  # of the same responses

    @property
    def target(self) -> str:
        return cast(str, self.summary["target"])

    @property
    def dataset(self) -> str:
        return cast(str, self.summary["dataset"])

    @property
    def family(self) -> str | None:
        return cast(str | None, self.summary["family"])

    @property
    def is_baseline(self) -> bool:
        return self.summary["draft"] is None

    @property
    def machine(self) -> str:
        return machine(cast(Mapping[str, Json], self.summary["hardware"]))

    @property
    def condition(self) -> Condition:
        setting = cast(Summary, self.summary["setting"])
        values = [setting[name] for name in CONDITION]
        return Condition(self.target, self.machine, cast(str, self.summary["dtype"]), *values)  # pyright: ignore[reportArgumentType]

    def number(self, key: str) -> float | None:
        """A figure of the summary; None: nothing was measured."""
        value = cast(float | None, self.summary[key])
        return None if value is None else float(value)


def read_results(folders: Sequence[str]) -> list[Result]:
    """Every finished run at or below these folders, each once, in the order of their paths.

    Raises UserError at a folder without one, at a run under way, and at files that are damaged or of another schema.
    """
    found: dict[Path, Path] = {}
    for given in map(Path, folders):
        if not given.is_dir():
            raise UserError(f"--results {given} is no folder; give what --output-dir of dloop bench was")
        paths = sorted(given.rglob("summary.json"))
        if unfinished := [path.parent for path in sorted(given.rglob("parts")) if path.is_dir()]:
            raise UserError(
                f"{unfinished[0]} holds a run under way; let dloop bench end, or give the other folders one by one"
            )
        if not paths:
            raise UserError(f"--results {given} holds no summary.json; dloop bench --output-dir {given} writes them")
        found |= {path.parent.resolve(): path.parent for path in paths}
    return [read_result(folder) for folder in found.values()]


def read_result(folder: Path) -> Result:
    """One run. Raises UserError where its two files are damaged or contradict each other."""
    try:
        return read_pair(folder)
    except UserError:
        raise
    except (KeyError, TypeError, ValueError) as error:  # a field of a record that is missing or of another type
        what = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise UserError(f"{folder} holds damaged records ({what}); measure it again with dloop bench") from error


def read_pair(folder: Path) -> Result:
    """A run's summary and rounds, held against each other."""
    summary = read_summary(folder / "summary.json")
    path = folder / "rounds.jsonl"
    if not path.is_file():
        raise UserError(f"{folder} has a summary.json but no rounds.jsonl; measure it again with dloop bench")
    data = path.read_bytes()
    found = read_samples(data)
    recorded = [response for responses in found.samples.values() for response in responses]
    check_schema(path, {response.header.get("schema") for response in recorded})
    if found.good_bytes != len(data) or list(found.samples) != summary["samples"]:
        raise UserError(f"{path} does not hold the samples of its summary; measure it again with dloop bench")
    samples = {
        SampleKey(index, responses[0].header["prompt_sha256"]): sums
        for index, responses in found.samples.items()
        if (sums := sums_of(responses)) is not None
    }
    result = Result(folder, summary, samples, looped(recorded))
    check_tau(result)
    return result


def check_tau(result: Result) -> None:
    """Raises UserError unless the rounds give the summary's acceptance length."""
    sums = sum(result.samples.values(), np.zeros(5))
    again, told = (sums[TAU] / sums[COUNT] if sums[COUNT] else None), result.number("acceptance_length")
    if (again is None) != (told is None) or (again is not None and told is not None and not math.isclose(again, told)):
        raise UserError(
            f"{result.folder}: rounds.jsonl gives an acceptance length of {again}, summary.json tells {told}; measure "
            "it again with dloop bench"
        )


def sums_of(responses: Sequence[Response]) -> Float[np.ndarray, " 5"] | None:
    """What a sample adds to the figures of its set, in the definitions of `measure.figures`; None: nothing."""
    headers = [(response.acceptance_length, response.header) for response in responses if response.rounds]
    rows = [
        (1.0, tau, 1000 * header["decode_s"] / header["num_tokens"], header["num_tokens"] - 1.0, header["decode_s"])
        for tau, header in headers
        if header["error"] is None
    ]
    return np.array(rows, dtype=np.float64).sum(0) if rows else None


def read_summary(path: Path) -> Summary:
    """A summary with all that a report needs. Raises UserError naming the file and what is wrong."""
    try:
        raw: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); measure it again with dloop bench") from error
    if not isinstance(raw, dict) or "schema" not in raw:
        raise UserError(f"{path} is no summary of dloop bench; give folders that hold nothing else of that name")
    summary = cast(Summary, raw)
    check_schema(path, {summary["schema"]})
    wrong = [name for name, kind in NEEDED.items() if not isinstance(field_of(summary, name), kind)]
    rates = summary.get("full_acceptance_rate")
    if isinstance(rates, dict) and not all(isinstance(rate, float | int) for rate in rates.values()):
        wrong.append("full_acceptance_rate")
    if wrong:
        raise UserError(f"{path}: {', '.join(wrong)} missing or ill-typed; measure it again with dloop bench")
    return summary


def field_of(summary: Summary, name: str) -> object:
    """A field by its dotted name; what no field can be, `MISSING`, where it is not there."""
    found: object = summary
    for part in name.split("."):
        found = cast(Summary, found).get(part, MISSING) if isinstance(found, dict) else MISSING
    return found


def check_schema(path: Path, schemas: set[object]) -> None:
    """Raises UserError at any schema but ours: versions are not mixed."""
    if other := schemas - {SCHEMA}:
        raise UserError(
            f"{path} has schema {next(iter(other))}, this dloop reads schema {SCHEMA}; report it with the version of "
            "dloop that wrote it"
        )
