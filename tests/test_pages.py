"""What the pages for users show works: snippets and commands run, links lead somewhere."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("hosts", "faq")


def snippets(page: str) -> list[tuple[str, str]]:
    """Snippets of Python, and the commands, one by one; those of the README run with it."""
    readme = (ROOT / "README.md").read_text()
    found = re.findall(
        r"^```(python|sh)\n(.*?)^```", (ROOT / "docs" / f"{page}.md").read_text(), re.MULTILINE | re.DOTALL
    )
    return [
        (language, piece)
        for language, text in found
        for piece in ([text] if language == "python" else text.splitlines())
        if language == "python" or piece.split(" #")[0].strip() not in readme
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "number"), [(page, number) for page in PAGES for number in range(len(snippets(page)))], ids=str
)
def test_a_snippet_runs(page, number, smollm2_dir, tmp_path):
    language, text = snippets(page)[number]
    words = ["-c", text] if language == "python" else ["-m", *shlex.split(text, comments=True)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("page", [*PAGES, "drop-in", "baselines"])
def test_links_lead_somewhere(page):
    for name in re.findall(r"\]\(([\w/.-]+)\)", (ROOT / "docs" / f"{page}.md").read_text()):
        assert (ROOT / "docs" / name).is_file(), name
