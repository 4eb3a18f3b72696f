"""What stages and verifications take on this machine, learned from the rounds; apart for one sequence and for many.

A step is one verification: of one sequence, or of all that are alive and travel together. Its draft took as long as the
one that drafted most, its verification what is left of the longest round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dloop.gates.line import Line
from dloop.types import Round

STAGE_SHARE, ROW_SHARE = 1.0, 0.002  # first guesses: a later stage is as long as the first, a row adds 0.2 %
FORGETTING = 0.9995  # of tokens and seconds, a step
TRUSTED = 2  # steps after which times are used
BORROWED_STEPS = 4  # that the rate with another number of sequences counts for


@dataclass
class Times:
    """Seconds, with so many sequences alive."""

    draft: Line = field(default_factory=lambda: Line(STAGE_SHARE))  # over stages after the first
    verify: Line = field(default_factory=lambda: Line(ROW_SHARE))  # over rows of stages after the first
    tokens: float = 0.0  # of one sequence, fading
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second of one sequence."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def borrowed(self) -> "Times":
        """A first guess for another number of sequences: the same, and not to be relied on."""
        fading = BORROWED_STEPS / max(self.draft.seen, BORROWED_STEPS)
        return Times(self.draft.unsure(), self.verify.unsure(), fading * self.tokens, fading * self.seconds)

    def add(self, rounds: Sequence[Round]) -> None:
        """One step, at least one round of a stage or more."""
        draft = max(round.draft_s for round in rounds)
        whole = max(round.draft_s + round.verify_s for round in rounds)
        self.draft.add(max(round.stages for round in rounds) - 1, draft)
        self.verify.add(sum(rows_of_later(round) for round in rounds), whole - draft)
        emitted = sum(len(round.emitted) for round in rounds) / len(rounds)
        self.tokens = FORGETTING * self.tokens + emitted
        self.seconds = FORGETTING * self.seconds + self.tamed(rounds, whole)

    def tamed(self, rounds: Sequence[Round], whole: float) -> float:
        """A step's seconds, of a wild one what the lines expect: a pause is no price of tokens."""
        expected = self.draft(max(round.stages for round in rounds) - 1)
        expected += self.verify(sum(rows_of_later(round) for round in rounds))
        return min(whole, 2 * expected)


@dataclass
class Clock:
    """Times by the number of live sequences: 1, 2-3, 4-7, 8-15 ..., keyed 1, 2, 3, 4."""

    times: dict[int, Times] = field(default_factory=dict[int, Times])

    def add(self, rounds: Sequence[Round]) -> None:
        key = len(rounds).bit_length()
        if key not in self.times:
            nearest = min(self.times, key=lambda other: abs(other - key), default=None)
            self.times[key] = Times() if nearest is None else self.times[nearest].borrowed()
        self.times[key].add(rounds)

    def at(self, live: int) -> Times | None:
        """The times with so many alive; None while they are not known well."""
        found = self.times.get(live.bit_length())
        return found if found is not None and found.draft.seen >= TRUSTED else None


def rows_of_later(round: Round) -> int:
    """Rows that a round's further stages add to its verification."""
    return len(round.draft.tokens) - round.stage_records[0].stop
