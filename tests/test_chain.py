"""EAGLE-3: what loads, what its memory holds, what it is trained to do. Losslessness stands in `test_lossless.py`."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_memory import VOCAB, Forced, assert_close
from test_train_script import SCRIPTS, example, loaded
from torch import Tensor

import dloop
from dloop.batch import generate_many
from dloop.cli import train as train_command
from dloop.cli.args import parse
from dloop.cli.eagle3_script import TAKEN, forwarded
from dloop.cli.main import entry
from dloop.detect import detect_family
from dloop.diagnosis.intake import take_in
from dloop.drafters.chain import ChainDrafter, ChainMemory
from dloop.drafters.draft_vocab import most_frequent
from dloop.drafters.eagle3 import published_taps, read_eagle3
from dloop.drafters.gemma4_config import FAMILY as GEMMA_FAMILY
from dloop.drafters.mtp import FAMILY as MTP_FAMILY
from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN, NEVER_OPENS, FixedGate
from dloop.judge import Match
from dloop.loop import Limits, Session, decode
from dloop.sampling import Sampling
from dloop.settings import Settings
from dloop.targets.hf import HFTarget
from dloop.testing import (
    CHAIN_KINDS,
    WINDOW_KINDS,
    gather,
    taught_drafter,
    tiny_drafter,
    tiny_target,
    write_drafter,
    write_target,
)
from dloop.train.batch import TrainBatch
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.trainer import length_at
from dloop.train.unroll import UnrollObjective
from dloop.types import Features, Stage, StageRequest

PROMPT = [5, 9, 11, 60, 2]
K = 3


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("qwen3", num_layers=4)


@pytest.fixture
def folder(target, tmp_path) -> Path:
    return write_drafter(tiny_drafter(target, family="eagle3"), tmp_path / "drafter", "specforge")


def rewrite(folder: Path, *, drop: tuple[str, ...] = (), **keys: object) -> None:
    """Change a config, or leave keys of it out."""
    path = folder / "config.json"
    raw = {key: value for key, value in json.loads(path.read_text()).items() if key not in drop}
    path.write_text(json.dumps(raw | keys))


def rewrite_tensors(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


# What loads

HUB = {  # the published 4B config
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "attention_bias": False, "head_dim": 128,
    "hidden_act": "silu", "hidden_size": 2560, "intermediate_size": 9728, "max_position_embeddings": 40960,
    "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8, "rms_norm_eps": 1e-6,
    "rope_scaling": None, "rope_theta": 1000000, "tie_word_embeddings": False, "vocab_size": 151936,
    "draft_vocab_size": 32000, "bos_token_id": 151643, "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip


def test_the_published_configs_are_read():
    config = read_eagle3(HUB, "config").for_target(36)
    assert (config.draft_vocab_size, config.head_dim, config.rope_theta) == (32000, 128, 1e6)
    assert config.target_layer_ids == (1, 17, 32) and config.num_target_layers == 36 and not config.own_rope
    assert config.stage_len == 7
    assert published_taps(32) == (1, 15, 28) and published_taps(48) == (1, 23, 44)
    safe = {key: value for key, value in HUB.items() if key not in ("head_dim", "draft_vocab_size", "attention_bias")}
    config = read_eagle3({**safe, "hidden_size": 4096, "architectures": ["LlamaForCausalLM"]}, "config")
    assert (config.head_dim, config.draft_vocab_size, config.attention_bias) == (128, 151936, False)
    resaved = {key: value for key, value in HUB.items() if key != "rope_theta"}
    resaved |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert read_eagle3(resaved, "config").rope_theta == 1e6
    named = read_eagle3({**HUB, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}}, "config")
    assert named.for_target(36).target_layer_ids == (2, 5, 9)
    twice = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, "target_layer_ids": [2, 5, 9]}
    assert read_eagle3({**HUB, **twice}, "config") == named


def test_null_is_as_good_as_absent():
    assert read_eagle3({**HUB, "norm_output": None, "hidden_act": None, "layer_types": None}, "config")
    taps = {"target_layer_ids": None, "eagle_aux_hidden_state_layer_ids": None}
    assert read_eagle3({**HUB, **taps}, "config") == read_eagle3(HUB, "config")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers=2"),
        ({"norm_output": False}, "norm_output=False"),
        ({"fc_norm": True}, "fc_norm=True"),
        ({"norm_before_residual": True}, "norm_before_residual=True"),
        ({"parallel_drafting": True}, "parallel_drafting=True"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["sliding_attention"]}, "layer_types="),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"dloop_config": 5}, "dloop_config=5"),
        ({"eagle_config": [1]}, "eagle_config=[1]"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_theta": None}, "'rope_theta'"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}, "must name 3 layers"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"dloop_config": {"rope_theta": "big"}}, "rope_theta='big'"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1] * 500}}, "must name 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "low"}}, "layer_ids='low' must be a list"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, "layer_ids=[2, 18, 33] at the top level may count"),
        ({"target_layer_ids": [1, 17, 32]}, "target_layer_ids=[1, 17, 32] at the top level may count"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5, 9]}, "target_layer_ids": [2, 5, 8]},
            "target_layer_ids=[2, 5, 8]",
        ),
        ({"attention_bias": "y" * 500}, "attention_bias='yyy"),
        ({"rope_parameters": [1]}, "rope_parameters=[1]"),
        ({"num_key_value_heads": 7}, "num_key_value_heads=7"),
        ({"head_dim": 33}, "head_dim=33"),
        ({"rms_norm_eps": 2}, "rms_norm_eps=2"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_configs_that_mean_something_else_are_refused(change, part):
    with pytest.raises(UserError) as error:
        read_eagle3({**HUB, **change}, "config")
    message = str(error.value)
    assert part in message and "\n" not in message and len(message) < 250
    assert re.search(r"[;:] (add|use|correct|fetch|keep) ", message), f"no way out: {message}"


def test_the_family_is_detected_by_architecture_or_tensors():
    assert (
        detect_family(HUB, "x") == detect_family({**HUB, "architectures": ["Eagle3LlamaForCausalLM"]}, "x") == "eagle3"
    )
    plain = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert detect_family(plain, "x", lambda: ["fc.weight", "midlayer.self_attn.q_proj.weight"]) == "eagle3"
    with pytest.raises(UserError, match="a plain LlamaForCausalLM, not a drafter"):
        detect_family(plain, "x", lambda: ["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("architecture", ["Qwen3Eagle3Model", "Gemma4Eagle3Model", "Eagle3DraftModel"])
def test_deepspec_s_eagle3_is_refused_by_name(target, folder, architecture):
    rewrite(folder, architectures=[architecture], model_type="qwen3", target_layer_ids=[1, 9, 17, 25, 33])
    with pytest.raises(UserError, match=rf'DeepSpec\'s own "eagle3" \({architecture}: five target layers'):
        dloop.load_drafter(str(folder), target)


def test_an_eagle3_drafter_is_no_target(folder):
    for change in ({}, {"architectures": ["LlamaForCausalLM"]}):
        rewrite(folder, **change)
        with pytest.raises(UserError, match="is a drafter for a target of 4 layers, not a target"):
            dloop.load_target(str(folder))


@pytest.mark.parametrize("kind", ["qwen3", "llama_tied"])
@pytest.mark.parametrize("size", [None, 5_000], ids=["single", "sharded"])
def test_what_was_written_is_what_is_loaded(kind, size, tmp_path):
    target = tiny_target(kind, num_layers=4)
    written = tiny_drafter(target, family="eagle3")
    where = write_drafter(written, tmp_path, "specforge", size)
    assert (where / "model.safetensors.index.json").exists() == (size is not None)
    read = dloop.load_drafter(str(where), target)
    assert isinstance(read, ChainDrafter) and read.family == "eagle3" and read.config == written.config
    mine, theirs = read.model.state_dict(), written.model.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert read.vocabulary.embedding.data_ptr() == target.vocabulary.embedding.data_ptr()


def answer(drafter: ChainDrafter, target: HFTarget) -> list[float]:
    memory = drafter.open()
    memory.extend(0, 0, PROMPT, target.open(drafter.taps).prefill(0, PROMPT).features)
    stages = [memory.draft([StageRequest(slot=0, anchor=1 + index, index=index)])[0] for index in (0, 1)]
    return [logp for stage in stages for logp in [*stage.logp, *map(float, stage.tokens)]]


def test_every_tensor_of_the_checkpoint_makes_a_difference(target, folder):
    drafter = dloop.load_drafter(str(folder), target)
    before = answer(drafter, target)
    for key, weight in drafter.model.state_dict().items():
        if key == "t2d":  # says what d2t says, and is held against it
            continue
        saved = weight.clone()
        weight[..., ::2] = weight[..., ::2] * 1.5 if weight.is_floating_point() else 0
        assert answer(drafter, target) != before, f"{key} is never used"
        weight.copy_(saved)
    assert answer(drafter, target) == before


MAPS = {
    "missing": (lambda t: (t.pop("d2t"), t.pop("t2d")), "has no d2t and t2d for its draft vocabulary"),
    "half": (lambda t: t.pop("t2d"), "has no t2d"),
    "never filled": (lambda t: t["t2d"].fill_(True), r"t2d keeps 97 tokens \(it was never filled\)"),
    "permuted": (lambda t: t["d2t"][10:].add_(1), "d2t and t2d name different tokens"),
    "short": (lambda t: t.update(d2t=t["d2t"][:-1].clone()), "expected whole numbers"),
    "fractions": (lambda t: t.update(d2t=t["d2t"].float()), "expected whole numbers"),
    "no head": (lambda t: t.pop("lm_head.weight"), "is missing 1 tensors: lm_head.weight"),
    "norms": (lambda t: t.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)}), "has unexpected 1 tensors"),
    "nan": (lambda t: t["fc.weight"].fill_(float("nan")), "NaN"),
    "another's": (lambda t: t.update({"markov_head.markov_w1.weight": torch.ones(2, 2)}), "is dspark's"),
}


@pytest.mark.parametrize("case", MAPS)
def test_maps_and_weights_that_do_not_fit_are_refused(target, folder, case):
    change, message = MAPS[case]
    rewrite_tensors(folder, change)
    with pytest.raises(UserError, match=message):
        dloop.load_drafter(str(folder), target)


def test_a_head_over_the_whole_vocabulary_needs_no_map(target, folder):
    def whole(tensors):
        del tensors["d2t"], tensors["t2d"]
        tensors["lm_head.weight"] = torch.randn(VOCAB, 32)

    rewrite_tensors(folder, whole)
    rewrite(folder, drop=("draft_vocab_size",))
    drafter = dloop.load_drafter(str(folder), target)
    assert drafter.model.kept.tolist() == list(range(VOCAB)) and drafter.model.t2d.all()


def test_an_embedding_of_its_own_is_used_and_one_that_does_not_fit_refused(target, folder):
    own = torch.randn(VOCAB, 32)
    rewrite_tensors(folder, lambda t: t.update({"embed_tokens.weight": own}))
    drafter = dloop.load_drafter(str(folder), target)
    assert torch.equal(drafter.vocabulary.embedding, own) and drafter.vocabulary.head is target.vocabulary.head
    rewrite_tensors(folder, lambda t: t.update({"embed_tokens.weight": own[:, :16].clone()}))
    with pytest.raises(UserError, match=r"embed_tokens.weight is \(97, 16\)"):
        dloop.load_drafter(str(folder), target)


def test_a_drafter_fits_its_target_alone(target, folder):
    for change, message in [
        ({"vocab_size": 98}, "a vocabulary of 98 tokens"),
        ({"target_hidden_size": 64}, "expects hidden size 64"),
        ({"num_target_layers": 5}, "trained on a target of 5 layers"),
        ({"eagle_config": None}, r"taps the layers \[1, 1, 0\]"),  # the published rule needs a deeper target
    ]:
        before = (folder / "config.json").read_text()
        rewrite(folder, **change)
        with pytest.raises(UserError, match=message):
            dloop.load_drafter(str(folder), target)
        (folder / "config.json").write_text(before)


def test_the_rope_base_is_checked_and_can_be_named(target, folder, tmp_path):
    kept = dloop.load_drafter(str(folder), target)
    rewrite(folder, rope_theta=500_000.0, rope_parameters=None)
    with pytest.raises(UserError, match=r"RoPE base 500000, .*--draft-rope-theta"):
        dloop.load_drafter(str(folder), target)
    named = dloop.load_drafter(str(folder), target, rope_theta=10_000)
    assert named.config.rope_theta == 10_000 and named.config.own_rope
    assert answer(named, target) == answer(kept, target)
    other = dloop.load_drafter(str(folder), target, rope_theta=500_000)
    assert answer(other, target) != answer(kept, target)
    again = dloop.load_drafter(str(write_drafter(other, tmp_path / "again", "specforge")), target)
    assert again.config == other.config, "a base that was named is remembered"
    for words, message in [({"gap_rows": "position"}, "leaves no gap"), ({"rope_theta": -1.0}, "rope_theta=-1.0")]:
        with pytest.raises(UserError, match=message):
            dloop.load_drafter(str(folder), target, **words)
    block = write_drafter(tiny_drafter(target), tmp_path / "block", "specforge")
    with pytest.raises(UserError, match="does not apply to dspark"):
        dloop.load_drafter(str(block), target, rope_theta=10_000.0)


def test_the_doctor_says_that_it_examines_block_drafters(target, folder):
    with pytest.raises(
        UserError, match="is a drafter of eagle3; block drafters are examined so far: dflash, dspark, domino"
    ):
        take_in(str(folder), folder, target)


# What is drafted


def test_a_stage_is_as_long_as_asked(target):
    drafter = replace(tiny_drafter(target, family="eagle3"), depth=None)
    for depth, length in ((None, 7), (2, 2), (5, 5)):
        out = dloop.generate(target, drafter, PROMPT, 12, draft_depth=depth, tree_budget=0)
        assert {len(r.drafted) for r in out.rounds} == {length}
    texts = list(
        generate_many(target, drafter, [PROMPT, PROMPT[:3]], Settings(max_new_tokens=8, draft_depth=2, tree_budget=0))
    )
    assert all(len(r.drafted) == 2 for text in texts for r in text.rounds)
    for depth in (0, -1, 5000):
        with pytest.raises(UserError, match=f"draft_depth={depth} must be at least 1"):
            dloop.generate(target, drafter, PROMPT, 4, draft_depth=depth)
    with pytest.raises(UserError, match="draft_depth=3 does not apply"):
        dloop.generate(target, tiny_drafter(target), PROMPT, 4, draft_depth=3)


def test_the_published_tree_is_the_default(target):
    """59 nodes beside the root, of eight levels; a further stage adds 48."""
    drafter = replace(tiny_drafter(target, family="eagle3"), depth=None)
    alone = dloop.generate(target, drafter, PROMPT, 4).rounds[0]
    assert len(alone.draft.tokens) == 60 and not alone.draft.is_chain
    looped = dloop.generate(target, drafter, PROMPT, 24, loop_gate=ALWAYS_OPEN, max_stages=2).rounds[0]
    first, second = looped.stage_records
    assert looped.draft.positions[second.start] - looped.context_len == 9, "hung below a path of eight"
    assert first.stop - first.start >= 59 and second.stop - second.start == 48
    for words, message in [
        ({"tree_budget": 1}, "tree_budget=1 counts the root for eagle3"),
        ({"tree_width": 3}, "tree_width=3 does not apply to eagle3"),
        ({"temperature": 1.0, "verify": "reject"}, "verify='reject' needs chains, and tree_budget is 60"),
        ({"tree_budget": 0, "topk_k": 4}, "topk_k=4 does not apply to eagle3 with tree_budget 0"),
        ({"tree_budget": 0, "stage_tree_budget": 8}, "stage_tree_budget=8: further stages are trees only where"),
    ]:
        with pytest.raises(UserError, match=message):
            dloop.generate(target, drafter, PROMPT, 4, **words)


def test_positions_beyond_the_config_s_are_drafted_at(target):
    drafter = tiny_drafter(target, family="eagle3")
    drafter.model.config = replace(drafter.config, max_positions=8)
    out = dloop.generate(target, drafter, PROMPT, 24, tree_budget=0)
    assert all(r.drafted for r in out.rounds) and out.rounds[-1].context_len > 8
    assert out.tokens == dloop.generate_autoregressive(target, PROMPT, 24).tokens


def test_scores_and_laws_are_of_the_draft_vocabulary(target):
    """The law that is judged gives a token outside no chance; the score is a sum of the head's own log-softmax."""
    drafter = tiny_drafter(target, family="eagle3", stage_len=K)
    memory, model = drafter.open(), drafter.model
    memory.extend(0, 0, PROMPT, target.open(drafter.taps).prefill(0, PROMPT).features)
    sampling = Sampling(temperature=0.7, top_k=9, seed=3)
    logits, listened = [], model.logits
    model.logits = lambda *given: logits.append(listened(*given)) or logits[-1]
    stage = memory.draft([StageRequest(slot=0, anchor=1, index=0, sampling=sampling)])[0]
    logp = torch.stack(logits).float().log_softmax(-1)
    assert logp.shape == (K, len(model.kept)) and len(model.kept) < VOCAB
    ids = torch.tensor([model.kept.tolist().index(token) for token in stage.tokens])
    assert stage.logp == pytest.approx(logp.gather(1, ids[:, None])[:, 0].tolist(), abs=1e-5)
    assert stage.score == pytest.approx(logp.max(-1).values.sum().item(), abs=1e-5)
    assert stage.probs.shape == (K, VOCAB)
    assert torch.allclose(stage.probs.sum(-1), torch.ones(K)) and (stage.probs > 0).sum(-1).le(9).all()
    outside = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, model.kept, False)
    assert outside.any() and not stage.probs[:, outside].any()


@dataclass
class Lawful:
    """A memory that is compared, at each round's first stage, with one that read the committed text row by row."""

    memory: ChainMemory
    target: HFTarget
    text: list[int] = field(default_factory=list)
    checks: int = 0

    @property
    def stage_len(self) -> int:
        return self.memory.stage_len

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        self.memory.extend(slot, position, tokens, features)
        self.text = self.text[:position] + tokens
        mine = self.memory.slots[slot].memory
        assert mine.length == mine.committed, f"a tail of {mine.length - mine.committed} rows is left"

    def draft(self, requests: list[StageRequest]) -> list[Stage]:
        stages = self.memory.draft(requests)
        if requests[0].index == 0:
            self.check(requests[0].anchor, stages[0])
        return stages

    def check(self, anchor: int, stage: Stage) -> None:
        alone, expected = self.memory.drafter.open(), None
        features = self.target.open(self.memory.drafter.taps).prefill(0, self.text).features
        for position, following in enumerate([*self.text[1:], anchor]):
            alone.extend(0, position, self.text[position : position + 1], features.between(position, position + 1))
            expected = alone.draft([StageRequest(slot=0, anchor=following, index=0)])[0]
        mine, theirs = self.memory.slots[0].memory, alone.slots[0].memory
        assert mine.committed == theirs.committed == len(self.text) - 1
        assert mine.length == theirs.length, "the tail holds the anchor's row and the drafted ones"
        for found, wanted in zip(mine.layers()[0], theirs.layers()[0], strict=True):
            assert_close(found, wanted, "keys or values")
        assert stage.tokens == expected.tokens and stage.logp == pytest.approx(expected.logp, abs=1e-4)
        self.checks += 1


def decode_lawfully(target: HFTarget, memory: ChainMemory, judge, *, max_stages: int, gate: float, length: int = 50):
    lawful = Lawful(memory, target)
    session = Session(target.open(memory.drafter.taps), lawful)
    limits = Limits(max_new_tokens=length, max_stages=max_stages, context=target.context)
    done = gather([decode(session, 0, PROMPT, gate=FixedGate(gate), judge=judge, limits=limits)], session)[0]
    assert lawful.checks == len(done.rounds)
    return done


CHAINS = [("eagle3", "qwen3"), ("eagle3", "llama_tied"), *((MTP_FAMILY, kind) for kind in ("qwen3", *CHAIN_KINDS))]
CHAINS += [("eagle3", kind) for kind in WINDOW_KINDS]
LODGERS = [(GEMMA_FAMILY, kind) for kind in WINDOW_KINDS]  # without rows of their own


@pytest.mark.parametrize(("family", "kind"), CHAINS)
def test_the_memory_holds_verified_rows_alone_whatever_was_accepted(family, kind):
    """0, 1, ..., S * k tokens of a round."""
    target, counts = tiny_target(kind, num_layers=4), [0, 9, 4, 1, 6, 2, 8, 5, 3, 7]
    judge = Forced(counts=counts)
    decode_lawfully(
        target,
        tiny_drafter(target, family=family, stage_len=K).open(),
        judge,
        max_stages=3,
        gate=ALWAYS_OPEN,
        length=70,
    )
    assert sum(len(draft.drafted) == 3 * K for draft in judge.drafts) >= len(counts), "each count met three stages"


@pytest.fixture(scope="module", params=["eagle3", MTP_FAMILY])
def taught(request, target):
    """A text of the target, and a drafter that learned it."""
    text = dloop.generate_autoregressive(target, PROMPT, 30).tokens
    return text, taught_drafter(target, [PROMPT + text], family=request.param, stage_len=K)


@pytest.mark.parametrize("gate", [NEVER_OPENS, -2.0, ALWAYS_OPEN])
def test_the_memory_law_in_a_real_decode(target, gate, taught):
    text, drafter = taught
    done = decode_lawfully(target, drafter.open(), Match(Sampling()), max_stages=4, gate=gate, length=30)
    assert done.tokens == text
    assert max(r.accepted for r in done.rounds) >= K and min(r.accepted for r in done.rounds) < K


class KeepsDraftedRows(ChainMemory):
    """Planted: rows made from drafted states stay where verified ones belong."""

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        if position:
            state = self.slots[slot]
            kept = min(len(tokens), state.memory.length - state.memory.committed)
            state.memory.committed += kept
            state.memory.drop_tail()
            state.tokens = [*state.tokens, *tokens][kept:]
            read = self.drafter.model.reads(features.taps, features.last)
            state.features = torch.cat([state.features, read])[kept:]
            return
        super().extend(slot, position, tokens, features)


class OnePositionLate(ChainMemory):
    """Planted: rows are rotated one position too far from the second round on."""

    def _rows(self, state, states, tokens, position):
        return super()._rows(state, states, tokens, position + (position >= len(PROMPT)))


@pytest.mark.parametrize("family", ["eagle3", MTP_FAMILY])
@pytest.mark.parametrize("planted", [KeepsDraftedRows, OnePositionLate])
def test_a_memory_that_breaks_the_law_is_caught(target, planted, family):
    memory = planted(tiny_drafter(target, family=family, stage_len=K))
    with pytest.raises(AssertionError, match="keys or values"):
        decode_lawfully(target, memory, Forced([2]), max_stages=3, gate=ALWAYS_OPEN, length=12)


def test_a_first_stage_can_be_asked_for_again(target):
    drafter = tiny_drafter(target, family="eagle3", stage_len=K)
    memory = drafter.open()
    memory.extend(0, 0, PROMPT, target.open(drafter.taps).prefill(0, PROMPT).features)
    first = memory.draft([StageRequest(slot=0, anchor=1, index=0)])[0]
    memory.draft([StageRequest(slot=0, anchor=first.tokens[-1], index=1)])
    other = memory.draft([StageRequest(slot=0, anchor=7, index=0)])[0]
    again = memory.draft([StageRequest(slot=0, anchor=1, index=0)])[0]
    assert (again.tokens, again.spine) == (first.tokens, first.spine) and other != first
    assert again.logp == pytest.approx(first.logp, abs=1e-5), "products of other shapes may sum in another order"
    assert memory.slots[0].memory.committed == len(PROMPT) - 1


@pytest.mark.parametrize("engine", ["auto", "fast", "twin"])
def test_a_target_of_any_engine_takes_the_drafter(folder, tmp_path, engine):
    home = write_target(tiny_target("qwen3", num_layers=4), tmp_path / "target")
    target = dloop.load_target(str(home), dtype="float32", engine=engine)
    drafter = dloop.load_drafter(str(folder), target)
    assert target.engine == ("twin" if engine == "twin" else "fast") and isinstance(drafter, ChainDrafter)
    prompts = [PROMPT, PROMPT[:2], [7, 7, 30]]
    plain = [dloop.generate_autoregressive(target, prompt, 20).tokens for prompt in prompts]
    many = {
        text.index: text.tokens
        for text in generate_many(target, drafter, prompts, Settings(max_new_tokens=20, loop_gate=-9.0, tree_budget=0))
    }
    assert [many[index] for index in range(3)] == plain


# Training


def random_batch(target: HFTarget, lengths: list[int], width: int) -> TrainBatch:
    tokens = torch.randint(3, target.vocab_size, (len(lengths), width), generator=torch.Generator().manual_seed(4))
    held = torch.tensor(lengths)
    inside = torch.arange(width) < held[:, None]
    return TrainBatch(tokens * inside, inside & (torch.arange(width) >= 4), held, torch.zeros(len(lengths)).long())


def double(target: HFTarget, family: str = "eagle3") -> ChainDrafter:
    drafter = tiny_drafter(target, family=family, stage_len=1)
    drafter.model.double()
    return replace(drafter, vocabulary=target.vocabulary)


@pytest.mark.parametrize(("family", "kind"), CHAINS + LODGERS)
@pytest.mark.parametrize("rows", [512, 7], ids=["one piece", "pieces"])
def test_the_unroll_is_the_deployed_chain_in_float64(rows, family, kind, monkeypatch):
    """Every depth of an unroll of three host stages, with the ground truth as drafted tokens."""
    monkeypatch.setattr("dloop.train.unroll.ROWS", rows)
    target = tiny_target(kind, num_layers=4, seed=1)
    target.model.double()
    drafter, batch = double(target, family), random_batch(target, [40, 33], 40)
    features = target.features(batch.tokens, drafter.taps)
    unroll = objective_of(drafter.model, drafter.vocabulary, ObjectiveSettings()).begin(batch, features)
    states = [unroll.forward() for _ in range(21)]
    for sample in range(2):
        for start in (1, 5, 12):
            memory = drafter.open()
            seen = Features(taps=features.taps[sample, :start], last=features.last[sample, :start])
            memory.extend(0, 0, batch.tokens[sample, :start].tolist(), seen)
            for step in range(21):
                anchor = int(batch.tokens[sample, start + step])
                memory.draft([StageRequest(slot=0, anchor=anchor, index=step)])
                worst = (memory.slots[0].hidden[0, 0] - states[step][sample, start - 1]).abs().max()
                assert worst < 1e-9, f"step {step}, start {start}: {worst}"


@pytest.mark.parametrize(("family", "kind"), [("eagle3", "qwen3"), (MTP_FAMILY, "qwen3"), *LODGERS])
def test_rows_in_pieces_give_the_same_gradients(monkeypatch, family, kind):
    target = tiny_target(kind, num_layers=4, seed=1)
    target.model.double()
    batch, found = random_batch(target, [40, 33], 40), []
    for rows in (512, 7):
        monkeypatch.setattr("dloop.train.unroll.ROWS", rows)
        drafter = double(target, family)
        features = target.features(batch.tokens, drafter.taps)
        objective = objective_of(drafter.model.requires_grad_(True), drafter.vocabulary, ObjectiveSettings())
        objective(batch, features, 9).total.backward()
        found.append({name: p.grad for name, p in drafter.model.named_parameters()})
    for name, gradient in found[0].items():
        assert torch.allclose(gradient, found[1][name], atol=1e-12), name
        assert gradient.abs().max() > 0, name


@pytest.fixture
def objective(target) -> UnrollObjective:
    drafter = tiny_drafter(target, family="eagle3")
    return UnrollObjective(drafter.model.requires_grad_(True), drafter.vocabulary, ObjectiveSettings())


def loss_of(objective: UnrollObjective, target: HFTarget, batch: TrainBatch, length: int, **more) -> Tensor:
    return objective(batch, target.features(batch.tokens, objective.model.config.target_layer_ids), length, **more)


def test_padding_and_other_samples_change_nothing(target, objective):
    wide = random_batch(target, [30, 21], 64)
    loss, parts = loss_of(objective, target, wide, 9), list[TrainBatch]()
    for i, length in enumerate((30, 21)):
        own = [x[i : i + 1] for x in wide.tensors()]
        parts.append(TrainBatch(own[0][:, :length], own[1][:, :length], *own[2:]))
    totals = objective.total_weights([(part, objective.draw(part)) for part in parts], 9)
    assert totals.host == 51
    split = [loss_of(objective, target, part, 9, totals=totals) for part in parts]
    assert loss.total.item() == pytest.approx(sum(part.total.item() for part in split), rel=1e-5)


def test_the_loop_s_part_are_the_steps_beyond_the_host_s_depth(target, objective):
    batch = random_batch(target, [30], 30)
    host, longer = (loss_of(objective, target, batch, length) for length in (7, 14))
    assert host.loop is None and longer.loop is not None
    assert torch.equal(host.host.terms, longer.host.terms) and longer.loop.terms.item() > 0
    assert longer.total.item() == pytest.approx((longer.host.terms + longer.loop.terms).item() / 30, rel=1e-6)


def test_more_steps_than_rows_weigh_nothing(target, objective):
    batch = random_batch(target, [6], 6)
    steps = objective.step_sums(batch, target.features(batch.tokens, objective.model.config.target_layer_ids), 9)
    assert [step.item() > 0 for step in steps[-3:]] == [False] * 3 and all(torch.isfinite(step) for step in steps)
    unlabelled = TrainBatch(batch.tokens, batch.loss_mask & False, *batch.tensors()[2:])
    assert loss_of(objective, target, unlabelled, 7).total.item() == 0


def test_the_mask_can_be_moved_to_the_token_after(target, objective):
    """Published: a row counts by the token of its features. Moved by one, the row before the first label counts."""
    batch = random_batch(target, [20], 20)
    features = target.features(batch.tokens, objective.model.config.target_layer_ids)
    published = objective.teacher(batch, features).counted[0].nonzero()[:, 0].tolist()
    objective.settings = replace(objective.settings, loss_mask_shift=1)
    moved = objective.teacher(batch, features).counted[0].nonzero()[:, 0].tolist()
    assert min(published) >= 4 and 3 <= min(moved) < 19 and max(moved) < 19
    assert set(published) - {19} <= set(moved)


def test_a_shift_moves_target_and_drafter_together(target, objective):
    batch = random_batch(target, [20], 20)
    moved = replace(batch, offsets=torch.tensor([50]))
    positions = moved.offsets[:, None] + torch.arange(20)
    features = target.features(batch.tokens, objective.model.config.target_layer_ids, positions=positions)
    losses = [loss_of(objective, target, batch, 9).total.item(), objective(moved, features, 9).total.item()]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # rotary positions are relative


def test_lengths_are_drawn_evenly_and_only_depend_on_the_step():
    drawn = [length_at(step, (7, 14, 21), 42) for step in range(600)]
    assert drawn == [length_at(step, (7, 14, 21), 42) for step in range(600)]
    assert all(150 < drawn.count(length) < 250 for length in (7, 14, 21))
    assert drawn != [length_at(step, (7, 14, 21), 43) for step in range(600)]


def test_a_new_head_knows_the_tokens_written_most_often():
    tokens = torch.tensor([5, 5, 5, 2, 2, 9, 9, 7])
    assert most_frequent(tokens, 3, 12).tolist() == [2, 5, 9]
    assert most_frequent(tokens, 6, 12).tolist() == [0, 1, 2, 5, 7, 9], "filled up with the smallest ids"


@pytest.fixture
def home(target, tmp_path) -> Path:
    """A target, a drafter and tokens, as the command reads them."""
    write_target(target, tmp_path / "target")
    write_drafter(tiny_drafter(target, family="eagle3"), tmp_path / "drafter", "specforge")
    flat = np.random.default_rng(0).integers(3, VOCAB, 240).astype(np.uint16)
    np.savez(tmp_path / "tokens.npz", flat=flat, lens=np.array([[5, 25]] * 8))
    return tmp_path


def command(home: Path, *more: str) -> list[str]:
    return [
        "--target-model-path", str(home / "target"), "--train-data-path", str(home / "tokens.npz"), "--output-dir",
        str(home / "out"), "--batch-size", "2", "--log-interval", "1", "--dtype", "float32", "--device", "cpu", *more,
    ]  # fmt: skip


def test_the_command_trains_and_keeps_the_vocabulary_map(home, target, capsys):
    words = command(home, "--draft-init-path", str(home / "drafter"), "--max-steps", "4", "--ttt-length-dist", "3,8")
    assert entry(["train", *words, "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    start, end = (
        load_file(home / "drafter" / "model.safetensors"),
        load_file(Path(done["checkpoint"]) / "model.safetensors"),
    )
    assert start.keys() == end.keys()
    for name in start:
        is_map = name in ("d2t", "t2d")
        assert torch.equal(start[name], end[name]) == is_map, name
        assert end[name].dtype == (start[name].dtype if is_map else torch.bfloat16), name
    drafter = dloop.load_drafter(done["checkpoint"], target)
    assert drafter.family == "eagle3" and drafter.config == dloop.load_drafter(str(home / "drafter"), target).config
    lengths = [length_at(step, (3, 8), 42) for step in range(4)]
    assert [record["loop_ce"] > 0 for record in done["records"]] == [length > 7 for length in lengths]
    assert set(lengths) == {3, 8}


@pytest.mark.parametrize("parts", [1, 2])
def test_what_is_logged_is_a_mean_over_all_parts_of_a_step(home, capsys, parts):
    """An unroll no longer than the host's stage has no other loss than the host's, however a step is cut."""
    words = command(home, "--draft-init-path", str(home / "drafter"), "--max-steps", "2", "--ttt-length-dist", "1")
    assert entry(["train", *words, "--accumulation-steps", str(parts), "--json"]) == 0
    for record in json.loads(capsys.readouterr().out)["records"]:
        assert record["host_ce"] == pytest.approx(record["loss"], rel=1e-4) and record["loop_ce"] == 0


def test_a_resumed_run_repeats_the_losses(home, capsys):
    start = ["--draft-init-path", str(home / "drafter"), "--ttt-length-dist", "2,5"]
    logs = []
    for name, runs in (
        ("whole", [["--max-steps", "6"]]),
        ("halves", [["--max-steps", "6"], ["--max-steps", "6", "--resume"]]),
    ):
        out = home / name
        for number, more in enumerate(runs):
            if name == "halves" and number == 0:
                more = [*more, "--save-interval", "3"]
            words = command(home, *start, *more, "--output-dir", str(out))
            assert entry(["train", *words]) == 0, capsys.readouterr().err
            if name == "halves" and number == 0:
                (out / "epoch_1_step_6").rename(home / "later")  # as if it had been stopped after step 3
        logs.append([row[4:] for row in csv.reader((out / "train.csv").open())])
    assert logs[0] == logs[1] and len(logs[0]) == 7, "what was logged beyond the checkpoint is written anew"


def test_a_new_drafter_learns_the_data_s_vocabulary(home, target, capsys):
    config = json.loads((home / "drafter" / "config.json").read_text())
    (home / "new.json").write_text(json.dumps(config | {"draft_vocab_size": 40}))
    words = command(home, "--draft-config-path", str(home / "new.json"), "--max-steps", "1", "--ttt-length-dist", "2")
    assert entry(["train", *words]) == 0
    drafter = dloop.load_drafter(capsys.readouterr().out.strip(), target)
    with np.load(home / "tokens.npz") as data:
        labels = torch.from_numpy(data["flat"].reshape(8, 30)[:, 5:].flatten().astype(np.int64))
    assert torch.equal(drafter.model.kept, most_frequent(labels, 40, VOCAB))


@pytest.mark.parametrize(
    ("more", "part"),
    [
        (["--num-anchors", "4"], "--num-anchors 4 is for dflash and dspark and domino, this drafter is eagle3"),
        (["--dloop-max-stage", "2"], "--dloop-max-stage 2 is for"),
        (["--init-layers", "1,2"], "--init-layers"),
        (["--gap-rows", "position"], "gap_rows='position' does not apply to eagle3"),
        (["--ttt-length-dist", "7,0"], "--ttt-length-dist 7,0 must be lengths"),
        (["--ttt-length-dist", ""], "--ttt-length-dist"),
        (["--loss-mask-shift", "2"], "--loss-mask-shift 2 must be 0 or 1"),
        (["--draft-rope-theta", "0"], "rope_theta=0.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[0],
)
def test_faulty_training_commands_end_in_one_line(home, capsys, more, part):
    words = command(home, "--draft-init-path", str(home / "drafter"), "--max-steps", "1", *more)
    assert entry(["train", *words]) == 2
    line = capsys.readouterr().err.strip()
    assert part in line and "\n" not in line


def test_flags_of_eagle3_are_refused_for_blocks(home, target, capsys):
    write_drafter(tiny_drafter(target), home / "block", "specforge")
    for more in (["--ttt-length-dist", "7"], ["--loss-mask-shift", "1"]):
        words = command(home, "--draft-init-path", str(home / "block"), "--max-steps", "1", "--num-anchors", "2", *more)
        assert entry(["train", *words]) == 2
        assert (
            f"{more[0]} {more[1]} is for eagle3 and mtp-qwen3.5 and mtp-gemma4, this drafter is dspark"
            in capsys.readouterr().err
        )


def test_a_base_named_in_training_is_written_and_needs_no_flag_afterwards(home, target, capsys):
    words = command(home, "--draft-init-path", str(home / "drafter"), "--max-steps", "1", "--draft-rope-theta", "777")
    assert entry(["train", *words]) == 0
    assert dloop.load_drafter(capsys.readouterr().out.strip(), target).config.rope_theta == 777


# The published script

NEEDED = ["--target-model-path", "T", "--ckpt-dir", "D", "--train-data-path", "d.jsonl", "--output-dir", "O"]
QWEN = ["--chat-template", "qwen"]


def meant(*words: str) -> train_command.Command:
    return parse(train_command.Command, "dloop train", forwarded("train_eagle3.py", [*NEEDED, *words]))


def test_the_published_flags_and_defaults_arrive(capsys):
    command = meant(*QWEN)
    assert (command.draft_init_path, command.num_epochs, command.learning_rate, command.max_length) == (
        "D",
        10,
        1e-4,
        2048,
    )
    assert (command.warmup_ratio, command.max_grad_norm, command.seed, command.save_interval) == (0.015, 0.5, 0, 5000)
    assert command.ttt_length_dist == (7,)
    words = (
        "--ttt-length-dist 7,14,21 --ttt-length 5 --draft-accumulation-steps 2 --max-num-steps 9 --on-the-fly-loader"
    )
    command = meant(*QWEN, *words.split(), "--attention-backend", "sdpa")
    assert (command.ttt_length_dist, command.accumulation_steps, command.max_steps) == ((7, 14, 21), 2, 9)
    assert meant(*QWEN, "--ttt-length", "5").ttt_length_dist == (5,)
    for length in ("0", "-1", "9999"):
        with pytest.raises(UserError, match=f"^--ttt-length {length} must be a length from 1 to 1024; leave it out"):
            meant(*QWEN, "--ttt-length", length)
    for flag in ("--max-num-steps", "--draft-accumulation-steps"):
        with pytest.raises(UserError, match=f"^{flag} 0 must be at least 1$"):
            meant(*QWEN, flag, "0")
    assert command.on_the_fly_loader and "SDPA is used" in capsys.readouterr().err


def test_what_is_not_offered_is_refused_with_the_way_out():
    given = {
        "is_preformatted": None, "train_only_last_turn": None, "is_vlm": None, "total_steps": "5",
        "trust_remote_code": None, "embedding_key": "x", "lm_head_key": "x", "lk_loss_type": "alpha", "kl_scale": "2.0",
        "kl_decay": "2.0", "tp_size": "2", "sp_ulysses_size": "2", "sp_ring_size": "2", "shard_target_output": None,
        "train_hidden_states_path": "x", "eval_hidden_states_path": "x", "model_download_dir": "x",
    }  # fmt: skip
    assert given.keys() == TAKEN.keys()
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        words = [flag] if value is None else [flag, value]
        with pytest.raises(UserError, match=f"^{' '.join(words)} is not offered: .+"):
            meant(*QWEN, *words)
    with pytest.raises(UserError, match="llama3 is not offered: name qwen"):
        meant()
    with pytest.raises(UserError, match="mean the same thing"):
        meant(*QWEN, "--draft-init-path", "E")


def test_the_script_trains(home, target, capsys):
    words = command(home, "--ckpt-dir", str(home / "drafter"), "--max-num-steps", "1", "--attention-backend", "sdpa")
    assert loaded("train_eagle3").main(words) == 0
    assert dloop.load_drafter(capsys.readouterr().out.strip(), target).family == "eagle3"
    assert loaded("train_eagle3").main([*words, "--mtp", "gemma4"]) == 2
    assert (
        "train_eagle3.py: error: --mtp gemma4" in (said := capsys.readouterr().err) and "is a drafter of eagle3" in said
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_example_is_parsed_and_needs_a_checkpoint(tmp_path):
    given = example(tmp_path, "8B", host="eagle3", DATA="d.jsonl", CKPT="C").stdout.split("\n")[:-1]
    at = given.index(str(SCRIPTS["train_eagle3"]))
    command = parse(train_command.Command, "dloop train", forwarded("train_eagle3.py", given[at + 1 :]))
    assert (command.target_model_path, command.draft_init_path) == ("Qwen/Qwen3-8B", "C")
    assert (command.ttt_length_dist, command.num_epochs, command.max_length) == ((7, 14, 21), 1, 4096)
    assert (command.learning_rate, command.warmup_ratio, command.max_grad_norm) == (1e-4, 0.015, 0.5)
    done = example(tmp_path, "4B", host="eagle3", DATA="d.jsonl")
    assert done.returncode == 2 and "CKPT is not set" in done.stderr


# Layouts


def test_export_writes_the_one_layout_there_is(home, target, capsys):
    """From SafeAILab's form: a plain Llama config, the embedding beside the weights."""
    rewrite(home / "drafter", architectures=["LlamaForCausalLM"], auto_map={"AutoModel": "x.Y"})
    embedding = target.vocabulary.embedding.clone()
    rewrite_tensors(home / "drafter", lambda t: t.update({"embed_tokens.weight": embedding}))
    before = load_file(home / "drafter" / "model.safetensors")

    def export(layout: str) -> int:
        models = ["--model", str(home / "target"), "--draft-model", str(home / "drafter")]
        return entry(["export", *models, "--layout", layout, "--output-dir", str(home / layout)])

    assert export("specforge") == 0
    after = load_file(home / "specforge" / "model.safetensors")
    assert after.keys() == before.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(before[key], after[key]) for key in after)
    config = json.loads((home / "specforge" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and "auto_map" not in config
    one, other = (dloop.load_drafter(str(home / name), target) for name in ("drafter", "specforge"))
    assert answer(one, target) == pytest.approx(answer(other, target), abs=1e-5)  # weights at other addresses
    for layout in ("dflash", "deepspec"):
        assert export(layout) == 2
        assert f"the {layout} layout is for block drafters, this drafter is eagle3" in capsys.readouterr().err
    own = torch.randn_like(embedding)
    rewrite_tensors(home / "drafter", lambda t: t.update({"embed_tokens.weight": own}))
    shutil.rmtree(home / "specforge")
    assert export("specforge") == 0, "the layout has a place for an embedding of its own"
    one, other = (dloop.load_drafter(str(home / name), target) for name in ("drafter", "specforge"))
    assert torch.equal(other.vocabulary.embedding, own)
    assert answer(one, target) == pytest.approx(answer(other, target), abs=1e-5)
