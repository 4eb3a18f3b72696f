"""Qwen3.5's built-in MTP head against recorded numbers: every round, every tensor. Valid for any case of the form."""

import json
import re
from dataclasses import replace

import pytest
import torch
from block_cases import Golden, assert_close, check_loops, check_target_is_shared, check_texts, run, same
from chain_cases import Listener
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

import dloop
from dloop.drafters.host import HostDrafter
from dloop.drafters.mtp import MTP, CentredRMSNorm
from dloop.targets import recurrent
from dloop.testing import Decoded, write_drafter
from dloop.train.batch import TrainBatch
from dloop.train.unroll import Unroll

pytestmark = pytest.mark.skipif(not recurrent.is_offered(), reason="Qwen3.5 needs a newer transformers")


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    golden = Golden.read(goldens / "mtp_qwen35")
    return replace(golden, drafter=golden.drafter.at_depth(golden.case["mtp_k"]))


def fresh(golden: Golden) -> HostDrafter:
    """Its own copy, to spoil."""
    return golden.fresh_drafter().at_depth(golden.case["mtp_k"])


def test_the_config_says_what_the_case_says(golden):
    config, case = golden.drafter.config, golden.case
    assert golden.drafter.family == config.family == case["family"]
    assert golden.drafter.stage_len == case["mtp_k"]
    assert isinstance(golden.drafter.model, MTP) and golden.drafter.taps == ()
    assert [sample["prompt_ids"] for sample in golden.samples] == case["prompts"]
    assert [sample["stop_ids"] for sample in golden.samples] == case["stop_ids_per_prompt"]
    embedding, head = golden.target.vocabulary.embedding, golden.target.vocabulary.head
    assert (embedding.data_ptr() == head.data_ptr()) == case["tie_word_embeddings"]


def test_every_tensor_is_used_and_the_vocabulary_is_the_target_s(golden):
    assert len(golden.drafter.model.state_dict()) == 15
    check_target_is_shared(golden)


def test_texts_chains_and_acceptance(golden):
    check_texts(golden, lambda r, stops: r.accepted + 1)


def test_plain_decoding_and_the_loop_give_the_same_text(golden):
    check_loops(golden)
    sample = golden.samples[0]
    looped = dloop.generate(golden.target, golden.drafter, sample["prompt_ids"], 20, loop_gate=float("-inf"))
    assert max(r.stages for r in looped.rounds) > 1


def tensors_of(golden: Golden, decoded: Decoded, trace, log: Listener, index: int) -> dict[str, Tensor]:
    """A round's tensors under their names in the file."""
    r, drafter, k = decoded.rounds[index], golden.drafter, golden.drafter.stage_len
    own = log.rows[index * k : (index + 1) * k]
    # Rows of earlier positions were made in earlier rounds: the first `draft` of a round makes those that are new.
    firsts = [log.rows[i * k] for i in range(index + 1)]
    out = torch.empty(r.context_len, own[0].out.shape[-1])
    for rows in firsts:
        out[rows.positions] = rows.out
    states = torch.cat([rows.out[-1:] for rows in own])
    seen = trace.answered[index]
    text = torch.tensor([*trace.text[: r.context_len], r.anchor])
    for step, rows in enumerate(own[1:]):
        assert torch.equal(rows.states, own[step].out[-1:]), "a step reads the state handed on by the one before"
        assert log.tokens(rows).tolist() == [r.drafted[step]] and rows.positions.tolist() == [r.context_len + step]
    assert torch.equal(log.tokens(own[0]), text[1:][own[0].positions])
    return {
        "input_ids": text,
        "target_last_hidden": torch.cat([features.last for features in trace.fed[: index + 1]]),
        "mtp_first_pass_out": out,
        "draft_hidden": states,
        "draft_logits": drafter.model.logits(states, drafter.vocabulary),
        "draft_token_ids": torch.tensor(r.drafted),
        "draft_logprobs": torch.tensor(r.draft.logp[1:]),
        "verify_logits": seen.logits,
        "verify_argmax": seen.logits.argmax(-1),
    }


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
                compared += 1
                if not same(found[name], tensor):
                    wrong.append(prefix + name)
    return compared, wrong


def test_every_tensor_of_every_recorded_round(golden):
    compared, wrong = differences(golden, fresh(golden))
    rounds = [key for key in golden.tensors if re.fullmatch(r"sample\d+\.round\d+\.\w+", key)]
    others = {key.split(".")[0] for key in golden.tensors.keys() - set(rounds)}
    assert wrong == [] and compared == len(rounds), "a tensor was not compared"
    assert others == {"head_check"}


def head_pass(golden: Golden, drafter: HostDrafter) -> list[str]:
    """One pass over a sequence, as training runs it; the tensors that differ."""
    expected = {key.removeprefix("head_check."): t for key, t in golden.tensors.items() if "head_check" in key}
    tokens = expected["input_ids"][None]
    lengths = torch.tensor([tokens.shape[1]])
    batch = TrainBatch(tokens, torch.ones_like(tokens).bool(), lengths, torch.zeros_like(lengths))
    features = golden.target.features(tokens, drafter.taps)
    states = Unroll.begin(drafter.model, drafter.vocabulary, batch, features.last).forward()[:, :-1]
    found = {
        "input_ids": tokens[0],
        "target_last_hidden": features.last[0],
        "target_logits": F.linear(features.last[0], drafter.vocabulary.head),
        "mtp_out": states[0],
        "logits": drafter.model.logits(states, drafter.vocabulary)[0],
    }
    assert found.keys() == expected.keys()
    return [name for name, tensor in expected.items() if not same(found[name], tensor)]


def test_a_pass_over_a_whole_sequence(golden):
    assert head_pass(golden, golden.drafter) == []


def swapped_concat(drafter: HostDrafter) -> None:
    head = drafter.model.mtp
    head.pre_fc_norm_embedding, head.pre_fc_norm_hidden = head.pre_fc_norm_hidden, head.pre_fc_norm_embedding


def plain_norms(drafter: HostDrafter) -> None:
    for module in drafter.model.modules():
        if isinstance(module, CentredRMSNorm):
            module.weight -= 1


def no_gate(drafter: HostDrafter) -> None:
    drafter.model.mtp.layers[0].self_attn.q_proj.weight[-1] += 1.0


def prenorm_state(drafter: HostDrafter) -> None:
    drafter.model.mtp.norm = nn.Identity()


def turns_whole(drafter: HostDrafter) -> None:
    drafter.model.config = replace(drafter.config, partial_rotary_factor=1.0)


@pytest.mark.parametrize("spoil", [swapped_concat, plain_norms, no_gate, prenorm_state, turns_whole])
@torch.no_grad()
def test_a_wrong_order_norm_gate_state_or_rotation_is_caught(golden, spoil):
    drafter = fresh(golden)
    spoil(drafter)
    assert set(head_pass(golden, drafter)) == {"mtp_out", "logits"}
    wrong = differences(golden, drafter)[1]
    assert any(name.endswith("mtp_first_pass_out") for name in wrong)


def layouts(golden: Golden) -> dict[str, dict[str, Tensor]]:
    """The three forms a head comes in."""
    own = load_file(golden.folder / "draft" / "model.safetensors")
    return {
        "prefix": own,
        "bare": {key.removeprefix("mtp."): tensor for key, tensor in own.items()},
        "whole": load_file(golden.folder / "target" / "model.safetensors"),
    }


@pytest.mark.parametrize("layout", ["prefix", "bare", "whole"])
def test_the_three_layouts_and_the_built_in_head_are_one(golden, layout, tmp_path):
    (tmp_path / "config.json").write_text((golden.folder / "draft" / "config.json").read_text())
    tensors = layouts(golden)[layout]
    halves = [dict(list(tensors.items())[i::2]) for i in (0, 1)]  # sharded, with an index, as the release is
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, half in zip(names, halves, strict=True):
        save_file(half, tmp_path / name)
    index = {"weight_map": {key: name for name, half in zip(names, halves, strict=True) for key in half}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    built_in, read = dloop.load_drafter("mtp", golden.target), dloop.load_drafter(str(tmp_path), golden.target)
    assert read.family == built_in.family == golden.case["family"]
    mine, theirs = read.model.state_dict(), golden.drafter.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    sample = golden.samples[0]
    decoded = run(golden, built_in.at_depth(golden.case["mtp_k"]), sample)[0]
    assert decoded.tokens == sample["output_ids"]


def test_the_layout_is_written_as_it_was_read(golden, tmp_path):
    folder = write_drafter(golden.drafter, tmp_path, "specforge")
    stored, written = (load_file(place / "model.safetensors") for place in (golden.folder / "draft", folder))
    assert stored.keys() == written.keys() and all(torch.equal(stored[key], written[key]) for key in stored)
    before, after = (json.loads((place / "config.json").read_text()) for place in (golden.folder / "draft", folder))
    assert before == after
    again = dloop.load_drafter(str(folder), golden.target)
    assert again.config == golden.drafter.config
    assert_close(again.model.mtp.fc.weight, golden.drafter.model.mtp.fc.weight, "weights")
