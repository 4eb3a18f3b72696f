"""The benchmark of packed decoding counts what it times."""

from importlib import import_module
from pathlib import Path

import pytest

from dloop.gate import ALWAYS_OPEN
from dloop.settings import Settings
from dloop.testing import tiny_drafter, tiny_target

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.mark.parametrize("live", [1, 3])
def test_every_way_decodes_all_prompts_and_is_compared_with_plain_decoding(monkeypatch, live):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = import_module("benchmark_packed")
    target = tiny_target()
    drafter, prompts = tiny_drafter(target), [[5, 9, 11], [7, 8], [3], [12, 13, 14, 15]]
    settings = Settings(max_new_tokens=12, loop_gate=ALWAYS_OPEN, stop_token_ids=())
    ways = {"plain": (None, settings), "loop": (drafter, settings)}
    plain, loop = script.measure(target, ways, prompts, live, repeats=2)
    for row in (plain, loop):
        assert (row["live"], row["tokens"], row["texts"], row["texts_like_plain"]) == (live, 48, 4, 4)
        slowest, fastest = row["range_tokens_per_s"]
        assert 0 < slowest <= row["tokens_per_s"] <= fastest
    assert plain["rounds"] == 44 > loop["rounds"] > 0


def test_a_text_that_is_not_plain_decoding_s_is_counted(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = import_module("benchmark_packed")
    greedy = Settings(max_new_tokens=12, stop_token_ids=())
    drawn = Settings(max_new_tokens=12, stop_token_ids=(), temperature=5.0, seed=1)
    ways = {"plain": (None, greedy), "other": (None, drawn)}
    assert [row["texts_like_plain"] for row in script.measure(tiny_target(), ways, [[5, 9], [7]], 2, 1)] == [2, 0]
