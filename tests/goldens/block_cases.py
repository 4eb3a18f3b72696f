"""What the golden tests of the block families share: a case, a run of it that notes what passes, comparisons."""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import dloop
from dloop.drafters.block import BlockDrafter, BlockModel
from dloop.gate import FixedGate
from dloop.judge import Match
from dloop.loop import Drafter, Limits, Session, Target, decode
from dloop.sampling import Sampling
from dloop.targets.hf import BatchFeatures, HFTarget
from dloop.testing import Decoded, gather
from dloop.train.anchors import Anchors, sample_anchors
from dloop.train.batch import TrainBatch
from dloop.train.block import BlockObjective
from dloop.train.objective import Loss, ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.packed import PackedStages
from dloop.types import Features, Round, Rows, Seen, Stage, StageRequest, Vocabulary

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

    @classmethod
    def read(cls, folder: Path) -> "Golden":
        target = dloop.load_target(
            str(folder / "target"), dtype="float32", engine="twin"
        )  # its functions are listened to
        return cls(
            folder=folder,
            case=json.loads((folder / "case.json").read_text()),
            samples=json.loads((folder / "expected.json").read_text())["samples"],
            tensors=load_file(folder / "expected.safetensors"),
            target=target,
            drafter=dloop.load_drafter(str(folder / "draft"), target),
        )

    def fresh_drafter(self) -> BlockDrafter:
        """Its own copy, to spoil or to train."""
        return dloop.load_drafter(str(self.folder / "draft"), self.target)


def check_config(golden: Golden) -> None:
    """The config says what the case says."""
    config, case = golden.drafter.config, golden.case
    assert golden.drafter.family == config.family == case["family"]
    assert config.block_size == case["block_size"]
    assert config.stage_len == case["drafted_per_stage"]
    assert config.mask_token_id == case["mask_token_id"]
    assert list(config.target_layer_ids) == case["target_layer_ids"]
    assert [sample["prompt_ids"] for sample in golden.samples] == case["prompts"]
    assert [sample["stop_ids"] for sample in golden.samples] == case["stop_ids_per_prompt"]


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
    """How many of the original's rounds are compared: it may run one surplus round after the output is complete."""
    surplus = len(sample["proposed"]) - len(decoded.rounds)
    complete = len(decoded.tokens) == sample["max_new_tokens"] or decoded.tokens[-1] in sample["stop_ids"]
    assert surplus == 0 or (surplus == 1 and complete)
    return len(decoded.rounds)


def check_texts(
    golden: Golden, counted: Callable[[Round, list[int]], int], also: Callable[[int, dict, Decoded], None] | None = None
) -> None:
    """Texts, proposals, log-probabilities, `counted` (what the original records of a round), what a family adds."""
    for number, sample in enumerate(golden.samples):
        decoded, _ = run(golden, golden.drafter, sample)
        assert decoded.tokens == sample["output_ids"] == sample["ar_output_ids"], f"sample {number}"
        for index in range(public_rounds(decoded, sample)):
            r, where = decoded.rounds[index], f"sample {number}, round {index}"
            assert r.anchor == sample["root_tokens"][index], where
            assert r.drafted == sample["proposed"][index], where
            assert counted(r, sample["stop_ids"]) == sample["acceptance_lengths"][index], where
            assert r.draft.logp[1:] == pytest.approx(sample["draft_logprobs"][index], abs=TOLERANCE), where
            assert r.scores == pytest.approx([sample["draft_logprob_sums"][index]], abs=TOLERANCE), where
        if also is not None:
            also(number, sample, decoded)


def check_loops(golden: Golden) -> None:
    """Plain decoding and the loop at several gates give the same text."""
    for sample in golden.samples:
        rules = {"max_new_tokens": sample["max_new_tokens"], "stop_token_ids": sample["stop_ids"]}
        plain = dloop.generate_autoregressive(golden.target, sample["prompt_ids"], **rules)
        assert plain.tokens == sample["ar_output_ids"]
        for gate in (-0.5, -2.0, float("-inf")):
            looped = dloop.generate(golden.target, golden.drafter, sample["prompt_ids"], loop_gate=gate, **rules)
            assert looped.tokens == sample["ar_output_ids"]


def shared_tensors(golden: Golden, decoded: Decoded, trace: Trace, log, index: int) -> dict[str, Tensor]:
    """The tensors of one round that every family has, under their names in the file, from what really passed."""
    drafter, r = golden.drafter, decoded.rounds[index]
    rows, block_positions, hidden = log.staged[index]
    input_ids = torch.tensor([r.anchor] + [drafter.config.mask_token_id] * (drafter.config.block_size - 1))
    assert torch.equal(rows, F.embedding(input_ids, drafter.vocabulary.embedding))
    asked, seen = trace.asked[index], trace.answered[index]
    return {
        "target_features": trace.fed[index].taps,
        "target_features_all": torch.cat([features.taps for features in trace.fed[: index + 1]]),
        "context_states": torch.cat([states for states, _ in log.projected[: index + 1]]),
        "draft_input_ids": input_ids,
        "draft_position_ids": torch.cat([log.projected[index][1], block_positions]),
        "draft_hidden": hidden,
        "base_logits": F.linear(hidden, drafter.vocabulary.head),
        "prev_token_ids": previous_of(r),
        "draft_logits": drafter.model.teacher_forced(hidden, previous_of(r), drafter.vocabulary)[0],
        "draft_token_ids": torch.tensor(r.drafted),
        "draft_logprobs": torch.tensor(r.draft.logp[1:]),
        "verify_input_ids": torch.tensor(asked.token),
        "verify_position_ids": torch.tensor(asked.position),
        "verify_logits": seen.logits,
        "verify_argmax": seen.logits.argmax(-1),
    }


def previous_of(r: Round) -> Tensor:
    """The token before each drafted one."""
    return torch.tensor([r.anchor, *r.drafted[:-1]])


def differences(golden: Golden, drafter: BlockDrafter, record, tensors_of: Callable) -> tuple[int, list[str]]:
    """(number of tensors compared, those that differ); `tensors_of` gives a round's tensors by name."""
    log = record(drafter.model)
    compared, wrong = 0, []
    for number, sample in enumerate(golden.samples):
        log.staged.clear()
        log.projected.clear()
        decoded, trace = run(golden, drafter, sample)
        for index in range(len(decoded.rounds)):
            prefix = f"sample{number}.stage{index + 1}."
            expected = {key.removeprefix(prefix): t for key, t in golden.tensors.items() if key.startswith(prefix)}
            found = tensors_of(replace(golden, drafter=drafter), decoded, trace, log, index) if expected else {}
            for name, tensor in expected.items():
                compared += 1
                if not same(found[name], tensor):
                    wrong.append(prefix + name)
    return compared, wrong


def check_tensors(golden: Golden, record, tensors_of: Callable) -> None:
    """Every tensor of every recorded round, and none left out."""
    assert all(re.fullmatch(r"sample\d+\.stage\d+\.\w+", key) for key in golden.tensors)
    compared, wrong = differences(golden, golden.drafter, record, tensors_of)
    assert wrong == []
    assert compared == len(golden.tensors), "a recorded tensor was not compared"


def check_planted(golden: Golden, record, tensors_of: Callable) -> None:
    """Planted: the comparison sees a wrong block row, and a weight that is one part in a hundred off."""
    other = golden.fresh_drafter()
    other.model.config = replace(other.config, mask_token_id=other.config.mask_token_id - 1)
    wrong = differences(golden, other, record, tensors_of)[1]
    assert other.config.block_size == 1 or any(name.endswith("draft_hidden") for name in wrong)
    other = golden.fresh_drafter()
    other.model.hidden_norm.weight.mul_(1.01)
    wrong = differences(golden, other, record, tensors_of)[1]
    assert any(name.endswith("context_states") for name in wrong)


def same(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    if not expected.is_floating_point():
        return torch.equal(found.long(), expected.long())
    return bool(((found - expected).abs() <= TOLERANCE).all())


def assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE), what


def check_target_is_shared(golden: Golden) -> None:
    """A layout without embedding and head takes the target's very own, and every stored tensor is used."""
    stored = load_file(golden.folder / "draft" / "model.safetensors")
    shared = golden.target.vocabulary
    assert golden.drafter.vocabulary.embedding.data_ptr() == shared.embedding.data_ptr()
    assert golden.drafter.vocabulary.head.data_ptr() == shared.head.data_ptr()
    used = golden.drafter.model.state_dict()
    assert used.keys() == stored.keys()
    assert all(torch.equal(used[key], tensor) for key, tensor in stored.items())


@dataclass(frozen=True)
class TrainingGolden:
    """The training file of a case: one batch, its anchors, and the losses of several settings."""

    tensors: dict[str, Tensor]
    facts: dict
    batch: TrainBatch
    anchors: Anchors
    features: BatchFeatures
    model: BlockModel
    vocabulary: Vocabulary

    @classmethod
    def read(cls, golden: Golden) -> "TrainingGolden":
        tensors = load_file(golden.folder / "training.safetensors")
        facts = json.loads((golden.folder / "training.json").read_text())
        tokens, mask = tensors["input_ids"], tensors["loss_mask"].bool()
        rows, width = tokens.shape
        drafter = golden.fresh_drafter()
        return cls(
            tensors=tensors,
            facts=facts,
            batch=TrainBatch(tokens, mask, torch.full((rows,), width), torch.arange(rows) * width),
            anchors=sample_anchors(mask, facts["num_anchors"], tensors["random_values"]),
            features=golden.target.features(tokens, drafter.taps),
            model=drafter.model.requires_grad_(True),
            vocabulary=drafter.vocabulary,
        )

    def stages(self) -> PackedStages:
        """Nothing drafted yet."""
        return PackedStages.begin(self.model, self.vocabulary, self.batch.tokens, self.features.taps, self.anchors)

    def objective(self, settings: ObjectiveSettings) -> BlockObjective:
        return objective_of(self.model, self.vocabulary, settings)

    def forced(self, objective: BlockObjective) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """(labels, which of them count, teacher-forced logits of the first stage, what is given beside them)."""
        at = objective.row_positions(0, self.anchors)
        labels, _ = objective.labels(at + 1, self.anchors, self.batch)
        previous, _ = objective.labels(at, self.anchors, self.batch)
        logits, beside = self.model.teacher_forced(self.stages().forward(), previous, self.vocabulary)
        return labels, objective.row_weights(0, self.anchors, self.batch) > 0, logits, beside


def check_features_and_anchors(training: TrainingGolden) -> None:
    assert_close(training.features.taps, training.tensors["target_features"], "target features")
    assert_close(training.features.last, training.tensors["target_last_hidden"], "last state, after the norm")
    assert torch.equal(training.anchors.keep.long(), training.tensors["anchor_keep"])
    kept = training.anchors.keep
    assert torch.equal(training.anchors.positions[kept], training.tensors["anchor_positions"][kept])


def check_mask(training: TrainingGolden) -> None:
    stages = training.stages()
    kept = training.anchors.keep.repeat_interleave(stages.block_size, 1)
    expected = training.tensors["attention_mask"].bool()[:, 0]
    assert torch.equal(stages.mask()[:, 0][kept], expected[kept])


def check_hidden(training: TrainingGolden) -> None:
    kept = training.anchors.keep
    assert_close(training.stages().forward()[kept].detach(), training.tensors["draft_hidden"][kept], "draft hidden")


def check_loss(training: TrainingGolden, objective: BlockObjective, variant: dict) -> Loss:
    """The host loss of one variant and the gradient norm of every parameter; the loss, for what a family adds."""
    training.model.zero_grad()
    loss = objective(training.batch, training.features, 0, training.anchors)
    loss.total.backward()
    assert loss.total.item() == pytest.approx(variant["loss"], abs=TOLERANCE)
    norms = {k: 0.0 if p.grad is None else p.grad.norm().item() for k, p in training.model.named_parameters()}
    assert norms == pytest.approx(variant["grad_norms"], rel=1e-3, abs=1e-7)
    total = sum(norm**2 for norm in norms.values()) ** 0.5
    assert total == pytest.approx(variant["grad_norm_total"], rel=1e-3)
    return loss
