"""The fast path is its slow twin: same numbers, same texts, same memory law; alone, packed, grown and reused."""

import itertools
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import dloop
from dloop.api import generate
from dloop.batch import generate_many, on_device
from dloop.detect import BLOCK_FAMILIES
from dloop.drafters.gap import READINGS
from dloop.errors import UserError
from dloop.fast import decode as fast_decode
from dloop.fast import drafter as fast_drafter
from dloop.fast.drafter import DrafterSession, FastBlockDrafter
from dloop.fast.drafter_memory import FastBlockMemory
from dloop.fast.graphs import Forward, Graphs, Parts, cut
from dloop.fast.lease import Leased, lease
from dloop.fast.ops import supports
from dloop.fast.rows import Layout, blank
from dloop.fast.target import FastTarget
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS
from dloop.kernels.shapes import Heads
from dloop.load import drafter_like, on_engine
from dloop.sampling import sample_seed
from dloop.settings import Settings, sampling_of
from dloop.testing import KINDS, good_drafter, taught_drafter, tiny_drafter, tiny_target
from dloop.types import Features, Rows, Sampling, StageRequest

TAPS = (-1, 0, 2, 3)
PROMPTS = {0: [1, 2, 3, 4, 5], 1: [7, 8, 9]}
TREE = Rows(  # slot 0 branches, slot 1 is a chain
    token=[11, 12, 13, 14, 15, 16, 21, 22],
    slot=[0] * 6 + [1] * 2,
    position=[5, 6, 6, 7, 7, 8, 3, 4],
    parent=[-1, 0, 0, 1, 2, 4, -1, 6],
)
AFTER = Rows(token=[29, 30, 31, 32], slot=[1] * 2 + [0] * 2, position=[4, 5, 8, 9], parent=[-1, 0, -1, 2])


def answers(session) -> list[torch.Tensor]:
    """Logits and features of two prompts, of a packed tree and chain, and of what follows a committed branch."""
    seen = [session.prefill(slot, prompt) for slot, prompt in PROMPTS.items()]
    seen.append(session.verify(TREE))
    session.commit(0, [0, 2, 4])
    session.commit(1, [0])
    seen.append(session.verify(AFTER))
    return [part.clone() for s in seen for part in (s.logits, s.features.taps, s.features.last)]


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_the_static_target_computes_what_its_twin_does(kind):
    twin = tiny_target(kind)
    expected = answers(twin.open(TAPS))
    fast = FastTarget.of(twin).open(TAPS, slots=1, context=16)
    assert largest_difference(answers(fast), expected) < 2e-5
    assert largest_difference(answers(twin.open(TAPS)), expected) == 0, "fusing changed the twin"


def test_the_comparison_sees_a_row_that_sees_a_sibling():
    twin, fast = tiny_target(), FastTarget.of(tiny_target()).open(TAPS)
    chain = Rows(**{**vars(TREE), "parent": [-1, 0, 1, 2, 3, 4, -1, 6]})
    other = twin.open(TAPS)
    for slot, prompt in PROMPTS.items():
        other.prefill(slot, prompt), fast.prefill(slot, prompt)
    assert (other.verify(TREE).logits - fast.verify(chain).logits).abs().max() > 1e-2


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_static_drafters_draft_what_their_twin_does(family, reading):
    target = tiny_target()
    twin = tiny_drafter(target, family=family, gap_rows=reading)
    slow, fast = twin.open(), FastBlockDrafter.of(twin).open(slots=1, context=16)
    generator = torch.Generator().manual_seed(0)
    position = {0: 0, 1: 0}
    for lengths in ((7, 3), (3, 3), (1, 4)):
        for slot, n in enumerate(lengths):
            taps = torch.randn(n, 64, generator=generator)
            for session in (slow, fast):
                session.extend(slot, position[slot], [1] * n, Features(taps=taps, last=taps[:, :32]))
            taps.fill_(9.0)  # the memory they stand in is the target's, which goes on
            position[slot] += n
        for index in range(4):
            slots = (0, 1) if index < 3 else (1,)  # ragged stages
            requests = [StageRequest(slot=slot, anchor=5 + index + slot, index=index) for slot in slots]
            for expected, drafted in zip(slow.draft(requests), fast.draft(requests), strict=True):
                assert drafted.tokens == expected.tokens
                assert drafted.logp == pytest.approx(expected.logp, abs=1e-4)
                assert drafted.score == pytest.approx(expected.score, abs=1e-4)


def kept(seen: list[int], value: object) -> object:
    """The value, counted unless it is None."""
    seen.extend([] if value is None else [1])
    return value


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_a_gap_that_is_stored_ahead_is_the_gap(family, reading, monkeypatch):
    """Whether the further stage comes or not, and where the store grows for it."""
    monkeypatch.setattr(FastBlockMemory, "overlaps", True)
    fills, fill = list[int](), FastBlockMemory.fill
    ready, made = list[int](), DrafterSession._stage_made_ready
    monkeypatch.setattr(DrafterSession, "_stage_made_ready", lambda *given: kept(ready, made(*given)))
    monkeypatch.setattr(FastBlockMemory, "fill", lambda self, gaps: fills.append(len(gaps.runs)) or fill(self, gaps))
    twin = tiny_drafter(tiny_target(), family=family, gap_rows=reading)
    slow, fast = twin.open(), FastBlockDrafter.of(twin).open(slots=1, context=16)
    generator, position, stages = torch.Generator().manual_seed(0), 0, 0
    for count, most in ((7, 3), (2, 1), (4, 4), (220, 2), (5, 3)):
        taps = torch.randn(count, 64, generator=generator)
        for session in (slow, fast):
            session.extend(0, position, [1] * count, Features(taps=taps, last=taps[:, :32]))
        position += count
        for index in range(most):
            law = Sampling(temperature=0.7, seed=1) if (count, index) == (5, 1) else None
            request = StageRequest(slot=0, anchor=5 + index, index=index, sampling=law)
            expected, drafted = slow.draft([request])[0], fast.draft([request])[0]
            assert drafted.tokens == expected.tokens
            assert drafted.logp == pytest.approx(expected.logp, abs=1e-4)
        stages += most
    assert len(fills) == stages
    assert len(ready) == 6, "one further stage had to wait until the store had grown, another had a law of its own"


@pytest.mark.parametrize("count", [9, 30, 100])
def test_a_slot_taken_over_keeps_nothing_of_what_waited_to_be_read(monkeypatch, count):
    """The last rows of a text that has ended are read by no stage of its own; rows of other slots wait beside them."""
    monkeypatch.setattr(fast_drafter, "MOST_GRAPHED", 64)
    monkeypatch.setattr(fast_drafter, "MOST_WAITING", 16)
    drafter = FastBlockDrafter.of(tiny_drafter(tiny_target()))
    session, fresh = drafter.open(), drafter.open()
    generator = torch.Generator().manual_seed(0)

    def extend(where, slot, position, taps):
        where.extend(slot, position, [1] * len(taps), Features(taps=taps, last=taps[:, :32]))

    first, rest, other, text = (torch.randn(n, 64, generator=generator) for n in (4, 3, 5, count))
    extend(session, 0, 0, first)
    extend(session, 1, 0, other)
    extend(session, 0, 4, rest)
    extend(session, 0, 0, text)
    extend(fresh, 0, 0, text)
    extend(fresh, 1, 0, other)
    requests = [StageRequest(slot=slot, anchor=5, index=0) for slot in (0, 1)]
    for expected, drafted in zip(fresh.draft(requests), session.draft(requests), strict=True):
        assert drafted.tokens == expected.tokens
        assert drafted.logp == pytest.approx(expected.logp, abs=1e-5)


@pytest.fixture(scope="module", params=BLOCK_FAMILIES)
def family(request):
    """A target on the fast path, its texts from the twin, and a drafter that is mostly right on them."""
    twin = tiny_target("qwen2", num_layers=3)
    prompts = [[5, 9, 11, 60], [3, 3, 8], [70]]
    texts = [generate(twin, None, prompt, max_new_tokens=32).tokens for prompt in prompts]
    drafter = taught_drafter(twin, [p + t for p, t in zip(prompts, texts, strict=True)], family=request.param)
    return twin, FastTarget.of(twin), FastBlockDrafter.of(drafter), prompts, texts


@pytest.mark.parametrize("gate", [NEVER_OPENS, -0.5, ALWAYS_OPEN])
def test_the_fast_path_gives_the_target_s_text(family, gate):
    _, target, drafter, prompts, texts = family
    for (prompt, text), cap in itertools.product(zip(prompts, texts, strict=True), (1, 2, 12)):
        out = generate(target, drafter, prompt, max_new_tokens=32, loop_gate=gate, max_stages=cap)
        assert out.tokens == text
    assert out.acceptance_length > 1.5, "the drafter should be right at times"


@pytest.mark.parametrize("gate", [1.0, -0.5, "auto"])
def test_a_text_alone_is_read_while_the_target_still_verifies(family, gate, monkeypatch):
    """Rounds are the same as without: what was read of tokens that were not accepted is no part of the context."""
    _, target, drafter, prompts, texts = family
    settings = dict(max_new_tokens=32, loop_gate=gate)
    before = [generate(target, drafter, prompt, **settings) for prompt in prompts]
    monkeypatch.setattr(FastBlockMemory, "overlaps", True)
    reads, read = list[int](), FastBlockMemory.read
    monkeypatch.setattr(FastBlockMemory, "read", lambda self, rows: reads.append(len(rows.runs)) or read(self, rows))
    for prompt, text, other in zip(prompts, texts, before, strict=True):
        reads.clear()
        found = generate(target, drafter, prompt, **settings)
        assert found.tokens == text and len(reads) == 1 + len(found.rounds), "once for the prompt, once a round"
        if gate != "auto":
            assert [each.path for each in found.rounds] == [each.path for each in other.rounds]
    together = {
        each.index: each.tokens for each in generate_many(target, drafter, prompts, Settings(**settings), live=3)
    }
    assert [together[index] for index in range(len(texts))] == texts


@pytest.mark.parametrize("verify", ["match", "reject"])
def test_the_fast_path_draws_what_the_twin_draws(family, verify):
    """Match: the text of plain sampling. Reject: the very rounds of the twin, noise and all."""
    twin, target, drafter, prompts, _ = family
    slow = tiny_drafter(twin)
    slow = type(slow)(name="twin", family=drafter.family, model=drafter.model, vocabulary=drafter.vocabulary)
    for seed, prompt in itertools.product((0, 1), prompts):
        options = dict(max_new_tokens=24, temperature=0.8, seed=seed, loop_gate=-2.0, verify=verify)
        fast = generate(target, drafter, prompt, **options)
        assert fast.tokens == generate(twin, slow, prompt, **options).tokens
        if verify == "match":
            assert fast.tokens == generate(twin, None, prompt, **options).tokens


def test_sessions_that_are_open_do_not_share_a_store_and_ended_ones_are_taken_over(family):
    _, target, drafter, prompts, texts = family
    streams = [dloop.stream(target, drafter, prompt, max_new_tokens=32, loop_gate=-0.5) for prompt in prompts]
    found = [[stream.first] for stream in streams]
    for rounds in itertools.zip_longest(*streams):
        for text, now in zip(found, rounds, strict=True):
            text += now.emitted if now else []
    assert found == texts
    del streams, rounds, now
    count = len(target.memories), len(drafter.memories)
    generate(target, drafter, prompts[0], max_new_tokens=32)
    assert (len(target.memories), len(drafter.memories)) == count


def test_a_store_that_grows_keeps_what_it_holds(family, monkeypatch):
    _, target, drafter, prompts, texts = family
    monkeypatch.setattr("dloop.fast.stack.GRAIN", 4)
    own, draft = FastTarget.of(target), FastBlockDrafter.of(drafter)
    own.open(drafter.taps, 1, 4), draft.open(1, 4)
    assert generate(own, draft, prompts[0], max_new_tokens=32, loop_gate=-0.5).tokens == texts[0]
    (memory,) = own.memories
    assert memory.store.capacity == 64


MANY = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11, 12, 13], [14, 15]]


@pytest.fixture(scope="module", params=[0.0, 0.9])
def alone(request) -> tuple[Settings, list[list[int]]]:
    """How many prompts are decoded, and the texts each gives by itself."""
    twin, options = tiny_target("qwen2", num_layers=3), dict(max_new_tokens=20, temperature=request.param)
    free = [generate(twin, None, p, seed=sample_seed(3, i), **options).tokens for i, p in enumerate(MANY)]
    options["stop_token_ids"] = [free[1][7], free[3][11]]
    texts = [generate(twin, None, p, seed=sample_seed(3, i), **options).tokens for i, p in enumerate(MANY)]
    return Settings(seed=3, verify="match", loop_gate=-2.0, **options), texts


def compare_many(target, drafter, live: int, alone: tuple[Settings, list[list[int]]]) -> None:
    settings, texts = alone
    found = {text.index: text for text in generate_many(target, drafter, MANY, settings, live)}
    assert [found[i].tokens for i in range(len(MANY))] == texts
    assert [found[i].seed for i in range(len(MANY))] == [sample_seed(3, i) for i in range(len(MANY))]
    assert any(text.finish_reason == "stop" for text in found.values())


@pytest.mark.parametrize("live", [1, 2, 5])
def test_many_prompts_give_the_texts_they_give_alone(family, alone, live):
    _, target, drafter, _, _ = family
    compare_many(target, drafter, live, alone)


@pytest.mark.parametrize("live", [1, 2, 5])
@pytest.mark.parametrize("engine", ["twin", "fast"])
def test_many_prompts_without_a_drafter_give_the_texts_they_give_alone(alone, live, engine):
    twin = tiny_target("qwen2", num_layers=3)
    compare_many(twin if engine == "twin" else FastTarget.of(twin), None, live, alone)


def test_a_fault_in_one_of_many_prompts_names_it():
    with pytest.raises(UserError, match="prompt token 97 is outside"):
        list(generate_many(tiny_target(), None, [[1], [97]], Settings(max_new_tokens=4), live=1))
    with pytest.raises(UserError, match="live=0"):
        list(generate_many(tiny_target(), None, [[1]], Settings(), live=0))


def test_what_the_fast_path_does_not_compute_stays_on_the_twin(caplog):
    twin = tiny_target("llama")
    attention = twin.model.model.layers[1].self_attn
    attention.o_proj.bias = torch.nn.Parameter(torch.zeros(32))
    with pytest.raises(UserError, match="biases on the output"):
        on_engine(twin, "fast")
    with caplog.at_level(logging.WARNING, "dloop"):
        assert on_engine(twin, "auto") is twin
    assert "biases on the output" in caplog.text
    drafter = tiny_drafter(twin)
    assert drafter_like(twin, drafter) is drafter
    assert on_engine(tiny_target(), "twin").engine == "twin"
    assert on_engine(tiny_target(), "auto").engine == "fast"


def test_another_activation_stays_on_the_twin():
    twin = tiny_target("llama")
    twin.model.config.hidden_act = "gelu"
    with pytest.raises(UserError, match="hidden_act='gelu' is not on the fast path"):
        on_engine(twin, "fast")


@pytest.mark.parametrize(
    ("queries", "keys", "dim", "offered"),
    [
        (32, 8, 128, True),
        (64, 1, 64, True),
        (66, 1, 64, False),
        (32, 8, 80, False),
        (4, 2, 8, False),
        (16, 4, 256, False),
    ],
)
def test_the_kernels_are_offered_where_a_group_of_heads_fits(monkeypatch, queries, keys, dim, offered):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (9, 0))
    heads = Heads(queries=queries, keys=keys, dim=dim, eps=1e-6, frequency=torch.ones(dim // 2), scaling=1.0)
    assert supports(torch.bfloat16, torch.device("cuda"), heads) == offered
    assert not supports(torch.float32, torch.device("cuda"), heads)
    assert not supports(torch.bfloat16, torch.device("cpu"), heads)


def test_exact_is_refused_where_it_is_not_offered():
    target = FastTarget.of(tiny_target())
    with pytest.raises(UserError, match="exact=True needs the fast path's kernels"):
        generate(target, None, [1, 2], max_new_tokens=2, exact=True)
    assert not generate(target, None, [1, 2], max_new_tokens=2).exact


# Graphs and memories, without a GPU


class Replayed:
    """Stands for a captured function: replaying it computes anew."""

    def __init__(self, forward, made):
        self.fn = forward.fn
        made.append(self)

    def replay(self, blocks):
        return self.fn(torch.from_numpy(np.concatenate(blocks)))


def test_of_too_many_graphs_the_one_used_least_recently_is_captured_anew(monkeypatch):
    monkeypatch.setattr("dloop.fast.graphs.MOST_GRAPHS", 2)
    graphs, made = Graphs(torch.device("cpu"), enabled=False), []
    graphs.enabled = True
    monkeypatch.setattr(graphs, "_capture", lambda forwards: Replayed(forwards[0], made))
    layout = Layout(rows=2, tile_rows=16, tree=False)

    def asked(name: str, number: int) -> int:
        """How many were captured once this one has been asked for."""
        block = np.full_like(blank(layout)[0], number)
        assert graphs(name, Forward(layout, block, lambda given: (name, int(given[0])))) == (name, number)
        return len(made)

    assert [asked(name, number) for number, name in enumerate("abab")] == [1, 2, 2, 2]
    assert [asked(name, number) for number, name in enumerate("acab")] == [2, 3, 3, 4], "b was the one to go"
    assert asked("a", 9) == 4 and asked("c", 9) == 5


@dataclass(eq=False)
class Using:
    """A session on a memory."""

    memory: Leased


def test_sessions_of_several_threads_lease_memories_of_their_own():
    pool, together = [], threading.Barrier(8)

    def fits(_memory):
        time.sleep(0.002)  # long enough for all to look at the same one
        return True

    def work(_):
        together.wait()
        return lease(pool, fits, Leased, Using)

    for _ in range(3):
        with ThreadPoolExecutor(8) as threads:
            sessions = list(threads.map(work, range(8)))
        assert len({id(session.memory) for session in sessions}) == len(pool) == 8
        del sessions


# The kernels, run as Python by Triton's interpreter where there is no GPU: slowly, so two layers, which all are alike.

ENDS = (-1, 0, 1)  # what to tap of two layers


@pytest.mark.parametrize("count", [1, 1024, 2500])
def test_integers_of_the_host_are_fetched_by_a_kernel(count):
    fetch = pytest.importorskip("dloop.kernels.fetch")
    host, block = torch.arange(1, count + 1, dtype=torch.int32), torch.zeros(count, dtype=torch.int32)
    if torch.cuda.is_available():
        host, block = host.pin_memory(), block.cuda()
    fetch.launch(host, block, pdl=torch.cuda.is_available())
    assert block.tolist() == host.tolist()


@pytest.fixture
def kernels() -> FastTarget:
    """A target whose sessions go through the kernels without graphs."""
    pytest.importorskip("triton")
    target = FastTarget.of(tiny_target("qwen3", num_layers=2, vocab_size=33))
    with_kernels(target.open(ENDS, 1, 16))
    return target


def with_kernels(session):
    session.memory.kernels = True
    return session


@pytest.mark.parametrize("kind", ["qwen3", "qwen2"])
def test_the_target_s_kernels_are_their_plain_twins(kind):
    pytest.importorskip("triton")
    twin = tiny_target(kind, vocab_size=33, num_layers=2)
    fast = with_kernels(FastTarget.of(twin).open(ENDS, slots=1, context=16))
    assert largest_difference(answers(fast), answers(twin.open(ENDS))) < 2e-5


def test_rows_that_fill_a_bucket_are_written_nowhere(kernels):
    session = kernels.open(ENDS)
    assert session.memory.kernels, "the fixture's memory is taken over"
    answers(session)
    stored = session.memory.store.keys.abs().sum(dim=(0, 2, 4)) > 0  # [slots, capacity]
    assert stored.sum(1).tolist() == [11, 6]  # prompt 5 + 6 rows; after the commit two go where two stood


def test_a_row_s_logits_do_not_depend_on_the_other_rows(kernels):
    """Bit for bit, here as on a GPU: alone, packed, in a tree, in another order, in another slot."""
    session = kernels.open(ENDS)
    for slot, prompt in PROMPTS.items():
        session.prefill(slot, prompt)
    packed = session.verify(TREE).logits.clone()
    chain = Rows(token=[11, 13, 15, 16], slot=[0] * 4, position=[5, 6, 7, 8], parent=[-1, 0, 1, 2])
    assert torch.equal(session.verify(chain).logits, packed[[0, 2, 4, 5]])
    assert torch.equal(session.verify(Rows(token=[21], slot=[1], position=[3], parent=[-1])).logits, packed[[6]])
    session.prefill(3, PROMPTS[0])
    session.verify(Rows(token=[30, 31], slot=[3] * 2, position=[5, 6], parent=[-1, 0]))
    moved = Rows(token=[11, 13], slot=[3] * 2, position=[5, 6], parent=[-1, 0])
    assert torch.equal(session.verify(moved).logits, packed[[0, 2]])


def test_the_drafter_s_kernels_are_their_plain_twins():
    pytest.importorskip("triton")
    target = tiny_target(vocab_size=33)
    twin = tiny_drafter(target, stage_len=7)
    slow, fast = twin.open(), with_kernels(FastBlockDrafter.of(twin).open(slots=1, context=16))
    taps = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for slot in (0, 1):
        for session in (slow, fast):
            session.extend(slot, 0, [1] * 9, Features(taps=taps, last=taps[:, :32]))
    for index in range(3):
        requests = [StageRequest(slot=slot, anchor=5 + slot, index=index) for slot in (0, 1)]
        for expected, drafted in zip(slow.draft(requests), fast.draft(requests), strict=True):
            assert drafted.tokens == expected.tokens
            assert drafted.logp == pytest.approx(expected.logp, abs=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_chosen_on_the_device_are_those_of_plain_decoding(monkeypatch, temperature):
    pytest.importorskip("triton")
    monkeypatch.setattr(fast_decode, "EVERY", 4)
    twin = tiny_target("llama", num_layers=1, vocab_size=33)
    prompts = [[1, 2, 3], [4, 5], [6]]
    options = dict(max_new_tokens=6, temperature=temperature, stop_token_ids=[5])
    alone = [generate(twin, None, p, seed=sample_seed(3, i), **options).tokens for i, p in enumerate(prompts)]
    target = FastTarget.of(twin)
    with_kernels(target.open((), 16))
    settings = Settings(seed=3, **options)
    found = {t.index: t.tokens for t in on_device(target, enumerate(prompts), settings, sampling_of(settings), live=2)}
    assert [found[i] for i in range(3)] == alone
    assert len(target.memories) == 1, "the memory with kernels was not used"


def test_a_good_drafter_loops_on_the_fast_path():
    twin = tiny_target(num_layers=3)
    text = generate(twin, None, [5, 9, 11], max_new_tokens=40).tokens
    drafter = FastBlockDrafter.of(good_drafter(twin, [[5, 9, 11, *text]]))
    out = generate(FastTarget.of(twin), drafter, [5, 9, 11], max_new_tokens=40, loop_gate=ALWAYS_OPEN, max_stages=4)
    assert out.tokens == text
    assert max(r.accepted for r in out.rounds) > 4, "no later stage was accepted"


def test_a_function_is_captured_in_the_parts_it_is_cut_into(monkeypatch):
    """Cuts of other threads and of no capture at all are none."""
    made, open_now, done = [], [], []

    class Part:
        """Stands for a graph: what was done between its begin and its end is done again."""

        def __init__(self):
            made.append(self)
            self.work = []

        def replay(self):
            done.extend(self.work)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Part)

    @contextmanager
    def begin(part):
        assert not open_now
        open_now.append(part)
        yield
        open_now.remove(part)

    def function() -> str:
        for number in range(4):
            open_now[0].work.append(number)
            if number in (0, 2):
                cut()
                threading.Thread(target=cut).start()
        return "given"

    cut()
    parts = Parts(begin)
    assert parts.capture(function) == "given" and not open_now
    cut()
    assert [part.work for part in made] == [[0], [1, 2], [3]]
    parts.replay()
    parts.replay()
    assert done == [0, 1, 2, 3] * 2
