"""The facade: its arguments are the contract, wrong ones are refused by name, seeds are recorded, rounds stream."""

import inspect
import math
import re
from dataclasses import fields, replace

import numpy as np
import pytest
import torch

import dloop
from dloop.api import check_loaded
from dloop.batch import generate_many
from dloop.errors import UserError
from dloop.settings import Settings
from dloop.testing import good_drafter, tiny_drafter, tiny_target

PROMPT = [5, 9, 11, 60]
CONTRACT = {  # system.md 3.2
    "max_new_tokens": 256,
    "loop_gate": 1.0,
    "gate_sum": "last",
    "max_stages": 12,
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": None,
    "verify": "auto",
    "stop_token_ids": "model",
    "tree_budget": "host",
    "stage_tree_budget": "host",
    "topk_k": 10,
    "tree_width": 12,
    "tree_beta": -0.2,
    "draft_depth": None,
    "mtp_k": None,
    "exact": "auto",
    "stop_rule": None,
    "gate_head": None,
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=3)


@pytest.fixture(scope="module")
def drafter(target):
    text = dloop.generate_autoregressive(target, PROMPT, 24).tokens
    return good_drafter(target, [PROMPT + text])


@pytest.mark.parametrize("function", [dloop.generate, dloop.stream])
def test_the_arguments_are_the_contract_s(function):
    parameters = inspect.signature(function).parameters
    assert list(parameters)[:3] == ["target", "drafter", "prompt_ids"]
    assert {name: p.default for name, p in list(parameters.items())[3:]} == CONTRACT
    assert list(parameters)[3:] == list(CONTRACT)


def test_plain_decoding_takes_the_same_arguments():
    parameters = list(inspect.signature(dloop.generate_autoregressive).parameters.items())
    assert [name for name, _ in parameters[:2]] == ["target", "prompt_ids"]
    assert all(CONTRACT[name] == p.default for name, p in parameters[2:])
    assert {f.name: f.default for f in fields(Settings)} == CONTRACT


REFUSED = {
    "gate-nan": ({"loop_gate": math.nan}, ["loop_gate=nan", "1.0"]),
    "gate-sum": ({"gate_sum": "mean"}, ["gate_sum='mean'", "last, all"]),
    "no-stages": ({"max_stages": 0}, ["max_stages=0", "at least 1"]),
    "no-tokens": ({"max_new_tokens": 0}, ["max_new_tokens=0", "at least 1"]),
    "temperature": ({"temperature": -1.0}, ["temperature=-1.0", ">= 0"]),
    "temperature-nan": ({"temperature": math.nan}, ["temperature=nan"]),
    "top-k": ({"top_k": -2}, ["top_k=-2", "0 switches it off"]),
    "top-p": ({"top_p": 0.0}, ["top_p=0.0", "1.0 switches it off"]),
    "top-p-above": ({"top_p": 1.5}, ["top_p=1.5"]),
    "seed": ({"seed": -1}, ["seed=-1"]),
    "tree": ({"tree_budget": -5}, ["tree_budget=-5", "'host'", "0 (a chain)"]),
    "tree-large": ({"tree_budget": 4097}, ["tree_budget=4097", "4096"]),
    "tree-yes": ({"tree_budget": True}, ["tree_budget=True"]),
    "stage-tree": ({"stage_tree_budget": 48}, ["stage_tree_budget=48", "dspark"]),
    "tree-text": ({"tree_budget": "big"}, ["tree_budget='big'"]),
    "topk-k": ({"topk_k": 4}, ["topk_k=4", "dspark", "leave it out"]),
    "tree-width": ({"tree_width": 4}, ["tree_width=4", "dspark"]),
    "tree-beta": ({"tree_beta": -0.5}, ["tree_beta=-0.5", "dspark with tree_budget 0"]),
    "tree-beta-above": ({"tree_budget": 5, "tree_beta": 0.5}, ["tree_beta=0.5", "at most 0"]),
    "tree-narrow": ({"tree_budget": 5, "tree_width": 0}, ["tree_width=0", "at least 1"]),
    "tree-candidates": ({"tree_budget": 5, "topk_k": 4}, ["topk_k=4", "dspark", "leave it out"]),
    "tree-reject": (
        {"tree_budget": 5, "temperature": 1.0, "verify": "reject"},
        ["verify='reject'", "tree_budget is 5", "'match'"],
    ),
    "mtp-k": ({"mtp_k": 3}, ["mtp_k=3", "dspark", "leave it out"]),
    "draft-depth": ({"draft_depth": 3}, ["draft_depth=3", "dspark"]),
    "gate-sums": ({"gate_sum": np.array(["last", "all"])}, ["gate_sum=array", "last, all"]),
    "tree-wide": ({"tree_budget": 5, "tree_width": 1025}, ["tree_width=1025", "at most 1024"]),
    "tree-wider": ({"topk_k": 10**9}, ["topk_k=1000000000", "at most 1024"]),
    "tree-budgets": ({"tree_budget": np.array([4, 5])}, ["tree_budget=array([4, 5])", "'host' or a number"]),
    "tree-budget-rows": ({"tree_budget": np.ones((2, 2))}, ["tree_budget=array(", "'host' or a number"]),
    "stage-budget-list": ({"stage_tree_budget": [4]}, ["stage_tree_budget=[4]", "'host' or a number"]),
    "verify-words": ({"verify": np.array(["match", "auto"])}, ["verify=array", "auto, match, reject"]),
    "verify-none": ({"verify": None}, ["verify=None", "auto, match, reject"]),
    "verify": ({"verify": "maybe"}, ["verify='maybe'", "auto, match, reject"]),
    "text-number": ({"temperature": "0.7"}, ["temperature='0.7'"]),
    "fraction": ({"max_stages": 1.5}, ["max_stages=1.5"]),
    "none": ({"top_k": None}, ["top_k=None"]),
    "exact-word": ({"exact": "yes"}, ["exact='yes'"]),
    "exact-one": ({"exact": 1}, ["exact=1"]),
    "stop-number": ({"stop_token_ids": 2}, ["stop_token_ids=2"]),
    "exact": ({"exact": True}, ["exact=True", "'auto'"]),
    "stop-outside": ({"stop_token_ids": [3, 97]}, ["stop_token_ids=[3, 97]", "97"]),
    "stop-negative": ({"stop_token_ids": [-1]}, ["stop_token_ids=[-1]"]),
    "stop-letters": ({"stop_token_ids": ["a"]}, ["stop_token_ids=['a']", "ids below 97"]),
    "stop-fraction": ({"stop_token_ids": [1.5]}, ["stop_token_ids=[1.5]", "ids below 97"]),
    "stop-flag": ({"stop_token_ids": [True]}, ["stop_token_ids=[True]", "ids below 97"]),
    "stop-nothing": ({"stop_token_ids": None}, ["stop_token_ids=None", "ids below 97"]),
    "stop-rows": ({"stop_token_ids": np.ones((2, 2), dtype=int)}, ["stop_token_ids=array(", "ids below 97"]),
    "stop-nested": ({"stop_token_ids": [[3]]}, ["stop_token_ids=[[3]]", "ids below 97"]),
    "numbers": ({"temperature": np.ones((2, 2))}, ["temperature=array(", "must be a number"]),
    "exact-words": ({"exact": np.array(["auto", "auto"])}, ["exact=array", "'auto'"]),
    "stop-text": ({"stop_token_ids": "eos"}, ["stop_token_ids='eos'", "'model'"]),
    "context": ({"max_new_tokens": 253}, ["4 tokens", "max_new_tokens=253", "256 positions", "shorten"]),
}
WRONG_PROMPTS = {
    "bytes": (b"a word", ["prompt_ids is bytes, not token ids", "decode it to a text"]),
    "bytearray": (bytearray(b"a word"), ["prompt_ids is bytearray"]),
    "empty": ([], ["empty"]),
    "empty-tensor": (torch.tensor([], dtype=torch.long), ["empty"]),
    "negative": ([3, -1], ["token -1", "0..96"]),
    "outside": ([3, 97], ["token 97", "0..96"]),
    "two-prompts": (torch.ones(2, 3, dtype=torch.long), ["(2, 3)", "one by one"]),
    "too-long": ([1] * 256, ["256 tokens", "256 positions"]),
}


def one_line(error: pytest.ExceptionInfo[UserError], words: list[str]) -> None:
    message = str(error.value)
    assert "\n" not in message
    assert [word for word in words if word not in message] == [], message


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("case", REFUSED)
def test_wrong_arguments_are_refused_by_name_at_the_call(target, drafter, case):
    arguments, words = REFUSED[case]
    for call in (dloop.generate, dloop.stream):  # a stream refuses before its first round
        with pytest.raises(UserError) as error:
            call(target, drafter, PROMPT, **{"max_new_tokens": 4, **arguments})
        one_line(error, words)


@pytest.mark.parametrize("case", WRONG_PROMPTS)
def test_wrong_prompts_are_refused(target, drafter, case):
    prompt, words = WRONG_PROMPTS[case]
    for call in (
        lambda: dloop.generate(target, drafter, prompt, 4),
        lambda: dloop.stream(target, None, prompt, 4),
        lambda: dloop.generate_autoregressive(target, prompt, 4),
    ):
        with pytest.raises(UserError) as error:
            call()
        one_line(error, words)


def test_the_longest_prompt_that_fits_is_accepted(target, drafter):
    assert len(dloop.generate(target, drafter, [1] * 255, 1).tokens) == 1
    assert len(dloop.generate(target, drafter, [1] * 240, 16, loop_gate=float("-inf")).tokens) == 16


def test_prompts_may_be_sequences_or_tensors_and_are_left_alone(target, drafter):
    expected = dloop.generate(target, drafter, PROMPT, 6).tokens
    given = list(PROMPT)
    for prompt in (given, tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT]), torch.tensor(PROMPT).int()):
        assert dloop.generate(target, drafter, prompt, 6).tokens == expected
    assert given == PROMPT
    assert (
        dloop.generate(target, drafter, range(4), 6).tokens == dloop.generate(target, drafter, [0, 1, 2, 3], 6).tokens
    )


def test_no_drafter_is_plain_decoding(target):
    out = dloop.generate(target, None, PROMPT, 9)
    plain = dloop.generate_autoregressive(target, PROMPT, 9)
    assert out.tokens == plain.tokens
    assert [(r.stages, r.accepted, len(r.emitted)) for r in out.rounds] == [(0, 0, 1)] * 8
    assert plain.acceptance_length == 1.0


def test_a_generation_adds_up(target, drafter):
    out = dloop.generate(target, drafter, PROMPT, 20, loop_gate=-2.0)
    assert out.tokens == [out.first, *(token for r in out.rounds for token in r.emitted)]
    assert len(out.tokens) == 20 and out.finish_reason == "length"
    assert out.acceptance_length == sum(r.accepted + 1 for r in out.rounds) / len(out.rounds)
    position = len(PROMPT)
    for r, after in zip(out.rounds, [*out.rounds[1:], None], strict=True):
        assert r.context_len == position
        assert r.draft_s > 0 and r.verify_s > 0
        position += r.accepted + 1
        assert after is None or after.anchor == r.bonus
    alone = dloop.generate(target, drafter, PROMPT, 1)
    assert (alone.tokens, alone.rounds, alone.finish_reason) == ([out.first], [], "length")
    assert math.isnan(alone.acceptance_length)


def test_stop_tokens_default_to_the_model_s(target, drafter):
    text = dloop.generate(target, drafter, PROMPT, 12).tokens
    stopping = replace(target, stop_ids=frozenset({text[5]}))
    cut = text[: text.index(text[5]) + 1]
    out = dloop.generate(stopping, drafter, PROMPT, 12)
    assert (out.tokens, out.finish_reason) == (cut, "stop")
    assert dloop.generate_autoregressive(stopping, PROMPT, 12).tokens == cut
    assert dloop.generate(stopping, drafter, PROMPT, 12, stop_token_ids=[]).tokens == text
    assert dloop.generate(stopping, drafter, PROMPT, 12, stop_token_ids=[text[0]]).tokens == text[:1]


def test_a_stream_gives_the_first_token_then_rounds_as_they_happen(target, drafter):
    whole = dloop.generate(target, drafter, PROMPT, 16, loop_gate=-2.0)
    stream = dloop.stream(target, drafter, PROMPT, 16, loop_gate=-2.0)
    assert stream.finish_reason is None
    assert stream.first == stream.first == whole.first
    emitted = []
    for r in stream:
        emitted += r.emitted
        assert (stream.finish_reason is None) == (len(emitted) < 15)
        assert stream.first == whole.first
    assert [whole.first, *emitted] == whole.tokens
    assert stream.finish_reason == whole.finish_reason == "length"
    with pytest.raises(StopIteration):
        next(stream)


def test_a_stream_may_be_iterated_without_asking_for_the_first_token(target, drafter):
    stream = dloop.stream(target, drafter, PROMPT, 8)
    rounds = list(stream)
    assert [stream.first, *(token for r in rounds for token in r.emitted)] == dloop.generate(
        target, drafter, PROMPT, 8
    ).tokens
    ended = dloop.stream(target, drafter, PROMPT, 8, stop_token_ids=[stream.first])
    assert list(ended) == [] and ended.finish_reason == "stop" and ended.first == stream.first


def test_streams_do_not_share_memory(target, drafter):
    prompts = (PROMPT, [8, 8, 1], [60])
    streams = [dloop.stream(target, drafter, prompt, 12, loop_gate=-2.0) for prompt in prompts]
    texts = [[stream.first] for stream in streams]
    while any([texts[i].extend(r.emitted) or True for i, s in enumerate(streams) if (r := next(s, None))]):
        pass
    assert texts == [dloop.generate_autoregressive(target, prompt, 12).tokens for prompt in prompts]


def test_seeds_are_recorded_and_repeat_the_run(target, drafter):
    assert dloop.generate(target, drafter, PROMPT, 4).seed is None  # greedy draws nothing
    assert dloop.generate(target, drafter, PROMPT, 4, temperature=1.0, seed=3).seed == 3
    assert dloop.stream(target, drafter, PROMPT, 4, temperature=1.0, seed=3).seed == 3
    fresh = [dloop.generate(target, drafter, PROMPT, 12, temperature=1.0, verify="match") for _ in range(3)]
    assert len({out.seed for out in fresh}) == 3
    assert len({tuple(out.tokens) for out in fresh}) > 1
    for out in fresh:
        assert out.seed is not None
        assert dloop.generate_autoregressive(target, PROMPT, 12, temperature=1.0, seed=out.seed).tokens == out.tokens


def test_bit_identical_mode_is_recorded_as_off(target, drafter):
    for exact in ("auto", False):
        assert dloop.generate(target, drafter, PROMPT, 4, exact=exact).exact is False


def test_one_set_of_arguments_drives_both(target, drafter):
    both = {"max_new_tokens": 12, "loop_gate": -1.0, "max_stages": 3, "temperature": 0.8, "seed": 4, "verify": "match"}
    assert (
        dloop.generate(target, drafter, PROMPT, **both).tokens
        == dloop.generate_autoregressive(target, PROMPT, **both).tokens
    )


@pytest.mark.usefixtures("unchecked")
def test_plain_decoding_checks_the_length_of_a_stage_and_drafts_nothing(target):
    plain = dloop.generate_autoregressive(target, PROMPT, 8).tokens
    for name in ("draft_depth", "mtp_k"):
        for value in (1, np.int64(3), 1024):
            given = {name: value}
            assert dloop.generate_autoregressive(target, PROMPT, 8, **given).tokens == plain
            assert dloop.generate(target, None, PROMPT, 8, **given).tokens == plain
            many = generate_many(target, None, [PROMPT], Settings(max_new_tokens=8, **given))
            assert [done.tokens for done in many] == [plain]
        for value in (0, -1, 1025, "3", 1.5, True):
            with pytest.raises(UserError, match=f"{name}={value!r} must be"):
                dloop.generate_autoregressive(target, PROMPT, 8, **{name: value})


@pytest.mark.usefixtures("unchecked")
def test_stop_tokens_may_be_any_list_of_whole_numbers(target, drafter):
    tokens = dloop.generate(target, drafter, PROMPT, 12).tokens
    stop = tokens[5]
    for given in ([stop], {stop}, (np.int64(stop),), np.array([stop]), torch.tensor([stop])):
        out = dloop.generate(target, drafter, PROMPT, 12, stop_token_ids=given)
        assert out.tokens == tokens[: tokens.index(stop) + 1] and out.finish_reason == "stop"


@pytest.mark.usefixtures("unchecked")
def test_numpy_s_numbers_are_numbers(target, drafter):
    plain = dloop.generate(target, drafter, PROMPT, 8, temperature=1.0, seed=3)
    again = dloop.generate(target, drafter, np.array(PROMPT), 8, temperature=np.float64(1.0), seed=np.int64(3))
    assert plain.tokens == again.tokens
    assert dloop.generate(target, drafter, PROMPT, 8, tree_budget=np.array(0)).tokens


def test_beams_wider_than_the_vocabulary_are_as_wide_as_it(target):
    """The widest that may be asked for is drafted: 97 tokens are all there are."""
    plain = dloop.generate_autoregressive(target, PROMPT, 6).tokens
    for family, name in (("dflash", "topk_k"), ("eagle3", "topk_k"), ("dspark", "tree_width")):
        wide = tiny_drafter(target, family=family)
        assert dloop.generate(target, wide, PROMPT, 6, tree_budget=8, **{name: 1024}).tokens == plain


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("prompt", [None, 3, [1.5], torch.zeros(1, 2, 2, dtype=torch.int64)], ids=str)
def test_what_is_no_prompt_is_refused(target, drafter, prompt):
    with pytest.raises(UserError, match="prompt_ids"):
        dloop.generate(target, drafter, prompt, 4)


def test_a_drafter_for_another_target_is_refused(drafter):
    with pytest.raises(UserError, match="layers"):
        dloop.generate(tiny_target("qwen3", num_layers=6), drafter, PROMPT, 4)
    with pytest.raises(UserError, match="vocabulary"):
        dloop.generate(tiny_target("qwen3", vocab_size=50), drafter, PROMPT, 4)


@pytest.mark.parametrize(
    ("target", "drafter", "settings", "message"),
    [
        ("smollm2", None, Settings(), "target='smollm2' must be a target that is loaded"),
        (tiny_target(), "demo", Settings(), "drafter='demo' must be a drafter that is loaded"),
        (tiny_target(), None, {"max_new_tokens": 3}, "settings={'max_new_tokens': 3} must be Settings"),
    ],
)
def test_a_name_is_no_model(target, drafter, settings, message):
    with pytest.raises(UserError, match=re.escape(message)):
        check_loaded(target, drafter, settings)
