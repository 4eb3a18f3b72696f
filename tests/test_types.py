"""What flows through the loop: drafts grow by grafting, rows are packed, rounds count what they say."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from dloop.loop import Limits
from dloop.testing import chain
from dloop.types import Draft, Features, Round, Rows, Seen, Stage, StageRecord, VerifyRequest


@st.composite
def stages(draw) -> Stage:
    """A random tree whose spine is one of its branches."""
    count = draw(st.integers(1, 6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(count)]
    spine = [draw(st.integers(0, count - 1))]
    while parents[spine[0]] >= 0:
        spine.insert(0, parents[spine[0]])
    tokens = draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    logp = [-float(token) for token in tokens]
    return Stage(tokens=tokens, parents=parents, logp=logp, spine=spine, score=-float(sum(spine)))


def grafted(anchor: int, position: int, parts: list[Stage]) -> Draft:
    draft = Draft.rooted(anchor, position)
    for stage in parts:
        draft = draft.graft(stage)
    return draft


def text_at(draft: Draft, node: int) -> list[int]:
    """Tokens from the anchor to this node."""
    return [*(text_at(draft, draft.parents[node]) if draft.parents[node] >= 0 else []), draft.tokens[node]]


@given(parts=st.lists(stages(), max_size=4), position=st.integers(0, 50))
def test_grafting_hangs_each_stage_below_the_tip(parts, position):
    draft = grafted(7, position, parts)
    spine = [7] + [stage.tokens[node] for stage in parts for node in stage.spine]
    assert text_at(draft, draft.tip) == spine
    assert draft.depth == len(spine) - 1
    assert draft.drafted == [token for stage in parts for token in stage.tokens]
    assert draft.logp == [0.0] + [value for stage in parts for value in stage.logp]
    assert draft.scores == [stage.score for stage in parts]
    assert draft.num_stages == len(parts)
    assert draft.stops == [1 + sum(len(stage.tokens) for stage in parts[: i + 1]) for i in range(len(parts))]
    for node, parent in enumerate(draft.parents):
        assert parent < node
        assert draft.positions[node] == position + len(text_at(draft, node)) - 1
    before = [7]
    start = 1
    for stage in parts:  # each node stands after the spines of all earlier stages and its own branch
        for node in range(len(stage.tokens)):
            branch = [node]
            while stage.parents[branch[0]] >= 0:
                branch.insert(0, stage.parents[branch[0]])
            assert text_at(draft, start + node) == before + [stage.tokens[other] for other in branch]
        before = before + [stage.tokens[node] for node in stage.spine]
        start += len(stage.tokens)


@given(parts=st.lists(stages(), max_size=3))
def test_a_chain_is_a_draft_without_branches(parts):
    draft = grafted(7, 0, parts)
    assert draft.is_chain == (draft.positions == list(range(len(draft.tokens))))
    assert grafted(7, 0, [chain([1, 2]), chain([3])]).is_chain


def test_grafting_leaves_the_earlier_draft_alone():
    before = Draft.rooted(7, 3).graft(chain([1, 2]))
    copies = (list(before.tokens), list(before.parents), list(before.positions), list(before.stops))
    before.graft(chain([3]))
    assert copies == (before.tokens, before.parents, before.positions, before.stops)


def test_the_laws_of_sampled_stages_are_kept_in_order():
    first, second = torch.rand(2, 5), torch.rand(1, 5)
    sampled = [
        Stage(tokens=[1, 2], parents=[-1, 0], logp=[0.0, 0.0], spine=[0, 1], score=0.0, probs=first),
        Stage(tokens=[3], parents=[-1], logp=[0.0], spine=[0], score=0.0, probs=second),
    ]
    assert grafted(7, 0, sampled).probs == [first, second]
    assert grafted(7, 0, [chain([1])]).probs == []


@given(drafts=st.lists(st.tuples(st.lists(stages(), max_size=3), st.integers(0, 50)), min_size=1, max_size=4))
def test_packed_rows_keep_every_draft_apart(drafts):
    made = [grafted(i, position, parts) for i, (parts, position) in enumerate(drafts)]
    slots = [10 - i for i in range(len(made))]
    rows = Rows.pack([VerifyRequest(slot=slot, draft=draft) for slot, draft in zip(slots, made, strict=True)])
    start = 0
    for slot, draft in zip(slots, made, strict=True):
        stop = start + len(draft.tokens)
        assert rows.token[start:stop] == draft.tokens
        assert rows.position[start:stop] == draft.positions
        assert rows.slot[start:stop] == [slot] * len(draft.tokens)
        assert [p if p < 0 else p - start for p in rows.parent[start:stop]] == draft.parents
        start = stop
    assert len(rows) == start
    assert len(Rows.pack([])) == 0


def test_features_and_answers_are_cut_row_by_row():
    features = Features(taps=torch.arange(12.0).view(4, 3), last=torch.arange(8.0).view(4, 2))
    picked = features.select([0, 3])
    assert picked.taps.tolist() == [[0, 1, 2], [9, 10, 11]] and picked.last.tolist() == [[0, 1], [6, 7]]
    first = features.select([0, 1])  # what a chain keeps is not copied
    assert first.taps.tolist() == [[0, 1, 2], [3, 4, 5]] and first.taps.data_ptr() == features.taps.data_ptr()
    seen = Seen(logits=torch.eye(4), features=features).between(1, 3)
    assert seen.logits.tolist() == torch.eye(4)[1:3].tolist()
    assert seen.features.taps.tolist() == [[3, 4, 5], [6, 7, 8]]


def test_a_round_counts_what_it_says():
    draft = grafted(9, 20, [chain([1, 2, 3], -0.5), chain([4, 5, 6], -2.0)])
    ends = [
        StageRecord(start=1, stop=4, score=-0.5, gate=-1.0, reason="open"),
        StageRecord(start=4, stop=7, score=-2.0, gate=-1.0, reason="gate"),
    ]
    for accepted, full in ((0, 0), (2, 0), (3, 1), (5, 1), (6, 2)):
        r = Round(
            context_len=20,
            draft=draft,
            stage_records=ends,
            path=list(range(1, 1 + accepted)),
            bonus=0,
            emitted=[],
            draft_s=0.0,
            verify_s=0.0,
            finish=None,
        )
        assert (r.anchor, r.stages, r.accepted, r.full_stages) == (9, 2, accepted, full)
        assert r.drafted == [1, 2, 3, 4, 5, 6] and r.scores == [-0.5, -2.0]


# Limits


@given(
    tokens=st.lists(st.integers(0, 5), min_size=1, max_size=8),
    stop=st.sets(st.integers(0, 5), max_size=2),
    produced=st.integers(0, 9),
)
def test_cutting_equals_emitting_token_by_token(tokens, stop, produced):
    limits = Limits(max_new_tokens=10, stop_ids=frozenset(stop), context=99)
    kept, finish = [], None
    for token in tokens:
        kept.append(token)
        if token in stop:
            finish = "stop"
        elif produced + len(kept) == 10:
            finish = "length"
        if finish:
            break
    assert limits.cut(tokens, produced) == (kept, finish)


def test_why_no_further_stage_may_follow():
    limits = Limits(max_new_tokens=10, stop_ids=frozenset({5}), max_stages=2, context=30)
    one, two = (
        Draft.rooted(9, 10).graft(chain([1, 2, 3])),
        Draft.rooted(9, 10).graft(chain([1, 2])).graft(chain([3, 4])),
    )
    assert limits.end(one, 1, 3) is None
    assert limits.end(two, 1, 2) == "max_stages"
    assert limits.end(Draft.rooted(9, 10).graft(chain([1, 5, 3])), 1, 3) == "stop_token"
    assert limits.end(Draft.rooted(5, 10).graft(chain([1, 2, 3])), 1, 3) is None  # the anchor is no drafted token
    assert limits.end(one, 7, 3) == "length"  # drafted 3 >= 10 - 7
    assert limits.end(one, 6, 3) is None
    assert limits.end(Draft.rooted(9, 25).graft(chain([1, 2])), 1, 2) is None  # 27 + 2 = 29, the last position
    assert limits.end(Draft.rooted(9, 26).graft(chain([1, 2])), 1, 2) == "context"
    assert limits.fits(Draft.rooted(9, 27), 2) and not limits.fits(Draft.rooted(9, 28), 2)


# The checks that the suite runs under


def test_shapes_are_checked_while_testing():
    with pytest.raises(TypeCheckError):
        Features(taps=torch.zeros(2, 3), last=torch.zeros(3, 2))  # two fields disagree about n
    with pytest.raises(TypeCheckError):
        Features(taps=torch.zeros(2, 3, dtype=torch.long), last=torch.zeros(2, 2))
    with pytest.raises(TypeCheckError):
        Draft.rooted("1", 3)
