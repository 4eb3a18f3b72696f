"""A run that is killed goes on as if it had not been; what would spoil it is told; checkpoints are judged and kept."""

import csv
import json
import logging
import os
import random
import signal
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import test_cli
import torch
from test_train import command, token_file, written

import dloop
import dloop.checkpoint
from dloop.cli import train_watch
from dloop.cli.main import entry
from dloop.cli.train_watch import stale
from dloop.records import acceptance_length
from dloop.testing import good_drafter, tiny_drafter, tiny_target
from dloop.train import step as train_step
from dloop.train.acceptance import measure
from dloop.train.alarms import STEPS, Frozen, shift_of_labels
from dloop.train.batch import TokenFile, samples_of_batch
from dloop.train.checkpoint import JUDGED, STATE, Progress, best, checkpoints, latest, prune, tau_of
from dloop.train.log import Log
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.step import Step
from dloop.train.trainer import TrainSettings, samples_of_step

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def pair():
    target = tiny_target("llama", seed=3)
    return target, tiny_drafter(target)


@pytest.fixture
def folders(tmp_path, pair):
    return written(tmp_path, *pair)


def long_command(folders, out: str, *more: str) -> list[str]:
    words = ["--max-steps", "12", "--save-interval", "2", "--output-dir", str(folders / out)]
    return command(folders, *words, *more)


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(latest(folder) / STATE, weights_only=True)["masters"]


def logged(folder: Path) -> list[list[str]]:
    """train.csv without the times."""
    with (folder / "train.csv").open(newline="") as file:
        return [row[:3] + row[4:] for row in csv.reader(file)]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# going on


@pytest.mark.parametrize("interval", ["1", "5"])  # of the log: checkpoints at every second step fall between its lines
def test_a_run_killed_ten_times_ends_with_the_parameters_of_an_unbroken_one(folders, monkeypatch, interval):
    """In the midst of a step, at ten places drawn at random; nothing is saved on the way out."""
    assert entry(long_command(folders, "whole", "--log-interval", interval)) == 0
    inner, left = Step.loss, [0]

    def dying(*given):
        left[0] -= 1
        if left[0] == 0:
            for _ in range(3):
                signal.raise_signal(signal.SIGINT)
        return inner(*given)

    monkeypatch.setattr(Step, "loss", dying)
    draw, ends = random.Random(7), []
    for number in range(10):
        done = int(latest(folders / "out").name.split("_")[-1]) if number and latest(folders / "out") else 0
        left[0] = draw.randint(1, min(3, 12 - done))
        more = ["--log-interval", interval, *(["--resume"] if done else [])]
        ends.append(entry(long_command(folders, "out", *more)))
    left[0] = 0
    assert ends == [130] * 10
    assert entry(long_command(folders, "out", "--log-interval", interval, "--resume")) == 0
    assert same(state_of(folders / "whole"), state_of(folders / "out"))
    assert logged(folders / "whole") == logged(folders / "out")


DRIVER = """
import os, signal, sys, torch
import dloop.cli.training
from dloop.cli.main import entry
from dloop.cli.train_watch import stale
from dloop.train.step import Step

def child(kill, words):
    def die(): os.kill(os.getpid(), signal.SIGKILL)
    loss, save, count = Step.loss, torch.save, [0]
    def dying(*given):
        count[0] += 1
        return die() if kill == count[0] else loss(*given)
    def tearing(value, path):
        save(value, path)
        if kill == 0:
            os.truncate(path, 1000)
            die()
    Step.loss, torch.save = dying, tearing
    entry(words)

for number, kill in enumerate(map(int, sys.argv[1].split(","))):
    words = sys.argv[2:] + (["--resume"] if number else [])
    pid = os.fork()
    if not pid:
        child(kill, words)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL, number
"""


@pytest.mark.slow
def test_sigkill_at_steps_and_in_the_midst_of_a_save_changes_no_bit(folders):
    """Real kills: at the third step, while the next checkpoint is being written (torn), at the second step after."""
    assert entry(long_command(folders, "whole")) == 0
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    words = [sys.executable, "-c", DRIVER, "3,0,2", *long_command(folders, "out")]
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    torn = [path.name for path in (folders / "out").glob(".epoch_*")]
    assert torn == [".epoch_1_step_4.partial"] and latest(folders / "out").name.endswith("step_2")
    assert entry(long_command(folders, "out", "--resume")) == 0
    assert same(state_of(folders / "whole"), state_of(folders / "out"))
    assert logged(folders / "whole") == logged(folders / "out")
    assert list((folders / "out").glob(".epoch_*")) == []


def test_what_was_logged_beyond_a_checkpoint_is_dropped(tmp_path):
    path = tmp_path / "train.csv"
    names = ("loss",)
    log = Log(path, names, Progress(), lambda step: [])
    for step in (1, 2, 3):
        log.add(torch.tensor([float(step)]))
        log.line(step, 0, 0.1)
    Log(path, names, Progress(step=2), lambda step: [])
    assert [row.split(",")[0] for row in path.read_text().splitlines()] == ["step", "1", "2"]
    Log(path, names, Progress(), lambda step: [])
    assert path.read_text().count("\n") == 1


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (lambda text: text + "2,0,3.9", None),
        (lambda text: text + "junk", None),
        (lambda text: text.replace("\r\n2,", "\r\ntwo,"), "line 3 is damaged ('two,"),
        (lambda text: text.replace("\r\n2,0,", "\r\n2,"), "line 3 is damaged ('2,"),
        (lambda text: text.replace("step", "stop", 1), "line 1 is damaged ('stop,"),
        (lambda text: text.replace("\r\n1,", "\r\n\x00,"), "line 2 is damaged"),
        (lambda text: text.replace("\r\n2,", '\r\n"2,'), "line 3 is damaged ('\"2,"),
        (lambda text: text.replace("\r\n2,", "\r\n" + "\x00" * 200_000 + "\n2,"), "line 3 is damaged"),
    ],
    ids=["torn", "junk", "word", "field", "header", "null", "quote", "block of nulls"],
)
def test_a_damaged_log_is_mended_where_it_is_torn_and_named_elsewhere(folders, capsys, spoil, part):
    assert entry(long_command(folders, "out")) == 0
    path = folders / "out" / "train.csv"
    before = path.read_bytes().decode()
    path.write_bytes(spoil(before).encode())
    capsys.readouterr()
    assert entry(long_command(folders, "out", "--resume")) == (0 if part is None else 2)
    err = capsys.readouterr().err.strip()
    if part is None:
        assert "train.csv: its last line" in err and path.read_bytes().decode() == before
    else:
        assert "\n" not in err and part in err and "move the file away" in err
        assert path.read_bytes() == spoil(before).encode()


# the breaker and the alarms


def test_a_loss_that_is_not_finite_names_step_and_samples(folders, capsys, monkeypatch):
    inner, count = Step.__call__, [0]

    def breaking(*given):
        count[0] += 1
        return inner(*given) * (torch.nan if count[0] == 5 else 1.0)

    monkeypatch.setattr(Step, "__call__", breaking)
    assert entry(long_command(folders, "out", "--log-interval", "3", "--accumulation-steps", "2")) == 1
    data = TokenFile.read(folders / "tokens.npz", 3072)
    settings = TrainSettings(num_steps=12, batch_size=4, accumulation_steps=2)
    chosen = samples_of_step(data, settings, 4)
    assert chosen == [*samples_of_batch(data, 4, 42, 8), *samples_of_batch(data, 4, 42, 9)] and len(chosen) == 8
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"at step 5, whose batch are the samples {', '.join(map(str, chosen))}" in line
    assert latest(folders / "out").name.endswith("step_4")


@pytest.mark.parametrize("fault", ["summary", "total_of"])
def test_a_step_that_ends_half_way_is_not_saved_as_the_one_before(folders, capsys, monkeypatch, fault):
    """`summary` comes after the weights have moved on, `total_of` first before they do: only that step is a step."""
    count, inner = [0], getattr(train_step, fault)
    calls = 4 if fault == "summary" else 7  # once before and once after each optimiser's step

    def breaking(*given):
        count[0] += 1
        if count[0] == calls:
            raise RuntimeError("another process is gone")
        return inner(*given)

    monkeypatch.setattr(train_step, fault, breaking)
    assert entry(long_command(folders, "out")) == 1
    assert "another process is gone" in capsys.readouterr().err
    assert latest(folders / "out").name.endswith("step_2" if fault == "summary" else "step_3")


def test_tensors_without_a_gradient_are_named_once(pair):
    model = pair[1].model.requires_grad_(True)
    watch, lines = Frozen(model), []
    for _ in range(STEPS + 3):
        for name, parameter in model.named_parameters():
            parameter.grad = torch.zeros_like(parameter) if name == "fc.weight" else torch.ones_like(parameter)
        model.norm.weight.grad = None
        lines.append(watch.look())
    assert [line is None for line in lines] == [True] * (STEPS - 1) + [False] + [True] * 3
    assert "fc.weight, norm.weight" in lines[STEPS - 1] or "norm.weight, fc.weight" in lines[STEPS - 1]
    assert Frozen(torch.nn.Linear(2, 2).requires_grad_(False)).look() is None


def test_a_frozen_tensor_raises_its_alarm_in_a_run(folders, caplog, monkeypatch):
    caplog.set_level(logging.WARNING)
    monkeypatch.setattr("dloop.cli.main.set_up", lambda: None)  # the logger's own handler would swallow it
    assert entry(long_command(folders, "out", "--dspark-confidence-head-alpha", "0")) == 0
    assert [r.getMessage() for r in caplog.records if "no gradient" in r.getMessage()][0].count("confidence_head") == 2


@pytest.mark.parametrize(("ahead", "found"), [(1, None), (2, 1), (0, -1)])
def test_labels_off_by_one_raise_the_alarm(ahead, found):
    """A drafter that gives the token after the next one, or repeats the last, for each next token."""
    target = tiny_target("llama", seed=3)
    text = torch.randperm(target.vocab_size - 3, generator=torch.Generator().manual_seed(1)).add(3).tolist()[:64]
    drafter = good_drafter(target, [[a, b] for a, b in zip(text, text[ahead:], strict=False)])
    objective = objective_of(drafter.model, target.vocabulary, ObjectiveSettings())
    data = TokenFile(np.array(text), np.array([[4, len(text) - 4]]), np.array([0]), 64)
    batch = data.collate(np.array([0]))
    assert shift_of_labels(objective, batch, target.features(batch.tokens, drafter.taps)) == found


@pytest.mark.parametrize("family", ["dflash", "domino", "eagle3"])
def test_a_drafter_that_is_hardly_ever_right_raises_none(family):
    target = tiny_target("llama", seed=3)
    drafter = tiny_drafter(target, family=family)
    objective = objective_of(drafter.model, target.vocabulary, ObjectiveSettings())
    data = TokenFile(np.arange(3, 67), np.array([[4, 60]]), np.array([0]), 64)
    batch = data.collate(np.array([0]))
    assert shift_of_labels(objective, batch, target.features(batch.tokens, drafter.taps)) is None


def test_data_of_another_target_or_without_labels_raise_an_alarm(folders, capsys):
    record = {"checkpoint_sha256": {"target": "0" * 64}, "template_sha256": None}
    (folders / "tokens.npz.json").write_text(json.dumps(record))
    assert entry(command(folders, "--max-length", "14", "--num-anchors", "4")) == 0
    err = capsys.readouterr().err
    assert "tokens.npz was made with another target than this run's" in err
    assert "have no label within" not in err
    record["checkpoint_sha256"] = {"target": dloop.checkpoint.sha256(folders / "target")}
    (folders / "tokens.npz.json").write_text(json.dumps(record))
    words = command(folders, "--max-length", "7", "--num-anchors", "4", "--output-dir", str(folders / "short"))
    assert entry(words) == 0
    err = capsys.readouterr().err
    assert "another target" not in err and "of 12 samples have no label within --max-length 7" in err


@pytest.mark.parametrize(
    ("record", "part"),
    [
        ([], None),
        (None, None),
        (5, None),
        ({"source": "servers", "model": "org/Target"}, None),
        ({"source": "servers", "model": "target/"}, None),
        ({"source": "servers", "model": None}, None),
        ({"source": "built-in", "model": "other"}, None),
        ({"source": "servers", "model": "Qwen/Qwen3-4B"}, "was written by servers of Qwen/Qwen3-4B, which by its name"),
    ],
    ids=str,
)
def test_what_is_recorded_of_servers_is_held_against_the_target_s_name(folders, record, part):
    (folders / "tokens.npz.json").write_text(json.dumps(record))
    target = dloop.load_target(str(folders / "target"), dtype="float32", engine="twin")
    told = [f"was {how}" for how in stale(folders / "tokens.npz", target)]
    assert len(told) == (part is not None)
    assert all(part in line and target.name in line for line in told)


# checkpoints that are judged


def test_the_last_and_the_best_checkpoints_stay(tmp_path):
    for step, tau in ((2, 1.5), (4, 3.0), (6, None), (8, 3.0), (10, 2.0), (12, 1.0)):
        folder = tmp_path / f"epoch_0_step_{step}"
        folder.mkdir()
        (folder / STATE).touch()
        if tau is not None:
            (folder / JUDGED).write_text(json.dumps({"tau": tau}))
    (tmp_path / ".epoch_0_step_14.partial").mkdir()
    assert best(tmp_path).name == "epoch_0_step_8" and tau_of(tmp_path / "epoch_0_step_6") == -float("inf")
    prune(tmp_path, None)
    assert len(checkpoints(tmp_path)) == 6 and not list(tmp_path.glob(".*"))
    prune(tmp_path, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"epoch_0_step_{step}" for step in (10, 12, 8)]


@pytest.mark.parametrize("family", ["dspark", "eagle3"])
def test_checkpoints_are_measured_on_held_out_prompts(tmp_path, family, capsys):
    target = tiny_target("llama", seed=3)
    where = written(tmp_path, target, tiny_drafter(target, family=family))
    held = token_file(where / "held.npz", target, samples=3, seed=9)
    more = ["--eval-data-path", str(held), "--eval-samples", "2", "--eval-max-new-tokens", "12", "--eval-gate", "-inf"]
    words = command(where, *more, "--save-interval", "1", "--keep-last", "1", "--json")
    if family == "eagle3":
        at = words.index("--num-anchors")
        words = [*words[:at], *words[at + 2 :]]
    assert entry(words) == 0
    done = json.loads(capsys.readouterr().out)
    left = checkpoints(where / "out")
    assert {done["checkpoint"], done["best"]} == {str(path) for path in left} and 1 <= len(left) <= 2
    found = json.loads((Path(done["best"]) / JUDGED).read_text())
    assert found["texts"] == 2 and found["gate"] == "-inf" and found["tau"] >= found["tau_host"] >= 1
    assert 1 <= len(found["stages"]) <= 4


def test_a_checkpoint_killed_before_it_was_measured_is_measured_at_the_resume(folders, pair, capsys, monkeypatch):
    held = token_file(folders / "held.npz", pair[0], samples=3, seed=9)
    more = ["--eval-data-path", str(held), "--eval-max-new-tokens", "12", "--max-steps", "6"]
    assert entry(long_command(folders, "whole", *more)) == 0

    def dying(*given):
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(train_watch, "measure", dying)
        assert entry(long_command(folders, "out", *more)) == 1
    assert [path.name for path in checkpoints(folders / "out")] == ["epoch_0_step_2"] and best(folders / "out") is None
    assert entry(long_command(folders, "out", *more, "--resume")) == 0
    for path in checkpoints(folders / "whole"):
        assert (path / JUDGED).read_bytes() == (folders / "out" / path.name / JUDGED).read_bytes()
    other = token_file(folders / "other.npz", pair[0], samples=3, seed=8)
    capsys.readouterr()
    for words in (["--eval-gate", "0"], ["--eval-data-path", str(other)], ["--eval-max-new-tokens", "13"]):
        assert entry(long_command(folders, "out", *more, "--resume", *words)) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert "acceptance.json was measured with" in line and ("gate=-0.5, not 0.0" in line) == (words[1] == "0")
    monkeypatch.setattr(train_watch, "measure", dying)  # nothing is measured twice
    assert entry(long_command(folders, "out", *more, "--resume")) == 0


def test_the_measured_length_is_that_of_real_decoding():
    target = tiny_target("qwen3", seed=5)
    prompt = [5, 9, 3, 11, 7]
    answer = dloop.generate_autoregressive(target, prompt, max_new_tokens=60, stop_token_ids=[]).tokens
    drafter = good_drafter(target, [prompt + answer])
    found = measure(drafter.model, target, [(prompt, answer)], -1.0)
    for name, gate in (("tau", -1.0), ("tau_host", 1.0)):
        rounds = dloop.generate(
            target, drafter, prompt, max_new_tokens=60, stop_token_ids=[], loop_gate=gate, max_stages=4
        ).rounds
        assert found[name] == pytest.approx(acceptance_length(rounds), rel=0.1)  # the end of a text is counted apart
    assert found["tau"] > found["tau_host"] > 2 and len(found["stages"]) > 1


def test_held_out_questions_are_asked_in_the_chat_template(tmp_path, capsys):
    target = tiny_target(vocab_size=test_cli.VOCAB)
    where = written(tmp_path, target, tiny_drafter(target))
    test_cli.byte_tokenizer().save_pretrained(where / "target")
    (where / "held.jsonl").write_text('{"prompt": "Hello"}\n{"turns": ["Why?"]}\nno JSON\n')
    more = ["--eval-data-path", str(where / "held.jsonl"), "--eval-max-new-tokens", "8"]
    assert entry(command(where, *more)) == 0
    err = capsys.readouterr().err
    assert "measured on 2 greedy texts" in err and "held.jsonl: left out 1: bad JSON (line 3)" in err
    assert entry(command(where, *more[:1], "absent.jsonl", "--output-dir", str(where / "o"))) == 2
    assert "--eval-data-path absent.jsonl cannot be read" in capsys.readouterr().err


# trackers


def test_tensorboard_gets_every_value_where_it_is_installed(folders, capsys, monkeypatch):
    seen = []

    class Writer:
        def __init__(self, folder, purge_step):
            seen.append(folder)
            assert purge_step == 1, "what an unfinished run said of later steps is not shown"

        def add_scalar(self, name, value, step):
            seen.append((name, step))

        def close(self):
            seen.append("closed")

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    assert entry(command(folders, "--report-to", "tensorboard")) == 0
    assert seen[0] == str(folders / "out" / "tensorboard") and seen[-1] == "closed"
    assert {("loss", 1), ("loss", 3), ("step_ms", 2), ("loop_l1", 3)} <= set(seen[1:-1])
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    capsys.readouterr()
    assert entry(command(folders, "--report-to", "tensorboard", "--output-dir", str(folders / "o"))) == 2
    assert "pip install tensorboard" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--keep-last", "0"], ["--eval-samples", "0"], ["--eval-gate", "nan"], ["--report-to", "wandb"]]
)
def test_values_that_cannot_be_are_refused(folders, capsys, words):
    assert entry(command(folders, *words)) == 2
    assert capsys.readouterr().err.count("\n") == 1
