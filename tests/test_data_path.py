"""`dloop data prepare | regenerate | inspect`, and the whole way from a file of conversations to a measured drafter."""

import json
import sys
import threading
import time
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import test_cli

from dloop.cli.main import entry
from dloop.testing import tiny_drafter, tiny_target, write_drafter, write_target

ROOT = Path(__file__).resolve().parents[1]
LINES = [
    {"conversations": [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "1"}]},
    "no JSON",
    {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two?"}]},
    {
        "conversations": [
            {"from": "human", "value": "Three?"},
            {"from": "gpt", "value": "3"},
            {"from": "human", "value": "Four?"},
        ]
    },
    {"prompt": "漢字?"},
    {"conversations": [{"role": "user", "content": ""}]},
    {"conversations": [{"role": "robot", "content": "x"}]},
]
USED = [1, 3, 4, 5]


def write_lines(path: Path, lines=LINES) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


class Server:
    """A real HTTP server that answers like an OpenAI-compatible one; `faults`: statuses to give first.

    `answer` gives a message's fields, and why it ended under "why"; or the bytes of a whole body.
    """

    def __init__(self, answer, faults=()) -> None:
        self.seen, self.faults, lock = [], list(faults), threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):  # noqa: N802
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.seen.append((self.path, body))
                    status = outer.faults.pop(0) if outer.faults else 200
                if status == "drop":
                    self.connection.close()
                    return
                text = answer(body["messages"])
                if isinstance(text, bytes):
                    raw = text
                else:
                    why = text.pop("why", "stop")
                    reply = {"choices": [{"message": {"role": "assistant", **text}, "finish_reason": why}]}
                    raw = json.dumps(reply if status == 200 else {"error": "x"}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.http.server_address[1]}"

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def servers():
    made = []

    def make(answer=lambda messages: {"content": f"echo {messages[-1]['content']} {len(messages)}"}, faults=()):
        made.append(Server(answer, faults))
        return made[-1]

    yield make
    for server in made:
        server.stop()


def words(tmp_path: Path, *addresses: str, out: str = "out.jsonl") -> list[str]:
    return [
        "data", "regenerate", "--model", "m", "--input-file-path", str(tmp_path / "in.jsonl"), "--output-file-path",
        str(tmp_path / out), "--retry-wait", "0", "--concurrency", "3", "--server-address", *addresses,
    ]  # fmt: skip


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# preparing


def test_three_dialects_become_one_and_bad_lines_are_listed(tmp_path, capsys):
    source, out = write_lines(tmp_path / "in.jsonl"), tmp_path / "new" / "out.jsonl"
    assert entry(["data", "prepare", "--input", str(source), "--output", str(out), "--json"]) == 0
    found = rows(out)
    assert [row["id"] for row in found] == USED
    assert [[turn["role"] for turn in row["conversations"]] for row in found] == [
        ["user", "assistant"], ["system", "user"], ["user", "assistant", "user"], ["user"]
    ]  # fmt: skip
    assert found[3]["conversations"] == [{"role": "user", "content": "漢字?"}]
    assert rows(tmp_path / "new" / "out.jsonl.bad.jsonl") == [
        {"line": 2, "reason": "bad JSON"}, {"line": 6, "reason": "no user turn"},
        {"line": 7, "reason": "unknown role 'robot'"},
    ]  # fmt: skip
    assert json.loads(capsys.readouterr().out)["samples"] == 4
    assert entry(["data", "prepare", "--input", str(source), "--output", str(out), "--strict"]) == 2
    assert "line 2: bad JSON" in capsys.readouterr().err and len(rows(out)) == 4, "a failed run leaves what was there"


def test_a_conversation_goes_before_its_prompt_and_two_are_refused(tmp_path):
    talk = [{"role": "user", "content": "q1"}, {"role": "assistant", "content": "a1"}]
    lines = [
        {"prompt": "q1", "prompt_id": "x", "messages": talk},
        {"prompt": "q2", "messages": None, "conversations": None},
        {"messages": None, "conversations": talk},
        {"messages": talk, "conversations": None},
        {"messages": talk, "conversations": talk},
        {"prompt": None, "messages": None},
    ]
    source, out = write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    assert entry(["data", "prepare", "--input", str(source), "--output", str(out)]) == 0
    asked = [{"role": "user", "content": "q2"}]
    assert [row["conversations"] for row in rows(out)] == [talk, asked, talk, talk]
    assert rows(tmp_path / "out.jsonl.bad.jsonl") == [
        {"line": 5, "reason": "both 'conversations' and 'messages'"},
        {"line": 6, "reason": "no list 'conversations' or 'messages', and no 'prompt'"},
    ]


def test_half_a_surrogate_pair_is_a_bad_line_wherever_lines_are_read(tmp_path, servers, capsys):
    """JSON can spell it, UTF-8 cannot; a replaced character would be trained on."""
    bad = {"conversations": [LINES[0]["conversations"][0], {"role": "assistant", "content": "a \ud83d"}]}
    source, out = write_lines(tmp_path / "in.jsonl", [{"prompt": "x\ud83d"}, bad, LINES[0]]), tmp_path / "ready.jsonl"
    assert entry(["data", "prepare", "--input", str(source), "--output", str(out)]) == 0
    assert [row["id"] for row in rows(out)] == [3] and rows(out)[0]["conversations"] == LINES[0]["conversations"]
    assert rows(tmp_path / "ready.jsonl.bad.jsonl") == [{"line": line, "reason": "not UTF-8"} for line in (1, 2)]
    server = servers()
    capsys.readouterr()
    assert entry(words(tmp_path, server.address)) == 0
    assert "line 1: not UTF-8" in capsys.readouterr().err
    assert len(server.seen) == 1 and [row["line"] for row in rows(tmp_path / "out.jsonl")] == [3]


def test_preparing_never_overwrites_its_input(tmp_path, capsys):
    source = write_lines(tmp_path / "x.jsonl.bad.jsonl")
    (tmp_path / "link.jsonl").symlink_to(source)
    before = source.read_bytes()
    for output in (source, tmp_path / "link.jsonl", tmp_path / "x.jsonl"):  # the last would list bad lines in it
        assert entry(["data", "prepare", "--input", str(source), "--output", str(output)]) == 2
        assert f"{source} would be overwritten" in capsys.readouterr().err
    assert source.read_bytes() == before


def test_perfectblend_is_fetched_to_its_published_place(tmp_path, monkeypatch, capsys):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return [line for line in LINES if isinstance(line, dict)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.chdir(tmp_path)
    assert entry(["data", "prepare", "--dataset", "perfectblend", "--max-samples", "2"]) == 0
    assert asked == [("mlabonne/open-perfectblend", "train")]
    assert len(rows(tmp_path / "cache" / "dataset" / "perfectblend_train.jsonl")) == 2
    monkeypatch.setitem(sys.modules, "datasets", None)
    capsys.readouterr()
    assert entry(["data", "prepare", "--dataset", "perfectblend"]) == 2
    assert "pip install" in capsys.readouterr().err
    assert entry(["data", "prepare"]) == 2 and "either --dataset" in capsys.readouterr().err


# regenerating from servers


def test_several_servers_answer_every_turn_and_keep_the_order(tmp_path, servers, capsys):
    write_lines(tmp_path / "in.jsonl")
    one, two = servers(faults=[503, "drop"]), servers(faults=[429])
    assert entry([*words(tmp_path, one.address, f"http://{two.address}/v1"), "--top-k", "5"]) == 0
    found = rows(tmp_path / "out.jsonl")
    assert [row["line"] for row in found] == USED
    assert [turn["content"] for turn in found[2]["conversations"]] == [
        "Three?",
        "echo Three? 1",
        "Four?",
        "echo Four? 3",
    ]
    assert found[1]["conversations"][0] == {"role": "system", "content": "Be brief."}
    asked = one.seen + two.seen
    failures = 3 - len(one.faults + two.faults)  # as many as each server was asked for
    most = 5 + 2 * failures  # a conversation that fails at its second turn is asked its first again
    assert failures and 5 + failures <= len(asked) <= most, "five turns, and the failures that were tried again"
    assert {path for path, _ in asked} == {"/v1/chat/completions"}
    assert all(body["chat_template_kwargs"] == {"enable_thinking": False} for _, body in asked)
    assert {
        (body["model"], body["temperature"], body["top_p"], body["top_k"], body["max_tokens"]) for _, body in asked
    } == {("m", 0.7, 0.8, 5, 4096)}
    record = json.loads((tmp_path / "out.jsonl.json").read_text())
    assert (record["samples"], record["cut"], record["source"]) == (4, 0, "servers")
    assert not (tmp_path / "out.jsonl.parts").exists()
    assert entry(words(tmp_path, one.address)) == 2 and "exists" in capsys.readouterr().err


def test_what_failed_is_tried_again_and_nothing_twice(tmp_path, servers, capsys):
    write_lines(tmp_path / "in.jsonl")
    stubborn = servers(lambda messages: {"content": "" if messages[-1]["content"] == "Two?" else "yes"})
    assert entry(words(tmp_path, stubborn.address)) == 1
    err = capsys.readouterr().err
    assert "line 3: an empty answer" in err and "1 conversations have no answer" in err
    parts = tmp_path / "out.jsonl.parts"
    with parts.open("a") as file:
        file.write('{"line": 3, "conv')  # a kill in the midst of a line
    assert entry(words(tmp_path, stubborn.address)) == 2 and "--resume" in capsys.readouterr().err
    assert entry([*words(tmp_path, stubborn.address), "--resume", "--temperature", "0"]) == 2
    good = servers()
    assert entry([*words(tmp_path, good.address), "--resume"]) == 0
    assert len(good.seen) == 1 and [row["line"] for row in rows(tmp_path / "out.jsonl")] == USED


def test_torn_parts_are_mended_or_named(tmp_path, servers, capsys):
    write_lines(tmp_path / "in.jsonl")
    parts = tmp_path / "out.jsonl.parts"
    silent = servers(lambda _: {"content": ""})
    assert entry(words(tmp_path, silent.address)) == 1
    header = parts.read_bytes()
    torn = b'5\n[]\n"line"\n{"line": 1}\n{"line": "1"}\n{"line": 3, "conv\n\xe6\xbc\n' + b"[" * 100_000 + b"\n"
    for left in (b"", header[:9], header + torn, header + torn + '{"line": 4, "a": "漢'.encode()[:-1]):
        parts.write_bytes(left)
        server = servers()
        assert entry([*words(tmp_path, server.address), "--resume"]) == 0, capsys.readouterr().err
        assert len(server.seen) == 5, "every turn anew: none of these lines is an answer"
        assert [row["line"] for row in rows(tmp_path / "out.jsonl")] == USED
        (tmp_path / "out.jsonl").unlink()
    for left in (b"\n", header[:9] + b"\n", b'{"line": 1}\n', torn):
        parts.write_bytes(left)
        capsys.readouterr()
        assert entry([*words(tmp_path, silent.address), "--resume"]) == 2
        assert "does not begin with the settings of a run" in capsys.readouterr().err and parts.read_bytes() == left


def test_a_request_that_no_try_betters_fails_at_once_and_dead_servers_end_the_run(tmp_path, servers, capsys):
    write_lines(tmp_path / "in.jsonl", LINES[:1])
    refusing = servers(faults=[400] * 9)
    assert entry(words(tmp_path, refusing.address)) == 1
    assert len(refusing.seen) == 1 and "HTTP 400" in capsys.readouterr().err
    gone = servers()
    address = gone.address
    gone.stop()
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{number}?"} for number in range(40)])
    assert entry([*words(tmp_path, address, out="o.jsonl"), "--concurrency", "1", "--retries", "99"]) == 1
    assert "no server answers any more" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["gone", 404, 401, 500, 400, "empty"])
@pytest.mark.parametrize("first", [True, False])
def test_no_conversation_is_lost_to_a_server_at_fault_beside_a_sound_one(tmp_path, servers, capsys, fault, first):
    """Two at a time, which the faulty one wins: it fails at once, and the sound one takes its time."""
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{number}?"} for number in range(30)])

    def slow(messages):
        time.sleep(0.01)
        return {"content": "yes"}

    sound = servers(slow)
    faulty = servers(lambda _: {"content": ""}, faults=[fault] * 999 if isinstance(fault, int) else ())
    if fault == "gone":
        faulty.stop()
    addresses = (faulty, sound) if first else (sound, faulty)
    line = words(tmp_path, *(each.address for each in addresses))
    assert entry([*line, "--retries", "0", "--concurrency", "2"]) == 0
    assert [row["line"] for row in rows(tmp_path / "out.jsonl")] == list(range(1, 31)) and len(sound.seen) == 30
    told = capsys.readouterr().err.count(f"{faulty.address} is asked no more")
    if fault in (400, "empty"):  # its word on a conversation, which another may contradict
        assert told == 0
    else:
        assert told == 1 and len(faulty.seen) <= 20


def test_a_server_that_is_away_for_a_while_is_waited_for(tmp_path, servers, capsys):
    """Eight conversations break off at once: that is one failure of the server, not eight."""
    write_lines(tmp_path / "in.jsonl", [{"prompt": f"{number}?"} for number in range(20)])
    restarting = servers(faults=["drop"] * 24)
    assert entry([*words(tmp_path, restarting.address), "--concurrency", "8", "--retry-wait", "0.05"]) == 0
    assert "asked no more" not in capsys.readouterr().err and len(rows(tmp_path / "out.jsonl")) == 20


@pytest.mark.parametrize(
    ("answer", "reason", "tries"),
    [
        (b'{"choices": [{"message": null}]}', "a message that is no object", 2),
        (b'{"choices": [{"message": "hi"}]}', "a message that is no object", 2),
        (b'{"choices": ["hi"]}', "a reply without choices", 2),
        (b'{"choices": [{"message": {"content": "a \\ud83d"}, "finish_reason": "length"}]}', "not UTF-8", 2),
        (b"null", "a reply without choices", 2),
        (b"[" * 100_000, "RecursionError", 2),
        ({"content": [{"type": "text", "text": "hi"}]}, "a message without text", 2),
        ({"content": "half an ans", "why": "abort"}, "ended by abort", 2),
        ({"content": "half an ans", "why": None}, "ended by null", 2),
        ({"content": "half an ans", "why": "content_filter"}, "ended by content_filter", 1),
    ],
    ids=lambda value: str(value)[:40],
)
def test_whatever_a_server_says_ends_the_run_and_is_named(tmp_path, servers, capsys, answer, reason, tries):
    """Never a wait for ever, and never half an answer as training data."""
    write_lines(tmp_path / "in.jsonl", LINES[:1])
    server = servers(lambda _: answer if isinstance(answer, bytes) else dict(answer))
    assert entry([*words(tmp_path, server.address), "--retries", "1"]) == 1
    err = capsys.readouterr().err
    assert reason in err and "1 conversations have no answer" in err
    assert len(server.seen) == tries and not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("thought", [{"reasoning_content": " Hm. "}, {"reasoning": "Hm.", "reasoning_content": None}])
def test_thoughts_stay_in_the_answer_and_a_cut_one_ends_its_conversation(tmp_path, servers, thought):
    write_lines(tmp_path / "in.jsonl", [LINES[3]])
    thinking = servers(lambda messages: {"content": "Yes.", "why": "length", **thought})
    assert entry([*words(tmp_path, thinking.address), "--thinking"]) == 0
    (row,) = rows(tmp_path / "out.jsonl")
    assert [turn["content"] for turn in row["conversations"]] == ["Three?", "<think>\nHm.\n</think>\n\nYes."]
    assert row["finish_reason"] == "length" and thinking.seen[0][1]["chat_template_kwargs"] == {"enable_thinking": True}


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ([], "--server-address"),
        (["--server-address", "::::"], "::::"),
        (["--server-address", "a:1", "--concurrency", "0"], "0"),
    ],
)
def test_commands_that_cannot_be_are_refused(tmp_path, capsys, more, part):
    write_lines(tmp_path / "in.jsonl")
    base = words(tmp_path)
    assert entry([*base[:-1], *more]) == 2
    line = capsys.readouterr().err.strip()
    assert part in line.splitlines()[-1]


# looking


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("target")
    write_target(tiny_target(vocab_size=test_cli.VOCAB), home)
    test_cli.byte_tokenizer().save_pretrained(home)
    return home


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def ending(target, tmp_path_factory) -> Path:
    """The same tokenizer with a template that ends its turns."""
    home = tmp_path_factory.mktemp("ending")
    tokenizer = test_cli.byte_tokenizer()
    tokenizer.chat_template = CHATML
    write_target(tiny_target(vocab_size=test_cli.VOCAB), home)
    tokenizer.save_pretrained(home)
    return home


def test_labels_are_shown_and_what_is_empty_or_cut_is_counted(ending, tmp_path, capsys):
    both = [{"role": "user", "content": "A?"}, {"role": "assistant", "content": "bcd"}]
    lines = [
        {"conversations": both * 2},
        "no JSON",
        {"conversations": [{"role": "user", "content": "x" * 60}, both[1]]},
    ]
    path = write_lines(tmp_path / "d.jsonl", lines)
    base = ["data", "inspect", "--model", str(ending), "--data", str(path), "--max-length", "65"]
    assert entry([*base, "--color", "never"]) == 0
    out = capsys.readouterr().out
    assert "<user>A?</user><assistant>[[bcd</assistant>]]<user>A?</user><assistant>[[bcd</assistant>]]" in out
    tail = out.splitlines()[-4:]
    assert tail[0].startswith("2 samples") and "1 without a label (line 3)" in tail[1]
    assert "cut at 65 tokens (lines 1, 3)" in tail[2] and "1 left out: bad JSON (line 2)" in tail[3]
    assert entry([*base, "--color", "always", "--line", "1"]) == 0
    out = capsys.readouterr().out
    assert "\x1b[1;32mbcd</assistant>\x1b[0m" in out and "\x1b[2m<user>A?</user><assistant>\x1b[0m" in out
    for line, part in (("4", "has 3 lines"), ("0", "has 3 lines"), ("2", "is left out: bad JSON")):
        for more in ([], ["--json"]):
            assert entry([*base, "--line", line, *more]) == 2
            out, err = capsys.readouterr()
            assert out == "" and err.count("\n") == 1 and f"--line {line}" in err and part in err
    assert entry([*base, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["samples"], found["empty"], found["truncated"], found["skipped"]) == (2, 1, 2, {"bad JSON": 1})


@pytest.mark.parametrize("name", ["d.npz", "d.jsonl"])
def test_a_file_that_is_not_there_is_named_by_its_own_flag(ending, tmp_path, capsys, name):
    assert entry(["data", "inspect", "--model", str(ending), "--data", str(tmp_path / name)]) == 2
    assert f"--data {tmp_path / name} does not exist" in capsys.readouterr().err


# the whole way


def test_prepare_regenerate_train_and_bench_in_one_go(ending, tmp_path, capsys):
    """With the built-in engine, on a tiny target; every step takes the file of the one before."""
    lines = [{"prompt": f"Question {number}, please?"} for number in range(8)]
    source = write_lines(tmp_path / "in.jsonl", [*lines, "no JSON"])
    ready, answers, out = tmp_path / "ready.jsonl", tmp_path / "answers.npz", tmp_path / "run"
    drafter = write_drafter(tiny_drafter(tiny_target(vocab_size=test_cli.VOCAB)), tmp_path / "drafter", "specforge")
    on_cpu = ["--dtype", "float32", "--device", "cpu"]
    assert entry(["data", "prepare", "--input", str(source), "--output", str(ready)]) == 0
    given = ["data", "--model", str(ending), "--prompts", str(ready), "--output", str(answers)]
    assert entry([*given, "--max-new-tokens", "24", *on_cpu]) == 0
    assert entry(["data", "inspect", "--model", str(ending), "--data", str(answers), "--json"]) == 0
    train = [
        "train", "--target-model-path", str(ending), "--draft-init-path", str(drafter), "--train-data-path",
        str(answers), "--output-dir", str(out), "--batch-size", "4", "--num-epochs", "2", "--num-anchors", "16",
        "--log-interval", "1", "--eval-data-path", str(ready), "--eval-samples", "2",
        "--eval-max-new-tokens", "16", "--keep-last", "1",
    ]  # fmt: skip
    capsys.readouterr()
    assert entry([*train, *on_cpu, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["steps"] == 4 and done["best"] is not None
    (tmp_path / "sets").mkdir()
    write_lines(
        tmp_path / "sets" / "gsm8k.jsonl",
        [{"turns": [f"Question {n}, please?"]} for n in range(2)],
    )
    bench = [
        "bench", "--model", str(ending), "--draft-model", done["checkpoint"], "--dataset", "gsm8k", "--data-dir",
        str(tmp_path / "sets"), "--max-new-tokens", "16", "--output-dir", str(tmp_path / "results"), "--json",
    ]  # fmt: skip
    assert entry([*bench, *on_cpu]) == 0
    assert list((tmp_path / "results").rglob("summary.json"))


@pytest.mark.parametrize("name", ["prepare_data", "regenerate_train_data"])
def test_the_published_scripts_forward(name):
    text = (ROOT / "scripts" / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 30 and f'"{name.split("_")[0]}"' in text


def test_the_published_regeneration_flags_are_taken(tmp_path, servers):
    server = servers()
    write_lines(tmp_path / "in.jsonl")
    text = (
        f"--model Qwen/Qwen3-4B --temperature 0.7 --top-p 0.8 --top-k 20 --max-tokens 4096 --concurrency 128 "
        f"--server-address {server.address} --input-file-path {tmp_path}/in.jsonl --output-file-path {tmp_path}/o.jsonl"
    )
    assert entry(["data", "regenerate", *text.split()]) == 0
    assert server.seen[0][1]["model"] == "Qwen/Qwen3-4B" and len(rows(tmp_path / "o.jsonl")) == 4
