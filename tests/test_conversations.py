"""Conversations as training data: which tokens are labels, what is left out, and that nothing else changes."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Inner
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dloop.chat import Tokenizer
from dloop.cli.main import entry
from dloop.data.chat_templates import CHATML, SYSTEM, chat_template
from dloop.data.conversations import Skipped, parse_line, read_conversations
from dloop.data.on_the_fly import OnTheFly
from dloop.data.tokenise import Collection, samples_of
from dloop.errors import UserError
from dloop.testing import tiny_drafter, tiny_target, write_drafter, write_target
from dloop.train.batch import Sample, TokenFile, batches
from dloop.train.cache import cache_features
from dloop.train.checkpoint import STATE, latest
from dloop.train.parallel import Share

MARKS = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<|eot_id|>", "<think>", "</think>"]
VOCAB = 256 + len(MARKS) + 1
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
LLAMA = (
    "{% for m in messages %}<|start|>{{ m.role }}<|stop|>\n\n{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant<|stop|>\n\n{% endif %}"
)
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<|start|>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<|stop|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|start|>model\n{% endif %}"
)
THINKING = (  # like Qwen3's: only the last answer has a think block; the prompt has an empty one if thinking is off
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
ALWAYS_THINKING = THINKING.replace("{% if not enable_thinking %}", "<think>\n{% if not enable_thinking %}")
ONE = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho 漢字"}]
TWO = [*ONE, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "\nNo.\n"}]
WITH_SYSTEM = [{"role": "system", "content": "Be brief."}, *ONE]


def tokenizer(template: str | None = CHATML) -> Tokenizer:
    """A token a byte, and one for each mark."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(MARKS)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template), "tiny")


def write(path, *lines):
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def sampled(path, messages, template="model", jinja=CHATML, max_length=4096) -> tuple[Sample, Tokenizer]:
    """The one sample of a conversation."""
    words = tokenizer(jinja)
    ((line, sample),) = samples_of(
        write(path / "c.jsonl", {"messages": messages}), chat_template(template, words), max_length
    )
    assert line == 1
    return sample, words


def masked(sample: Sample, words: Tokenizer) -> str:
    """The sample as text, token by token, labels in [brackets]."""
    edges = [0, *(np.flatnonzero(np.diff(sample.labels.astype(int))) + 1).tolist(), len(sample.tokens)]
    parts = []
    for start, stop in zip(edges, edges[1:], strict=False):
        text = words.show(sample.tokens[start:stop].tolist())
        parts.append(f"[{text}]" if sample.labels[start] else text)
    return "".join(parts)


CHATML_ONE = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n[Ho 漢字<|im_end|>\n]"


@pytest.mark.parametrize(
    ("messages", "template", "jinja", "text"),
    [
        (ONE, "model", CHATML, CHATML_ONE),
        (
            TWO,
            "model",
            CHATML,
            CHATML_ONE + "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n[\nNo.\n<|im_end|>\n]",
        ),
        (WITH_SYSTEM, "model", CHATML, f"<|im_start|>system\nBe brief.<|im_end|>\n{CHATML_ONE}"),
        (TWO[:3], "model", CHATML, f"{CHATML_ONE}<|im_start|>user\nAnd?<|im_end|>\n"),
        (ONE, "qwen", CHATML, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{CHATML_ONE}"),
        (ONE, "qwen", None, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{CHATML_ONE}"),
        (ONE, "qwen", LLAMA, f"<|im_start|>system\n{SYSTEM}<|im_end|>\n{CHATML_ONE}"),
        (WITH_SYSTEM, "qwen", CHATML, f"<|im_start|>system\nBe brief.<|im_end|>\n{CHATML_ONE}"),
        (ONE, "model", THINKING, CHATML_ONE.replace("[", "[<think>\n\n</think>\n\n")),
        (
            TWO,
            "model",
            THINKING,
            CHATML_ONE
            + "<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\n\nNo.\n<|im_end|>\n]",
        ),
        (ONE, "model", ALWAYS_THINKING, CHATML_ONE.replace("[", "[<think>\n\n</think>\n\n")),
        (
            TWO,
            "model",
            LLAMA,
            "<|start|>user<|stop|>\n\nHi<|eot_id|><|start|>assistant<|stop|>\n\n[Ho 漢字<|eot_id|>]"
            "<|start|>user<|stop|>\n\nAnd?<|eot_id|><|start|>assistant<|stop|>\n\n[No.<|eot_id|>]",
        ),
        (ONE, "model", GEMMA, "<|start|>user\nHi<|stop|>\n<|start|>model\n[Ho 漢字<|stop|>\n]"),
    ],
    ids=lambda value: value if value in ("model", "qwen") else "",
)
def test_labels_are_the_answers_with_their_end_token_by_token(tmp_path, messages, template, jinja, text):
    sample, words = sampled(tmp_path, messages, template, jinja)
    assert masked(sample, words) == text


def test_an_answer_begins_where_the_prompt_of_decoding_ends(tmp_path):
    sample, words = sampled(tmp_path, ONE)
    prompt = words.encode_chat(ONE[:1])
    assert sample.tokens[: len(prompt)].tolist() == prompt and int(np.argmax(sample.labels)) == len(prompt)


def test_samples_are_cut(tmp_path):
    sample, words = sampled(tmp_path, ONE, max_length=30)
    whole, _ = sampled(tmp_path, ONE)
    assert len(sample.tokens) == 30 and sample.labels.tolist() == whole.labels[:30].tolist()


@pytest.mark.parametrize("jinja", [PLAIN, "{% for m in messages %}{{ m.content }}\n{% endfor %}"])
def test_a_template_that_marks_no_answers_is_refused(jinja):
    with pytest.raises(UserError, match="does not mark where answers begin"):
        chat_template("model", tokenizer(jinja))


def test_a_tokenizer_without_the_marks_or_a_template_is_refused():
    words = tokenizer(None)
    with pytest.raises(UserError, match="has no chat template; use --chat-template qwen"):
        chat_template("model", words)
    letters = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Inner(models.BPE(vocab=letters, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    with pytest.raises(UserError, match="needs the token <|im_start|>"):
        chat_template("qwen", Tokenizer(PreTrainedTokenizerFast(tokenizer_object=inner), "bare"))


@pytest.mark.parametrize(
    "value",
    [
        {"conversations": ONE},
        {"messages": ONE},
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho 漢字"}]},
        {"id": 7, "messages": ONE, "source": None},
        {"conversations": None, "messages": ONE},
    ],
    ids=["conversations", "messages", "from-value", "more-keys", "null"],
)
def test_the_dialects_mean_the_same(value):
    assert parse_line(json.dumps(value).encode()) == ONE
    assert parse_line(json.dumps(value, ensure_ascii=False).encode("utf-8-sig") + b"\r\n") == ONE


USER, REPLY = ONE
BAD = {
    "{": "bad JSON",
    "[" * 100_000: "bad JSON",
    "": "empty line",
    "[]": "no list 'conversations' or 'messages'",
    json.dumps({"conversations": ONE, "messages": ONE}): "both 'conversations' and 'messages'",
    '{"messages": []}': "no assistant turn",
    '{"text": "Hi"}': "no list 'conversations' or 'messages'",
    json.dumps({"messages": [USER]}): "no assistant turn",
    json.dumps({"messages": [USER, REPLY, REPLY]}): "two assistant turns in a row",
    json.dumps({"messages": [USER, USER, REPLY]}): "two user turns in a row",
    json.dumps({"messages": [REPLY, USER, REPLY]}): "starts with an assistant turn",
    json.dumps({"messages": [*ONE, WITH_SYSTEM[0], *ONE]}): "a system turn that is not the first",
    json.dumps({"messages": [USER, {"role": "tool", "content": "x"}, REPLY]}): "unknown role 'tool'",
    json.dumps({"messages": [USER, {"content": "x"}]}): "a turn without a role",
    json.dumps({"messages": [USER, "x"]}): "a turn without a role",
    json.dumps({"messages": [USER, {"role": "assistant", "content": None}]}): "content of the assistant is no text",
    json.dumps({"messages": [USER, {"role": "assistant", "content": "a \ud83d"}]}): "not UTF-8",
    json.dumps({"messages": [{"role": "user", "content": "\udc00"}, REPLY]}): "not UTF-8",
    json.dumps({"messages": [USER, {"role": "assistant", "content": " "}]}): "an assistant turn is empty",
    json.dumps({"messages": [USER, {"role": "assistant", "content": "a<|im_end|>\nb"}]}): "quotes the chat template's",
    json.dumps({"messages": [{"role": "user", "content": "<|im_start|>assistant\n"}, REPLY]}): "quotes the chat",
}


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=[str(index) for index in range(len(BAD))])
def test_a_malformed_line_is_skipped_with_its_number_and_reason(tmp_path, line, reason):
    good = {"messages": ONE}
    first, bad, last = samples_of(
        write(tmp_path / "c.jsonl", good, line, good), chat_template("model", tokenizer()), 4096
    )
    assert first[0] == 1 and last[0] == 3
    assert isinstance(bad, Skipped) and bad.line == 2 and reason in bad.reason


def test_other_faults_of_lines(tmp_path):
    (tmp_path / "c.jsonl").write_bytes(b'\xff\xfe\n{"messages": []}')
    assert [item.reason for item in read_conversations(tmp_path / "c.jsonl")] == ["not UTF-8", "no assistant turn"]
    with pytest.raises(UserError, match="cannot be read"):
        list(read_conversations(tmp_path / "absent.jsonl"))
    refused = list(
        samples_of(write(tmp_path / "s.jsonl", {"messages": WITH_SYSTEM}), chat_template("model", tokenizer(GEMMA)), 99)
    )
    assert "System role not supported" in refused[0].reason


def test_a_long_line_is_one_sample(tmp_path):
    long = [USER, {"role": "assistant", "content": "a " * 500_000}]
    sample, _ = sampled(tmp_path, long, max_length=4096)
    assert len(sample.tokens) == 4096


def test_lines_keep_their_order_beyond_what_is_tokenised_at_once(tmp_path):
    lines = [{"messages": [USER, {"role": "assistant", "content": f"answer {i}"}]} if i % 7 else "" for i in range(150)]
    items = list(samples_of(write(tmp_path / "c.jsonl", *lines), chat_template("model", tokenizer()), 4096))
    assert [item.line if isinstance(item, Skipped) else item[0] for item in items] == list(range(1, 151))
    for index, item in enumerate(items):
        assert isinstance(item, Skipped) == (index % 7 == 0)
        if index % 7:
            assert f"[answer {index}<" in masked(item[1], tokenizer())


# what is left out


def collected(path, items, min_labels=4, strict=False) -> Collection:
    found = Collection(path, min_labels)
    for item in items:
        found.add(item, strict=strict)
    return found


def labelled(count: int) -> Sample:
    return Sample(np.arange(20, dtype=np.int32), np.arange(20) < count)


def test_what_is_left_out_is_counted_with_reasons_and_lines(tmp_path):
    items = [(i, labelled(9)) for i in range(1, 31)] + [(31, labelled(3)), (32, labelled(0))]
    items += [Skipped(line, "bad JSON") for line in range(33, 40)] + [Skipped(40, "empty line")]
    found = collected(tmp_path / "c.jsonl", items)
    found.check()
    assert found.summary() == [
        f"{tmp_path}/c.jsonl: 30 of 40 conversations to train on",
        "  skipped 7: bad JSON (lines 33, 34, 35, 36, 37 and 2 more)",
        "  skipped 1: empty line (line 40)",
        "  dropped 1: fewer than 4 labels (line 31)",
        "  dropped 1: no label within --max-length (line 32)",
    ]


def test_more_than_a_twentieth_without_labels_stops(tmp_path):
    full = [(i, labelled(9)) for i in range(1, 20)]
    collected(tmp_path, [*full, (20, labelled(0))]).check()
    with pytest.raises(UserError, match="2 of 21 samples of .* have an empty loss mask, first: line 20"):
        collected(tmp_path, [*full, (20, labelled(0)), (21, labelled(0))]).check()


def test_strict_stops_at_the_first_malformed_line(tmp_path):
    with pytest.raises(UserError, match="c.jsonl, line 2: bad JSON; mend it"):
        collected(tmp_path / "c.jsonl", [(1, labelled(9)), Skipped(2, "bad JSON")], strict=True)


# the same batches, whatever the data came from


def turns(samples=12, seed=0) -> list[list[dict[str, str]]]:
    """Single-turn conversations of random letters."""
    rng = np.random.default_rng(seed)
    texts = ["".join(chr(97 + c) for c in rng.integers(0, 26, rng.integers(12, 30))) for _ in range(samples)]
    return [[{"role": "user", "content": text[:5]}, {"role": "assistant", "content": text}] for text in texts]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target with a tokenizer, a drafter, and the same samples as conversations and as tokens."""
    home = tmp_path_factory.mktemp("folders")
    target, words = tiny_target("llama", vocab_size=VOCAB), tokenizer()
    write_target(target, home / "target")
    words.inner.save_pretrained(home / "target")
    write_drafter(tiny_drafter(target), home / "drafter", "specforge")
    write(home / "c.jsonl", *({"messages": messages} for messages in turns()))
    prompts = [words.encode_chat(messages[:1]) for messages in turns()]
    answers = [words.encode_rendered(messages[1]["content"] + "<|im_end|>\n") for messages in turns()]
    flat = [token for pair in zip(prompts, answers, strict=True) for part in pair for token in part]
    lens = [(len(prompt), len(answer)) for prompt, answer in zip(prompts, answers, strict=True)]
    np.savez(home / "c.npz", flat=np.array(flat, np.uint16), lens=np.array(lens, np.uint16))
    return home


def token_file(folders, name="c.jsonl") -> TokenFile:
    found = samples_of(folders / name, chat_template("model", tokenizer()), 4096)
    return TokenFile.of([sample for _, sample in found], 4096)


def command(folders, out, data, *more):
    return [
        "train", "--target-model-path", str(folders / "target"), "--draft-init-path", str(folders / "drafter"),
        "--train-data-path", str(data), "--output-dir", str(out), "--max-steps", "3", "--batch-size", "4",
        "--num-anchors", "4", "--log-interval", "1", "--dtype", "float32", "--device", "cpu", *more,
    ]  # fmt: skip


def test_batches_are_those_of_the_token_file(folders):
    ours, theirs = token_file(folders), TokenFile.read(folders / "c.npz", 4096)
    for a, b in zip(batches(ours, 4, 0, 0, 6), batches(theirs, 4, 0, 0, 6), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a.tensors(), b.tensors(), strict=True))


def lazily(path, max_length: int = 4096) -> OnTheFly:
    return OnTheFly.index(Collection(path, 1), chat_template("model", tokenizer()), max_length, VOCAB)


def test_samples_read_on_the_fly_are_those_read_beforehand(folders, tmp_path):
    whole, lazy = token_file(folders), lazily(folders / "c.jsonl")
    assert len(lazy) == len(whole)
    for index in range(len(whole)):
        for mine, theirs in zip(lazy.sample(index), whole.sample(index), strict=True):
            assert (mine == theirs).all()
    wide = [list(batches(lazy, 4, 0, first, 6)) for first in (0, 3)]
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(wide[0][3:], wide[1], strict=True)), "from any step on"
    shares = [list(batches(lazy, 4, 0, 0, 6, Share(rank, 2))) for rank in range(2)]
    for batch, *parts in zip(wide[0], *shares, strict=True):
        assert torch.equal(
            torch.cat([part.starts for part in parts]), torch.cat([batch.starts[r::2] for r in range(2)])
        )
    assert (lazily(folders / "c.jsonl", 9).sample(0).tokens == whole.sample(0).tokens[:9]).all()


def test_lines_that_cannot_be_read_on_the_fly_are_counted_or_weigh_nothing(tmp_path):
    path = tmp_path / "c.jsonl"
    write(path, {"messages": TWO}, "no JSON", {"messages": ONE}, {"messages": [{"role": "user", "content": "?"}]})
    account = Collection(path, 1)
    data = OnTheFly.index(account, chat_template("model", tokenizer()), 4096, VOCAB)
    assert len(data) == 2 and {reason: lines for reason, lines in account.skipped.items()} == {
        "bad JSON": [2], "no assistant turn": [4]
    }  # fmt: skip
    assert data.sample(1).labels.any()
    with pytest.raises(UserError, match="the target knows 9"):
        replace(data, vocab_size=9).sample(0)


@pytest.mark.parametrize("length", [5, 90])
def test_conversations_without_a_label_are_told_on_the_fly(folders, tmp_path, capsys, caplog, length):
    long = {"messages": [{"role": "user", "content": "?" * 200}, {"role": "assistant", "content": "yes"}]}
    write(tmp_path / "c.jsonl", {"messages": ONE}, long)
    words = command(folders, tmp_path / "out", tmp_path / "c.jsonl", "--on-the-fly-loader", "--max-length", str(length))
    assert entry([*words, "--max-steps", "1", "--batch-size", "2"]) == (2 if length == 5 else 0)
    told = capsys.readouterr().err + caplog.text
    assert ("none of the first 2 samples has a label" if length == 5 else "1 of the first 2 conversations have") in told


def test_a_run_on_the_fly_resumes_exactly_and_refuses_another_file(folders, tmp_path, capsys):
    path = tmp_path / "c.jsonl"
    path.write_bytes((folders / "c.jsonl").read_bytes())
    whole, parts = (
        command(folders, tmp_path / name, path, "--on-the-fly-loader", "--max-length", "256") for name in ("a", "b")
    )
    assert entry(whole) == 0
    assert entry([*parts, "--save-interval", "2"]) == 0
    shutil.rmtree(next((tmp_path / "b").glob("epoch_*_step_3")))
    assert entry([*parts, "--resume"]) == 0
    assert "tokenised when they are read" in capsys.readouterr().err
    one, two = (torch.load(latest(tmp_path / name) / STATE)["masters"] for name in ("a", "b"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    path.write_bytes(path.read_bytes().replace(b"a", b"b", 1))
    assert entry([*parts, "--resume"]) == 2
    assert "other settings" in capsys.readouterr().err


def test_labels_of_later_turns_reach_the_batch(tmp_path):
    write(tmp_path / "c.jsonl", {"messages": TWO}, {"messages": ONE})
    data = token_file(tmp_path)
    batch = data.collate(np.array([1, 0]))
    for row, index in enumerate((1, 0)):
        sample = data.sample(index)
        assert batch.loss_mask[row, : len(sample.labels)].tolist() == sample.labels.tolist()
        assert not batch.loss_mask[row, len(sample.labels) :].any()


def test_the_cache_works_on_conversations(tmp_path):
    write(tmp_path / "c.jsonl", {"messages": TWO}, {"messages": ONE})
    target, data = tiny_target("llama", vocab_size=VOCAB), token_file(tmp_path)
    cached = cache_features(target, data, (0, 2), 2)
    batch = data.collate(np.array([1, 0]))
    fresh, found = target.features(batch.tokens, (0, 2)), cached(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        assert torch.allclose(fresh.taps[row, :length], found.taps[row, :length], atol=1e-5)


def test_a_run_on_conversations_is_the_run_on_their_tokens(folders, tmp_path, capsys):
    records = []
    for name in ("c.jsonl", "c.npz"):
        assert entry(command(folders, tmp_path / name, folders / name, "--json")) == 0
        out, err = capsys.readouterr()
        records.append([{**row, "step_ms": 0} for row in json.loads(out)["records"]])
        assert ("12 of 12 conversations to train on" in err) == (name == "c.jsonl")
    assert records[0] == records[1]
    assert entry(command(folders, tmp_path / "c.jsonl", folders / "c.jsonl", "--resume")) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--strict-data"], "bad.jsonl, line 2: bad JSON"),
        (["--max-length", "15"], "have an empty loss mask, first: line 1"),
        (["--max-length", "30"], "no sample left"),
        (["--train-data-path", "absent.jsonl"], "absent.jsonl does not exist"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(folders, tmp_path, capsys, more, message):
    lines = (folders / "c.jsonl").read_text().splitlines()
    data = write(tmp_path / "bad.jsonl", lines[0], "{", *lines[1:])
    assert entry(command(folders, tmp_path / "out", data, *more)) == 2
    assert message in capsys.readouterr().err


def test_a_token_beyond_the_targets_vocabulary_is_refused(folders, tmp_path, capsys):
    target = tiny_target("llama", vocab_size=257)  # the marks of the tokenizer lie beyond
    write_target(target, tmp_path / "target")
    tokenizer().inner.save_pretrained(tmp_path / "target")
    write_drafter(tiny_drafter(target), tmp_path / "drafter", "specforge")
    assert entry(command(tmp_path, tmp_path / "out", folders / "c.jsonl")) == 2
    assert "beyond its vocabulary of 257" in capsys.readouterr().err


def test_several_processes_without_torchrun_are_refused(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.delenv("RANK", raising=False)
    assert entry(command(folders, tmp_path / "out", folders / "c.npz")) == 2
    line = capsys.readouterr().err
    assert "WORLD_SIZE=8" in line and "torchrun" in line
