"""DFlash against numbers of the public original: every round, every tensor, the training loss. Valid for any case."""

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
    shared_tensors,
)

from dloop.drafters.dflash import DFlash
from dloop.train.objective import ObjectiveSettings


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    return Golden.read(goldens / "dflash")


@pytest.fixture(scope="module")
def training(golden) -> TrainingGolden:
    return TrainingGolden.read(golden)


def test_the_config_says_what_the_case_says(golden):
    check_config(golden)
    assert isinstance(golden.drafter.model, DFlash)
    assert golden.drafter.config.stage_len == golden.drafter.config.block_size - 1


def test_texts_proposals_and_acceptance(golden):
    def as_in_later_releases(number, sample, decoded):
        """They cut the last round at the stop token or the length: what reached the text."""
        lengths = sample["acceptance_lengths_dflash_0_1_0"]
        assert [len(r.emitted) for r in decoded.rounds] == lengths, f"sample {number}"

    check_texts(golden, lambda r, stop_ids: r.accepted + 1, as_in_later_releases)


def test_plain_decoding_and_the_loop_give_the_same_text(golden):
    check_loops(golden)


def test_every_tensor_of_every_recorded_round(golden, record):
    check_tensors(golden, record, shared_tensors)


def test_a_wrong_mask_token_or_gain_is_caught(golden, record):
    check_planted(golden, record, shared_tensors)


def test_next_token_rows_are_caught(golden, record):
    """Planted: rows read as DSpark's, from row 0 on, one token more a stage."""
    other = golden.fresh_drafter()
    other.model.config = replace(other.config, label_shift=0)
    wrong = differences(golden, other, record, shared_tensors)[1]
    assert any(name.endswith("draft_token_ids") for name in wrong)
    assert any(name.endswith("draft_logits") for name in wrong)


def test_embedding_and_head_are_the_target_s(golden):
    check_target_is_shared(golden)


def test_training_features_and_anchors(training):
    check_features_and_anchors(training)


def test_training_mask_and_states(training):
    check_mask(training)
    check_hidden(training)


def test_training_losses_gradients_and_accuracy(training):
    for variant in training.facts["variants"]:
        objective = training.objective(ObjectiveSettings(loss_decay_gamma=variant["loss_decay_gamma"]))
        loss = check_loss(training, objective, variant)
        assert loss.host.terms.tolist() == pytest.approx([variant["loss_numerator"]], rel=TOLERANCE)
        assert loss.host.weight.item() == pytest.approx(variant["loss_denominator"], rel=1e-5)
        labels, counted, logits, _ = training.forced(objective)
        assert counted.sum().item() == variant["accuracy_denom"]
        right = (logits.argmax(-1) == labels)[counted]
        assert right.float().mean().item() == pytest.approx(variant["accuracy"], abs=1e-5)


def test_labels_cut_at_the_first_gap_are_caught(training):
    """Planted: DSpark's prefix mask weighs fewer rows wherever a label is missing inside a block."""
    objective = training.objective(ObjectiveSettings())
    _, counted, _, _ = training.forced(objective)
    whole = torch.equal(counted, counted.cumprod(-1).bool())
    objective.prefix = True
    assert whole or not torch.equal(training.forced(objective)[1], counted)
