"""Traces and replay: a replayed round is the real one, whatever the gate; oracles agree with brute force."""

import dataclasses
import functools
import itertools
import json
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import dloop
from dloop.errors import UserError
from dloop.gate import FixedGate
from dloop.gates import record
from dloop.gates.costs import Costs, given_costs, read_costs
from dloop.gates.features import FEATURES
from dloop.gates.oracle import hindsight_depths, paper_depths
from dloop.gates.played import play, walked
from dloop.gates.trace import Text, Trace, is_same, joined, load, save
from dloop.gates.walk import Walk, figures, gate_depths, read, walk
from dloop.judge import Match
from dloop.loop import Session, decode
from dloop.settings import Settings
from dloop.testing import gather, good_drafter, taught_drafter, tiny_target
from dloop.types import Draft, Round, Sampling

LENGTH, STAGES, K = 26, 4, 3
PROMPT = [5, 9, 3, 11, 7]
FAMILIES = ["good", "dflash", "dspark", "domino", "eagle3"]  # good: mostly right, and sure
STEPS = {"dflash": 50, "domino": 50}  # these learn more slowly
COSTS = Costs(first_ms=1.0, later_ms=0.8, rows=(1, 8, 64), verify_ms=(3.0, 3.3, 4.0), loop_ms=0.02, extend_ms=0.2)
ROUNDS = ("start", "stages", "accepted", "emitted")


@dataclass(frozen=True)
class Case:
    """A tiny pair in float32, and the trace of one text."""

    target: object
    drafter: object
    settings: Settings
    trace: Trace
    decoded: dict[tuple[FixedGate, int], list[Round]] = field(default_factory=dict)

    @property
    def text(self) -> Text:
        return self.trace.texts[0]

    @property
    def k(self) -> int:
        return self.trace.ground.stage_len

    def real(self, gate: FixedGate, max_stages: int) -> list[Round]:
        """The rounds of a real decode."""
        if (gate, max_stages) not in self.decoded:
            self.decoded[gate, max_stages] = self._decode(gate, max_stages)
        return self.decoded[gate, max_stages]

    def _decode(self, gate: FixedGate, max_stages: int) -> list[Round]:
        changed = {"loop_gate": gate.threshold, "gate_sum": gate.over, "max_stages": max_stages, "tree_budget": 0}
        settings = replace(self.settings, **changed)
        return dloop.generate(self.target, self.drafter, PROMPT, **dataclasses.asdict(settings)).rounds

    def gates(self) -> dict[str, tuple[FixedGate, int]]:
        """Five settings; thresholds stand between what is read, so that rounding decides nothing."""
        last, whole = (between(read(self.text, over)) for over in ("last", "all"))
        return {
            "host": (FixedGate(1.0), STAGES),
            "always": (FixedGate(float("-inf")), 3),
            "strict": (FixedGate(last[2 * len(last) // 3]), STAGES),
            "loose": (FixedGate(last[len(last) // 4]), STAGES),
            "whole chain": (FixedGate(whole[len(whole) // 2], "all"), STAGES),
        }


def between(scores: np.ndarray) -> list[float]:
    """Midpoints of neighbouring scores that are not within rounding of each other."""
    known = np.unique(scores[np.isfinite(scores)])
    return [float(a + b) / 2 for a, b in itertools.pairwise(known) if b - a > 1e-4]


def traced(target, drafter, settings: Settings) -> Trace:
    recording = record.begin(target, drafter, PROMPT, settings)
    return recording.trace(list(recording.stream))


@functools.cache
def case_of(family: str) -> Case:
    target = tiny_target("qwen3", seed=5)
    depth = K if family == "eagle3" else None
    settings = Settings(max_new_tokens=LENGTH, max_stages=STAGES, stop_token_ids=[], draft_depth=depth)
    plain = dloop.generate_autoregressive(target, PROMPT, max_new_tokens=LENGTH, stop_token_ids=[]).tokens
    texts = [PROMPT + plain]
    if family == "good":
        drafter = good_drafter(target, texts, stage_len=K)
    else:
        drafter = taught_drafter(target, texts, family=family, stage_len=K, steps=STEPS.get(family, 20))
    return Case(target, drafter, settings, traced(target, drafter, settings))


def changed(case: Case, **changes) -> Case:
    """The same pair under other settings."""
    settings = replace(case.settings, **changes)
    return Case(case.target, case.drafter, settings, traced(case.target, case.drafter, settings))


@pytest.fixture(scope="module", params=FAMILIES)
def case(request) -> Case:
    return case_of(request.param)


@pytest.fixture(scope="module")
def good() -> Case:
    return case_of("good")


def agrees(one: Walk, other: Walk) -> bool:
    """Round for round: where it starts, its stages, what was accepted and what reached the text."""
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in ROUNDS)


# a replay is the decode


def test_the_traced_text_is_the_target_s_own(case):
    plain = dloop.generate_autoregressive(case.target, PROMPT, max_new_tokens=LENGTH, stop_token_ids=[])
    assert case.text.answer.tolist() == plain.tokens and case.text.prompt.tolist() == PROMPT
    assert len(case.text) == LENGTH - 1
    filled = np.isfinite(case.text.score).sum(1)
    assert np.array_equal(filled, case.text.stages) and filled.max() == STAGES
    assert np.allclose(np.nansum(case.text.logp, 2), np.nan_to_num(case.text.score), atol=1e-5)


@pytest.mark.parametrize("name", ["host", "always", "strict", "loose", "whole chain"])
def test_replay_is_the_real_decode_round_for_round(case, name):
    gate, most = case.gates()[name]
    rounds = case.real(gate, most)
    real = walked(rounds, len(PROMPT), case.k)
    ours = walk(case.text, gate_depths(case.text, gate, most), case.k)
    assert agrees(ours, real)
    assert ours.acceptance_length == pytest.approx(sum(r.accepted + 1 for r in rounds) / len(rounds), abs=1e-12)
    played = play(case.text, case.trace.ground, gate, max_stages=most)
    for one, other in zip(played, rounds, strict=True):
        assert one.draft.tokens == other.draft.tokens and one.path == other.path and one.emitted == other.emitted
        assert [record.reason for record in one.stage_records] == [record.reason for record in other.stage_records]
        assert one.scores == pytest.approx(other.scores, abs=1e-4)


def test_the_settings_differ_and_the_good_drafter_loops(good):
    walks = [walk(good.text, gate_depths(good.text, *setting), good.k) for setting in good.gates().values()]
    assert len({tuple(each.stages.tolist()) for each in walks}) == len(walks)
    assert walks[1].looped > 0


@pytest.mark.parametrize("shift", [1, -1])
def test_a_replay_that_is_off_by_one_start_is_caught(case, shift):
    names = ("stages", "accepted", "score")
    wrong = replace(case.text, **{name: np.roll(getattr(case.text, name), shift, 0) for name in names})
    caught = [
        not agrees(walk(wrong, gate_depths(wrong, gate, most), case.k), walked(case.real(gate, most), 5, case.k))
        for gate, most in case.gates().values()
    ]
    assert sum(caught) >= 3


def test_stop_tokens_end_drafts_and_texts_in_both():
    whole = case_of("good").text.answer.tolist()
    stop = next(token for token in whole[12:] if token not in whole[:12])
    case = changed(case_of("good"), stop_token_ids=[stop])
    assert case.text.answer.tolist() == whole[: whole.index(stop) + 1]
    for gate, most in case.gates().values():
        rounds = case.real(gate, most)
        assert agrees(walk(case.text, gate_depths(case.text, gate, most), case.k), walked(rounds, len(PROMPT), case.k))
        assert [r.bonus for r in play(case.text, case.trace.ground, gate, max_stages=most)[:-1]] == [
            r.bonus for r in rounds[:-1]
        ]


def test_at_a_temperature_the_text_is_plain_sampling_s(good):
    case = changed(good, temperature=0.9, seed=11, verify="match", max_new_tokens=20)
    plain = dloop.generate_autoregressive(case.target, PROMPT, **dataclasses.asdict(case.settings))
    assert case.text.answer.tolist() == plain.tokens != good.text.answer.tolist()[:20]
    for gate, most in case.gates().values():
        ours = walk(case.text, gate_depths(case.text, gate, most), case.k)
        assert agrees(ours, walked(case.real(gate, most), len(PROMPT), case.k))
    with pytest.raises(UserError, match="without a seed"):
        record.begin(good.target, good.drafter, PROMPT, replace(good.settings, temperature=0.9))


@dataclass
class Learning:
    """A gate with a memory: a threshold that moves with every round, and what the rounds took."""

    threshold: float | None = -0.5
    seconds: list[float] = field(default_factory=list)

    def opens(self, draft: Draft) -> bool:
        return sum(draft.scores) >= self.threshold

    def observe(self, round: Round) -> None:
        self.threshold += 0.4 if round.full_stages < round.stages else -0.7
        self.seconds.append(round.draft_s + round.verify_s)


def test_a_gate_that_learns_is_replayed_too(case):
    limits = case.trace.ground.limits
    session = Session(case.target.open(case.drafter.taps), shaped_chain(case).open())
    task = decode(session, 0, PROMPT, gate=Learning(), judge=Match(Sampling()), limits=limits)
    (real,) = gather([task], session)
    gate = Learning()
    played = play(case.text, case.trace.ground, gate, COSTS)
    assert agrees(walked(played, len(PROMPT), case.k), walked(real.rounds, len(PROMPT), case.k))
    stages = np.array([round.stages for round in played])
    assert np.allclose(np.array(gate.seconds) * 1000, COSTS.round_ms(stages, case.k))
    assert sum(r.draft_s + r.verify_s for r in played) * 1000 == pytest.approx(
        walked(played, len(PROMPT), case.k).ms(COSTS)
    )


def shaped_chain(case: Case):
    return case.drafter.at_depth(K) if case.trace.ground.family == "eagle3" else case.drafter


# files


def test_a_file_holds_the_trace_to_the_bit(good, tmp_path):
    whole = joined([good.trace, changed(good).trace])
    save(tmp_path / "trace.npz", whole)
    found = load(tmp_path / "trace.npz")
    assert (found.ground, found.features) == (whole.ground, whole.features) and len(found.texts) == 2
    assert all(is_same(a, b) for a, b in zip(found.texts, whole.texts, strict=True))
    assert list(tmp_path.iterdir()) == [tmp_path / "trace.npz"]


def test_texts_of_one_token_have_no_start(good, tmp_path):
    short = traced(good.target, good.drafter, replace(good.settings, stop_token_ids=[int(good.text.answer[0])]))
    assert len(short.texts[0]) == 0 and short.texts[0].answer.tolist() == [int(good.text.answer[0])]
    save(tmp_path / "trace.npz", short)
    assert is_same(load(tmp_path / "trace.npz").texts[0], short.texts[0])
    assert figures([walk(short.texts[0], gate_depths(short.texts[0], FixedGate(), 2), K)], COSTS).tokens == 0


@pytest.mark.parametrize("fault", ["missing", "text", "cut", "other"])
def test_what_is_no_trace_is_refused(good, tmp_path, fault):
    path = tmp_path / "trace.npz"
    if fault == "text":
        path.write_text("no archive")
    if fault == "cut":
        save(path, good.trace)
        path.write_bytes(path.read_bytes()[:-100])
    if fault == "other":
        np.savez(path, flat=np.arange(3))
    with pytest.raises(UserError, match=r"trace\.npz (cannot be read|is no trace)"):
        load(path)


def test_traces_of_other_limits_are_not_joined(good):
    with pytest.raises(UserError, match="recorded apart|record them apart"):
        joined([good.trace, replace(good.trace, ground=replace(good.trace.ground, stage_len=9))])


def test_features_are_those_of_the_rows(case):
    text, names = case.text, case.trace.features
    if case.trace.ground.family == "eagle3":
        assert names == () and text.features.shape[-1] == 0
        return
    assert names == FEATURES
    drafted = np.isfinite(text.score)
    entropy, margin, confidence = np.moveaxis(text.features[drafted], -1, 0)
    assert ((entropy >= 0) & (entropy <= np.log(case.target.vocab_size) + 1e-5)).all() and (margin >= 0).all()
    assert np.isfinite(confidence).all() == (case.trace.ground.family == "dspark")
    rest = np.log1p(-np.exp(text.logp[drafted].astype(float)).clip(max=0.999))  # what others can have at most
    assert (margin >= text.logp[drafted].clip(max=np.log(0.999)) - rest - 1e-3).all()


# oracles and costs


def synthetic(seed: int, n: int, stages: int = 3, k: int = 2) -> Text:
    """A text that no model wrote."""
    generator = np.random.default_rng(seed)
    count = generator.integers(1, stages + 1, n)
    drafted = np.arange(stages) < count[:, None]
    score = np.where(drafted, -generator.exponential(1.0, (n, stages)), np.nan)
    return Text(
        prompt=np.array([1], np.int32),
        answer=np.arange(n + 1, dtype=np.int32),
        stages=count,
        accepted=np.minimum(generator.integers(0, stages * k + 1, n), count * k),
        score=score,
        tokens=np.where(drafted[..., None], np.int32(1), np.int32(-1)).repeat(k, 2),
        logp=np.where(drafted[..., None], score[..., None] / k, np.nan).repeat(k, 2).astype(np.float32),
        features=np.zeros((n, stages, k, 0), np.float32),
    )


def every_way(text: Text, costs: Costs, k: int, most: int, here: int = 0) -> float:
    """The least milliseconds from a start on, by trying every choice at every start."""
    if here >= len(text):
        return 0.0
    return min(
        float(costs.round_ms(np.array([s]), k)[0])
        + every_way(text, costs, k, most, here + min(int(text.accepted[here]), s * k) + 1)
        for s in range(1, min(int(text.stages[here]), most) + 1)
    )


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("later_ms", [0.0, 0.8, 9.0])
def test_the_hindsight_optimum_is_brute_force_s(seed, later_ms):
    text, costs = synthetic(seed, 8), replace(COSTS, later_ms=later_ms)
    for most in (1, 2, 3):
        found = walk(text, hindsight_depths(text, costs, 2, most), 2)
        assert found.ms(costs) == pytest.approx(every_way(text, costs, 2, most), abs=1e-9)
        assert found.tokens == len(text) and found.stages.max() <= most


@pytest.mark.parametrize("seed", range(4))
def test_the_paper_s_oracle_goes_on_while_all_is_right(seed):
    text = synthetic(seed, 30)
    depths = paper_depths(text, 2, 3)
    for start, depth in enumerate(depths):
        expected = 1
        while expected < min(3, text.stages[start]) and text.accepted[start] >= expected * 2:
            expected += 1
        assert depth == expected


def test_no_gate_beats_the_optimum(case):
    text, k = case.text, case.k
    best = walk(text, hindsight_depths(text, COSTS, k, STAGES), k).ms(COSTS)
    paper = walk(text, paper_depths(text, k, STAGES), k)
    others = [walk(text, gate_depths(text, *setting), k).ms(COSTS) for setting in case.gates().values()]
    assert best <= min(*others, paper.ms(COSTS)) + 1e-9


def test_costs_add_up():
    stages = np.array([0, 1, 3])
    assert COSTS.verify(np.array([1, 8, 36])).tolist() == [3.0, 3.3, pytest.approx(3.65)]
    expected = [0.2 + 3.0, 1.02 + 0.2 + 3.3, 1.0 + 1.6 + 0.06 + 0.2 + float(np.interp(22, [8, 64], [3.3, 4.0]))]
    assert COSTS.round_ms(stages, 7) == pytest.approx(expected)
    assert COSTS.plain_ms == 3.0
    with pytest.raises(UserError, match="1 to 85 rows lies outside the costs of given, 1 to 64 rows"):
        COSTS.round_ms(np.array([0, 12]), 7)


def test_costs_are_given_or_read_from_the_published_file():
    given = given_costs((2.0, 1.5), (3.0, 0.1), 85)
    assert given.round_ms(np.array([2]), 7) == pytest.approx([3.5 + 3.0 + 1.4])
    path = Path(__file__).parents[1] / "docs" / "results" / "latency-qwen3-4b.json"
    entries = {entry["context"]: entry for entry in json.loads(path.read_text())}
    near = read_costs(path, "dspark", "fast", None, 700)
    assert near == read_costs(path, "dspark", "fast", 1024, 9**9) and "after 1024 tokens" in near.source
    assert near.verify(np.array([16]))[0] == entries[1024]["rows"]["16"]["fast_ms"]
    assert near.later_ms == entries[1024]["stage_ms"]["later"]["fast_ms"]
    old = read_costs(path, "dflash", "fast", 1024, 0)
    assert old.later_ms == near.later_ms and "DSpark's stages of 7 tokens in place of dflash's" in old.source
    chain = read_costs(path, "eagle3", "twin", 16384, 0)
    assert chain.first_ms == entries[16384]["stage_ms"]["eagle3_chain"]["twin_ms"]
    with pytest.raises(UserError, match="--cost-context 7 is not in .*; it has 1024, 16384"):
        read_costs(path, "dspark", "fast", 7, 0)
    with pytest.raises(UserError, match="has no stages of mtp"):
        read_costs(path, "mtp", "fast", None, 0)


def test_a_block_family_has_times_of_its_own(tmp_path):
    stage = {"first": 1.0, "later": 2.0, "dflash_first": 3.0, "dflash_later": 4.0, "extend": 0.5}
    stages = {name: {"fast_ms": value, "stage_len": 15} for name, value in stage.items()} | {"host": {"loop_ms": 0.1}}
    about = {"context": 9, "shape": "s", "gpu": "g", "drafter": {"stage_len": 7}}
    (tmp_path / "l.json").write_text(json.dumps([{**about, "rows": {"1": {"fast_ms": 6.0}}, "stage_ms": stages}]))
    found = read_costs(tmp_path / "l.json", "dflash", "fast", None, 0)
    assert (found.first_ms, found.later_ms, found.extend_ms) == (3.0, 4.0, 0.5)
    assert found.source.endswith("fast, stages of 15 tokens")


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "{}",
        '[{"context": 1, "rows": {}, "stage_ms": {}}]',
        '[{"context": 1024, "rows": {}}]',
        '[{"context": 1, "rows": 3}]',
    ],
)
def test_files_without_costs_are_refused(tmp_path, text):
    path = tmp_path / "latency.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"--costs .*latency\.json"):
        read_costs(path, "dspark", "fast", None, 0)
