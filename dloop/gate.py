"""Does another drafting stage follow? The one decision that DLoop adds to speculative decoding."""

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from dloop.errors import UserError
from dloop.types import Draft, Round

GateSum = Literal["last", "all"]
AutoName = Literal["auto", "auto:full"]  # gates that calibrate themselves

NEVER_OPENS = 1.0  # log-probabilities are at most 0, so this threshold is the host exactly as released
ALWAYS_OPEN = float("-inf")


@runtime_checkable
class Gate(Protocol):
    """One gate a sequence: it may remember what it observed."""

    @property
    def threshold(self) -> float | None:
        """The value in force, for the records; None if the gate has none."""
        ...

    def opens(self, draft: Draft) -> bool:
        """Whether one more stage is drafted before verification. Reads all stages drafted so far."""
        ...

    def observe(self, round: Round) -> None:
        """Learn from a finished round."""
        ...


@runtime_checkable
class LearnsMeanwhile(Protocol):
    """A gate with work of its own to do between its last answer and the next round's end."""

    def learn_meanwhile(self) -> None:
        """Do it now, as long as a device verifies. `observe` does what was not done."""
        ...


@dataclass(frozen=True)
class FixedGate:
    """The paper's gate: the stage's summed top-1 log-probability is at least `threshold`.

    `over="all"` sums the whole chain instead of the last stage.
    Source: paper, step (2); published flag --loop-gate.
    """

    threshold: float = NEVER_OPENS
    over: GateSum = "last"

    def __post_init__(self) -> None:
        if self.threshold != self.threshold:
            raise UserError("loop_gate=nan is not a threshold; give a number such as -0.5, or 1.0 for the host alone")
        if self.over not in ("last", "all"):
            raise UserError(f"gate_sum={self.over!r} is not known; choose 'last' or 'all'")

    def opens(self, draft: Draft) -> bool:
        score = draft.scores[-1] if self.over == "last" else sum(draft.scores)
        return score >= self.threshold

    def observe(self, round: Round) -> None:
        """A fixed gate does not learn."""
