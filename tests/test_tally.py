"""What acceptance alone shows: only a drafter that is no help at all, or never wrong, is told."""

import pytest

from dloop.gate import FixedGate
from dloop.judge import Match
from dloop.loop import Limits, Session, decode
from dloop.sampling import Sampling
from dloop.tally import ENOUGH_ROUNDS, Tally
from dloop.testing import ScriptedDrafter, TableTarget, gather, knowing

PROMPT, LENGTH, STAGE = [1, 2], 400, 3


def rounds_of(num_right: int):
    """Rounds of a drafter, the first so many of whose tokens are right each time."""
    target = TableTarget.random(9, seed=3)
    text = list(PROMPT)
    while len(text) < LENGTH + len(PROMPT) + 9:
        text.append(int(target.logits(text).argmax()))
    drafter = ScriptedDrafter(STAGE, knowing(text, STAGE, num_right))
    limits = Limits(max_new_tokens=LENGTH, max_stages=1, context=1000)
    task = decode(Session(target, drafter), 0, PROMPT, gate=FixedGate(), judge=Match(Sampling()), limits=limits)
    return gather([task], Session(target, drafter))[0].rounds


@pytest.mark.parametrize(
    ("num_right", "said"), [(0, "contributes nothing"), (1, None), (2, None), (3, "is suspicious")], ids=str
)
def test_only_extremes_are_told_and_the_doctor_is_named(num_right, said):
    rounds = rounds_of(num_right)[:ENOUGH_ROUNDS]
    assert len(rounds) == ENOUGH_ROUNDS
    assert Tally().add(rounds[:-1]).suspicion("a drafter") is None  # too few to tell
    line = Tally().add(rounds).suspicion("a drafter")
    assert (line is None) == (said is None)
    if said:
        assert said in line and "a drafter" in line and "dloop doctor" in line and "\n" not in line
    assert Tally().add(rounds).accepted == num_right * ENOUGH_ROUNDS
