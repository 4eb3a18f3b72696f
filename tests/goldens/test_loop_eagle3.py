"""Extra drafting stages of linear EAGLE-3 against numbers computed from the equations. Valid for any case."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from chain_cases import Listener, gradient_norms
from safetensors.torch import load_file
from test_loop_block import SCORE_TOLERANCE, assert_close, check_decode
from torch import Tensor
from torch.nn import functional as F

import dloop
from dloop.drafters.host import HostDrafter
from dloop.targets.hf import BatchFeatures, HFTarget
from dloop.train.batch import TrainBatch
from dloop.train.objective import ObjectiveSettings
from dloop.train.unroll import DECAY, Unroll, UnrollObjective
from dloop.types import StageRequest

TOLERANCE = 1e-5  # the README's, of states, logits and losses


@dataclass(frozen=True)
class Golden:
    """The case."""

    spec: dict
    expected: dict
    tensors: dict[str, Tensor]
    checkpoints: Path
    target: HFTarget

    def drafter(self) -> HostDrafter:
        drafter = dloop.load_drafter(str(self.checkpoints / "draft"), self.target)
        return drafter.at_depth(self.spec["tokens_per_stage"])

    def tensor(self, *names: object) -> Tensor:
        return self.tensors[".".join(("eagle3", *map(str, names)))]


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    folder = goldens / "loop_eagle3"
    spec = json.loads((folder / "case.json").read_text())
    checkpoints = (folder / spec["checkpoints"]).resolve()
    return Golden(
        spec=spec,
        expected=json.loads((folder / "expected.json").read_text()),
        tensors=load_file(folder / "expected.safetensors"),
        checkpoints=checkpoints,
        target=dloop.load_target(str(checkpoints / "target"), dtype="float32", engine="twin"),
    )


def test_the_config_says_what_the_case_says(golden):
    drafter = golden.drafter()
    assert drafter.family == "eagle3" and list(drafter.taps) == golden.spec["target_feature_layers"]


def check_stages(golden: Golden, drafter: HostDrafter, number: int) -> None:
    """Draft all stages from one anchor through the drafter's memory and compare every row."""
    ids = golden.tensor(f"anchor{number}", "input_ids").tolist()
    recorded, log, k = golden.expected["anchors"][number], Listener(drafter), drafter.stage_len
    features = golden.target.open(drafter.taps).prefill(0, ids[:-1]).features
    assert_close(features.taps, golden.tensor(f"anchor{number}", "target_features"), TOLERANCE, "features")
    memory, anchor = drafter.open(), ids[-1]
    memory.extend(0, 0, ids[:-1], features)
    for index in range(golden.spec["stages"]):
        stage = memory.draft([StageRequest(slot=0, anchor=anchor, index=index)])[0]
        made = log.rows[index * k : (index + 1) * k]
        states, where = torch.cat([rows.out[-1:] for rows in made]), (f"anchor{number}", f"stage{index + 1}")
        if index == 0:
            assert_close(
                made[0].out, golden.tensor(f"anchor{number}", "stable_rows_hidden_out"), TOLERANCE, "stable rows"
            )
        read = torch.cat([log.tokens(rows)[-1:] for rows in made])
        assert torch.equal(read, golden.tensor(*where, "input_ids")), where
        assert torch.equal(torch.cat([r.positions[-1:] for r in made]), golden.tensor(*where, "position_ids")), where
        assert_close(states, golden.tensor(*where, "hidden"), TOLERANCE, f"states of {where}")
        logits = drafter.model.logits(states, drafter.vocabulary)
        assert_close(logits, golden.tensor(*where, "logits"), TOLERANCE, f"logits of {where}")
        assert torch.equal(logits.argmax(-1), golden.tensor(*where, "draft_vocab_ids")), where
        assert stage.tokens == golden.tensor(*where, "tokens").tolist() == recorded["tokens"][index], where
        assert stage.logp == pytest.approx(golden.tensor(*where, "logprobs").tolist(), abs=SCORE_TOLERANCE), where
        for name in ("score_float32", "score_float64"):
            assert stage.score == pytest.approx(golden.tensor(*where, name).item(), abs=SCORE_TOLERANCE), where
        anchor = stage.tokens[-1]


def test_stages_of_every_anchor(golden):
    for number in range(len(golden.spec["anchors"])):
        check_stages(golden, golden.drafter(), number)


def forgetful(drafter: HostDrafter) -> HostDrafter:
    """Planted: a further stage starts from its anchor's state alone, the rows drafted before are gone."""
    opened = drafter.open()
    stage = opened._stage

    def forgets(request):
        if request.index:
            opened.slots[0].memory.drop_tail()
        return stage(request)

    opened._stage = forgets
    object.__setattr__(drafter, "open", lambda: opened)
    return drafter


def test_a_stage_that_forgets_the_rows_before_it_is_caught(golden):
    with pytest.raises(AssertionError, match="stage2"):
        check_stages(golden, forgetful(golden.drafter()), 0)


def test_whole_decodes(golden):
    drafter = golden.drafter()
    for run in golden.expected["decode"]:
        check_decode(golden, drafter, {**run, "reading": "chain"})


def test_the_gate_matters_and_gate_one_is_the_host_as_released(golden):
    runs = golden.expected["decode"]
    looping = [run for run in runs if any(r["stages"] > 1 for r in run["rounds"])]
    assert looping
    with pytest.raises(AssertionError):  # planted: a gate that never opens
        check_decode(golden, golden.drafter(), {**looping[0], "reading": "chain", "gate": 1.0})
    samples = json.loads((golden.checkpoints / "expected.json").read_text())["samples"]
    for run in runs:
        if run["gate"] >= 1.0:
            nodes = [r["node_tokens"] for r in samples[run["prompt"]]["rounds"]]
            found = [[r["root"], *r["drafted"]] for r in run["rounds"]]
            assert found == nodes[: len(found)] and len(nodes) - len(found) in (0, 1)


def training_row(golden: Golden, drafter: HostDrafter) -> tuple[TrainBatch, BatchFeatures]:
    tokens, mask = (golden.tensor("training", name)[None] for name in ("input_ids", "loss_mask"))
    batch = TrainBatch(tokens, mask.bool(), torch.tensor([tokens.shape[1]]), torch.zeros(1, dtype=torch.int64))
    features = golden.target.features(tokens, drafter.taps)
    assert_close(features.taps[0], golden.tensor("training", "target_features"), TOLERANCE, "features")
    logits = F.linear(features.last[0], drafter.vocabulary.head)
    assert_close(logits, golden.tensor("training", "target_logits"), TOLERANCE, "target logits")
    return batch, features


def test_the_long_unroll_s_states_and_logits(golden):
    drafter = golden.drafter()
    batch, features = training_row(golden, drafter)
    unroll, width = Unroll.begin(drafter.model, drafter.vocabulary, batch, features.taps), batch.tokens.shape[1]
    for step in range(max(run["unroll_length"] for run in golden.expected["training"]["lengths"].values())):
        states, rows = unroll.forward()[0], slice(0, max(0, width - step))
        expected = golden.tensor("training", f"step{step}", "hidden")
        assert_close(states[rows], expected[rows], TOLERANCE, f"states of step {step}")
        if (key := f"eagle3.training.step{step}.logits") in golden.tensors:
            assert_close(
                drafter.model.logits(states, drafter.vocabulary)[rows], golden.tensors[key][rows], TOLERANCE, key
            )


def test_the_long_unroll_s_losses_and_gradients(golden):
    drafter = golden.drafter()
    batch, features = training_row(golden, drafter)
    objective = UnrollObjective(drafter.model.requires_grad_(True), drafter.vocabulary, ObjectiveSettings())
    assert golden.expected["training"]["ploss_decay"] == DECAY
    for run in golden.expected["training"]["lengths"].values():
        drafter.model.zero_grad()
        loss = objective(batch, features, run["unroll_length"])
        loss.total.backward()
        steps = objective.step_sums(batch, features, run["unroll_length"])
        assert [step.item() / batch.tokens.numel() for step in steps] == pytest.approx(run["plosses"], abs=TOLERANCE)
        assert loss.total.item() == pytest.approx(run["loss"], abs=TOLERANCE)
        norms = gradient_norms(drafter.model)
        assert {name: norms[name] for name in run["grad_norms"]} == pytest.approx(run["grad_norms"], rel=1e-4)
