"""What a further stage is worth, in two factors: is all that is drafted right, and what does the next stage bring then.

Each drafted token's log-odds are calibrated by a logistic model that learns online (one slope, an offset a position,
apart for first and further stages); their product is the chain's survival. What a stage brings after a right chain is
kept in bins of the last segment's calibrated log-survival.
Source: the estimators of the self-calibrating gate; damped Newton on an arrowhead of slope and offsets.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dloop.gates.curve import place
from dloop.gates.value import PROXY_WEIGHT, Proxy, gains_of
from dloop.types import Draft, Round

FARTHEST_ODDS = 12.0
REFIT_EVERY = 50  # rounds
KEPT = 2000  # tokens that a fit reads
PULL = 4.0  # labels by which slope and offsets are held to calibrated scores
NEWTON_STEPS = 4
BINS, FORGETTING, PRIOR_WEIGHT = 8, 0.998, 2.0


class Token(NamedTuple):
    """One drafted token whose prefix was right."""

    odds: float  # the drafter's log-odds
    place: int  # position in its stage; further stages follow after the first one's positions
    right: bool


@dataclass
class Survival:
    """Log-odds that a drafted token is right: slope * odds + offset of its place."""

    stage_len: int
    slope: float = 1.0
    offsets: list[float] = field(default_factory=list[float])  # 2 k
    tokens: deque[Token] = field(default_factory=lambda: deque[Token](maxlen=KEPT), repr=False)

    def __post_init__(self) -> None:
        self.offsets = self.offsets or [0.0] * (2 * self.stage_len)

    def place(self, stage: int, index: int) -> int:
        """Of the token `index` of stage `stage`, from 0 on."""
        return min(index, self.stage_len - 1) + (self.stage_len if stage else 0)

    def logp(self, odds: float, place: int) -> float:
        """Calibrated log-probability."""
        return -softplus(-(self.slope * odds + self.offsets[place]))

    def fit(self) -> None:
        """Newton's method on the tokens that are kept."""
        odds = np.array([token.odds for token in self.tokens])
        places = np.array([token.place for token in self.tokens])
        right = np.array([token.right for token in self.tokens], float)
        rows = np.zeros((len(odds), 1 + len(self.offsets)))
        rows[:, 0], rows[np.arange(len(odds)), 1 + places] = odds, 1.0
        start = np.array([1.0] + [0.0] * len(self.offsets))
        found = np.array([self.slope, *self.offsets])
        for _ in range(NEWTON_STEPS):
            p = 1 / (1 + np.exp(-(rows @ found)))
            slope = rows.T @ (right - p) - PULL * (found - start)
            bend = (rows * (p * (1 - p))[:, None]).T @ rows + PULL * np.eye(len(found))
            found = found + np.linalg.solve(bend, slope).clip(-1.0, 1.0)
        self.slope, self.offsets = float(found[0]), found[1:].tolist()


@dataclass
class ByModel:
    """The full estimator."""

    survival: Survival
    counts: list[list[float]]  # weight of each bin, for first and further stages
    totals: list[list[float]]
    proxy: Proxy = field(default_factory=Proxy)
    rounds: int = 0

    @classmethod
    def guessed(cls, stage_len: int) -> "ByModel":
        """Before the first round: calibrated scores; a stage brings half its tokens."""
        guess = [PRIOR_WEIGHT * stage_len / 2] * BINS
        return cls(Survival(stage_len), [[PRIOR_WEIGHT] * BINS for _ in range(2)], [list(guess), list(guess)])

    @property
    def most(self) -> float:
        return max(
            t / n
            for count, total in zip(self.counts, self.totals, strict=True)
            for n, t in zip(count, total, strict=True)
        )

    def expected(self, draft: Draft) -> float:
        if any(score != score for score in draft.scores):
            return math.nan
        segments = self.segments(draft)
        return math.exp(sum(segments)) * self.brings(len(segments) > 1, segments[-1])

    def brings(self, further: bool, segment: float) -> float:
        at = bin_of(segment)
        return self.totals[further][at] / self.counts[further][at]

    def segments(self, draft: Draft) -> list[float]:
        """Calibrated log-survival of every stage's spine."""
        return [
            sum(self.survival.logp(token.odds, token.place) for token in stage)
            for stage in self.tokens_of(draft, frozenset())
        ]

    def tokens_of(self, draft: Draft, path: frozenset[int]) -> list[list[Token]]:
        """The spine's tokens, stage by stage."""
        found: list[list[Token]] = [[] for _ in draft.stops]
        stage = 0
        for node in draft.spine[1:]:
            while node >= draft.stops[stage]:
                stage += 1
            place = self.survival.place(stage, len(found[stage]))
            found[stage].append(Token(log_odds(draft.logp[node]), place, node in path))
        return found

    def learn(self, round: Round) -> None:
        stages = self.tokens_of(round.draft, frozenset(round.path))
        for token in (token for stage in stages for token in stage):
            self.survival.tokens.append(token)
            if not token.right:
                break
        segments = self.segments(round.draft)
        for stage, reached, tokens in gains_of(round):
            if reached and tokens is not None:
                self.add(stage > 1, segments[stage - 1], tokens, 1.0)
                self.proxy.add(self.proxy.drafted, sum(round.scores[:stage]), tokens)
        self.rounds += 1
        if self.rounds % REFIT_EVERY == 0:
            self.survival.fit()

    def add(self, further: bool, segment: float, tokens: float, weight: float) -> None:
        counts, totals, at = self.counts[further], self.totals[further], bin_of(segment)
        for i in range(BINS):
            counts[i] *= FORGETTING
            totals[i] *= FORGETTING
        counts[at] += weight
        totals[at] += weight * tokens

    def hindsight(self, round: Round, tokens: int) -> None:
        self.add(round.stages > 1, self.segments(round.draft)[-1], self.proxy.ratio * tokens, PROXY_WEIGHT)
        self.proxy.add(self.proxy.instead, sum(round.scores), tokens)

    def threshold(self, level: float) -> float | None:
        return None


def bin_of(segment: float) -> int:
    """The bin of a calibrated log-survival: two of the score's."""
    return min(int(place(segment) / 2), BINS - 1)


def softplus(x: float) -> float:
    """log(1 + e^x)."""
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def log_odds(logp: float) -> float:
    """log(p / (1 - p)), within what counts."""
    if logp >= -1e-6:
        return FARTHEST_ODDS
    return min(max(logp - math.log(-math.expm1(logp)), -FARTHEST_ODDS), FARTHEST_ODDS)
