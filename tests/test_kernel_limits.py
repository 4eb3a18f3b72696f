"""Kernels at their limits, run as Python by Triton's interpreter: one sum for every way of cutting attention."""

import pytest
import torch

from dloop.fast import rows as packing
from dloop.fast.plain import PlainOps
from dloop.fast.rows import Layout, RowBatch, Run, bucket_of, pack_rows
from dloop.fast.target import columns_of
from dloop.kernels.shapes import GROUP, KEYS, Heads, Store
from dloop.testing import tiny_drafter, tiny_target
from dloop.types import Rows

attention = pytest.importorskip("dloop.kernels.attention", reason="needs Triton")
linear, markov = pytest.importorskip("dloop.kernels.linear"), pytest.importorskip("dloop.kernels.markov")
pick = pytest.importorskip("dloop.kernels.pick")

HEADS = Heads(queries=2, keys=1, dim=16, eps=1e-6, frequency=torch.ones(8), scaling=1.0)
CAPACITY = (GROUP + 2) * KEYS
PARENTS = [-1, 0, 0, 1, 3, 2]  # a tree of six rows; the path 0, 1, 3, 4 is a chain
SPINE = [0, 1, 3, 4]


@pytest.fixture(scope="module")
def store() -> Store:
    generator = torch.Generator().manual_seed(0)
    shape = (3, HEADS.keys, CAPACITY, HEADS.dim)
    return Store(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


@pytest.fixture(scope="module")
def queries() -> torch.Tensor:
    return torch.randn(16, HEADS.queries * HEADS.dim, generator=torch.Generator().manual_seed(1))


def attend(store, queries, runs: list[Run], parents: list[list[int]], tree: bool):
    """(kernel, plain twin) of these runs' rows, each run with its own part of the queries."""
    token, slot, position, parent = list[int](), list[int](), list[int](), list[int]()
    for run, own in zip(runs, parents, strict=True):
        depth = list[int]()
        for above in own:
            depth.append(depth[above] + 1 if above >= 0 else 0)
        token += [0] * run.count
        slot += [run.slot] * run.count
        position += [run.base + d for d in depth]
        parent += [above + run.first if above >= 0 else -1 for above in own]
    count = sum(run.count for run in runs)
    columns = columns_of(HEADS, max(run.count for run in runs))
    rows = Rows(token=token, slot=slot, position=position, parent=parent)

    def batch_of(size: int) -> RowBatch:
        layout = Layout(rows=size, tile_rows=columns.rows, tree=tree)
        return layout.views(torch.from_numpy(pack_rows(rows, runs, layout)), runs)

    batch = batch_of(bucket_of(count))
    work = attention.Work(programs=7, columns=columns.count, pdl=False)
    found = attention.launch(queries, store, HEADS, batch.place, batch.tiles, work)
    assert not found[count:].any(), "rows that nobody fills see nothing"
    return found[:count], PlainOps().attend(queries[:count], store, HEADS, batch_of(count))


@pytest.mark.parametrize("base", [0, KEYS - 2, GROUP * KEYS - 3])
def test_pieces_and_groups_chains_and_trees_alone_and_packed_give_the_same_bits(monkeypatch, store, queries, base):
    chain = [-1, 0, 1, 2]
    alone = [Run(1, 0, 4, base)]
    expected, plain = attend(store, queries, alone, [chain], tree=False)
    torch.testing.assert_close(expected, plain, atol=2e-5, rtol=1e-5)
    tree_store = Store(store.k.clone(), store.v.clone())
    for part in tree_store:  # node i of a run stands at base + i
        part[1, :, [base + node for node in SPINE]] = part[1, :, base : base + 4].clone()
    spread = torch.zeros_like(queries)
    spread[SPINE] = queries[:4]
    for fill in (0, 10**6):  # every unit a group; every unit a piece
        monkeypatch.setattr(packing, "FILL", fill)
        monkeypatch.setattr(attention, "FILL", fill)
        assert torch.equal(attend(store, queries, alone, [chain], tree=False)[0], expected)
        assert torch.equal(attend(store, queries, alone, [chain], tree=True)[0], expected)
        found, plain = attend(tree_store, spread, [Run(1, 0, 6, base)], [PARENTS], tree=True)
        torch.testing.assert_close(found, plain, atol=2e-5, rtol=1e-5)
        assert torch.equal(found[SPINE], expected)
        packed = [Run(2, 0, 3, 5), Run(1, 3, 4, base), Run(0, 7, 1, KEYS)]
        shifted = torch.cat([queries[5:8], queries[:4], queries[8:]])
        shifted = torch.cat([shifted, shifted.new_zeros(16 - len(shifted), shifted.shape[1])])
        assert torch.equal(attend(store, shifted, packed, [[-1, 0, 1], chain, [-1]], tree=False)[0][3:7], expected)


def test_the_comparison_sees_another_order_of_sums(store, queries):
    """Were pieces joined without their groups, some bits would differ: the test above is not blind."""
    chain = [Run(1, 0, 4, GROUP * KEYS + KEYS)]
    expected, _ = attend(store, queries, chain, [[-1, 0, 1, 2]], tree=False)
    other = pytest.MonkeyPatch()
    with other.context() as patch:
        patch.setattr(attention, "GROUP", 1)
        patch.setattr(packing, "FILL", 10**6)
        patch.setattr(attention, "FILL", 10**6)
        found, _ = attend(store, queries, chain, [[-1, 0, 1, 2]], tree=False)
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def test_many_rows_of_a_large_vocabulary_are_written_where_they_belong():
    """Rows times outputs pass 2**31; most of the memory is never touched."""
    rows, out = 2048, 2**20 + 64
    assert rows * out > 2**31
    x, w = torch.randn(rows, 16), torch.randn(64, 16)
    y = torch.empty(rows * out)
    kernel = linear.linear_kernel[(1, 1, 1)]
    sizes = dict(N=out, K=16, STEPS=1, ROWS=rows, WIDTH=64, DEPTH=16, GATED=False, EVEN=True, AHEAD=1, PDL=False)
    kernel(x, w, y, rows, **sizes, num_warps=4, num_stages=1)
    torch.testing.assert_close(y.view(rows, out)[:, :64], x @ w.T, atol=1e-4, rtol=1e-4)


def test_more_sequences_than_a_launch_takes_are_drafted_like_few(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(16, 70, generator=generator)  # five sequences of three rows, and one that fills the bucket
    w1, w2 = torch.randn(2, 70, 8, generator=generator)
    anchors = torch.tensor([3, 9, 69, 0, 3])
    together = markov.launch(logits, anchors, (w1, w2), None, block=3, pdl=False)
    monkeypatch.setattr(markov, "SEQUENCES", 2)
    assert torch.equal(markov.launch(logits, anchors, (w1, w2), None, block=3, pdl=False), together)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_stage_s_numbers_are_the_same_bits_however_many_are_drafted_with_it(kind):
    """One sequence's shares are joined in another way than those of two, of five or of sixteen."""
    generator = torch.Generator().manual_seed(0)
    logits, factors = (torch.randn(*shape, generator=generator).to(kind) for shape in ((48, 70), (2, 70, 8)))
    anchors = torch.randint(70, (16,), generator=generator)
    together = markov.launch(logits, anchors, tuple(factors), None, block=3, pdl=False)
    for count in (1, 2, 5):
        found = markov.launch(logits[-3 * count :], anchors[-count:], tuple(factors), None, block=3, pdl=False)
        assert torch.equal(found, together[-count:])


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:divide by zero")  # the interpreter is NumPy
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_broken_row_of_a_stage_names_a_token_that_there_is(value):
    """Its row of the head's first factor is read, and the target embeds it; no gate opens on it."""
    logits, factors = torch.randn(6, 70), torch.randn(2, 70, 8)
    logits[0] = value
    found = markov.launch(logits, torch.tensor([3, 9]), tuple(factors), None, block=3, pdl=False)
    assert ((found[:, 0] >= 0) & (found[:, 0] < 70)).all() and found[0, 1, 0].isnan()


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:divide by zero")  # the interpreter is NumPy
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_the_most_likely_token_is_the_first_of_equals_whatever_share_it_lies_in(monkeypatch, kind):
    monkeypatch.setattr(pick, "SHARE", 16)
    logits = torch.randn(6, 70, generator=torch.Generator().manual_seed(0)).to(kind)
    logits[0, [12, 40, 69]] = 9.0
    logits[1, 69] = 9.0
    logits[2] = -1e4
    kept = torch.arange(70) * 3
    found, plain = pick.launch(logits, kept, pdl=False), PlainOps().pick(logits, kept)
    assert found[:3, 0].tolist() == [36, 207, 0]
    assert torch.equal(found[:, 0], plain[:, 0])
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=1e-6)
    for value in (torch.nan, -torch.inf):
        assert pick.launch(torch.full((1, 70), value, dtype=kind), kept, pdl=False)[0, 1:].isnan().all()
    nothing = pick.launch(torch.full((1, 70), float("nan"), dtype=kind), kept, pdl=False)
    assert 0 <= nothing[0, 0] < 210, "a row that nobody fills must name a token"


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    ("family", "head"),
    [
        ("dflash", None),
        ("domino", None),
        ("dspark", "vanilla"),
        ("dspark", "gated"),
        ("dspark", "rnn"),
        ("dspark", None),
    ],
)
def test_every_family_s_proposals_are_the_twin_s(monkeypatch, family, head, count):
    """Heads whose rows correct one another included, for one sequence and for several; a row fills the bucket up."""
    from dloop.fast.fused import TritonOps

    monkeypatch.setattr(pick, "SHARE", 16)
    target = tiny_target()
    words = {"head": head} if family == "dspark" else {}
    drafter = tiny_drafter(target, family=family, **words)
    model, generator = drafter.model, torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in model.parameters():  # corrections begin at zero
            weight.normal_(std=0.5, generator=generator)
        hidden = torch.randn(count * model.config.block_size + 1, model.config.hidden_size, generator=generator)
        anchors = torch.randint(target.vocab_size, (count,), generator=generator)
        given = hidden, anchors, model, drafter.vocabulary
        found, plain = TritonOps(16).propose(*given), PlainOps().propose(*given)
    assert found.shape == (count, 3, model.config.stage_len) and found.is_contiguous()
    assert torch.equal(found[:, 0], plain[:, 0])
    torch.testing.assert_close(found, plain, atol=1e-4, rtol=1e-4)


def test_pairs_of_embedding_and_state_are_normed_each_by_itself():
    norm = pytest.importorskip("dloop.kernels.norm")
    generator = torch.Generator().manual_seed(0)
    embedding, states = torch.randn(7, 24, generator=generator), 3 * torch.randn(4, 24, generator=generator)
    gains = (torch.rand(24, generator=generator), torch.rand(24, generator=generator))
    tokens = torch.tensor([6, 0, 3, 3], dtype=torch.int32)
    found = norm.launch_pair(tokens, embedding, states, gains, 1e-6, pdl=False)
    expected = PlainOps().pair(tokens, embedding, states, gains, 1e-6)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    assert not torch.allclose(found[2, 24:], found[3, 24:]) and torch.equal(found[2, :24], found[3, :24])


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_embeddings_are_normed_as_rows_that_were_looked_up_are(kind):
    norm = pytest.importorskip("dloop.kernels.norm")
    generator = torch.Generator().manual_seed(0)
    embedding, gain = torch.randn(7, 24, generator=generator).to(kind), torch.rand(24, generator=generator).to(kind)
    tokens = torch.tensor([6, 0, 3, 3], dtype=torch.int32)
    looked_up = torch.nn.functional.embedding(tokens, embedding)
    residual, normed = norm.launch_embed(tokens, embedding, gain, 1e-6, pdl=False)
    assert torch.equal(residual, looked_up)
    assert torch.equal(normed, norm.launch(looked_up, None, gain, 1e-6, pdl=False)), "another norm than the layers'"
    plain = PlainOps().embed_norm(tokens, embedding, gain, 1e-6)
    assert torch.equal(plain[0], residual) and torch.equal(embedding[6], residual[0])
    torch.testing.assert_close(normed, plain[1], atol=1e-6, rtol=2e-2 if kind == torch.bfloat16 else 1e-6)
