"""Domino against numbers of the public original: every round, every tensor, the training loss. Valid for any case."""

from dataclasses import replace

import pytest
import torch
from block_cases import (
    TOLERANCE,
    Golden,
    TrainingGolden,
    check_config,
    check_features_and_anchors,
    check_hidden,
    check_loops,
    check_loss,
    check_mask,
    check_planted,
    check_target_is_shared,
    check_tensors,
    check_texts,
    differences,
    previous_of,
    shared_tensors,
)
from torch import Tensor

import dloop
from dloop.drafters.domino import OLD_PREFIX, Domino
from dloop.testing import write_drafter
from dloop.train.objective import ObjectiveSettings


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    return Golden.read(goldens / "domino")


@pytest.fixture(scope="module")
def training(golden) -> TrainingGolden:
    return TrainingGolden.read(golden)


def tensors_of(golden: Golden, decoded, trace, log, index: int) -> dict[str, Tensor]:
    """A round's tensors: the shared ones, and the recurrent states with what they add to the logits."""
    shared = shared_tensors(golden, decoded, trace, log, index)
    states = golden.drafter.model.states(previous_of(decoded.rounds[index]), golden.drafter.vocabulary)
    base = golden.drafter.model.predicting(shared["base_logits"])
    return {**shared, "gru_states": states, "correction": shared["draft_logits"] - base}


def test_the_config_says_what_the_case_says(golden):
    check_config(golden)
    config = golden.drafter.config
    assert isinstance(golden.drafter.model, Domino)
    assert config.label_shift == (0 if golden.case["shift_label"] else 1)
    assert config.pure_draft_prefix_len == golden.case["pure_draft_prefix_len"]


def test_texts_proposals_and_acceptance(golden):
    check_texts(golden, lambda r, stop_ids: r.accepted + 1)


def test_plain_decoding_and_the_loop_give_the_same_text(golden):
    check_loops(golden)


def test_every_tensor_of_every_recorded_round(golden, record):
    check_tensors(golden, record, tensors_of)


def test_a_wrong_mask_token_or_gain_is_caught(golden, record):
    check_planted(golden, record, tensors_of)


def test_a_correction_of_too_many_or_too_few_rows_is_caught(golden, record):
    """Planted: the uncorrected prefix is one row longer."""
    other = golden.fresh_drafter()
    other.model.config = replace(other.config, pure_draft_prefix_len=other.config.pure_draft_prefix_len + 1)
    wrong = differences(golden, other, record, tensors_of)[1]
    assert any(name.endswith("correction") for name in wrong)


def test_gates_in_another_order_are_caught(golden, record):
    """Planted: reset and update gates exchanged."""
    other = golden.fresh_drafter()
    for weight in (other.model.prefix_gru.weight_ih_l0, other.model.prefix_gru.weight_hh_l0):
        reset, update, new = weight.clone().chunk(3)
        weight.copy_(torch.cat([update, reset, new]))
    wrong = differences(golden, other, record, tensors_of)[1]
    assert any(name.endswith("gru_states") for name in wrong)


def test_the_recurrent_layer_is_pytorch_s(golden):
    head, vocabulary = golden.drafter.model.prefix_gru, golden.drafter.vocabulary
    size, width = head.weight_hh_l0.shape[1], head.weight_ih_l0.shape[1]
    twin = torch.nn.GRU(width, size, bias=False, batch_first=True)
    twin.load_state_dict(head.state_dict())
    previous = torch.arange(2 * 9).view(2, 9) % golden.target.vocab_size
    expected = twin(torch.nn.functional.embedding(previous, vocabulary.embedding))[0]
    assert torch.allclose(golden.drafter.model.states(previous, vocabulary), expected, atol=1e-6)


@pytest.mark.parametrize("layout", ["specforge", "dflash"])
@pytest.mark.parametrize("max_shard_bytes", [None, 50_000], ids=["single", "sharded"])
def test_both_layouts_decode_alike(golden, layout, max_shard_bytes, tmp_path):
    folder = write_drafter(golden.drafter, tmp_path, layout, max_shard_bytes)
    assert (folder / "model.safetensors.index.json").exists() == (max_shard_bytes is not None)
    again = dloop.load_drafter(str(folder), golden.target)
    assert again.family == "domino" and again.config == golden.drafter.config
    assert all(torch.equal(again.model.state_dict()[k], v) for k, v in golden.drafter.model.state_dict().items())


def test_embedding_and_head_are_the_target_s(golden):
    check_target_is_shared(golden)
    assert not any(name.startswith(OLD_PREFIX) for name in golden.drafter.model.state_dict())


def test_training_features_and_anchors(training):
    check_features_and_anchors(training)


def test_training_mask_and_states(training):
    check_mask(training)
    check_hidden(training)


def test_training_losses_gradients_and_accuracy(training):
    for variant in training.facts["variants"]:
        objective = training.objective(ObjectiveSettings(loss_decay_gamma=variant["loss_decay_gamma"]))
        objective.set_lambda(variant["lambda_base"])
        loss = check_loss(training, objective, variant)
        means = loss.host.terms / loss.host.weight
        assert means.tolist() == pytest.approx([variant["final_loss"], variant["base_loss"]], abs=TOLERANCE)
        labels, counted, logits, base = training.forced(objective)
        assert counted.sum().item() == variant["accuracy_denom"]
        for found, name in ((logits, "accuracy"), (base, "base_accuracy")):
            right = (found.argmax(-1) == labels)[counted]
            assert right.float().mean().item() == pytest.approx(variant[name], abs=1e-5), name


def test_a_wrong_share_of_the_base_loss_is_caught(training):
    """Planted: a lambda from the other half."""
    variant = training.facts["variants"][0]
    objective = training.objective(ObjectiveSettings(loss_decay_gamma=variant["loss_decay_gamma"]))
    objective.set_lambda(0.0 if variant["lambda_base"] >= 0.5 else 1.0)
    with pytest.raises(AssertionError):
        check_loss(training, objective, variant)
