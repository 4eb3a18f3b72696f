"""Tree policies against brute force; trees in the loop: public while the gate is closed, lossless always."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dloop
from dloop.batch import generate_many
from dloop.drafters.host import HostDrafter
from dloop.fast.target import FastTarget
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS, FixedGate
from dloop.judge import Match
from dloop.load import drafter_like
from dloop.loop import Limits, Session, decode
from dloop.sampling import Sampling
from dloop.settings import TREES, Settings
from dloop.targets.hf import HFMemory, HFTarget
from dloop.testing import gather, taught_drafter, tiny_drafter, tiny_target
from dloop.trees.beam import Children, beam, packed
from dloop.trees.best_first import best_first
from dloop.trees.dynamic import candidates, deepest_path, frontier_places, rerank
from dloop.trees.shape import TreeShape
from dloop.trees.supertree import prune, supertree
from dloop.trees.tree import Tree, keep_best, with_spine
from dloop.types import Round, StageRequest

PROMPT = [5, 9, 11, 40]


# Policies: each has a brute-force twin


@st.composite
def laws(draw) -> list[list[float]]:
    """[depths][candidates] in falling order; sixteenths add up exactly, and often tie."""
    depths, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    steps = st.lists(st.integers(0, 20), min_size=count, max_size=count)
    return [sorted((-step / 16 for step in draw(steps)), reverse=True) for _ in range(depths)]


def prefixes(logp: list[list[float]]) -> list[tuple[float, tuple[int, ...]]]:
    """Every prefix as (score, ranks), the best first, of equals the smaller ranks."""
    ranks = range(len(logp[0]))
    every = [path for length in range(1, len(logp) + 1) for path in itertools.product(ranks, repeat=length)]
    scored = [(sum(logp[depth][rank] for depth, rank in enumerate(path)), path) for path in every]
    return sorted(scored, key=lambda item: (-item[0], item[1]))


def ranks_of(tree: Tree) -> list[tuple[int, ...]]:
    """Each node's tokens from the root, where tokens are ranks."""
    paths: list[tuple[int, ...]] = []
    for parent, token in zip(tree.parents, tree.tokens, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


@given(logp=laws(), budget=st.integers(0, 40))
def test_best_first_takes_the_most_probable_prefixes_in_order(logp, budget):
    tree = best_first(logp, [list(range(len(row))) for row in logp], budget)
    expected = prefixes(logp)[:budget]
    assert ranks_of(tree) == [path for _, path in expected]
    assert tree.scores == [score for score, _ in expected]
    assert tree.logp == [logp[len(path) - 1][path[-1]] for _, path in expected]


def test_an_empty_draft_is_the_root_alone():
    assert best_first([], [], 5) == Tree([], [], [], [])


@dataclass(frozen=True)
class World:
    """A law of the next token that depends on the whole path; sixteenths, so that sums are exact."""

    seed: int
    vocabulary: int = 7

    def logp(self, path: Sequence[int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed + sum((token + 2) * 9**i for i, token in enumerate(path)))
        return -torch.randint(0, 60, (self.vocabulary,), generator=generator).float() / 16

    def best(self, path: Sequence[int], count: int) -> list[int]:
        return self.logp(path).topk(min(count, self.vocabulary)).indices.tolist()

    def score(self, path: Sequence[int]) -> float:
        return sum(self.logp(path[:i])[token].item() for i, token in enumerate(path))

    def expand(self, each: int):
        """What `beam` asks for; it keeps the paths of every frontier."""
        frontiers: list[list[list[int]]] = []

        def children(depth, frontier) -> Children:
            before = frontiers[-1] if depth else []
            tokens, parents = frontier.tokens.tolist(), frontier.parents.tolist()
            paths = [[*before[p], t] for p, t in zip(parents, tokens, strict=True)] if depth else [[]]
            frontiers.append(paths)
            ids = torch.tensor([self.best(path, each) for path in paths])
            return Children(ids, torch.stack([self.logp(path) for path in paths]).gather(1, ids))

        return children


def frontiers_by_hand(world: World, depths: int, width: int, each: int) -> tuple[list[list[tuple]], list[tuple]]:
    """(the nodes kept at each depth, all children scored), as paths, level by level."""
    frontier, kept, pool = [()], [], []
    for _ in range(depths):
        children = [(*path, token) for path in frontier for token in world.best(path, each)]
        pool += children
        frontier = sorted(children, key=lambda path: -world.score(path))[:width]  # stable
        kept.append(frontier)
    return kept, pool


SIZES = {
    "seed": st.integers(0, 999),
    "depths": st.integers(1, 4),
    "width": st.integers(1, 5),
    "each": st.integers(1, 5),
}


@given(**SIZES, budget=st.integers(1, 12), beta=st.sampled_from([0.0, -0.25, -1.0]))
def test_the_supertree_and_its_pruning(seed, depths, width, each, budget, beta):
    world = World(seed)
    levels = beam(torch.tensor(0), depths, width, world.expand(each))
    pool = supertree([level.size for level in levels], packed(levels).tolist())
    every = [path for frontier in frontiers_by_hand(world, depths, width, each)[0] for path in frontier]
    assert ranks_of(pool) == every
    assert pool.scores == [world.score(path) for path in every]
    order = sorted(range(len(every)), key=lambda i: (-(world.score(every[i]) + beta * len(every[i])), i))
    assert ranks_of(prune(pool, budget, beta)) == [every[i] for i in sorted(order[:budget])]


@given(**SIZES, budget=st.integers(1, 30))
def test_the_dynamic_tree(seed, depths, width, each, budget):
    world = World(seed)
    levels = beam(torch.tensor(0), depths, width, world.expand(each))
    parts = packed(levels).tolist()
    pool = candidates(levels, parts)
    kept, every = frontiers_by_hand(world, depths, width, each)
    assert ranks_of(pool) == every
    order = sorted(range(len(every)), key=lambda i: (-world.score(every[i]), i))
    assert ranks_of(rerank(pool, budget)) == [every[i] for i in sorted(order[:budget])]
    path = deepest_path(pool, levels)
    best = max((p for p in every if len(p) == depths), key=world.score)
    assert tuple(pool.tokens[node] for node in path) == best
    for depth, place in enumerate(frontier_places(levels, parts, path)):
        assert kept[depth][place] == best[: depth + 1]


@given(logp=laws(), budget=st.integers(1, 12), data=st.data())
def test_a_spine_is_found_in_the_tree_or_kept_in_reserve(logp, budget, data):
    tree = best_first(logp, [list(range(len(row))) for row in logp], budget)
    tokens = [data.draw(st.integers(0, len(row) - 1)) for row in logp]
    stage = with_spine(tree, tokens, [logp[depth][token] for depth, token in enumerate(tokens)], -1.0)
    count = len(tree.tokens)
    assert (stage.tokens[:count], stage.parents[:count], stage.logp[:count]) == (tree.tokens, tree.parents, tree.logp)
    assert [stage.tokens[node] for node in stage.spine] == tokens
    assert [stage.parents[node] for node in stage.spine] == [-1, *stage.spine[:-1]]
    assert len(stage.tokens) == count + stage.reserve
    assert all(parent < node for node, parent in enumerate(stage.parents))
    edges = list(zip(stage.parents, stage.tokens, strict=True))
    assert len(set(edges)) == len(edges), "a node stands twice"


def test_a_priority_that_rises_below_a_parent_would_cut_a_branch():
    """Why the length bonus may not be positive."""
    pool = Tree([1, 2], [-1, 0], [-2.0, -0.5], [-2.0, -2.5])
    with pytest.raises(KeyError):
        keep_best(pool, [-2.0, -1.5], 1)


# Trees in the loop: every family, really trained for the loop on a few texts

K, LENGTH = 3, 24
LAW = {"temperature": 0.8, "top_k": 40}
GATES = (NEVER_OPENS, -0.5, -2.0, ALWAYS_OPEN)
SHAPES = {  # (first stage, further ones) as flags
    "chains below": {"tree_budget": 12, "stage_tree_budget": 0},
    "trees below": {"tree_budget": 9, "stage_tree_budget": 7},
    "two nodes": {"tree_budget": 2, "stage_tree_budget": 1},
}
NARROW = {"dflash": {"topk_k": 2}, "eagle3": {"topk_k": 3}}
DARTREE = {"tree_width": 4, "tree_beta": -0.3}


@dataclass(frozen=True)
class Taught:
    """A tiny target, texts of its own (greedy, then drawn with seeds 0, 1), and a drafter that learned them."""

    target: HFTarget
    texts: list[list[int]]
    drafter: HostDrafter

    def decode(self, seed: int | None = None, **words) -> list[Round]:
        """Decode as `dloop.generate` does; the text must be plain decoding's."""
        law = {} if seed is None else {**LAW, "seed": seed, "verify": "match"}
        out = dloop.generate(self.target, self.drafter, PROMPT, LENGTH, **law, **words)
        assert out.tokens == self.texts[0 if seed is None else 1 + seed], "the text differs from plain decoding"
        return out.rounds

    def unbranched(self) -> dict:
        """Trees of one node a level."""
        root = int(self.drafter.family == "eagle3")
        width = {"topk_k": 1} if self.drafter.family in NARROW else {"tree_width": 1}
        return {"tree_budget": K + root, "stage_tree_budget": K, **width}


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target(num_layers=3, vocab_size=61)  # a DARTree's candidates are then the whole vocabulary


@pytest.fixture(scope="module", params=tuple(TREES))
def taught(request, target) -> Taught:
    greedy = dloop.generate_autoregressive(target, PROMPT, LENGTH).tokens
    drawn = [dloop.generate_autoregressive(target, PROMPT, LENGTH, seed=s, **LAW).tokens for s in (0, 1)]
    learned = [PROMPT + text for text in (greedy, *drawn)]
    drafter = taught_drafter(target, learned, family=request.param, stage_len=K)
    return Taught(target, [greedy, *drawn], drafter)


def timeless(rounds: Sequence[Round]) -> list[Round]:
    return [replace(r, draft_s=0.0, verify_s=0.0) for r in rounds]


def facts(rounds: Sequence[Round]) -> list[tuple]:
    """All that is no measured number."""
    records = [[(stage.start, stage.stop, stage.gate, stage.reason) for stage in r.stage_records] for r in rounds]
    nodes = [(r.draft.tokens, r.draft.parents, r.draft.positions, r.path, r.bonus, r.emitted) for r in rounds]
    return list(zip(nodes, records, strict=True))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seed", [None, 0, 1], ids=["greedy", "match-0", "match-1"])
def test_every_tree_and_gate_gives_the_target_s_text(taught, shape, seed):
    narrow = NARROW.get(taught.drafter.family, DARTREE)
    for gate, max_stages in ((NEVER_OPENS, 12), (-0.5, 12), (-2.0, 2), (ALWAYS_OPEN, 3)):
        rounds = taught.decode(seed, loop_gate=gate, max_stages=max_stages, **SHAPES[shape], **narrow)
        assert max(r.stages for r in rounds) <= (1 if gate == NEVER_OPENS else max_stages)


def test_the_trees_branch_loop_and_are_refused_at_times(taught):
    """Without side branches accepted, stages beyond the first and rejections the tests above would prove little."""
    rounds = [r for seed in (None, 0, 1) for r in taught.decode(seed, loop_gate=-2.0, **SHAPES["trees below"])]
    assert any(not r.draft.is_chain for r in rounds)
    assert any(r.path != list(range(1, 1 + r.accepted)) for r in rounds), "a gather, not a slice"
    assert max(r.accepted for r in rounds) > K and len({r.stages for r in rounds}) > 1
    assert any(r.accepted < K * r.stages for r in rounds)


def test_parents_stand_before_their_children_and_positions_count_depth(taught):
    for r in taught.decode(loop_gate=ALWAYS_OPEN, max_stages=3, **SHAPES["trees below"]):
        draft = r.draft
        for node, parent in enumerate(draft.parents[1:], 1):
            assert 0 <= parent < node
            assert draft.positions[node] == draft.positions[parent] + 1
        assert draft.positions[0] == r.context_len
        for stage, record in enumerate(r.stage_records):
            tops = {draft.parents[n] for n in range(record.start, record.stop)} - set(range(record.start, record.stop))
            (tip,) = tops
            assert draft.positions[tip] == r.context_len + stage * K, "a stage hangs below one node, the spine's end"
            assert max(draft.positions[record.start : record.stop]) <= r.context_len + (stage + 1) * K


def test_a_closed_gate_leaves_the_public_tree_and_an_open_one_adds_the_spine_alone(taught):
    """Node for node: what the policy drafts for a stage does not depend on what the gate says of it."""
    root = int(taught.drafter.family == "eagle3")
    words, reserves = {"tree_budget": 2 + root, "stage_tree_budget": 2}, 0  # too few for a path of full depth
    never = {r.context_len: r for r in taught.decode(loop_gate=NEVER_OPENS, **words)}
    public = len(next(iter(never.values())).drafted)
    for gate in (-0.5, -2.0, ALWAYS_OPEN):
        for r in taught.decode(loop_gate=gate, max_stages=3, **words):
            first, draft = r.stage_records[0], r.draft
            if r.context_len in never:
                alone = never[r.context_len].draft
                stop = len(alone.tokens)
                assert (draft.tokens[:stop], draft.parents[:stop]) == (alone.tokens, alone.parents)
            assert first.stop - first.start == public or first.reason == "open"
            reserves += first.stop - first.start - public
            for record in r.stage_records:
                if record.reason != "open":
                    assert record.stop - record.start <= (public if record is first else 2)
    assert reserves, "no spine had to be inserted"


def test_trees_without_branches_are_the_linear_loop(taught):
    for seed, gate in itertools.product((None, 0), GATES):
        trees = taught.decode(seed, loop_gate=gate, max_stages=4, **taught.unbranched())
        chains = taught.decode(seed, loop_gate=gate, max_stages=4, tree_budget=0)
        assert facts(trees) == facts(chains)
        for tree, chain in zip(trees, chains, strict=True):
            assert tree.draft.logp == pytest.approx(chain.draft.logp, abs=1e-5)  # DARTree: sums in another order
            assert tree.scores == pytest.approx(chain.scores, abs=1e-6)


def test_spines_of_block_drafters_are_the_linear_loop_s_chains(taught):
    if taught.drafter.family == "eagle3":
        pytest.skip("its spine is the best path of the beam")
    words = {"loop_gate": ALWAYS_OPEN, "max_stages": 3}
    chain = taught.decode(tree_budget=0, **words)[0].draft
    for shape in SHAPES.values():
        draft = taught.decode(**words, **shape)[0].draft
        spine = [draft.tokens[node] for node in draft.spine]
        assert len(spine) > 1 + 2 * K - 1 and spine == chain.tokens[: len(spine)]
        assert draft.scores == pytest.approx(chain.scores, abs=1e-5)


def test_nothing_that_was_drafted_stays_in_the_drafter_s_memory(taught):
    """After a decode with trees, the memory drafts what a fresh one drafts that has read the text alone."""
    drafter = taught.drafter.with_trees(TreeShape(budget=9, stage_budget=7, topk=3, width=4))
    session = Session(taught.target.open(drafter.taps), drafter.open())
    rules = Limits(max_new_tokens=12, max_stages=3, context=taught.target.context)
    task = decode(session, 0, PROMPT, gate=FixedGate(-2.0), judge=Match(Sampling()), limits=rules)
    done = gather([task], session)[0]
    last = done.rounds[-1]
    kept = [*PROMPT, *done.tokens][: last.context_len] + [last.draft.tokens[node] for node in (0, *last.path)]
    fresh = Session(taught.target.open(drafter.taps), drafter.open())
    fresh.drafter.extend(0, 0, kept, fresh.target.prefill(0, kept).features)
    anchor = 7
    for index in (0, 1, 2):  # what a further stage stands on, too
        live, new = (s.drafter.draft([StageRequest(slot=0, anchor=anchor, index=index)])[0] for s in (session, fresh))
        assert (live.tokens, live.parents, live.reserve) == (new.tokens, new.parents, new.reserve)
        assert live.logp == pytest.approx(new.logp, abs=1e-4)
        anchor = live.tokens[live.spine[-1]]


def test_a_further_eagle_stage_stands_on_the_rows_of_its_path_alone(target):
    drafter = tiny_drafter(target, family="eagle3", stage_len=K).with_trees(TreeShape(budget=9, stage_budget=9, topk=4))
    memory, other = drafter.open(), drafter.open()
    for each in (memory, other):
        each.extend(0, 0, PROMPT, target.open(drafter.taps).prefill(0, PROMPT).features)
    first = memory.draft([StageRequest(slot=0, anchor=3, index=0)])[0]
    path = [first.tokens[node] for node in first.spine]
    second = memory.draft([StageRequest(slot=0, anchor=path[-1], index=1)])[0]
    state, model = other.slots[0], drafter.model  # by hand: the path as a chain
    with torch.no_grad():
        state.hidden = other._read(state, torch.tensor([3]))
        for step, token in enumerate(path):
            state.hidden = other._rows(state, state.hidden, torch.tensor([token]), len(PROMPT) + step)
        logp = model.logits(state.hidden[0, 0], drafter.vocabulary).log_softmax(-1)
    found = {
        token: value
        for token, value, parent in zip(second.tokens, second.logp, second.parents, strict=True)
        if parent < 0
    }
    expected = dict(zip(model.kept[logp.topk(4).indices].tolist(), logp.topk(4).values.tolist(), strict=True))
    assert set(found) <= set(expected)
    assert all(value == pytest.approx(expected[token], abs=1e-5) for token, value in found.items())


def test_a_stop_token_off_the_spine_does_not_end_drafting(taught):
    words = {"loop_gate": ALWAYS_OPEN, "max_stages": 2, **SHAPES["trees below"]}
    r = taught.decode(**words)[0]
    off = [r.draft.tokens[n] for n in range(1, r.stage_records[0].stop) if n not in r.draft.spine]
    spine = {r.draft.tokens[n] for n in r.draft.spine}
    stops = [token for token in off if token not in spine and token not in taught.texts[0]]
    again = dloop.generate(taught.target, taught.drafter, PROMPT, LENGTH, stop_token_ids=stops, **words).rounds[0]
    assert stops and timeless([again]) == timeless([r])
    ends = dloop.generate(taught.target, taught.drafter, PROMPT, LENGTH, stop_token_ids=[*spine], **words)
    assert all(record.reason == "stop_token" for x in ends.rounds[:1] for record in x.stage_records)


def test_the_fast_path_drafts_and_accepts_the_same_trees(taught):
    target = FastTarget.of(tiny_target(num_layers=3, vocab_size=61))
    fast = Taught(target, taught.texts, drafter_like(target, taught.drafter))
    assert type(fast.drafter) is not type(taught.drafter)
    for shape, seed in itertools.product(SHAPES.values(), (None, 0)):
        words = {"loop_gate": -2.0, "max_stages": 3, **shape}
        slow, quick = taught.decode(seed, **words), fast.decode(seed, **words)
        assert [(r.draft.tokens, r.draft.parents, r.path) for r in slow] == [
            (r.draft.tokens, r.draft.parents, r.path) for r in quick
        ]


def test_trees_of_many_sequences_travel_together(taught):
    prompts = [PROMPT, PROMPT[:2], PROMPT * 3]
    settings = Settings(max_new_tokens=10, loop_gate=-2.0, max_stages=3, **SHAPES["trees below"])
    for completion in generate_many(taught.target, taught.drafter, prompts, settings, live=3):
        alone = dloop.generate(
            taught.target,
            taught.drafter,
            prompts[completion.index],
            10,
            loop_gate=-2.0,
            max_stages=3,
            **SHAPES["trees below"],
        )
        assert completion.tokens == alone.tokens
        assert timeless(completion.rounds) == timeless(alone.rounds)


@pytest.mark.parametrize("family", tuple(TREES))
@pytest.mark.parametrize("words", [{"stage_len": 1}, {"head": "gated"}, {"head": "rnn"}, {"head": None}], ids=str)
def test_stages_of_one_token_and_every_markov_head(target, family, words):
    if "head" in words and family != "dspark":
        pytest.skip("only DSpark has a choice of heads")
    drafter = tiny_drafter(target, family=family, **words)
    text = dloop.generate_autoregressive(target, PROMPT, 10).tokens
    for gate in (NEVER_OPENS, ALWAYS_OPEN):
        shape = {"tree_budget": 9, "stage_tree_budget": 5, "max_stages": 3}
        assert dloop.generate(target, drafter, PROMPT, 10, loop_gate=gate, **shape).tokens == text


def test_the_context_can_be_filled_to_its_last_position(taught):
    """A tree has more rows than the context has positions left."""
    for room in (1, 2, 5, 9):
        prompt = [(7 * i) % 60 for i in range(taught.target.context - room)]
        out = dloop.generate(taught.target, taught.drafter, prompt, room, loop_gate=ALWAYS_OPEN, tree_budget=30)
        assert out.tokens == dloop.generate_autoregressive(taught.target, prompt, room).tokens
        assert all(max(r.draft.positions) < taught.target.context for r in out.rounds)


# Planted mistakes


class Flattened(HFMemory):
    """A tree is verified with the plain causal mask."""

    def _tree_mask(self, slot, parents):
        return super()._tree_mask(slot, list(range(-1, len(parents) - 1)))


class Sliced(HFMemory):
    """Keeps the first rows instead of the accepted ones."""

    def commit(self, slot, path):
        super().commit(slot, list(range(len(path))))


@pytest.mark.parametrize("memory", [Flattened, Sliced])
def test_a_wrong_tree_mask_and_a_wrong_gather_are_caught(taught, memory, monkeypatch):
    monkeypatch.setattr(HFTarget, "open", lambda target, taps=(): memory(target, taps))
    with pytest.raises(AssertionError, match="differs from plain decoding"):
        for seed in (None, 0, 1):
            taught.decode(seed, loop_gate=-2.0, **SHAPES["trees below"])
