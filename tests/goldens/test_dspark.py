"""DSpark against numbers of the public original: every round, every tensor, both layouts. Valid for any case."""

import pytest
import torch
from block_cases import (
    TOLERANCE,
    Golden,
    TrainingGolden,
    assert_close,
    check_config,
    check_features_and_anchors,
    check_loops,
    check_loss,
    check_mask,
    check_planted,
    check_tensors,
    check_texts,
    previous_of,
    run,
    shared_tensors,
)
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import dloop
from dloop.drafters.dspark import DSpark
from dloop.testing import Decoded, write_drafter
from dloop.train.losses import DSparkWeights
from dloop.train.objective import ObjectiveSettings
from dloop.types import Round


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    return Golden.read(goldens / "dspark")


@pytest.fixture(scope="module")
def training(golden) -> TrainingGolden:
    return TrainingGolden.read(golden)


def public_length(r: Round, stop_ids: list[int]) -> int:
    """Accepted + 1, or the accepted tokens up to the stop id when one of them is a stop id."""
    accepted = [r.draft.tokens[node] for node in r.path]
    stops = [place for place, token in enumerate(accepted) if token in stop_ids]
    return stops[0] + 1 if stops else r.accepted + 1


def tensors_of(golden: Golden, decoded: Decoded, trace, log, index: int) -> dict[str, Tensor]:
    """A round's tensors: the shared ones, what the Markov head adds, and the confidence head's logits."""
    shared = shared_tensors(golden, decoded, trace, log, index)
    previous = previous_of(decoded.rounds[index])
    _, sure = golden.drafter.model.teacher_forced(shared["draft_hidden"], previous, golden.drafter.vocabulary)
    found = {**shared, "correction": shared["draft_logits"] - shared["base_logits"]}
    return found if sure is None else {**found, "confidence_logits": sure}


def test_the_config_says_what_the_case_says(golden):
    check_config(golden)
    assert isinstance(golden.drafter.model, DSpark)


def test_texts_proposals_and_acceptance(golden, record):
    log, drafter = record(golden.drafter.model), golden.drafter

    def confidence_too(number, sample, decoded):
        for index, r in enumerate(decoded.rounds):
            hidden = log.staged[index][2]
            _, found = drafter.model.teacher_forced(hidden, previous_of(r), drafter.vocabulary)
            if found is not None:
                expected = sample["confidence_logits"][index]
                assert found.tolist() == pytest.approx(expected, abs=TOLERANCE), f"sample {number}, round {index}"
        log.staged.clear()

    check_texts(golden, public_length, confidence_too)


def test_plain_decoding_and_the_loop_give_the_same_text(golden):
    check_loops(golden)


def test_every_tensor_of_every_recorded_round(golden, record):
    check_tensors(golden, record, tensors_of)


def test_a_wrong_mask_token_or_gain_is_caught(golden, record):
    check_planted(golden, record, tensors_of)


@pytest.mark.parametrize("layout", ["specforge", "deepspec"])
@pytest.mark.parametrize("max_shard_bytes", [None, 50_000], ids=["single", "sharded"])
def test_both_layouts_decode_alike(golden, layout, max_shard_bytes, tmp_path):
    folder = write_drafter(golden.drafter, tmp_path, layout, max_shard_bytes)
    assert (folder / "model.safetensors.index.json").exists() == (max_shard_bytes is not None)
    again = dloop.load_drafter(str(folder), golden.target)
    assert again.config == golden.drafter.config
    for sample in golden.samples:
        first, second = (run(golden, drafter, sample)[0].rounds for drafter in (golden.drafter, again))
        assert [(r.drafted, r.path) for r in first] == [(r.drafted, r.path) for r in second]
        scores = [[score for r in rounds for score in r.scores] for rounds in (first, second)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-5)  # weights at other addresses: other kernels


def test_the_released_layout_carries_the_target_s_own_embedding_and_head(golden):
    stored = load_file(golden.folder / "draft" / "model.safetensors")
    shared = golden.target.vocabulary
    assert torch.equal(stored["embed_tokens.weight"], shared.embedding)
    assert golden.drafter.vocabulary.embedding is not None
    assert golden.drafter.vocabulary.embedding.data_ptr() == shared.embedding.data_ptr(), "kept once, not twice"
    assert golden.drafter.vocabulary.head.data_ptr() == shared.head.data_ptr()
    used = golden.drafter.model.state_dict()
    for key, tensor in stored.items():
        if key not in ("embed_tokens.weight", "lm_head.weight"):
            assert torch.equal(used[key], tensor), key
    assert set(used) == set(stored) - {"embed_tokens.weight", "lm_head.weight"}


def test_training_features_and_anchors(training):
    check_features_and_anchors(training)


def test_training_mask(training):
    check_mask(training)


def test_training_logits_labels_and_confidence(training):
    objective = training.objective(ObjectiveSettings(loss_decay_gamma=None))
    labels, rows, logits, confidence = training.forced(objective)
    at = objective.row_positions(0, training.anchors)
    teacher = F.linear(training.features.last, training.vocabulary.head)
    kept = training.anchors.keep
    assert torch.equal(rows[kept].long(), training.tensors["eval_mask"][kept])
    assert torch.equal(labels[rows], training.tensors["target_ids"][rows])
    assert_close(logits[kept].detach(), training.tensors["draft_logits"][kept], "draft logits")
    assert_close(confidence[kept].detach(), training.tensors["confidence_pred"][kept], "confidence logits")
    which = torch.arange(len(at))[:, None, None].expand_as(at)
    assert_close(teacher[which[rows], at[rows]], training.tensors["aligned_target_logits"][rows], "teacher logits")


def test_training_losses_and_gradients(training):
    for variant in training.facts["variants"]:
        weights = DSparkWeights(
            ce=variant["ce_loss_alpha"], l1=variant["l1_loss_alpha"], confidence=variant["confidence_head_alpha"]
        )
        settings = ObjectiveSettings(loss_decay_gamma=variant["loss_decay_gamma"], weights=weights)
        objective = training.objective(settings)
        loss = check_loss(training, objective, variant)
        for term, sums in zip(objective.terms, loss.host.terms, strict=True):
            if variant["terms"][f"{term}_loss_den"]:
                assert sums.item() == pytest.approx(variant["terms"][f"{term}_loss_num"], rel=TOLERANCE), term
                assert loss.host.weight.item() == pytest.approx(variant["terms"][f"{term}_loss_den"], rel=1e-5)
