"""EAGLE-3 on a GPU: bfloat16 texts beside the fast target, and training steps of the published size."""

from dataclasses import replace

import pytest
import torch
from test_gpu import target  # noqa: F401  a fixture

import dloop
from dloop.batch import generate_many
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.draft_vocab import maps_of
from dloop.drafters.eagle3 import Eagle3, Eagle3Config, published_taps
from dloop.drafters.families import loaded
from dloop.fast.chain import FastChainDrafter
from dloop.fast.target import FastTarget
from dloop.sampling import sample_seed
from dloop.settings import Settings
from dloop.targets.hf import HFTarget
from dloop.testing import teach
from dloop.train.batch import TrainBatch
from dloop.train.cache import features_of
from dloop.train.objective import ObjectiveSettings
from dloop.train.optim import Optimizer
from dloop.train.trainer import Step
from dloop.train.unroll import UnrollObjective
from dloop.trees.shape import TreeShape
from dloop.types import Features, Sampling, StageRequest

pytestmark = pytest.mark.gpu
HEAD = 32_000
WAYS = {
    "greedy": (None, None),
    "drawn": (Sampling(temperature=0.8, top_k=50, seed=1), None),
    "trees": (None, TreeShape(budget=59, stage_budget=48)),
}


def eagle3(target: FastTarget) -> ChainDrafter:  # noqa: F811
    """A drafter of the published 4B shape with random weights."""
    torch.manual_seed(2)
    kept = torch.arange(HEAD) * 4
    return drafter_for(target, kept, intermediate_size=9728, taps=(0, 1, 2))


def drafter_for(
    target: HFTarget,  # noqa: F811
    kept: torch.Tensor,
    *,
    intermediate_size: int,
    taps: tuple[int, int, int],
) -> ChainDrafter:
    """A random float32 drafter with heads like its target's, for these tokens."""
    config = target.config
    shape = Eagle3Config(
        hidden_size=config.hidden_size,
        intermediate_size=intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=target.rope_theta,
        max_positions=target.context,
        attention_bias=False,
        target_layer_ids=taps,
        num_target_layers=target.num_layers,
        target_hidden_size=config.hidden_size,
        draft_vocab_size=len(kept),
    )
    with torch.device(target.device):
        model = Eagle3(shape)
    model.load_state_dict(maps_of(kept, target.vocab_size), strict=False)
    return loaded("random", model, target.vocabulary)


def taught_pair(device: str):
    """(the fast target, a fast drafter that learned its texts, the texts): bfloat16 on a GPU, else float32."""
    dtype = "bfloat16" if device == "cuda" else "float32"
    fast = dloop.load_target("smollm2", dtype=dtype, device=device, engine="fast")
    texts = [dloop.generate(fast, None, prompt, TEXT, stop_token_ids=()).tokens for prompt in PROMPTS]
    teacher = dloop.load_target("smollm2", dtype="float32", device=device, engine="twin")
    whole = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    kept = torch.tensor(sorted({token for text in whole for token in text} | set(range(1000))))
    torch.manual_seed(2)
    drafter = drafter_for(teacher, kept, intermediate_size=1536, taps=published_taps(teacher.num_layers)).at_depth(4)
    teach(drafter, teacher, whole, steps=40, rate=2e-3)
    drafter.model.to(fast.dtype)
    own = replace(drafter, vocabulary=fast.vocabulary)
    return fast, FastChainDrafter.of(own), texts


def extended(session, lengths: list[int], width: int):
    """A session whose slots have read random features of so many positions; each slot's are its own."""
    for slot, length in enumerate(lengths):
        generator = torch.Generator("cuda").manual_seed(slot)
        taps = torch.randn(length, width, generator=generator, device="cuda", dtype=torch.bfloat16)
        session.extend(slot, 0, [(slot + 31 * i) % HEAD for i in range(length)], Features(taps=taps, last=taps[:, :8]))
    return session


@pytest.mark.parametrize("way", WAYS)
def test_a_stage_packed_is_the_stage_alone_bit_for_bit(target, way):  # noqa: F811
    """Prompts shorter and longer than a forward takes, slots in any order; buckets of other sizes than alone."""
    law, trees = WAYS[way]
    twin = eagle3(target)
    twin.model.bfloat16().requires_grad_(False)
    drafter, lengths = FastChainDrafter.of(twin).with_trees(trees), [5, 700, 130, 17, 1, 1100, *range(2, 16)]
    packed = extended(drafter.open(slots=32), lengths, drafter.stack.fc.shape[1])
    order = [(7 * i) % len(lengths) for i in range(len(lengths))]
    stages = {
        index: dict(zip(order, packed.draft([request(slot, index, law) for slot in order]), strict=True))
        for index in range(3)
    }
    assert packed.memory.kernels
    alone = extended(drafter.open(slots=32), lengths, drafter.stack.fc.shape[1])
    for slot in range(len(lengths)):
        for index in range(3):
            (stage,) = alone.draft([request(slot, index, law)])
            found = stages[index][slot]
            assert replace(stage, probs=None) == replace(found, probs=None), (slot, index)
            assert law is None or torch.equal(stage.probs, found.probs)


def request(slot: int, index: int, law: Sampling | None) -> StageRequest:
    return StageRequest(slot=slot, anchor=100 + 7 * slot + index, index=index, sampling=law)


def test_a_stage_is_as_many_stages_of_one_token_bit_for_bit(target):  # noqa: F811
    """In one graph rows move on by themselves; laid out anew for each token they give the same, also across pieces."""
    twin = eagle3(target)
    twin.model.bfloat16().requires_grad_(False)
    drafter, lengths = FastChainDrafter.of(twin), [5, 124, 126, 380, 508, 1020]
    whole, single = drafter.open(slots=8), drafter.at_depth(1).open(slots=8)
    for session in (whole, single):
        extended(session, lengths, drafter.stack.fc.shape[1])
    slots = range(len(lengths))
    stages = whole.draft([StageRequest(slot=slot, anchor=9, index=0) for slot in slots])
    anchors = [9 for _ in slots]
    for index in range(drafter.stage_len):
        found = single.draft([StageRequest(slot=slot, anchor=anchors[slot], index=index) for slot in slots])
        anchors = [stage.tokens[0] for stage in found]
        expected = [(stage.tokens[index], stage.logp[index]) for stage in stages]
        assert [(stage.tokens[0], stage.logp[0]) for stage in found] == expected, index


def test_the_kernels_draft_what_the_twin_does(target):  # noqa: F811
    """In bfloat16 tokens may differ where two are as likely; log-probabilities of the same row hardly do."""
    twin = eagle3(target)
    twin.model.bfloat16().requires_grad_(False)
    slow, fast = twin.open(), FastChainDrafter.of(twin).open()
    for session in (slow, fast):
        extended(session, [200], twin.model.fc.in_features)
    for index in range(3):
        (expected,), (found,) = (session.draft([request(0, index, None)]) for session in (slow, fast))
        assert found.logp[0] == pytest.approx(expected.logp[0], abs=0.1)
        if found.tokens != expected.tokens:
            break  # from here on they read other rows


@pytest.mark.parametrize("gate", [1.0, float("-inf")])
def test_texts_beside_the_fast_target_are_plain_decoding_s(target, gate):  # noqa: F811
    """Of the published size, where next to nothing is accepted; the offline target below accepts much."""
    twin = eagle3(target)
    twin.model.bfloat16().requires_grad_(False)
    drafter, prompts = FastChainDrafter.of(twin), [list(range(100, 110)), list(range(105, 116))]
    alone = [dloop.generate(target, None, prompt, 12, stop_token_ids=()).tokens for prompt in prompts]
    for shape in ({"tree_budget": 0}, {}):
        settings = Settings(max_new_tokens=12, loop_gate=gate, max_stages=2, stop_token_ids=(), **shape)
        found = {text.index: text.tokens for text in generate_many(target, drafter, prompts, settings, live=2)}
        assert [found[index] for index in range(len(prompts))] == alone


PROMPTS = [list(range(start, start + 10 + start % 7)) for start in (100, 105, 9000)]
TEXT = 48


@pytest.fixture(scope="module")
def taught():
    """The offline target on the fast path in bfloat16, and an EAGLE-3 drafter that learned its texts."""
    return taught_pair("cuda")


@pytest.mark.parametrize("trees", [{"tree_budget": 0}, {}], ids=["chains", "trees"])
@pytest.mark.parametrize("gate", [1.0, -2.0, float("-inf")])
def test_bfloat16_texts_are_plain_decoding_s(taught, gate, trees):
    fast, drafter, texts = taught
    assert isinstance(drafter, FastChainDrafter) and (fast.is_exact or fast.dtype == torch.float32)
    accepted = []
    for prompt, text in zip(PROMPTS, texts, strict=True):
        out = dloop.generate(fast, drafter, prompt, TEXT, gate, max_stages=3, stop_token_ids=(), **trees)
        assert out.tokens == text
        accepted += [r.accepted for r in out.rounds]
    assert max(accepted) > 2, "the drafter should be right at times"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_of_many_sequences_are_those_they_are_alone(taught, temperature):
    fast, drafter, _ = taught
    words = dict(max_new_tokens=24, temperature=temperature, stop_token_ids=())
    alone = [dloop.generate(fast, None, p, seed=sample_seed(1, i), **words).tokens for i, p in enumerate(PROMPTS)]
    for shape in ({"tree_budget": 0, "verify": "match"}, {"verify": "match"}):
        settings = Settings(seed=1, loop_gate=-2.0, max_stages=3, **shape, **words)
        found = {text.index: text.tokens for text in generate_many(fast, drafter, PROMPTS, settings, live=2)}
        assert [found[index] for index in range(len(PROMPTS))] == alone


def test_rejection_sampling_runs_on_the_device_and_repeats_itself(taught):
    fast, drafter, _ = taught
    words = dict(temperature=0.8, seed=3, loop_gate=-2.0, max_stages=3, tree_budget=0, verify="reject")
    first, again = (dloop.generate(fast, drafter, PROMPTS[0], 24, stop_token_ids=(), **words) for _ in range(2))
    assert first.tokens == again.tokens and len(first.tokens) == 24


@pytest.mark.parametrize("length", [7, 21])
def test_steps_of_the_published_size_learn_in_bounded_memory(target, length, capsys):  # noqa: F811
    drafter = eagle3(target)
    objective = UnrollObjective(drafter.model.requires_grad_(True), drafter.vocabulary, ObjectiveSettings())
    optimizer = Optimizer(drafter.model.parameters(), 0.5)
    optimizer.set_rate(3e-4)
    step = Step(objective, lambda batch: features_of(target, drafter.taps, batch), optimizer)
    tokens = torch.randint(3, target.vocab_size, (1, 4096), device="cuda")
    kept = torch.ones_like(tokens, dtype=torch.bool)
    batch = TrainBatch(tokens, kept, torch.tensor([4096], device="cuda"), torch.tensor([0], device="cuda"))
    torch.cuda.reset_peak_memory_stats()
    losses, started, ended = [], torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for number in range(6):
        if number == 2:
            started.record()
        losses.append(float(step([batch], length)[0]))
    ended.record()
    torch.cuda.synchronize()
    with capsys.disabled():
        peak = torch.cuda.max_memory_allocated() / 2**30
        print(
            f"\nlength {length}: {started.elapsed_time(ended) / 4:.0f} ms a step, peak {peak:.1f} GiB, losses {losses}"
        )
    assert losses[-1] < losses[0] and peak < 60
