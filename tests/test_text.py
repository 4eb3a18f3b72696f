"""Prompts in words, texts that grow, and where they end: the earliest of several stops, whatever a block holds."""

import gc
import random
import weakref
from threading import Thread

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast, TextIteratorStreamer

import dloop
from dloop.chat import Growing
from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN
from dloop.loop import Limits
from dloop.testing import good_drafter, tiny_target, write_target

PROMPT = "a word"
TEMPLATE = "{% for m in messages %}{{ m['role'][0] + m['content'] }}{% endfor %}"
LETTERS = [chr(32 + index) for index in range(95)] + list("é€")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target with a tokenizer of one letter a token."""
    folder = write_target(tiny_target(num_layers=3), tmp_path_factory.mktemp("target"))
    inner = Tokenizer(models.BPE({letter: index for index, letter in enumerate(LETTERS)}, []))
    inner.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=TEMPLATE).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def target(folder):
    return dloop.load_target(str(folder), dtype="float32", engine="twin")


@pytest.fixture(scope="module")
def drafter(target):
    ids = [LETTERS.index(letter) for letter in PROMPT]
    return good_drafter(target, [ids + dloop.generate_autoregressive(target, ids, 40).tokens], stage_len=5)


def letters(tokens) -> str:
    return "".join(LETTERS[token] for token in tokens)


def test_a_text_is_taken_as_it_is(target, drafter):
    ids = [LETTERS.index(letter) for letter in PROMPT]
    by_ids = dloop.generate(target, drafter, ids, 24, loop_gate=-2.0)
    by_text = dloop.generate(target, drafter, PROMPT, 24, loop_gate=-2.0)
    assert by_text.tokens == by_ids.tokens
    assert (by_ids.text, by_text.text) == (None, letters(by_text.tokens))
    assert dloop.generate_autoregressive(target, PROMPT, 24).text == by_text.text


def test_messages_go_through_the_template(target, drafter):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    ids = [LETTERS.index(letter) for letter in "uhiayes"]
    assert dloop.generate(target, drafter, messages, 12).tokens == dloop.generate(target, drafter, ids, 12).tokens


def test_texts_of_a_stream_are_the_text(target, drafter):
    whole = dloop.generate(target, drafter, PROMPT, 40, loop_gate=ALWAYS_OPEN).text
    parts = list(dloop.stream(target, drafter, PROMPT, 40, loop_gate=ALWAYS_OPEN).texts())
    assert "".join(parts) == whole
    assert any(len(part) > 2 for part in parts)


def test_what_words_need_is_missed_by_name(target, drafter, unchecked):
    with pytest.raises(UserError, match="has no tokenizer beside its weights"):
        dloop.generate(tiny_target(num_layers=3), None, PROMPT)
    with pytest.raises(UserError, match="'role' and 'content'"):
        dloop.generate(target, drafter, [{"role": "user"}])
    with pytest.raises(UserError, match="'role' and 'content'"):
        dloop.generate(target, drafter, ["a", "list"])
    with pytest.raises(UserError, match="prompt is empty"):
        dloop.generate(target, drafter, "")
    with pytest.raises(UserError, match="needs a prompt in text"):
        dloop.stream(target, drafter, [3, 4], 8).texts()


@pytest.mark.parametrize("taken", ["round", "texts", "for"])
def test_texts_are_refused_where_something_of_them_was_taken(target, drafter, taken):
    stream = dloop.stream(target, drafter, PROMPT, 24, loop_gate=-2.0)
    assert stream.first is not None  # the first token is in the texts all the same
    if taken == "round":
        next(stream)
    elif taken == "texts":
        stream.texts()
    else:
        list(stream)
    with pytest.raises(UserError, match="taken from this stream before; ask it for texts"):
        stream.texts()


def test_a_closed_stream_says_nothing_more(target, drafter):
    unread, begun, halved = (dloop.stream(target, drafter, PROMPT, 24, loop_gate=-2.0) for _ in range(3))
    unread.close()
    assert list(unread.texts()) == [] and list(unread) == []
    with pytest.raises(UserError, match="closed before its first token"):
        _ = unread.first
    assert begun.first is not None
    begun.close()
    assert list(begun.texts()) == []
    texts = halved.texts()
    assert next(texts) and next(texts)
    halved.close()
    assert list(texts) == []


# Where a text ends


@pytest.mark.parametrize("stops", [[3], [7, 2], [11, 4, 9], [39], []], ids=str)
@pytest.mark.parametrize("length", [1, 4, 5, 10, 40])
def test_the_earliest_stop_wins_and_usage_counts_what_came(target, drafter, stops, length):
    text = dloop.generate_autoregressive(target, PROMPT, 40).tokens
    ids = [text[index] for index in stops]
    out = dloop.generate(
        target, drafter, PROMPT, length, loop_gate=ALWAYS_OPEN, max_stages=4, stop_token_ids=ids or [96]
    )
    first = next((index for index, token in enumerate(text[:length]) if token in ids), None)
    assert out.tokens == text[: length if first is None else first + 1]
    assert out.finish_reason == ("length" if first is None else "stop")
    assert len(out.tokens) == 1 + sum(len(r.emitted) for r in out.rounds)
    assert out.text == letters(out.tokens)


def test_a_cut_is_the_first_of_any_stops_at_any_place():
    random.seed(0)
    for _ in range(300):
        tokens = [random.randrange(6) for _ in range(random.randint(1, 12))]
        stops, produced = {random.randrange(6) for _ in range(2)}, random.randrange(4)
        limits = Limits(max_new_tokens=produced + random.randint(1, 12), stop_ids=frozenset(stops), context=99)
        kept, reason = limits.cut(tokens, produced)
        room = limits.max_new_tokens - produced
        ends = [index + 1 for index, token in enumerate(tokens) if token in stops and index < room]
        assert kept == tokens[: min([*ends, room])]
        assert reason == ("stop" if ends else "length" if len(tokens) >= room else None)


@pytest.mark.parametrize("seed", range(12))
def test_stops_of_every_kind_within_one_block(target, drafter, folder, seed):
    """Stop tokens, stop strings, a criterion and the length, their places drawn: the earliest ends the text."""
    draw = random.Random(seed)
    prompt = torch.tensor([[LETTERS.index(letter) for letter in PROMPT]])
    plain = target.model.generate(prompt, max_new_tokens=40)[0, len(PROMPT) :].tolist()
    eos, string, count, length = (draw.randint(2, 14) for _ in range(4))
    arguments = {
        "eos_token_id": plain[eos],
        "stop_strings": letters(plain[string - 2 : string]),
        "tokenizer": target.tokenizer.inner,
        "stopping_criteria": [lambda ids, scores: torch.tensor([ids.shape[1] - len(PROMPT) >= count])],
        "max_new_tokens": length,
        "pad_token_id": 96,  # no letter of the prompt: transformers would take it for padding
    }
    own = target.model.generate(prompt, **arguments)
    with dloop.attach(target.model, drafter, loop_gate=ALWAYS_OPEN, max_stages=4) as attached:
        result = target.model.generate(prompt, **arguments)
    assert result.tolist() == own.tolist()
    end = min(eos + 1, string, count, length)
    text = result[0, len(PROMPT) :].tolist()
    assert len(text) <= end and attached.last.num_new_tokens == [len(text)]
    repeated = len(text) < end  # a stop that comes again stands where it stood first
    assert attached.last.finish_reasons == [
        "stop" if repeated or end < length or end in (eos + 1, string, count) else "length"
    ]


# Who stops it from outside


def watch(target, monkeypatch) -> list[weakref.ref]:
    """References to each memory that the target opens from now on."""
    opened, memories = type(target).open, []

    def watched(self, taps=()):
        memory = opened(self, taps)
        memories.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(type(target), "open", watched)
    return memories


@pytest.mark.parametrize("how", ["close", "forget", "end", "fault"])
def test_a_stream_that_was_stopped_has_no_memory(target, drafter, monkeypatch, how):
    memories = watch(target, monkeypatch)
    gc.disable()  # at once, not when the collector comes by
    try:
        stream = dloop.stream(target, drafter, PROMPT, 30, loop_gate=-2.0)
        assert stream.first is not None and next(stream).emitted
        assert memories[0]() is not None
        if how == "close":
            stream.close()
            assert list(stream) == [] and stream.finish_reason is None
        elif how == "end":
            assert list(stream) and stream.finish_reason == "length"
        elif how == "fault":
            with pytest.raises(ZeroDivisionError) as raised:
                for _ in stream:
                    raise ZeroDivisionError
            del raised, _
            stream.close()
        else:
            del stream
        assert memories[0]() is None
    finally:
        gc.enable()


# A real tokenizer: characters of several tokens


@pytest.fixture(scope="module")
def words(smollm2_dir):
    return AutoTokenizer.from_pretrained(smollm2_dir)


SAID = "naïve 日本語 🎉👩‍👩‍👧 Ελληνικά — «ça» \n\n def f():\n\treturn '€'"


def test_any_chunks_of_tokens_give_the_whole_text(words):
    def decode(tokens):
        return words.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    tokens = words(SAID)["input_ids"]
    assert decode(tokens) == SAID and len(tokens) > 40
    for seed in range(50):
        cuts = sorted(random.Random(seed).sample(range(len(tokens)), seed % 12))
        growing = Growing(decode)
        parts = [growing.push(tokens[a:b]) for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
        assert all("�" not in part for part in parts)
        assert "".join([*parts, growing.finish()]) == SAID


@pytest.mark.slow
def test_attached_to_a_real_model_from_end_to_end(smollm2_dir):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(smollm2_dir)
    messages = [{"role": "user", "content": "Write a Python function that reverses a string."}]
    inputs = words.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    plain = model.generate(**inputs, max_new_tokens=48, do_sample=False, repetition_penalty=1.05)
    dloop.attach(model, "demo", loop_gate=-0.5)
    streamer = TextIteratorStreamer(words, skip_prompt=True, skip_special_tokens=True)
    results = []
    worker = Thread(
        target=lambda: results.append(
            model.generate(
                **inputs,
                **{"max_new_tokens": 48, "do_sample": False, "repetition_penalty": 1.05, "streamer": streamer},
                return_dict_in_generate=True,
            )
        )
    )
    worker.start()
    heard = "".join(streamer)
    worker.join()
    (result,) = results
    assert result.sequences.tolist() == plain.tolist()
    assert heard == words.decode(plain[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert result.dloop.mode == "dloop" and result.dloop.acceptance_length > 1.3
    dloop.detach(model)
