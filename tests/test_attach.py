"""`dloop.attach`: transformers' own `generate` gives the same ids with a drafter, or says that it decodes plainly."""

import copy
import gc
import io
import itertools
import logging
import pickle
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TextStreamer,
    WatermarkingConfig,
)

import dloop
from dloop.dropin.adopt import changes
from dloop.dropin.attached import check_kinds
from dloop.dropin.walk import Keyed
from dloop.errors import UserError
from dloop.fast.target import FastTarget
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS
from dloop.testing import CHAIN_KINDS, WINDOW_KINDS, good_drafter, taught_drafter, tiny_drafter, tiny_target

GATES = (NEVER_OPENS, -2.0, ALWAYS_OPEN)
PROMPT = [5, 9, 11, 60]
BATCH = [[0, 0, *PROMPT], [3, 40, 8, 17, 2, 91], [0, 0, 0, 0, 0, 12]]
TEXT = [  # what the tiny target says after PROMPT, asserted below: cases name places in it
    *dloop.generate_autoregressive(tiny_target(num_layers=3), PROMPT, 32).tokens
]
LETTERS = [chr(33 + index) for index in range(94)] + list("éüß")


class Presence(LogitsProcessor):
    """Each new token that was said already costs the same."""

    def __call__(self, input_ids, scores):
        said = torch.unique(input_ids[0, len(PROMPT) :])
        return scores.index_add(1, said, torch.full((1, len(said)), -1.5))


class Frequency(LogitsProcessor):
    """Each new token costs as much as it was said often."""

    def __call__(self, input_ids, scores):
        return scores - 0.7 * torch.bincount(input_ids[0, len(PROMPT) :], minlength=scores.shape[1])


class Counting(LogitsProcessor):
    """State of its own, moved on by every call: what is asked twice, or for a rejected draft, changes the text."""

    def __init__(self):
        self.random = random.Random(0)
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids.tolist())
        scores[:, self.random.randrange(97)] += 5.0  # in place, as some do
        return scores


class Brackets(LogitsProcessor):
    """A grammar: a letter, then two of an allowed set that the letter chooses, then a letter again."""

    def __init__(self):
        self.open = 0

    def __call__(self, input_ids, scores):
        allowed = range(97) if not self.open else [(int(input_ids[0, -1]) * 7 + i) % 97 for i in (1, 5, 11)]
        self.open = (self.open or 3) - 1
        masked = torch.full_like(scores, -torch.inf)
        masked[:, list(allowed)] = scores[:, list(allowed)]
        return masked


class After(StoppingCriteria):
    """Ends the text when it has been asked this often."""

    def __init__(self, count):
        self.count = count

    def __call__(self, input_ids, scores, **kwargs):
        self.count -= 1
        return torch.full((len(input_ids),), self.count <= 0)


class Unsure(StoppingCriteria):
    """Ends the text where the last token was not clearly the best: needs the scores."""

    def __call__(self, input_ids, scores, **kwargs):
        best = scores[-1].topk(2).values
        return best[:, 0] - best[:, 1] < 0.25


class Heard:
    """A streamer that keeps what it was given."""

    def __init__(self):
        self.chunks, self.ended = [], 0

    def put(self, value):
        self.chunks.append(value.tolist())

    def end(self):
        self.ended += 1


def tokenizer() -> PreTrainedTokenizerFast:
    """One letter a token."""
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner)


def said(start: int, stop: int) -> str:
    return "".join(LETTERS[token] for token in TEXT[start:stop])


def perhaps(target, drafter, **settings):
    """The model with this drafter attached; None: as it is."""
    return nullcontext() if drafter is None else dloop.attach(target.model, drafter, **settings)


def only(allowed: set[int]):
    return lambda batch, ids: sorted(allowed | {(int(ids[-1]) * 3 + batch) % 97})


TIMES = {"max_new_tokens": 32}
CASES = {  # by name: what makes the arguments beside the prompt, fresh for each run
    "bare": dict,
    "one-token": lambda: {"max_new_tokens": 1},
    "two-tokens": lambda: {"max_new_tokens": 2},
    "max-length": lambda: {"max_length": 17, "max_new_tokens": None},
    "eos": lambda: {"eos_token_id": TEXT[9]},
    "eos-list": lambda: {"eos_token_id": [TEXT[14], TEXT[6], 96]},
    "eos-first": lambda: {"eos_token_id": TEXT[0]},
    "min-new-tokens": lambda: {"eos_token_id": TEXT[3], "min_new_tokens": 11},
    "min-length": lambda: {"eos_token_id": TEXT[3], "min_length": 12},
    "repetition-penalty": lambda: {"repetition_penalty": 1.4},
    "no-repeat-ngram": lambda: {"no_repeat_ngram_size": 2},
    "encoder-repetition": lambda: {"encoder_repetition_penalty": 1.5},
    "encoder-no-repeat-ngram": lambda: {"encoder_no_repeat_ngram_size": 1},
    "bad-words": lambda: {"bad_words_ids": [[TEXT[2]], [TEXT[5], TEXT[6]]]},
    "sequence-bias": lambda: {"sequence_bias": [[[TEXT[4]], -9.0], [[7, 8], 5.0]]},
    "suppress": lambda: {"suppress_tokens": [TEXT[1], TEXT[8]]},
    "begin-suppress": lambda: {"begin_suppress_tokens": [TEXT[0]]},
    "forced-eos": lambda: {"forced_eos_token_id": 41},
    "decay": lambda: {"exponential_decay_length_penalty": (4, 1.3), "eos_token_id": 50},
    "renormalize": lambda: {"renormalize_logits": True},
    "guidance": lambda: {"guidance_scale": 1.5},
    "watermark": lambda: {"watermarking_config": WatermarkingConfig(bias=2.5, seeding_scheme="selfhash")},
    "allow-list": lambda: {"prefix_allowed_tokens_fn": only({1, 2, 3, TEXT[4], TEXT[7]})},
    "presence": lambda: {"logits_processor": [Presence()]},
    "frequency": lambda: {"logits_processor": LogitsProcessorList([Frequency()])},
    "stateful": lambda: {"logits_processor": [Counting()]},
    "grammar": lambda: {"logits_processor": [Brackets()]},
    "all-penalties": lambda: {
        **{"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 5, "eos_token_id": TEXT[3]},
        **{"bad_words_ids": [[TEXT[2]]], "logits_processor": [Frequency(), Counting(), Presence()]},
    },
    "criterion": lambda: {"stopping_criteria": [After(13)]},
    "criterion-of-scores": lambda: {
        **{"stopping_criteria": StoppingCriteriaList([Unsure()])},
        **{"return_dict_in_generate": True, "output_scores": True},
    },
    "stop-string": lambda: {"stop_strings": said(10, 12), "tokenizer": tokenizer()},
    "stop-strings": lambda: {"stop_strings": [said(15, 18), said(7, 9), "zzz"], "tokenizer": tokenizer()},
    "config": lambda: {"generation_config": GenerationConfig(max_new_tokens=19, repetition_penalty=1.1)},
    "no-cache": lambda: {"use_cache": False},
    "scores": lambda: {"return_dict_in_generate": True, "output_scores": True, "output_logits": True},
    "dictionary": lambda: {"return_dict_in_generate": True},
    "mask": lambda: {"attention_mask": torch.ones(1, len(PROMPT), dtype=torch.long)},
    "padded": lambda: {"inputs": torch.tensor(BATCH[:1]), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1]])},
}
SHORT = ("one-token", "two-tokens", "eos-first", "eos")  # no room for long runs
TOGETHER = {
    "bare": dict,
    "eos": lambda: {"eos_token_id": [TEXT[9], 33, 70]},
    "max-length": lambda: {"max_length": 21, "max_new_tokens": None},
    "repetition-penalty": lambda: {"repetition_penalty": 1.4},
    "no-repeat-ngram": lambda: {"no_repeat_ngram_size": 2},
    "bad-words": lambda: {"bad_words_ids": [[TEXT[2]], [TEXT[5], TEXT[6]]]},
    "allow-list": lambda: {"prefix_allowed_tokens_fn": only({1, 2, 3, TEXT[4], TEXT[7]})},
    "min-new-tokens": lambda: {"min_new_tokens": 8, "eos_token_id": [TEXT[3], 40]},
    "stop-string": lambda: {"stop_strings": said(10, 12), "tokenizer": tokenizer(), "eos_token_id": 33},
    "dictionary": lambda: {"return_dict_in_generate": True, "eos_token_id": [TEXT[9], 33, 70]},
}
SAMPLED = {
    "bare": dict,
    "temperature": lambda: {"temperature": 0.6},
    "top-k": lambda: {"top_k": 5, "temperature": 1.3},
    "top-p": lambda: {"top_p": 0.7, "top_k": 0},
    "min-p": lambda: {"min_p": 0.1},
    "typical": lambda: {"typical_p": 0.8},
    "cutoffs": lambda: {"epsilon_cutoff": 0.02, "eta_cutoff": 0.01},
    "penalties": lambda: {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2, "logits_processor": [Counting()]},
    "stop": lambda: {"stopping_criteria": [After(9)], "eos_token_id": 33},
}


@pytest.fixture(scope="module")
def target():
    return tiny_target(num_layers=3)


def call(model, make, prompt=(PROMPT,), **more):
    """One call of `generate`, with the same random numbers each time."""
    torch.manual_seed(7)
    given = {"inputs": torch.tensor(list(prompt)), "pad_token_id": 0, "do_sample": False} | TIMES | more | make()
    if "generation_config" in given:
        given = {name: value for name, value in given.items() if name not in ("max_new_tokens", "pad_token_id")}
    return model.generate(**given)


def ids_of(result) -> list[list[int]]:
    return getattr(result, "sequences", result).tolist()


def good_for(target, sequences) -> dloop.drafters.host.HostDrafter:
    """A drafter that is mostly right on these texts, whatever was done to the scores."""
    return good_drafter(target, sequences)


def compare(target, make, prompt=(PROMPT,), gates=GATES, **more):
    """The same call plain and attached, for each gate; the reports."""
    plain = call(target.model, make, prompt, **more)
    drafter = good_for(target, ids_of(plain))
    reports = []
    for gate in gates:
        with dloop.attach(target.model, drafter, loop_gate=gate, max_stages=4) as attached:
            result = call(target.model, make, prompt, **more)
            reports.append(attached.last)
        assert ids_of(result) == ids_of(plain)
        assert type(result) is type(plain)
        assert (attached.last.mode, attached.last.reason) == ("dloop", None)
        assert len(attached.last.rounds) == len(ids_of(plain))
    return reports


def test_the_text_that_cases_point_into_is_the_target_s(target):
    assert call(target.model, dict).tolist() == [PROMPT + TEXT]
    assert len(set(TEXT)) > 20


@pytest.mark.parametrize("name", CASES)
def test_greedy_ids_are_the_model_s_own(target, name):
    reports = compare(target, CASES[name])
    for report in reports:
        emitted = [token for round in report.rounds[0] for token in round.emitted]
        assert report.num_new_tokens == [1 + len(emitted)]
    if name not in SHORT:  # were nothing accepted, equal texts would show little
        assert reports[1].acceptance_length > 1.5


@pytest.mark.parametrize("name", TOGETHER)
def test_batches_are_the_model_s_own(target, name):
    mask = torch.tensor([[int(token > 0) for token in row] for row in BATCH])
    for report in compare(target, TOGETHER[name], BATCH, attention_mask=mask):
        assert len({len(rounds) for rounds in report.rounds}) > 1  # ragged: each is as far as it is


@pytest.mark.parametrize("kind", [*WINDOW_KINDS, *CHAIN_KINDS])
@pytest.mark.parametrize("name", ["bare", "eos", "repetition-penalty"])
def test_batches_of_targets_with_windows_or_states_are_the_model_s_own(kind, name):
    target = tiny_target(kind, num_layers=4)
    mask = torch.tensor([[int(token > 0) for token in row] for row in BATCH])
    reports = compare(target, TOGETHER[name], BATCH, gates=(-2.0,), attention_mask=mask)
    assert len({len(rounds) for rounds in reports[0].rounds}) > 1 and reports[0].acceptance_length > 1.2


@pytest.mark.parametrize("name", SAMPLED)
def test_a_sampled_text_is_the_model_s_own_with_pytorch_s_seed(target, name):
    compare(target, SAMPLED[name], do_sample=True)


@pytest.mark.parametrize("family", ["dflash", "domino", "eagle3"])
def test_other_families_and_trees(target, family):
    drafter = taught_drafter(target, [PROMPT + TEXT], family=family)
    trees = {"tree_budget": 12, "stage_tree_budget": 6} if family != "domino" else {"tree_budget": 8}
    for name, shape in itertools.product(
        ("bare", "stateful", "all-penalties", "stop-strings"), ({"tree_budget": 0}, trees)
    ):
        plain = call(target.model, CASES[name])
        with dloop.attach(target.model, drafter, loop_gate=-3.0, **shape) as attached:
            assert ids_of(call(target.model, CASES[name])) == ids_of(plain)
        assert attached.last.mode == "dloop"


@pytest.mark.parametrize("kind", ["qwen2", "llama", *WINDOW_KINDS, *CHAIN_KINDS])
def test_other_targets(kind):
    target = tiny_target(kind, num_layers=4)
    for name in ("bare", "stateful", "padded", "frequency"):
        plain = call(target.model, CASES[name])
        for drafter in (good_for(target, ids_of(plain)), tiny_drafter(target, family="eagle3")):
            with dloop.attach(target.model, drafter, loop_gate=-2.0, tree_budget=0) as attached:
                assert ids_of(call(target.model, CASES[name])) == ids_of(plain)
            assert attached.last.mode == "dloop"


def test_a_drafter_that_is_hardly_ever_right_changes_nothing(target):
    for name in ("bare", "stateful", "stop-strings", "eos"):
        plain = call(target.model, CASES[name])
        with dloop.attach(target.model, tiny_drafter(target), loop_gate=ALWAYS_OPEN, max_stages=3):
            assert ids_of(call(target.model, CASES[name])) == ids_of(plain)


# What comes back


def test_scores_and_logits_are_those_of_plain_decoding(target):
    def make():
        return CASES["scores"]() | {"repetition_penalty": 1.2, "eos_token_id": TEXT[20]}

    plain = call(target.model, make)
    with dloop.attach(target.model, good_for(target, ids_of(plain)), loop_gate=ALWAYS_OPEN, max_stages=3):
        result = call(target.model, make)
    for mine, own in ((result.scores, plain.scores), (result.logits, plain.logits)):
        assert len(mine) == len(own) == len(ids_of(result)[0]) - len(PROMPT)
        torch.testing.assert_close(torch.cat(mine), torch.cat(own), rtol=0, atol=1e-4)
    probabilities = [
        target.model.compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
        for out in (result, plain)
    ]
    torch.testing.assert_close(*probabilities, rtol=0, atol=1e-4)


def test_gates_learn_from_the_model_s_own_texts_alone(target):
    """Penalties bend the target's logits and not the drafter's: what they show holds for nobody else."""
    drafter = good_for(target, [PROMPT + TEXT])

    def bent():
        return {"max_new_tokens": 12, "repetition_penalty": 1.3}

    for make, teaches in ((dict, True), (bent, False)):
        plain = call(target.model, make)
        before = drafter.learned.rounds
        with dloop.attach(target.model, drafter, loop_gate="auto", max_stages=3) as attached:
            assert ids_of(call(target.model, make)) == ids_of(plain)
            assert attached.last.mode == "dloop" and attached.last.rounds[0]
        assert drafter.learned.rounds - before == (len(attached.last.rounds[0]) if teaches else 0)


def test_a_dictionary_has_the_report_with_its_rounds(target):
    drafter = good_for(target, [PROMPT + TEXT])
    with dloop.attach(target.model, drafter, loop_gate=-2.0) as attached:
        result = call(target.model, CASES["dictionary"])
    assert result.dloop is attached.last
    assert list(result) == ["sequences"]  # nothing new among its entries
    rounds = result.dloop.rounds[0]
    assert [*PROMPT, TEXT[0], *(token for round in rounds for token in round.emitted)] == ids_of(result)[0]
    assert max(round.stages for round in rounds) > 1
    assert result.dloop.finish_reasons == ["length"]


def test_a_processor_sees_each_prefix_once_whatever_was_drafted(target):
    seen = []
    for drafter in (None, good_for(target, [PROMPT + TEXT]), tiny_drafter(target)):
        counting = Counting()
        with perhaps(target, drafter, loop_gate=ALWAYS_OPEN, max_stages=3):
            call(target.model, lambda counting=counting: {"logits_processor": [counting]})
        seen.append(counting.seen)
    assert seen[0] == seen[1] == seen[2]


def test_a_streamer_hears_the_prompt_and_each_token(target):
    heard = []
    for drafter in (None, good_for(target, [PROMPT + TEXT])):
        streamer = Heard()
        with perhaps(target, drafter, loop_gate=-2.0):
            call(target.model, CASES["eos"], streamer=streamer)
        heard.append((streamer.chunks, streamer.ended))
    assert heard[0] == heard[1]


def test_a_text_streamer_writes_the_same(target, capsys):
    written = []
    for drafter in (None, good_for(target, [PROMPT + TEXT])):
        with perhaps(target, drafter, loop_gate=-2.0):
            call(target.model, dict, streamer=TextStreamer(tokenizer(), skip_prompt=True))
        written.append(capsys.readouterr().out)
    assert written[0] == written[1] == said(0, 32) + "\n"


def test_several_sampled_texts_are_repeatable_and_differ(target):
    def texts():
        return ids_of(call(target.model, dict, do_sample=True, num_return_sequences=4))

    with dloop.attach(target.model, good_for(target, [PROMPT + TEXT]), loop_gate=-2.0) as attached:
        first, second = texts(), texts()
        assert attached.last.mode == "dloop"
    with dloop.attach(target.model, tiny_drafter(target), loop_gate=ALWAYS_OPEN, max_stages=2):
        third = texts()
    assert first == second == third
    assert len({tuple(text) for text in first}) == 4


def test_tokens_of_several_sampled_texts_follow_their_law():
    scores = torch.tensor([[0.3, 1.1, -torch.inf, 2.0, -0.5, 0.0]])
    drawn = torch.tensor([Keyed(5)(scores, position) for position in range(8000)]).bincount(minlength=6)
    expected = scores[0].softmax(-1) * 8000
    assert drawn[2] == 0
    kept = expected > 0
    chi_square = ((drawn - expected)[kept] ** 2 / expected[kept]).sum()
    assert chi_square < 18.5  # 4 degrees of freedom: p = 0.001


@pytest.mark.parametrize("sequences", [1, 3])
def test_where_no_token_is_left_sampling_fails_as_in_plain_decoding(target, sequences):
    """Three sequences draw otherwise than one."""
    told = []
    for drafter in (None, tiny_drafter(target)):
        with perhaps(target, drafter), pytest.raises(RuntimeError) as failed:
            forbidden = {"suppress_tokens": list(range(97)), "num_return_sequences": sequences}
            call(target.model, lambda forbidden=forbidden: forbidden, do_sample=True)
        told.append(str(failed.value))
    assert told[0] == told[1] and "probability tensor contains" in told[0]


def test_a_drafter_that_contributes_nothing_is_told_once(target, caplog):
    with dloop.attach(target.model, tiny_drafter(target)), caplog.at_level(logging.WARNING, "dloop"):
        for _ in range(4):
            call(target.model, dict)
    (line,) = [record.message for record in caplog.records]
    assert "tiny dspark contributes nothing" in line and "dloop doctor" in line


def test_a_token_that_is_the_drafter_s_mask_stays(target):
    """The mask is a token like any other in a text."""

    def make():
        return {"sequence_bias": [[[96], 7.0]]}

    plain = call(target.model, make)
    assert plain[0, len(PROMPT) :].tolist().count(96) > 2
    for family in ("dspark", "dflash", "domino"):
        drafter = tiny_drafter(target, family=family)
        assert drafter.config.mask_token_id == 96
        with dloop.attach(target.model, drafter, loop_gate=ALWAYS_OPEN, max_stages=2):
            assert ids_of(call(target.model, make)) == ids_of(plain)


# What is decoded plainly

PLAIN = {  # by name: arguments, what the reason names
    "beams": (lambda: {"num_beams": 3}, "greedy search or sampling"),
    "attentions": (lambda: {"return_dict_in_generate": True, "output_attentions": True}, "output_attentions"),
    "hidden-states": (lambda: {"return_dict_in_generate": True, "output_hidden_states": True}, "output_hidden_states"),
    "cache": (lambda: {"cache_implementation": "static"}, "cache_implementation='static'"),
    "invalid": (lambda: {"remove_invalid_values": True}, "remove_invalid_values"),
    "own-cache": (lambda: {"past_key_values": DynamicCache()}, "past_key_values is given"),
    "fractions": (lambda: {"attention_mask": torch.tensor([[0.5, 1, 1, 1]])}, "other numbers than 0 and 1"),
    "hole": (lambda: {"attention_mask": torch.tensor([[1, 0, 1, 1]])}, "attention_mask"),
    "positions": (lambda: {"position_ids": torch.tensor([[1, 2, 3, 4]])}, "position_ids"),
    "context": (lambda: {"inputs": torch.arange(1, 91).repeat(1, 3)[:, :250], "max_new_tokens": 9}, "context of 256"),
    "embeddings": (lambda: {"inputs": None, "inputs_embeds": torch.ones(1, 3, 32)}, "inputs_embeds"),
}
PLAIN_TOGETHER = {
    "scores": (lambda: {"return_dict_in_generate": True, "output_scores": True}, "output_scores with several"),
    "stateful": (lambda: {"logits_processor": [Counting()]}, "Counting with several"),
    "criterion": (lambda: {"stopping_criteria": [After(9)]}, "After with several"),
    "no-eos": (lambda: {"stop_strings": said(3, 5), "tokenizer": tokenizer()}, "without an eos_token_id"),
    "encoder": (lambda: {"encoder_repetition_penalty": 1.5}, "EncoderRepetitionPenaltyLogitsProcessor with several"),
    "streamer": (lambda: {"streamer": Heard()}, "streamer with several"),
}


@pytest.mark.parametrize("name", [*PLAIN, *(f"several-{name}" for name in PLAIN_TOGETHER)])
def test_plain_decoding_says_so_and_why(target, name, caplog):
    several = name.removeprefix("several-") in PLAIN_TOGETHER and name.startswith("several-")
    make, reason = PLAIN_TOGETHER[name.removeprefix("several-")] if several else PLAIN[name]
    prompt = [row[-4:] for row in BATCH] if several else (PROMPT,)
    plain = call(target.model, make, prompt)
    with dloop.attach(target.model, tiny_drafter(target)) as attached, caplog.at_level(logging.WARNING, "dloop"):
        for _ in range(2):
            result = call(target.model, make, prompt)
            assert ids_of(result) == ids_of(plain)
            assert attached.last.mode == "plain"
            assert reason in attached.last.reason
    assert [record.message for record in caplog.records if record.name == "dloop"] == [
        f"generate decodes plainly, without the drafter: {attached.last.reason}"
    ]
    if hasattr(result, "sequences"):
        assert result.dloop is attached.last


def test_a_reason_is_told_once_whatever_its_numbers(target, caplog):
    with dloop.attach(target.model, tiny_drafter(target)) as attached, caplog.at_level(logging.WARNING, "dloop"):
        for length in (250, 251, 252):
            call(target.model, lambda length=length: {"inputs": torch.ones(1, length, dtype=int), "max_new_tokens": 9})
            assert f"may be {length + 9}, more" in attached.last.reason
    assert sum(record.name == "dloop" for record in caplog.records) == 1


def test_values_that_are_not_finite_are_removed_as_in_plain_decoding():
    target = tiny_target(num_layers=3)
    target.model.lm_head.weight[7] = torch.nan
    plain = call(target.model, PLAIN["invalid"][0]).tolist()
    with dloop.attach(target.model, tiny_drafter(target)) as attached:
        assert call(target.model, PLAIN["invalid"][0]).tolist() == plain
        assert "remove_invalid_values" in attached.last.reason
        with pytest.raises(UserError, match="not finite"):
            call(target.model, dict)


def test_training_mode_and_replicas_are_decoded_plainly(target):
    drafter = tiny_drafter(target)
    with dloop.attach(target.model, drafter) as attached:
        twin = replica(target.model)
        assert call(twin, dict).tolist() == [PROMPT + TEXT]
        assert "copy" in attached.last.reason
        target.model.train()
        try:
            call(target.model, dict)
        finally:
            target.model.eval()
        assert "training mode" in attached.last.reason
        call(target.model, dict)
        assert attached.last.mode == "dloop"
        target.model.double()
        try:
            call(target.model, dict)
        finally:
            target.model.float()
        assert "float64 on cpu" in attached.last.reason


def replica(model):
    """Another model of the very same class."""
    other = copy.copy(model)
    other.__class__ = type(model)
    return other


def hooked(model):
    return model.register_forward_hook(lambda _m, _i, out: out.logits.__setitem__((..., 7), 1e4)).remove


def patched(model):
    forward = model.forward

    def other(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = -out.logits
        return out

    model.forward = other
    return lambda: delattr(model, "forward")


def prepared(model):
    prepare = model.prepare_inputs_for_generation
    model.prepare_inputs_for_generation = lambda *args, **kwargs: prepare(*args, **kwargs)
    return lambda: delattr(model, "prepare_inputs_for_generation")


def inherited(model):
    kind = type(model)

    def forward(self, *args, **kwargs):
        out = kind.forward(self, *args, **kwargs)
        out.logits = -out.logits
        return out

    model.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
    return lambda: setattr(model, "__class__", kind)


@pytest.mark.parametrize("change", [hooked, patched, prepared, inherited], ids=lambda f: f.__name__)
def test_a_model_that_is_not_transformers_own_is_decoded_plainly(target, change):
    undo = change(target.model)
    try:
        plain = ids_of(call(target.model, dict))
        with dloop.attach(target.model, tiny_drafter(target)) as attached:
            assert ids_of(call(target.model, dict)) == plain
            assert attached.last.mode == "plain" and ("own" in attached.last.reason or "hooks" in attached.last.reason)
    finally:
        undo()


def test_changes_after_attaching_are_seen(target):
    with dloop.attach(target.model, tiny_drafter(target)) as attached:
        undo = hooked(target.model)
        try:
            call(target.model, dict)
        finally:
            undo()
        assert attached.last.reason == "the model has hooks on its forward"
        target.model.config._attn_implementation, before = "flash_attention_2", target.model.config._attn_implementation
        try:
            assert "takes no mask" in next(changes(attached.pair.target, attached.original))
        finally:
            target.model.config._attn_implementation = before


def test_an_attached_model_may_assist_another_and_exit_early():
    main, other = tiny_target(num_layers=4), tiny_target(num_layers=4)
    given = {"inputs": torch.tensor([PROMPT]), "pad_token_id": 0, "do_sample": False, "max_new_tokens": 10}
    plain = main.model.generate(**given).tolist()
    with dloop.attach(other.model, tiny_drafter(other)) as attached:
        assert main.model.generate(**given, assistant_model=other.model).tolist() == plain
        assert "drafts for another" in attached.last.reason
    with dloop.attach(main.model, tiny_drafter(main)):
        assert main.model.generate(**given, assistant_early_exit=2).tolist() == plain
    assert main.model.config.num_hidden_layers == 4


@pytest.mark.parametrize("lengths", [(20, 8), (8, 20), (2,), (4,), (5,)], ids=str)
def test_the_shortest_length_holds_and_one_token_is_always_chosen(target, lengths):
    def make():
        return {"stopping_criteria": [MaxLengthCriteria(length) for length in lengths]}

    plain = ids_of(call(target.model, make))
    with dloop.attach(target.model, tiny_drafter(target), loop_gate=-2.0):
        assert ids_of(call(target.model, make)) == plain


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, pickled, saved], ids=lambda f: f.__name__)
def test_a_copy_or_a_pickle_is_the_model_without_a_drafter(again, caplog):
    target = tiny_target(num_layers=3)  # one that gave hidden states has hooks which no pickle takes, attached or not
    kind, drafter = type(target.model), tiny_drafter(target)
    with dloop.attach(target.model, drafter) as attached, caplog.at_level(logging.WARNING, "dloop"):
        twins = [again(target.model) for _ in range(2)]
        for twin in twins:
            assert type(twin) is kind and call(twin, dict).tolist() == [PROMPT + TEXT]
        assert attached.last is None
        assert [record.message for record in caplog.records] == [
            "a copy or a pickle of an attached model has no drafter; attach the copy itself"
        ]
        with dloop.attach(twins[0], drafter) as own:
            call(twins[0], dict)
            assert own.last.mode == "dloop" and attached.last is None
        call(target.model, dict)
        assert attached.last.mode == "dloop"


def test_a_replica_is_detached_and_attached_by_itself(target):
    with dloop.attach(target.model, tiny_drafter(target)) as attached:
        twin = replica(target.model)
        dloop.detach(twin)
        call(target.model, dict)
        assert attached.last.mode == "dloop"
        second = replica(target.model)
        with dloop.attach(second, tiny_drafter(target)) as own:
            call(second, dict)
            assert own.last.mode == "dloop"


def test_a_call_within_a_call_keeps_its_report_apart(target):
    inner = []

    def criterion(ids, scores, **_):
        if not inner:
            inner.append(call(target.model, lambda: {"num_beams": 2, "stopping_criteria": []}))
        return torch.zeros(len(ids), dtype=torch.bool)

    with dloop.attach(target.model, tiny_drafter(target)) as attached:
        call(target.model, lambda: {"stopping_criteria": [criterion]})
        assert inner and attached.last.mode == "dloop" and len(attached.last.rounds[0]) > 1


def test_what_is_no_model_and_no_drafter_is_refused_by_name(target):
    for model, drafter, line in (
        ("smollm2", "demo", "model='smollm2' must be"),
        (target, None, "drafter=None must be"),
    ):
        with pytest.raises(UserError, match=line):
            check_kinds(model, drafter)
    with pytest.raises(UserError, match="does not generate"):
        dloop.attach(target.model.base_model, tiny_drafter(target))


def test_calls_in_several_threads_do_not_meet(target):
    """What one call must leave to transformers says nothing about the calls beside it."""
    plain = {name: ids_of(call(target.model, make)) for name, make in (("dictionary", dict), ("hidden-states", dict))}

    def work(name):
        make = CASES[name] if name in CASES else PLAIN[name][0]
        given = {"inputs": torch.tensor([PROMPT]), "pad_token_id": 0, "do_sample": False} | TIMES | make()
        return name, [target.model.generate(**given) for _ in range(3)]

    with dloop.attach(target.model, good_for(target, [PROMPT + TEXT]), loop_gate=-2.0), ThreadPoolExecutor(4) as pool:
        for name, results in pool.map(work, ["dictionary", "hidden-states"] * 2):
            for result in results:
                assert ids_of(result) == plain[name]
                assert result.dloop.mode == ("dloop" if name == "dictionary" else "plain")


@pytest.mark.parametrize("kind", ["qwen3", *WINDOW_KINDS, *CHAIN_KINDS])
def test_a_forward_of_another_thread_in_the_midst_of_ours_is_not_heard(kind):
    """Hooks that read layers are shared by all threads that use a model."""
    target = tiny_target(kind, num_layers=4)
    drafter = tiny_drafter(target, family="eagle3")
    alone = dloop.generate(target, drafter, PROMPT, 10, loop_gate=-2.0, tree_budget=0)

    def intrude(module, inputs, output):
        if threading.current_thread() is threading.main_thread():
            other = threading.Thread(target=lambda: target.model(torch.tensor([[7, 8, 9, 10, 11, 12]])))
            other.start()
            other.join()

    handle = target.backbone.layers[1].register_forward_hook(intrude)
    try:
        beside = dloop.generate(target, drafter, PROMPT, 10, loop_gate=-2.0, tree_budget=0)
    finally:
        handle.remove()
    assert beside.tokens == alone.tokens
    assert [r.drafted for r in beside.rounds] == [r.drafted for r in alone.rounds]


# Attaching


def test_detach_leaves_the_model_as_it_was(target):
    kind, names = type(target.model), set(vars(target.model))
    attached = dloop.attach(target.model, tiny_drafter(target))
    assert type(target.model) is not kind
    assert type(target.model).__name__ == kind.__name__  # what checkpoints are saved under
    dloop.detach(target.model)
    attached.detach()  # once more does no harm
    assert type(target.model) is kind
    assert set(vars(target.model)) == names
    with pytest.raises(dloop.UserError, match="nothing to undo"):
        dloop.detach(target.model)


def test_what_cannot_be_attached_is_refused_by_name(target):
    drafter = tiny_drafter(target)
    with dloop.attach(target.model, drafter), pytest.raises(dloop.UserError, match="detach it first"):
        dloop.attach(target.model, drafter)
    with pytest.raises(dloop.UserError, match="max_stages=0"):
        dloop.attach(target.model, drafter, max_stages=0)
    with pytest.raises(dloop.UserError, match="tree_width=3"):
        dloop.attach(target.model, drafter, tree_width=3)
    with pytest.raises(dloop.UserError, match="layers"):
        dloop.attach(tiny_target(num_layers=6).model, drafter)
    half = copy.deepcopy(target.model).to(torch.float16)
    with pytest.raises(dloop.UserError, match="float16"):
        dloop.attach(half, drafter)
    spread = copy.deepcopy(target.model)
    spread.hf_device_map = {"model.embed_tokens": 0, "model.layers": 1, "lm_head": 1}
    with pytest.raises(dloop.UserError, match=r"several devices \(0, 1\); load it on one"):
        dloop.attach(spread, drafter)
    spread.hf_device_map = {"": "cpu"}
    dloop.attach(spread, drafter).detach()
    flash = copy.deepcopy(target.model)
    flash.config._attn_implementation = "flash_attention_2"
    with pytest.raises(dloop.UserError, match="attn_implementation='sdpa'"):
        dloop.attach(flash, drafter)
    assert type(target.model).__module__.startswith("transformers.")


def test_a_loaded_target_decodes_on_its_own_engine(target):
    plain = call(target.model, CASES["all-penalties"])
    fast = FastTarget.of(tiny_target(num_layers=3))
    drafter = good_for(fast, ids_of(plain))
    with dloop.attach(fast, drafter, loop_gate=-2.0) as attached:
        assert ids_of(call(fast.model, CASES["all-penalties"])) == ids_of(plain)
        assert attached.last.acceptance_length > 1.5


def test_memory_is_free_when_generate_returns_or_is_stopped(target, monkeypatch):
    opened, memories = type(target).open, []

    def watched(self, taps=()):
        memory = opened(self, taps)
        memories.append(weakref.ref(memory))
        return memory

    class Stopper(Heard):
        def put(self, value):
            super().put(value)
            if len(self.chunks) == 5:
                raise KeyboardInterrupt

    monkeypatch.setattr(type(target), "open", watched)
    gc.disable()  # at once, not when the collector comes by
    try:
        with dloop.attach(target.model, good_for(target, [PROMPT + TEXT]), loop_gate=-2.0):
            result = call(target.model, CASES["dictionary"])
            assert result.dloop.rounds and memories[0]() is None
            with pytest.raises(KeyboardInterrupt) as stopped:
                call(target.model, dict, streamer=Stopper())
            del stopped
            assert len(memories) == 2 and memories[1]() is None
            assert call(target.model, dict).tolist() == [PROMPT + TEXT]
    finally:
        gc.enable()


def test_a_model_whose_vocabulary_has_grown_is_decoded_plainly():
    target = tiny_target("llama_tied")
    model = target.model
    model.generation_config.eos_token_id = None
    dloop.attach(model, tiny_drafter(target), loop_gate=-0.5)
    model.resize_token_embeddings(101)
    assert model.generate(torch.tensor([[5, 9, 11]]), max_new_tokens=8, do_sample=False).shape == (1, 11)
    assert "vocabulary has become 101 words" in type(model).attachment.last.reason
