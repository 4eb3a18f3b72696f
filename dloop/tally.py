"""What acceptance alone shows of a drafter: that it contributes nothing, or that it is never wrong."""

from collections.abc import Iterable
from dataclasses import dataclass

from dloop.types import Round

ENOUGH_ROUNDS, USELESS_LENGTH = 50, 1.05


@dataclass
class Tally:
    """Rounds of one drafter so far, of any number of texts."""

    rounds: int = 0
    accepted: int = 0
    judged: int = 0  # rounds that are not a text's last
    missed: int = 0  # of these, in which a draft was rejected

    def add(self, rounds: Iterable[Round]) -> "Tally":
        """Count these too. How much of a text's last round would have been accepted is not known everywhere."""
        for round in rounds:
            self.rounds += 1
            self.accepted += round.accepted
            self.judged += round.finish is None
            self.missed += round.finish is None and round.accepted < round.draft.depth
        return self

    def suspicion(self, name: str) -> str | None:
        """What is odd about the drafter of this name, in one line; None: nothing, or too few rounds to tell.

        The target repairs everything that a broken drafter does: only these numbers show it.
        """
        if self.rounds < ENOUGH_ROUNDS:
            return None
        if (tau := self.accepted / self.rounds + 1) < USELESS_LENGTH:
            return (
                f"acceptance length {tau:.2f} after {self.rounds} rounds: {name} contributes nothing; was it trained "
                "for this target? dloop doctor examines the pair"
            )
        if self.judged >= ENOUGH_ROUNDS and not self.missed:
            return (
                f"all drafts of {self.judged} rounds were accepted, which is suspicious: does the text repeat itself, "
                f"or is {name} the target itself? dloop doctor examines the pair"
            )
        return None
