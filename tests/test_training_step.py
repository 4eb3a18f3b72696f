"""What makes a training step faster leaves its values and gradients as they are."""

import copy
import itertools
import json
import re
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from dloop.bench.store import write
from dloop.detect import BLOCK_FAMILIES
from dloop.targets.frozen import compiled_layer
from dloop.testing import tiny_drafter, tiny_target
from dloop.train import packed
from dloop.train.anchors import sample_anchors
from dloop.train.batch import TrainBatch
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.packed import num_groups

ROOT = Path(__file__).resolve().parents[1]


def batch_of(target, width: int = 96) -> TrainBatch:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, target.vocab_size, (3, width), generator=generator)
    lengths = torch.tensor([width, 70, 41])
    mask = (torch.arange(width) >= 5) & (torch.arange(width) < lengths[:, None])
    return TrainBatch(tokens, mask, lengths, torch.zeros(3, dtype=torch.long))


@pytest.mark.parametrize("reading", ["producing", "position", "anchor_included"])
@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("offsets", [None, torch.tensor([0, 7, 90])], ids=["from 0", "elsewhere"])
def test_groups_of_anchors_change_no_value_and_no_gradient(monkeypatch, reading, depth, offsets):
    target = tiny_target("llama", seed=3)
    target.model.double()
    drafter = tiny_drafter(target, gap_rows=reading)
    batch = batch_of(target)
    batch = TrainBatch(*batch.tensors(), offsets=offsets)
    features = target.features(batch.tokens, drafter.taps)
    anchors = sample_anchors(batch.loss_mask, 48, torch.rand(3, 95, generator=torch.Generator().manual_seed(1)))
    assert not anchors.keep.all()  # slots that weigh nothing are there too
    rows = {}
    for group in (16, 48):
        monkeypatch.setattr(packed, "GROUP", group)
        model = tiny_drafter(target, gap_rows=reading).model.double().requires_grad_(True)
        objective = objective_of(model, target.vocabulary, ObjectiveSettings(num_anchors=48))
        loss = objective(batch, features, depth, anchors)
        loss.total.backward()
        rows[group] = [loss.total, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(rows[16]) == len(rows[48]) > 10
    for grouped, together in zip(rows[16], rows[48], strict=True):
        assert torch.allclose(grouped, together, rtol=1e-9, atol=1e-12)


def test_the_mask_of_a_group_holds_no_other_groups_keys(monkeypatch):
    target = tiny_target("llama", seed=3)
    drafter = tiny_drafter(target)
    batch = batch_of(target)
    features = target.features(batch.tokens, drafter.taps)
    anchors = sample_anchors(batch.loss_mask, 48)
    model, stage, shapes = drafter.model, drafter.model.stage, []
    monkeypatch.setattr(model, "stage", lambda *given: shapes.append(tuple(given[3].shape)) or stage(*given))
    for group in (16, 48):
        monkeypatch.setattr(packed, "GROUP", group)
        stages = packed.PackedStages.begin(model, target.vocabulary, batch.tokens, features.taps, anchors)
        assert [tuple(stages.forward().shape) for _ in range(3)] == [(3, 48, 4, 32)] * 3
    own = 4 + 3 + 4  # block rows, gap rows of the second and the third stage
    assert shapes[2::3] == [(9, 1, 16 * 4, 96 + 16 * own), (3, 1, 48 * 4, 96 + 48 * own)]


@pytest.mark.parametrize(
    ("anchors", "groups"), [(0, 1), (1, 1), (16, 1), (31, 1), (32, 2), (64, 4), (100, 5), (97, 1), (512, 32)]
)
def test_groups_are_equal_and_not_too_small(anchors, groups):
    assert num_groups(anchors) == groups


def test_the_benchmark_writes_every_row_as_it_comes(monkeypatch, tmp_path, capsys, unchecked):
    monkeypatch.setattr(packed, "GROUP", packed.GROUP)  # the script changes it
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script = import_module("benchmark_training_step")
    out, seen = tmp_path / "step.json", []
    monkeypatch.setattr(
        script, "write", lambda path, text: seen.append(len(json.loads(text)["rows"])) or write(path, text)
    )
    words = "--hidden-size 64 --target-layers 4 --vocab-size 300 --sequences 2 --width 64 --anchors 32 --steps 1"
    variants = ["eager", "ungrouped", "cached", "graphs"]
    assert script.main([*words.split(), "--depths", "0,2", "--output", str(out), "--variants", *variants]) == 0
    document = json.loads(out.read_text(), parse_constant=pytest.fail)
    rows = document["rows"]
    assert seen == list(range(1, 3 + 2 * len(variants) + 1)) and document["shape"]["width"] == 64
    assert capsys.readouterr().out.splitlines() == [json.dumps(row) for row in rows]
    steps = {(row["variant"], row["depth"]): row for row in rows if row["what"] == "step"}
    assert list(steps) == [(variant, depth) for variant in variants for depth in (0, 2)]
    for (variant, _), row in steps.items():
        if variant == "graphs" and not torch.cuda.is_available():
            assert row["left_out"] == "CUDA graphs need a GPU"
        else:
            assert row["ms"] > 0 and row["peak_bytes"] > 0 and row["parameters"] > 100_000
    assert steps["eager", 2]["flops"] > 1.5 * steps["eager", 0]["flops"] > 0 and rows[0]["flops_per_s"] > 1e6


def test_the_benchmark_of_published_sizes_times_every_host(monkeypatch, tmp_path, capsys, unchecked):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    script, out = import_module("benchmark_training_size"), tmp_path / "size.json"
    words = "--shape tiny --tokens 32 --num-anchors 2 --depths 1 --variants dense dense+recompute"
    assert script.main([*words.split(), "--output", str(out)]) == 0
    first, *rows = json.loads(out.read_text(), parse_constant=pytest.fail)["rows"]
    assert first["flops_per_s"] > 1e6 and [row["host"] for row in rows] == [h for h in script.HOSTS for _ in range(2)]
    for plain, again in zip(rows[::2], rows[1::2], strict=True):
        assert plain["depth"] == (7 if plain["host"] == "eagle3" else 1) and plain["ms"] > 0
        assert again["kept_bytes"] < plain["kept_bytes"] and again["flops"] > plain["flops"] > 0
    for words in (["--variants", "dense+fast"], ["--hosts", "medusa"], ["--shape", "nope"]):
        with pytest.raises(SystemExit, match=re.escape(words[1])):
            script.main(words)


@pytest.mark.parametrize("family", [*BLOCK_FAMILIES, "eagle3"])
def test_compiled_parts_change_no_loss_and_are_compiled_a_few_times(monkeypatch, family, unchecked):
    """Traced, then run as it is: whether a kernel is right is the compiler's business, how often it is asked ours."""
    counter, compile_function, compile_module = CompileCounterWithBackend("aot_eager"), torch.compile, nn.Module.compile
    monkeypatch.setattr(torch, "compile", partial(compile_function, backend=counter))
    monkeypatch.setattr(nn.Module, "compile", lambda module: compile_module(module, backend=counter))
    compiled_layer.cache_clear()
    torch.compiler.reset()
    target = tiny_target("llama", seed=3)
    drafter = tiny_drafter(target, family=family)
    model, taps = drafter.model.requires_grad_(True), drafter.taps
    twin, depths = copy.deepcopy(model), (2, 4, 5) if family == "eagle3" else (0, 1, 2, 3)
    plain, fused = (objective_of(one, target.vocabulary, ObjectiveSettings(num_anchors=8)) for one in (model, twin))
    fused.compile_parts()
    assert list(model.state_dict()) == list(twin.state_dict())
    for width, depth in itertools.product((64, 128, 192), depths):
        tokens, mask = torch.randint(3, target.vocab_size, (2, width)), torch.ones(2, width, dtype=torch.bool)
        batch = TrainBatch(tokens, mask, mask.sum(1), torch.zeros(2, dtype=torch.long))
        features, same = target.features(tokens, taps), target.features(tokens, taps, compiled=True)
        torch.testing.assert_close(same.taps, features.taps)
        torch.testing.assert_close(same.last, features.last)
        anchors = sample_anchors(mask, 8)
        losses = [objective(batch, features, depth, anchors).total for objective in (plain, fused)]
        torch.testing.assert_close(*losses)
        found = [
            torch.autograd.grad(loss, list(one.parameters()), allow_unused=True)
            for loss, one in zip(losses, (model, twin), strict=True)
        ]
        torch.testing.assert_close(*found)
        if (width, depth) == (128, depths[0]):
            counted = counter.frame_count
    assert counter.frame_count == counted < 24  # widths and depths to come are known to what is compiled
    compiled_layer.cache_clear()
    torch.compiler.reset()
