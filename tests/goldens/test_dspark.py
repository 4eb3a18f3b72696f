"""DSpark against numbers of the public original: every round, every tensor, both layouts. Valid for any case."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import dloop
from dloop.drafters.block import BlockDrafter
from dloop.drafters.dspark import DSpark
from dloop.gate import FixedGate
from dloop.judge import Match
from dloop.loop import Drafter, Limits, Session, Target, decode
from dloop.sampling import Sampling
from dloop.targets.hf import BatchFeatures, HFTarget
from dloop.testing import Decoded, gather, write_drafter
from dloop.train.anchors import Anchors, sample_anchors
from dloop.train.batch import TrainBatch
from dloop.train.block import DSparkObjective, ObjectiveSettings
from dloop.train.losses import DSparkWeights, decay_weights
from dloop.train.packed import PackedStages
from dloop.types import Features, Rows, Seen, Stage, StageRequest, Vocabulary

TOLERANCE = 1e-4  # float32, other operator order; about 5e-6 in practice


@dataclass(frozen=True)
class Golden:
    """One case: what was given and what came out."""

    folder: Path
    case: dict
    samples: list[dict]
    tensors: dict[str, Tensor]
    target: HFTarget
    drafter: BlockDrafter


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    folder = goldens / "dspark"
    target = dloop.load_target(str(folder / "target"), dtype="float32")
    return Golden(
        folder=folder,
        case=json.loads((folder / "case.json").read_text()),
        samples=json.loads((folder / "expected.json").read_text())["samples"],
        tensors=load_file(folder / "expected.safetensors"),
        target=target,
        drafter=dloop.load_drafter(str(folder / "draft"), target),
    )


@dataclass
class Trace:
    """A target and a drafter that note what passes."""

    target: Target
    drafter: Drafter
    fed: list[Features] = field(default_factory=list)  # one an `extend`
    asked: list[Rows] = field(default_factory=list)
    answered: list[Seen] = field(default_factory=list)

    @property
    def stage_len(self) -> int:
        return self.drafter.stage_len

    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        return self.target.prefill(slot, tokens)

    def verify(self, rows: Rows) -> Seen:
        self.asked.append(rows)
        self.answered.append(self.target.verify(rows))
        return self.answered[-1]

    def commit(self, slot: int, path: list[int]) -> None:
        self.target.commit(slot, path)

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        self.fed.append(features)
        self.drafter.extend(slot, position, tokens, features)

    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        return self.drafter.draft(requests)


def run(golden: Golden, drafter: BlockDrafter, sample: dict) -> tuple[Decoded, Trace]:
    """The host as released: one stage a round."""
    trace = Trace(golden.target.open(drafter.taps), drafter.open())
    session = Session(trace, trace)
    rules = Limits(
        max_new_tokens=sample["max_new_tokens"],
        stop_ids=frozenset(sample["stop_ids"]),
        context=golden.target.context,
    )
    judge = Match(Sampling(temperature=golden.case["temperature"]))
    task = decode(session, 0, sample["prompt_ids"], gate=FixedGate(), judge=judge, limits=rules)
    return gather([task], session)[0], trace


def public_rounds(decoded: Decoded, sample: dict) -> int:
    """How many of the original's rounds are compared: it may run one surplus round after the output is full."""
    surplus = len(sample["proposed"]) - len(decoded.rounds)
    assert surplus == 0 or (surplus == 1 and len(decoded.tokens) == sample["max_new_tokens"])
    return len(decoded.rounds)


def public_length(decoded: Decoded, index: int, stop_ids: list[int]) -> int:
    """Accepted + 1, or the accepted tokens up to the stop id when one of them is a stop id."""
    r = decoded.rounds[index]
    accepted = [r.draft.tokens[node] for node in r.path]
    stops = [place for place, token in enumerate(accepted) if token in stop_ids]
    return stops[0] + 1 if stops else r.accepted + 1


def confidence(golden: Golden, hidden: Tensor, previous: list[int]) -> Tensor | None:
    return golden.drafter.model.teacher_forced(hidden, torch.tensor(previous), golden.drafter.vocabulary)[1]


def test_the_config_says_what_the_case_says(golden):
    config, case = golden.drafter.config, golden.case
    assert golden.drafter.family == case["family"] == "dspark"
    assert isinstance(golden.drafter.model, DSpark)
    assert config.block_size == case["block_size"]
    assert config.stage_len == case["drafted_per_stage"]
    assert config.mask_token_id == case["mask_token_id"]
    assert list(config.target_layer_ids) == case["target_layer_ids"]
    assert [sample["prompt_ids"] for sample in golden.samples] == case["prompts"]
    assert [sample["stop_ids"] for sample in golden.samples] == case["stop_ids_per_prompt"]


def test_texts_proposals_and_acceptance(golden, record):
    log = record(golden.drafter.model)
    for number, sample in enumerate(golden.samples):
        log.staged.clear()
        decoded, _ = run(golden, golden.drafter, sample)
        assert decoded.tokens == sample["output_ids"] == sample["ar_output_ids"], f"sample {number}"
        for index in range(public_rounds(decoded, sample)):
            r, where = decoded.rounds[index], f"sample {number}, round {index}"
            assert r.anchor == sample["root_tokens"][index], where
            assert r.drafted == sample["proposed"][index], where
            assert public_length(decoded, index, sample["stop_ids"]) == sample["acceptance_lengths"][index], where
            assert r.draft.logp[1:] == pytest.approx(sample["draft_logprobs"][index], abs=TOLERANCE), where
            assert r.scores == pytest.approx([sample["draft_logprob_sums"][index]], abs=TOLERANCE), where
            found = confidence(golden, log.staged[index][2], [r.anchor, *r.drafted[:-1]])
            if found is not None:
                assert found.tolist() == pytest.approx(sample["confidence_logits"][index], abs=TOLERANCE), where


def test_plain_decoding_and_the_loop_give_the_same_text(golden):
    for sample in golden.samples:
        rules = {"max_new_tokens": sample["max_new_tokens"], "stop_token_ids": sample["stop_ids"]}
        plain = dloop.generate_autoregressive(golden.target, sample["prompt_ids"], **rules)
        assert plain.tokens == sample["ar_output_ids"]
        for gate in (-0.5, -2.0, float("-inf")):
            looped = dloop.generate(golden.target, golden.drafter, sample["prompt_ids"], loop_gate=gate, **rules)
            assert looped.tokens == sample["ar_output_ids"]


def ours(golden: Golden, decoded: Decoded, trace: Trace, log, index: int) -> dict[str, Tensor]:
    """All tensors of one round under their names in the file, from what really passed."""
    drafter, r = golden.drafter, decoded.rounds[index]
    rows, block_positions, hidden = log.staged[index]
    previous = torch.tensor([r.anchor, *r.drafted[:-1]])
    taps = torch.cat([features.taps for features in trace.fed[: index + 1]])
    base = F.linear(hidden, drafter.vocabulary.head)
    logits, sure = drafter.model.teacher_forced(hidden, previous, drafter.vocabulary)
    input_ids = torch.tensor([r.anchor] + [drafter.config.mask_token_id] * (drafter.config.block_size - 1))
    assert torch.equal(rows, F.embedding(input_ids, drafter.vocabulary.embedding))
    asked, seen = trace.asked[index], trace.answered[index]
    found = {
        "target_features": trace.fed[index].taps,
        "target_features_all": taps,
        "context_states": torch.cat([states for states, _ in log.projected[: index + 1]]),
        "draft_input_ids": input_ids,
        "draft_position_ids": torch.cat([log.projected[index][1], block_positions]),
        "draft_hidden": hidden,
        "base_logits": base,
        "prev_token_ids": previous,
        "correction": logits - base,
        "draft_logits": logits,
        "draft_token_ids": torch.tensor(r.drafted),
        "draft_logprobs": torch.tensor(r.draft.logp[1:]),
        "verify_input_ids": torch.tensor(asked.token),
        "verify_position_ids": torch.tensor(asked.position),
        "verify_logits": seen.logits,
        "verify_argmax": seen.logits.argmax(-1),
    }
    return found if sure is None else {**found, "confidence_logits": sure}


def differences(golden: Golden, drafter: BlockDrafter, record) -> tuple[int, list[str]]:
    """(number of tensors compared, those that differ)."""
    log = record(drafter.model)
    compared, wrong = 0, []
    for number, sample in enumerate(golden.samples):
        log.staged.clear()
        log.projected.clear()
        decoded, trace = run(golden, drafter, sample)
        for index in range(len(decoded.rounds)):
            prefix = f"sample{number}.stage{index + 1}."
            expected = {key.removeprefix(prefix): t for key, t in golden.tensors.items() if key.startswith(prefix)}
            found = ours(replace(golden, drafter=drafter), decoded, trace, log, index) if expected else {}
            for name, tensor in expected.items():
                compared += 1
                if not same(found[name], tensor):
                    wrong.append(prefix + name)
    return compared, wrong


def same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found.long(), expected.long())
    return bool(((found - expected).abs() <= TOLERANCE).all())


def test_every_tensor_of_every_recorded_round(golden, record):
    assert all(re.fullmatch(r"sample\d+\.stage\d+\.\w+", key) for key in golden.tensors)
    compared, wrong = differences(golden, golden.drafter, record)
    assert wrong == []
    assert compared == len(golden.tensors), "a recorded tensor was not compared"


def test_a_wrong_mask_token_or_gain_is_caught(golden, record):
    """Planted: the comparison above sees a wrong block row and a weight that is one part in a hundred off."""
    other = dloop.load_drafter(str(golden.folder / "draft"), golden.target)
    other.model.config = replace(other.config, mask_token_id=other.config.mask_token_id - 1)
    wrong = differences(golden, other, record)[1]
    assert other.config.block_size == 1 or any(name.endswith("draft_hidden") for name in wrong)
    other = dloop.load_drafter(str(golden.folder / "draft"), golden.target)
    other.model.hidden_norm.weight.mul_(1.01)
    assert any(name.endswith("context_states") for name in differences(golden, other, record)[1])


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


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), what


@dataclass(frozen=True)
class TrainingGolden:
    """The training file of the case: one batch, its anchors, and the losses of several settings."""

    tensors: dict[str, Tensor]
    facts: dict
    batch: TrainBatch
    anchors: Anchors
    features: BatchFeatures
    model: DSpark
    vocabulary: Vocabulary


@pytest.fixture(scope="module")
def training(golden) -> TrainingGolden:
    tensors = load_file(golden.folder / "training.safetensors")
    facts = json.loads((golden.folder / "training.json").read_text())
    tokens, mask = tensors["input_ids"], tensors["loss_mask"].bool()
    rows, width = tokens.shape
    drafter = dloop.load_drafter(str(golden.folder / "draft"), golden.target)  # its own: gradients are switched on
    return TrainingGolden(
        tensors=tensors,
        facts=facts,
        batch=TrainBatch(tokens, mask, torch.full((rows,), width), torch.arange(rows) * width),
        anchors=sample_anchors(mask, facts["num_anchors"], tensors["random_values"]),
        features=golden.target.features(tokens, drafter.taps),
        model=drafter.model.requires_grad_(True),
        vocabulary=drafter.vocabulary,
    )


def test_training_features_and_anchors(training):
    assert_close(training.features.taps, training.tensors["target_features"], "target features")
    assert_close(training.features.last, training.tensors["target_last_hidden"], "last state, after the norm")
    assert torch.equal(training.anchors.keep.long(), training.tensors["anchor_keep"])
    kept = training.anchors.keep
    assert torch.equal(training.anchors.positions[kept], training.tensors["anchor_positions"][kept])


def test_training_mask(training):
    stages = PackedStages.begin(
        training.model, training.vocabulary, training.batch.tokens, training.features.taps, training.anchors
    )
    kept = training.anchors.keep.repeat_interleave(stages.block_size, 1)
    expected = training.tensors["attention_mask"].bool()[:, 0]
    assert torch.equal(stages.mask()[:, 0][kept], expected[kept])


def test_training_logits_labels_and_confidence(training):
    stages = PackedStages.begin(
        training.model, training.vocabulary, training.batch.tokens, training.features.taps, training.anchors
    )
    objective = DSparkObjective(training.model, training.vocabulary, ObjectiveSettings())
    hidden = stages.forward()
    at = stages.starts(0)[..., None] + torch.arange(stages.block_size)
    labels, labelled = objective.labels(at + 1, training.anchors, training.batch)
    previous, _ = objective.labels(at, training.anchors, training.batch)
    logits, confidence = training.model.teacher_forced(hidden, previous, training.vocabulary)
    teacher = F.linear(training.features.last, training.vocabulary.head)
    kept, counted = training.anchors.keep, decay_weights(labelled, None, prefix=True)
    assert torch.equal(counted[kept].long(), training.tensors["eval_mask"][kept])
    rows = counted.bool()
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
        objective = DSparkObjective(training.model, training.vocabulary, settings)
        training.model.zero_grad()
        loss = objective(training.batch, training.features, 0, training.anchors)
        loss.total.backward()
        assert loss.total.item() == pytest.approx(variant["loss"], abs=TOLERANCE)
        for term, sums in zip(("ce", "l1", "confidence"), loss.host[:3], strict=True):
            if variant["terms"][f"{term}_loss_den"]:
                assert sums.item() == pytest.approx(variant["terms"][f"{term}_loss_num"], rel=TOLERANCE), term
                assert loss.host.weight.item() == pytest.approx(variant["terms"][f"{term}_loss_den"], rel=1e-5)
        norms = {k: 0.0 if p.grad is None else p.grad.norm().item() for k, p in training.model.named_parameters()}
        assert norms == pytest.approx(variant["grad_norms"], rel=1e-3, abs=1e-7)
        total = sum(norm**2 for norm in norms.values()) ** 0.5
        assert total == pytest.approx(variant["grad_norm_total"], rel=1e-3)
