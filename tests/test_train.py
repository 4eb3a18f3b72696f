"""Training computes what decoding does, resumes exactly, and its replay predicts real decoding."""

import json
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

import dloop.train.trainer
from dloop.checkpoint import write_checkpoint
from dloop.cli.main import entry
from dloop.detect import BLOCK_FAMILIES
from dloop.drafters.gap import READINGS, gap_rows
from dloop.errors import UserError
from dloop.load import load_drafter
from dloop.testing import good_drafter, taught_drafter, tiny_drafter, tiny_target, write_drafter, write_target
from dloop.train.anchors import Anchors, sample_anchors
from dloop.train.batch import TokenFile, TrainBatch, batches, plan_epoch
from dloop.train.cache import cache_features, features_of
from dloop.train.checkpoint import STATE, Keeping, latest, resume
from dloop.train.fingerprint import PIECE, PIECES, sampled_by_file, sampled_sha256
from dloop.train.losses import decay_weights, lambda_base
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.optim import Optimizer, learning_rate
from dloop.train.packed import PackedStages
from dloop.train.replay import trace, walk
from dloop.train.start import from_target
from dloop.train.trainer import START, Step, TrainSettings, columns, depth_at, epoch_at, steps_of_epochs, train
from dloop.types import Features, StageRequest


def token_file(path, target, samples=12, seed=0):
    """A token file of random texts with prompts of 4 to 8 tokens."""
    rng = np.random.default_rng(seed)
    lens = np.stack([rng.integers(4, 9, samples), rng.integers(12, 30, samples)], 1)
    np.savez(path, flat=rng.integers(3, target.vocab_size, lens.sum()).astype(np.uint16), lens=lens.astype(np.uint16))
    return path


@pytest.fixture
def pair():
    target = tiny_target("llama", seed=3)
    return target, tiny_drafter(target)


@pytest.fixture(params=BLOCK_FAMILIES)
def each(request):
    """The pair of every family."""
    target = tiny_target("llama", seed=3)
    return target, tiny_drafter(target, family=request.param)


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
@pytest.mark.parametrize("reading", READINGS)
def test_packed_training_stages_are_the_deployed_stages_in_float64(family, reading):
    target = tiny_target("qwen3", seed=1)
    target.model.double()
    drafter = tiny_drafter(target, family=family)
    model = drafter.model.double()
    model.config = replace(model.config, gap_rows=reading)
    drafter = replace(drafter, vocabulary=target.vocabulary)
    k = model.config.stage_len
    tokens = torch.randint(3, target.vocab_size, (2, 30 + 4 * k))
    features = target.features(tokens, drafter.taps)
    starts = torch.tensor([[6, 9, 20], [8, 9, 30]])
    packed = PackedStages.begin(
        model, drafter.vocabulary, tokens, features.taps, Anchors(starts, torch.ones(2, 3, dtype=torch.bool))
    )
    hidden = [packed.forward() for _ in range(4)]
    for row in range(2):
        for chain in range(3):
            memory = drafter.open()
            a = int(starts[row, chain])
            seen = Features(taps=features.taps[row, :a], last=features.last[row, :a])
            memory.extend(0, 0, tokens[row, :a].tolist(), seen)
            for index in range(4):
                anchor = int(tokens[row, a + index * k])
                memory.draft([StageRequest(slot=0, anchor=anchor, index=index)])
                worst = (memory.slots[0].hidden[index] - hidden[index][row, chain]).abs().max()
                assert worst < 1e-9, f"stage {index}, chain {chain}: {worst}"


def test_nothing_after_an_anchor_or_of_another_anchor_is_seen(each):
    target, drafter = each
    tokens = torch.randint(3, target.vocab_size, (1, 40))
    features = target.features(tokens, drafter.taps)
    keep = torch.ones(1, 2, dtype=torch.bool)

    def first_stage(starts, taps):
        anchors = Anchors(torch.tensor([starts]), keep)
        return PackedStages.begin(drafter.model, drafter.vocabulary, tokens, taps, anchors).forward()[0]

    changed = features.taps.clone()
    changed[:, 10:] += 1.0
    assert torch.equal(first_stage([10, 20], features.taps)[0], first_stage([10, 20], changed)[0])
    assert not torch.allclose(first_stage([10, 20], features.taps)[1], first_stage([10, 20], changed)[1])
    assert torch.allclose(first_stage([10, 20], features.taps)[0], first_stage([10, 31], features.taps)[0], atol=1e-6)


def test_gradients_flow_through_the_gap_rows(each):
    target, drafter = each
    drafter.model.requires_grad_(True)
    tokens = torch.randint(3, target.vocab_size, (1, 40))
    anchors = Anchors(torch.tensor([[10]]), torch.ones(1, 1, dtype=torch.bool))
    features = target.features(tokens, drafter.taps)
    stages = PackedStages.begin(drafter.model, drafter.vocabulary, tokens, features.taps, anchors)
    first, second = stages.forward(), stages.forward()
    (gradient,) = torch.autograd.grad(second.sum(), first)
    config = drafter.config
    used = [row.row for row in gap_rows("producing", 1, config.stage_len, config.label_shift)]
    idle = sorted(set(range(config.block_size)) - set(used))
    assert gradient[0, 0, used].abs().min() > 0  # the states that produced a+1 .. a+k-1
    assert gradient[0, 0, idle].abs().max() == 0  # the one that produced the new anchor, and DFlash's row 0
    assert idle == ([0, config.block_size - 1] if config.label_shift else [config.block_size - 1])


def test_anchors_have_a_labelled_successor_and_fresh_draws_differ():
    mask = torch.zeros(2, 30, dtype=torch.bool)
    mask[0, 5:9] = mask[0, 12] = mask[1, 3:29] = True
    anchors = sample_anchors(mask, 8)
    assert anchors.positions[0][anchors.keep[0]].tolist() == [5, 6, 7]
    assert anchors.keep[1].all() and (anchors.positions[1].diff() > 0).all()
    draws = {tuple(sample_anchors(mask, 8).positions[1].tolist()) for _ in range(10)}
    assert len(draws) > 1


def test_more_anchor_slots_than_positions_are_not_kept():
    mask = torch.ones(1, 5, dtype=torch.bool)
    anchors = sample_anchors(mask, 9)
    assert anchors.keep.sum() == 4 and anchors.positions[0][anchors.keep[0]].tolist() == [0, 1, 2, 3]


def test_decay_stops_at_the_first_unlabelled_row_only_with_prefix():
    labelled = torch.tensor([True, False, True])
    assert decay_weights(labelled, None, prefix=True).tolist() == [1, 0, 0]
    assert decay_weights(labelled, None, prefix=False).tolist() == [1, 0, 1]
    assert decay_weights(labelled, float("inf"), prefix=True).tolist() == [1, 0, 0]
    assert decay_weights(labelled, 2.0, prefix=False)[2] == pytest.approx(np.exp(-1.0))


def test_a_step_without_any_label_is_finite(each):
    target, drafter = each
    objective = objective_of(drafter.model.requires_grad_(True), drafter.vocabulary, ObjectiveSettings(num_anchors=4))
    data = TokenFile(np.arange(3, 23), np.array([[20, 0]]), np.array([0]), 64)
    batch = data.collate(np.array([0]))
    loss = objective(batch, target.features(batch.tokens, drafter.taps), 2)
    loss.total.backward()
    assert loss.total == 0
    assert all(p.grad is None or bool(torch.isfinite(p.grad).all()) for p in drafter.model.parameters())


def test_epoch_plan_is_a_function_of_seed_and_epoch_and_uses_each_sample_once():
    lengths = np.random.default_rng(0).integers(5, 90, 100)
    plan = plan_epoch(lengths, 8, seed=1, epoch=0)
    used = np.concatenate(plan)
    assert len(used) == len(set(used.tolist())) == 96
    assert all((a == b).all() for a, b in zip(plan, plan_epoch(lengths, 8, seed=1, epoch=0), strict=True))
    assert any((a != b).any() for a, b in zip(plan, plan_epoch(lengths, 8, seed=1, epoch=1), strict=True))


def test_what_an_epoch_leaves_out_does_not_depend_on_length():
    left_out = set()
    for seed in range(20):
        left_out |= set(range(10)) - set(np.concatenate(plan_epoch(np.arange(10), 4, seed, 0)).tolist())
    assert len(left_out) > 5 and min(left_out) < 5


@pytest.mark.parametrize(("accumulation", "epochs", "steps"), [(1, 2, 6), (2, 2, 3), (2, 1, 1), (4, 1, 1), (3, 4, 4)])
def test_epochs_are_passes_over_the_data(accumulation, epochs, steps):
    data = TokenFile(np.arange(24), np.array([[1, 1]] * 12), np.arange(0, 24, 2), 64)
    settings = TrainSettings(num_steps=1, batch_size=4, accumulation_steps=accumulation)
    assert steps_of_epochs(epochs, data, settings) == steps
    assert epoch_at(steps, data, settings) == steps * accumulation // 3


FLAT, LENS = np.arange(3, 23, dtype=np.int32), np.array([[4, 6], [5, 5]])
ARRAYS = {
    "floats": (FLAT.astype(np.float32), LENS, "float32"),
    "bools": (FLAT > 5, LENS, "bool"),
    "strings": (FLAT.astype(str), LENS, "<U"),
    "lengths as floats": (FLAT, LENS * 1.0, "float64"),
    "objects": (FLAT.astype(object), LENS, "not a whole token file"),
    "two dimensions": (FLAT.reshape(4, 5), LENS, "[4, 5]"),
    "no dimension": (FLAT[0], LENS, "[]"),
    "three columns": (FLAT, np.array([[4, 6, 10]]), "[1, 3]"),
    "negative": (FLAT, np.array([[-4, 14], [5, 5]]), "-4"),
    "too few": (FLAT, LENS[:1], "adds up to 10"),
    "overflow": (FLAT, np.array([[2**63, 2**63], [10, 10]], np.uint64), "9223372036854775808"),
    "an empty sample": (FLAT, np.array([[4, 6], [0, 0], [5, 5]]), "sample 1"),
    "no response": (FLAT, np.array([[10, 0], [10, 0]]), "response"),
    "no response in reach": (FLAT, np.array([[19, 1]]), "--max-length 16"),
    "no sample": (FLAT[:0], LENS[:0], "none of 0"),
}


@pytest.mark.parametrize(("flat", "lens", "part"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_are_no_samples_are_refused(tmp_path, flat, lens, part):
    np.savez(tmp_path / "t.npz", flat=flat, lens=lens)
    with pytest.raises(UserError) as error:
        TokenFile.read(tmp_path / "t.npz", 16)
    assert part in str(error.value)


def test_a_damaged_file_is_refused_and_never_another_error(tmp_path):
    path = tmp_path / "t.npz"
    np.savez_compressed(path, flat=FLAT, lens=LENS)
    whole = path.read_bytes()
    np.save(tmp_path / "one.npy", FLAT)
    damaged = [b"", b"tokens", (tmp_path / "one.npy").read_bytes(), *(whole[:cut] for cut in range(1, len(whole), 9))]
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(UserError, match="not a whole token file"):
            TokenFile.read(path, 64)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :])
        try:
            found = TokenFile.read(path, 64)
        except UserError:
            continue
        assert (found.flat == FLAT).all() and (found.lens == LENS).all()  # a time stamp, say


def test_batches_can_start_at_any_step(tmp_path, pair):
    data = TokenFile.read(token_file(tmp_path / "t.npz", pair[0]), 64)
    whole = list(batches(data, 4, 0, 0, 7))
    late = list(batches(data, 4, 0, 5, 7))
    assert all(torch.equal(a.tokens, b.tokens) for a, b in zip(whole[5:], late, strict=True))


def test_learning_rate_warms_up_and_ends_near_zero():
    rates = [learning_rate(step, 100, 1.0, 0.1) for step in range(100)]
    assert rates[0] == pytest.approx(0.1) and rates[9] == pytest.approx(1.0) and max(rates) == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] < 0.001


def test_depths_are_drawn_from_one_to_the_cap_and_only_depend_on_the_step():
    depths = [depth_at(step, 3, 42) for step in range(200)]
    assert set(depths) == {1, 2, 3} and depths == [depth_at(step, 3, 42) for step in range(200)]
    assert {depth_at(step, 0, 42) for step in range(20)} == {0}


def test_cached_features_are_the_features(tmp_path, pair):
    target, drafter = pair
    data = TokenFile.read(token_file(tmp_path / "t.npz", target), 64)
    cached = cache_features(target, data, drafter.taps, 3)
    batch = data.collate(np.array([7, 2, 9]))
    fresh, found = target.features(batch.tokens, drafter.taps), cached(batch)
    for row, length in enumerate(batch.lengths.tolist()):
        assert torch.allclose(fresh.taps[row, :length], found.taps[row, :length], atol=1e-5)
        assert torch.allclose(fresh.last[row, :length], found.last[row, :length], atol=1e-5)


def test_a_new_drafter_starts_with_the_targets_layers(each):
    target, drafter = each
    model = from_target(drafter.config, target, tuple(range(drafter.config.num_layers)), seed=0)
    theirs = target.backbone.layers[0].self_attn.q_proj.weight
    assert torch.equal(model.layers[0].self_attn.q_proj.weight, theirs)
    hidden, previous = torch.randn(drafter.config.block_size, 32), torch.arange(drafter.config.stage_len)
    logits, _ = model.teacher_forced(hidden, previous, target.vocabulary)
    own = torch.nn.functional.linear(model.predicting(hidden), target.vocabulary.head)
    assert torch.allclose(logits, own, atol=1e-6), "a fresh head adds nothing"
    assert all(value.isfinite().all() for value in model.state_dict().values())
    with pytest.raises(UserError, match="must name"):
        from_target(drafter.config, target, (99,) * drafter.config.num_layers, seed=0)


def run_steps(pair, data, folder, num_steps, done=0, stop_after=None):
    """Train in a fresh copy of the pair's drafter; give the losses and the final weights."""
    target, drafter = pair
    model = tiny_drafter(target, family=drafter.family).model.requires_grad_(True)
    objective = objective_of(model, target.vocabulary, ObjectiveSettings(num_anchors=6))
    optimizer = Optimizer(model.parameters(), 1.0)
    begun = resume(latest(folder), model, optimizer, "same") if done else START
    assert begun.step == done
    step = Step(objective, lambda batch: target.features(batch.tokens, drafter.taps), optimizer)
    settings = TrainSettings(num_steps=num_steps, batch_size=4, learning_rate=1e-2, log_interval=1, save_interval=1000)
    losses = []
    stream = train(step, data, settings, folder, begun=begun, keeping=Keeping("same"))
    for record in stream:
        losses.append(record.values)
        if record.step == stop_after:
            stream.close()
            break
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("depth", [0, 2])
def test_two_parts_of_a_step_are_one_batch_of_both(each, depth):
    target, drafter = each
    data = TokenFile(torch.arange(3, 73).numpy(), np.array([[4, 9], [5, 52]]), np.array([0, 13]), 64)
    rows = {}
    for parts in ([[0, 1]], [[0], [1]]):
        model = tiny_drafter(target, family=drafter.family).model.requires_grad_(True)
        optimizer = Optimizer(model.parameters(), 1e9)
        objective = objective_of(model, target.vocabulary, ObjectiveSettings(num_anchors=60))  # all that can be
        step = Step(objective, lambda batch: target.features(batch.tokens, drafter.taps), optimizer)
        values = step([data.collate(np.array(part)) for part in parts], depth)
        rows[len(parts)] = values, [torch.zeros(1) if p.grad is None else p.grad for p in model.parameters()]
    assert torch.allclose(rows[1][0], rows[2][0], atol=1e-5)
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(rows[1][1], rows[2][1], strict=True))


def test_resume_gives_the_same_losses_bit_for_bit(tmp_path, each):
    data = TokenFile.read(token_file(tmp_path / "t.npz", each[0]), 64)
    straight, weights = run_steps(each, data, tmp_path / "a", 8)
    before, _ = run_steps(each, data, tmp_path / "b", 8, stop_after=5)
    after, resumed = run_steps(each, data, tmp_path / "b", 8, done=5)
    assert before + after == straight
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert straight[-1][0] < straight[0][0]


def test_every_parameter_learns(tmp_path, each):
    data = TokenFile.read(token_file(tmp_path / "t.npz", each[0]), 64)
    before = tiny_drafter(each[0], family=each[1].family).model.state_dict()
    _, after = run_steps(each, data, tmp_path / "a", 3)
    assert [name for name in before if torch.equal(before[name], after[name])] == []
    header = (tmp_path / "a" / "train.csv").read_text().split("\n")[0].split(",")
    terms = {"dflash": ["ce"], "dspark": ["ce", "l1", "confidence"], "domino": ["ce", "base_ce"]}[each[1].family]
    assert header[4:] == ["loss", "grad_norm", *(f"host_{t}" for t in terms), *(f"loop_{t}" for t in terms)]


def batch_of(target, lengths):
    """Random texts of these lengths, all of them labels."""
    tokens = torch.randint(3, target.vocab_size, (len(lengths), max(lengths)))
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return TrainBatch(tokens, mask, torch.tensor(lengths), torch.zeros(len(lengths), dtype=torch.int64))


def test_samples_are_shifted_within_their_room(pair):
    batch = batch_of(pair[0], [5, 9])
    drawn = [batch.shifted(12).offsets.tolist() for _ in range(300)]
    for row, room in ((0, 12 - 5), (1, 12 - 9)):
        assert {offsets[row] for offsets in drawn} == set(range(room + 1))
    assert torch.equal(batch.shifted(12).tokens, batch.tokens) and batch.offsets is None


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_shift_moves_target_and_drafter_together(each, depth):
    """Positions matter by their differences alone, so the loss stays; a part left behind would move it."""
    target, drafter = each
    target.model.double()
    model = drafter.model.double()
    batch = batch_of(target, [25, 30])
    shifted = replace(batch, offsets=torch.tensor([40, 7]))
    objective = objective_of(model, target.vocabulary, ObjectiveSettings(num_anchors=40))
    asked, losses = [], []
    rotary = target.model.model.rotary_emb
    rotary.register_forward_pre_hook(
        lambda _, given, named: asked.append(named.get("position_ids", given[-1])), with_kwargs=True
    )
    for one in (batch, shifted):
        losses.append(objective(one, features_of(target, drafter.taps, one), depth).total.item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)  # transformers' angles are float32
    assert [positions[:, 0].tolist() for positions in asked] == [[0], [40, 7]]
    stages = [
        PackedStages.begin(
            model, target.vocabulary, one.tokens, features_of(target, drafter.taps, one).taps,
            objective.draw(one), offsets=one.offsets,
        )
        for one in (batch, shifted)
    ]  # fmt: skip
    moved = (stages[0].memory[0].keys - stages[1].memory[0].keys).abs().amax((0, 1, 3))
    assert moved.min() > 1e-6, "every context position is rotated further"


def test_a_drafter_left_behind_by_a_shift_is_caught(each, monkeypatch):
    """Planted: block rows stay where they were, context and gap rows move."""
    target, drafter = each
    batch = batch_of(target, [30])
    shifted = replace(batch, offsets=torch.tensor([40]))
    objective = objective_of(drafter.model, target.vocabulary, ObjectiveSettings(num_anchors=40))
    right = objective(shifted, features_of(target, drafter.taps, shifted), 1).total.item()
    inner = drafter.model.stage
    monkeypatch.setattr(drafter.model, "stage", lambda rows, at, *rest: inner(rows, at - 40, *rest))
    wrong = objective(shifted, features_of(target, drafter.taps, shifted), 1).total.item()
    assert wrong != pytest.approx(right, abs=1e-3)


def test_domino_s_uncorrected_share_falls_to_zero_over_half_the_run():
    shares = [lambda_base(step, 100, 1.0, 0.5) for step in range(100)]
    assert shares[0] == pytest.approx(0.98) and shares[24] == pytest.approx(0.5)
    assert shares[49:] == [0.0] * 51 and shares[:50] == sorted(shares[:50], reverse=True)
    assert lambda_base(0, 1, 1.0, 0.5) == 0.0  # a run of one step
    assert lambda_base(9, 100, 0.5, 1.0) == pytest.approx(0.45)


@pytest.mark.parametrize(("max_stage", "expected"), [(0, [0.5, 0.0, 0.0, 0.0]), (2, [0.0] * 4)], ids=["host", "loop"])
def test_domino_s_curriculum_is_for_host_training_alone(tmp_path, max_stage, expected):
    target = tiny_target("llama", seed=3)
    drafter = tiny_drafter(target, family="domino")
    data = TokenFile.read(token_file(tmp_path / "t.npz", target), 64)
    objective = objective_of(drafter.model.requires_grad_(True), target.vocabulary, ObjectiveSettings(num_anchors=4))
    step = Step(
        objective, lambda batch: target.features(batch.tokens, drafter.taps), Optimizer(drafter.model.parameters(), 1.0)
    )
    shares, inner = [], step.loss
    step.loss = lambda *given: (shares.append(objective.lambda_base.item()), inner(*given))[1]
    settings = TrainSettings(num_steps=4, batch_size=4, log_interval=1, dloop_max_stage=max_stage)
    records = list(train(step, data, settings, tmp_path))
    assert shares == pytest.approx(expected)
    names = columns(objective)
    for record, share in zip(records, shares, strict=True):
        values = dict(zip(names, record.values, strict=True))
        host = (1 - share) * values["host_ce"] + share * values["host_base_ce"]
        loss = host if not max_stage else 0.75 * host + 0.25 * values["loop_ce"]
        assert values["loss"] == pytest.approx(loss, rel=1e-4)


def test_dflash_takes_one_mean_over_host_and_loop_rows(tmp_path):
    target = tiny_target("llama", seed=3)
    drafter = tiny_drafter(target, family="dflash")
    batch = batch_of(target, [20, 30])
    objective = objective_of(drafter.model, target.vocabulary, ObjectiveSettings(num_anchors=40))
    loss = objective(batch, target.features(batch.tokens, drafter.taps), 2)
    joint = (loss.host.terms + loss.loop.terms) / (loss.host.weight + loss.loop.weight)
    assert loss.total.item() == pytest.approx(joint.item(), rel=1e-5)
    apart = (0.75 * loss.host.terms / loss.host.weight + 0.25 * loss.loop.terms / loss.loop.weight)[0]
    assert loss.total.item() != pytest.approx(apart.item(), rel=1e-3)


def test_an_interrupt_saves_at_a_step_and_restores_the_handler(tmp_path, pair):
    target, drafter = pair
    data = TokenFile.read(token_file(tmp_path / "t.npz", target), 64)
    objective = objective_of(drafter.model.requires_grad_(True), target.vocabulary, ObjectiveSettings(num_anchors=4))
    optimizer = Optimizer(drafter.model.parameters(), 1.0)
    step = Step(objective, lambda batch: target.features(batch.tokens, drafter.taps), optimizer)
    before = signal.getsignal(signal.SIGINT)
    stream = train(step, data, TrainSettings(num_steps=50, batch_size=4, log_interval=1), tmp_path)
    next(stream)
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        next(stream)
    assert signal.getsignal(signal.SIGINT) is before
    assert latest(tmp_path).name == "epoch_0_step_1"


def test_interrupts_during_a_save_do_not_lose_it(tmp_path, pair, monkeypatch):
    save = dloop.train.trainer.save

    def disturbed(*given):
        for _ in range(4):
            signal.raise_signal(signal.SIGINT)
        return save(*given)

    monkeypatch.setattr(dloop.train.trainer, "save", disturbed)
    data, before = TokenFile.read(token_file(tmp_path / "t.npz", pair[0]), 64), signal.getsignal(signal.SIGINT)
    run_steps(pair, data, tmp_path / "a", 2)
    assert signal.getsignal(signal.SIGINT) is before
    assert latest(tmp_path / "a").name == "epoch_0_step_2"


@pytest.mark.parametrize(("times", "saved"), [(1, True), (2, True), (3, False)])
def test_only_a_third_interrupt_ends_in_the_midst_of_a_step(folders, capsys, monkeypatch, times, saved):
    inner = Step.loss

    def disturbed(*given):
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)
        return inner(*given)

    monkeypatch.setattr(Step, "loss", disturbed)
    assert entry(command(folders)) == 130
    assert (latest(folders / "out") is not None) == saved
    assert "Traceback" not in capsys.readouterr().err


def test_a_diverged_run_fails_and_leaves_no_broken_checkpoint(folders, capsys):
    words = command(folders, "--learning-rate", "1e30", "--max-steps", "6", "--log-interval", "50")
    for more in ((), ("--resume",)):
        assert entry([*words, "--save-interval", "2", *more]) == 1
        assert "not finite" in capsys.readouterr().err
        for path in (folders / "out").glob("epoch_*"):
            assert all(v.isfinite().all() for v in torch.load(path / STATE)["masters"].values())


@pytest.mark.parametrize("fault", ["nan", "cut", "no step"])
def test_a_broken_state_is_not_resumed_from(folders, capsys, fault):
    assert entry(command(folders)) == 0
    path = latest(folders / "out") / STATE
    state = torch.load(path)
    if fault == "nan":
        state["masters"]["fc.weight"][0, 0] = torch.nan
    if fault == "no step":
        del state["step"]
    torch.save(state, path)
    if fault == "cut":
        path.write_bytes(path.read_bytes()[:-200])
    assert entry(command(folders, "--resume")) == 2
    assert ("not finite" if fault == "nan" else "cannot be read") in capsys.readouterr().err


@pytest.mark.parametrize("known", [str, sampled_by_file])
def test_a_state_of_an_earlier_form_is_resumed_from_exactly(folders, capsys, monkeypatch, known):
    """The first keeps no steps for the log, and knows the target by the path that was given."""
    words = command(folders, "--save-interval", "2", "--log-interval", "4", "--max-steps", "4")
    with monkeypatch.context() as first:
        first.setattr("dloop.train.fingerprint.sampled_sha256", known)
        assert entry(words) == 0
    straight, out = torch.load(latest(folders / "out") / STATE), folders / "out"
    shutil.rmtree(latest(out))
    state = torch.load(latest(out) / STATE)
    assert state["step"] == 2 and len(state["pending"]) == 2
    if known is str:
        del state["pending"]
    torch.save(state, latest(out) / STATE)
    assert entry([*words, "--resume", "--learning-rate", "1"]) == 2
    assert "another version of dloop" in capsys.readouterr().err
    assert entry([*words, "--resume"]) == 0
    assert ("means of the steps from 3 on" in capsys.readouterr().err) == (known is str)
    again = torch.load(latest(out) / STATE)
    assert again["step"] == 4 and again["fingerprint"] != straight["fingerprint"]
    assert all(torch.equal(value, straight["masters"][name]) for name, value in again["masters"].items())


@pytest.mark.parametrize("family", ["good", *BLOCK_FAMILIES])
def test_replay_predicts_real_decoding_at_every_gate(family):
    target = tiny_target("qwen3", seed=5)
    prompt = [5, 9, 3, 11, 7]
    answer = dloop.generate_autoregressive(target, prompt, max_new_tokens=80, stop_token_ids=[]).tokens
    texts = [prompt + answer]
    drafter = good_drafter(target, texts) if family == "good" else taught_drafter(target, texts, family=family)
    found = trace(drafter.model, drafter.vocabulary, target, prompt, answer, num_stages=4)
    scores = sorted(found.score[:, 0].tolist())
    gates = [1.0, float("-inf"), scores[len(scores) // 3], scores[2 * len(scores) // 3]]
    for gate in gates:
        rounds = dloop.generate(
            target, drafter, prompt, max_new_tokens=80, stop_token_ids=[], loop_gate=gate, max_stages=4
        ).rounds
        walked = walk(found, gate)
        whole = rounds[:-1]  # the last round may draft beyond the text, where replay has nothing to compare with
        assert len(walked.start) == len(rounds)
        assert walked.accepted[:-1].tolist() == [each.accepted for each in whole]
        assert walked.looped >= sum(max(0, r.accepted - drafter.config.stage_len) for r in whole)
        assert walked.tokens == len(answer) - 1
    assert len(walk(found, None).start) <= min(len(walk(found, gate).start) for gate in gates)


@pytest.fixture
def folders(tmp_path, pair):
    target, drafter = pair
    return written(tmp_path, target, drafter)


def written(tmp_path, target, drafter):
    """A target, a drafter and tokens, as the command reads them."""
    write_target(target, tmp_path / "target")
    write_drafter(drafter, tmp_path / "drafter", "specforge")
    token_file(tmp_path / "tokens.npz", target)
    return tmp_path


def command(folders, *more):
    return [
        "train", "--target-model-path", str(folders / "target"), "--draft-init-path", str(folders / "drafter"),
        "--train-data-path", str(folders / "tokens.npz"), "--output-dir", str(folders / "out"), "--max-steps", "3",
        "--batch-size", "4", "--num-anchors", "4", "--log-interval", "1", "--dtype", "float32", "--device", "cpu",
        *more,
    ]  # fmt: skip


def test_the_command_trains_and_its_checkpoint_is_a_drafter(folders, capsys, pair):
    assert entry(command(folders, "--json")) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["steps"] == 3 and len(done["records"]) == 3
    drafter = load_drafter(done["checkpoint"], pair[0])
    assert drafter.config == pair[1].config
    assert (folders / "out" / "train.csv").read_text().count("\n") == 4


def test_the_command_trains_every_family(tmp_path, each, capsys):
    target, drafter = each
    where = written(tmp_path, target, drafter)
    assert entry(command(where, "--json", "--position-offset-max", "64")) == 0
    done = json.loads(capsys.readouterr().out)
    found = load_drafter(done["checkpoint"], target)
    assert (found.family, found.config) == (drafter.family, drafter.config)
    assert "loop_ce" in done["records"][0]
    words = command(where, "--draft-config-path", str(where / "drafter" / "config.json"), "--dloop-max-stage", "0")
    at = words.index("--draft-init-path")
    assert entry([*words[:at], *words[at + 2 :], "--output-dir", str(where / "new")]) == 0


@pytest.mark.parametrize(
    ("family", "more", "part"),
    [
        (
            "dflash",
            ["--dspark-l1-loss-alpha", "0.5"],
            "--dspark-l1-loss-alpha 0.5 is for dspark, this drafter is dflash",
        ),
        ("domino", ["--dspark-ce-loss-alpha", "0.5"], "--dspark-ce-loss-alpha 0.5 is for dspark"),
        ("dflash", ["--dloop-loss-weight", "0.5"], "--dloop-loss-weight 0.5 is for dspark and domino"),
        ("dflash", ["--lambda-base-start", "0.5"], "--lambda-base-start 0.5 is for domino"),
        ("dspark", ["--lambda-base-decay-ratio", "1"], "--lambda-base-decay-ratio 1.0 is for domino"),
        ("domino", ["--lambda-base-start", "0.5"], "give --dloop-max-stage 0"),
        ("domino", ["--lambda-base-start", "1.5"], "--lambda-base-start 1.5 must be a share"),
        ("domino", ["--lambda-base-decay-ratio", "nan"], "--lambda-base-decay-ratio nan"),
        ("dflash", ["--position-offset-max", "257"], "--position-offset-max 257 is beyond the 256 positions"),
        ("dflash", ["--position-offset-max", "-1"], "--position-offset-max -1"),
        ("dflash", ["--position-offset-max", "20"], "leaves no place"),
        ("dflash", ["--position-offset-max", "64", "--cache-features"], "--cache-features"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_flags_of_another_family_end_in_one_line(tmp_path, capsys, family, more, part):
    target = tiny_target("llama", seed=3)
    assert entry(command(written(tmp_path, target, tiny_drafter(target, family=family)), *more)) == 2
    line = capsys.readouterr().err.strip()
    assert part in line and "\n" not in line


def test_the_command_starts_a_new_drafter_from_the_targets_layers(folders, capsys):
    words = command(folders, "--draft-config-path", str(folders / "drafter" / "config.json"), "--dloop-max-stage", "0")
    at = words.index("--draft-init-path")
    assert entry(words[:at] + words[at + 2 :]) == 0


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--target-model-backend", "sglang"], "sglang"),
        (["--draft-config-path", "x.json"], "either"),
        (["--cuda-graphs"], "--cuda-graphs"),
        (["--train-data-path", "absent.npz"], "absent.npz"),
        (["--batch-size", "400"], "--batch-size 400 is more than the 12 samples"),
        (["--dloop-loss-weight", "2"], "weight"),
        (["--max-steps", "0"], "--max-steps 0 must be at least 1"),
        (["--num-epochs", "0"], "--num-epochs 0"),
        (["--learning-rate", "0"], "--learning-rate 0"),
        (["--learning-rate", "nan"], "--learning-rate nan"),
        (["--learning-rate", "inf"], "--learning-rate inf"),
        (["--dspark-ce-loss-alpha", "-1"], "--dspark-ce-loss-alpha -1"),
        (["--dspark-l1-loss-alpha", "nan"], "--dspark-l1-loss-alpha nan"),
        (["--dspark-confidence-head-alpha", "-1"], "--dspark-confidence-head-alpha -1"),
        (["--loss-decay-gamma", "nan"], "--loss-decay-gamma nan"),
        (["--dloop-loss-weight", "nan"], "--dloop-loss-weight nan"),
        (["--max-grad-norm", "0"], "--max-grad-norm 0"),
        (["--warmup-ratio", "1"], "--warmup-ratio 1"),
        (["--seed", "-1"], "--seed -1"),
        (["--seed", "2147483648"], "--seed 2147483648"),
        (["--num-anchors", "100001"], "100000"),
        (["--num-anchors", "3073"], "one anchor"),
        (["--init-layers", "0"], "--init-layers 0"),
        (["--output-dir", "/proc/none"], "/proc/none cannot be written to"),
        (["--output-dir", "/dev/null"], "/dev/null cannot be written to"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_faulty_commands_end_in_one_line(folders, capsys, more, part):
    assert entry(command(folders, *more)) == 2
    line = capsys.readouterr().err.strip()
    assert part in line and "\n" not in line


def test_a_second_run_into_the_same_folder_is_refused_unless_resumed(folders, capsys):
    assert entry(command(folders)) == 0
    assert entry(command(folders)) == 2
    assert "--resume" in capsys.readouterr().err
    assert entry(command(folders, "--resume", "--learning-rate", "1")) == 2
    assert entry(command(folders, "--resume")) == 0


def test_a_target_is_known_by_its_weights_and_not_by_its_path(folders, capsys, monkeypatch):
    assert entry(command(folders)) == 0
    monkeypatch.chdir(folders)
    assert entry(command(folders, "--resume", "--target-model-path", "target")) == 0
    (folders / "moved").symlink_to(folders / "target")
    assert entry(command(folders, "--resume", "--target-model-path", "moved")) == 0
    other = tiny_target("llama", seed=3)
    other.model.lm_head.weight.data[-1, -1] += 1
    write_target(other, folders / "target")
    assert entry(command(folders, "--resume")) == 2
    assert "other settings" in capsys.readouterr().err


def sampled(folder, tensors) -> str:
    write_checkpoint(folder, {}, tensors)
    return sampled_sha256(folder)


def test_a_sampled_hash_sees_the_whole_length_of_large_tensors(tmp_path):
    values, found = torch.zeros(3 * PIECE * PIECES + 5, dtype=torch.uint8), set()
    for place in (None, 0, PIECE - 1, 3 * PIECE, 3 * PIECE * PIECES + 4):
        if place is not None:
            values[place] ^= 1
        found.add(sampled(tmp_path, {"large": values}))
    assert len(found | {sampled(tmp_path, {"large": values[:-1]}), sampled(tmp_path, {"other": values})}) == 7


def test_a_sampled_hash_sees_every_tensor_however_small(tmp_path):
    """Norms and biases lie between matrices that are sampled."""
    sizes = {"bias": 1, "matrix": 2**18, "norm": 8}
    tensors = {f"{layer}.{name}": torch.zeros(size) for layer in range(9) for name, size in sizes.items()}
    found = {sampled(tmp_path, tensors)}
    for value in tensors.values():
        value[0] = 1
        found.add(sampled(tmp_path, tensors))
    assert len(found) == 1 + len(tensors)


@pytest.mark.parametrize("kind", ["flat", "lens", "clip", "start"])
def test_a_resume_with_other_data_clipping_or_start_is_refused(folders, capsys, pair, kind):
    path = folders / "tokens.npz"
    arrays = dict(np.load(path))
    assert entry(command(folders)) == 0
    if kind == "flat":
        arrays["flat"][7] ^= 1
    if kind == "lens":
        arrays["lens"][0] += np.array([1, -1], np.int64).astype(np.uint16)
    if kind == "start":
        drafter = tiny_drafter(pair[0])
        drafter.model.fc.weight.data[0, 0] += 1
        write_drafter(drafter, folders / "drafter", "specforge")
    np.savez(path, **arrays)
    more = ["--max-grad-norm", "2"] if kind == "clip" else []
    assert entry(command(folders, "--resume", *more)) == 2
    assert "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("token", "length", "part"),
    [(0, 300, "--max-length 256"), (9999, 20, "token 9999"), (-1, 20, "token -1")],
    ids=["long", "high", "negative"],
)
def test_data_that_do_not_fit_the_target_are_refused(folders, capsys, token, length, part):
    np.savez(folders / "tokens.npz", flat=np.full(4 * length, token), lens=np.array([[4, length - 4]] * 4))
    assert entry(command(folders)) == 2
    assert part in capsys.readouterr().err


def test_a_new_drafter_without_layers_is_refused(folders, capsys):
    config = folders / "drafter" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 0}))
    words = command(folders, "--draft-config-path", str(config))
    at = words.index("--draft-init-path")
    assert entry(words[:at] + words[at + 2 :]) == 2
    assert "num_hidden_layers=0" in capsys.readouterr().err
