"""Gemma 4's assistant against recorded numbers: every round, every tensor. Valid for any case of the form.

The library shows its assistant one row too many after a rejection. Its rounds are recorded with that row and, where a
first step or a whole loop is, without: the model is held to the former, decoding to the latter.
"""

import json
import re
from dataclasses import dataclass, replace

import pytest
import torch
from block_cases import Golden, check_loops, run, same
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

import dloop
from dloop.drafters.gemma4 import Assistant
from dloop.drafters.host import HostDrafter
from dloop.drafters.layers import attend
from dloop.drafters.lodger import AssistantDrafter
from dloop.drafters.memory import KeyValues
from dloop.lent import LENT, of_rows
from dloop.targets import release
from dloop.targets.gemma4 import Gemma4Target
from dloop.testing import chain, write_drafter
from dloop.types import Draft, Rows, Seen, Stage, StageRequest, VerifyRequest

pytestmark = pytest.mark.skipif(not release.is_offered(), reason="Gemma 4 needs a newer transformers")


@pytest.fixture(scope="module")
def golden(goldens) -> Golden:
    golden = Golden.read(goldens / "mtp_gemma4")
    return replace(golden, drafter=golden.drafter.at_depth(golden.case["num_assistant_tokens"]))


def fresh(golden: Golden) -> AssistantDrafter:
    """Its own copy, to spoil."""
    return golden.fresh_drafter().at_depth(golden.case["num_assistant_tokens"])


def test_the_config_says_what_the_case_says(golden):
    config, case = golden.drafter.config, golden.case
    assert golden.drafter.family == config.family == case["family"]
    assert isinstance(golden.drafter, AssistantDrafter) and isinstance(golden.target, Gemma4Target)
    assert golden.drafter.stage_len == case["num_assistant_tokens"] and golden.drafter.taps == (LENT,)
    assert bool(config.num_centroids) == case.get("use_ordered_embeddings", False)
    assert [sample["prompt_ids"] for sample in golden.samples] == case["prompts"]
    assert [sample["stop_ids"] for sample in golden.samples] == case["stop_ids_per_prompt"]
    assert {kind: replace(lent, window=None) for kind, lent in config.borrows.items()} == {
        kind: replace(lent, window=None) for kind, lent in golden.target.lends.items()
    }


def test_every_tensor_is_used_and_the_embedding_is_the_target_s(golden):
    stored = load_file(golden.folder / "draft" / "model.safetensors")
    used, shared = golden.drafter.model.state_dict(), golden.target.vocabulary
    assert used.keys() == stored.keys() and all(torch.equal(used[key], tensor) for key, tensor in stored.items())
    assert golden.drafter.vocabulary.embedding.data_ptr() == shared.embedding.data_ptr()


def test_texts_chains_and_acceptance(golden):
    """Those of the loop whose memory holds verified rows alone. The library drafts no further than the text may go."""
    for number, sample in enumerate(golden.samples):
        decoded, _ = run(golden, golden.drafter, sample)
        assert decoded.tokens == sample["output_ids"] == sample["ar_output_ids"], f"sample {number}"
        assert [len(r.emitted) for r in decoded.rounds] == sample["clean_loop_acceptance_lengths"], f"sample {number}"
        for index, (r, proposed) in enumerate(zip(decoded.rounds, sample["clean_loop_proposed"], strict=True)):
            where = f"sample {number}, round {index}"
            assert r.drafted[: len(proposed)] == proposed, where
            left = sample["max_new_tokens"] - (r.context_len - len(sample["prompt_ids"])) - 1
            ended = bool(proposed) and proposed[-1] in sample["stop_ids"]
            assert len(proposed) == len(r.drafted) or ended or len(proposed) >= left - 1, where


def test_plain_decoding_and_the_loop_give_the_same_text(golden):
    check_loops(golden)
    sample = golden.samples[0]
    looped = dloop.generate(golden.target, golden.drafter, sample["prompt_ids"], 20, mtp_k=3, loop_gate=float("-inf"))
    assert max(r.stages for r in looped.rounds) > 1


@dataclass(frozen=True)
class Recorded:
    """One recorded round."""

    name: str
    tensors: dict[str, Tensor]
    sample: dict
    index: int

    @property
    def text(self) -> list[int]:
        return self.tensors["input_ids"].tolist()

    @property
    def steps(self) -> range:
        return range(len(self.tensors["draft_token_ids"]))

    def lent(self) -> dict[str, KeyValues]:
        parts = {key: t for key, t in self.tensors.items() if key.startswith("shared_kv.")}
        kinds = {key.split(".")[1] for key in parts}
        return {k: KeyValues(*(parts[f"shared_kv.{k}.{part}"][None] for part in ("keys", "values"))) for k in kinds}


def recorded(golden: Golden) -> list[Recorded]:
    names = sorted({match[0] for key in golden.tensors if (match := re.match(r"sample\d+\.round\d+\.", key))})
    found: list[Recorded] = []
    for name in names:
        sample, number = (int(digits) for digits in re.findall(r"\d+", name))
        tensors = {key.removeprefix(name): t for key, t in golden.tensors.items() if key.startswith(name)}
        found.append(Recorded(name, tensors, golden.samples[sample], number - 1))
    return found


@torch.no_grad()
def model_steps(drafter: AssistantDrafter, one: Recorded) -> dict[str, Tensor]:
    """The assistant on what it was shown, a stale row included: every step's numbers, by name."""
    model, embedding, lent = drafter.model, drafter.vocabulary.embedding, one.lent()
    found: dict[str, Tensor] = {"position_id": torch.tensor([len(one.text) - 1])}
    state, token, tokens, logps = one.tensors["step0.hidden_in"][None, None], one.text[-1], [], []
    for step in one.steps:
        embedded = F.embedding(torch.tensor([[token]]), embedding)
        scale = torch.tensor(model.config.backbone_size**0.5)
        found[f"step{step}.inputs_embeds"] = torch.cat([embedded * scale, state], -1)[0, 0]

        def look(queries: Tensor, kind: str) -> Tensor:
            return attend(queries, lent[kind], scale=1.0)

        made = model.rows(state, embedded, found["position_id"][None], look)
        state, logits = model.handed(made), model.logits(made[0, 0], drafter.vocabulary)
        found |= {f"step{step}.projected_state": state[0, 0], f"step{step}.logits": logits}
        token = int(logits.argmax())
        tokens.append(token)
        logps.append(logits.log_softmax(-1)[token])
    return found | {"draft_token_ids": torch.tensor(tokens), "draft_logprobs": torch.stack(logps)}


def deployed(golden: Golden, drafter: AssistantDrafter, one: Recorded) -> tuple[Stage, Seen, Seen, Tensor]:
    """(the stage, what the target said of the text, of the draft; the first step's logits), from fresh memories."""
    target, memory, text = golden.target.open(drafter.taps), drafter.open(), one.text
    seen = target.prefill(0, text[:-1])
    memory.extend(0, 0, text[:-1], seen.features)
    heard: list[Tensor] = []
    logits = drafter.model.logits

    def noted(states, vocabulary):
        heard.append(logits(states, vocabulary))
        return heard[-1]

    drafter.model.logits = noted
    stage = memory.draft([StageRequest(slot=0, anchor=text[-1], index=0)])[0]
    drafter.model.logits = logits
    own = one.tensors["draft_token_ids"].tolist()
    draft = Draft.rooted(text[-1], len(text) - 1).graft(chain(own))
    rows = Rows.pack([VerifyRequest(slot=0, draft=draft)])
    assert rows.token == one.tensors["verify_input_ids"].tolist()
    return stage, seen, target.verify(rows), heard[0]


def differences(golden: Golden, drafter: AssistantDrafter) -> tuple[int, list[str]]:
    """(number of tensors compared, those that differ)."""
    compared, wrong = 0, []
    for one in recorded(golden):
        found = model_steps(drafter, one)
        stage, seen, verified, first = deployed(golden, drafter, one)
        lent = of_rows(seen.features.taps[None], golden.target.lends)
        count = len(one.text) - 1
        for kind, pair in one.lent().items():
            rows = pair.keys.shape[2]
            assert rows - count == one.sample["stale_kv_rows"][one.index] in (0, 1)
            for part, mine, theirs in zip(("keys", "values"), lent[kind], pair, strict=True):
                found[f"shared_kv.{kind}.{part}"] = torch.cat([mine, theirs[:, :, count:]], 2)[0]
        found |= {
            "input_ids": torch.tensor(one.text),
            "step0.hidden_in": seen.features.last[-1],
            "step0.logits_without_stale_rows": first,
            "verify_input_ids": torch.tensor([one.text[-1], *one.tensors["draft_token_ids"].tolist()]),
            "verify_logits": verified.logits,
            "verify_argmax": verified.logits.argmax(-1),
        }
        for name, tensor in one.tensors.items():
            compared += 1
            if not same(found[name], tensor):
                wrong.append(one.name + name)
        proposed = one.sample["proposed_without_stale_rows"][one.index]
        logps = torch.tensor(one.sample["draft_logprobs_without_stale_rows"][one.index])
        if stage.tokens[: len(proposed)] != proposed or not same(torch.tensor(stage.logp[: len(proposed)]), logps):
            wrong.append(one.name + "proposed_without_stale_rows")
    return compared, wrong


def test_every_tensor_of_every_recorded_round(golden):
    compared, wrong = differences(golden, fresh(golden))
    others = {key for key in golden.tensors if not re.match(r"sample\d+\.round\d+\.", key)}
    assert wrong == [] and compared == len(golden.tensors) - len(others), "a tensor was not compared"
    assert {key.split(".")[0] for key in others} == {"target_check"}


def test_the_target_alone(golden):
    expected = {key.removeprefix("target_check."): t for key, t in golden.tensors.items() if "target_check" in key}
    features = golden.target.features(expected["input_ids"][None], ())
    found = {
        "input_ids": expected["input_ids"],
        "logits": golden.target.logits(features.last[0]),
        "last_hidden": features.last[0],
    }
    assert found.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not same(found[name], tensor)] == []


def unscaled(drafter: AssistantDrafter) -> None:
    drafter.model.config = replace(drafter.config, backbone_size=1)


def swapped_concat(drafter: AssistantDrafter) -> None:
    drafter.model.pre_projection.weight.copy_(torch.cat(drafter.model.pre_projection.weight.chunk(2, 1)[::-1], 1))


def no_scalar(drafter: AssistantDrafter) -> None:
    drafter.model.model.layers[0].layer_scalar.fill_(1.0)


def turns_whole(drafter: AssistantDrafter) -> None:
    lent = tuple((kind, replace(shape, turning=1.0)) for kind, shape in drafter.config.lent)
    drafter.model.config = replace(drafter.config, lent=lent)


def moves_on(drafter: AssistantDrafter) -> None:
    rows = drafter.model.rows
    drafter.model.rows = lambda states, embedded, positions, attend: rows(states, embedded, positions + 1, attend)


def feeds_the_norm(drafter: AssistantDrafter) -> None:
    drafter.model.post_projection.weight.mul_(1.05)


@pytest.mark.parametrize("spoil", [unscaled, swapped_concat, no_scalar, turns_whole, moves_on, feeds_the_norm])
@torch.no_grad()
def test_a_wrong_scale_order_rotation_position_or_state_is_caught(golden, spoil):
    drafter = fresh(golden)
    spoil(drafter)
    wrong = differences(golden, drafter)[1]
    assert any(re.search(r"step\d+\.(logits|projected_state)$", name) for name in wrong)
    assert not any("shared_kv" in name or "verify_" in name for name in wrong)


def test_the_layout_is_written_as_it_was_read(golden, tmp_path):
    folder = write_drafter(golden.drafter, tmp_path, "specforge")
    stored, written = (load_file(place / "model.safetensors") for place in (golden.folder / "draft", folder))
    assert stored.keys() == written.keys() and all(torch.equal(stored[key], written[key]) for key in stored)
    before, after = (json.loads((place / "config.json").read_text()) for place in (golden.folder / "draft", folder))
    assert before == after
    again: HostDrafter = dloop.load_drafter(str(folder), golden.target)
    assert isinstance(again.model, Assistant) and again.config == golden.drafter.config
