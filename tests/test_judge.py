"""Acceptance: the longest branch of the draft that the target's own choices follow, and the token after it."""

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dloop.judge import Match, follow
from dloop.sampling import Sampling, gumbel, process
from dloop.testing import chain
from dloop.types import Draft, Stage, Verdict

V = 5


@st.composite
def drafts(draw) -> Draft:
    """Chains and trees of up to 12 nodes over five tokens; siblings differ, as in every tree that is drafted."""
    count = draw(st.integers(0, 12))
    is_chain = draw(st.booleans())
    parents: list[int] = []
    tokens: list[int] = []
    for node in range(count):
        parent = node - 1 if is_chain else draw(st.integers(-1, node - 1))
        free = sorted(set(range(V)) - {tokens[i] for i in range(node) if parents[i] == parent})
        if free:
            parents.append(parent)
            tokens.append(draw(st.sampled_from(free)))
        else:
            break
    root = Draft.rooted(draw(st.integers(0, V - 1)), draw(st.integers(0, 50)))
    if not tokens:
        return root
    return root.graft(Stage(tokens=tokens, parents=parents, logp=[0.0] * len(tokens), spine=[0], score=0.0))


def follow_twin(draft: Draft, picks: list[int]) -> Verdict:
    """All branches from the anchor, the longest that agrees with the picks token for token."""
    best: list[int] = []
    for node in range(1, len(draft.tokens)):
        path = [node]
        while draft.parents[path[0]] != 0:
            path.insert(0, draft.parents[path[0]])
        agrees = all(draft.tokens[child] == picks[parent] for parent, child in zip([0, *path], path, strict=False))
        if agrees and len(path) > len(best):
            best = path
    return Verdict(path=best, bonus=picks[best[-1] if best else 0])


def accepts_siblings(draft: Draft, picks: list[int]) -> Verdict:
    """Planted: compares each node with the pick after the node before it, as if every draft were a chain."""
    path: list[int] = []
    for node in range(1, len(draft.tokens)):
        if draft.tokens[node] != picks[node - 1]:
            break
        path.append(node)
    return Verdict(path=path, bonus=picks[len(path)])


def stops_early(draft: Draft, picks: list[int]) -> Verdict:
    """Planted: never accepts the last node."""
    verdict = follow(draft, picks)
    whole = verdict.path and verdict.path[-1] == len(draft.tokens) - 1
    path = verdict.path[:-1] if whole else verdict.path
    return Verdict(path=path, bonus=picks[path[-1] if path else 0])


def bonus_from_the_anchor(draft: Draft, picks: list[int]) -> Verdict:
    """Planted: the bonus is read at the wrong row."""
    return replace(follow(draft, picks), bonus=picks[0])


def picks_for(draft: Draft, seed: int) -> list[int]:
    """Choices that often agree with the draft."""
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(V, (len(draft.tokens),), generator=generator).tolist()
    for node, parent in enumerate(draft.parents):
        if parent >= 0 and torch.rand((), generator=generator) < 0.6:
            picks[parent] = draft.tokens[node]
    return picks


@given(draft=drafts(), seed=st.integers(0, 10_000))
def test_follow_takes_the_longest_agreeing_branch(draft, seed):
    picks = picks_for(draft, seed)
    assert follow(draft, picks) == follow_twin(draft, picks)


@pytest.mark.parametrize("planted", [accepts_siblings, stops_early, bonus_from_the_anchor])
def test_a_wrong_follow_is_caught(planted):
    @given(draft=drafts(), seed=st.integers(0, 10_000))
    def check(draft, seed):
        picks = picks_for(draft, seed)
        assert planted(draft, picks) == follow_twin(draft, picks)

    with pytest.raises(AssertionError):
        check()


@given(draft=drafts(), seed=st.integers(0, 10_000))
def test_every_emitted_token_is_the_target_s_choice(draft, seed):
    picks = picks_for(draft, seed)
    verdict = follow(draft, picks)
    tokens = [*(draft.tokens[node] for node in verdict.path), verdict.bonus]
    assert tokens == [picks[node] for node in [0, *verdict.path]]


def test_picks_and_draft_must_agree_in_length():
    draft = Draft.rooted(3, 10).graft(chain([1, 2]))
    for picks in ([1, 2], [1, 2, 3, 4]):
        with pytest.raises(ValueError, match=f"{len(picks)} picks for a draft of 3 nodes"):
            follow(draft, picks)


LAW = Sampling(temperature=0.8, top_p=0.9, seed=11)


def random_case(seed: int) -> tuple[Draft, torch.Tensor]:
    branches = Stage(tokens=[1, 2, 3, 4], parents=[-1, -1, 1, 2], logp=[0.0] * 4, spine=[1, 2, 3], score=0.0)
    draft = Draft.rooted(0, 20 + seed).graft(branches)
    return draft, 2 * torch.randn(5, V, generator=torch.Generator().manual_seed(seed))


def test_greedy_picks_are_argmaxes():
    for seed in range(30):
        draft, logits = random_case(seed)
        assert Match(Sampling())(draft, logits) == follow_twin(draft, logits.argmax(-1).tolist())


def picks_twin(draft: Draft, logits: torch.Tensor, law: Sampling) -> list[int]:
    """Row by row: the token after a node at position p is drawn with the noise of position p + 1."""
    picks: list[int] = []
    for row, position in zip(logits, draft.positions, strict=True):
        noise = gumbel(law.seed, torch.tensor([position + 1]), V)[0]
        picks.append(int((process(row[None], law)[0].double() + noise).argmax()))
    return picks


@dataclass(frozen=True)
class KeyedByTheParent(Match):
    """Planted: the noise of the node's own position."""

    def __call__(self, draft: Draft, logits: torch.Tensor) -> Verdict:
        return follow(draft, self.choose(logits, draft.positions))


def agrees(judge: Match) -> bool:
    cases = [random_case(seed) for seed in range(30)]
    return all(judge(draft, logits) == follow_twin(draft, picks_twin(draft, logits, LAW)) for draft, logits in cases)


def test_sampled_picks_are_keyed_by_the_position_of_the_token_they_give():
    assert agrees(Match(LAW))
    assert not agrees(KeyedByTheParent(LAW))
    assert not agrees(Match(replace(LAW, seed=12)))


def test_a_choice_does_not_depend_on_the_rows_beside_it():
    judge = Match(LAW)
    logits = torch.randn(6, V, generator=torch.Generator().manual_seed(3))
    positions = [4, 9, 4, 5, 100, 9]
    together = judge.choose(logits, positions)
    assert together == [judge.choose(logits[i : i + 1], [p])[0] for i, p in enumerate(positions)]
    assert judge.choose(logits.flip(0), positions[::-1]) == together[::-1]


def test_the_first_token_uses_the_same_rule_as_all_others():
    """Prefill gives the token at position len(prompt): the one a verification of the row before it would give."""
    for seed in range(20):
        draft, logits = random_case(seed)
        for judge in (Match(LAW), Match(Sampling())):
            assert (
                judge.first(logits[0], draft.positions[0] + 1) == judge.choose(logits[:1], [draft.positions[0] + 1])[0]
            )
            alone = Draft.rooted(0, draft.positions[0])
            assert judge(alone, logits[:1]) == Verdict(path=[], bonus=judge.first(logits[0], draft.positions[0] + 1))
