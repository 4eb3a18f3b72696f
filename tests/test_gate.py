"""Does another stage follow? The paper's gate, its edges, and its variants."""

import math

import pytest

from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS, FixedGate, Gate
from dloop.testing import chain
from dloop.types import Draft


def scored(*scores: float) -> Draft:
    draft = Draft.rooted(1, 10)
    for score in scores:
        draft = draft.graft(chain([1, 2], score))
    return draft


@pytest.mark.parametrize(
    ("threshold", "scores", "opens"),
    [
        (-0.5, (-0.4,), True),
        (-0.5, (-0.5,), True),  # at least, not more than
        (-0.5, (math.nextafter(-0.5, -1),), False),
        (-0.5, (-9.0, -0.1), True),  # the last stage alone decides
        (-0.5, (-0.1, -9.0), False),
        (0.0, (0.0,), True),
        (NEVER_OPENS, (0.0,), False),  # log-probabilities are at most 0
        (ALWAYS_OPEN, (-1e30,), True),
        (ALWAYS_OPEN, (-math.inf,), True),
        (ALWAYS_OPEN, (math.nan,), False),  # a broken drafter does not loop
    ],
)
def test_the_last_stage_s_score_against_the_threshold(threshold, scores, opens):
    gate = FixedGate(threshold)
    assert gate.opens(scored(*scores)) is opens
    assert gate.threshold == threshold


@pytest.mark.parametrize(
    ("threshold", "scores", "opens"),
    [
        (-1.0, (-0.5, -0.4), True),
        (-1.0, (-0.5, -0.6), False),
        (-1.0, (-0.75, -0.25), True),
        (-1.0, (-1.5, -0.0), False),
    ],
)
def test_the_sum_over_the_whole_chain(threshold, scores, opens):
    assert FixedGate(threshold, over="all").opens(scored(*scores)) is opens


def test_the_default_never_opens():
    assert FixedGate().threshold == NEVER_OPENS == 1.0
    assert not FixedGate().opens(scored(0.0))


def test_a_fixed_gate_is_a_gate():
    assert isinstance(FixedGate(), Gate)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [((math.nan,), "loop_gate=nan"), ((-0.5, "first"), "gate_sum='first' is not known; choose 'last' or 'all'")],
)
@pytest.mark.usefixtures("unchecked")
def test_wrong_gates_are_refused(arguments, named):
    with pytest.raises(UserError, match=named):
        FixedGate(*arguments)
