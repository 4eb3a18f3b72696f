"""Speculative sampling keeps the target's law exactly: chi-square against the product of the target's probabilities."""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

import dloop
from dloop.batch import generate_many
from dloop.gate import FixedGate, Gate
from dloop.gates.costs import given_costs
from dloop.gates.learned import fresh
from dloop.gates.played import Priced
from dloop.judge import Match, Reject
from dloop.loop import Limits, Session, decode, run_one
from dloop.sampling import Draw, law
from dloop.settings import Settings
from dloop.testing import ScriptedDrafter, TableTarget, chain, good_drafter, tiny_target
from dloop.types import Draft, Features, First, Round, Sampling, Stage, StageRequest, Verdict

V, K, LENGTH = 4, 2, 3
PROMPT = [1, 2]
RUNS = 3000
CRITICAL = {63: 110.0}  # chi-square, p = 0.0002


@dataclass
class DrawingDrafter(ScriptedDrafter):
    """Draws each token from a table of its own, which is the target's with noise, and says from what law."""

    table: TableTarget | None = None
    spoil: float = 1.0  # what is said about the law is this power of the truth

    def _stage(self, request: StageRequest) -> Stage:
        assert self.table is not None
        tail = self.tails[request.slot] if request.index else [request.anchor]
        text = self.texts[request.slot] + tail
        logits, tokens, drawn, draw = [], [], [], Draw(request.sampling, len(text))
        for row in range(self.stage_len):
            logits.append(self.table.logits(text + tokens))
            drawn.append(draw(logits[-1], row))
            tokens.append(int(drawn[-1].token))
        rows = torch.stack(logits)
        score = rows.log_softmax(-1).max(-1).values.sum().item()
        self.tails[request.slot] = tail + tokens
        probs = None if request.sampling is None else torch.stack([row.probs for row in drawn])
        said = None if probs is None else probs**self.spoil
        return replace(chain(tokens, score), probs=None if said is None else said / said.sum(-1, keepdim=True))


class AcceptsByP(Reject):
    """Planted: accepts with probability p instead of p / q."""

    def __call__(self, draft: Draft, logits: torch.Tensor) -> Verdict:
        return super().__call__(replace(draft, probs=[torch.ones_like(q) for q in draft.probs]), logits)


class ForgetsTheResidual(Reject):
    """Planted: after a rejection it draws from p, not from what p has beyond q."""

    def __call__(self, draft: Draft, logits: torch.Tensor) -> Verdict:
        verdict = super().__call__(draft, logits)
        node = verdict.path[-1] if verdict.path else 0
        return replace(verdict, bonus=Match(self.sampling).choose(logits[node][None], [draft.positions[node] + 1])[0])


@dataclass
class Capricious:
    """The worst of gates: it goes by the value of what was drawn."""

    threshold: float | None = None

    def opens(self, draft: Draft) -> bool:
        return draft.tokens[1] % 2 == 0

    def observe(self, round: Round) -> None:
        """It learns nothing."""


class Trims(Reject):
    """Planted: the same look at what was drawn, to take the draft back."""

    def __call__(self, draft: Draft, logits: torch.Tensor) -> Verdict:
        if draft.tokens[1] % 2 == 0:
            draft, logits = Draft.rooted(draft.tokens[0], draft.positions[0]), logits[:1]
        return super().__call__(draft, logits)


@dataclass
class Counted:
    """A gate, and how many stages its rounds have."""

    gate: Gate
    stages: Counter[int]
    threshold: float | None = None

    def opens(self, draft: Draft) -> bool:
        return self.gate.opens(draft)

    def observe(self, round: Round) -> None:
        self.stages[round.stages] += 1
        self.gate.observe(round)


def learning() -> Callable[[], Gate]:
    """Gates of one learner; seconds are by costs under which it opens at times."""
    learner, costs = fresh("auto", 1), given_costs((0.3, 0.1), (3.0, 0.02), 99)
    return lambda: Priced(learner.gate(), costs, 1)


def statistic(
    judge: type[Reject], gate: float | Callable[[], Gate], sampling: Sampling, spoil: float = 1.0, k: int = K
) -> float:
    """Chi-square of the first three tokens over all runs, cells of less than 5 expected runs pooled."""
    target = TableTarget.random(V, seed=3, scale=1.0)
    noisy = TableTarget(target.table + torch.randn(target.table.shape, generator=torch.Generator().manual_seed(1)))
    counts = dict.fromkeys(itertools.product(range(V), repeat=LENGTH), 0)
    limits = Limits(max_new_tokens=LENGTH, max_stages=3, context=1000)
    for seed in range(RUNS):
        session = Session(target, DrawingDrafter(stage_len=k, script=lambda *_: chain([]), table=noisy, spoil=spoil))
        rule = judge(replace(sampling, seed=seed))
        asked = gate() if callable(gate) else FixedGate(gate)
        task = decode(session, 0, PROMPT, gate=asked, judge=rule, limits=limits)
        tokens = [t for e in run_one(task, session) for t in ([e.token] if isinstance(e, First) else e.emitted)]
        counts[tuple(tokens)] += 1
    found, expected = [], []
    for text in counts:
        chance = 1.0
        for i, token in enumerate(text):
            chance *= law(target.logits([*PROMPT, *text[:i]])[None], sampling)[0, token].item()
        found.append(counts[text])
        expected.append(RUNS * chance)
    assert all(e > 0 or f == 0 for f, e in zip(found, expected, strict=True)), "a forbidden token was drawn"
    small = [i for i, e in enumerate(expected) if e < 5]
    cells = [(f, e) for f, e in zip(found, expected, strict=True) if e >= 5]
    cells.append((sum(found[i] for i in small), sum(expected[i] for i in small)))
    return sum((f - e) ** 2 / e for f, e in cells if e > 0)


SAMPLINGS = [Sampling(temperature=1.0), Sampling(temperature=0.7, top_k=3, top_p=0.9)]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("gate", "k"), [(1.0, K), (-1.0, 1), (float("-inf"), 1)], ids=["host", "gated", "always"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["plain", "processed"])
def test_the_text_follows_the_target_s_law(gate, k, sampling):
    """Stages of one token leave room for a second one in texts of three."""
    assert statistic(Reject, gate, sampling, k=k) < CRITICAL[63]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("gate", [learning(), Capricious], ids=["auto", "capricious"])
def test_gates_may_look_at_everything_that_is_verified(gate):
    stages = Counter[int]()

    def counted() -> Gate:
        return Counted(gate(), stages)

    assert statistic(Reject, counted, SAMPLINGS[0], k=1) < CRITICAL[63]
    assert min(stages[1], stages[2]) > 500


@pytest.mark.usefixtures("unchecked")
def test_a_draft_taken_back_for_what_was_drawn_is_caught():
    assert statistic(Trims, 1.0, SAMPLINGS[0]) > 1.5 * CRITICAL[63]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("judge", [AcceptsByP, ForgetsTheResidual])
def test_a_wrong_rule_is_caught(judge):
    assert statistic(judge, float("-inf"), SAMPLINGS[0]) > 1.5 * CRITICAL[63]


@pytest.mark.usefixtures("unchecked")
def test_a_drafter_that_misstates_its_law_is_caught():
    assert statistic(Reject, 1.0, SAMPLINGS[0], spoil=0.2) > 1.5 * CRITICAL[63]


def one_token_draft(q: torch.Tensor, token: int, position: int = 7) -> Draft:
    return Draft.rooted(0, position).graft(replace(chain([token]), probs=q[None]))


@pytest.mark.usefixtures("unchecked")
def test_acceptance_is_the_overlap_of_the_two_laws():
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(5))
    p, q = law(2 * logits, Sampling(temperature=1.0))
    accepted = 0
    for seed in range(4000):
        sampling = Sampling(temperature=1.0, seed=seed)
        token = int(Draw(sampling, 8)(2 * logits[1], 0).token)
        accepted += len(Reject(sampling)(one_token_draft(q, token), 2 * logits[:1].expand(2, -1)).path)
    assert accepted / 4000 == pytest.approx(torch.minimum(p, q).sum().item(), abs=0.02)


def test_a_token_the_target_forbids_is_never_accepted_and_equal_laws_always_accept():
    sampling = Sampling(temperature=1.0, top_k=1, seed=4)
    logits = torch.tensor([[5.0, 1.0, 0.0], [0.0, 1.0, 5.0]])
    q = torch.tensor([0.0, 1.0, 0.0])
    verdict = Reject(sampling)(one_token_draft(q, 1), logits)
    assert verdict.path == [] and verdict.bonus == 0
    sampling = Sampling(temperature=1.0, seed=4)
    same = law(logits[:1], sampling)[0]
    assert all(Reject(replace(sampling, seed=s))(one_token_draft(same, 0), logits).path == [1] for s in range(50))


def test_drafts_without_their_law_and_trees_are_refused():
    rule = Reject(Sampling(temperature=1.0))
    with pytest.raises(ValueError, match="law"):
        rule(Draft.rooted(0, 3).graft(chain([1])), torch.zeros(2, 4))
    tree = Stage(tokens=[1, 2], parents=[-1, -1], logp=[0.0, 0.0], spine=[0], score=0.0, probs=torch.full((2, 4), 0.25))
    with pytest.raises(ValueError, match="chain"):
        rule(Draft.rooted(0, 3).graft(tree), torch.zeros(3, 4))


def test_a_seed_repeats_the_run_and_rejection_is_the_default_with_a_temperature(monkeypatch):
    judged: list[list[torch.Tensor]] = []
    judge = Reject.__call__
    monkeypatch.setattr(
        Reject, "__call__", lambda self, draft, logits: judged.append(draft.probs) or judge(self, draft, logits)
    )
    target = tiny_target("llama", seed=2)
    drafter = good_drafter(target, [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9]])
    settings = {"max_new_tokens": 24, "loop_gate": -2.0, "temperature": 1.0, "top_k": 20}
    first = dloop.generate(target, drafter, [5, 6, 7], seed=11, **settings)
    again = dloop.generate(target, drafter, [5, 6, 7], seed=11, verify="reject", **settings)
    other = dloop.generate(target, drafter, [5, 6, 7], seed=12, **settings)
    assert first.tokens == again.tokens != other.tokens
    drawn = [probs for stages in judged for probs in stages]
    assert drawn and all(probs.dtype == torch.float32 for probs in drawn)
    dloop.generate(target, drafter, [5, 6, 7], 8, temperature=1.0, verify="match")
    assert len(judged) == sum(len(out.rounds) for out in (first, again, other))


def test_finished_rounds_keep_no_law():
    """A law has a value for each token of the vocabulary: thousands of rounds would fill a GPU."""
    target = tiny_target("llama", seed=2)
    drafter = good_drafter(target, [[5, 6, 7, 8, 9, 5, 6, 7, 8, 9]])
    settings = Settings(max_new_tokens=16, loop_gate=-2.0, temperature=1.0, seed=3)
    out = dloop.generate(target, drafter, [5, 6, 7], 16, loop_gate=-2.0, temperature=1.0, seed=3)
    many = [done.rounds for done in generate_many(target, drafter, [[5, 6, 7]], settings)]
    for rounds in (out.rounds, *many):
        assert len(rounds) > 1 and all(r.draft.drafted and r.draft.probs == [] for r in rounds)


def test_scores_stay_untempered_top_one():
    """The gate reads the drafter's certainty, not the drawn token's: the same at any temperature for one anchor."""
    target = tiny_target("qwen3", seed=6)
    drafter = good_drafter(target, [[5, 6, 7, 8]])
    features = target.features(torch.tensor([[5, 6, 7]]), drafter.taps)
    stages = []
    for sampling in (None, Sampling(temperature=5.0, seed=1)):
        memory = drafter.open()
        memory.extend(0, 0, [5, 6, 7], Features(taps=features.taps[0], last=features.last[0]))
        stages += memory.draft([StageRequest(slot=0, anchor=8, index=0, sampling=sampling)])
    assert stages[0].probs is None and stages[1].probs is not None
    assert stages[0].logp[0] >= stages[1].logp[0]
