"""Packed stages through flex attention are those of the dense twin, and its block masks miss nothing that is seen."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dloop.detect import BLOCK_FAMILIES
from dloop.errors import UserError
from dloop.testing import fill, tiny_drafter, tiny_target
from dloop.train.anchors import sample_anchors
from dloop.train.batch import TrainBatch
from dloop.train.flex import FlexStages, check_flex
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.packed import PackedStages

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def parts(target, width: int, num_anchors: int):
    """A batch of two samples, the second shorter, and anchors; some slots are not kept."""
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(3, target.vocab_size, (2, width), generator=generator)
    lengths = torch.tensor([width, width // 3])
    mask = (torch.arange(width) >= 5) & (torch.arange(width) < lengths[:, None])
    batch = TrainBatch(tokens, mask, lengths, torch.zeros(2, dtype=torch.long))
    return batch, sample_anchors(mask, num_anchors, torch.rand(2, width - 1, generator=generator))


def losses(attention: str, family: str, reading: str, device: str = "cpu") -> list[torch.Tensor]:
    """The loss and its terms; on a GPU, in float32 and with heads its kernels take, every gradient too."""
    target = tiny_target("llama", seed=3)
    target.model.to(device, torch.float64 if device == "cpu" else torch.float32)
    batch, anchors = parts(target, 192 if device == "cuda" else 64, 24)
    batch, anchors = batch.to(torch.device(device)), type(anchors)(*(x.to(device) for x in anchors))
    drafter = tiny_drafter(target, family=family, gap_rows=reading)
    model = drafter.model
    if device == "cuda":
        model = type(model)(replace(model.config, head_dim=16)).to(device)
        fill(model, seed=1)
    model = model.to(target.dtype).requires_grad_(device == "cuda")
    objective = objective_of(model, target.vocabulary, ObjectiveSettings(attention=attention))
    loss = objective(batch, target.features(batch.tokens, drafter.taps), 2, anchors)
    found = [loss.total, loss.host.terms, loss.loop.terms]
    if device == "cuda":
        loss.total.backward()
        found += [p.grad for p in model.parameters() if p.grad is not None]
    return found


@pytest.mark.parametrize("reading", ["producing", "position", "anchor_included"])
@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_flex_gives_the_losses_of_the_dense_twin_in_float64(family, reading):
    for dense, flex in zip(*(losses(attention, family, reading) for attention in ("dense", "flex")), strict=True):
        assert torch.allclose(dense, flex, rtol=1e-9, atol=1e-12) and dense.abs().max() > 0


@pytest.mark.gpu
@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_the_kernels_give_the_losses_and_gradients_of_the_dense_twin(family):
    dense, flex = (losses(attention, family, "producing", "cuda") for attention in ("dense", "flex"))
    assert len(dense) == len(flex) > 10
    for one, other in zip(dense, flex, strict=True):
        assert (one - other).abs().max() <= 2e-3 * max(1e-3, one.abs().max().item())  # tiles may use TF32


@pytest.mark.parametrize(("width", "num_anchors", "stage_len"), [(64, 24, 4), (640, 150, 7), (320, 100, 3), (64, 1, 4)])
def test_the_block_mask_is_the_dense_mask_and_holds_no_idle_block(width, num_anchors, stage_len):
    target = tiny_target("llama", seed=3)
    drafter = tiny_drafter(target, stage_len=stage_len)
    batch, anchors = parts(target, width, num_anchors)
    taps = target.features(batch.tokens, drafter.taps).taps
    flex, dense = (
        kind.begin(drafter.model, target.vocabulary, batch.tokens, taps, anchors) for kind in (FlexStages, PackedStages)
    )
    dense.memory = flex.memory  # one group, so that the masks are of one shape
    for stages in (flex, dense):
        stages.hidden = [torch.zeros(2, num_anchors, stage_len, 32)] * 2
    ours, whole = flex.mask(), dense.mask()
    rows, keys = whole.shape[-2:]
    assert isinstance(ours, BlockMask) and ours.seq_lengths == (rows, keys)
    index = [torch.arange(n).view(shape) for n, shape in ((2, (-1, 1, 1)), (rows, (1, -1, 1)), (keys, (1, 1, -1)))]
    assert torch.equal(ours.mask_mod(index[0], index[0], index[1], index[2]), whole[:, 0])
    theirs = create_block_mask(lambda b, h, q, kv: ours.mask_mod(b, h, q, kv), 2, None, rows, keys, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    if width == 640:
        assert ours.sparsity() > 50 and ours.full_kv_num_blocks.sum() > 10


def test_flex_where_it_cannot_run_is_refused():
    config = tiny_drafter(tiny_target()).config
    assert config.head_dim == 8
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    check_flex(type(config)(**{**vars(config), "head_dim": 128}), gpu)
    for device, words in ((cpu, "need a GPU"), (gpu, "the drafter's have 8")):
        with pytest.raises(UserError, match=words):
            check_flex(config, device)
