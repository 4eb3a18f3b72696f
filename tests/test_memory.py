"""The memory law: memory = committed rows + a speculative tail, and a committed row is what a fresh object would hold.

For the target after any sequence of `verify` and `commit`, branches included; for the drafter after every round.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dloop.detect import BLOCK_FAMILIES
from dloop.drafters.block import BlockDrafter, BlockMemory
from dloop.drafters.gap import READINGS
from dloop.drafters.memory import KeyValues, SlotMemory
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS, FixedGate
from dloop.judge import Match
from dloop.loop import Limits, Session, decode
from dloop.sampling import Sampling
from dloop.targets.hf import HFMemory, HFTarget
from dloop.testing import KINDS, WINDOW_KINDS, chain, gather, good_drafter, tiny_drafter, tiny_target
from dloop.types import Draft, Features, Rows, Seen, Stage, StageRequest, Verdict, VerifyRequest

TOLERANCE = 1e-5  # float32, the same products in another order
TAPS = (0, 1)
VOCAB = 97
PROMPT = [5, 9, 11, 60, 2]
K = 3


@pytest.fixture(scope="module", params=(*KINDS, *WINDOW_KINDS))
def target(request) -> HFTarget:
    return tiny_target(request.param, num_layers=3)


@pytest.fixture(scope="module")
def qwen3() -> HFTarget:
    return tiny_target("qwen3", num_layers=3)


def assert_close(found: Tensor, expected: Tensor, what: str, tolerance: float = TOLERANCE) -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    worst = (found - expected).abs().max().item() if found.numel() else 0.0
    assert worst <= tolerance, f"{what} differ by {worst:.2g}"


# The target


@st.composite
def trees(draw, max_nodes: int = 8) -> tuple[list[int], list[int], list[int]]:
    """(tokens, parents, a path from the root on) of a random draft; half of them are chains."""
    count = draw(st.integers(1, max_nodes))
    is_chain = draw(st.booleans())
    parents = [-1, *(node - 1 if is_chain else draw(st.integers(0, node - 1)) for node in range(1, count))]
    tokens = draw(st.lists(st.integers(0, VOCAB - 1), min_size=count, max_size=count))
    node = draw(st.integers(0, count - 1))
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return tokens, parents, path


def branch(parents: list[int], node: int) -> list[int]:
    """Nodes from the root to this one: the brute-force ancestor list."""
    return [*(branch(parents, parents[node]) if parents[node] >= 0 else []), node]


def rows_of(tokens: list[int], parents: list[int], position: int, slot: int = 0) -> Rows:
    depths = [len(branch(parents, node)) - 1 for node in range(len(tokens))]
    positions = [position + depth for depth in depths]
    return Rows(token=tokens, slot=[slot] * len(tokens), position=positions, parent=parents)


def fresh(target: HFTarget, text: list[int]) -> Seen:
    """What a new object says about the whole text (logits of its last token, features of all)."""
    return target.open(TAPS).prefill(0, text)


def check_target(memory: HFMemory, text: list[int], slot: int = 0) -> None:
    """The next answer equals that of a fresh object fed the committed tokens; the probe is not kept."""
    probe = 3
    expected = fresh(memory.target, [*text, probe])
    found = memory.verify(rows_of([probe], [-1], len(text), slot))
    memory.commit(slot, [])
    assert_close(found.logits[-1], expected.logits[-1], "logits", 10 * TOLERANCE)
    assert_close(found.features.taps[-1], expected.features.taps[-1], "taps", 10 * TOLERANCE)
    assert_close(found.features.last[-1], expected.features.last[-1], "last states", 10 * TOLERANCE)


def walk(memory: HFMemory, rounds: Sequence[tuple[list[int], list[int], list[int]]]) -> None:
    """Verify and commit round after round, and hold the law after each."""
    text = list(PROMPT)
    memory.prefill(0, text)
    for tokens, parents, path in rounds:
        memory.verify(rows_of(tokens, parents, len(text)))
        memory.commit(0, path)
        text += [tokens[node] for node in path]
        check_target(memory, text)


@settings(max_examples=12)
@given(rounds=st.lists(trees(), min_size=1, max_size=3))
def test_after_any_verifications_and_commits_the_target_knows_exactly_the_committed_text(target, rounds):
    walk(target.open(TAPS), rounds)


@settings(max_examples=12)
@given(tree=trees())
def test_each_row_of_a_tree_is_its_branch_run_plainly(target, tree):
    tokens, parents, _ = tree
    memory = target.open(TAPS)
    memory.prefill(0, PROMPT)
    seen = memory.verify(rows_of(tokens, parents, len(PROMPT)))
    for node in range(len(tokens)):
        plain = fresh(target, PROMPT + [tokens[other] for other in branch(parents, node)])
        assert_close(seen.logits[node], plain.logits[-1], f"logits of node {node}", 10 * TOLERANCE)
        assert_close(seen.features.taps[node], plain.features.taps[-1], f"taps of node {node}", 10 * TOLERANCE)
        assert_close(seen.features.last[node], plain.features.last[-1], f"state of node {node}", 10 * TOLERANCE)


def test_packed_rows_of_several_sequences_are_answered_each_for_itself(target):
    memory = target.open(TAPS)
    prompts = [PROMPT, [1], list(range(20))]
    drafts = []
    for slot, prompt in enumerate(prompts):
        memory.prefill(slot, prompt)
        drafts.append(Draft.rooted(7 + slot, len(prompt)))
    drafts[1] = drafts[1].graft(chain([4, 5]))
    drafts[2] = drafts[2].graft(Stage(tokens=[4, 5, 6], parents=[-1, -1, 1], logp=[0.0] * 3, spine=[1, 2], score=0.0))
    requests = [VerifyRequest(slot=slot, draft=draft) for slot, draft in enumerate(drafts)]
    seen = memory.verify(Rows.pack(requests))
    row = 0
    for prompt, draft in zip(prompts, drafts, strict=True):
        for node in range(len(draft.tokens)):
            text = prompt + [draft.tokens[other] for other in branch(draft.parents, node)]
            assert_close(seen.logits[row], fresh(target, text).logits[-1], f"row {row}", 10 * TOLERANCE)
            row += 1
    memory.commit(2, [0, 2, 3])
    memory.commit(0, [0])
    memory.commit(1, [0, 1])
    check_target(memory, [*prompts[2], 9, 5, 6], slot=2)
    check_target(memory, [*PROMPT, 7], slot=0)
    check_target(memory, [1, 8, 4], slot=1)
    memory.prefill(1, [50, 51])  # a slot can be started anew without touching the others
    check_target(memory, [50, 51], slot=1)
    check_target(memory, [*PROMPT, 7], slot=0)


@dataclass
class KeepsOneMore(HFMemory):
    """Planted: the row after the last accepted one stays."""

    def commit(self, slot: int, path: list[int]) -> None:
        super().commit(slot, [*path, path[-1] + 1] if path and path[-1] + 1 < 4 else path)


@dataclass
class KeepsThePrefix(HFMemory):
    """Planted: rows are kept by number, as if every draft were a chain."""

    def commit(self, slot: int, path: list[int]) -> None:
        super().commit(slot, list(range(len(path))))


@dataclass
class SeesSiblings(HFMemory):
    """Planted: a tree is verified with the plain causal mask."""

    def _tree_mask(self, slot: int, parents: list[int]) -> Tensor:
        return super()._tree_mask(slot, list(range(-1, len(parents) - 1)))


@pytest.mark.parametrize("planted", [KeepsOneMore, KeepsThePrefix, SeesSiblings])
def test_a_target_memory_that_breaks_the_law_is_caught(qwen3, planted):
    tree = ([7, 30, 31, 32], [-1, 0, 0, 2], [0, 2])
    walk(HFMemory(qwen3, TAPS), [tree])
    with pytest.raises((AssertionError, RuntimeError)):
        walk(planted(qwen3, TAPS), [tree])


# The drafter


@dataclass
class Forced:
    """A judge that accepts as many nodes as it is told, one number a round: the law holds for any verdict."""

    counts: list[int]
    drafts: list[Draft] = field(default_factory=list)
    drafting: None = None

    def first(self, logits: Tensor, position: int) -> int:
        return 1

    def __call__(self, draft: Draft, logits: Tensor) -> Verdict:
        count = min(self.counts[len(self.drafts) % len(self.counts)], len(draft.drafted))
        self.drafts.append(draft)
        return Verdict(path=list(range(1, 1 + count)), bonus=(11 * len(self.drafts)) % VOCAB)


@dataclass
class Lawful:
    """A drafter whose memory is compared, after each commit, with one built from scratch on the committed text."""

    memory: BlockMemory
    target: HFTarget
    text: list[int] = field(default_factory=list)
    checks: int = 0

    @property
    def stage_len(self) -> int:
        return self.memory.stage_len

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        self.memory.extend(slot, position, tokens, features)
        self.text = self.text[:position] + tokens
        self.check(slot)

    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        stages = self.memory.draft(requests)
        if requests[0].index == 0:
            rebuilt = self.rebuild().draft([StageRequest(slot=0, anchor=requests[0].anchor, index=0)])[0]
            assert stages[0].tokens == rebuilt.tokens, "a first stage differs from a fresh drafter's"
            assert stages[0].score == pytest.approx(rebuilt.score, abs=1e-4)
        return stages

    def rebuild(self) -> BlockMemory:
        drafter = self.memory.drafter
        memory = drafter.open()
        memory.extend(0, 0, self.text, self.target.open(drafter.taps).prefill(0, self.text).features)
        return memory

    def check(self, slot: int) -> None:
        mine, theirs = self.memory.slots[slot].memory, self.rebuild().slots[0].memory
        assert mine.length == mine.committed == len(self.text), f"a tail of {mine.length - len(self.text)} rows is left"
        for layer, (found, expected) in enumerate(zip(mine.layers(), theirs.layers(), strict=True)):
            assert_close(found.keys, expected.keys, f"keys of layer {layer}")
            assert_close(found.values, expected.values, f"values of layer {layer}")
        self.checks += 1


def decode_lawfully(
    target: HFTarget, memory: BlockMemory, judge: Match | Forced, *, max_stages: int, num_tokens: int, gate: float
) -> Lawful:
    lawful = Lawful(memory, target)
    session = Session(target.open(memory.drafter.taps), lawful)
    limits = Limits(max_new_tokens=num_tokens, max_stages=max_stages, context=target.context)
    gather([decode(session, 0, PROMPT, gate=FixedGate(gate), judge=judge, limits=limits)], session)
    assert lawful.checks > 1
    return lawful


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
@pytest.mark.parametrize("reading", READINGS)
def test_the_drafter_holds_exactly_the_verified_rows_after_every_round(target, family, reading):
    """Whatever was accepted: 0, 1, ..., S * k tokens of a round."""
    drafter = tiny_drafter(target, family=family, stage_len=K, gap_rows=reading)
    judge = Forced(counts=[0, 9, 4, 1, 6, 2, 8, 5, 3, 7])
    decode_lawfully(target, drafter.open(), judge, max_stages=3, num_tokens=70, gate=ALWAYS_OPEN)
    whole = [draft for draft in judge.drafts if len(draft.drafted) == 3 * K]
    assert len(whole) >= len(judge.counts), "each count met a draft of three stages"


@pytest.mark.parametrize("gate", [NEVER_OPENS, -2.0, ALWAYS_OPEN])
def test_the_drafter_s_memory_law_in_a_real_decode(qwen3, gate):
    plain = Session(qwen3.open(), None)
    rules = Limits(max_new_tokens=24, context=qwen3.context)
    greedy = Match(Sampling())
    text = gather([decode(plain, 0, PROMPT, gate=FixedGate(), judge=greedy, limits=rules)], plain)[0].tokens
    memory = good_drafter(qwen3, [PROMPT + text]).open()
    lawful = decode_lawfully(qwen3, memory, greedy, max_stages=4, num_tokens=24, gate=gate)
    assert lawful.text[len(PROMPT) :][:23] == text[:23]


class KeepsItsTail(BlockMemory):
    """Planted: the gap rows of a round stay in front of the verified ones."""

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        if position == 0:
            return super().extend(slot, position, tokens, features)
        self.slots[slot].hidden.clear()
        positions = torch.arange(position, position + len(tokens))[None]
        memory = self.slots[slot].memory
        memory.append(self.drafter.model.project(self.drafter.model.context(features.taps[None]), positions))
        memory.commit()
        return None


class TrustsItsOwnStates(BlockMemory):
    """Planted: as many rows as there should be, but accepted positions keep the draft states they were given."""

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        kept = None
        if position and self.slots[slot].memory.length > position:
            kept = [KeyValues(k.clone(), v.clone()) for k, v in self.slots[slot].memory.layers()]
        super().extend(slot, position, tokens, features)
        if kept is not None:
            count = min(kept[0].keys.shape[2], self.slots[slot].memory.length) - position
            for layer, old in zip(self.slots[slot].memory.layers(), kept, strict=True):
                layer.keys[:, :, position : position + count] = old.keys[:, :, position : position + count]


class OnePositionLate(BlockMemory):
    """Planted: verified rows are rotated one position too far."""

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        super().extend(slot, position, tokens, features)
        memory = self.slots[slot].memory
        memory.length = memory.committed = position
        positions = torch.arange(position, position + len(tokens))[None] + 1
        memory.append(self.drafter.model.project(self.drafter.model.context(features.taps[None]), positions))
        memory.commit()


@pytest.mark.parametrize(
    ("planted", "complaint"),
    [(KeepsItsTail, "tail of 5 rows"), (TrustsItsOwnStates, "keys of layer 0"), (OnePositionLate, "keys of layer 0")],
)
def test_a_drafter_memory_that_breaks_the_law_is_caught(
    qwen3, planted: Callable[[BlockDrafter], BlockMemory], complaint
):
    drafter = tiny_drafter(qwen3, stage_len=K)
    with pytest.raises(AssertionError, match=complaint):
        decode_lawfully(qwen3, planted(drafter), Forced([2]), max_stages=3, num_tokens=12, gate=ALWAYS_OPEN)


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_further_stages_stand_on_a_tail_that_the_next_round_drops(qwen3, family):
    drafter = tiny_drafter(qwen3, family=family, stage_len=K)
    memory = drafter.open()
    memory.extend(0, 0, PROMPT, qwen3.open(drafter.taps).prefill(0, PROMPT).features)
    slot = memory.slots[0].memory
    first = memory.draft([StageRequest(slot=0, anchor=1, index=0)])[0]
    assert slot.length == slot.committed == len(PROMPT)
    for index in (1, 2):
        memory.draft([StageRequest(slot=0, anchor=first.tokens[-1], index=index)])
        assert (slot.committed, slot.length) == (len(PROMPT), len(PROMPT) + index * K - 1)
    again = memory.draft([StageRequest(slot=0, anchor=1, index=0)])[0]
    assert slot.length == len(PROMPT)
    assert again == first


@pytest.mark.parametrize(
    "made",
    [
        {"head": "vanilla"},
        {"head": "gated"},
        {"head": "rnn"},
        {"head": None},
        {"family": "dflash"},
        {"family": "domino"},
    ],
    ids=lambda made: str(*made.values()),
)
def test_a_stage_drafted_step_by_step_is_the_whole_block_with_known_tokens(qwen3, made):
    """Decoding corrects row by row, training all rows at once: the same logits, so each token is their argmax."""
    drafter = tiny_drafter(qwen3, **made)
    memory = drafter.open()
    memory.extend(0, 0, PROMPT, qwen3.open(drafter.taps).prefill(0, PROMPT).features)
    anchor = 1
    for index in range(3):
        stage = memory.draft([StageRequest(slot=0, anchor=anchor, index=index)])[0]
        previous = torch.tensor([anchor, *stage.tokens[:-1]])  # heads restart at each stage's own anchor
        logits, _ = drafter.model.teacher_forced(memory.slots[0].hidden[index], previous, drafter.vocabulary)
        logp = logits.log_softmax(-1)
        assert stage.tokens == logits.argmax(-1).tolist()
        assert stage.logp == pytest.approx(logp.max(-1).values.tolist(), abs=1e-5)
        assert stage.score == pytest.approx(sum(stage.logp), abs=1e-6)
        anchor = stage.tokens[-1]


# The store underneath


@settings(max_examples=30)
@given(steps=st.lists(st.tuples(st.sampled_from(["append", "commit", "drop"]), st.integers(1, 90)), max_size=20))
def test_slot_memory_is_a_list_with_a_tail(steps):
    memory, committed, tail = SlotMemory(), [], []
    numbers = itertools.count()
    for verb, count in [("append", 1), *steps]:
        if verb == "append":
            new = [next(numbers) for _ in range(count)]
            rows = torch.tensor(new, dtype=torch.float32)[None, None, :, None].expand(1, 2, -1, 4)
            memory.append([KeyValues(rows, -rows), KeyValues(rows + 0.5, rows)])
            tail += new
        elif verb == "commit":
            memory.commit()
            committed, tail = committed + tail, []
        else:
            memory.drop_tail()
            tail = []
        assert (memory.committed, memory.length) == (len(committed), len(committed) + len(tail))
        first, second = memory.layers()
        assert first.keys[0, 0, :, 0].tolist() == committed + tail
        assert first.values[0, 1, :, 3].tolist() == [-x for x in committed + tail]
        assert second.keys[0, 1, :, 0].tolist() == [x + 0.5 for x in committed + tail]
