"""`dloop chat`: turn after turn. The tiny target answers every question with the same words, a byte at a time."""

import io
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dloop.chat import UNFINISHED
from dloop.cli.args import parse
from dloop.cli.chat import HELP, Command
from dloop.cli.conversation import open_conversation
from dloop.cli.main import entry
from dloop.testing import good_drafter, tiny_target, write_drafter, write_target

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "漢🙂é!"  # no byte twice, so that each byte has one successor
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
END = 256


@torch.no_grad()
def speaking_target(chain: list[int]):
    """A target whose next token depends on the last one alone, along this chain."""
    target = tiny_target(vocab_size=260)
    for name, weight in target.model.named_parameters():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
    embedding = target.model.get_parameter("model.embed_tokens.weight")
    norm = target.model.get_parameter("model.norm.weight")
    norm.fill_(1.0)
    head = target.model.get_parameter("lm_head.weight")
    head.mul_(0.01)
    for token, following in zip(chain, chain[1:], strict=False):
        head[following] = embedding[token] / embedding[token].norm() * 5
    return target


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    """The flags that name the models."""
    home = tmp_path_factory.mktemp("talk")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=TEMPLATE)
    chain = [*tokenizer(">" + ANSWER)["input_ids"], END]
    target = speaking_target(chain)
    write_target(target, home / "target")
    tokenizer.save_pretrained(home / "target")
    write_drafter(good_drafter(target, [chain]), home / "drafter", "specforge")
    return [
        "--model", str(home / "target"), "--draft-model", str(home / "drafter"), "--dtype", "float32",
        "--device", "cpu", "--stop-token-ids", str(END), "--max-new-tokens", "20",
    ]  # fmt: skip


def baseline(words: list[str]) -> list[str]:
    return [*words[:2], "--baseline", *words[4:]]


@pytest.fixture
def chat(words, monkeypatch, capsys):
    """Lines in; exit code, standard output and standard error out."""

    def run(*lines: str | bytes, flags: tuple[str, ...] = (), base: list[str] = words):
        data = b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="ascii"))
        code = entry(["chat", *base, *flags])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("gate", ["1.0", "-0.5", "-inf"])
def test_piped_each_line_is_a_turn_without_colour(chat, gate):
    code, out, err = chat("Hi", "", "漢字?", flags=("--loop-gate", gate))
    assert (code, out, err) == (0, f"{ANSWER}\n{ANSWER}\n", "")


def test_the_whole_conversation_is_encoded_each_turn(chat):
    code, out, err = chat("one", "two", flags=("--json", "--system", "S"))
    document = json.loads(out)
    assert code == 0 and err == ""
    assert [message["role"] for message in document["messages"]] == ["system", *["user", "assistant"] * 2]
    assert [message["content"] for message in document["messages"]] == ["S", "one", ANSWER, "two", ANSWER]
    contexts = [turn["rounds"][0]["context_len"] for turn in document["turns"]]
    assert contexts[1] - contexts[0] == len(f"{ANSWER}<user>two<assistant>".encode())
    assert all(turn["finish_reason"] == "stop" and turn["text"] == ANSWER for turn in document["turns"])


def test_reset_forgets_all_but_the_system_prompt(chat):
    _, out, err = chat("one", "/reset", "two", flags=("--json", "--system", "S"))
    assert [message["content"] for message in json.loads(out)["messages"]] == ["S", "two", ANSWER]
    assert err == "the conversation is forgotten\n"


def test_stats_sum_up_and_exit_ends(chat):
    code, out, err = chat("/stats", "one", "two", "/stats", "/exit", "three", flags=("--loop-gate", "-inf"))
    before, after = err.splitlines()
    assert before == "answers: 0, tokens: 0" and out.count(ANSWER) == 2 and code == 0
    assert after.startswith(f"answers: 2, tokens: {2 * (len(ANSWER.encode()) + 1)}; ") and "tau" in after


def test_the_trace_goes_on_and_off(chat):
    _, out, err = chat("one", "/trace on", "two", "/trace off", "three")
    assert out == f"{ANSWER}\n" * 3 and err.count("round  kept") == 1 and "\x1b" not in err
    assert chat("one", flags=("--trace",))[2].count("round  kept") == 1


@pytest.mark.parametrize("line", ["/foo", "/trace", "/trace maybe"])
def test_an_unknown_command_is_told(chat, line):
    code, out, err = chat(line)
    assert (code, out) == (0, "") and err == f"{line} is not a command; {HELP}\n"


def test_a_path_is_no_command_and_help_is(chat):
    assert chat("/etc/passwd is what?")[1] == f"{ANSWER}\n"
    assert chat("/help")[2] == f"{HELP}\n"


def test_a_full_context_says_how_to_go_on(chat):
    code, out, err = chat("a" * 100, "b" * 150, "/reset", "b" * 150)
    assert code == 1 and out == f"{ANSWER}\n" * 2
    assert "exceeds the context of 256" in err and "/reset" in err and "Your line was not added" in err


def test_a_first_line_that_is_too_long_is_told(chat):
    code, out, err = chat("a" * 300, "b")
    assert code == 1 and out == f"{ANSWER}\n" and "exceed the context" in err


def test_what_the_template_refuses_leaves_the_conversation_as_it_was(chat):
    code, out, err = chat("one", "refuse", "two", flags=("--json",))
    assert code == 1 and "refuses these messages: no" in err
    assert [message["content"] for message in json.loads(out)["messages"]] == ["one", ANSWER, "two", ANSWER]


def test_a_line_that_is_not_utf8_is_refused(chat):
    code, out, err = chat("one", b"\xff")
    assert code == 2 and "line 2 of standard input is not UTF-8" in err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--temperature", "-1"], "temperature=-1.0"),
        (["--stage-tree-budget", "9"], "tree_budget is 0 for dspark"),
        (["--max-new-tokens", "9999"], "exceed the context"),
        (["--system", "refuse"], "refuses these messages"),
    ],
)
def test_faults_of_every_turn_are_told_before_the_first(chat, flags, message):
    code, out, err = chat("one", flags=tuple(flags))
    assert code == 2 and out == "" and message in err and err.count("\n") == 1


class Stops(io.StringIO):
    """A screen that presses Ctrl-C when it reads this."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.at in text:
            signal.raise_signal(signal.SIGINT)
        return count


def test_ctrl_c_stops_the_answer_only_and_its_text_stays(words, monkeypatch, capsys):
    conversation = open_conversation(parse(Command, "x", baseline(words)), None)
    screen = Stops("🙂")
    monkeypatch.setattr(sys, "stdout", screen)
    conversation.answer("one", quiet=False)
    assert screen.getvalue() == "漢🙂\n"
    assert conversation.messages == [{"role": "user", "content": "one"}, {"role": "assistant", "content": "漢🙂"}]
    assert conversation.turns[0].finish == "interrupted"
    conversation.answer("two", quiet=False)  # the screen presses again
    assert [message["content"] for message in conversation.messages] == ["one", "漢🙂", "two", "漢🙂"]
    assert "(stopped; the answer so far stays)" in capsys.readouterr().err


def test_ctrl_c_before_the_first_character_forgets_the_line(words, capsys):
    conversation = open_conversation(parse(Command, "x", baseline(words)), None)
    stream = conversation.begin("one")

    def events():
        yield next(stream._events)  # the first of three bytes of a character
        raise KeyboardInterrupt

    stopped = type(stream)(events(), None, exact=False)
    conversation.begin = lambda text: stopped
    conversation.answer("one", quiet=False)
    out, err = capsys.readouterr()
    assert conversation.messages == [] and UNFINISHED not in out and "your line is forgotten" in err


def test_a_target_without_a_template_is_refused(tmp_path, capsys):
    write_target(tiny_target(), tmp_path)
    assert entry(["chat", "--model", str(tmp_path), "--baseline"]) == 2
    assert "no chat template" in capsys.readouterr().err


def read_until(master: int, text: str, seconds: float = 60) -> str:
    """What a terminal shows up to this text."""
    seen, end = b"", time.monotonic() + seconds
    while text not in seen.decode(errors="replace"):
        assert time.monotonic() < end, seen.decode(errors="replace")
        if select.select([master], [], [], 0.2)[0]:
            seen += os.read(master, 4096)
    return seen.decode(errors="replace")


def test_a_terminal_has_a_prompt_and_ctrl_d_ends(words):
    master, slave = pty.openpty()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    process = subprocess.Popen(
        [sys.executable, "-m", "dloop", "chat", *words], stdin=slave, stdout=slave, stderr=slave, env=env,
        start_new_session=True,
    )  # fmt: skip
    try:
        assert HELP in read_until(master, "> ").replace("\r\n", "")
        os.write(master, b"Hi\n")
        assert ANSWER in read_until(master, f"{ANSWER}\r\n> ")
        time.sleep(0.5)  # a signal between the prompt and the read that follows it waits for the next key
        process.send_signal(signal.SIGINT)  # at the prompt: a hint, not the end
        read_until(master, "ends\r\n> ")
        os.write(master, b"\x04")
        assert process.wait(30) == 0
    finally:
        process.kill()
        os.close(master)
        os.close(slave)


@pytest.mark.slow
def test_a_conversation_with_the_offline_target_is_the_one_without_a_drafter(smollm2_dir, monkeypatch, capsys):
    lines = "Name three colours.\nAnd three animals?\n"
    texts = []
    for flags in (["--loop-gate", "-0.5"], ["--baseline"]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        assert entry(["chat", "--model", "smollm2", "--max-new-tokens", "40", "--dtype", "float32", *flags]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].count("\n") >= 2
