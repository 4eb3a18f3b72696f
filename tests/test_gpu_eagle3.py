"""EAGLE-3 on a GPU: bfloat16 texts beside the fast target, and training steps of the published size."""

import pytest
import torch
from test_gpu import target  # noqa: F401  a fixture

import dloop
from dloop.batch import generate_many
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.draft_vocab import maps_of
from dloop.drafters.eagle3 import Eagle3, Eagle3Config
from dloop.drafters.families import loaded
from dloop.fast.target import FastTarget
from dloop.settings import Settings
from dloop.train.batch import TrainBatch
from dloop.train.cache import features_of
from dloop.train.objective import ObjectiveSettings
from dloop.train.optim import Optimizer
from dloop.train.trainer import Step
from dloop.train.unroll import UnrollObjective

pytestmark = pytest.mark.gpu
HEAD = 32_000


def eagle3(target: FastTarget) -> ChainDrafter:  # noqa: F811
    """A drafter of the published 4B shape with random weights."""
    config = Eagle3Config(
        hidden_size=2560,
        intermediate_size=9728,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        vocab_size=target.vocab_size,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_positions=40_960,
        attention_bias=False,
        target_layer_ids=(0, 1, 2),
        num_target_layers=target.num_layers,
        target_hidden_size=2560,
        draft_vocab_size=HEAD,
    )
    torch.manual_seed(2)
    model = Eagle3(config)
    model.load_state_dict(maps_of(torch.arange(HEAD) * 4, target.vocab_size), strict=False)
    return loaded("4b", model.cuda(), target.vocabulary)


@pytest.mark.parametrize("gate", [1.0, float("-inf")])
def test_texts_beside_the_fast_target_are_plain_decoding_s(target, gate):  # noqa: F811
    drafter = eagle3(target)
    drafter.model.bfloat16().requires_grad_(False)
    prompts = [list(range(start, start + 10 + start % 7)) for start in range(100, 108)]
    alone = [dloop.generate(target, None, prompt, 48, stop_token_ids=()).tokens for prompt in prompts]
    for prompt, text in zip(prompts, alone, strict=True):
        assert dloop.generate(target, drafter, prompt, 48, gate, max_stages=3, stop_token_ids=()).tokens == text
    settings = Settings(max_new_tokens=48, loop_gate=gate, max_stages=3, stop_token_ids=())
    found = {text.index: text.tokens for text in generate_many(target, drafter, prompts, settings, live=4)}
    assert [found[index] for index in range(len(prompts))] == alone


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
