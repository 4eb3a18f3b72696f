"""Two processes end with the parameters of one: whole weights in each, or shares of them; and go on from each other."""

import csv
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_train import command, written

from dloop.cli.main import entry
from dloop.errors import UserError
from dloop.testing import tiny_drafter, tiny_target
from dloop.train.checkpoint import STATE, checkpoints, latest
from dloop.train.parallel import Share, from_environment

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
    env = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    started = [
        subprocess.Popen(
            run, env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
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
