"""An unroll through flex attention is its dense twin: the same mask, losses and gradients; memory grows by the step."""

import copy
import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch._dynamo import config as dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dloop.bench.training import Kept, flops_of
from dloop.cli import eagle3_script
from dloop.cli.args import parse
from dloop.cli.train import Command
from dloop.cli.train_checks import refuse_unsupported
from dloop.detect import GEMMA_FAMILY, MTP_FAMILY
from dloop.drafters.memory import KeyValues
from dloop.errors import UserError
from dloop.testing import fill, tiny_drafter, tiny_target
from dloop.train.batch import TrainBatch
from dloop.train.flex import check_flex
from dloop.train.flex_unroll import causal, flexed, merged
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.optim import Optimizer
from dloop.train.pieces import recomputed
from dloop.train.step import GraphedStep, Step
from dloop.train.unroll import UnrollObjective, joint

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
FAMILIES = ["eagle3", MTP_FAMILY]


@pytest.fixture(autouse=True)
def backward_anywhere(monkeypatch):
    """Off a GPU the eager form has gradients, which its front door refuses."""
    if not torch.cuda.is_available():
        monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


@pytest.fixture
def kernels(unchecked):
    """Compiled afresh, and compiled indeed: one variant too many would run the eager form, which is right as well."""
    torch.compiler.reset()
    with dynamo.patch(fail_on_recompile_limit_hit=True):
        yield


def batch_of(target, width: int, device: str = "cpu") -> TrainBatch:
    """Two samples, the second shorter."""
    tokens = torch.randint(3, target.vocab_size, (2, width), generator=torch.Generator().manual_seed(4))
    lengths = torch.tensor([width, width - 9])
    inside = torch.arange(width) < lengths[:, None]
    batch = TrainBatch(tokens * inside, inside & (torch.arange(width) >= 4), lengths, torch.zeros(2).long())
    return batch.to(torch.device(device))


def built(family: str, attention: str, *, recompute: bool = False, dtype=torch.float64, device: str = "cpu"):
    """A target and an objective over a fresh drafter; on a GPU with heads that the kernels take."""
    target = tiny_target("qwen3", num_layers=4, seed=1)
    target.model.to(device, dtype)
    model = tiny_drafter(target, family=family, stage_len=1).model
    if device == "cuda":
        model = type(model)(replace(model.config, head_dim=16)).to(device)
        fill(model, seed=1)
    settings = ObjectiveSettings(attention=attention, recompute=recompute)
    return target, objective_of(model.to(dtype).requires_grad_(True), target.vocabulary, settings)


def worked(objective: UnrollObjective, target, batch: TrainBatch, length: int) -> list[torch.Tensor]:
    """The loss, its terms, and every gradient."""
    loss = objective(batch, target.features(batch.tokens, objective.model.config.target_layer_ids), length)
    loss.total.backward()
    gradients = [p.grad for p in objective.model.parameters()]
    assert all(gradient.abs().max() > 0 for gradient in gradients)
    return [loss.total.detach(), loss.host.terms, *(loss.loop.terms if loss.loop else []), *gradients]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("length", "width"), [(7, 40), (21, 40), (7, 200)])
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_and_gradients_are_the_dense_twin_s_in_float64(family, length, width, recompute):
    found = []
    for attention in ("dense", "flex"):
        target, objective = built(family, attention, recompute=recompute and attention == "flex")
        found.append(worked(objective, target, batch_of(target, width), length))
    for dense, flex in zip(*found, strict=True):
        assert torch.allclose(dense, flex, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_float32_they_differ_by_rounding(family):
    found = []
    for attention in ("dense", "flex"):
        target, objective = built(family, attention, dtype=torch.float32)
        found.append(worked(objective, target, batch_of(target, 72), 21))
    for dense, flex in zip(*found, strict=True):
        assert (dense - flex).abs().max() <= 2e-5 * dense.abs().max()


def rows_of(steps: int, width: int, heads: int = 4, dim: int = 8, dtype=torch.float64, device: str = "cpu"):
    """Random queries, and keys and values of the first and of the later steps, as projections lay them out."""
    generator = torch.Generator().manual_seed(steps)

    def rows(count: int) -> torch.Tensor:
        made = torch.randn(2, width, count, dim, generator=generator, dtype=torch.float64)
        return made.to(device, dtype).transpose(1, 2).requires_grad_(True)

    return rows(heads), [KeyValues(rows(heads // 2), rows(heads // 2)) for _ in range(steps)]


def literal(queries, steps, first: int = 0, later: int = 0) -> torch.Tensor:
    """Row p sees the first step's keys up to p + `first`, row 0 its own at least, and of every later step the one at
    p + `later`. In float64.
    """
    width = queries.shape[2]
    rows, keys = torch.arange(width, device=queries.device)[:, None], torch.arange(width, device=queries.device)
    own = (keys == rows + later).expand(width, width)
    start = (keys <= rows + first) | ((rows == 0) & (keys == 0))
    visible = torch.cat([start] + [own] * (len(steps) - 1), 1)
    seen = [torch.cat([step[part].double() for step in steps], 2) for part in range(2)]
    return F.scaled_dot_product_attention(queries.double(), *seen, attn_mask=visible, enable_gqa=True)


@pytest.mark.parametrize("steps", [2, 7])
@pytest.mark.parametrize("width", [40, 128, 200, 320])
def test_rows_see_what_the_sentence_says_and_a_row_s_shift_is_seen(width, steps):
    queries, (first, *later) = rows_of(steps, width)
    flex, dense = flexed(queries, first, later, causal(width, queries.device)), joint(queries, first, later)
    assert torch.allclose(flex, literal(queries, [first, *later]), rtol=1e-10, atol=1e-12)
    assert torch.allclose(dense, literal(queries, [first, *later]), rtol=1e-10, atol=1e-12)
    for shift in ({"first": 1}, {"first": -1}, {"later": 1}, {"later": -1}):
        assert (flex - literal(queries, [first, *later], **shift)).abs().amax((0, 1, 3)).gt(1e-3).float().mean() > 0.9


@pytest.mark.parametrize("shift", [1, -1])
def test_a_mask_shifted_by_one_row_changes_the_loss(monkeypatch, shift):
    target, objective = built("eagle3", "flex")
    batch = batch_of(target, 40)
    right = worked(objective, target, batch, 7)
    blocks = create_block_mask(lambda b, h, q, kv: (kv <= q + shift) | (kv == 0), None, None, 40, 40, device="cpu")
    monkeypatch.setattr("dloop.train.unroll.causal", lambda width, device: blocks)
    objective.zero_grad()
    assert abs(worked(objective, target, batch, 7)[0] - right[0]) > 1e-6


@pytest.mark.parametrize("width", [1, 64, 128, 192, 640])
def test_the_block_mask_holds_the_blocks_up_to_the_diagonal(width):
    ours, rows = causal(width, torch.device("cpu")), torch.arange(width)
    assert isinstance(ours, BlockMask) and ours.seq_lengths == (width, width)
    theirs = create_block_mask(lambda b, h, q, kv: kv <= q, None, None, width, width, device="cpu")
    assert torch.equal(ours.to_dense(), theirs.to_dense())
    assert torch.equal(ours.full_kv_num_blocks, theirs.full_kv_num_blocks)
    visible = ours.mask_mod(torch.tensor(0), torch.tensor(0), rows[:, None], rows)
    assert torch.equal(visible, torch.ones(width, width).tril().bool())


def test_memory_grows_with_the_steps_and_not_with_their_square():
    kept = {}
    for length in (7, 14, 21):
        target, objective = built("eagle3", "flex")
        batch, counted = batch_of(target, 64), Kept([*objective.parameters(), target.vocabulary.head])
        features = target.features(batch.tokens, objective.model.config.target_layer_ids)
        with counted:
            objective(batch, features, length)
        kept[length] = counted.most
    assert kept[21] - kept[14] == pytest.approx(kept[14] - kept[7], rel=0.01) and kept[14] > kept[7] > 0


def test_own_rows_are_mixed_in_by_a_few_compiled_functions(unchecked):
    """Traced, then run as it is, within what is computed anew; one function for one step more, one for any number."""
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    fused = torch.compile(merged, backend=counter)
    for width in (64, 128, 192):
        for steps in range(2, 9):
            found = []
            for run in (merged, fused):
                queries, all_steps = rows_of(steps, width)
                lse = queries.detach().sum(-1).requires_grad_(True)

                def beside(mixed, later, run=run, queries=queries, lse=lse):
                    return run(queries, mixed, lse, *(torch.stack(parts, 2) for parts in zip(*later, strict=True)))

                mixed = recomputed(beside, queries.sin(), all_steps[1:])
                mixed.square().sum().backward()
                found.append([mixed, queries.grad, lse.grad, *(part.grad for step in all_steps[1:] for part in step)])
            torch.testing.assert_close(*found)
    assert 1 < counter.frame_count <= 4


def test_the_benchmark_of_published_sizes_takes_it(monkeypatch, tmp_path, unchecked):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "scripts"))
    script, out = import_module("benchmark_training_size"), tmp_path / "size.json"
    words = "--shape tiny --tokens 32 --hosts eagle3 --depths 1 --variants flex flex+recompute"
    assert script.main([*words.split(), "--output", str(out)]) == 0
    _, plain, again = json.loads(out.read_text())["rows"]
    assert plain["ms"] > 0 and plain["depth"] == again["depth"] == 7 and again["kept_bytes"] < plain["kept_bytes"]


def test_flops_leave_attention_out_and_nothing_else():
    found = {}
    for attention in ("dense", "flex"):
        target, objective = built("eagle3", attention)
        step = Step(objective, lambda batch, t=target, o=objective: features(t, o, batch), optimizer_of(objective))
        found[attention] = [flops_of(step, [batch_of(target, 64)], length) for length in (1, 2, 3)]
        assert objective.settings.attention == attention
    product = 2 * 2 * 64 * 64 * 32  # of all rows with all of the first step's keys, in all heads
    attention = [whole - rest for whole, rest in zip(*found.values(), strict=True)]
    assert attention == [0, 8 * product, 16 * product]  # two forward, two anew, four backward; the first step is fused


def features(target, objective, batch):
    return target.features(batch.tokens, objective.model.config.target_layer_ids)


def optimizer_of(objective) -> Optimizer:
    return Optimizer(objective.model.parameters(), 1.0)


def test_where_it_is_not_offered_it_is_refused():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    config = tiny_drafter(tiny_target("qwen3", num_layers=4), family="eagle3").config
    check_flex(replace(config, head_dim=128), gpu)
    with pytest.raises(UserError, match="need a GPU"):
        check_flex(replace(config, head_dim=128), cpu)
    target = tiny_target("gemma4", num_layers=4, seed=1)
    assistant = tiny_drafter(target, family=GEMMA_FAMILY)
    with pytest.raises(UserError, match=r"^--attention flex: mtp-gemma4's rows .*; use --attention dense$"):
        check_flex(assistant.config, gpu)
    objective = objective_of(assistant.model, target.vocabulary, ObjectiveSettings(attention="flex"))
    batch = batch_of(target, 40)
    with pytest.raises(ValueError, match="dense pieces"):
        objective(batch, target.features(batch.tokens, assistant.taps), 6)


def test_flags_of_speed_go_together(capsys):
    words = "--target-model-path t --draft-init-path d --train-data-path x.npz --output-dir o".split()
    together = "--attention flex --compile --cuda-graphs --gradient-checkpointing".split()
    refuse_unsupported(parse(Command, "p", [*words, *together]))
    assert "--attention=flex" in eagle3_script.forwarded("p", [*words, "--attention", "flex"])
    assert not capsys.readouterr().err
    assert "--attention=flex" not in eagle3_script.forwarded("p", words)
    assert "--attention-backend flex_attention: PyTorch's SDPA" in capsys.readouterr().err
    with pytest.raises(UserError, match="--attention flex and --attention-backend fa differ"):
        eagle3_script.forwarded("p", [*words, "--attention", "flex", "--attention-backend", "fa"])


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize(("length", "width"), [(7, 192), (21, 320)])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_give_the_losses_and_gradients_of_the_dense_twin(family, length, width, recompute, kernels):
    found = []
    for attention in ("dense", "flex"):
        again = recompute and attention == "flex"
        target, objective = built(family, attention, recompute=again, dtype=torch.float32, device="cuda")
        found.append(worked(objective, target, batch_of(target, width, "cuda"), length))
    for dense, flex in zip(*found, strict=True):
        assert (dense - flex).abs().max() <= 2e-3 * max(1e-3, dense.abs().max().item())  # tiles may use TF32


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "width"), [(128, 1024), (256, 1024), (128, 1088)])
def test_the_kernels_of_published_heads_are_the_literal_attention_in_bfloat16(dim, width, kernels):
    for steps in (2, 3, 8):
        queries, (first, *later) = rows_of(steps, width, 8, dim, torch.bfloat16, "cuda")
        leaves, found = [queries, *first, *(part for step in later for part in step)], []
        for mixed in (
            literal(queries, [first, *later]),
            flexed(queries, first, later, causal(width, queries.device)),
        ):
            weights = torch.cos(torch.arange(mixed.numel(), device="cuda")).view_as(mixed)
            gradients = torch.autograd.grad((mixed.double() * weights).sum(), leaves)
            found.append([mixed.detach().double(), *(gradient.double() for gradient in gradients)])
        for right, ours in zip(*found, strict=True):
            assert (right - ours).norm() <= 2e-2 * right.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["dense", "flex"])
def test_graphed_unrolls_of_three_lengths_take_the_steps_of_plain_ones(attention, kernels):
    target, objective = built("eagle3", attention, dtype=torch.float32, device="cuda")
    twin = copy.deepcopy(objective)
    plain, graphed = (
        Step(one, lambda batch: features(target, objective, batch), optimizer_of(one)) for one in (objective, twin)
    )
    graphed = GraphedStep(graphed)
    for step in (plain, graphed):
        step.optimizer.set_rate(1e-3)
    batch = batch_of(target, 192, "cuda")
    for length in (7, 14, 21, 14, 7, 21, 7, 14, 21):
        torch.testing.assert_close(graphed([batch], length), plain([batch], length), rtol=1e-3, atol=1e-5)
    assert set(graphed.graphs) == {(192, 7), (192, 14), (192, 21)}
