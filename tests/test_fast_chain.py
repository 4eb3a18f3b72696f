"""EAGLE-3 on the fast path is its slow twin: same proposals, same texts; alone, packed, grown, reused and drawn."""

import itertools
import logging

import pytest
import torch

import dloop
from dloop.api import generate
from dloop.batch import generate_many
from dloop.drafters.chain import ChainMemory
from dloop.fast import chain as fast_chain
from dloop.fast.beams import Beams, to_tree
from dloop.fast.chain import ChainSession, FastChainDrafter
from dloop.fast.chain_memory import FastChainMemory
from dloop.fast.target import FastTarget
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS
from dloop.load import drafter_like
from dloop.sampling import sample_seed
from dloop.settings import Settings
from dloop.testing import taught_drafter, tiny_drafter, tiny_target
from dloop.trees.beam import beam, best_children, packed
from dloop.trees.dynamic import candidates, deepest_path, frontier_places, rerank
from dloop.trees.shape import TreeShape
from dloop.trees.tree import with_spine
from dloop.types import Features, Sampling, StageRequest

K = 4
LAWS = (
    None,
    Sampling(temperature=0.8, seed=3),
    Sampling(temperature=1.1, top_k=9, seed=4),
    Sampling(temperature=0.7, top_p=0.8, seed=5),
)


def both(trees: TreeShape | None = None, vocab_size: int = 97, stage_len: int = K) -> tuple:
    """The twin's memory and the fast one, of one drafter."""
    twin = tiny_drafter(tiny_target(vocab_size=vocab_size), family="eagle3", stage_len=stage_len)
    return twin.with_trees(trees).open(), FastChainDrafter.of(twin).with_trees(trees).open(slots=1, context=16)


def extend(sessions, slot: int, position: int, tokens: list[int], seed: int = 0) -> None:
    """Bring the same verified positions, with features of their own, to all sessions."""
    generator = torch.Generator().manual_seed(1000 * slot + position + seed)
    taps = torch.randn(len(tokens), 96, generator=generator)
    for session in sessions:
        session.extend(slot, position, tokens, Features(taps=taps, last=taps[:, :32]))


def assert_alike(stage, expected) -> None:
    assert (stage.tokens, stage.parents) == (expected.tokens, expected.parents)
    assert (stage.spine, stage.reserve) == (expected.spine, expected.reserve)
    assert stage.logp == pytest.approx(expected.logp, abs=1e-5)
    assert stage.score == pytest.approx(expected.score, abs=1e-5)
    if expected.probs is None:
        assert stage.probs is None
    else:
        torch.testing.assert_close(stage.probs, expected.probs, atol=1e-6, rtol=1e-5)


def compare(slow, fast, requests: list[StageRequest]) -> list:
    """The fast stages, held against the twin's."""
    expected, found = slow.draft(requests), fast.draft(requests)
    for stage, other in zip(found, expected, strict=True):
        assert_alike(stage, other)
    return found


WAYS = dict(zip(("greedy", "drawn", "top-k", "top-p"), ((law, None) for law in LAWS), strict=True)) | {
    "trees": (None, TreeShape(budget=9, stage_budget=7, topk=3)),
    "chains below trees": (None, TreeShape(budget=12, topk=4)),
    "no branches": (None, TreeShape(budget=2, stage_budget=30, topk=1)),
    "more than the pool": (None, TreeShape(budget=300, stage_budget=300, topk=5)),
}


@pytest.mark.parametrize("way", WAYS)
def test_stages_are_the_twin_s_over_rounds_of_every_acceptance(way):
    """Two slots packed, ragged stages, 0..3K tokens accepted, a store and slots that grow on the way."""
    law, trees = WAYS[way]
    slow, fast = both(trees=trees)
    position = {0: 0, 1: 0}
    for lengths in ((7, 3), *zip(range(1, 3 * K + 2), range(3 * K + 1, 0, -1), strict=True)):
        for slot, count in enumerate(lengths):
            extend((slow, fast), slot, position[slot], [(7 * slot + position[slot] + i) % 97 for i in range(count)])
            position[slot] += count
        anchors = [5 + lengths[0], 9]
        for index in range(3):
            slots = (1, 0) if index < 2 else (1,)  # ragged, and in another order
            requests = [StageRequest(slot=slot, anchor=anchors[slot], index=index, sampling=law) for slot in slots]
            for slot, stage in zip(slots, compare(slow, fast, requests), strict=True):
                anchors[slot] = stage.tokens[stage.spine[-1]]
    assert fast.memory.store.capacity > 16 and fast.memory.store.slots == 2


@pytest.mark.parametrize("trees", [None, TreeShape(budget=9, stage_budget=7, topk=3)], ids=["chains", "trees"])
def test_the_comparison_sees_a_state_of_another_slot(trees):
    slow, fast = both(trees)
    for slot in (0, 1):
        extend((slow, fast), slot, 0, [1, 2, 3])
    requests = [StageRequest(slot=slot, anchor=5, index=0) for slot in (0, 1)]
    compare(slow, fast, requests)
    fast.memory.states[[0, 1]] = fast.memory.states[[1, 0]]
    assert fast.memory.store.keys[:, 0, :, :6].abs().sum(dim=(0, 1, 3)).all(), "prompt and path lie together"
    with pytest.raises(AssertionError):
        compare(slow, fast, [StageRequest(slot=0, anchor=5, index=1)])


def test_first_and_further_stages_and_several_laws_travel_together():
    slow, fast = both()
    for slot in range(4):
        extend((slow, fast), slot, 0, [1 + slot, 2, 3 + slot])
    compare(slow, fast, [StageRequest(slot=slot, anchor=5, index=0, sampling=LAWS[slot]) for slot in (0, 1)])
    mixed = [StageRequest(slot=slot, anchor=6, index=int(slot < 2), sampling=LAWS[slot]) for slot in (3, 0, 2, 1)]
    compare(slow, fast, mixed)
    seeds = [Sampling(temperature=1.0, seed=slot) for slot in range(4)]
    compare(slow, fast, [StageRequest(slot=s, anchor=6, index=0, sampling=law) for s, law in enumerate(seeds)])
    slow, fast = both(TreeShape(budget=5, topk=2))
    for slot in range(3):
        extend((slow, fast), slot, 0, [1 + slot, 2, 3 + slot])
    compare(slow, fast, [StageRequest(slot=2, anchor=5, index=0)])
    compare(slow, fast, [StageRequest(slot=slot, anchor=6, index=int(slot == 2)) for slot in (1, 2, 0)])


@pytest.mark.parametrize("law", LAWS)
def test_an_anchor_that_is_read_ahead_is_the_anchor(law, monkeypatch):
    """Whether the further stage comes or not, with the token that was drafted or another, and where the store grows."""
    monkeypatch.setattr(FastChainMemory, "overlaps", True)
    calls = {name: [] for name in ("go_on", "go_ahead", "go_back")}
    for name, list_of in calls.items():
        real = getattr(FastChainMemory, name)
        monkeypatch.setattr(FastChainMemory, name, lambda *given, r=real, seen=list_of: seen.append(0) or r(*given))
    slow, fast = both()
    position = 0
    for count, most, own in ((7, 3, 9), (2, 1, 9), (4, 4, 1), (220, 2, 9), (300, 4, 2), (5, 3, 9)):
        extend((slow, fast), 0, position, [(position + i) % 97 for i in range(count)])
        position, anchor = position + count, 5
        for index in range(most):
            request = StageRequest(slot=0, anchor=11 if index == own else anchor, index=index, sampling=law)
            anchor = compare(slow, fast, [request])[0].tokens[-1]
    assert {name: len(seen) for name, seen in calls.items()} == {"go_on": 2, "go_ahead": 17, "go_back": 2}
    extend((slow, fast), 1, 0, [1, 2])
    for index in range(2):  # not alone any more
        requests = [StageRequest(slot=slot, anchor=anchor + slot, index=index, sampling=law) for slot in (0, 1)]
        compare(slow, fast, requests)
    assert len(calls["go_ahead"]) == 17


def test_a_round_that_is_drafted_again_and_a_slot_that_is_used_again():
    slow, fast = both()
    extend((slow, fast), 0, 0, [1, 2, 3])
    (first,) = compare(slow, fast, [StageRequest(slot=0, anchor=1, index=0)])
    compare(slow, fast, [StageRequest(slot=0, anchor=8, index=1)])
    (other,) = compare(slow, fast, [StageRequest(slot=0, anchor=7, index=0)])
    assert other.tokens != first.tokens
    (again,) = compare(slow, fast, [StageRequest(slot=0, anchor=1, index=0)])
    assert_alike(again, first)
    extend((slow, fast), 0, 0, [9, 9], seed=1)  # another text in the same slot
    compare(slow, fast, [StageRequest(slot=0, anchor=4, index=0)])
    extend((slow, fast), 0, 0, [9], seed=2)  # a single position: no row before the anchor's
    compare(slow, fast, [StageRequest(slot=0, anchor=4, index=0)])
    compare(slow, fast, [StageRequest(slot=0, anchor=4, index=1)])


@pytest.mark.parametrize("most", [1, 3, 8, 512])
def test_a_prompt_takes_as_many_forwards_as_it_needs(monkeypatch, most):
    """Rows of several slots share forwards, and a slot's rows may need several."""
    monkeypatch.setattr(fast_chain, "MOST_ROWS", most)
    slow, fast = both()
    for slot, length in enumerate((5, 1, 9, 2)):
        extend((slow, fast), slot, 0, list(range(length)))
    calls, read = [], fast.memory.read
    monkeypatch.setattr(fast.memory, "read", lambda rows, runs: (calls.append(len(rows.token)), read(rows, runs))[1])
    compare(slow, fast, [StageRequest(slot=slot, anchor=5, index=0) for slot in range(4)])
    assert sum(calls) == 17 and max(calls) == min(most, 17) and len(calls) == -(-17 // most)


def test_a_stage_is_as_many_stages_of_one_token():
    """The rows that a stage moves on by itself stand and see what rows laid out one by one do, also across pieces."""
    twin = tiny_drafter(tiny_target(), family="eagle3", stage_len=6)
    fast = FastChainDrafter.of(twin)
    whole, single = fast.open(), fast.at_depth(1).open()
    for slot, length in enumerate((5, 125, 127)):
        extend((whole, single), slot, 0, [token % 97 for token in range(length)])
    stages = whole.draft([StageRequest(slot=slot, anchor=9, index=0) for slot in range(3)])
    anchors = [9] * 3
    for index in range(6):
        found = single.draft([StageRequest(slot=slot, anchor=anchors[slot], index=index) for slot in range(3)])
        anchors = [stage.tokens[0] for stage in found]
        assert anchors == [stage.tokens[index] for stage in stages]
        assert [stage.logp[0] for stage in found] == pytest.approx([s.logp[index] for s in stages], abs=1e-5)


def test_a_stage_of_one_token_and_other_depths_share_a_memory():
    twin = tiny_drafter(tiny_target(), family="eagle3", stage_len=1)
    fast = FastChainDrafter.of(twin)
    for depth in (1, 3, 6):
        slow, session = twin.at_depth(depth).open(), fast.at_depth(depth).open()
        assert session.stage_len == depth
        extend((slow, session), 0, 0, [4, 5, 6])
        for index in range(3):
            compare(slow, session, [StageRequest(slot=0, anchor=5, index=index)])
        del session
    assert len(fast.memories) == 1


# Texts


@pytest.fixture(scope="module")
def taught():
    """A target on the fast path, its texts from the twin, and a drafter that is mostly right on them."""
    twin = tiny_target("qwen2", num_layers=4)
    prompts = [[5, 9, 11, 60], [3, 3, 8], [70]]
    texts = [generate(twin, None, prompt, max_new_tokens=32).tokens for prompt in prompts]
    drafter = taught_drafter(twin, [p + t for p, t in zip(prompts, texts, strict=True)], family="eagle3")
    return twin, drafter, FastTarget.of(twin), FastChainDrafter.of(drafter), prompts, texts


@pytest.mark.parametrize("trees", [{"tree_budget": 0}, {}, {"tree_budget": 9, "topk_k": 3}], ids=str)
@pytest.mark.parametrize("gate", [NEVER_OPENS, -0.5, ALWAYS_OPEN], ids=["never", "sometimes", "always"])
def test_texts_are_the_target_s(taught, gate, trees):
    _, _, target, drafter, prompts, texts = taught
    lengths = []
    for (prompt, text), cap in itertools.product(zip(prompts, texts, strict=True), (1, 2, 12) if trees else (2,)):
        out = generate(target, drafter, prompt, max_new_tokens=32, loop_gate=gate, max_stages=cap, **trees)
        assert out.tokens == text
        lengths.append(out.acceptance_length)
    assert max(lengths) > 2, "the drafter should be right at times"


@pytest.mark.parametrize("verify", ["match", "reject"])
@pytest.mark.parametrize("gate", [NEVER_OPENS, -2.0, ALWAYS_OPEN], ids=["never", "sometimes", "always"])
def test_draws_are_the_twin_s(taught, verify, gate):
    """Match: the text of plain sampling. Reject: the very rounds of the twin, noise and all."""
    twin, slow, target, drafter, prompts, _ = taught
    for seed, prompt in enumerate(prompts):
        options = dict(max_new_tokens=16, temperature=0.8, seed=seed)
        words = dict(loop_gate=gate, max_stages=3, verify=verify, tree_budget=0)
        fast = generate(target, drafter, prompt, **options, **words)
        expected = generate(twin, slow, prompt, **options, **words)
        assert [r.drafted for r in fast.rounds] == [r.drafted for r in expected.rounds]
        assert fast.tokens == expected.tokens
        if verify == "match":
            assert fast.tokens == generate(twin, None, prompt, **options).tokens


@pytest.mark.parametrize("trees", [{"tree_budget": 0}, {"tree_budget": 9, "topk_k": 3}], ids=["chains", "trees"])
@pytest.mark.parametrize(("temperature", "live"), [(0.0, 1), (0.0, 2), (0.8, 2), (0.8, 5)])
def test_many_prompts_give_the_texts_they_give_alone(taught, temperature, live, trees):
    """More prompts than slots: a slot starts its next text while others are in the middle of a round."""
    twin, _, target, drafter, _, _ = taught
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13], [14, 15]]
    options = dict(max_new_tokens=20, temperature=temperature)
    free = [generate(twin, None, p, seed=sample_seed(3, i), **options).tokens for i, p in enumerate(prompts)]
    options["stop_token_ids"] = [free[1][7], free[3][11]]
    alone = [generate(twin, None, p, seed=sample_seed(3, i), **options).tokens for i, p in enumerate(prompts)]
    settings = Settings(seed=3, verify="match", loop_gate=-2.0, **trees, **options)
    found = {text.index: text for text in generate_many(target, drafter, prompts, settings, live)}
    assert [found[i].tokens for i in range(len(prompts))] == alone


def test_sessions_that_are_open_do_not_share_a_store_and_ended_ones_are_taken_over(taught):
    _, _, target, drafter, prompts, texts = taught
    words = dict(max_new_tokens=32, loop_gate=-0.5, tree_budget=0)
    streams = [dloop.stream(target, drafter, prompt, **words) for prompt in prompts]
    found = [[stream.first] for stream in streams]
    for rounds in itertools.zip_longest(*streams):
        for text, now in zip(found, rounds, strict=True):
            text += now.emitted if now else []
    assert found == texts
    del streams, rounds, now
    count = len(drafter.memories)
    generate(target, drafter, prompts[0], **words)
    assert len(drafter.memories) == count


# Which engine


def test_a_drafter_follows_its_target_and_a_beam_too_wide_stays_on_the_twin(caplog):
    twin = tiny_target()
    drafter = tiny_drafter(twin, family="eagle3")
    assert drafter_like(twin, drafter) is drafter
    fast, words = drafter_like(FastTarget.of(twin), drafter), len(drafter.model.kept)
    assert isinstance(fast.open(), ChainSession)
    assert isinstance(fast.with_trees(TreeShape(budget=9, topk=words)).open(), ChainSession)
    with caplog.at_level(logging.INFO, "dloop"):
        slow = fast.with_trees(TreeShape(budget=9, topk=words + 1))
    assert isinstance(slow.open(), ChainMemory) and f"a beam of {words + 1} is wider" in caplog.text
    text = generate(twin, None, [1, 2], 6).tokens
    assert generate(FastTarget.of(twin), fast, [1, 2], 6, topk_k=words + 1, max_stages=2).tokens == text


def test_what_the_fast_path_does_not_compute_stays_on_the_twin(caplog):
    twin = tiny_target()
    drafter = tiny_drafter(twin, family="eagle3")
    drafter.model.midlayer.self_attn.o_proj.bias = torch.nn.Parameter(torch.zeros(32))
    with caplog.at_level(logging.WARNING, "dloop"):
        assert drafter_like(FastTarget.of(twin), drafter) is drafter
    assert "biases on the output" in caplog.text


# Trees, on the device as on the host


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("depth", [1, 2, 4])
def test_beams_are_the_host_s_trees_equal_scores_included(width, depth):
    """Three beams at once. Laws are multiples of 1/16 and depend on the token above, so paths often tie."""
    generator = torch.Generator().manual_seed(10 * width + depth)
    kept = torch.arange(6) * 2 + 1
    law = torch.stack([torch.randperm(6, generator=generator) for _ in range(14)]) / 16
    roots = torch.tensor([0, 2, 12])
    beams = Beams(width, roots)
    frontier = beams.grow(law[roots][:, None], kept)
    for _ in range(1, depth):
        frontier = beams.grow(law[frontier.tokens], kept)
    for nodes in (1, width * depth, 5 * width * depth):
        found, places = beams.finish(nodes)
        for row, root in enumerate(roots):
            levels = beam(root, depth, width, lambda _, f: best_children(law[f.tokens].log_softmax(-1), kept, width))
            parts = packed(levels).tolist()
            pool = candidates(levels, parts)
            path = deepest_path(pool, levels)
            logp = [pool.logp[node] for node in path]
            expected = with_spine(rerank(pool, nodes), [pool.tokens[node] for node in path], logp, sum(logp))
            assert to_tree(found[row].tolist(), depth) == expected
            assert places[row].tolist() == frontier_places(levels, parts, path)


# The kernels, run as Python by Triton's interpreter where there is no GPU


def test_the_kernels_are_their_plain_twins_and_a_stage_packed_is_a_stage_alone():
    pytest.importorskip("triton")
    words = dict(vocab_size=33, stage_len=2)
    (slow, fast), (_, alone) = both(**words), both(**words)
    fast.memory.kernels = alone.memory.kernels = True
    for slot, length in enumerate((5, 2)):
        extend((slow, fast), slot, 0, list(range(length)))
    extend((alone,), 0, 0, list(range(5)))
    for index in range(2):
        found = compare(slow, fast, [StageRequest(slot=slot, anchor=5, index=index) for slot in (1, 0)])
        (single,) = alone.draft([StageRequest(slot=0, anchor=5, index=index)])
        assert single == found[1], "bit for bit"
    stored = fast.memory.store.keys.abs().sum(dim=(0, 2, 4)) > 0  # rows that fill a bucket are written nowhere
    assert stored.sum(1).tolist() == [5 + 2 * 2 - 1, 2 + 2 * 2 - 1]


def test_the_kernels_draft_the_twin_s_trees():
    pytest.importorskip("triton")
    slow, fast = both(TreeShape(budget=5, stage_budget=4, topk=2), vocab_size=33, stage_len=3)
    for slot, length in enumerate((127, 2)):  # in slot 0 a tree's levels lie on both sides of a piece's edge
        extend((slow, fast), slot, 0, [token % 33 for token in range(length)])
    compare(slow, fast, [StageRequest(slot=slot, anchor=5, index=0) for slot in (1, 0)])
    extend((slow, fast), 0, 127, [5])
    fast.memory.kernels = True  # for the prompt the interpreter is slow
    for index in range(2):
        compare(slow, fast, [StageRequest(slot=slot, anchor=6, index=index) for slot in (1, 0)])
    stored = fast.memory.store.keys.abs().sum(dim=(0, 2, 4)) > 0
    assert not stored[1, 2 + 3 + 2 * 2 :].any(), "rows that fill a bucket are written nowhere"
