"""`dloop trace record` and `dloop replay` end to end on a tiny pair: whole files, exact resumption, true figures."""

import json
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import test_cli

import dloop
from dloop.cli import trace_run
from dloop.cli.main import PARTS, entry
from dloop.gates.costs import given_costs
from dloop.gates.learned import fresh
from dloop.gates.played import play
from dloop.gates.trace import is_same, load
from dloop.testing import good_drafter, tiny_target, write_drafter, write_target

LENGTH = 14
LINES = ['{"prompt": "Hello"}', "no JSON", '{"prompt": "Sing!"}', '{"turns": ["Count.", "More."]}']
OPTIONS = (
    "--model --draft-model --dtype --device --engine --revision --draft-revision --gap-rows --prompts --output "
    "--chat-template --max-prompt-tokens --max-samples --max-new-tokens --max-stages --temperature --seed "
    "--draft-depth --draft-rope-theta --mtp-k --resume --no-resume --json --no-json --debug --no-debug"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny pair with a tokenizer, prompts, and the trace of their texts."""
    home = tmp_path_factory.mktemp("trace")
    target = tiny_target(vocab_size=test_cli.VOCAB)
    write_target(target, home / "target")
    tokenizer = test_cli.byte_tokenizer()
    tokenizer.save_pretrained(home / "target")
    ids = tokenizer("<user>Hello<assistant>")["input_ids"]
    text = dloop.generate_autoregressive(target, ids, max_new_tokens=LENGTH, stop_token_ids=[]).tokens
    write_drafter(good_drafter(target, [ids + text]), home / "drafter", "specforge")
    (home / "prompts.jsonl").write_text("\n".join(LINES) + "\n")
    assert entry(words(home, home / "trace.npz")) == 0
    return home


def words(folder: Path, output: Path, *more: str) -> list[str]:
    return [
        "trace", "record", "--model", str(folder / "target"), "--draft-model", str(folder / "drafter"), "--dtype",
        "float32", "--device", "cpu", "--prompts", str(folder / "prompts.jsonl"), "--output", str(output),
        "--max-new-tokens", str(LENGTH), "--max-stages", "3", *more,
    ]  # fmt: skip


def replayed(capsys, folder: Path, *more: str) -> dict:
    capsys.readouterr()
    assert entry(["replay", "--trace", str(folder / "trace.npz"), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *command: str) -> str:
    capsys.readouterr()
    assert entry(command) == 2
    return capsys.readouterr().err


def test_the_flags_of_record_are_these():
    module = import_module(PARTS["trace"]["record"].module)
    assert test_cli.build(module.Command, "dloop trace record").flags == tuple(OPTIONS.split())


def test_the_record_tells_how_the_trace_came_about(folder):
    made = json.loads((folder / "trace.npz.json").read_text())
    assert (made["texts"], made["starts"], made["stage_len"], made["family"]) == (3, 3 * (LENGTH - 1), 4, "dspark")
    assert made["prompts"]["left_out"] and made["prompts"]["used"] == 3
    assert made["setting"]["max_stages"] == 3 and made["setting"]["gap_rows"] == "producing"
    assert all(len(made["checkpoint_sha256"][name]) == 64 for name in ("target", "draft"))
    assert not list(folder.glob("*.parts*"))


def test_a_stopped_run_goes_on_and_gives_the_same_trace(folder, tmp_path, capsys, monkeypatch):
    output, save = tmp_path / "trace.npz", trace_run.save

    def once(path, trace):
        save(path, trace)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(trace_run, "save", once)
        assert entry(words(folder, output)) == 130
    assert "1 of 3 texts are in" in capsys.readouterr().err and not output.exists()
    assert "add --resume" in refused(capsys, *words(folder, output))
    assert "another setting.max_stages" in refused(capsys, *words(folder, output, "--resume", "--max-stages", "2"))
    assert entry(words(folder, output, "--resume")) == 0
    assert "1 of 3 texts are there" in capsys.readouterr().err
    for one, other in zip(load(output).texts, load(folder / "trace.npz").texts, strict=True):
        assert is_same(one, other)
    assert entry(words(folder, output, "--resume")) == 0
    assert "is finished" in capsys.readouterr().err


def test_replay_tells_what_the_trace_holds(folder, capsys):
    costs = ["--stage-ms", "1,0.8", "--verify-ms", "3,0.05"]
    made = replayed(capsys, folder, *costs, "--loop-gate", "1.0,-0.5,-inf")
    names = [row["gate"] for row in made["gates"]]
    assert names == ["host", "fixed:-0.5", "fixed:-inf", "fixed:-0.5,all", "oracle:paper", "oracle:hindsight"]
    rows = {row["gate"]: row for row in made["gates"]}
    assert rows["host"]["stages_per_round"] == 1 and rows["host"]["gain"] == 1 and rows["host"]["closed"] == 0
    assert rows["oracle:hindsight"]["closed"] == 1
    assert all(row["tokens_per_s"] <= rows["oracle:hindsight"]["tokens_per_s"] + 1e-9 for row in made["gates"])
    assert all(row["tokens"] == made["starts"] == 3 * (LENGTH - 1) for row in made["gates"])
    assert made["source"]["target"] == str(folder / "target") and made["plain_tokens_per_s"] == pytest.approx(1000 / 3)
    row, looped = rows["fixed:-inf"], 0
    rounds = []
    target = dloop.load_target(str(folder / "target"), "float32")
    drafter = dloop.load_drafter(str(folder / "drafter"), target)
    for text in load(folder / "trace.npz").texts:
        prompt = text.prompt.tolist()
        found = dloop.generate(
            target, drafter, prompt, max_new_tokens=LENGTH, loop_gate=float("-inf"), max_stages=3
        ).rounds
        rounds += found
        looped += sum(max(0, min(r.accepted, len(r.emitted)) - 4) for r in found)
    assert row["rounds"] == len(rounds) and row["stages"] == sum(r.stages for r in rounds)
    assert row["acceptance_length_pooled"] == pytest.approx(np.mean([r.accepted + 1 for r in rounds]))
    assert row["output_share_looped"] == pytest.approx(looped / row["tokens"])
    assert row["ms"] == pytest.approx(sum(1 + 0.8 * (r.stages - 1) + 3 + 0.05 * 4 * r.stages for r in rounds))
    assert row["interval"][0] <= row["tokens_per_s"] <= row["interval"][1]


def test_gates_that_learn_are_replayed_as_they_decode(folder, capsys):
    costs = ["--stage-ms", "1,0.8", "--verify-ms", "3,0.05"]
    made = replayed(capsys, folder, *costs, "--loop-gate", "-0.5,auto:full,auto")
    rows = {row["gate"]: row for row in made["gates"]}
    assert list(rows)[-4:] == ["auto", "auto:full", "oracle:paper", "oracle:hindsight"]
    trace, learner = load(folder / "trace.npz"), fresh("auto", made["stage_len"])
    given = given_costs((1.0, 0.8), (3.0, 0.05), 1 + 3 * made["stage_len"])
    rounds = [r for text in trace.texts for r in play(text, trace.ground, learner.gate(), given)]
    assert rows["auto"]["rounds"] == len(rounds) and rows["auto"]["stages"] == sum(r.stages for r in rounds)
    assert rows["auto"]["threshold"] is None and rows["auto"]["gate_sum"] is None
    assert rows["auto"]["tokens"] == rows["host"]["tokens"] and 0 < rows["auto"]["gain"]


def test_without_costs_there_are_no_speeds(folder, capsys):
    made = replayed(capsys, folder, "--max-stages", "2", "--gate-sum", "all")
    assert {row["tokens_per_s"] for row in made["gates"]} == {None} and made["costs"] is None
    assert "oracle:hindsight" not in {row["gate"] for row in made["gates"]} and made["max_stages"] == 2
    assert max(int(count) for row in made["gates"] for count in row["stage_counts"]) == 2


def test_a_table_and_a_picture(folder, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    page = str(Path(dloop.__file__).parents[1] / "docs" / "results" / "latency-qwen3-4b.json")
    command = ["replay", "--trace", str(folder / "trace.npz"), "--costs", page, "--output", str(tmp_path / "out.json")]
    assert entry([*command, "--plot", str(tmp_path / "out.png")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "oracle:hindsight" in out and "latency-qwen3-4b.json: qwen3-4b after 1024 tokens" in out
    made = json.loads((tmp_path / "out.json").read_text())
    assert (
        made["costs"]["source"].endswith("fast, stages of 7 tokens") and (tmp_path / "out.png").stat().st_size > 10_000
    )


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--max-stages", "9"], "deeper than"),
        (["--max-stages", "0"], "at least 1"),
        (["--loop-gate", "nan"], "--loop-gate must be thresholds"),
        (["--gate-sum", ""], "--gate-sum must be"),
        (["--loop-gate", "auto"], "--loop-gate auto weighs times"),
        (["--loop-gate", "sharp"], "expected NUMBER|auto|auto:full"),
        (["--stage-ms", "1,1"], "give both"),
        (["--stage-ms", "1", "--verify-ms", "1,1"], "--stage-ms 1.0 must be two numbers"),
        (["--stage-ms", "1,1", "--verify-ms", "1,-1"], "--verify-ms 1.0,-1.0 must be"),
        (["--stage-ms", "1,1", "--verify-ms", "1,1", "--costs", "x.json"], "give one"),
        (["--costs", "nowhere.json"], "cannot be read"),
        (["--cost-context", "1024"], "which is not given"),
        (["--plot", "x.png"], "--plot draws tokens/s"),
        (["--output", "nowhere/out.json"], "must be a file in a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_replay_refuses_what_makes_no_sense(folder, capsys, more, named):
    err = refused(capsys, "replay", "--trace", str(folder / "trace.npz"), *more)
    assert named in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--output", "trace.txt"], "must end in .npz"),
        (["--max-stages", "0"], "--max-stages 0 must be at least 1"),
        (["--max-new-tokens", "1"], "--max-new-tokens 1 must be at least 2"),
        (["--prompts", "nowhere.jsonl"], "is no file"),
        ([], "exists; choose another name"),
    ],
    ids=["output", "stages", "tokens", "prompts", "exists"],
)
def test_record_refuses_what_makes_no_sense(folder, capsys, more, named):
    err = refused(capsys, *words(folder, folder / "trace.npz", *more))
    assert named in err and err.count("\n") == 1


def test_trace_alone_names_its_part(capsys):
    assert "dloop trace record" in refused(capsys, "trace")


def test_the_fast_engine_traces_the_same_texts(folder, tmp_path, capsys):
    assert entry(words(folder, tmp_path / "twin.npz", "--engine", "twin")) == 0
    fast, twin = load(folder / "trace.npz"), load(tmp_path / "twin.npz")
    assert twin.features and fast.ground == twin.ground
    for one, other in zip(fast.texts, twin.texts, strict=True):
        assert np.array_equal(one.answer, other.answer) and np.array_equal(one.accepted, other.accepted)
        assert np.array_equal(one.tokens, other.tokens) and np.allclose(
            one.score, other.score, atol=1e-4, equal_nan=True
        )
