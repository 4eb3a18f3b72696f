"""Is what a gate reads the truth? Ranking, precision and calibration of "the stage will be accepted whole".

Statistics of N numbers and N outcomes; what is undefined (one class alone, nothing at all) is None, never nan.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float64, Int64

from dloop.gate import GateSum
from dloop.gates.trace import Text, Trace
from dloop.gates.walk import Walk, read

Numbers = Float64[np.ndarray, " N"]
Outcomes = Bool[np.ndarray, " N"]
Table = Float64[np.ndarray, "n S"]
GROUPS = ("1", "2", "3+", "all")  # stages of a draft
BINS = 10


@dataclass(frozen=True, kw_only=True)
class Stages:
    """N drafted stages of all starts of a trace: what is known after each, and whether it was accepted whole.

    Summed over the last stage: each stage whose whole prefix was accepted, and whether it was too. Summed over all:
    each stage, right or wrong, and whether the whole chain up to its end was accepted.
    """

    stage: Int64[np.ndarray, " N"]  # from 1
    score: Numbers  # summed log-probability; its exponential is a probability of `whole`
    whole: Outcomes
    figures: dict[str, Numbers] = field(default_factory=dict[str, Numbers])  # by feature, larger is surer

    def of(self, group: str) -> "Stages":
        """The stages of one of GROUPS."""
        kept = {"1": self.stage == 1, "2": self.stage == 2, "3+": self.stage > 2}.get(group, self.stage > 0)
        figures = {name: values[kept] for name, values in self.figures.items()}
        return Stages(stage=self.stage[kept], score=self.score[kept], whole=self.whole[kept], figures=figures)


def stages_of(trace: Trace, over: GateSum, max_stages: int) -> Stages:
    """The stages that a trace holds, no deeper than the cap."""
    parts = [stages_in(text, trace, over, max_stages) for text in trace.texts]
    return Stages(
        stage=np.concatenate([part.stage for part in parts]),
        score=np.concatenate([part.score for part in parts]),
        whole=np.concatenate([part.whole for part in parts]),
        figures={name: np.concatenate([part.figures[name] for part in parts]) for name in parts[0].figures},
    )


def stages_in(text: Text, trace: Trace, over: GateSum, max_stages: int) -> Stages:
    """One text's."""
    k = trace.ground.stage_len
    stage = np.broadcast_to(1 + np.arange(text.score.shape[1]), text.score.shape)
    is_there = stage <= np.minimum(text.stages, max_stages)[:, None]
    if over == "last":
        is_there = is_there & (text.accepted[:, None] >= (stage - 1) * k)
    whole = text.accepted[:, None] >= stage * k
    figures = {name: pooled(text, trace.features.index(name), name, over)[is_there] for name in known(trace)}
    return Stages(stage=stage[is_there], score=read(text, over)[is_there], whole=whole[is_there], figures=figures)


@dataclass(frozen=True)
class Pool:
    """How a feature of k rows becomes one number of a stage, and several stages' numbers one of their chain."""

    row: Callable[[np.ndarray], np.ndarray]  # larger is surer
    rows: np.ufunc
    about: str


POOLS = {
    "entropy": Pool(np.negative, np.add, "sum of the rows' entropies, negated"),
    "margin": Pool(np.asarray, np.minimum, "least margin of a row"),
    "confidence": Pool(lambda logit: -np.logaddexp(0, -logit), np.add, "sum of log sigmoid of the rows' logits"),
}


def known(trace: Trace) -> list[str]:
    """Features that a stage's number can be made of."""
    return [name for name in trace.features if name in POOLS]


def pooled(text: Text, index: int, name: str, over: GateSum) -> Table:
    """A feature after each stage, of the last one or of all."""
    pool = POOLS[name]
    with np.errstate(invalid="ignore"):  # nan where a stage, or such a head, is not there
        stages = pool.rows.reduce(pool.row(text.features[..., index].astype(np.float64)), axis=2)
    return pool.rows.accumulate(stages, axis=1) if over == "all" else stages


def auroc(score: Numbers, outcome: Outcomes) -> float | None:
    """How often a true one's score is above a false one's, ties counted half; None without both."""
    true, false = int(outcome.sum()), int((~outcome).sum())
    if not true or not false:
        return None
    _, place, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[place]  # from 1, ties share their mean
    return float((ranks[outcome].sum() - true * (true + 1) / 2) / (true * false))


def roc(score: Numbers, outcome: Outcomes) -> list[tuple[float, float]]:
    """(false, true) positive rate at every threshold, strictest first; empty without both classes."""
    true, false = int(outcome.sum()), int((~outcome).sum())
    if not true or not false:
        return []
    values, place = np.unique(-score, return_inverse=True)
    hits, misses = (np.bincount(place[which], minlength=len(values)).cumsum() for which in (outcome, ~outcome))
    return [(0.0, 0.0), *zip((misses / false).tolist(), (hits / true).tolist(), strict=True)]


@dataclass(frozen=True)
class Point:
    """A threshold's openings."""

    opened: int
    right: int  # of these, accepted whole
    true: int  # accepted whole, opened or not

    @property
    def precision(self) -> float | None:
        """Share of the openings that were right."""
        return self.right / self.opened if self.opened else None

    @property
    def recall(self) -> float | None:
        """Share of what was accepted whole that was opened."""
        return self.right / self.true if self.true else None


def point(score: Numbers, outcome: Outcomes, threshold: float) -> Point:
    """Open where the score is at least the threshold, as a fixed gate does."""
    opens = score >= threshold
    return Point(int(opens.sum()), int((opens & outcome).sum()), int(outcome.sum()))


def point_of(score: Numbers, outcome: Outcomes, count: int) -> Point:
    """Open the `count` largest scores, and what ties with the last of them: scores of other units, opened as often."""
    return point(score, outcome, float(np.sort(score)[-count]) if count else math.inf)


def brier(probability: Numbers, outcome: Outcomes) -> float | None:
    """Mean squared difference of probability and outcome."""
    return float(((probability - outcome) ** 2).mean()) if len(outcome) else None


@dataclass(frozen=True)
class Bin:
    """Predictions from `low` (with) to `high` (without; the last one with)."""

    low: float
    high: float
    count: int
    expected: float  # sum of the predicted probabilities
    true: int

    @property
    def predicted(self) -> float | None:
        """Mean probability; None of an empty bin."""
        return self.expected / self.count if self.count else None

    @property
    def observed(self) -> float | None:
        """Share of true outcomes."""
        return self.true / self.count if self.count else None


def reliability(probability: Numbers, outcome: Outcomes, bins: int = BINS) -> list[Bin]:
    """Equally wide bins of the predicted probability."""
    place = (probability * bins).astype(np.int64).clip(0, bins - 1)
    counts, true = np.bincount(place, minlength=bins), np.bincount(place[outcome], minlength=bins)
    expected = np.bincount(place, weights=probability, minlength=bins)
    rows = zip(counts.tolist(), expected.tolist(), true.tolist(), strict=True)
    return [Bin(i / bins, (i + 1) / bins, *row) for i, row in enumerate(rows)]


def ece(curve: Sequence[Bin]) -> float | None:
    """Expected calibration error: mean over predictions of |predicted - observed| of their bin."""
    total = sum(each.count for each in curve)
    return sum(abs(each.expected - each.true) for each in curve) / total if total else None


@dataclass(frozen=True)
class Openings:
    """What a gate did in decoding, over all rounds."""

    asked: int  # where a further stage could follow
    opened: int
    right: int  # openings after which everything drafted so far was accepted

    def __add__(self, other: "Openings") -> "Openings":
        return Openings(self.asked + other.asked, self.opened + other.opened, self.right + other.right)


def openings(text: Text, rounds: Walk, max_stages: int) -> Openings:
    """A text's. Where a draft is as deep as it can go at its start, the gate's answer changes nothing."""
    most = np.minimum(text.stages[rounds.start], max_stages)
    opened = np.maximum(rounds.stages - 1, 0)
    right = np.minimum(opened, text.accepted[rounds.start] // rounds.stage_len)
    asked = opened + (rounds.stages < most)
    return Openings(int(asked.sum()), int(opened.sum()), int(right.sum()))
