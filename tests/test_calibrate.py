"""`dloop calibrate`: every statistic against counting by hand, openings against real decoding, the command itself."""

import json
import math
from importlib import import_module
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from test_replay_command import LENGTH, folder, refused  # noqa: F401

import dloop
from dloop.cli.main import entry
from dloop.gate import NEVER_OPENS, FixedGate
from dloop.gates import calibration
from dloop.gates.calibration import Openings, Point, openings, stages_of
from dloop.gates.trace import Ground, Text, Trace, load, save
from dloop.gates.walk import gate_depths, walk
from dloop.loop import Limits

K, DEEPEST = 3, 4
COSTS = ["--stage-ms", "1,0.8", "--verify-ms", "3,0.05"]
FEATURES = ("entropy", "margin", "confidence")


def drawn_text(rng: np.random.Generator, starts: int, right: float = 0.7, deepest: int = DEEPEST) -> Text:
    """A text whose acceptance is drawn; its scores know a little of it."""
    stages = rng.integers(1, deepest + 1, starts)
    accepted = np.minimum(rng.geometric(1 - right, starts) - 1, stages * K) if right < 1 else stages * K
    ends = np.arange(1, deepest + 1)
    score = -rng.exponential(0.5, (starts, deepest)) - 0.6 * (accepted[:, None] < ends * K)
    missing = ends > stages[:, None]
    score[missing] = np.nan
    features = rng.exponential(1.0, (starts, deepest, K, 3)).astype(np.float32)
    features[missing] = np.nan
    return Text(
        prompt=np.array([5], np.int32),
        answer=np.arange(starts + 1, dtype=np.int32),
        stages=stages,
        accepted=accepted,
        score=score,
        tokens=np.zeros((starts, deepest, K), np.int32),
        logp=np.zeros((starts, deepest, K), np.float32),
        features=features,
    )


def drawn(seed: int = 0, texts: int = 3, **more) -> Trace:
    """A trace without a model."""
    rng = np.random.default_rng(seed)
    limits = Limits(max_new_tokens=31, max_stages=DEEPEST, context=64, stop_ids=frozenset())
    ground = Ground(family="dspark", stage_len=K, limits=limits)
    return Trace(ground=ground, texts=[drawn_text(rng, 30, **more) for _ in range(texts)], features=FEATURES)


def samples(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities with ties, and outcomes that they tell something of."""
    rng = np.random.default_rng(seed)
    probability = rng.integers(0, 21, 80) / 20
    return probability, rng.random(80) < 0.2 + 0.6 * probability


@pytest.mark.parametrize("seed", range(4))
def test_auroc_is_the_share_of_pairs_in_order(seed):
    score, outcome = samples(seed)
    pairs = list(product(score[outcome], score[~outcome]))
    expected = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs)
    assert calibration.auroc(score, outcome) == pytest.approx(expected, abs=1e-12)
    x, y = np.array(calibration.roc(score, outcome)).T
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1) and np.trapezoid(y, x) == pytest.approx(expected, abs=1e-12)


def test_the_best_and_the_worst_ranking():
    outcome = np.array([False, True, False, True])
    assert calibration.auroc(np.array([-3.0, -1.0, -2.0, -0.5]), outcome) == 1
    assert calibration.auroc(np.array([-0.5, -2.0, -1.0, -3.0]), outcome) == 0
    assert calibration.auroc(np.zeros(4), outcome) == 0.5
    assert calibration.auroc(np.array([-math.inf, -1.0, -math.inf, -2.0]), outcome) == 1


@pytest.mark.parametrize("outcome", [[], [True, True], [False]])
def test_one_class_alone_has_no_ranking(outcome):
    which = np.array(outcome, bool)
    score = np.linspace(-1, 0, len(which))
    assert calibration.auroc(score, which) is None and calibration.roc(score, which) == []
    none = calibration.point(score, which, 1.0)
    assert none.precision is None and (none.recall is None) == (not any(outcome))
    assert (calibration.brier(np.exp(score), which) is None) == (not outcome)
    assert (calibration.ece(calibration.reliability(np.exp(score), which)) is None) == (not outcome)


def test_precision_and_recall_count_openings():
    score, outcome = samples(1)
    for threshold in (0.0, 0.35, 0.9, 2.0):
        opened = [bool(o) for s, o in zip(score, outcome, strict=True) if s >= threshold]
        assert calibration.point(score, outcome, threshold) == Point(len(opened), sum(opened), int(outcome.sum()))
    found = Point(8, 6, 12)
    assert found.precision == 0.75 and found.recall == 0.5


def test_calibration_by_hand():
    probability, outcome = np.array([0.05, 0.95, 1.0, 0.9, 0.55]), np.array([False, True, False, True, True])
    curve = calibration.reliability(probability, outcome)
    assert [each.count for each in curve] == [1, 0, 0, 0, 0, 1, 0, 0, 0, 3]
    assert curve[1].predicted is None and curve[9].predicted == pytest.approx(0.95)
    assert curve[9].observed == pytest.approx(2 / 3)
    assert calibration.ece(curve) == pytest.approx((0.05 + 0.45 + 3 * (0.95 - 2 / 3)) / 5)
    assert calibration.brier(probability, outcome) == pytest.approx((0.0025 + 0.0025 + 1 + 0.01 + 0.2025) / 5)


@pytest.mark.parametrize("seed", range(3))
def test_bins_hold_what_falls_into_them(seed):
    probability, outcome = samples(seed)
    curve = calibration.reliability(probability, outcome)
    for index, each in enumerate(curve):
        held = [i for i, p in enumerate(probability) if each.low <= p and (p < each.high or index == 9)]
        assert each.count == len(held)
        if held:
            assert each.observed == pytest.approx(np.mean([outcome[i] for i in held]))
            assert each.predicted == pytest.approx(np.mean([probability[i] for i in held]))


def by_hand(trace: Trace, over: str, most: int) -> list[tuple[int, float, bool, float, float, float]]:
    """The stages of a trace, one by one."""
    found = []
    for text in trace.texts:
        for i in range(len(text)):
            for s in range(1, min(int(text.stages[i]), most) + 1):
                if over == "last" and text.accepted[i] < (s - 1) * K:
                    continue
                rows = text.features[i, s - 1 if over == "last" else 0 : s].reshape(-1, 3).astype(float)
                score = sum(text.score[i, s - 1 if over == "last" else 0 : s].tolist())
                sure = sum(math.log(1 / (1 + math.exp(-logit))) for logit in rows[:, 2])
                found.append((s, score, bool(text.accepted[i] >= s * K), -rows[:, 0].sum(), rows[:, 1].min(), sure))
    return found


@pytest.mark.parametrize(("over", "most"), [("last", DEEPEST), ("last", 2), ("all", DEEPEST), ("all", 1)])
def test_the_stages_of_a_trace_are_these(over, most):
    trace = drawn()
    found, expected = stages_of(trace, over, most), by_hand(trace, over, most)
    columns = [found.stage, found.score, found.whole, *(found.figures[name] for name in FEATURES)]
    for column, values in zip(columns, zip(*expected, strict=True), strict=True):
        np.testing.assert_allclose(column, values, rtol=1e-9)
    groups = {name: found.of(name).stage for name in calibration.GROUPS}
    assert set(groups["1"]) == {1} and all(s > 2 for s in groups["3+"])
    assert sum(len(groups[name]) for name in ("1", "2", "3+")) == len(groups["all"]) == len(expected)


@pytest.mark.parametrize("gate", [FixedGate(-0.5), FixedGate(-2.0), FixedGate(-2.0, "all"), FixedGate(NEVER_OPENS)])
@pytest.mark.parametrize("most", [2, 3])
def test_openings_are_those_of_decoding(folder, gate, most):  # noqa: F811
    target = dloop.load_target(str(folder / "target"), "float32")
    drafter = dloop.load_drafter(str(folder / "drafter"), target)
    trace, found, expected = load(folder / "trace.npz"), Openings(0, 0, 0), [0, 0, 0]
    options = {"max_new_tokens": LENGTH, "max_stages": most, "loop_gate": gate.threshold, "gate_sum": gate.over}
    for text in trace.texts:
        found += openings(text, walk(text, gate_depths(text, gate, most), trace.ground.stage_len), most)
        start = 0
        for round in dloop.generate(target, drafter, text.prompt.tolist(), **options).rounds:
            ends = [record.stop for record in round.stage_records if record.reason == "open"]
            closed = round.stage_records[-1].reason == "gate" and round.stages < min(most, text.stages[start])
            start += len(round.emitted)
            expected[0] += len(ends) + closed
            expected[1] += len(ends)
            expected[2] += sum(round.accepted >= end for end in ends)
    assert found == Openings(*map(int, expected))
    assert found.opened or gate.threshold in (NEVER_OPENS, -0.5)


def calibrated(capsys, trace: Path, *more: str) -> dict:
    capsys.readouterr()
    assert entry(["calibrate", "--trace", str(trace), "--json", *more]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_command_tells_what_the_trace_holds(capsys, tmp_path):
    trace = drawn(right=0.85)
    save(tmp_path / "t.npz", trace)
    made = calibrated(capsys, tmp_path / "t.npz", "--at", "-0.8", "--loop-gate", "-0.5,-1", *COSTS)
    for over, group in product(("last", "all"), calibration.GROUPS):
        stages, found = stages_of(trace, over, DEEPEST).of(group), made["scores"][over][group]
        probability = np.exp(stages.score)
        assert found["stages"] == len(stages.whole) and found["whole"] == stages.whole.sum()
        assert found["auroc"] == calibration.auroc(stages.score, stages.whole) and found["undefined"] is None
        assert found["precision"] == calibration.point(stages.score, stages.whole, -0.8).precision
        assert found["brier"] == calibration.brier(probability, stages.whole)
        assert found["ece"] == calibration.ece(calibration.reliability(probability, stages.whole))
        assert sum(each["count"] for each in found["reliability"]) == found["stages"]
        assert found["features"]["margin"] == calibration.auroc(stages.figures["margin"], stages.whole)
    assert [(row["gate_sum"], row["threshold"]) for row in made["sweep"]] == [
        (over, g) for over in ("last", "all") for g in (None, -0.5, -0.8, -1.0)
    ]
    host = made["sweep"][0]
    assert host["opened"] == 0 and host["precision"] is None and host["stages_per_round"] == 1
    assert entry(["replay", "--trace", str(tmp_path / "t.npz"), "--json", "--loop-gate", "-0.8", *COSTS]) == 0
    replayed = {row["gate"]: row for row in json.loads(capsys.readouterr().out)["gates"]}
    row = made["sweep"][2]
    assert row["acceptance_length"] == replayed["fixed:-0.8"]["acceptance_length"]
    assert row["tokens_per_ms"] == pytest.approx(replayed["fixed:-0.8"]["tokens_per_s"] / 1000)


def test_one_class_is_told_and_not_ranked(capsys, tmp_path):
    save(tmp_path / "t.npz", drawn(right=1.0))
    made = calibrated(capsys, tmp_path / "t.npz", "--max-stages", "2")
    found = made["scores"]["last"]
    assert found["1"]["auroc"] is None and found["1"]["undefined"].startswith("all of 90 accepted whole")
    assert found["3+"]["undefined"] == "no such stage in the trace" and found["3+"]["ece"] is None
    assert entry(["calibrate", "--trace", str(tmp_path / "t.npz"), "--plot", str(tmp_path / "p.png")]) == 0
    assert "AUROC of stage 1 is undefined: all of 90 accepted whole" in capsys.readouterr().out
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_features_that_are_not_there_have_no_figure(capsys, tmp_path):
    trace = drawn()
    for text in trace.texts:
        text.features[..., 2] = np.nan
    other = Trace(ground=trace.ground, texts=trace.texts, features=("entropy", "colour", "confidence"))
    save(tmp_path / "t.npz", other)
    made = calibrated(capsys, tmp_path / "t.npz")
    assert list(made["features"]) == ["entropy", "confidence"] and made["features_left_out"] == ["colour"]
    assert made["scores"]["all"]["all"]["features"]["confidence"] is None
    assert {row["tokens_per_ms"] for row in made["sweep"]} == {None}


def test_a_real_trace_a_page_and_a_picture(folder, capsys, tmp_path):  # noqa: F811
    pytest.importorskip("matplotlib")
    capsys.readouterr()
    output, plot = tmp_path / "out.json", tmp_path / "out.svg"
    words = ["calibrate", "--trace", str(folder / "trace.npz"), *COSTS, "--output", str(output), "--plot", str(plot)]
    assert entry(words) == 0
    out = capsys.readouterr().out
    assert "## Sum of last" in out and "| last | host |" in out and "features" not in out
    made = json.loads(output.read_text())
    assert made["source"]["target"] == str(folder / "target") and made["starts"] == 3 * (LENGTH - 1)
    assert plot.read_text().count("<svg") == 1
    assert entry([*words[:3], "--at", "-inf", "--loop-gate", "-inf", "--plot", str(plot)]) == 0


@pytest.mark.parametrize(
    ("more", "named"),
    [
        (["--max-stages", "9"], "deeper than"),
        (["--loop-gate", "1.0"], "--loop-gate must be thresholds from 0 down"),
        (["--loop-gate", ""], "--loop-gate must be"),
        (["--at", "nan"], "--at must be"),
        (["--gate-sum", ""], "--gate-sum must be"),
        (["--stage-ms", "1,1"], "give both"),
        (["--plot", "x.txt"], "must end in"),
        (["--plot", "nowhere/x.png"], "must be a file in a folder"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_makes_no_sense_is_refused(folder, capsys, more, named):  # noqa: F811
    err = refused(capsys, "calibrate", "--trace", str(folder / "trace.npz"), *more)
    assert named in err and err.count("\n") == 1


def test_the_flags_import_no_torch():
    assert "torch" not in vars(import_module("dloop.cli.calibrate")) | vars(import_module("dloop.cli.tune"))
