"""Tables from results folders: a row a set and setting, means over sets, bootstrap intervals.

Averages are the paper's: the plain mean over sets, each set's figure counting once. Their intervals draw the samples of
every set anew; a speed-up's draw takes the same samples of the setting and of its baseline.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import numpy as np
from jaxtyping import Float

from dloop.bench.measure import bounds, resample
from dloop.bench.naming import Column
from dloop.bench.results import COUNT, MS, SECONDS, TAU, TOKENS, Condition, Result
from dloop.bench.speedup import Speedup, Summary, speedup
from dloop.bench.tasks import TASKS
from dloop.records import mean_of

Draws = Float[np.ndarray, " r"]
Found = Mapping[Column, Mapping[str, Result]]
ORDER: Sequence[str] = "baseline host host_as_long loop trained dloop tree tree_loop tree_trained tree_dloop".split()
MEAN = "(mean)"  # in the place of a set's name


class Estimate(NamedTuple):
    """A figure with its 95 % interval; None: nothing was measured, or too few samples for an interval."""

    value: float | None
    low: float | None = None
    high: float | None = None


class Figures(NamedTuple):
    """The three figures with intervals, of a run or of a mean over sets."""

    tau: Estimate
    tokens_per_s: Estimate
    speedup: Estimate


@dataclass(frozen=True, kw_only=True)
class Row:
    """One setting on one set, or its mean over sets."""

    dataset: str
    family: str | None  # None: the baseline
    setting: str
    figures: Figures
    reason: str | None  # why there is no speed-up
    full_acceptance_rate: float | None  # of first stages
    looped: float | None  # share of the text drafted in a second or later stage
    repetition: float | None
    n: int
    complete: bool  # whether these are the published samples
    failures: int


@dataclass(frozen=True)
class Table:
    """All settings of one target under one condition."""

    condition: Condition
    rows: list[Row]  # set after set, the settings in one order
    means: list[Row]  # over the sets that every setting has; none for fewer than two
    mean_sets: list[str]
    columns: dict[Column, Result]  # every setting with one of its runs


def tables(found: Found) -> list[Table]:
    """A table a condition; the sets in the paper's order, the settings in the order of ORDER."""
    return [table(condition, found) for condition in sorted({column.condition for column in found})]


def table(condition: Condition, found: Found) -> Table:
    """The figures of one condition; speed-ups may still be found impossible against a baseline of another."""
    mine = {column: runs for column, runs in found.items() if column.condition == condition}
    return table_of(condition, mine, [run for runs in found.values() for run in runs.values() if run.is_baseline])


def table_of(condition: Condition, chosen: Found, baselines: Sequence[Result]) -> Table:
    """The figures of some of a condition's settings; their means are over the sets that all of these have."""
    mine = {column: chosen[column] for column in sorted(chosen, key=place)}
    sets = sorted({name for runs in mine.values() for name in runs}, key=place_of_set)
    shared = shared_sets(mine)
    rows = [row(column, mine[column][name], baselines) for name in sets for column in mine if name in mine[column]]
    means = [mean_row(column, [mine[column][name] for name in shared], baselines) for column in mine]
    first = {column: next(iter(runs.values())) for column, runs in mine.items()}
    return Table(condition, rows, means if len(shared) > 1 else [], shared, first)


def shared_sets(chosen: Found) -> list[str]:
    """The sets that all of these settings have, in the paper's order."""
    sets = sorted({name for runs in chosen.values() for name in runs}, key=place_of_set)
    return [name for name in sets if all(name in runs for runs in chosen.values())]


def place(column: Column) -> tuple[str, int, str]:
    """The baseline, then family after family."""
    known = column.setting in ORDER
    return column.family or "", ORDER.index(column.setting) if known else len(ORDER), column.setting


def place_of_set(dataset: str) -> tuple[int, str]:
    """The eight sets in the paper's order, then others by name."""
    names = list(TASKS)
    return names.index(dataset) if dataset in names else len(names), dataset


def row(column: Column, run: Result, baselines: Sequence[Result]) -> Row:
    """A run's own figures."""
    baseline, (ratio, reason) = against(run, baselines)
    rates = cast(Mapping[str, float], run.summary["full_acceptance_rate"])
    values = (run.number("acceptance_length"), run.number("tokens_per_s"), ratio)
    return Row(
        dataset=run.dataset,
        family=column.family,
        setting=column.setting,
        figures=Figures(*map(estimate, values, draw(run, baseline))),
        reason=reason,
        full_acceptance_rate=rates.get("1"),
        looped=None if run.is_baseline else run.number("output_share_looped"),
        repetition=run.number("repetition_share"),
        n=len(cast(Sequence[int], run.summary["samples"])),
        complete=bool(cast(Summary, run.summary["subset"])["complete"]),
        failures=cast(int, run.summary["failures"]),
    )


def mean_row(column: Column, runs: Sequence[Result], baselines: Sequence[Result]) -> Row:
    """The mean over sets of every figure; None where a set has none."""
    rows = [row(column, run, baselines) for run in runs]
    draws = [draw(run, against(run, baselines)[0], stream) for stream, run in enumerate(runs, 1)]
    figures = [
        estimate(mean([one.figures[index].value for one in rows]), mean_draws([drawn[index] for drawn in draws]))
        for index in range(len(Figures._fields))
    ]
    return Row(
        dataset=MEAN,
        family=column.family,
        setting=column.setting,
        figures=Figures(*figures),
        reason=next((one.reason for one in rows if one.reason), None),
        full_acceptance_rate=mean([one.full_acceptance_rate for one in rows]),
        looped=mean([one.looped for one in rows]),
        repetition=mean([one.repetition for one in rows]),
        n=sum(one.n for one in rows),
        complete=all(one.complete for one in rows),
        failures=sum(one.failures for one in rows),
    )


def against(run: Result, baselines: Iterable[Result]) -> tuple[Result | None, Speedup]:
    """(the baseline that a run may be divided by, the ratio or why there is none).

    Where no baseline of the target and the set is at hand, what the run's own summary tells.
    """
    others = [other for other in baselines if (other.target, other.dataset) == (run.target, run.dataset)]
    ratios = [speedup(run.summary, other.summary) for other in others]
    for other, ratio in zip(others, ratios, strict=True):
        if ratio.value is not None:
            return other, ratio
    near = [ratio for other, ratio in zip(others, ratios, strict=True) if other.machine == run.machine]
    if others:
        return None, (near or ratios)[0]
    return None, Speedup(run.number("speedup"), cast(str | None, run.summary["speedup_reason"]))


def draw(run: Result, baseline: Result | None, stream: int = 0) -> list[Draws | None]:
    """Bootstrap draws of tau, tokens a second and the speed-up; None where there are fewer than two samples."""
    keys = list(run.samples)
    if len(keys) < 2:
        return [None, None, None]
    sums = resample(np.stack(list(run.samples.values())), stream)
    drawn: list[Draws | None] = [sums[:, TAU] / sums[:, COUNT], sums[:, TOKENS] / sums[:, SECONDS], None]
    if baseline is not None and len(pairs := paired(baseline, run)) > 1:
        drawn[2] = slowness(resample(pairs, stream))
    return drawn


def paired(one: Result, other: Result) -> Float[np.ndarray, "n 10"]:
    """The sums of both for every sample that began with the same prompt in both, side by side."""
    keys = [key for key in one.samples if key in other.samples]
    sides = [np.stack([run.samples[key] for key in keys]) if keys else np.zeros((0, 5)) for run in (one, other)]
    return np.concatenate(sides, 1)


def slowness(sums: Float[np.ndarray, "r 10"]) -> Draws:
    """How much more time a token took the first than the second: ratio of the mean times per output token."""
    first, second = np.split(sums, 2, 1)
    return (first[:, MS] / first[:, COUNT]) / (second[:, MS] / second[:, COUNT])


def estimate(value: float | None, draws: Draws | None) -> Estimate:
    """A figure with the interval of its draws."""
    return Estimate(value, *([] if value is None or draws is None else bounds(draws)))


def mean(values: Sequence[float | None]) -> float | None:
    """The mean; None if a value is missing, or if there is none."""
    given = [value for value in values if value is not None]
    return mean_of(given) if given and len(given) == len(values) else None


def mean_draws(draws: Sequence[Draws | None]) -> Draws | None:
    """Draws of a mean; None if one set has none."""
    given = [drawn for drawn in draws if drawn is not None]
    return np.mean(given, 0) if given and len(given) == len(draws) else None
