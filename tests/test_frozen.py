"""The frozen target's layers called directly give what the model's own forward gives, bit for bit."""

from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch

from dloop.targets.frozen import run_layers, runs_directly
from dloop.targets.hf import HFTarget, run_backbone
from dloop.testing import KINDS, tiny_target
from dloop.train.batch import TokenFile, TrainBatch
from dloop.train.cache import cache_features, features_of

TAPS = [(0, 2), (3,), (-1, 1), (2, 0), (), (-1,)]


@pytest.fixture(params=KINDS)
def target(request) -> HFTarget:
    return tiny_target(request.param, seed=5)


def padded(target: HFTarget, pad: int = 0) -> tuple[torch.Tensor, list[int]]:
    """Three right-padded sequences and their lengths."""
    lengths = [40, 17, 3]
    tokens = torch.randint(3, target.vocab_size, (3, 40), generator=torch.Generator().manual_seed(2))
    for row, length in enumerate(lengths):
        tokens[row, length:] = pad
    return tokens, lengths


def hooked(target: HFTarget, tokens: torch.Tensor, taps: tuple[int, ...], positions: torch.Tensor | None = None):
    with torch.no_grad():
        return run_backbone(target, {"input_ids": tokens, "position_ids": positions, "use_cache": False}, taps)


@pytest.mark.parametrize("taps", TAPS, ids=str)
def test_layers_called_directly_are_the_models_forward(target, taps):
    tokens, _ = padded(target)
    assert runs_directly(target.config)
    taps_there, last_there = hooked(target, tokens, taps)
    found = target.features(tokens, taps)
    assert torch.equal(found.taps, taps_there) and torch.equal(found.last, last_there)
    assert not found.last.requires_grad


def test_real_rows_do_not_depend_on_the_padding(target):
    tokens, lengths = padded(target)
    others, _ = padded(target, pad=9)
    one, other = target.features(tokens, (0, 3)), target.features(others, (0, 3))
    for row, length in enumerate(lengths):
        assert torch.equal(one.taps[row, :length], other.taps[row, :length])
        assert torch.equal(one.last[row, :length], other.last[row, :length])
    assert not torch.equal(one.taps, other.taps)


def test_nothing_above_the_last_tapped_layer_runs_for_nothing(target):
    tokens, _ = padded(target)
    ran: list[int] = []
    for index, layer in enumerate(target.backbone.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    target.backbone.norm.register_forward_hook(lambda *_: ran.append(99))
    for taps, needed in (((0, 2), [0, 1, 2]), ((1, -1), [0, 1]), ((-1,), []), ((), [])):
        ran.clear()
        found = target.features(tokens, taps, last=False)
        assert ran == needed and found.last.shape == (3, 40, 0)
        assert torch.equal(found.taps, target.features(tokens, taps).taps)


def test_samples_may_stand_at_other_positions(target):
    tokens, _ = padded(target)
    positions = torch.tensor([[0], [11], [200]]) + torch.arange(40)
    found = target.features(tokens, (1,), positions=positions)
    taps_there, last_there = hooked(target, tokens, (1,), positions)
    assert torch.equal(found.taps, taps_there) and torch.equal(found.last, last_there)
    assert not torch.equal(found.taps, target.features(tokens, (1,)).taps)


def test_no_mask_is_prepared(target, monkeypatch):
    def fail(*_args, **_kwargs):
        raise AssertionError("a mask was prepared")

    module = import_module(type(target.model).__module__)
    monkeypatch.setattr(module, "create_causal_mask", fail)
    tokens, _ = padded(target)
    target.features(tokens, (1,))
    with pytest.raises(AssertionError, match="a mask was prepared"):
        hooked(target, tokens, (1,))


def test_a_compiler_sees_one_graph(target, unchecked):
    compiled = torch.compile(run_layers, fullgraph=True, backend="eager")
    tokens, _ = padded(target)
    found = compiled(target.backbone, tokens, (0, 2))
    assert all(map(torch.equal, found, hooked(target, tokens, (0, 2))))


def test_other_attention_takes_the_models_own_forward(target):
    tokens, _ = padded(target)
    expected = target.features(tokens, (0, 2))
    target.model.set_attn_implementation("eager")  # without a mask its layers would not be causal
    assert not runs_directly(target.config)
    found = target.features(tokens, (0, 2))
    assert torch.allclose(found.taps, expected.taps, atol=1e-4) and torch.allclose(found.last, expected.last, atol=1e-4)


@pytest.mark.parametrize("change", [{"model_type": "gemma4"}, {"layer_types": ["sliding_attention"] * 4}], ids=str)
def test_layers_of_another_form_are_not_called_directly(change):
    config = tiny_target("qwen3").config
    assert runs_directly(config)
    for name, value in change.items():
        object.__setattr__(config, name, value)
    assert not runs_directly(config)


def test_features_without_the_last_state_need_no_memory_for_it():
    target = tiny_target()
    data = TokenFile(np.arange(3, 23), np.array([[4, 6], [5, 5]]), np.array([0, 10]), 64)
    batch = data.collate(np.array([1, 0]))
    cached, whole = (cache_features(target, data, (1,), 2, last=last) for last in (False, True))
    assert cached.rows.shape == (20, 32) and whole.rows.shape == (20, 64)
    assert torch.equal(cached(batch).taps, whole(batch).taps) and cached(batch).last.shape[-1] == 0
    assert torch.equal(features_of(target, (1,), batch, last=False).taps, target.features(batch.tokens, (1,)).taps)


def test_features_stand_where_the_samples_do():
    target = tiny_target()
    batch = TrainBatch(torch.arange(3, 23).view(2, 10), torch.ones(2, 10).bool(), *[torch.tensor([10, 10])] * 2)
    shifted = replace(batch, offsets=torch.tensor([0, 30]))
    found, plain = features_of(target, (2,), shifted), features_of(target, (2,), batch)
    assert torch.equal(found.last[0], plain.last[0]) and not torch.equal(found.last[1], plain.last[1])
    assert torch.allclose(found.last[1], plain.last[1], atol=1e-4)  # rotary positions are relative
