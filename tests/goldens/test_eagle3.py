"""Linear EAGLE-3 against numbers of the public originals: every round, every tensor, training. Valid for any case."""

import json
import re
from dataclasses import dataclass, replace

import pytest
import torch
from block_cases import TOLERANCE, Golden, assert_close, run, same
from chain_cases import Listener, gradient_norms
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

import dloop
from dloop.drafters.eagle3 import Eagle3
from dloop.drafters.host import HostDrafter
from dloop.targets.hf import BatchFeatures
from dloop.testing import Decoded, write_drafter
from dloop.train.batch import TrainBatch
from dloop.train.objective import ObjectiveSettings
from dloop.train.unroll import DECAY, Unroll, UnrollObjective

TREE = ("candidates", "selected", "tree")  # the original drafts its chain as a tree of one child a node


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    golden = Golden.read(goldens / "eagle3")
    return replace(golden, drafter=golden.drafter.at_depth(golden.case["drafted_levels"]))


def fresh(golden: Golden) -> HostDrafter:
    """Its own copy, to spoil or to train."""
    return golden.fresh_drafter().at_depth(golden.case["drafted_levels"])


def test_the_config_says_what_the_case_says(golden):
    config, case = golden.drafter.config, golden.case
    assert golden.drafter.family == config.family == case["family"]
    assert list(golden.drafter.taps) == case["target_feature_layers"]["decoder_layer_outputs"]
    assert config.draft_vocab_size == case["draft_vocab_size"] == len(golden.drafter.model.kept)
    assert golden.drafter.stage_len == case["drafted_levels"]
    assert isinstance(golden.drafter.model, Eagle3)


def test_texts_chains_and_acceptance(golden):
    for number, sample in enumerate(golden.samples):
        decoded, _ = run(golden, golden.drafter, sample)
        assert decoded.tokens == sample["output_ids"] == sample["ar_output_ids"], f"sample {number}"
        surplus = len(sample["rounds"]) - len(decoded.rounds)
        complete = len(decoded.tokens) == sample["max_new_tokens"] or decoded.tokens[-1] in sample["stop_ids"]
        assert surplus == 0 or (surplus == 1 and complete)
        for index, r in enumerate(decoded.rounds):
            where, expected = f"sample {number}, round {index}", sample["rounds"][index]
            assert [r.anchor, *r.drafted] == expected["node_tokens"], where
            assert r.accepted == sample["accepted_draft_tokens"][index] == len(expected["accepted_nodes"]) - 1, where
            assert r.bonus in (None, expected["next_token"]), where
            assert r.draft.logp[1:] == pytest.approx(expected["draft_logprobs"], abs=TOLERANCE), where
            assert r.scores == pytest.approx([expected["draft_logprob_sum"]], abs=TOLERANCE), where


def test_plain_decoding_and_the_loop_give_the_same_text(golden):
    for sample in golden.samples:
        rules = {"max_new_tokens": sample["max_new_tokens"], "stop_token_ids": sample["stop_ids"], "tree_budget": 0}
        assert (
            dloop.generate_autoregressive(golden.target, sample["prompt_ids"], **rules).tokens == sample["output_ids"]
        )
        for gate in (-2.0, -7.0, float("-inf")):
            looped = dloop.generate(golden.target, golden.drafter, sample["prompt_ids"], loop_gate=gate, **rules)
            assert looped.tokens == sample["output_ids"]


def tensors_of(golden: Golden, decoded: Decoded, trace, log: Listener, index: int) -> dict[str, Tensor]:
    """A round's tensors under their names in the file. The row that read a round's anchor is made anew with the next
    round's rows, so of those only the last ones are new.
    """
    r, model = decoded.rounds[index], golden.drafter.model
    depth, taps = golden.drafter.stage_len, trace.fed[index].taps
    first, *steps = log.rows[index * depth : (index + 1) * depth]
    count, asked, seen = len(taps), trace.asked[index], trace.answered[index]
    logits = model.logits(first.out[-1], golden.drafter.vocabulary)
    found = {
        "target_features": taps,
        "input_ids_all": torch.tensor([*trace.text[: r.context_len], r.anchor]),
        "kv_len": first.positions[-count:][:1],
        "fc_out": first.states[-count:],
        "first.draft_input_ids": log.tokens(first)[-count:],
        "first.hidden_out": first.out[-count:],
        "first.logits_last_row": logits,
        "first.logprobs_last_row": logits.log_softmax(-1),
        "verify.logits": seen.logits,
        "verify.argmax": seen.logits.argmax(-1),
        "verify.position_ids": torch.tensor(asked.position),
        "verify.accepted_nodes": torch.tensor([0, *r.path]),
    }
    for step, rows in enumerate(steps, 1):
        found |= {
            f"depth{step}.draft_input_ids": log.tokens(rows),
            f"depth{step}.input_hidden": rows.states,
            f"depth{step}.position_ids": rows.positions,
            f"depth{step}.hidden_out": rows.out,
            f"depth{step}.logits": model.logits(rows.out, golden.drafter.vocabulary),
            f"depth{step}.tree_mask": torch.ones(1, step),  # a chain: every drafted row before, and itself
        }
    return found


def differences(golden: Golden, drafter: HostDrafter) -> tuple[int, list[str]]:
    """(number of tensors compared, those that differ)."""
    golden, log = replace(golden, drafter=drafter), Listener(drafter)
    compared, wrong = 0, []
    for number, sample in enumerate(golden.samples):
        log.rows.clear()
        decoded, trace = run(golden, drafter, sample)
        trace.text = [*sample["prompt_ids"], *decoded.tokens]
        for index in range(len(decoded.rounds)):
            prefix = f"sample{number}.round{index + 1}."
            expected = {key.removeprefix(prefix): t for key, t in golden.tensors.items() if key.startswith(prefix)}
            found = tensors_of(golden, decoded, trace, log, index) if expected else {}
            for name, tensor in expected.items():
                if name.split(".")[0] in TREE:
                    continue
                compared += 1
                if not same(found[name], tensor):
                    wrong.append(prefix + name)
    return compared, wrong


def test_every_tensor_of_every_recorded_round(golden):
    assert all(re.fullmatch(r"sample\d+\.round\d+\.[\w.]+", key) for key in golden.tensors)
    compared, wrong = differences(golden, fresh(golden))
    assert wrong == []
    assert compared == sum(key.split(".")[2] not in TREE for key in golden.tensors), "a tensor was not compared"


def post_norm(drafter: HostDrafter) -> HostDrafter:
    model, rows = drafter.model, drafter.model.rows
    model.rows = lambda *given: model.norm(rows(*given))
    model.logits = lambda states, vocabulary: model.lm_head(states)
    return drafter


def swapped(drafter: HostDrafter) -> HostDrafter:
    layer = drafter.model.midlayer
    layer.input_layernorm, layer.hidden_norm = layer.hidden_norm, layer.input_layernorm
    return drafter


def other_base(drafter: HostDrafter) -> HostDrafter:
    drafter.model.config = replace(drafter.config, rope_theta=drafter.config.rope_theta / 100)
    return drafter


@pytest.mark.parametrize(
    ("spoil", "part"), [(post_norm, "depth1.hidden_out"), (swapped, "first.hidden_out"), (other_base, "depth1.logits")]
)
def test_a_wrong_state_norm_or_rope_base_is_caught(golden, spoil, part):
    """Planted: the state after the norm is handed on; the norms of token and state change places; another base."""
    assert any(name.endswith(part) for name in differences(golden, spoil(fresh(golden)))[1])


def test_the_layout_is_written_as_it_was_read(golden, tmp_path):
    folder = write_drafter(golden.drafter, tmp_path, "specforge")
    again = dloop.load_drafter(str(folder), golden.target)
    assert again.config == golden.drafter.config
    stored, written = (load_file(place / "model.safetensors") for place in (golden.folder / "draft", folder))
    assert stored.keys() == written.keys()
    assert all(torch.equal(stored[key], written[key]) and stored[key].dtype == written[key].dtype for key in stored)
    before = json.loads((golden.folder / "draft" / "config.json").read_text())
    after = json.loads((folder / "config.json").read_text())
    assert {key: after[key] for key in after if key in before} == {key: before[key] for key in before if key in after}


def test_safeailab_s_layout_decodes_alike(golden, tmp_path):
    """A plain Llama config, and the embedding beside the weights."""
    raw = json.loads((golden.folder / "draft" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"architectures": ["LlamaForCausalLM"]}))
    stored = load_file(golden.folder / "draft" / "model.safetensors")
    save_file(
        stored | {"embed_tokens.weight": golden.target.vocabulary.embedding.clone()}, tmp_path / "model.safetensors"
    )
    again = dloop.load_drafter(str(tmp_path), golden.target)
    assert again.family == "eagle3"
    assert again.vocabulary.embedding.data_ptr() == golden.target.vocabulary.embedding.data_ptr(), "kept once"
    for sample in golden.samples:
        chains = [run(golden, d.at_depth(golden.drafter.stage_len), sample)[0].rounds for d in (golden.drafter, again)]
        assert [r.drafted for r in chains[0]] == [r.drafted for r in chains[1]]


@dataclass(frozen=True)
class Training:
    """The training file of the case."""

    tensors: dict[str, Tensor]
    facts: dict
    batch: TrainBatch
    features: BatchFeatures
    objective: UnrollObjective


@pytest.fixture
def training(golden) -> Training:
    tensors = load_file(golden.folder / "training.safetensors")
    tokens, drafter = tensors["input_ids"], golden.fresh_drafter()
    rows, width = tokens.shape
    return Training(
        tensors=tensors,
        facts=json.loads((golden.folder / "training.json").read_text()),
        batch=TrainBatch(tokens, tensors["loss_mask"].bool(), torch.full((rows,), width), torch.arange(rows) * width),
        features=golden.target.features(tokens, drafter.taps),
        objective=UnrollObjective(drafter.model.requires_grad_(True), drafter.vocabulary, ObjectiveSettings()),
    )


def test_training_features_and_teacher(training):
    found, expected = training.objective.teacher(training.batch, training.features), training.tensors
    assert_close(training.features.taps, expected["target_features"], "target features")
    logits = F.linear(training.features.last, training.objective.vocabulary.head)
    assert_close(logits, expected["target_logits"], "target logits")
    assert_close(training.objective.law_of(found.states, found.head), expected["target_p"], "teacher")
    assert torch.equal(found.choice, expected["target_token_ids"])
    assert torch.equal(found.counted, expected["position_mask"].bool())


def unrolled(training: Training, length: int) -> list[tuple[Tensor, Tensor]]:
    """(states, logits) of every step."""
    objective = training.objective
    unroll = Unroll.begin(objective.model, objective.vocabulary, training.batch, training.features.taps)
    states = [unroll.forward() for _ in range(length)]
    return [(step, objective.model.logits(step, objective.vocabulary)) for step in states]


def test_training_states_logits_accuracies_and_acceptance(training):
    teacher, width = training.objective.teacher(training.batch, training.features), training.batch.tokens.shape[1]
    kept, mask = training.objective.model.kept, training.batch.loss_mask
    full = F.linear(F.pad(training.features.last[:, 1:], (0, 0, 0, 1)), training.objective.vocabulary.head)
    full[:, -1] = 0  # no logits follow the last token
    full = full.softmax(-1)[..., kept]
    for variant in training.facts["variants"]:
        length = variant["ttt_length"]
        for step, (states, logits) in enumerate(unrolled(training, length)):
            rows, where = slice(0, width - step), f"length {length}, step {step}"
            for name, found in (("hidden", states), ("logits", logits)):
                if (key := f"ttt{length}.step{step}.{name}") in training.tensors:
                    assert_close(found[:, rows], training.tensors[key][:, rows], key)
            right = (kept[logits.argmax(-1)][:, rows] == teacher.choice[:, step:]) & teacher.counted[:, step:]
            assert right.sum().item() == variant["correct"][step], where
            assert mask[:, step:].sum().item() == variant["denominators"][step], where
            shared = torch.minimum(full[:, step:], logits.softmax(-1)[:, rows]).sum(-1)[teacher.counted[:, step:]]
            assert shared.mean().item() == pytest.approx(variant["acceptance_rates"][step], abs=TOLERANCE), where


def test_training_losses_and_gradients(training):
    objective, rows = training.objective, training.batch.tokens.numel()
    assert training.facts["ploss_decay"] == DECAY
    for variant in training.facts["variants"]:
        length, model = variant["ttt_length"], objective.model
        model.zero_grad()
        loss = objective(training.batch, training.features, length)
        loss.total.backward()
        steps = [step.item() / rows for step in objective.step_sums(training.batch, training.features, length)]
        assert steps == pytest.approx(variant["plosses"], abs=TOLERANCE)
        assert loss.total.item() == pytest.approx(variant["loss"], abs=TOLERANCE)
        norms = gradient_norms(model)
        assert norms == pytest.approx(variant["grad_norms"], rel=1e-3)
        assert sum(n**2 for n in norms.values()) ** 0.5 == pytest.approx(variant["grad_norm_total"], rel=1e-3)
    assert objective.vocabulary.embedding.grad is None and not objective.vocabulary.embedding.requires_grad
