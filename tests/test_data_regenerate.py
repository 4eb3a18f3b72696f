"""`dloop data` end to end on a tiny target: each answer is the one it gives alone, and stopping changes nothing."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
import test_cli

import dloop
from dloop.chat import Tokenizer
from dloop.cli import data_run
from dloop.cli.main import entry
from dloop.data.answers import Answer, Answers, Parts
from dloop.data.chat_templates import CHATML, SYSTEM
from dloop.data.conversations import Conversation, Skipped, read_conversations
from dloop.data.prompts import Prompts, Question, prompt_encoder, read_questions
from dloop.data.regenerate import built_in, regenerate
from dloop.errors import UserError
from dloop.records import repetition_share
from dloop.sampling import sample_seed
from dloop.settings import Settings
from dloop.testing import tiny_drafter, tiny_target, write_drafter, write_target
from dloop.train.batch import TokenFile

LENGTH = 16
SAMPLED = ["--temperature", "0.9", "--top-k", "50", "--top-p", "0.95", "--seed", "3"]
LINES = [
    {"prompt": "Hello"},
    "no JSON",
    {"turns": ["Why is it so?", "And then?"]},
    {"conversations": [{"from": "human", "value": "Count."}, {"from": "gpt", "value": "1"}]},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "A fruit?"},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": "Another?"},
        ]
    },
    {"prompt": "x" * 100},
    {"prompt": "漢字 and 🙂"},
    {"prompt": "Sing!"},
]
USED = [1, 3, 4, 5, 7, 8]
RENDERED = {
    1: "<user>Hello<assistant>",
    3: "<user>Why is it so?<assistant>",
    4: "<user>Count.<assistant>",
    5: "<system>Be brief.<user>A fruit?<assistant>",
    7: "<user>漢字 and 🙂<assistant>",
    8: "<user>Sing!<assistant>",
}


def write_lines(path: Path, lines=LINES) -> Path:
    text = "".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny target with a tokenizer, whose stop tokens end some answers and not others; and prompts."""
    home = tmp_path_factory.mktemp("data")
    target = tiny_target(vocab_size=test_cli.VOCAB)
    write_target(target, home / "target")
    test_cli.byte_tokenizer().save_pretrained(home / "target")
    texts = [alone(target, line, temperature=0.0) for line in USED]
    config = home / "target" / "config.json"
    stops = [texts[0][5], texts[3][9]]
    config.write_text(json.dumps(json.loads(config.read_text()) | {"eos_token_id": stops}))
    (home / "target" / "generation_config.json").unlink(missing_ok=True)
    write_lines(home / "prompts.jsonl")
    return home


def words(folder: Path, output: Path, *more: str) -> list[str]:
    return [
        "data", "--model", str(folder / "target"), "--prompts", str(folder / "prompts.jsonl"), "--output", str(output),
        "--dtype", "float32", "--device", "cpu", "--max-new-tokens", str(LENGTH), "--max-prompt-tokens", "60", *more,
    ]  # fmt: skip


def alone(target, line: int, temperature: float) -> list[int]:
    ids = test_cli.byte_tokenizer()(RENDERED[line])["input_ids"]
    law = dict(temperature=0.9, top_k=50, top_p=0.95) if temperature else {}
    return dloop.generate(target, None, ids, max_new_tokens=LENGTH, seed=sample_seed(3, line - 1), **law).tokens


def answers_of(path: Path) -> dict[int, tuple[list[int], list[int]]]:
    """Prompt and response by line, read as training reads them."""
    data = TokenFile.read(path, 10_000)
    lines = np.load(path)["lines"].tolist()
    found = {}
    for index, line in enumerate(lines):
        tokens, labels = data.sample(index)
        found[line] = (tokens[~labels].tolist(), tokens[labels].tolist())
    return found


def interrupted(monkeypatch, after: int, error: type[BaseException] = KeyboardInterrupt) -> list[int]:
    """Let the next run end like this after so many answers; the list takes the numbers of the prompts it was given."""
    given, source_of = [], data_run.built_in

    def stopping(*facts):
        def source(prompts):
            def noted():
                for index, tokens in prompts:
                    given.append(index)
                    yield index, tokens

            for count, text in enumerate(source_of(*facts)(noted())):
                if count == after:
                    raise error("stopped")
                yield text

        return source

    monkeypatch.setattr(data_run, "built_in", stopping)
    return given


# what is written


@pytest.mark.parametrize(("engine", "live"), [("fast", 1), ("fast", 4), ("twin", 4)])
@pytest.mark.parametrize("law", [[], SAMPLED], ids=["greedy", "sampled"])
def test_every_answer_is_the_one_the_target_gives_alone(folder, tmp_path, capsys, law, engine, live):
    output = tmp_path / "new" / "out.npz"
    assert entry(words(folder, output, "--live", str(live), "--engine", engine, "--shard", "4", *law, "--json")) == 0
    target = dloop.load_target(str(folder / "target"), dtype="float32", engine="twin")
    tokenizer = test_cli.byte_tokenizer()
    expected = {line: (tokenizer(RENDERED[line])["input_ids"], alone(target, line, float(bool(law)))) for line in USED}
    assert answers_of(output) == expected
    assert np.load(output)["flat"].dtype == np.uint16
    ended = [answer[-1] in target.stop_ids for _, answer in expected.values()]
    assert np.load(output)["ended"].tolist() == ended
    if not law:
        assert 0 < sum(ended) < len(USED)
    record = json.loads(capsys.readouterr().out)
    assert record == json.loads((tmp_path / "new" / "out.npz.json").read_text())
    assert [path.name for path in sorted(output.parent.iterdir())] == ["out.npz", "out.npz.json"]
    assert (record["samples"], record["ended"], record["cut"]) == (6, sum(ended), 6 - sum(ended))
    assert record["prompt_tokens"] == sum(len(prompt) for prompt, _ in expected.values())
    assert record["response_tokens"] == sum(len(answer) for _, answer in expected.values())
    shares = [repetition_share(answer) for _, answer in expected.values()]
    assert record["repetition_share"] == pytest.approx(np.mean(shares))
    assert record["tokens_per_s"] == pytest.approx(record["response_tokens"] / record["seconds"])


def test_an_answer_depends_on_its_line_alone(folder, tmp_path):
    """Neither on how many others there are nor on which are left out."""
    assert entry(words(folder, tmp_path / "all.npz", *SAMPLED)) == 0
    assert entry(words(folder, tmp_path / "some.npz", *SAMPLED, "--max-samples", "3", "--max-prompt-tokens", "25")) == 0
    whole, some = answers_of(tmp_path / "all.npz"), answers_of(tmp_path / "some.npz")
    assert list(some) == [1, 4, 8] and some == {line: whole[line] for line in some}


def test_conversations_as_text_are_read_back(folder, tmp_path):
    assert entry(words(folder, tmp_path / "out.npz", *SAMPLED)) == 0
    assert entry(words(folder, tmp_path / "out.jsonl", *SAMPLED)) == 0
    tokenizer = Tokenizer(test_cli.byte_tokenizer(), "tiny")
    answers = answers_of(tmp_path / "out.npz")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    found = list(read_conversations(tmp_path / "out.jsonl"))
    assert [row["line"] for row in rows] == USED and len(found) == len(rows)
    ended = dict(zip(USED, np.load(tmp_path / "out.npz")["ended"].tolist(), strict=True))
    for row, conversation in zip(rows, found, strict=True):
        assert isinstance(conversation, Conversation)
        *asked, reply = conversation.messages
        line = row["line"]
        assert "".join(f"<{turn['role']}>{turn['content']}" for turn in asked) + "<assistant>" == RENDERED[line]
        text = tokenizer.decode(answers[line][1])
        assert reply["content"] == (text if ended[line] else text.rstrip("\N{REPLACEMENT CHARACTER}"))
        assert row["finish_reason"] == ("stop" if ended[line] else "length")
        assert row["sampling"] == {
            "temperature": 0.9, "top_k": 50, "top_p": 0.95, "seed": sample_seed(3, line - 1), "max_new_tokens": LENGTH
        }  # fmt: skip
    assert json.loads((tmp_path / "out.jsonl.json").read_text())["samples"] == len(rows)


def test_a_step_of_training_takes_the_tokens(folder, tmp_path, capsys):
    target = tiny_target(vocab_size=test_cli.VOCAB)
    drafter = write_drafter(tiny_drafter(target), tmp_path / "drafter", "specforge")
    assert entry(words(folder, tmp_path / "out.npz")) == 0
    train = [
        "train", "--target-model-path", str(folder / "target"), "--draft-init-path", str(drafter), "--train-data-path",
        str(tmp_path / "out.npz"), "--output-dir", str(tmp_path / "run"), "--max-steps", "1", "--batch-size", "2",
        "--num-anchors", "4", "--log-interval", "1", "--dtype", "float32", "--device", "cpu",
    ]  # fmt: skip
    capsys.readouterr()
    assert entry([*train, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["records"]) == 1


# stopping and going on


@pytest.mark.parametrize(("after", "kind"), [(0, "npz"), (3, "npz"), (4, "jsonl")])
def test_a_stopped_run_goes_on_exactly(folder, tmp_path, capsys, monkeypatch, after, kind):
    once, twice = tmp_path / f"once.{kind}", tmp_path / f"twice.{kind}"
    assert entry(words(folder, once, *SAMPLED)) == 0
    with monkeypatch.context() as patch:
        interrupted(patch, after)
        assert entry(words(folder, twice, *SAMPLED, "--shard", "2", "--live", "2")) == 130
    parts = Parts.beside(twice)
    assert f"{after} of 6 answers are in {parts.folder}" in capsys.readouterr().err
    assert len(parts.lines()) == after and not twice.exists()
    (parts.folder / ".part-000009.npz.partial").write_bytes(b"half of a part")
    with monkeypatch.context() as patch:
        given = interrupted(patch, 99)
        assert entry(words(folder, twice, *SAMPLED, "--live", "3", "--resume")) == 0  # neither live nor shard matters
    assert len(given) == 6 - after
    assert twice.read_bytes() == once.read_bytes()
    first, second = (json.loads(path.with_name(f"{path.name}.json").read_text()) for path in (once, twice))
    assert {key for key in first if first[key] != second[key]} <= {"seconds", "tokens_per_s"}
    assert not parts.folder.exists()


def test_a_finished_run_is_not_done_again(folder, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out.npz"
    assert entry(words(folder, output)) == 0
    record = json.loads((tmp_path / "out.npz.json").read_text())
    given = interrupted(monkeypatch, 0)
    capsys.readouterr()
    assert entry(words(folder, output, "--resume", "--json")) == 0
    assert json.loads(capsys.readouterr().out) == record and given == []
    assert "exists; choose another name" in refused(capsys, *words(folder, output))
    assert "another setting.seed;" in refused(capsys, *words(folder, output, "--resume", "--seed", "1"))


def test_a_run_that_fails_keeps_its_answers(folder, tmp_path, capsys, monkeypatch):
    interrupted(monkeypatch, 3, RuntimeError)
    assert entry(words(folder, tmp_path / "out.npz")) == 1
    assert len(Parts.beside(tmp_path / "out.npz").lines()) == 3
    assert capsys.readouterr().err.splitlines()[-1].startswith("dloop data: failed: RuntimeError: stopped")


def test_a_caller_that_stops_keeps_its_answers(folder, tmp_path):
    target = dloop.load_target(str(folder / "target"), dtype="float32")
    encode = prompt_encoder("model", Tokenizer(test_cli.byte_tokenizer(), "tiny"))
    prompts = Prompts(folder / "prompts.jsonl", encode, 100)
    for item in read_questions(prompts.path):
        prompts.add(item)
    parts = Parts(tmp_path)
    source = built_in(target, Settings(max_new_tokens=4, seed=0), 2)
    run = regenerate(prompts.used, source, parts, shard=2, vocab_size=target.vocab_size)
    lines = {next(run).line for _ in range(3)}
    assert len(parts.files()) == 1
    run.close()
    assert parts.lines() == lines and len(parts.files()) == 2


@pytest.fixture(scope="module")
def stopped(folder, tmp_path_factory) -> Path:
    """The output of a sampled run that was interrupted after two answers."""
    output = tmp_path_factory.mktemp("stopped") / "out.npz"
    with pytest.MonkeyPatch.context() as patch:
        interrupted(patch, 2)
        assert entry(words(folder, output, *SAMPLED)) == 130
    return output


@pytest.mark.parametrize(
    ("more", "name"),
    [
        (["--temperature", "0.5"], "setting.temperature"),
        (["--seed", "4"], "setting.seed"),
        (["--max-new-tokens", "17"], "setting.max_new_tokens"),
        (["--max-samples", "5"], "setting.max_samples"),
        (["--engine", "twin"], "engine"),
        (["--dtype", "bfloat16"], "dtype"),
        (["--chat-template", "none"], "setting.chat_template"),
        ([], "prompts.sha256"),
        ([], "checkpoint_sha256"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_run_with_other_settings_is_refused_in_the_same_place(folder, stopped, tmp_path, capsys, more, name):
    if name == "prompts.sha256":
        more = ["--prompts", str(write_lines(tmp_path / "other.jsonl", [*LINES[:7], {"prompt": "Sing?"}]))]
    if name == "checkpoint_sha256":
        write_target(tiny_target(seed=1, vocab_size=test_cli.VOCAB), tmp_path / "target")
        test_cli.byte_tokenizer().save_pretrained(tmp_path / "target")
        more = ["--model", str(tmp_path / "target")]
    line = refused(capsys, *words(folder, stopped, *SAMPLED, "--resume", *more))
    assert "is of a run with another" in line and name in line
    assert len(Parts.beside(stopped).lines()) == 2


def test_an_unfinished_run_is_not_overwritten(folder, stopped, capsys):
    assert "add --resume" in refused(capsys, *words(folder, stopped, *SAMPLED))
    assert len(Parts.beside(stopped).lines()) == 2


def test_a_damaged_part_is_named_and_can_be_removed(folder, tmp_path, capsys, monkeypatch):
    output = tmp_path / "out.npz"
    with monkeypatch.context() as patch:
        interrupted(patch, 4)
        assert entry(words(folder, output, "--shard", "2")) == 130
    part = Parts.beside(output).files()[0]
    part.write_bytes(part.read_bytes()[:-40])
    capsys.readouterr()
    assert f"{part} is damaged" in refused(capsys, *words(folder, output, "--resume"))
    part.unlink()
    assert entry(words(folder, output, "--resume")) == 0
    assert list(answers_of(output)) == USED


def test_parts_never_hide_one_another_and_a_line_counts_once(tmp_path):
    parts = Parts(tmp_path)
    for lines in ([1, 2], [3], [2]):
        texts = [Answer(line, np.array([line]), np.array([9, line]), True) for line in lines]
        parts.append(Answers.of(texts, 2**17, 1.5))
    (parts.files()[0]).unlink()
    parts.append(Answers.of([Answer(4, np.array([4]), np.array([9, 4]), False)], 2**17, 1.5))
    whole = parts.read(2**17)
    assert whole.lines.tolist() == [2, 3, 4] and whole.flat.tolist() == [2, 9, 2, 3, 9, 3, 4, 9, 4]
    assert whole.flat.dtype == np.uint32 and whole.ended.tolist() == [True, True, False] and whole.seconds == 4.5


# prompts


def refused(capsys, *line: str) -> str:
    """The last line on standard error of a command that must end with 2."""
    assert entry(line) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()[-1]


@pytest.mark.parametrize("name", ["prompts.jsonl", "prompts.jsonl.gz"])
def test_what_is_left_out_is_counted_by_reason(folder, tmp_path, capsys, name):
    path = write_lines(tmp_path / name, [*LINES, {"prompt": "y" * 250}, "", {"prompt": "last"}])
    more = ["--prompts", str(path), "--max-prompt-tokens", "240", "--max-samples", "7", "--json"]
    assert entry(words(folder, tmp_path / "out.npz", *more)) == 0
    out, err = capsys.readouterr()
    prompts = json.loads(out)["prompts"]
    assert (prompts["lines"], prompts["used"], prompts["first_question_only"]) == (11, 7, 2)
    assert prompts["left_out"] == {
        "bad JSON": {"count": 1, "first_lines": [2]},
        "beyond --max-samples 7": {"count": 2, "first_lines": [9, 11]},
        "empty line": {"count": 1, "first_lines": [10]},
    }
    assert "7 of 11 prompts to answer" in err and "left out 1: bad JSON (line 2)" in err
    assert "2 conversations are asked their first question alone" in err


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("[]", "none of 'prompt', 'turns', 'conversations', 'messages'"),
        ('{"text": "a"}', "none of 'prompt', 'turns', 'conversations', 'messages'"),
        ('{"prompt": "a", "turns": ["b"]}', "both 'prompt' and 'turns'"),
        ('{"prompt": " "}', "the user turn is empty"),
        ('{"prompt": 5}', "content of the user is no text"),
        ('{"prompt": "\\ud800"}', "not UTF-8"),
        ('{"turns": []}', "'turns' is no list with something in it"),
        ('{"turns": "a"}', "'turns' is no list with something in it"),
        ('{"messages": [5]}', "a turn without a role"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "starts with an assistant turn"),
        ('{"messages": [{"role": "system", "content": "a"}]}', "no user turn"),
        ('{"messages": [{"role": "tool", "content": "a"}]}', "unknown role 'tool'"),
        ('{"prompt": ', "bad JSON"),
        ("[" * 100_000, "bad JSON"),
        ("\xff", "not UTF-8"),
    ],
    ids=str.__str__,
)
def test_a_malformed_line_is_told_with_its_reason(tmp_path, line, reason):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(line.encode("latin-1") + b'\n{"prompt": "good"}\n')
    bad, good = read_questions(path)
    assert bad == Skipped(1, reason)
    assert good.messages == [{"role": "user", "content": "good"}]


def test_prompts_that_are_too_long_for_the_target_are_left_out():
    prompts = Prompts(Path("x"), lambda messages: [1] * len(messages[0]["content"]), room=5, max_tokens=None)
    for line, text in enumerate(["12345", "123456"], 1):
        prompts.add(Question(line, [{"role": "user", "content": text}], asks_more=False))
    assert [len(prompt.tokens) for prompt in prompts.used] == [5]
    assert dict(prompts.skipped) == {"leaves no room for the answer in the target's context": [2]}


def test_templates_write_what_decoding_writes():
    tokenizer = test_cli.byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    ours, question = Tokenizer(tokenizer, "tiny"), [{"role": "user", "content": "Hi"}]
    chatml = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_encoder("qwen", ours)(question) == ours.encode_rendered(chatml)
    assert prompt_encoder("model", ours)(question) == ours.encode_chat(question)
    assert prompt_encoder("none", ours)(question) == ours.encode("Hi")
    tokenizer.chat_template = CHATML
    assert prompt_encoder("qwen", ours)(question) == ours.encode_rendered(chatml)
    system = [{"role": "system", "content": "S"}, *question]
    assert ours.show(prompt_encoder("qwen", ours)(system)).startswith(
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user"
    )
    with pytest.raises(ValueError, match="no chat template to write it with"):
        prompt_encoder("none", ours)(system)
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="use --chat-template qwen, or none"):
        prompt_encoder("model", ours)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--prompts", "nowhere.jsonl"], "is no file"),
        (["--output", "out.csv"], "must end in .npz (tokens) or .jsonl"),
        (["--output", "out.jsonl", "--chat-template", "none"], "--chat-template none makes no conversations"),
        (["--live", "0"], "--live 0 must be at least 1"),
        (["--live", "many"], "expected INTEGER|auto"),
        (["--shard", "0"], "--shard 0 must be at least 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be at least 1"),
        (["--temperature", "-1"], "temperature=-1.0 must be"),
        (["--seed", "-1"], "seed=-1 must lie in"),
        (["--max-prompt-tokens", "3"], "has no prompt to answer (7: more than"),
        (["--max-new-tokens", "256"], "has no prompt to answer"),
        (["--chat-template", "qwen"], "needs the token <|im_start|>"),
        (["--device", "tpu9"], "tpu9"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_refused_and_leaves_nothing(folder, tmp_path, capsys, monkeypatch, more, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(capsys, *words(folder, tmp_path / "out.npz", "--max-prompt-tokens", "60", *more))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip at all", gzip.compress(b'{"prompt": "a"}\n' * 50)[:-9]],
    ids=["empty", "other bytes", "cut off"],  # compressed bytes hold the time
)
def test_files_that_hold_no_prompts_are_refused(folder, tmp_path, capsys, content):
    path = tmp_path / "prompts.jsonl.gz"
    path.write_bytes(content)
    line = refused(capsys, *words(folder, tmp_path / "out.npz", "--prompts", str(path)))
    assert "cannot be read" in line or "the file is empty" in line
