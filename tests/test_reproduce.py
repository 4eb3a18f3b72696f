"""One family's campaign: its plan, what a call does and leaves for the next, and a whole one on a tiny target."""

import json
import math
import os
import signal
import sys
import threading
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import test_cli
from conftest import ROOT
from test_data_path import CHATML

from dloop.cli.args import parse
from dloop.cli.main import COMMANDS, entry
from dloop.errors import UserError
from dloop.testing import tiny_target, write_target

sys.path.append(str(ROOT / "scripts"))
import reproduce_small
from reproduce_small import AGAIN, STOPPED, Campaign, go_on, new_drafter, plan, run_dloop

FAMILIES = ("dspark", "dflash", "domino", "eagle3")
STEPS = ["greedy", "sampled", "host", "loop", "host_as_long", "measured", "report"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    """A target with a tokenizer of bytes and a chat template."""
    home = tmp_path_factory.mktemp("tiny")
    tokenizer = test_cli.byte_tokenizer()
    tokenizer.chat_template = CHATML
    write_target(tiny_target(vocab_size=test_cli.VOCAB, num_layers=8), home)
    tokenizer.save_pretrained(home)
    return home


@pytest.fixture
def given(tiny, tmp_path):
    """A campaign of few steps; more settings by keyword."""
    questions = [json.dumps({"prompt": f"Question {number}?"}) for number in range(12)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(questions))
    (tmp_path / "gsm8k.jsonl").write_text(json.dumps({"turns": ["How many?"]}) + "\n")
    words = dict(
        model=str(tiny), prompts=tmp_path / "prompts.jsonl", data_dir=tmp_path, output_dir=tmp_path / "out",
        greedy_samples=8, sampled_samples=4, answer_tokens=24, max_length=120, live=4, host_steps=2, loop_steps=2,
        batch_size=2, anchors=8, draft_vocab_size=64, fast=False, dataset="gsm8k", max_samples=1, max_new_tokens=12,
        dtype="float32", gates=["-0.5", "auto"],
    )  # fmt: skip
    return lambda **more: Campaign(**(words | more))


def rows(campaign: Campaign) -> list[dict]:
    return [json.loads(line) for line in (campaign.output_dir / "campaign.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_step_is_a_command_that_parses(given, family, monkeypatch):
    campaign = given(family=family, bench="temperature=1 tree-budget=0")
    monkeypatch.setattr(reproduce_small, "reporting", lambda given: ["report", "--results", "r"])
    commands = [step.command(campaign) for step in plan(campaign)]
    assert [step.name for step in plan(campaign)] == STEPS
    for words in commands:
        parse(import_module(COMMANDS[words[0]].module).Command, f"dloop {words[0]}", words[1:])
    loop, control = commands[3:5]
    differ = [pair for pair in zip(loop, control, strict=True) if pair[0] != pair[1]]
    assert len(differ) == 2, "the control differs by its folder and by the loop stage alone"


@pytest.mark.parametrize(("family", "whole"), [("dspark", None), ("dflash", None), ("domino", None), ("eagle3", 16384)])
def test_a_drafter_names_as_many_words_as_it_is_given(given, family, whole):
    campaign = given(family=family)
    assert new_drafter(campaign).draft_vocab_size == 64
    unsaid = new_drafter(replace(campaign, draft_vocab_size=None)).draft_vocab_size
    assert unsaid == (whole and min(whole, test_cli.VOCAB))


def test_a_call_goes_on_where_the_last_one_ended(given, monkeypatch):
    campaign, called = given(), list[str]()
    for name in ("join_answers", "link"):
        monkeypatch.setattr(reproduce_small, name, lambda given, name=None: None)
    ends = iter([0, AGAIN, 0, 1])

    def run(words, seconds):
        called.append(words[0])
        return next(ends)

    assert go_on(campaign, run) == AGAIN and called == ["data", "data"]
    assert go_on(campaign, run) == 1 and called == ["data", "data", "data", "train"]
    assert [(row["step"], row["exit"], row["restarts"]) for row in rows(campaign)] == [
        ("greedy", 0, 0), ("sampled", AGAIN, 0), ("sampled", 0, 1), ("host", 1, 0),
    ]  # fmt: skip
    assert go_on(given(minutes=1e-9), run) == AGAIN and len(called) == 4, "no time: nothing begins"


def test_what_cannot_begin_is_refused(given, tmp_path):
    for words, named in (
        ({"gates": []}, "--gates"),
        ({"prompts": None}, "--prompts"),
        ({"tokens": tmp_path / "prompts.jsonl"}, "not both"),
        ({"data_dir": tmp_path / "none"}, "does not exist"),
        ({"minutes": math.nan}, "--minutes"),
        ({"minutes": 0.0}, "--minutes"),  # a loop around it would never end
        ({"gates": ["foo"]}, "--loop-gate"),
        ({"gates": ["-0.5", "-0.5"]}, "measured already"),
        ({"bench": "tree-budgets=0"}, "--tree-budget"),
    ):
        with pytest.raises(UserError, match=named):
            go_on(given(**words), lambda words, seconds: pytest.fail("it began"))


def test_what_the_time_ends_is_told_apart_from_what_fails(given, tmp_path):
    assert run_dloop(["--version"], 60) == 0
    assert run_dloop(["report", "--results", str(tmp_path)], 60) == 2
    assert run_dloop(["data", "--model", "none", "--prompts", "none", "--output", "none.npz"], 0.0) == AGAIN


def test_what_the_user_ends_takes_its_command_along():
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    assert run_dloop(["doctor"], 60) == STOPPED
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_folder_of_other_settings_or_with_a_damaged_log_is_refused(given, monkeypatch):
    for name in ("join_answers", "link"):
        monkeypatch.setattr(reproduce_small, name, lambda given, name=None: None)
    ends = iter([0, 0, 0, 1])
    assert go_on(given(), lambda words, seconds: next(ends)) == 1
    config = (given().output_dir / "config.json").read_text()
    for other in ({"host_steps": 4}, {"greedy_samples": 6}, {"family": "dflash"}):
        with pytest.raises(UserError, match="of other settings; give another --output-dir"):
            go_on(given(**other), lambda words, seconds: pytest.fail("later steps would build on the earlier ones"))
    assert (given().output_dir / "config.json").read_text() == config
    assert go_on(given(max_samples=2, loop_steps=3), lambda words, seconds: 1) == 1, "these have not been used yet"
    with (given().output_dir / "campaign.jsonl").open("a") as file:
        file.write('{"step": "ho')
    with pytest.raises(UserError, match="line 6, is damaged"):
        go_on(given(), lambda words, seconds: 0)


def test_a_whole_campaign_of_a_tiny_target(given, capsys, tmp_path):
    campaign = given(output_dir=tmp_path / "an [odd] baseline--place")
    assert go_on(campaign, lambda words, seconds: entry(list(words))) == 0
    assert [(row["step"], row["exit"]) for row in rows(campaign)] == [(step, 0) for step in STEPS]
    listed = json.loads((campaign.output_dir / "gain.json").read_text())
    settings = {"baseline", "host", "host_as_long", "loop", "trained", "dloop", "dloop:auto"}
    assert {entry["setting"] for entry in listed} == settings
    assert all((campaign.output_dir / f"gain.{end}").stat().st_size for end in ("md", "png"))
    capsys.readouterr()
    assert go_on(campaign, lambda words, seconds: pytest.fail("everything is done")) == 0
