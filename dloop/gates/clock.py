"""What stages and verifications take on this machine, learned from the rounds; apart for one sequence and for many.

A step is one verification: of one sequence, or of all that are alive and travel together. Its draft took as long as the
one that drafted most, its verification what is left of the longest round.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from dloop.gates.line import Line
from dloop.types import Round

STAGE_SHARE, ROW_SHARE = 1.0, 0.002  # first guesses: a later stage is as long as the first, a row adds 0.2 %
FORGETTING = 0.9995  # of what a step is like in the mean
TRUSTED = 2  # steps after which times are used
BORROWED_STEPS = 4  # that what is known of another number of sequences counts for


@dataclass
class Times:
    """Seconds with so many sequences alive, and what a step is like: fading sums."""

    draft: Line = field(default_factory=lambda: Line(STAGE_SHARE))  # over stages after the first
    verify: Line = field(default_factory=lambda: Line(ROW_SHARE))  # over rows of stages after the first
    steps: float = 0.0
    tokens: float = 0.0  # of one sequence
    stages: float = 0.0  # after the first, of the sequence that drafts most
    rows: float = 0.0  # of stages after the first, of all sequences

    @property
    def tokens_per_step(self) -> float:
        """Of one sequence."""
        return self.tokens / self.steps

    @property
    def rate(self) -> float:
        """Tokens per second of one sequence, at what things take now."""
        return self.tokens_per_step / (self.draft(self.stages / self.steps) + self.verify(self.rows / self.steps))

    def borrowed(self) -> "Times":
        """A first guess for another number of sequences: the same, and not to be relied on."""
        fading = BORROWED_STEPS / max(self.steps, BORROWED_STEPS)
        sums = (fading * one for one in (self.steps, self.tokens, self.stages, self.rows))
        return Times(self.draft.unsure(), self.verify.unsure(), *sums)

    def add(self, rounds: Sequence[Round]) -> None:
        """One step: at least one round, of a stage or more each."""
        stages = max(round.stages for round in rounds) - 1
        rows = sum(len(round.draft.tokens) - round.stage_records[0].stop for round in rounds)
        draft = max(round.draft_s for round in rounds)
        self.draft.add(stages, draft)
        self.verify.add(rows, max(round.draft_s + round.verify_s for round in rounds) - draft)
        self.steps = FORGETTING * self.steps + 1
        self.tokens = FORGETTING * self.tokens + sum(len(round.emitted) for round in rounds) / len(rounds)
        self.stages = FORGETTING * self.stages + stages
        self.rows = FORGETTING * self.rows + rows


@dataclass
class Clock:
    """Times by the number of live sequences: 1, 2-3, 4-7, 8-15 ..., keyed 1, 2, 3, 4."""

    times: dict[int, Times] = field(default_factory=dict[int, Times])

    def add(self, rounds: Sequence[Round]) -> None:
        key, nearest = len(rounds).bit_length(), self._nearest(len(rounds))
        if key not in self.times:
            self.times[key] = Times() if nearest is None else nearest.borrowed()
        self.times[key].add(rounds)

    def _nearest(self, live: int) -> Times | None:
        nearest = min(self.times, key=lambda key: abs(key - live.bit_length()), default=None)
        return None if nearest is None else self.times[nearest]

    def at(self, live: int) -> Times | None:
        """The times with so many alive, or the nearest number; None while none are known."""
        found = self._nearest(live)
        return found if found and min(found.draft.seen, found.verify.seen) >= TRUSTED else None
