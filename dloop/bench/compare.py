"""Two settings on the same prompts: differences with paired bootstrap intervals."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from dloop.bench.measure import resample
from dloop.bench.report import MEAN, Draws, Estimate, Found, estimate, mean, mean_draws, paired, place_of_set, slowness
from dloop.bench.results import COUNT, TAU, Condition, Result
from dloop.bench.speedup import facts
from dloop.errors import UserError

MUST_AGREE = ("machine", "dtype", "engine", "set of prompts", "target checkpoint")


@dataclass(frozen=True)
class Difference:
    """B against A on the prompts that both decoded."""

    target: str
    dataset: str
    pairs: int
    left_out: int  # samples that only one of them has, or that began with another prompt
    tau: Estimate  # B's acceptance length minus A's
    speed: Estimate  # A's time a token over B's: above 1, B is faster


def compare(found: Found, a: str, b: str) -> list[Difference]:
    """Every condition and set that both settings have, and the mean over sets where there are several.

    Raises UserError for a setting that is not there or stands for several families, and where nothing is in common.
    """
    names = sorted({column.setting for column in found})
    if missing := [name for name in (a, b) if name not in names]:
        raise UserError(f"--compare {a} {b}: {missing[0]!r} is no setting here; there are {', '.join(names)}")
    made: list[Difference] = []
    for condition in sorted({column.condition for column in found}):
        one, other = (runs_of(found, condition, name) for name in (a, b))
        sets = sorted(one.keys() & other.keys(), key=place_of_set)
        made += differences([(one[name], other[name]) for name in sets])
    if not made:
        raise UserError(
            f"--compare {a} {b}: no set was measured with both on one machine, with the same dtype, sampling and length"
        )
    return made


def runs_of(found: Found, condition: Condition, setting: str) -> dict[str, Result]:
    """The setting's runs by set; none, if it was not measured under the condition."""
    columns = [column for column in found if (column.condition, column.setting) == (condition, setting)]
    if len(columns) > 1:
        families = " and ".join(str(column.family) for column in columns)
        raise UserError(f"--compare: {setting!r} stands for {families}; give the results of one family alone")
    return dict(found[columns[0]]) if columns else {}


def differences(sides: Sequence[tuple[Result, Result]]) -> list[Difference]:
    """A difference a set, then their mean."""
    if not sides:
        return []
    each = [difference(one, other, 0) for one, other in sides]
    if len(each) < 2:
        return [each[0][0]]
    streams = [difference(one, other, stream) for stream, (one, other) in enumerate(sides, 1)]
    rows = [found for found, _, _ in each]
    mean_of_sets = Difference(
        target=rows[0].target,
        dataset=MEAN,
        pairs=sum(row.pairs for row in rows),
        left_out=sum(row.left_out for row in rows),
        tau=estimate(mean([row.tau.value for row in rows]), mean_draws([tau for _, tau, _ in streams])),
        speed=estimate(mean([row.speed.value for row in rows]), mean_draws([speed for _, _, speed in streams])),
    )
    return [*rows, mean_of_sets]


def difference(one: Result, other: Result, stream: int) -> tuple[Difference, Draws | None, Draws | None]:
    """(the difference, its draws of tau and of the speed). Raises UserError where the two are not the same work."""
    theirs, ours = facts(one.summary), facts(other.summary)
    if unlike := [name for name in MUST_AGREE if theirs[name] != ours[name]]:
        raise UserError(f"{one.folder} and {other.folder} have another {unlike[0]}; only the same work is compared")
    pairs = paired(one, other)
    drawn = resample(pairs, stream) if len(pairs) > 1 else None
    taus, speeds = (None, None) if drawn is None else (tau_gain(drawn), slowness(drawn))
    whole = pairs.sum(0)[None]
    values = (float(tau_gain(whole)[0]), float(slowness(whole)[0])) if len(pairs) else (None, None)
    row = Difference(
        target=one.target,
        dataset=one.dataset,
        pairs=len(pairs),
        left_out=len(one.samples.keys() ^ other.samples.keys()),
        tau=estimate(values[0], taus),
        speed=estimate(values[1], speeds),
    )
    return row, taus, speeds


def tau_gain(sums: Float[np.ndarray, "r 10"]) -> Draws:
    """The second's acceptance length minus the first's."""
    first, second = np.split(sums, 2, 1)
    return second[:, TAU] / second[:, COUNT] - first[:, TAU] / first[:, COUNT]
