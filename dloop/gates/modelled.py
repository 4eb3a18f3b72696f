"""What a further stage is worth, in two factors: is all that is drafted right, and what does the next stage bring then.

Each drafted token's log-odds are calibrated by a logistic model that learns online (one slope, an offset a position,
apart for first and further stages); their product is the chain's survival. What a stage brings after a right chain is
kept in bins of the last stage's calibrated log-survival.

A drafted token's own log-probability is read. Greedy drafts are the likeliest tokens; at a temperature they are drawn,
and the calibration, kept apart by temperature, is that of drawn tokens.
Source: the estimators of the self-calibrating gate; damped Newton on the arrowhead of slope and offsets.
"""

import math
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from dloop.gates.curve import Means
from dloop.gates.value import Proxy, gains_of, round_place
from dloop.types import Draft, Round

FARTHEST_ODDS = 12.0
REFIT_EVERY = 50  # rounds
KEPT = 1500  # tokens that a fit reads
PULL = 12.0  # how firmly slope and offsets are held to calibrated scores
NEWTON_STEPS = 4
BINS, PRIOR_WEIGHT = 8, 6.0


class Token(NamedTuple):
    """One drafted token."""

    odds: float  # the drafter's log-odds
    place: int  # position in its stage; further stages stand after the first one's positions
    right: bool


@dataclass
class Calibration:
    """Log-odds that a drafted token is right, where all before it are: slope * odds + offset of its place."""

    slope: float
    offsets: list[float]  # 2 k
    tokens: deque[Token] = field(default_factory=lambda: deque[Token](maxlen=KEPT), repr=False)

    def logp(self, token: Token) -> float:
        """Calibrated log-probability."""
        odds = self.slope * token.odds + self.offsets[token.place]
        return min(odds, 0.0) - math.log1p(math.exp(-abs(odds)))

    def fit(self) -> None:
        """Newton's method on the tokens that are kept, at least one."""
        odds, places, right = (np.array(column) for column in zip(*self.tokens, strict=True))
        slope, offsets = self.slope, np.array(self.offsets)
        for _ in range(NEWTON_STEPS):
            p = 1 / (1 + np.exp(-(slope * odds + offsets[places])))
            wrong, bend = right - p, p * (1 - p)
            each = [np.bincount(places, values, len(offsets)) for values in (wrong, bend, bend * odds)]
            pull, corner, arm = each[0] - PULL * offsets, each[1] + PULL, each[2]
            tip = wrong @ odds - PULL * (slope - 1) - (arm / corner) @ pull
            step = tip / ((bend * odds) @ odds + PULL - (arm / corner) @ arm)
            slope += float(np.clip(step, -1, 1))
            offsets += ((pull - arm * step) / corner).clip(-1, 1)
        self.slope, self.offsets = slope, offsets.tolist()


@dataclass
class ByModel:
    """The full estimator."""

    calibration: Calibration
    brings: list[Means]  # tokens after a right chain whose last stage was the first, or a further one
    proxy: Proxy = field(default_factory=Proxy)
    rounds: int = 0

    @classmethod
    def guessed(cls, stage_len: int) -> "ByModel":
        """Before the first round: calibrated scores; a stage brings half its tokens."""
        brings = [Means.of([stage_len / 2] * BINS, PRIOR_WEIGHT) for _ in range(2)]
        return cls(Calibration(1.0, [0.0] * (2 * stage_len)), brings)

    @property
    def most(self) -> float:
        return max(means[i] for means in self.brings for i in range(BINS))

    def survival(self, draft: Draft) -> float:
        if draft.scores[-1] != draft.scores[-1]:
            return math.nan
        return sum(self.calibration.logp(token) for token in self.tokens(draft, draft.num_stages - 1))

    def expected(self, survivals: list[float]) -> float:
        total = sum(survivals)
        return total if total != total else math.exp(total) * self.brings[len(survivals) > 1][bin_of(survivals[-1])]

    def tokens(self, draft: Draft, stage: int, path: frozenset[int] = frozenset()) -> list[Token]:
        """The spine's tokens of one stage, from 0 on, that are held against what the target followed."""
        start, stop = draft.stops[stage - 1] if stage else 1, draft.stops[stage]
        node, nodes = draft.tip, list[int]()
        while node >= start:
            if node < stop:
                nodes.append(node)
            node = draft.parents[node]
        most = len(self.calibration.offsets) // 2
        places = ((most if stage else 0) + min(index, most - 1) for index in range(len(nodes)))
        return [Token(log_odds(draft.logp[n]), place, n in path) for n, place in zip(nodes[::-1], places, strict=True)]

    def learn(self, round: Round) -> None:
        path = frozenset(round.path)
        for stage, reached, tokens in gains_of(round):
            drafted = self.tokens(round.draft, stage - 1, path)
            wrong = next((index for index, token in enumerate(drafted) if not token.right), len(drafted))
            self.calibration.tokens.extend(drafted[: wrong + 1])  # after a wrong one nothing is known
            if not reached:
                break
            if tokens is not None:
                self._add(stage, sum(map(self.calibration.logp, drafted)), tokens)
                self.proxy.drafted.add(round_place(sum(round.scores[:stage])), tokens)
        self.rounds += 1
        if self.rounds % REFIT_EVERY == 0 and self.calibration.tokens:  # rules may leave none
            self.calibration.fit()

    def _add(self, stage: int, survival: float, tokens: float) -> None:
        self.brings[stage > 1].add(bin_of(survival), tokens)

    def hindsight(self, round: Round, tokens: int) -> None:
        drafted = self.tokens(round.draft, round.stages - 1)
        self._add(round.stages, sum(map(self.calibration.logp, drafted)), self.proxy.ratio * tokens)
        self.proxy.instead.add(round_place(sum(round.scores)), tokens)

    def threshold(self, level: float) -> float | None:
        return None


def bin_of(survival: float) -> int:
    """The bin of a stage's calibrated log-survival: two of a score's."""
    return min(round_place(survival) // 2, BINS - 1)


def log_odds(logp: float) -> float:
    """log(p / (1 - p)), within what counts."""
    if logp > -math.exp(-FARTHEST_ODDS):
        return FARTHEST_ODDS
    return max(logp - math.log(-math.expm1(logp)), -FARTHEST_ODDS)
