"""Records: strict JSON from which text, trees, acceptance and every gate decision can be read again."""

import json
import math

import pytest

from dloop.gate import ALWAYS_OPEN, FixedGate
from dloop.judge import Match
from dloop.loop import Limits, Session, decode
from dloop.records import (
    acceptance_length,
    dumps,
    looped_tokens,
    number,
    plain,
    prompt_sha256,
    rebuild,
    repetition_share,
    round_record,
    stage_counts,
)
from dloop.sampling import Sampling
from dloop.testing import Decoded, ScriptedDrafter, TableTarget, gather, knowing
from dloop.types import Stage

PROMPT = [3, 1, 4]
VOCAB = 11


def decoded(script, *, threshold: float = -0.5, stop_ids=(), num_tokens: int = 24) -> Decoded:
    target = TableTarget.random(VOCAB)
    session = Session(target, ScriptedDrafter(3, script))
    limits = Limits(max_new_tokens=num_tokens, stop_ids=frozenset(stop_ids), max_stages=4, context=200)
    task = decode(session, 0, PROMPT, gate=FixedGate(threshold), judge=Match(Sampling()), limits=limits)
    return gather([task], session)[0]


def truth(num_tokens: int = 64) -> list[int]:
    target, text = TableTarget.random(VOCAB), list(PROMPT)
    for _ in range(num_tokens):
        text.append(int(target.logits(text).argmax()))
    return text


def bushy(before: list[int], index: int) -> Stage:
    """Two branches: the spine is wrong, the side branch right for two tokens."""
    good = truth()[len(before) :][:2]
    wrong = [(good[0] + 1) % VOCAB, 0]
    return Stage(tokens=[*wrong, *good], parents=[-1, 0, -1, 2], logp=[-0.1] * 4, spine=[0, 1], score=-0.2)


SCRIPTS = {
    "all right": knowing(truth(), 3, 99),
    "half right": knowing(truth(), 3, 5),
    "never right": knowing(truth(), 3, 0),
    "tree": bushy,
}


@pytest.mark.parametrize("threshold", [1.0, -0.5, ALWAYS_OPEN])
@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_text_and_acceptance_are_rebuilt_from_records_alone(script, threshold):
    done = decoded(script, threshold=threshold)
    records = json.loads(dumps([round_record(round) for round in done.rounds]))
    found = rebuild(done.tokens[0], records)
    assert found.tokens == done.tokens == truth()[3:][:24]
    assert found.acceptance_length == acceptance_length(done.rounds)


@pytest.mark.parametrize("stop", [0, 5, 7])
def test_a_text_that_stops_is_rebuilt(stop):
    done = decoded(knowing(truth(), 3, 99), threshold=ALWAYS_OPEN, stop_ids=[stop])
    assert rebuild(done.tokens[0], [round_record(round) for round in done.rounds]).tokens == done.tokens
    assert done.tokens[-1] == stop


def test_a_record_that_contradicts_itself_is_refused():
    done = decoded(knowing(truth(), 3, 5))
    records = [round_record(round) for round in done.rounds]
    records[1] = {**records[1], "emitted": [*records[1]["emitted"][:-1], 99]}
    with pytest.raises(ValueError, match="round 1 emitted"):
        rebuild(done.tokens[0], records)


def test_nodes_are_numbered_through_the_draft():
    for round in decoded(bushy, threshold=ALWAYS_OPEN).rounds:
        record = round_record(round)
        assert [token for stage in record["stages"] for token in stage["tokens"]] == round.drafted
        assert [parent for stage in record["stages"] for parent in stage["parents"]] == round.draft.parents[1:]
        assert record["accepted"] == len(record["path"])


@pytest.mark.parametrize("threshold", [1.0, -0.5])
def test_every_gate_decision_is_recorded(threshold):
    stages = [
        stage for r in decoded(SCRIPTS["half right"], threshold=threshold).rounds for stage in round_record(r)["stages"]
    ]
    for stage in stages:
        if stage["reason"] == "open":
            assert stage["score"] >= stage["gate"]
        if stage["reason"] == "gate":
            assert stage["score"] < stage["gate"]


def test_infinite_gates_are_words():
    (first, *_) = decoded(SCRIPTS["all right"], threshold=ALWAYS_OPEN).rounds
    assert round_record(first)["stages"][0]["gate"] == "-inf"
    assert [number(value) for value in (math.inf, -math.inf, math.nan, None, 0.5)] == ["inf", "-inf", None, None, 0.5]
    assert plain({"a": (1, -math.inf), 2: None}) == {"a": [1, "-inf"], "2": None}
    with pytest.raises(ValueError):
        dumps({"a": math.nan})


def test_measures_of_a_hand_made_text():
    done = decoded(SCRIPTS["half right"], threshold=-0.5)  # 5 of 12 drafted tokens right in every round
    assert acceptance_length(done.rounds) == pytest.approx(6)
    assert stage_counts(done.rounds) == {2: 1, 4: 3}  # the last round covers what is left of 24 tokens
    in_second = sum(min(len(r.emitted), 5) - 3 for r in done.rounds if len(r.emitted) > 3)
    assert looped_tokens(done.rounds) == in_second
    assert math.isnan(acceptance_length([]))


def test_measures_count_by_node_in_trees():
    done = decoded(bushy, threshold=1.0)
    assert looped_tokens(done.rounds) == 0
    assert stage_counts(done.rounds) == {1: len(done.rounds)}


@pytest.mark.parametrize(
    ("tokens", "share"),
    [([], 0.0), ([1, 2, 3], 0.0), (list(range(8)), 0.0), ([0, 1] * 8, 7 / 9), (list(range(16)) * 2, 9 / 25)],
)
def test_repetition_is_the_share_of_8_grams_seen_before(tokens, share):
    assert repetition_share(tokens) == pytest.approx(share)


def test_the_prompt_hash_is_of_the_ids():
    assert prompt_sha256([1, 23]) == "dec1a325b2aab707b526fa2b8a16aba9a9edba3ccb8de9df7b34f28fb85c1d0f"
