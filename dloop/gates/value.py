"""What a further stage is worth in tokens, by what finished rounds say: variant B of the self-calibrating gate.

The product of "all that is drafted is right" and "what the next stage then brings" is learned at once, against the raw
log-probability of the whole chain. Every finished round labels (almost) every decision it took, opened or not.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from dloop.gates.curve import BINS, Curve, Means, place
from dloop.types import Draft, Round

PROXY_WEIGHT = 0.3  # of a label that the next round stands in for
START_RATIO, START_WEIGHT = 0.85, 10.0


class Gain(NamedTuple):
    """What a round says of the decision after its stage `stage`, from 1 on."""

    stage: int
    reached: bool  # whether the target followed the draft to the end of this stage
    tokens: int | None  # that the next stage brought; None: it was not drafted, and might have brought some, or
    # nothing was decided: a stop rule had ended the draft


def gains_of(round: Round) -> list[Gain]:
    """Every decision of a round, opened or not: once something is rejected, no further stage would have brought any."""
    path, spine = set(round.path), round.draft.spine
    stops = [record.stop for record in round.stage_records]
    found: list[Gain] = []
    for stage, stop in enumerate(stops, 1):
        reached = max(node for node in spine if node < stop) in path
        brought = None if reached or round.stage_records[stage - 1].reason == "rule" else 0
        if stage < len(stops):
            brought = sum(stop <= node < stops[stage] for node in path)
        found.append(Gain(stage, reached, brought))
    return found


@runtime_checkable
class Value(Protocol):
    """Learns what a further stage brings."""

    @property
    def most(self) -> float:
        """The most it expects of any stage."""
        ...

    def survival(self, draft: Draft) -> float:
        """Log-probability that the last stage's spine is right whole, given what is before it; nan of broken scores."""
        ...

    def expected(self, survivals: list[float]) -> float:
        """Tokens that a further stage would bring after stages of these log-probabilities."""
        ...

    def learn(self, round: Round) -> None:
        """A finished round of at least one stage."""
        ...

    def hindsight(self, round: Round, tokens: int) -> None:
        """A round that was right to its end and drafted no further; the next round's first stage brought so many."""
        ...

    def threshold(self, level: float) -> float | None:
        """The chain score from which more than a level is expected; None where scores alone do not tell."""
        ...


@dataclass
class Proxy:
    """How far the next round's first stage stands in for the stage that was not drafted: a ratio of tokens.

    Both are kept in bins of the score, and compared where both were seen: gates open on other chains than they close
    on.
    """

    drafted: Means = field(default_factory=lambda: Means([0.0] * BINS, [0.0] * BINS))
    instead: Means = field(default_factory=lambda: Means([0.0] * BINS, [0.0] * BINS))

    @property
    def ratio(self) -> float:
        over, under = START_RATIO * START_WEIGHT, START_WEIGHT
        for i in range(BINS):
            both = min(self.drafted.weight[i], self.instead.weight[i])
            if both > 0.5:
                over += both * self.drafted[i]
                under += both * self.instead[i]
        return over / under


@dataclass
class ByScore:
    """Variant B: one falling curve over the chain's summed log-probability."""

    curve: Curve
    proxy: Proxy = field(default_factory=Proxy)

    @property
    def most(self) -> float:
        return self.curve.fitted()[0]

    def survival(self, draft: Draft) -> float:
        return draft.scores[-1]

    def expected(self, survivals: list[float]) -> float:
        return self.curve(sum(survivals))

    def learn(self, round: Round) -> None:
        for stage, reached, tokens in gains_of(round):
            if tokens is not None:
                score = sum(round.scores[:stage])
                self.curve.add(score, tokens)
                if reached:
                    self.proxy.drafted.add(round_place(score), tokens)

    def hindsight(self, round: Round, tokens: int) -> None:
        score = sum(round.scores)
        self.curve.add(score, self.proxy.ratio * tokens, PROXY_WEIGHT)
        self.proxy.instead.add(round_place(score), tokens)

    def threshold(self, level: float) -> float | None:
        return self.curve.crossing(level)


def round_place(score: float) -> int:
    """The bin of a score."""
    return round(place(score))
