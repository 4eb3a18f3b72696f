"""What the README shows works: commands parse with the real parser, and run where nothing big must be fetched."""

import os
import re
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from dloop.cli.args import parse
from dloop.cli.main import COMMANDS, PARTS

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


def commands() -> list[list[str]]:
    """Every `dloop ...` line, continuation lines joined."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("dloop ")]


def needs_a_download(words: list[str]) -> bool:
    """A model, or the results of a benchmark of one."""
    models = [
        words[i + 1] for i, word in enumerate(words) if word in ("--model", "--draft-model", "--target-model-path")
    ]
    return "report" in words or any("/" in model and not model.startswith("outputs/") for model in models)


CHAPTERS = [("Command line",), ("Python",), ("Speed",), ("Training", "Gates")]  # which use no files of one another


def chapter(heading: str) -> str:
    """The text below a heading of the second level."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", README, re.MULTILINE | re.DOTALL)
    return text


def run_in_order(readme: str, folder: Path) -> list[str]:
    """Snippets and commands as a reader meets them, each in its own process, in one folder; what snippets print."""
    printed = list[str]()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    for language, text in re.findall(r"^```(python|sh)\n(.*?)^```", readme, re.MULTILINE | re.DOTALL):
        lines = [text] if language == "python" else text.replace("\\\n", " ").splitlines()
        for line in lines:
            words = [sys.executable, "-c", line]
            if language == "sh":
                words = [sys.executable, "-m", *shlex.split(line, comments=True)]
                if not line.startswith("dloop ") or needs_a_download(words):
                    continue
            done = subprocess.run(words, cwd=folder, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
            if language == "python":
                printed.append(done.stdout)
    return printed


def test_every_command_is_shown():
    assert {words[1] for words in commands()} == set(COMMANDS)


@pytest.mark.parametrize("words", commands(), ids=lambda words: " ".join(words)[:60])
def test_command_lines_parse(words):
    part = PARTS.get(words[1], {}).get(words[2] if len(words) > 2 else "")
    found, rest = (COMMANDS[words[1]], words[2:]) if part is None else (part, words[3:])
    parse(import_module(found.module).Command, f"dloop {words[1]}", rest)


@pytest.mark.parametrize("name", re.findall(r"\]\(([\w/.-]+)\)", README))
def test_linked_files_exist(name):
    assert (ROOT / name).is_file()


def test_the_layout_names_what_is_there():
    (layout,) = re.findall(r"^## Layout\n\n```\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    for line in layout.splitlines():
        names = line.split("  ")[0].split()
        for name in [names[0], *(f"dloop/{name}" for name in names[1:])]:
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("number", [0, 1], ids=["five-lines", "drop-in"])
def test_the_first_scripts_are_short(number):
    script = blocks("python")[number]
    assert sum(bool(line.strip()) and " import " not in f" {line}" for line in script.splitlines()) <= 5


@pytest.mark.slow
@pytest.mark.parametrize("headings", CHAPTERS, ids=lambda headings: "+".join(headings).replace(" ", "-"))
def test_snippets_and_commands_run_and_the_first_scripts_answer(headings, smollm2_dir, tmp_path):
    printed = run_in_order("".join(map(chapter, headings)), tmp_path)
    if headings == ("Python",):
        first, second, *_ = printed
        assert "def reverse_string(" in first and "word[::-1]" in second


def test_every_chapter_with_something_to_run_is_run():
    headings = re.findall(r"^## (.*)", README, re.MULTILINE)
    runs = {heading for heading in headings if re.search(r"^```python$|^dloop ", chapter(heading), re.MULTILINE)}
    assert runs == {heading for group in CHAPTERS for heading in group}
