"""Flags from dataclasses: every type, both spellings, one-line errors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from dloop.cli.args import Common, build, option, parse, required
from dloop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Example(Common):
    """What it does.

    And a second paragraph.
    """

    model: str = required("a target")
    loop_gate: float = option(1.0, "a gate", group="loop")
    top_k: int = option(0, "so many")
    gate_sum: Literal["last", "all"] = option("last", "what is summed, 100% of it")
    tree_budget: int | Literal["host"] = option("host", "nodes")
    ids: tuple[int, ...] | Literal["model"] = option("model", "some ids")
    dist: tuple[int, ...] = option((), "lengths")
    seed: int | None = option(None, "of sampling")
    file: Path | None = option(None, "a file")
    trace: bool = option(False, "a trace")
    exact: bool | Literal["auto"] = option("auto", "bit for bit")
    server_address: list[str] = option([], "host:port")


def parsed(*words: str) -> Example:
    return parse(Example, "dloop example", ["--model", "m", *words])


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--loop-gate", "-0.5"], "loop_gate", -0.5),
        (["--loop-gate=-0.5"], "loop_gate", -0.5),
        (["--loop_gate", "-0.5"], "loop_gate", -0.5),
        (["--loop_gate=-1e-3"], "loop_gate", -1e-3),
        (["--loop-gate", "-1e-3"], "loop_gate", -1e-3),
        (["--loop-gate", "-inf"], "loop_gate", float("-inf")),
        (["--top-k", "7"], "top_k", 7),
        (["--gate-sum", "all"], "gate_sum", "all"),
        (["--tree-budget", "64"], "tree_budget", 64),
        (["--tree-budget", "host"], "tree_budget", "host"),
        (["--ids", "7,14,21"], "ids", (7, 14, 21)),
        (["--ids", "7, 14"], "ids", (7, 14)),
        (["--ids", ""], "ids", ()),
        (["--ids", "-1,2"], "ids", (-1, 2)),
        (["--ids", "model"], "ids", "model"),
        (["--dist", "7,14,21"], "dist", (7, 14, 21)),
        (["--seed", "3"], "seed", 3),
        (["--file", "a/b"], "file", Path("a/b")),
        (["--trace"], "trace", True),
        (["--trace", "--no-trace"], "trace", False),
        (["--exact"], "exact", True),
        (["--no-exact"], "exact", False),
        (["--server-address", "a:1", "b:2"], "server_address", ["a:1", "b:2"]),
        (["--server-address", "a:1", "--server_address", "b:2", "c:3"], "server_address", ["a:1", "b:2", "c:3"]),
        (["--json"], "json", True),
    ],
)
def test_a_flag_becomes_its_field(words, field, value):
    assert getattr(parsed(*words), field) == value


def test_what_is_not_given_keeps_its_default():
    assert parsed() == Example(model="m")
    parsed("--server-address", "a").server_address.append("b")
    assert parsed().server_address == []


@pytest.mark.parametrize("text", ["- a list\n- of two", "--- a rule", "a --flag inside", "", "-5 degrees, why?"])
def test_text_that_looks_like_a_flag_stays_text(text):
    assert parse(Example, "dloop example", ["--model", text]).model == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--loop-gat", "1"], "--loop-gat is not a flag of dloop example; did you mean --loop-gate?"),
        (["--loop-gat=1"], "--loop-gat is not a flag of dloop example; did you mean --loop-gate?"),
        (["--loop"], "--loop is not a flag of dloop example; did you mean --loop-gate?"),
        (["--zzz"], "--zzz is not a flag of dloop example; see dloop example --help"),
        (["--loop-gate", "abc"], "--loop-gate: got 'abc', expected NUMBER; see dloop example --help"),
        (["--top-k", "1.5"], "--top-k: got '1.5', expected INTEGER"),
        (["--gate-sum", "some"], "--gate-sum: got 'some', expected last|all"),
        (["--tree-budget", "x"], "--tree-budget: got 'x', expected INTEGER|host"),
        (["--ids", "1,x"], "--ids: got '1,x', expected INTEGER,...|model"),
        (["--file", ""], "--file: got '', expected PATH"),
        (["--top-k"], "--top-k: expected one argument"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_a_wrong_command_line_is_one_line(words, message):
    with pytest.raises(UserError) as error:
        parsed(*words)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_flag_is_named():
    with pytest.raises(UserError, match="required: --model"):
        parse(Example, "dloop example", ["--top-k", "3"])


def test_help_explains_every_flag_and_its_default(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        parse(Example, "dloop example", ["--help"])
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    assert "usage: dloop example --model TEXT [options]" in text
    assert "What it does." in text and "\nAnd a second paragraph." in text
    for flag in build(Example, "dloop example").flags:
        assert flag in text
    for piece in ("a target (required)", "a gate (default: 1.0)", "100% of it (default: last)", "(default: off)"):
        assert piece in flat
    assert "default: None" not in flat and "MISSING" not in flat
    assert max(map(len, text.splitlines())) <= 80
