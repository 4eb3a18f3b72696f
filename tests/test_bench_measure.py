"""Figures from hand-written records: every definition has a fixed value."""

import copy
import random

import pytest

from dloop.bench.measure import Response, figures, full_acceptance_rate, interval
from dloop.bench.speedup import speedup


def round_of(accepted: int, drafted: int, *, emitted: int | None = None, bonus: bool = True, stages: int = 1) -> dict:
    """A chain of equal stages; tokens are 1, 2, 3 ... after the anchor, the bonus is 9."""
    size = drafted // stages
    nodes = list(range(1, drafted + 1))
    chosen = nodes[:accepted] + ([9] if bonus else [])
    return {
        "context_len": 5,
        "stages": [
            {
                "tokens": nodes[i * size : (i + 1) * size],
                "parents": [node - 1 for node in nodes[i * size : (i + 1) * size]],
                "logp": [-0.1] * size,
                "score": -0.1 * size,
                "gate": -0.5,
                "reason": "gate" if i == stages - 1 else "open",
            }
            for i in range(stages)
        ],
        "path": nodes[:accepted],
        "accepted": accepted,
        "emitted": chosen if emitted is None else chosen[:emitted],
        "bonus": 9 if bonus else None,
        "draft_s": 0.25,
        "verify_s": 0.5,
    }


def response(rounds: list[dict], *, sample: int = 0, turn: int = 0, finish: str = "length", **changes) -> Response:
    header = {
        "schema": 1,
        "sample": sample,
        "turn": turn,
        "turns": 2,
        "prompt_sha256": "0",
        "num_prompt_tokens": 5,
        "first": 7,
        "seed": 1,
        "finish_reason": finish,
        "exact": False,
        "num_tokens": 1 + sum(len(r["emitted"]) for r in rounds),
        "rounds": len(rounds),
        "prefill_s": 0.1,
        "decode_s": 1.0 * len(rounds),
        "peak_memory_bytes": 1000,
        "error": None,
    }
    return Response({**header, **changes}, rounds)


def failed(sample: int) -> Response:
    return response([], sample=sample, first=None, num_tokens=0, prefill_s=0.0, error="ValueError: too long")


# rounds that produce 3, 1 and 5 tokens; in the last one the third token is an accepted stop
STOPPED = [round_of(2, 4), round_of(0, 4), round_of(4, 4, emitted=3, bonus=False)]
SECOND = [round_of(1, 4), round_of(3, 4, emitted=2)]  # cut by the length limit


def test_all_definitions_of_the_acceptance_length():
    found = figures([response(STOPPED, finish="stop"), response(SECOND, sample=1)])
    assert found["acceptance_length"] == pytest.approx(((3 + 1 + 5) / 3 + (2 + 4) / 2) / 2)
    assert found["acceptance_length_pooled"] == pytest.approx((3 + 1 + 3 + 2 + 2) / 5)
    assert found["acceptance_length_accepted_plus_one"] == pytest.approx(1 + (2 + 0 + 4 + 1 + 3) / 5)
    assert found["acceptance_length_deepspec"] == pytest.approx((3 + 1 + 3 + 2 + 4) / 5)
    assert found["accepted_histogram"] == {"1": 1, "2": 1, "3": 1, "4": 1, "5": 1}


def test_later_turns_are_responses_but_not_for_deepspec():
    found = figures([response([round_of(2, 4)]), response([round_of(0, 4)], turn=1)])
    assert found["acceptance_length"] == 2 and found["acceptance_length_deepspec"] == 3
    assert found["responses"] == 2


def test_responses_weigh_the_same_whatever_their_length():
    long, short = response([round_of(0, 4)] * 9), response([round_of(4, 4)], sample=1)
    assert figures([long, short])["acceptance_length"] == 3


def test_speeds_leave_prefill_out():
    found = figures([response(STOPPED, finish="stop"), response(SECOND, sample=1)])
    assert found["tokens"] == 13
    assert found["tokens_per_s"] == pytest.approx(11 / 5)
    assert found["time_per_output_token_ms"] == pytest.approx(1000 * (3 / 8 + 2 / 5) / 2)
    assert found["time_to_first_token_ms"] == pytest.approx(100)
    assert found["time_share"] == pytest.approx({"draft": 0.25, "verify": 0.5, "other": 0.25})


def test_counts():
    found = figures([response([round_of(5, 8, stages=2), round_of(1, 4)])])
    assert (found["rounds"], found["stages"], found["draft_passes"], found["verified_tokens"]) == (2, 3, 3, 14)
    assert found["stage_counts"] == {"1": 1, "2": 1}
    assert found["full_acceptance_rate"] == {"1": 0.5, "2": 0.0}
    assert found["output_share_looped"] == pytest.approx(1 / 9)


def test_a_branch_is_whole_when_it_reaches_the_last_depth():
    tree = round_of(2, 4)
    tree["stages"][0]["parents"] = [0, 1, 0, 3]  # 1-2 and 3-4
    for path, rate in (([3, 4], 1.0), ([3], 0.0), ([], 0.0)):
        assert full_acceptance_rate([{**tree, "path": path}]) == {"1": rate}


def test_failures_are_counted_apart_and_not_averaged():
    good = response(SECOND, sample=1)
    alone, found = figures([good]), figures([failed(4), good])
    assert found["failures"] == 1
    assert found["failure_messages"] == [{"sample": 4, "turn": 0, "error": "ValueError: too long"}]
    for key in ("acceptance_length", "tokens_per_s", "time_per_output_token_ms", "time_to_first_token_ms", "tokens"):
        assert found[key] == alone[key]


def test_a_text_that_prefill_ended_has_no_acceptance():
    found = figures([response([], finish="stop"), response(SECOND, sample=1)])
    assert found["acceptance_length"] == 3 and found["tokens"] == 6 and found["failures"] == 0


def test_nothing_measured_is_null():
    found = figures([failed(0)])
    for key in ("acceptance_length", "acceptance_length_deepspec", "tokens_per_s", "output_share_looped"):
        assert found[key] is None
    assert found["intervals"]["tokens_per_s"] is None


def test_plain_decoding_has_length_one_and_no_stages():
    plain = {**round_of(0, 0), "stages": []}
    found = figures([response([plain] * 3)])
    assert found["acceptance_length"] == 1 and found["stages"] == 0 and found["full_acceptance_rate"] == {}
    assert found["verified_tokens"] == 3


def test_a_record_that_contradicts_itself_is_refused():
    broken = copy.deepcopy(STOPPED)
    broken[0]["emitted"][0] = 77
    with pytest.raises(ValueError, match="round 0 emitted"):
        figures([response(broken)])


def test_intervals_are_seeded_and_hold_the_mean():
    draws = random.Random(0)
    pairs = [(draws.gauss(3, 1), 1.0) for _ in range(60)]
    low, high = interval(pairs)
    mean = sum(part for part, _ in pairs) / 60
    assert low < mean < high and interval(pairs) == [low, high]
    assert 0.3 < high - low < 0.8  # 2 x 1.96 / sqrt(60) = 0.51
    assert interval(pairs[:1]) is None


def summary(**changes) -> dict:
    base = {
        "draft": "d",
        "dtype": "float32",
        "engine": "fast",
        "hardware": {"gpu": None, "cpu": "C", "threads": 1},
        "data_sha256": "a",
        "template_sha256": None,
        "samples": [1, 2],
        "setting": {"max_new_tokens": 8, "temperature": 0.0, "top_k": 0, "top_p": 1.0},
        "checkpoint_sha256": {"target": "t", "draft": "d"},
        "failure_messages": [],
        "time_per_output_token_ms": 2.0,
    }
    return {**base, **changes}


BASELINE = summary(draft=None, checkpoint_sha256={"target": "t", "draft": None}, time_per_output_token_ms=5.0)


def test_the_speedup_is_the_ratio_of_mean_times():
    assert speedup(summary(), BASELINE) == (2.5, None)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": {"gpu": "G", "cpu": "C", "threads": 1}}, "machine: C, 1 threads there, G here"),
        ({"hardware": {"gpu": None, "cpu": "C", "threads": 2}}, "machine: C, 1 threads there, C, 2 threads here"),
        ({"dtype": "bfloat16"}, "dtype: float32 there, bfloat16 here"),
        ({"engine": "twin"}, "engine: fast there, twin here"),
        ({"samples": [1]}, "choice of samples"),
        ({"data_sha256": "b"}, "set of prompts"),
        ({"setting": {**summary()["setting"], "max_new_tokens": 9}}, "max_new_tokens: 8 there, 9 here"),
        ({"setting": {**summary()["setting"], "temperature": 1.0}}, "temperature: 0.0 there, 1.0 here"),
        ({"checkpoint_sha256": {"target": "u", "draft": "d"}}, "target checkpoint"),
        ({"failure_messages": [{"sample": 1, "turn": 0, "error": "E"}]}, "list of failed samples"),
        ({"time_per_output_token_ms": None}, "no time was measured"),
        ({"draft": None}, "this is the baseline"),
    ],
)
def test_another_baseline_gives_the_reason_and_no_number(changes, reason):
    value, why = speedup(summary(**changes), BASELINE)
    assert value is None and reason in why


def test_without_a_baseline_the_way_out_is_named():
    assert speedup(summary(), None) == (None, "no baseline: measure it with --baseline")
