"""Extra drafting stages of block drafters against numbers computed from the equations. Valid for any case.

One parameter a family; its name stands in each test's id.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import dloop
from dloop.drafters.block import BlockDrafter
from dloop.drafters.gap import READINGS, gap_rows
from dloop.targets.hf import HFTarget
from dloop.train.anchors import Anchors
from dloop.train.batch import TrainBatch
from dloop.train.block import BlockObjective
from dloop.train.losses import EPSILON
from dloop.train.objective import Loss, ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.packed import PackedStages
from dloop.types import Round, StageRequest

FAMILIES = ("dflash", "dspark", "domino")
HIDDEN_TOLERANCE = 1e-5  # states and features; the README's
CHAINED_TOLERANCE = 3e-5  # from the third stage on: errors of two stages feed the next
LOGITS_TOLERANCE = 2e-5
SCORE_TOLERANCE = 1e-4
ENDS = {"gate": "gate", "stop": "stop_token", "budget": "length", "max_stages": "max_stages"}  # ours, by precedence


@dataclass(frozen=True)
class Golden:
    """One family of the case."""

    family: str
    case: dict
    spec: dict
    expected: dict
    tensors: dict[str, Tensor]
    checkpoints: Path
    target: HFTarget

    def drafter(self, reading: str) -> BlockDrafter:
        return dloop.load_drafter(str(self.checkpoints / "draft"), self.target, gap_rows=reading)

    def tensor(self, *names: str) -> Tensor:
        return self.tensors[".".join((self.family, *names))]

    def has(self, *names: str) -> bool:
        return ".".join((self.family, *names)) in self.tensors

    @property
    def stages(self) -> range:
        return range(1, self.case["stages"] + 1)

    @property
    def anchors(self) -> range:
        return range(len(self.spec["anchors"]))


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request, goldens) -> Golden:
    folder = goldens / "loop_block"
    case = json.loads((folder / "case.json").read_text())
    spec = case["families"][request.param]
    checkpoints = (folder / spec["checkpoints"]).resolve()
    return Golden(
        family=request.param,
        case=case,
        spec=spec,
        expected=json.loads((folder / "expected.json").read_text())[request.param],
        tensors=load_file(folder / "expected.safetensors"),
        checkpoints=checkpoints,
        target=dloop.load_target(
            str(checkpoints / "target"), dtype="float32", engine="twin"
        ),  # its functions are listened to
    )


def assert_close(found: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: {tuple(found.shape)} instead of {tuple(expected.shape)}"
    worst = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    assert worst <= tolerance, f"{what} differs by {worst:.2g}"


def test_the_config_says_what_the_case_says(golden):
    config = golden.drafter("producing").config
    assert golden.drafter("producing").family == golden.family
    assert (config.block_size, config.label_shift) == (golden.spec["block_size"], golden.spec["label_shift_l"])
    assert config.stage_len == golden.spec["tokens_per_stage"]
    assert config.mask_token_id == golden.spec["mask_token_id"]
    assert list(config.target_layer_ids) == golden.spec["target_layer_ids"]
    assert set(golden.case["readings"]) == set(READINGS)


def test_context_features(golden):
    drafter = golden.drafter("producing")
    for number, anchor in enumerate(golden.spec["anchors"]):
        ids = golden.tensor(f"anchor{number}", "input_ids").tolist()
        prompt = golden.spec["prompts"][anchor["sample"]]
        text = dloop.generate_autoregressive(golden.target, prompt, len(ids), stop_token_ids=[]).tokens
        assert ids == (prompt + text)[: anchor["position"] + 1]
        taps = golden.target.open(drafter.taps).prefill(0, ids[:-1]).features.taps
        expected = golden.tensor(f"anchor{number}", "target_features")
        assert_close(taps, expected, HIDDEN_TOLERANCE, f"features of anchor {number}")
        found = drafter.model.context(taps[None])[0]
        expected = golden.tensor(f"anchor{number}", "context_features")
        assert_close(found, expected, HIDDEN_TOLERANCE, f"context of anchor {number}")


def check_stages(golden: Golden, drafter: BlockDrafter, reading: str, number: int, log) -> None:
    """Draft all stages from one anchor through the drafter's memory and compare each with the reading's numbers."""
    ids = golden.tensor(f"anchor{number}", "input_ids").tolist()
    memory = drafter.open()
    memory.extend(0, 0, ids[:-1], golden.target.open(drafter.taps).prefill(0, ids[:-1]).features)
    anchor, leading = ids[-1], []
    short = golden.expected["anchors"][number]["readings"][reading]
    gap_states, gap_positions = torch.empty(0, drafter.config.hidden_size), torch.empty(0, dtype=torch.long)
    for stage in golden.stages:
        log.projected.clear()
        found = memory.draft([StageRequest(slot=0, anchor=anchor, index=stage - 1)])[0]
        for states, positions in log.projected:
            gap_states, gap_positions = torch.cat([gap_states, states]), torch.cat([gap_positions, positions])

        def expected(name: str, stage: int = stage) -> Tensor:
            return golden.tensor(reading, f"anchor{number}", f"stage{stage}", name)

        where = f"{reading}, anchor {number}, stage {stage}"
        tolerance = HIDDEN_TOLERANCE if stage < 3 else CHAINED_TOLERANCE
        rows, positions, hidden = log.staged[-1]
        assert torch.equal(rows, F.embedding(expected("block_input_ids"), drafter.vocabulary.embedding)), where
        assert positions.tolist() == expected("block_position_ids").tolist(), where
        if stage > 1:
            sources = gap_rows(drafter.config.gap_rows, stage - 1, drafter.config.stage_len, drafter.config.label_shift)
            assert [source.stage + 1 for source in sources] == expected("gap_from_stage").tolist(), where
            assert [source.row for source in sources] == expected("gap_from_row").tolist(), where
            assert gap_positions.tolist() == expected("gap_position_ids").tolist(), where
            assert_close(gap_states, expected("gap_rows"), tolerance, f"gap rows of {where}")
        assert_close(hidden, expected("hidden"), tolerance, f"hidden of {where}")

        assert found.tokens == expected("tokens").tolist() == short["tokens"][stage - 1], where
        assert found.logp == pytest.approx(expected("logprobs").tolist(), abs=SCORE_TOLERANCE), where
        for score in (expected("score_float32"), expected("score_float64"), torch.tensor([short["scores"][stage - 1]])):
            assert found.score == pytest.approx(score.item(), abs=SCORE_TOLERANCE), where
        previous = torch.tensor([anchor, *found.tokens[:-1]])
        logits = drafter.model.teacher_forced(hidden, previous, drafter.vocabulary)[0]
        assert_close(logits, expected("logits"), LOGITS_TOLERANCE if stage < 3 else 2 * CHAINED_TOLERANCE, where)
        check_head(golden, drafter, (reading, f"anchor{number}", f"stage{stage}"), previous)
        anchor = found.tokens[-1]
        leading += found.tokens
    right = [a == b for a, b in zip(leading, golden.expected["anchors"][number]["target_continuation"], strict=True)]
    assert [*right, False].index(False) == short["leading_correct"]


def check_head(golden: Golden, drafter: BlockDrafter, where: tuple[str, ...], previous: Tensor) -> None:
    """What the family's head read, where it has one: it restarts in every stage."""
    for name, found in (
        ("prev_token_ids", lambda: previous),
        ("gru_states", lambda: drafter.model.states(previous, drafter.vocabulary)),
    ):
        if golden.has(*where, name):
            assert_close(found(), golden.tensor(*where, name), HIDDEN_TOLERANCE, f"{name} of {where}")


@pytest.mark.parametrize("reading", READINGS)
def test_stages_of_every_reading(golden, reading, record):
    drafter = golden.drafter(reading)
    log = record(drafter.model)
    for number in golden.anchors:
        check_stages(golden, drafter, reading, number, log)


def test_another_reading_is_caught(golden, record):
    """Planted: the check above tells the readings apart."""
    drafter = golden.drafter("anchor_included")
    with pytest.raises(AssertionError):
        check_stages(golden, drafter, "producing", 0, record(drafter.model))


@pytest.mark.parametrize("field", ["row", "offset"])
def test_gap_rows_off_by_one_are_caught(golden, record, field, monkeypatch):
    """Planted: right counts and names, but the drafter takes the state one row, or places it one position, away."""
    from dloop.drafters import block

    drafter, right = golden.drafter("producing"), block.new_gap_rows
    if field == "row" and drafter.config.block_size == 1:
        return  # there is no other row to take

    def shifted(*arguments):
        step = -1 if field == "row" else 1
        return [row._replace(**{field: max(0, getattr(row, field) + step)}) for row in right(*arguments)]

    monkeypatch.setattr(block, "new_gap_rows", shifted)
    with pytest.raises(AssertionError, match="stage [2-9]"):
        check_stages(golden, drafter, "producing", 0, record(drafter.model))


def why_it_ended(r: Round, gate: float, run: dict, rules: dict, produced: int) -> set[str]:
    """Every condition that held after the last stage, in the file's words."""
    held = {
        "gate": r.scores[-1] < gate,
        "stop": not set(rules["stop_token_ids"]).isdisjoint(r.drafted),
        "budget": len(r.drafted) >= rules["max_new_tokens"] - produced,
        "max_stages": r.stages == run["max_stages"],
    }
    return {name for name, holds in held.items() if holds}


def check_decode(golden: Golden, drafter: BlockDrafter, run: dict) -> None:
    spec = golden.spec
    prompt, stops = spec["prompts"][run["prompt"]], spec["stop_ids_per_prompt"][run["prompt"]]
    rules = {"max_new_tokens": spec["max_new_tokens"], "stop_token_ids": stops, "tree_budget": 0}
    out = dloop.generate(golden.target, drafter, prompt, loop_gate=run["gate"], max_stages=run["max_stages"], **rules)
    assert out.tokens == run["output_ids"]
    assert len(out.rounds) == len(run["rounds"])
    produced = 1
    for index, (found, expected) in enumerate(zip(out.rounds, run["rounds"], strict=True)):
        where = f"prompt {run['prompt']}, {run['reading']}, gate {run['gate']}, round {index}"
        assert found.anchor == expected["root"], where
        assert found.stages == expected["stages"], where
        assert found.drafted == expected["drafted"], where
        assert found.accepted == expected["accepted"], where
        stopped = not set(stops).isdisjoint(found.drafted[: found.accepted])
        assert found.bonus == (None if stopped else expected["bonus"]), where  # null when an accepted token stops
        assert found.emitted == expected["new_tokens"], where
        assert found.scores == pytest.approx(expected["scores"], abs=SCORE_TOLERANCE), where
        assert found.scores == pytest.approx(expected["scores_float64"], abs=SCORE_TOLERANCE), where
        assert why_it_ended(found, run["gate"], run, rules, produced) == set(expected["ended_by"]), where
        reasons = [ours for name, ours in ENDS.items() if name in expected["ended_by"]]
        assert [record.reason for record in found.stage_records] == ["open"] * (found.stages - 1) + reasons[:1], where
        produced += len(found.emitted)


@pytest.mark.parametrize("reading", READINGS)
def test_whole_decodes(golden, reading):
    drafter = golden.drafter(reading)
    for run in golden.expected["decode"]:
        if run["reading"] == reading:
            check_decode(golden, drafter, run)


def test_every_recorded_decode_is_run_and_the_gate_matters(golden):
    assert {run["reading"] for run in golden.expected["decode"]} <= set(READINGS)
    looping = [run for run in golden.expected["decode"] if any(r["stages"] > 1 for r in run["rounds"])]
    for run in looping[:1]:
        with pytest.raises(AssertionError):  # planted: a gate that never opens
            check_decode(golden, golden.drafter(run["reading"]), {**run, "gate": 1.0})


def test_gate_one_is_the_host_as_released(golden):
    """Its rounds are the sibling's; the original may have run one surplus round."""
    samples = json.loads((golden.checkpoints / "expected.json").read_text())["samples"]
    for run in golden.expected["decode"]:
        if run["gate"] >= 1.0:
            proposed = samples[run["prompt"]]["proposed"]
            rounds = [r["drafted"] for r in run["rounds"]]
            assert rounds == proposed[: len(rounds)] and len(proposed) - len(rounds) in (0, 1)


def test_every_head_s_tensors_are_there_to_compare(golden):
    """The checks above look at what there is: a family with a head must have something."""
    heads = {"dspark": ["prev_token_ids"], "domino": ["prev_token_ids", "gru_states"], "dflash": []}[golden.family]
    for name in heads:
        assert golden.has(READINGS[0], "anchor0", "stage1", name)


def objective_for(golden: Golden, drafter: BlockDrafter) -> BlockObjective:
    settings = ObjectiveSettings(loss_decay_gamma=golden.spec["loss_decay_gamma"])
    return objective_of(drafter.model, drafter.vocabulary, settings)


def training_row(golden: Golden) -> tuple[TrainBatch, Anchors]:
    """The case's training row with its anchors."""
    tokens = golden.tensor("training", "input_ids")[None]
    mask = golden.tensor("training", "loss_mask")[None].bool()
    starts = golden.tensor("training", "anchor_positions")[None]
    batch = TrainBatch(tokens, mask, torch.tensor([tokens.shape[1]]), torch.zeros(1, dtype=torch.int64))
    return batch, Anchors(starts, torch.ones_like(starts, dtype=torch.bool))


def chain_of(golden: Golden, drafter: BlockDrafter, depth: int) -> tuple[TrainBatch, Anchors, list[Tensor]]:
    """The case's training row, and the packed states of stages 0..depth."""
    batch, anchors = training_row(golden)
    taps = golden.target.features(batch.tokens, drafter.taps).taps
    stages = PackedStages.begin(drafter.model, drafter.vocabulary, batch.tokens, taps, anchors)
    return batch, anchors, [stages.forward() for _ in range(depth + 1)]


@pytest.mark.parametrize("reading", READINGS)
def test_packed_training_stages(golden, reading):
    drafter = golden.drafter(reading)
    k, shift = drafter.config.stage_len, drafter.config.label_shift
    objective = objective_for(golden, drafter)
    for depth in golden.expected["training"]["depths"]:
        batch, anchors, hidden = chain_of(golden, drafter, depth)
        where = f"{reading} depth {depth}"
        assert_close(hidden[0][0], golden.tensor("training", "host_hidden"), HIDDEN_TOLERANCE, "host hidden")
        stored = {
            name: golden.tensor("training", reading, f"k{depth}", name) for name in ("hidden", "logits", "weights")
        }
        starts = anchors.positions[0] + depth * k
        valid = starts < batch.tokens.shape[1]
        assert torch.equal(starts, golden.tensor("training", reading, f"k{depth}", "starts")), where
        assert torch.equal(valid, golden.tensor("training", reading, f"k{depth}", "valid").bool()), where
        gap = gap_rows(reading, depth, k, shift)
        rows = torch.stack([hidden[row.stage][0, :, row.row] for row in gap], 1)
        expected = golden.tensor("training", reading, f"k{depth}", "gap_rows")
        assert_close(rows[valid], expected[valid], CHAINED_TOLERANCE, f"{where} gap rows")
        assert_close(hidden[depth][0][valid], stored["hidden"][valid], CHAINED_TOLERANCE, f"{where} hidden")
        check_rows(golden, objective, hidden[0], 0, ("host_logits", "host_weights"))
        names = (f"{reading}.k{depth}.logits", f"{reading}.k{depth}.weights")
        check_rows(golden, objective, hidden[depth], depth, names)


def check_rows(
    golden: Golden, objective: BlockObjective, hidden: Tensor, stage_index: int, names: tuple[str, str]
) -> None:
    """Teacher-forced logits and weights of one stage of the case's training row."""
    batch, anchors = training_row(golden)
    at = objective.row_positions(stage_index, anchors)
    previous, _ = objective.labels(at, anchors, batch)
    logits, _ = objective.model.teacher_forced(hidden, previous, objective.vocabulary)
    logits_of, weights_of = (golden.tensor("training", name) for name in names)
    width = batch.tokens.shape[1]
    known = at[0] < width  # beyond the text there is no token before
    assert_close(logits[0][known], logits_of[known], 2 * LOGITS_TOLERANCE, names[0])
    weights = objective.row_weights(stage_index, anchors, batch)
    assert_close(weights[0], weights_of, 1e-6, names[1])


def loss_of(golden: Golden, objective: BlockObjective, depth: int) -> tuple[Loss, dict[str, float]]:
    """The mixed loss of one loop depth and its gradient norms."""
    model = objective.model.requires_grad_(True)
    batch, anchors = training_row(golden)
    features = golden.target.features(batch.tokens, model.config.target_layer_ids)
    loss = objective(batch, features, depth, anchors)
    model.zero_grad()
    loss.total.backward()
    return loss, {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reading", READINGS)
def test_training_losses_and_gradients(golden, reading):
    for name, expected in golden.expected["training"]["readings"].get(reading, {}).items():
        objective = objective_for(golden, golden.drafter(reading))
        loss, norms = loss_of(golden, objective, int(name.removeprefix("k")))
        where = f"{reading} {name}"
        assert loss.total.item() == pytest.approx(expected["loss"], abs=1e-5), where
        host, loop = (objective.mixed(sums.terms) / (sums.weight + EPSILON) for sums in (loss.host, loss.loop))
        assert host.item() == pytest.approx(expected["host_loss"], abs=1e-5), where
        assert loop.item() == pytest.approx(expected["loop_loss"], abs=2e-5), where
        for side, sums in (("host", loss.host), ("loop", loss.loop)):
            assert sums.weight.item() == pytest.approx(expected[f"{side}_denominator"], rel=1e-5), where
            anchors = [anchor["numerators"] for anchor in expected[f"{side}_per_anchor"]]
            recorded = {term: sum(anchor[term] for anchor in anchors) for term in anchors[0]}
            assert dict(zip(objective.terms, sums.terms.tolist(), strict=True)) == pytest.approx(recorded, rel=1e-4)
        found = {parameter: norms[parameter] for parameter in expected["grad_norms"]}
        assert found == pytest.approx(expected["grad_norms"], rel=1e-4), where
        detached = expected["grad_norms_if_gap_rows_were_detached"]
        assert found != pytest.approx(detached, rel=1e-3), f"{where}: gradients do not flow through the gap rows"
