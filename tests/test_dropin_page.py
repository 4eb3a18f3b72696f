"""The page on drop-in generation says what the tests hold."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_attach import PLAIN, PLAIN_TOGETHER

import dloop
from dloop.testing import tiny_target

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "drop-in.md").read_text()


def test_every_row_of_the_table_is_a_test_and_every_test_a_row():
    table = PAGE.split("## What is decoded plainly")[1].split("\n\n")[2]
    told = {re.findall(r"`([^`]+)` \|$", row)[0] for row in table.splitlines()[2:]}
    assert told == {reason for _, reason in [*PLAIN.values(), *PLAIN_TOGETHER.values()]}


@pytest.mark.parametrize("name", ["repetition_penalty", "no_repeat_ngram_size", "logits_processor", "min_new_tokens"])
def test_what_the_facade_does_not_have_is_an_error_that_names_it(name):
    with pytest.raises(TypeError, match=name):
        dloop.generate(tiny_target(num_layers=2), None, [1, 2], **{name: 2})


@pytest.mark.slow
def test_the_snippet_runs(smollm2_dir, tmp_path):
    (script,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.startswith("dloop ")
