"""What a further stage brings, against the log-probability of what is drafted: learned from every finished round.

Sixteen bins of -x, x the summed log-probability of the whole chain, logarithmically spaced; old labels fade; the means
are pooled where they do not fall (pool adjacent violators), and joined by straight lines.
Source: variant B of the self-calibrating gate; pooling as in isotonic regression.
"""

import math
from dataclasses import dataclass, field

from dloop.gate import ALWAYS_OPEN, NEVER_OPENS

BINS = 16
NEAREST, FARTHEST = 0.003, 12.0  # -x of the first and the last bin, in nats
STEP = math.log(FARTHEST / NEAREST) / (BINS - 1)
EDGES = tuple(NEAREST * math.exp(STEP * i) for i in range(BINS))
FORGETTING = 0.999  # a label
FADE_EVERY = 16  # labels: fading all bins at every one would cost more than the rest
FAINT = 1e-9  # weight that fades no further: the mean of a bin that is never seen would end as a ratio of roundings
PRIOR_WEIGHT = 4.0  # labels that the first guess is worth


@dataclass
class Means:
    """Weighted means in bins, old labels fading."""

    weight: list[float]
    total: list[float]
    labels: int = 0

    @classmethod
    def of(cls, guesses: list[float], weight: float) -> "Means":
        """Means that begin with a guess of this weight."""
        return cls([weight] * len(guesses), [weight * guess for guess in guesses])

    def add(self, at: int, value: float, weight: float = 1.0) -> None:
        """One label."""
        self.labels += 1
        if self.labels % FADE_EVERY == 0:
            fading = [FORGETTING**FADE_EVERY if one > FAINT else 1.0 for one in self.weight]
            self.weight = [share * one for share, one in zip(fading, self.weight, strict=True)]
            self.total = [share * one for share, one in zip(fading, self.total, strict=True)]
        self.weight[at] += weight
        self.total[at] += weight * value

    def __getitem__(self, at: int) -> float:
        return self.total[at] / self.weight[at]


@dataclass
class Curve:
    """A falling curve over the score of a chain."""

    means: Means
    _fitted: list[float] | None = field(default=None, repr=False)

    @classmethod
    def guessed(cls, stage_len: int) -> "Curve":
        """Before the first round: calibrated scores, and half a stage where all that is drafted is right."""
        return cls(Means.of([math.exp(-edge) * stage_len / 2 for edge in EDGES], PRIOR_WEIGHT))

    def add(self, score: float, tokens: float, weight: float = 1.0) -> None:
        """One label: after a chain of this score, a further stage brought (or would have brought) so many tokens."""
        self.means.add(round(place(score)), tokens, weight)
        self._fitted = None

    def fitted(self) -> list[float]:
        """The curve at the bins, falling."""
        if self._fitted is None:
            self._fitted = falling(self.means.weight, self.means.total)
        return self._fitted

    def __call__(self, score: float) -> float:
        """Expected tokens after a chain of this score; nan of nan."""
        if score != score:
            return score
        fitted, at = self.fitted(), place(score)
        low = min(int(at), BINS - 2)
        return fitted[low] + (at - low) * (fitted[low + 1] - fitted[low])

    def crossing(self, level: float) -> float:
        """The score from which the curve lies above a level, as a threshold."""
        fitted = self.fitted()
        above = sum(value > level for value in fitted)
        if above == BINS:
            return ALWAYS_OPEN
        if not above:
            return NEVER_OPENS
        high, low = fitted[above - 1], fitted[above]
        return -NEAREST * math.exp(STEP * (above - 1 + (high - level) / (high - low)))


def place(score: float) -> float:
    """Where a score lies among the bins, 0 to 15."""
    return math.log(min(max(-score, NEAREST), FARTHEST) / NEAREST) / STEP


def falling(weight: list[float], total: list[float]) -> list[float]:
    """Weighted means that never rise: neighbours that would are pooled."""
    pools: list[tuple[float, float, int]] = []  # weight, sum, bins
    for one in zip(weight, total, [1] * len(weight), strict=True):
        pools.append(one)
        while len(pools) > 1 and pools[-1][1] * pools[-2][0] > pools[-2][1] * pools[-1][0]:
            (w1, t1, n1), (w2, t2, n2) = pools.pop(), pools.pop()
            pools.append((w1 + w2, t1 + t2, n1 + n2))
    return [sums / heft for heft, sums, count in pools for _ in range(count)]
