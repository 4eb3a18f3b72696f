"""`dloop tune`: the grid against one replay a setting, the choice on texts left out by hand, where it is written."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from test_calibrate import COSTS, DEEPEST, drawn
from test_replay_command import folder, refused, words  # noqa: F401

from dloop.cli import tune_run
from dloop.cli.main import entry
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS, FixedGate
from dloop.gates.costs import Costs
from dloop.gates.trace import save
from dloop.gates.tuning import Setting, best, grid, held_out, row_costs, times, walks_of
from dloop.gates.walk import gate_depths, walk

CHEAP = Costs(first_ms=1.0, later_ms=0.1, rows=(1, 8, 64), verify_ms=(9.0, 9.2, 9.3))
THRESHOLDS = (-1.0, -0.25, ALWAYS_OPEN, -3.0)


def test_the_grid_holds_each_setting_once_the_host_first():
    settings = grid(THRESHOLDS, ("last", "all"), 3)
    assert settings[0] == Setting(FixedGate(NEVER_OPENS), 3) and settings[0].flags == "--loop-gate 1.0"
    assert len(settings) == len(set(settings)) == 1 + 2 * (3 * 2 + 1)
    assert settings[1] == Setting(FixedGate(-0.25), 2) and settings[-1] == Setting(FixedGate(ALWAYS_OPEN), 3)
    assert settings[2].flags == "--loop-gate -0.25 --gate-sum all --max-stages 2"
    assert grid(THRESHOLDS, ("all",), 1) == [Setting(FixedGate(NEVER_OPENS), 1)]


def test_the_grid_is_replayed_setting_by_setting():
    trace, settings = drawn(right=0.85), grid(THRESHOLDS, ("last", "all"), DEEPEST)
    ms = times(walks_of(trace, settings), CHEAP)
    expected = [
        [walk(text, gate_depths(text, each.gate, each.max_stages), 3).ms(CHEAP) for each in settings]
        for text in trace.texts
    ]
    assert ms.tolist() == expected
    totals = [sum(text[i] for text in expected) for i in range(len(settings))]
    assert best(ms) == min(range(len(settings)), key=totals.__getitem__) != 0


def test_a_text_has_no_say_in_its_own_setting():
    ms = np.array([[9.0, 1.0, 5.0], [3.0, 5.0, 4.0], [3.0, 5.0, 4.5]])
    assert best(ms) == 1  # 11 ms, by the first text alone
    by_hand = [min(range(3), key=lambda s, left=i: sum(ms[t, s] for t in range(3) if t != left)) for i in range(3)]
    assert held_out(ms).tolist() == by_hand == [0, 1, 1]


def test_equal_times_go_to_the_first_setting():
    assert best(np.array([[2.0, 2.0], [3.0, 3.0]])) == 0


def test_what_a_row_costs():
    table = row_costs(Costs(first_ms=1, later_ms=1, rows=(1, 5, 7), verify_ms=(3.0, 5.0, 8.0)), 0.5)
    assert [(each.rows, each.ms, each.each_more_ms, each.pays_from) for each in table] == [
        (1, 3.0, 0.5, 0.25),
        (5, 5.0, 1.5, 0.75),
        (7, 8.0, None, None),
    ]


def tuned(capsys, trace: Path, *more: str) -> dict:
    capsys.readouterr()
    assert entry(["tune", "--trace", str(trace), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


CHEAP_LOOP = ["--stage-ms", "1,0.1", "--verify-ms", "9,0.01"]
DEAR_LOOP = ["--stage-ms", "1,60", "--verify-ms", "9,0.01"]


@pytest.fixture(scope="module")
def easy(tmp_path_factory) -> Path:
    """A trace of eight texts, most of whose drafts are right."""
    path = tmp_path_factory.mktemp("easy") / "t.npz"
    save(path, drawn(texts=8, right=0.9))
    return path


def test_a_loop_that_pays_is_recommended(capsys, easy, tmp_path):
    made = tuned(capsys, easy, *CHEAP_LOOP, "--output", str(tmp_path / "out.json"))
    assert made["pays"] and made["recommended"]["flags"] == made["best"]["flags"] != "--loop-gate 1.0"
    assert made["interval"][0] > 1 and made["interval"][0] <= made["held_out_gain"] <= made["interval"][1]
    assert made["held_out_gain"] <= made["best"]["gain"] and made["best"]["flags"] in made["reason"]
    assert json.loads((tmp_path / "out.json").read_text()) == made
    assert "no tree budget is chosen" in made["trees"] and len(made["row_costs"]) == 2
    flags = ["--loop-gate", str(made["best"]["loop_gate"]), "--gate-sum", made["best"]["gate_sum"], "--max-stages"]
    words = ["replay", "--trace", str(easy), "--json", *flags, str(made["best"]["max_stages"]), *CHEAP_LOOP]
    assert entry(words) == 0
    row = json.loads(capsys.readouterr().out)["gates"][1]
    assert row["gain"] == pytest.approx(made["best"]["gain"])
    top = max(made["curve"], key=lambda each: each["tokens_per_s"])
    assert top["tokens_per_s"] == pytest.approx(row["tokens_per_s"])
    assert made["curve"][0]["gain"] == 1 and made["curve"][0]["loop_gate"] == 1


def test_a_dear_loop_leaves_the_host(capsys, easy, tmp_path):
    made = tuned(capsys, easy, *DEAR_LOOP, "--output", str(tmp_path / "out.json"))
    assert (
        not made["pays"]
        and made["recommended"]["loop_gate"] == 1
        and made["recommended"]["flags"] == made["best"]["flags"]
    )
    assert made["reason"] == "no gate of the grid takes less time than the host's own"


def test_an_interval_with_1_in_it_recommends_no_loop(monkeypatch, capsys, easy, tmp_path):
    monkeypatch.setattr(tune_run, "interval", lambda pairs: [0.98, 1.3])
    made = tuned(capsys, easy, *CHEAP_LOOP, "--output", str(tmp_path / "out.json"))
    assert not made["pays"] and made["recommended"]["flags"] == "--loop-gate 1.0" != made["best"]["flags"]
    assert "(95 % 0.980 to 1.300)" in made["reason"] and made["reason"].endswith("which includes 1: keep the host")


def test_the_page_warns_of_what_else_might_be_faster(capsys, easy, tmp_path):
    command = ["tune", "--trace", str(easy), "--output", str(tmp_path / "out.json"), "--loop-gate"]
    assert entry([*command, "-3", *CHEAP_LOOP]) == 0
    out = capsys.readouterr().out
    assert "The best cap is the deepest that was tried" in out and "Plain decoding" not in out
    assert entry([*command, "-3", "--stage-ms", "90,1", "--verify-ms", "9,0.01"]) == 0
    assert "Plain decoding is as fast as any of these or faster: 111.1 tokens/s." in capsys.readouterr().out


def test_one_text_gives_no_interval(capsys, tmp_path):
    save(tmp_path / "t.npz", drawn(texts=1, right=0.9))
    made = tuned(capsys, tmp_path / "t.npz", *CHEAP_LOOP, "--output", str(tmp_path / "out.json"))
    assert made["interval"] is None and made["best"]["gain"] > 1
    assert made["recommended"]["loop_gate"] == 1 and "a single text gives no interval" in made["reason"]


def test_the_choice_goes_beside_the_drafter_of_the_record(folder, capsys):  # noqa: F811
    capsys.readouterr()
    assert entry(["tune", "--trace", str(folder / "trace.npz"), *COSTS]) == 0
    out, place = capsys.readouterr().out, folder / "drafter" / tune_run.FILE
    made = json.loads(place.read_text())
    assert f"Written to {place}." in out and f"`{made['recommended']['flags']}`" in out and made["reason"] in out
    assert made["source"]["draft"] == str(folder / "drafter") and len(made["trace_sha256"]) == 64
    place.unlink()


def test_a_folder_where_the_choice_goes_is_told_of(folder, capsys):  # noqa: F811
    place = folder / "drafter" / tune_run.FILE
    place.mkdir()
    found = refused(capsys, "tune", "--trace", str(folder / "trace.npz"), *COSTS)
    assert f"{place} is a folder, where a file is to be written" in found
    place.rmdir()


def test_a_drafter_with_a_choice_beside_it_still_loads(folder, capsys, tmp_path):  # noqa: F811
    shutil.copytree(folder / "drafter", tmp_path / "drafter")
    where = ["--draft-model", str(tmp_path / "drafter")]
    tuned(capsys, folder / "trace.npz", *COSTS, *where)
    again = words(folder, tmp_path / "again.npz", *where)
    assert (tmp_path / "drafter" / tune_run.FILE).is_file() and entry(again) == 0


def test_another_drafters_folder_is_refused(folder, capsys, tmp_path):  # noqa: F811
    shutil.copytree(folder / "target", tmp_path / "other")
    more = [*COSTS, "--draft-model", str(tmp_path / "other")]
    assert "are not those of the trace" in refused(capsys, "tune", "--trace", str(folder / "trace.npz"), *more)
    assert not (tmp_path / "other" / tune_run.FILE).exists()


def test_without_a_record_a_place_must_be_named(capsys, easy):
    assert "not named beside the trace" in refused(capsys, "tune", "--trace", str(easy), *COSTS)


@pytest.mark.parametrize("draft", ["demo", "nowhere/at-all"])
def test_what_is_no_folder_of_the_users_is_left_alone(capsys, tmp_path, draft):
    save(tmp_path / "t.npz", drawn())
    (tmp_path / "t.npz.json").write_text(json.dumps({"draft": draft}))
    err = refused(capsys, "tune", "--trace", str(tmp_path / "t.npz"), *COSTS)
    assert "--output FILE" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ([], "dloop tune weighs times"),
        ([*COSTS, "--loop-gate", "0.5"], "--loop-gate must be thresholds from 0 down"),
        ([*COSTS, "--max-stages", "9"], "deeper than"),
        (["--stage-ms", "1,1", "--verify-ms", "0,0", "--output", "out.json"], "takes no time"),
        ([*COSTS, "--output", "nowhere/out.json"], "must be a file in a folder"),
        ([*COSTS, "--output", "out.json", "--draft-model", "x"], "give one"),
    ],
    ids=["costs", "gate", "stages", "nothing", "output", "both"],
)
def test_what_makes_no_sense_is_refused(capsys, easy, more, named):
    err = refused(capsys, "tune", "--trace", str(easy), *more)
    assert named in err and err.count("\n") == 1
