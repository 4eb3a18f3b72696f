"""The promise: whatever is drafted, the text is the one the target alone gives. Float32, no exceptions."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

import dloop
from dloop.detect import FAMILIES
from dloop.drafters.block import BlockDrafter
from dloop.drafters.gap import READINGS
from dloop.drafters.gemma4_config import FAMILY as GEMMA_FAMILY
from dloop.drafters.host import HostDrafter
from dloop.drafters.mtp import FAMILY as MTP_FAMILY
from dloop.drafters.proposal import Proposal
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS, FixedGate, Gate
from dloop.gates import auto
from dloop.gates.learned import fresh
from dloop.judge import Match, Reject, follow
from dloop.loop import Limits, Session, Target, decode, run_many
from dloop.sampling import Sampling, gumbel, law, process
from dloop.settings import TREES, Settings, judge_of, shaped
from dloop.targets.gemma4 import Gemma4Memory, Gemma4Target
from dloop.targets.hf import HFMemory, HFTarget
from dloop.testing import (
    CHAIN_KINDS,
    KINDS,
    WINDOW_KINDS,
    Decoded,
    Script,
    ScriptedDrafter,
    TableTarget,
    chain,
    gather,
    good_drafter,
    knowing,
    replay,
    taught_drafter,
    tiny_drafter,
    tiny_target,
)
from dloop.types import Draft, Round, Rows, Seen, Stage, Verdict

GATES = (NEVER_OPENS, -0.5, -2.0, ALWAYS_OPEN)
MAX_STAGES = (1, 2, 3, 12)
PROMPT = [5, 9, 11, 60]
GREEDY = Sampling()
K = 3  # tokens of a scripted stage


@dataclass(frozen=True)
class Pair:
    """A tiny target, what it says after PROMPT, and two drafters for it."""

    target: HFTarget
    text: list[int]
    good: BlockDrafter
    random: BlockDrafter


@pytest.fixture(scope="module", params=(*KINDS, *WINDOW_KINDS, *CHAIN_KINDS))
def pair(request) -> Pair:
    target = tiny_target(request.param, num_layers=3)
    text = dloop.generate_autoregressive(target, PROMPT, max_new_tokens=48).tokens
    return Pair(target, text, good_drafter(target, [PROMPT + text]), tiny_drafter(target, stage_len=3))


def transformers_says(target: HFTarget, prompt: list[int], num_tokens: int, stop: Sequence[int] = ()) -> list[int]:
    """Greedy decoding by transformers alone: the independent reference."""
    ids = target.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=list(stop) or None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def timeless(rounds: Sequence[Round]) -> list[Round]:
    return [replace(round, draft_s=0.0, verify_s=0.0) for round in rounds]


# Real tiny models


def test_plain_decoding_is_what_transformers_gives(pair):
    for prompt, length in ((PROMPT, 48), (PROMPT, 1), ([3], 24), (list(range(40)), 24)):
        expected = transformers_says(pair.target, prompt, length)
        assert dloop.generate_autoregressive(pair.target, prompt, max_new_tokens=length).tokens == expected
    stop = [pair.text[4], pair.text[9]]
    stopped = dloop.generate_autoregressive(pair.target, PROMPT, max_new_tokens=48, stop_token_ids=stop)
    assert stopped.tokens == transformers_says(pair.target, PROMPT, 48, stop)
    assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("gate", GATES)
def test_greedy_text_is_the_target_s_own(pair, gate):
    for max_stages, length in [(12, 1), (12, 2), *((most, 7) for most in MAX_STAGES), (3, 48), (12, 48)]:
        out = dloop.generate(pair.target, pair.good, PROMPT, length, loop_gate=gate, max_stages=max_stages)
        assert out.tokens == pair.text[:length], (max_stages, length)
        assert out.finish_reason == "length"
        assert max((r.stages for r in out.rounds), default=0) <= (1 if gate == NEVER_OPENS else max_stages)


def test_a_drafter_that_is_hardly_ever_right_changes_nothing(pair):
    for gate, max_stages, length in ((NEVER_OPENS, 1, 24), (ALWAYS_OPEN, 3, 12)):
        out = dloop.generate(pair.target, pair.random, PROMPT, length, loop_gate=gate, max_stages=max_stages)
        assert out.tokens == pair.text[:length]
        assert any(r.accepted < len(r.drafted) for r in out.rounds)


@pytest.mark.parametrize("pair", ["qwen3", "llama"], indirect=True)
def test_the_good_drafter_is_good_and_the_gate_matters(pair):
    """Without long accepted runs and rounds of several stages the tests above would prove little."""
    gates = (NEVER_OPENS, -2.0, ALWAYS_OPEN)
    never, sometimes, always = (dloop.generate(pair.target, pair.good, PROMPT, 48, loop_gate=g).rounds for g in gates)
    assert max(r.accepted for r in always) > pair.good.config.stage_len
    assert len({r.stages for r in sometimes}) > 1
    assert len(always) < len(never)


def test_each_stop_token_ends_the_text_where_plain_decoding_ends_it(pair):
    never_said = next(token for token in range(97) if token not in pair.text)
    for index in first_occurrences(pair.text)[:7]:
        for gate in (NEVER_OPENS, ALWAYS_OPEN):
            out = dloop.generate(
                pair.target, pair.good, PROMPT, 48, loop_gate=gate, stop_token_ids=[pair.text[index], never_said]
            )
            assert (out.tokens, out.finish_reason) == (pair.text[: index + 1], "stop")


@pytest.mark.parametrize(
    "law",
    [Sampling(temperature=1.0), Sampling(temperature=0.6, top_k=5), Sampling(temperature=1.3, top_p=0.8, top_k=20)],
    ids=["plain", "top-k", "top-k-and-top-p"],
)
def test_sampled_text_is_plain_sampling_with_the_same_seed(pair, law):
    settings = {"temperature": law.temperature, "top_k": law.top_k, "top_p": law.top_p}
    texts = []
    for seed, gate in ((0, NEVER_OPENS), (1, -2.0), (2**62 - 1, ALWAYS_OPEN)):
        alone = dloop.generate_autoregressive(pair.target, PROMPT, 16, seed=seed, **settings)
        drafter = good_drafter(pair.target, [PROMPT + alone.tokens])  # knows this very sample: accepts long runs
        out = dloop.generate(
            pair.target, drafter, PROMPT, 16, loop_gate=gate, max_stages=3, seed=seed, verify="match", **settings
        )
        assert out.tokens == alone.tokens
        assert out.acceptance_length > 1.5
        texts.append(alone.tokens)
    assert texts[0] != texts[1] != texts[2] != texts[0]


@pytest.mark.parametrize("law", [GREEDY, Sampling(temperature=0.9, top_p=0.9)], ids=["greedy", "sampled"])
def test_sequences_decoded_together_equal_those_decoded_alone(pair, law):
    prompts = [PROMPT, [3], list(range(17))]
    lengths = [20, 5, 13]

    def task(index: int, session: Session, slot: int):
        return decode(
            session,
            slot,
            prompts[index],
            gate=FixedGate((ALWAYS_OPEN, -2.0, NEVER_OPENS)[index]),
            judge=Match(replace(law, seed=index)),
            limits=Limits(max_new_tokens=lengths[index], max_stages=2 + index, context=pair.target.context),
        )

    def opened() -> Session:
        return Session(pair.target.open(pair.good.taps), pair.good.open())

    together_in = opened()
    together = gather([task(i, together_in, slot=i) for i in range(3)], together_in)
    for index, found in enumerate(together):
        alone_in = opened()
        alone = gather([task(index, alone_in, slot=7)], alone_in)[0]
        assert found.tokens == alone.tokens
        assert timeless(found.rounds) == timeless(alone.rounds)
        plain = Session(pair.target.open(), None)
        assert found.tokens == gather([task(index, plain, slot=0)], plain)[0].tokens


def test_the_context_can_be_filled_to_its_last_position(pair):
    for room in (1, 2, 5, 13):
        prompt = [(7 * i) % 97 for i in range(pair.target.context - room)]
        expected = transformers_says(pair.target, prompt, room)
        for gate in (NEVER_OPENS, ALWAYS_OPEN):
            out = dloop.generate(pair.target, pair.random, prompt, room, loop_gate=gate)
            assert out.tokens == expected
            assert all(max(r.draft.positions) < pair.target.context for r in out.rounds)


# Every block family, really trained for the loop on a few texts


@dataclass(frozen=True)
class Taught:
    """A tiny target, texts of its own (greedy, then drawn with seeds 0, 1), and a drafter that learned them."""

    target: HFTarget
    texts: list[list[int]]
    drafter: HostDrafter


LAW = {"temperature": 0.8, "top_k": 40}
LENGTH = 24


OWNERS = {MTP_FAMILY: "qwen3_5", GEMMA_FAMILY: "gemma4"}  # families of one kind of target


@pytest.fixture(scope="module", params=["qwen3", "llama_tied", *WINDOW_KINDS, *CHAIN_KINDS])
def taught_target(request) -> HFTarget:
    return tiny_target(request.param, num_layers=3)


@pytest.fixture(scope="module", params=FAMILIES)
def taught(request, taught_target) -> Taught:
    owner = OWNERS.get(request.param)
    if owner is not None and taught_target.name != f"tiny {owner}":
        pytest.skip(f"{request.param} is {owner}'s")
    greedy = dloop.generate_autoregressive(taught_target, PROMPT, LENGTH).tokens
    drawn = [dloop.generate_autoregressive(taught_target, PROMPT, LENGTH, seed=s, **LAW).tokens for s in (0, 1)]
    learned = [PROMPT + text for text in (greedy, *drawn)]
    steps = 60 if taught_target.forks else 100
    drafter = taught_drafter(taught_target, learned, family=request.param, steps=steps)
    return Taught(taught_target, [greedy, *drawn], drafter)


def check_family(
    taught: Taught, judge: type[Match], seed: int | None, *, gate: float | Gate, max_stages: int
) -> list[Round]:
    """The family's text is plain decoding's: greedy, or (with a seed) the sample of that seed. Gives the rounds."""
    sampling = GREEDY if seed is None else Sampling(seed=seed, **LAW)
    session = Session(taught.target.open(taught.drafter.taps), taught.drafter.open())
    rules = Limits(max_new_tokens=LENGTH, max_stages=max_stages, context=taught.target.context)
    asked = gate if isinstance(gate, Gate) else FixedGate(gate)
    task = decode(session, 0, PROMPT, gate=asked, judge=judge(sampling), limits=rules)
    found = gather([task], session)[0]
    assert found.tokens == taught.texts[0 if seed is None else 1 + seed], "the text differs from plain decoding"
    return found.rounds


@pytest.mark.parametrize("seed", [None, 0, 1], ids=["greedy", "match-0", "match-1"])
def test_every_family_gate_and_cap_gives_the_target_s_text(taught, seed):
    everything = seed is None or taught.target.forks  # a recurrent target is slow in plain PyTorch
    pairs = itertools.product(GATES, MAX_STAGES) if everything else zip(GATES, MAX_STAGES, strict=True)
    for gate, max_stages in pairs:
        rounds = check_family(taught, Match, seed, gate=gate, max_stages=max_stages)
        assert max(r.stages for r in rounds) <= (1 if gate == NEVER_OPENS else max_stages)


@pytest.mark.parametrize("name", ["auto", "auto:full"])
def test_a_gate_that_learns_gives_the_target_s_text_in_every_family(taught, name, monkeypatch):
    monkeypatch.setattr(auto, "COLD_ROUNDS", 3)
    monkeypatch.setattr(auto, "THETA", 0.1)  # tiny models take no time that would tell stages from verifications
    learner, stages = fresh(name, taught.drafter.stage_len), set()
    for seed in (None, 0, None, 1):
        rounds = check_family(taught, Match, seed, gate=learner.gate(), max_stages=4)
        stages |= {r.stages for r in rounds}
    assert len(stages) > 1 and learner.rounds > 8


@pytest.mark.parametrize("reading", READINGS)
def test_every_reading_of_the_gap_gives_the_target_s_text(taught, reading):
    """Taught one reading, decoded in all: what stands in the gap moves acceptance alone."""
    model = taught.drafter.model
    if model.config.gap_rows is None:
        pytest.skip(f"{model.config.family} leaves no gap")
    config, model.config = model.config, replace(model.config, gap_rows=reading)
    try:
        check_family(taught, Match, None, gate=ALWAYS_OPEN, max_stages=4)
    finally:
        model.config = config


def test_the_taught_drafters_loop_and_are_refused_at_times(taught):
    """Without long accepted runs over several stages, and rejections, the tests above would prove little."""
    rounds = [r for seed in (None, 0, 1) for r in check_family(taught, Match, seed, gate=-2.0, max_stages=12)]
    assert max(r.accepted for r in rounds) > 2 * taught.drafter.stage_len
    assert len({r.stages for r in rounds}) > 1
    assert any(r.accepted < len(r.drafted) for r in rounds)


def test_auto_is_match_where_rows_are_drawn_apart_and_reject_elsewhere(taught):
    drawn, drafter = Sampling(temperature=1.0), taught.drafter
    rule = Match if drafter.family == "dflash" else Reject
    assert isinstance(judge_of(Settings(temperature=1.0, tree_budget=0), drawn, drafter), rule)
    if drafter.family in TREES:
        settings = Settings(temperature=1.0, tree_budget=8)
        assert isinstance(judge_of(settings, drawn, shaped(drafter, settings, taught.target)), Match)
    assert isinstance(judge_of(Settings(temperature=1.0), drawn), Match)  # plain decoding rejects nothing
    assert isinstance(judge_of(Settings(temperature=1.0, verify="reject"), drawn, drafter), Reject)
    assert isinstance(judge_of(Settings(temperature=1.0, verify="match"), drawn, drafter), Match)
    assert isinstance(judge_of(Settings(verify="reject"), GREEDY, drafter), Match)


# Rejection keeps the law, so it is held against the law

RUNS, FLAT, FLATTER = 400, 2.5, 7.0  # seeds; temperatures that leave four tokens a chance, also where logits are sharp


def misstating(propose: Callable[..., Proposal]) -> Callable[..., Proposal]:
    """Planted: says that its tokens were drawn from another law than they were, the likely ones the less likely."""

    def turned(*given: object) -> Proposal:
        found = propose(*given)
        assert found.probs is not None
        said = torch.where(found.probs > 0, found.probs**-2, 0.0)
        return found._replace(probs=said / said.sum(-1, keepdim=True))

    return turned


def text_counts(
    family: str, wrapped: Callable | None
) -> tuple[dict[tuple[int, ...], int], dict[tuple[int, ...], float]]:
    """(how often each text of three tokens came out, how often it should); gates and caps change with the seed."""
    kind, flat = OWNERS.get(family, "qwen3"), FLATTER if family == GEMMA_FAMILY else FLAT
    if kind not in (*KINDS, *WINDOW_KINDS, *CHAIN_KINDS):
        pytest.skip(f"{kind} needs a newer transformers")
    target = tiny_target(kind, vocab_size=4, num_layers=3)
    drafter = tiny_drafter(target, family=family, stage_len=1)
    if wrapped is not None:
        drafter.model.propose = wrapped(drafter.model.propose)
    counts = dict.fromkeys(itertools.product(range(4), repeat=3), 0)
    for seed in range(RUNS):
        gate, most = (NEVER_OPENS, -1.2, ALWAYS_OPEN)[seed % 3], (2, 3)[seed % 2]
        rules = {"loop_gate": gate, "max_stages": most, "temperature": flat, "verify": "reject", "tree_budget": 0}
        counts[tuple(dloop.generate(target, drafter, [1, 2], 3, seed=seed, **rules).tokens)] += 1
    logits = target.model(torch.tensor([[1, 2, *text] for text in counts])).logits
    laws = [law(rows[1:4], Sampling(temperature=flat)) for rows in logits]
    chances = [p.gather(1, torch.tensor(text)[:, None]).prod().item() for p, text in zip(laws, counts, strict=True)]
    return counts, {text: RUNS * chance for text, chance in zip(counts, chances, strict=True)}


def surplus(family: str, wrapped: Callable | None = None) -> float:
    """Chi-square over its critical value (p = 0.0002); cells of less than 5 expected texts are one."""
    counts, expected = text_counts(family, wrapped)
    rare = {text for text, count in expected.items() if count < 5}
    cells = [(counts[text], expected[text]) for text in expected if text not in rare]
    cells.append((sum(counts[text] for text in rare), sum(expected[text] for text in rare)))
    free = len(cells) - 1
    critical = free * (1 - 2 / (9 * free) + 3.54 * (2 / (9 * free)) ** 0.5) ** 3  # Wilson and Hilferty
    assert free > 8, "too few cells to tell"
    return sum((found - wanted) ** 2 / wanted for found, wanted in cells) / critical


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", FAMILIES)
def test_rejection_keeps_the_target_s_law_in_every_family(family):
    assert surplus(family) < 1


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_misstates_its_law_is_caught(family):
    assert surplus(family, misstating) > 1.5


# Scripted drafters on a table-driven target: every case is hit on purpose


@dataclass
class Watched:
    """A target that notes what it is asked to verify."""

    target: Target
    asked: list[Rows] = field(default_factory=list)

    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        return self.target.prefill(slot, tokens)

    def verify(self, rows: Rows) -> Seen:
        self.asked.append(rows)
        return self.target.verify(rows)

    def commit(self, slot: int, path: list[int]) -> None:
        self.target.commit(slot, path)


def first_occurrences(text: list[int]) -> list[int]:
    """Positions whose token does not occur earlier: a stop token can be placed exactly there."""
    return [index for index, token in enumerate(text) if token not in text[:index]]


def limits(max_new_tokens: int, max_stages: int = 12, stop: Sequence[int] = (), context: int = 10_000) -> Limits:
    return Limits(max_new_tokens=max_new_tokens, max_stages=max_stages, stop_ids=frozenset(stop), context=context)


def run(target: Target, script: Script | None, rules: Limits, *, judge=None, gate: float = ALWAYS_OPEN) -> Decoded:
    session = Session(target, None if script is None else ScriptedDrafter(K, script))
    judge = judge or Match(GREEDY)
    return gather([decode(session, 0, PROMPT, gate=FixedGate(gate), judge=judge, limits=rules)], session)[0]


def check_lossless(target: TableTarget, script: Script, rules: Limits, *, judge, gate: float) -> Decoded:
    """The check of this file, as a function, so that wrong parts can be shown to fail it."""
    sampling = judge.sampling
    alone = run(target, None, rules, judge=Match(sampling))
    found = run(target, script, rules, judge=judge, gate=gate)
    assert (found.tokens, found.finish) == (alone.tokens, alone.finish), "the text differs from plain decoding"
    return found


@pytest.fixture(scope="module")
def world() -> tuple[TableTarget, list[int]]:
    """A table-driven target whose greedy text after PROMPT has no repeated token, and that text."""
    for seed in itertools.count():
        target = TableTarget.random(vocab_size=509, seed=seed)
        text = run(target, None, limits(30)).tokens
        if len(set(text)) == len(text):
            return target, text
    raise AssertionError


def uneven(script: Script) -> Script:
    """The same drafts with scores on both sides of every gate."""

    def scored(before: list[int], index: int) -> Stage:
        score = (-0.1, -1.0, -0.4, -5.0)[(len(before) + index) % 4]
        return replace(script(before, index), score=score)

    return scored


@pytest.mark.parametrize("num_right", [0, 1, 2, 3, 4, 8, 99])
def test_drafts_right_up_to_any_token_give_the_same_text(world, num_right):
    target, text = world
    script = uneven(knowing(PROMPT + text, K, num_right))
    for gate, max_stages, length in itertools.product(GATES, MAX_STAGES, (1, 2, 7, 20)):
        found = check_lossless(target, script, limits(length, max_stages), judge=Match(GREEDY), gate=gate)
        assert found.tokens == text[:length]
        for r in found.rounds:
            assert r.accepted == min(num_right, len(r.drafted))
            assert len(r.drafted) == K * r.stages


@pytest.mark.parametrize("num_right", [0, 2, 99])
def test_a_stop_token_at_any_place_ends_the_text_there(world, num_right):
    """In a stage, at its end, as the bonus, as the very first token, in a part that is rejected."""
    target, text = world
    script = knowing(PROMPT + text, K, num_right)
    for index, max_stages in itertools.product(range(14), (1, 3)):
        rules = limits(20, max_stages, stop=[text[index]])
        found = check_lossless(target, script, rules, judge=Match(GREEDY), gate=ALWAYS_OPEN)
        assert (found.tokens, found.finish) == (text[: index + 1], "stop")
        assert len(found.rounds) == 0 if index == 0 else found.rounds[-1].finish == "stop"
        assert all(r.finish is None for r in found.rounds[:-1])


def test_accepted_is_never_cut_bonus_is_null_after_a_stop_and_emitted_is_cut(world):
    target, text = world
    script = knowing(PROMPT + text, K, num_right=5)  # a round: 2 stages, 5 accepted, one wrong, bonus text[6]
    for index in range(1, 7):
        last = run(target, script, limits(30, 2, stop=[text[index]])).rounds[-1]
        drafted = K if index <= K else 2 * K  # a stage that holds the stop token is the last
        assert last.accepted == min(5, drafted)
        assert last.emitted == text[1 : index + 1]
        assert last.bonus == (text[6] if index == 6 else None)
        assert last.stage_records[-1].reason == ("max_stages" if index == 6 else "stop_token")
    for length in range(2, 7):
        last = run(target, script, limits(length, 2)).rounds[-1]
        drafted = K if length - 1 <= K else 2 * K
        assert last.accepted == min(5, drafted)
        assert last.emitted == text[1:length]
        assert last.bonus == text[last.accepted + 1]
        assert last.finish == "length"


def test_a_stop_token_in_a_rejected_part_ends_nothing(world):
    target, text = world
    wrong = itertools.repeat(chain([text[15], 1, 2]))
    found = run(target, replay(wrong), limits(10, 3, stop=[text[15]]))
    assert (found.tokens, found.finish) == (text[:10], "length")
    assert {r.stage_records[-1].reason for r in found.rounds} == {"stop_token"}
    assert all(r.bonus is not None for r in found.rounds)


def test_always_right_and_always_open_gives_exactly_the_stages_allowed(world):
    """Unless the length needs fewer: a stage follows while drafted < max_new_tokens - tokens output so far."""
    target, text = world
    script = knowing(PROMPT + text, K, num_right=99)
    for max_stages, length in itertools.product((1, 2, 3, 4, 12), range(2, 26)):
        produced = 1
        for r in run(target, script, limits(length, max_stages)).rounds:
            needed = -(-(length - produced) // K)
            assert r.stages == min(max_stages, needed)
            assert r.accepted == len(r.drafted)
            assert r.stage_records[-1].reason == ("length" if needed <= max_stages else "max_stages")
            assert [record.reason for record in r.stage_records[:-1]] == ["open"] * (r.stages - 1)
            produced += len(r.emitted)
        assert produced == length


def test_the_gate_is_asked_after_each_stage_and_recorded(world):
    target, text = world
    scores = [-0.3, -0.6, -0.1, -2.0]
    stages = [chain([0, 1, 2], score) for score in scores]
    for gate, expected in ((NEVER_OPENS, 1), (-0.5, 2), (-0.6, 4), (-2.1, 5), (ALWAYS_OPEN, 5)):
        r = run(target, replay(itertools.cycle(stages)), limits(30, 5), gate=gate).rounds[0]
        assert r.stages == expected
        assert r.scores == [*scores, *scores][:expected]
        assert [record.gate for record in r.stage_records] == [gate] * expected
        assert r.stage_records[-1].reason == ("max_stages" if expected == 5 else "gate")


@pytest.mark.parametrize("beyond", range(1, 10))
def test_nothing_is_drafted_or_verified_beyond_the_context(world, beyond):
    target, text = world
    rules = limits(8, stop=(), context=len(PROMPT) + beyond)
    watched = Watched(target)
    rounds = run(watched, knowing(PROMPT + text, K, 99), rules).rounds
    assert [t for r in rounds for t in r.emitted] == text[1:8]
    for r in rounds:
        room = rules.context - 1 - r.context_len  # positions after the anchor
        assert r.stages <= max(0, room // K)
        if r.stages < room // K:
            assert r.stage_records[-1].reason == "length"
        if not r.stages:
            assert (r.drafted, r.scores, r.stage_records, r.accepted) == ([], [], [], 0)
    inside = [rows for rows in watched.asked if len(rows) > 1]
    assert all(max(rows.position) < rules.context for rows in inside)


def test_requests_of_all_live_sequences_travel_together(world):
    target, text = world
    watched = Watched(target)
    session = Session(watched, ScriptedDrafter(K, lambda before, index: chain([1, 2, 3])))
    lengths = [3, 8, 5]
    tasks = [
        decode(session, slot, PROMPT, gate=FixedGate(), judge=Match(GREEDY), limits=limits(length))
        for slot, length in enumerate(lengths)
    ]
    events = list(run_many(tasks, session))
    assert [len(set(rows.slot)) for rows in watched.asked] == [3, 3, 2, 2, 1, 1, 1]
    assert sorted(index for index, _ in events[:3]) == [0, 1, 2]
    for slot, length in enumerate(lengths):
        rounds = [event for index, event in events if index == slot and isinstance(event, Round)]
        assert [t for r in rounds for t in r.emitted] == text[1:length]


# Planted mistakes: the checks above must see them


@dataclass(frozen=True)
class Generous(Match):
    """Accepts one token more than the target agreed to."""

    def __call__(self, draft: Draft, logits: torch.Tensor) -> Verdict:
        verdict = super().__call__(draft, logits)
        node = len(verdict.path) + 1
        return Verdict(path=[*verdict.path, node], bonus=verdict.bonus) if node < len(draft.tokens) else verdict


@dataclass(frozen=True)
class Shifted(Match):
    """Reads the logits one row late."""

    def __call__(self, draft: Draft, logits: torch.Tensor) -> Verdict:
        return super().__call__(draft, logits.roll(-1, 0))


@dataclass(frozen=True)
class RowKeyed(Match):
    """Noise by row instead of by position: the text then depends on how it was drafted."""

    def __call__(self, draft: Draft, logits: torch.Tensor) -> Verdict:
        noise = gumbel(self.sampling.seed, torch.arange(len(logits)), logits.shape[-1])
        picks = (process(logits, self.sampling).double() + noise).argmax(-1)
        return follow(draft, picks.tolist())


class Leaky(TableTarget):
    """Keeps one rejected row."""

    def commit(self, slot: int, path: list[int]) -> None:
        after = path[-1] + 1
        super().commit(slot, [*path, after] if after < len(self.tails[slot]) else path)


@pytest.mark.parametrize("law", [GREEDY, Sampling(temperature=1.0, seed=5)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("judge", [Match, Generous, Shifted, RowKeyed])
def test_a_wrong_judge_is_caught(world, law, judge):
    if judge is RowKeyed and law.is_greedy:
        judge = Generous  # greedy has no noise
    target, _ = world
    rules = limits(20, 3)
    text = run(target, None, rules, judge=Match(law)).tokens
    script = knowing(PROMPT + text, K, num_right=4)

    def check() -> None:
        check_lossless(target, script, rules, judge=judge(law), gate=ALWAYS_OPEN)

    if judge is Match:
        check()
    else:
        with pytest.raises(AssertionError):
            check()


@pytest.mark.parametrize("judge", [Generous, Shifted, RowKeyed])
def test_a_wrong_judge_is_caught_in_every_family(taught, judge):
    with pytest.raises(AssertionError, match="differs from plain decoding"):
        for seed in (0, 1):
            check_family(taught, judge, seed, gate=ALWAYS_OPEN, max_stages=3)


class LeakyMemory(HFMemory):
    """Keeps one rejected row."""

    def commit(self, slot: int, path: list[int]) -> None:
        super().commit(slot, [*path, path[-1] + 1] if self.verified > path[-1] + 1 else path)

    def verify(self, rows: Rows) -> Seen:
        self.verified = len(rows)
        return super().verify(rows)


class LeakyWindows(LeakyMemory, Gemma4Memory):
    """The same of layers with a window."""


def test_a_memory_that_keeps_a_rejected_row_is_caught_in_every_family(taught, monkeypatch):
    if not taught.target.forks:
        pytest.skip("a recurrent target's memory is spoilt in its own tests")
    leaky = LeakyWindows if isinstance(taught.target, Gemma4Target) else LeakyMemory
    monkeypatch.setattr(type(taught.target), "open", lambda target, taps=(): leaky(target, taps))
    with pytest.raises(AssertionError):
        for seed in (0, 1):
            check_family(taught, Match, seed, gate=ALWAYS_OPEN, max_stages=3)


def test_a_target_that_keeps_a_rejected_row_is_caught(world):
    target, text = world
    script = knowing(PROMPT + text, K, num_right=4)
    with pytest.raises(AssertionError):
        check_lossless(Leaky(target.table), script, limits(20, 3), judge=Match(GREEDY), gate=ALWAYS_OPEN)
