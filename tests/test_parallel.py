"""Two processes end with the parameters of one: whole weights in each, or shares of them; and go on from each other."""

import csv
import os
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_train import command, written

from dloop.cli.args import parse
from dloop.cli.main import entry
from dloop.cli.train import Command
from dloop.cli.train_checks import refuse_large_batch
from dloop.errors import UserError
from dloop.testing import tiny_drafter, tiny_target
from dloop.train.checkpoint import STATE, checkpoints, latest
from dloop.train.parallel import Share, from_environment, most_of

ROOT = Path(__file__).resolve().parents[1]
DRIVER = """
import os, sys
from dloop.cli.main import entry

base, out = sys.argv[2:], sys.argv[1]
for name, more in {
    "ddp": [],
    "fsdp": ["--parallel", "fsdp"],
    "late": ["--parallel", "fsdp", "--resume"],
}.items():
    assert entry([*base, "--output-dir", f"{out}/{name}", *more]) == 0, name
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def two_processes(run: list[str]) -> list[subprocess.Popen]:
    """As torchrun starts them."""
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    return [
        subprocess.Popen(
            run, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]


def masters(folder: Path) -> dict[str, torch.Tensor]:
    return torch.load(latest(folder) / STATE, weights_only=True)["masters"]


def logged(folder: Path) -> list[list[float]]:
    with (folder / "train.csv").open(newline="") as file:
        return [[float(value) for value in row[:3] + row[4:]] for row in list(csv.reader(file))[1:]]


@pytest.mark.slow
def test_two_processes_end_with_the_parameters_of_one(tmp_path):
    target = tiny_target("llama", seed=3)
    folders = written(tmp_path, target, tiny_drafter(target))
    whole = ["--max-steps", "6", "--save-interval", "3", "--position-offset-max", "64"]
    words = command(folders, *whole)
    at = words.index("--output-dir")
    words = [*words[:at], *words[at + 2 :]]
    one, four = ([*words, "--output-dir", str(folders / name)] for name in ("one", "late"))
    assert entry(one) == 0 and entry([*four, "--save-interval", "2"]) == 0
    for path in checkpoints(folders / "late")[:]:
        if not path.name.endswith("step_2"):
            (path / STATE).unlink()  # the run of two processes goes on from step 2 of one
    run = [sys.executable, "-c", DRIVER, str(folders), *words, "--batch-size", "2"]
    started = two_processes(run)
    said = [process.communicate(timeout=200) for process in started]
    assert [process.returncode for process in started] == [0, 0], b"\n".join(err[-2000:] for _, err in said).decode()
    assert said[0][0].count(b"epoch_2_step_6") == 3 and said[1] == (b"", b"")  # one process speaks for all
    expected, lines = masters(folders / "one"), logged(folders / "one")
    for name in ("ddp", "fsdp", "late"):
        found = masters(folders / name)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert (found[key] - value).abs().max() <= 1e-5, (name, key)
        for mine, theirs in zip(logged(folders / name), lines, strict=True):
            assert mine == pytest.approx(theirs, abs=2e-5)
    start = tiny_drafter(target).model.state_dict()
    assert max((expected[key] - start[key]).abs().max() for key in expected) > 1e-3


@pytest.mark.slow
def test_a_dry_run_of_two_processes_counts_the_samples_of_both(tmp_path):
    target = tiny_target("llama", seed=3)
    words = command(written(tmp_path, target, tiny_drafter(target)), "--parallel", "fsdp", "--dry-run", "--profile")
    started = two_processes([sys.executable, "-m", "dloop", *words])
    said = [process.communicate(timeout=100) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    assert b"run 3 steps of 8 samples" in said[0][0] and b"2.00 passes" in said[0][0] and b"depth 3" in said[0][0]


FAILING = """
import os, signal, sys, threading
import dloop.train.trainer as trainer
from dloop.cli.main import entry
from dloop.train.step import Step

fault, words = sys.argv[1], sys.argv[2:]
if os.environ["RANK"] == "0":
    if fault == "save":
        def failing(*given):
            raise OSError("No space left on device")
        trainer.save = failing
    if fault == "log":
        def failing(*given):
            raise OSError("No space left on device")
        trainer.Log.line = failing
    if fault == "interrupt":
        loss, count = Step.loss, [0]
        def dying(*given):
            count[0] += 1
            if count[0] == 2:
                for _ in range(3):
                    signal.raise_signal(signal.SIGINT)
            return loss(*given)
        Step.loss = dying
sys.exit(entry(words))
"""
ENDS = {
    "save": (1, "OSError: No space left on device"),
    "log": (1, "OSError"),
    "interrupt": (130, "KeyboardInterrupt: "),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", ENDS)
def test_a_process_that_fails_ends_the_others_with_its_reason(tmp_path, fault):
    """The others wait in a sum that the first one never joins, with half an hour of patience."""
    target = tiny_target("llama", seed=3)
    folders = written(tmp_path, target, tiny_drafter(target))
    words = command(folders, "--max-steps", "6", "--save-interval", "2", "--batch-size", "2", "--log-interval", "3")
    started = two_processes([sys.executable, "-c", FAILING, fault, *words])
    said = [process.communicate(timeout=60) for process in started]
    code, reason = ENDS[fault]
    assert [process.returncode for process in started] == [code, 1], said
    assert reason.split()[-1].encode() in said[0][1] or fault == "interrupt"
    assert f"process 0 of 2 has failed ({reason}".encode() in said[1][1], said[1]
    left = checkpoints(folders / "out")
    assert [path.name for path in left] == (["epoch_0_step_2"] if fault == "log" else [])


def test_a_batch_of_several_processes_is_told_as_it_was_typed(tmp_path):
    target = tiny_target("llama", seed=3)
    words = command(written(tmp_path, target, tiny_drafter(target)), "--batch-size", "7")
    refuse_large_batch(parse(Command, "dloop train", words[1:]), 14, Share(0, 2))
    with pytest.raises(UserError, match="--batch-size 7 in each of 2 processes is more than the 12 samples"):
        refuse_large_batch(parse(Command, "dloop train", words[1:]), 12, Share(0, 2))


def test_what_a_communication_thread_lets_go_of_last_is_no_object_of_python_s(monkeypatch):
    """It would wait for the interpreter; at the end of the process there is none, and it takes the process along."""
    given: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", lambda x, _op: given.append(weakref.ref(x)))
    assert [most_of(number) for number in (3, 0)] == [3, 0]
    assert all(each() is not None for each in given)


def test_half_of_what_torchrun_says_is_refused(monkeypatch):
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert from_environment() == Share(0, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(UserError, match="WORLD_SIZE=2 without LOCAL_RANK"):
        from_environment()


def test_shares_are_all_rows_once():
    rows = torch.arange(12).view(6, 2)
    parts = [Share(rank, 3).rows(rows) for rank in range(3)]
    assert sorted(torch.cat(parts).flatten().tolist()) == list(range(12)) and {len(part) for part in parts} == {2}
