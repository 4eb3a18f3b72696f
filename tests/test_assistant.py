"""Gemma 4's assistant: what loads, what is refused, what it sees, its memory, its training."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from test_memory import Forced, assert_close
from torch import Tensor
from transformers import AutoModelForCausalLM

import dloop
from dloop.batch import generate_many
from dloop.cli import train as train_command
from dloop.cli.args import parse
from dloop.cli.eagle3_script import forwarded
from dloop.cli.main import entry
from dloop.detect import check_target, detect_family
from dloop.drafters.gemma4 import FAMILY, ORDERING, Assistant, read_assistant
from dloop.drafters.lodger import AssistantDrafter, AssistantMemory
from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN, FixedGate
from dloop.lent import FULL, SLIDING
from dloop.loop import Limits, Session, decode
from dloop.settings import Settings
from dloop.targets import release
from dloop.targets.hf import HFTarget
from dloop.testing import (
    gather,
    taught_drafter,
    tiny_assistant,
    tiny_drafter,
    tiny_target,
    write_drafter,
    write_target,
)
from dloop.tiny import WINDOW
from dloop.train.batch import TrainBatch
from dloop.train.lent import AssistantObjective
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.trainer import length_at
from dloop.train.unroll import UnrollObjective
from dloop.types import Features, Stage, StageRequest

pytestmark = pytest.mark.skipif(not release.is_offered(), reason="Gemma 4 needs a newer transformers")
PROMPT = [5, 9, 11, 60, 2]
LONG = [(7 * i) % 97 for i in range(3 * WINDOW)]
VOCAB = 97
EXAMPLE = Path(__file__).parents[1] / "examples" / "run_dloop_mtp.sh"


@pytest.fixture(scope="module")
def target() -> HFTarget:
    return tiny_target("gemma4", num_layers=4)


@pytest.fixture(scope="module")
def home(target, tmp_path_factory) -> Path:
    """A target, its assistant, and tokens."""
    folder = tmp_path_factory.mktemp("gemma4")
    write_target(target, folder / "target")
    write_drafter(tiny_drafter(target, family=FAMILY), folder / "assistant", "specforge")
    flat = np.random.default_rng(0).integers(3, VOCAB, 240).astype(np.uint16)
    np.savez(folder / "tokens.npz", flat=flat, lens=np.array([[5, 25]] * 8))
    return folder


@pytest.fixture
def copy(home, tmp_path) -> Path:
    """The assistant's folder, to change."""
    return Path(shutil.copytree(home / "assistant", tmp_path / "copy"))


def edit(folder: Path, **keys: object) -> None:
    """Change the outer config, or under `text` the inner one; None takes a key out."""
    raw = json.loads((folder / "config.json").read_text())
    text = raw["text_config"] | keys.pop("text", {})
    raw |= keys | {"text_config": {key: value for key, value in text.items() if value is not None}}
    (folder / "config.json").write_text(json.dumps(raw))


# What loads

PUBLISHED = {  # of the 12B release: what the assistant's shape follows from
    "architectures": ["Gemma4UnifiedAssistantForCausalLM"], "model_type": "gemma4_unified_assistant",
    "backbone_hidden_size": 3840, "use_ordered_embeddings": False, "num_centroids": 2048,
    "centroid_intermediate_top_k": 32, "tie_word_embeddings": True,
    "text_config": {
        "model_type": "gemma4_unified_text", "hidden_size": 1024, "intermediate_size": 8192, "num_hidden_layers": 4,
        "num_kv_shared_layers": 4, "layer_types": [SLIDING, SLIDING, SLIDING, FULL], "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 256, "num_global_key_value_heads": 1, "global_head_dim": 512,
        "attention_k_eq_v": True, "attention_bias": False, "vocab_size": 262144, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 262144, "sliding_window": 1024,
        "final_logit_softcapping": None,
        "rope_parameters": {
            FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        },
    },
}  # fmt: skip


def test_the_published_config_gives_the_published_shapes():
    config = read_assistant(PUBLISHED, "config").for_target(48)
    assert (config.stage_len, config.num_target_layers, config.feature_size, config.rope_theta) == (6, 48, 3840, 1e6)
    with torch.device("meta"):
        shapes = {name: list(t.shape) for name, t in Assistant(config).state_dict().items()}
    expected = {
        "model.embed_tokens.weight": [262144, 1024],
        "pre_projection.weight": [1024, 7680],
        "post_projection.weight": [3840, 1024],
        "model.norm.weight": [1024],
    }
    for index in range(4):
        size = 8192 if index == 3 else 4096
        layer = f"model.layers.{index}."
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        expected |= {f"{layer}{name}_layernorm.weight": [1024] for name in norms}
        expected |= {
            layer + "layer_scalar": [1],
            layer + "self_attn.q_proj.weight": [size, 1024],
            layer + "self_attn.q_norm.weight": [size // 16],
            layer + "self_attn.o_proj.weight": [1024, size],
            layer + "mlp.gate_proj.weight": [8192, 1024],
            layer + "mlp.up_proj.weight": [8192, 1024],
            layer + "mlp.down_proj.weight": [1024, 8192],
        }
    assert shapes == expected and len(shapes) == 48


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers=2 of 4 leaves layers with keys of their own"),
        ({"hidden_activation": "silu"}, "hidden_activation='silu'"),
        ({"layer_types": [FULL] * 3}, "must name 4 layers"),
        ({"layer_types": ["linear_attention"] * 4}, "must name 4 layers"),
        ({"rope_parameters": {FULL: {"rope_theta": 1.0}}}, "must have an object for sliding_attention"),
        ({"rope_parameters": {k: {"rope_type": "yarn", "rope_theta": 1e4} for k in (FULL, SLIDING)}}, "'yarn'"),
        ({"rope_parameters": {k: {"factor": 2.0, "rope_theta": 1e4} for k in (FULL, SLIDING)}}, "factor=2.0"),
        ({"num_global_key_value_heads": 3}, "num_attention_heads=16 must be a multiple of full_attention's 3"),
        ({"global_head_dim": 511}, "511 dimensions; it must be even"),
        ({"global_head_dim": None}, "no 'global_head_dim'"),
        ({"sliding_window": None}, "no 'sliding_window'"),
        ({"enable_moe_block": True}, "enable_moe_block=True is not supported in an assistant"),
        ({"per_layer_config": {"0": {"head_dim": 2}}}, "several shapes"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_configs_of_another_model_are_refused(change, part):
    with pytest.raises(UserError) as error:
        read_assistant({**PUBLISHED, "text_config": PUBLISHED["text_config"] | change}, "config")
    assert part in str(error.value) and "\n" not in str(error.value)


def test_outer_keys_of_another_model_are_refused():
    for change, part in (
        ({"tie_word_embeddings": False}, "tie_word_embeddings=False"),
        ({"use_ordered_embeddings": True, "num_centroids": 1000}, "num_centroids=1000 must divide"),
        ({"backbone_hidden_size": 0}, "backbone_hidden_size=0"),
        ({"text_config": None}, "text_config=None must be an object"),
    ):
        with pytest.raises(UserError, match=part):
            read_assistant({**PUBLISHED, **change}, "config")


def test_the_model_type_tells_an_assistant_from_a_target():
    for model_type in ("gemma4_unified_assistant", "gemma4_assistant"):
        raw = {**PUBLISHED, "model_type": model_type}
        assert detect_family(raw, "x") == FAMILY
        with pytest.raises(UserError, match="x is a drafter, not a target"):
            check_target(raw, "x")


def test_a_wider_feed_forward_and_keys_without_their_own_count_are_read():
    text = PUBLISHED["text_config"] | {"use_double_wide_mlp": True, "attention_k_eq_v": False}
    config = read_assistant({**PUBLISHED, "text_config": text}, "config")
    assert config.intermediate_size == 16384 and config.borrows[FULL].heads == 8


def test_every_tensor_counts(home, target):
    drafter = dloop.load_drafter(str(home / "assistant"), target)
    assert isinstance(drafter, AssistantDrafter) and drafter.stage_len == 6

    def answer() -> list[float]:
        memory = drafter.open()
        memory.extend(0, 0, LONG, target.open(drafter.taps).prefill(0, LONG).features)
        stages = [memory.draft([StageRequest(slot=0, anchor=1 + index, index=index)])[0] for index in (0, 1)]
        return [logp for stage in stages for logp in [*stage.logp, *map(float, stage.tokens)]]

    before = answer()
    for key, weight in drafter.model.state_dict().items():
        saved = weight.clone()
        weight[..., ::2] = weight[..., ::2] * 1.5
        assert answer() != before, f"{key} is never used"
        weight.copy_(saved)
    assert answer() == before


FAULTS = {
    "missing": (lambda t: t.pop("pre_projection.weight"), "is missing 1 tensors: pre_projection.weight"),
    "keys": (lambda t: t.update({"model.layers.0.self_attn.k_proj.weight": torch.ones(2, 2)}), "has unexpected 1"),
    "shape": (lambda t: t.update({"post_projection.weight": torch.ones(3, 3)}), "has wrongly shaped"),
    "nan": (lambda t: t["model.norm.weight"].fill_(float("nan")), "NaN"),
    "untied": (lambda t: t.update({"lm_head.weight": torch.ones(VOCAB, 24)}), "to which it is tied"),
    "order-of-none": (lambda t: t.update({ORDERING: torch.tensor(1)}), "does not name every token once"),
    "order-of-fractions": (lambda t: t.update({ORDERING: torch.arange(VOCAB) + 0.5}), "does not name every token once"),
    "order-of-bytes": (lambda t: t.update({ORDERING: torch.ones(3).to(torch.float8_e4m3fn)}), "does not name every"),
    "quantised": (
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].to(torch.float8_e4m3fn)}),
        "to which it is tied",
    ),
    "another's": (lambda t: t.update({"mtp.fc.weight": torch.ones(1)}), "its tensor mtp.fc.weight is mtp-qwen3.5's"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_assistants_that_do_not_fit_are_refused(target, copy, case):
    change, message = FAULTS[case]
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(UserError, match=message):
        dloop.load_drafter(str(copy), target)


def test_the_tied_matrix_may_be_stored_twice(target, copy):
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, copy / "model.safetensors")
    assert len(dloop.load_drafter(str(copy), target).model.state_dict()) == len(tensors)


def test_an_assistant_fits_its_target_alone(target, home, copy):
    for other in ("qwen3", "qwen3_5"):
        with pytest.raises(UserError, match=f"that a Gemma 4 target lends, tiny {other} lends none"):
            dloop.load_drafter(str(copy), tiny_target(other))
    rope = json.loads((copy / "config.json").read_text())["text_config"]["rope_parameters"]
    moved = {**rope, SLIDING: rope[SLIDING] | {"rope_theta": 5e4}}
    for change, message in [
        ({"text": {"vocab_size": 98}}, "a vocabulary of 98 tokens"),
        ({"backbone_hidden_size": 40}, "expects hidden size 40"),
        ({"text": {"head_dim": 4}}, "expects head_dim 4 of sliding_attention, tiny gemma4 has 8"),
        ({"text": {"num_global_key_value_heads": 2}}, "expects heads 2 of full_attention, tiny gemma4 has 1"),
        ({"text": {"sliding_window": 9}}, "expects window 9 of sliding_attention, tiny gemma4 has 7"),
        ({"text": {"rope_parameters": moved}}, "expects rope_theta 50000 of sliding_attention"),
    ]:
        shutil.copy(home / "assistant" / "config.json", copy / "config.json")
        edit(copy, **change)
        with pytest.raises(UserError, match=message):
            dloop.load_drafter(str(copy), target)
    for words, message in [({"gap_rows": "position"}, "leaves no gap"), ({"rope_theta": 7.0}, "does not apply to mtp")]:
        with pytest.raises(UserError, match=message):
            dloop.load_drafter(str(home / "assistant"), target, **words)


def test_the_name_mtp_is_no_assistant(home):
    loaded = dloop.load_target(str(home / "target"), dtype="float32")
    with pytest.raises(UserError, match="for Gemma 4, of its assistant"):
        dloop.load_drafter("mtp", loaded)


# Against the library's own class


@torch.no_grad()
def theirs(folder: Path, drafter: AssistantDrafter, target: HFTarget, text: list[int], steps: int) -> list[Tensor]:
    """Logits of the library's assistant for a chain after the text: shown the verified rows, of a window the last."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = {"input_ids": torch.tensor([text[:-1]]), "use_cache": False, "return_shared_kv_states": True}
    seen = target.backbone(**inputs)
    shared = dict(seen.shared_kv_states)
    shared[SLIDING] = tuple(part[:, :, -WINDOW:] for part in shared[SLIDING])
    state, token, found = seen.last_hidden_state[:, -1:], text[-1], list[Tensor]()
    for _ in range(steps):
        embedded = target.model.get_input_embeddings()(torch.tensor([[token]]))
        out = model(
            inputs_embeds=torch.cat([embedded, state], -1),
            position_ids=torch.tensor([[len(text) - 1]]),
            shared_kv_states=shared,
        )
        found.append(out.logits[0, 0])
        state, token = out.last_hidden_state, int(out.logits.argmax())
    return found


def ours(drafter: AssistantDrafter, target: HFTarget, text: list[int], stages: int) -> list[Tensor]:
    memory, heard, logits = drafter.open(), list[Tensor](), drafter.model.logits
    memory.extend(0, 0, text[:-1], target.open(drafter.taps).prefill(0, text[:-1]).features)

    def noted(states: Tensor, vocabulary):
        heard.append(logits(states, vocabulary))
        return heard[-1]

    drafter.model.logits = noted
    anchor = text[-1]
    for index in range(stages):
        anchor = memory.draft([StageRequest(slot=0, anchor=anchor, index=index)])[0].tokens[-1]
    drafter.model.logits = logits
    return heard


def ordered(folder: Path) -> None:
    """Give it an ordered vocabulary: 12 clusters of 8 tokens, of which 4 clusters are looked at."""
    tensors = load_file(folder / "model.safetensors")
    vocabulary, width = tensors["model.embed_tokens.weight"].shape
    generator = torch.Generator().manual_seed(3)
    tensors["masked_embedding.centroids.weight"] = torch.randn(12, width, generator=generator)
    tensors[ORDERING] = torch.randperm(vocabulary, generator=generator)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit(folder, use_ordered_embeddings=True, num_centroids=12, centroid_intermediate_top_k=4)


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "beyond the window"])
@pytest.mark.parametrize("change", [None, ordered], ids=["whole", "ordered"])
def test_every_step_is_the_library_s(prompt, change, tmp_path):
    target = tiny_target("gemma4", num_layers=4, vocab_size=96)
    folder = write_drafter(tiny_drafter(target, family=FAMILY), tmp_path, "specforge")
    if change is not None:
        change(folder)
    drafter = dloop.load_drafter(str(folder), target)
    expected = theirs(folder, drafter, target, prompt, steps=18)
    found = ours(drafter, target, prompt, stages=3)
    assert len(found) == len(expected) == 18
    for step, (mine, other) in enumerate(zip(found, expected, strict=True)):
        assert_close(mine, other, f"logits of step {step}", 1e-4)
    if change is ordered:
        assert all(len((logits == logits.min()).nonzero()) == 96 - 32 for logits in found), "a floor below the rest"


def test_a_broken_order_is_refused(tmp_path):
    target = tiny_target("gemma4", num_layers=4, vocab_size=96)
    folder = write_drafter(tiny_drafter(target, family=FAMILY), tmp_path, "specforge")
    ordered(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors[ORDERING][0] = tensors[ORDERING][1]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match="does not name every token once"):
        dloop.load_drafter(str(folder), target)


def test_the_form_that_transformers_writes_loads_too(home, target, tmp_path):
    AutoModelForCausalLM.from_pretrained(home / "assistant").save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())["text_config"]
    again, first = (dloop.load_drafter(str(place), target) for place in (tmp_path, home / "assistant"))
    assert "per_layer_config" in raw and "global_head_dim" not in raw
    assert replace(again.config, published="") == replace(first.config, published="")
    mine, other = again.model.state_dict(), first.model.state_dict()
    assert mine.keys() == other.keys() and all(torch.equal(mine[key], other[key]) for key in mine)


# What is drafted


def test_a_stage_is_as_long_as_mtp_k_says(home, target):
    drafter = dloop.load_drafter(str(home / "assistant"), target)
    for steps, length in ((None, 6), (1, 1), (5, 5)):
        out = dloop.generate(target, drafter, PROMPT, 12, mtp_k=steps)
        assert {len(r.drafted) for r in out.rounds} == {length}
        assert out.tokens == dloop.generate_autoregressive(target, PROMPT, 12).tokens
    for words, message in [
        ({"mtp_k": 0}, "mtp_k=0 must be at least 1"),
        ({"draft_depth": 3}, "draft_depth=3 does not apply to mtp-gemma4"),
        ({"tree_budget": 8}, "trees are not offered for mtp-gemma4"),
        ({"stage_tree_budget": 8}, "tree_budget is 0 for mtp-gemma4"),
    ]:
        with pytest.raises(UserError, match=message):
            dloop.generate(target, drafter, PROMPT, 4, **words)


def test_a_taught_assistant_is_right_at_times_and_loops(target):
    """Neither 0 nor 1: acceptance of an assistant trained a moment on two texts."""
    texts = [PROMPT + dloop.generate_autoregressive(target, PROMPT, 30, temperature=0.8, seed=s).tokens for s in (0, 1)]
    drafter = taught_drafter(target, texts, family=FAMILY, steps=50)
    plain = dloop.generate_autoregressive(target, texts[0][:12], 30)
    for gate in (1.0, -2.0, ALWAYS_OPEN):
        out = dloop.generate(target, drafter, texts[0][:12], 30, loop_gate=gate, max_stages=3)
        assert out.tokens == plain.tokens
        drafted = sum(len(r.drafted) for r in out.rounds)
        assert 0 < sum(r.accepted for r in out.rounds) < drafted


def test_many_sequences_keep_their_own_rows(home, target):
    drafter = dloop.load_drafter(str(home / "assistant"), target)
    prompts = [PROMPT, [7], LONG]
    plain = [dloop.generate_autoregressive(target, prompt, 20).tokens for prompt in prompts]
    alone = [dloop.generate(target, drafter, prompt, 20, loop_gate=-9.0) for prompt in prompts]
    settings = Settings(max_new_tokens=20, loop_gate=-9.0)
    many = {text.index: text for text in generate_many(target, drafter, prompts, settings)}
    assert [many[index].tokens for index in range(3)] == plain == [one.tokens for one in alone]
    assert [[r.drafted for r in many[index].rounds] for index in range(3)] == [
        [r.drafted for r in one.rounds] for one in alone
    ]


def test_the_command_takes_an_assistant(home, capsys):
    words = ["generate", "--model", str(home / "target"), "--draft-model", str(home / "assistant"), "--json"]
    words += ["--prompt-ids", "5,9,11", "--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8"]
    assert entry([*words, "--mtp-k", "2", "--loop-gate", "-inf"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {len(stage["tokens"]) for r in found["rounds"] for stage in r["stages"]} == {2}


# Its memory

K, STAGES = 3, 3


@dataclass
class Lawful:
    """A memory that is compared with fresh ones: its keys and values, once a round, with those of the committed text
    read at once; its chains, which magnify rounding step by step, with those over the very same rows given at once.
    """

    memory: AssistantMemory
    target: HFTarget
    text: list[int] = field(default_factory=list)
    given: list[Features] = field(default_factory=list)
    fresh: AssistantMemory | None = None
    checks: int = 0

    @property
    def stage_len(self) -> int:
        return self.memory.stage_len

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        self.memory.extend(slot, position, tokens, features)
        self.text = self.text[:position] + tokens
        self.given.append(features)
        parts = (torch.cat([getattr(each, name) for each in self.given]) for name in ("taps", "last"))
        self.fresh, read = self.memory.drafter.open(), self.memory.drafter.open()
        self.fresh.extend(0, 0, self.text, Features(**dict(zip(("taps", "last"), parts, strict=True))))
        seen = self.target.open(self.memory.drafter.taps).prefill(0, self.text)
        read.extend(0, 0, self.text, seen.features)
        mine, other = (memory.slots[0].lent for memory in (self.memory, read))
        for kind in (SLIDING, FULL):
            assert mine[kind].length == mine[kind].committed == len(self.text), "a rejected row is left"
            for found, wanted in zip(mine[kind].layers()[0], other[kind].layers()[0], strict=True):
                assert_close(found, wanted, f"keys or values of {kind}")

    def draft(self, requests: list[StageRequest]) -> list[Stage]:
        stages = self.memory.draft(requests)
        expected = self.fresh.draft(requests)
        assert stages[0].tokens == expected[0].tokens, "another chain than a fresh memory's"
        assert stages[0].logp == pytest.approx(expected[0].logp, abs=1e-6), "another chain than a fresh memory's"
        self.checks += 1
        return stages


def decode_lawfully(target: HFTarget, memory: AssistantMemory, judge, prompt: list[int], length: int = 70) -> Lawful:
    lawful = Lawful(memory, target)
    session = Session(target.open(memory.drafter.taps), lawful)
    limits = Limits(max_new_tokens=length, max_stages=STAGES, context=target.context)
    gather([decode(session, 0, prompt, gate=FixedGate(ALWAYS_OPEN), judge=judge, limits=limits)], session)
    return lawful


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "beyond the window"])
def test_the_memory_holds_verified_rows_alone_whatever_was_accepted(target, prompt):
    """0, 1, ..., S * k tokens of a round."""
    counts = [0, 9, 4, 1, 6, 2, 8, 5, 3, 7]
    judge = Forced(counts)
    drafter = tiny_drafter(target, family=FAMILY, stage_len=K)
    assert decode_lawfully(target, drafter.open(), judge, prompt).checks >= STAGES * len(counts)
    assert sum(len(draft.drafted) == STAGES * K for draft in judge.drafts) >= len(counts), "each count met three stages"


class KeepsOneMore(AssistantMemory):
    """Planted: the row after the accepted ones stays, as in the library."""

    def extend(self, slot, position, tokens, features):
        super().extend(slot, position, tokens, features)
        if position:
            for memory in self.slots[slot].lent.values():
                memory.length += 1


class MovesOn(AssistantMemory):
    """Planted: a step stands where its token does."""

    def _rows(self, state, states, tokens, position):
        memory = next(iter(state.lent.values()))
        memory.committed, before = position + 1, memory.committed
        try:
            return super()._rows(state, states, tokens, position)
        finally:
            memory.committed = before


FAULTY = [(KeepsOneMore, "a rejected row is left"), (MovesOn, "another chain")]


@pytest.mark.parametrize(("planted", "words"), FAULTY)
def test_a_memory_that_breaks_the_law_is_caught(target, planted, words):
    drafter = tiny_drafter(target, family=FAMILY, stage_len=K)

    with pytest.raises(AssertionError, match=words):
        decode_lawfully(target, planted(drafter), Forced([2]), PROMPT, length=12)


def test_a_first_stage_can_be_asked_for_again(target):
    drafter = tiny_drafter(target, family=FAMILY, stage_len=K)
    memory = drafter.open()
    memory.extend(0, 0, LONG, target.open(drafter.taps).prefill(0, LONG).features)
    first = memory.draft([StageRequest(slot=0, anchor=1, index=0)])[0]
    memory.draft([StageRequest(slot=0, anchor=first.tokens[-1], index=1)])
    other = memory.draft([StageRequest(slot=0, anchor=7, index=0)])[0]
    assert memory.draft([StageRequest(slot=0, anchor=1, index=0)])[0] == first != other


# Training


def random_batch(lengths: list[int], width: int) -> TrainBatch:
    tokens = torch.randint(3, VOCAB, (len(lengths), width), generator=torch.Generator().manual_seed(4))
    held = torch.tensor(lengths)
    inside = torch.arange(width) < held[:, None]
    return TrainBatch(tokens * inside, inside & (torch.arange(width) >= 4), held, torch.zeros(len(lengths)).long())


@pytest.mark.parametrize("rows", [512, 7], ids=["one piece", "pieces"])
def test_the_loss_is_that_of_whole_laws_over_bent_logits(target, rows, monkeypatch):
    monkeypatch.setattr("dloop.train.unroll.ROWS", rows)
    drafter, batch = tiny_drafter(target, family=FAMILY), random_batch([30, 21], 30)
    model, features = drafter.model.requires_grad_(True), target.features(batch.tokens, drafter.taps)
    own = objective_of(model, drafter.vocabulary, ObjectiveSettings())
    assert isinstance(own, AssistantObjective)
    loss = own(batch, features, 12)
    unroll, laws = own.begin(batch, features), torch.softmax(target.model(batch.tokens).logits, -1)
    total = torch.zeros(())
    for step in range(12):
        logp = model.logits(unroll.forward(), drafter.vocabulary).log_softmax(-1)
        for sample, length in enumerate((30, 21)):
            for row in range(length - 2 - step):
                at = row + 1 + step  # the teacher's row
                if batch.loss_mask[sample, at - 1]:
                    total = total - 0.8**step * (laws[sample, at] * logp[sample, row]).sum()
    uniform = UnrollObjective.step_sums(own, batch, features, 12)  # rows at a text's end, whose law is uniform
    assert loss.total.item() == pytest.approx(sum(0.8**i * s.item() for i, s in enumerate(uniform)) / 51, rel=1e-5)
    assert 0 < total.item() / 51 < loss.total.item() < total.item() / 51 * 1.2


def test_a_batch_is_its_samples_and_padding_changes_nothing(target):
    drafter = tiny_drafter(target, family=FAMILY)
    objective = objective_of(drafter.model, drafter.vocabulary, ObjectiveSettings())
    wide = random_batch([30, 21], 40)
    whole = sum(objective.step_sums(wide, target.features(wide.tokens, drafter.taps), 6)).item()
    parts = 0.0
    for i, length in enumerate((30, 21)):
        own = [x[i : i + 1] for x in wide.tensors()]
        part = TrainBatch(own[0][:, :length], own[1][:, :length], *own[2:])
        parts += sum(objective.step_sums(part, target.features(part.tokens, drafter.taps), 6)).item()
    assert whole == pytest.approx(parts, rel=1e-5)


def command(home: Path, out: Path, *more: str) -> list[str]:
    return [
        "--target-model-path", str(home / "target"), "--train-data-path", str(home / "tokens.npz"), "--output-dir",
        str(out), "--draft-init-path", str(home / "assistant"), "--batch-size", "2", "--log-interval", "1", "--dtype",
        "float32", "--device", "cpu", *more,
    ]  # fmt: skip


def test_the_command_trains_an_assistant_into_its_own_format(home, target, tmp_path, capsys):
    assert entry(["train", *command(home, tmp_path, "--max-steps", "4", "--json")]) == 0
    done = json.loads(capsys.readouterr().out)
    before, after = (load_file(Path(p) / "model.safetensors") for p in (home / "assistant", done["checkpoint"]))
    assert before.keys() == after.keys() and all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    for key, tensor in before.items():
        if tensor.ndim > 1 or key.endswith("layer_scalar"):
            is_buffer = key.endswith("layer_scalar")
            assert torch.equal(tensor.bfloat16(), after[key]) == is_buffer, "all but buffers is trained"
    raw, first = (
        json.loads((Path(place) / "config.json").read_text()) for place in (done["checkpoint"], home / "assistant")
    )
    assert raw == first | {"dtype": "bfloat16"}
    drafter = dloop.load_drafter(done["checkpoint"], target)
    assert drafter.family == FAMILY
    assert (
        dloop.generate(target, drafter, PROMPT, 10).tokens == dloop.generate_autoregressive(target, PROMPT, 10).tokens
    )
    lengths = [length_at(step, (6, 12, 18), 42) for step in range(4)]  # one, two or three stages of the host
    assert [record["loop_ce"] > 0 for record in done["records"]] == [length > 6 for length in lengths]


def test_training_lowers_the_loss_and_kept_features_change_nothing(home, tmp_path, capsys):
    words = ["--max-steps", "12", "--learning-rate", "3e-3", "--json", "--ttt-length-dist", "6"]
    found = []
    for name, more in (("plain", []), ("kept", ["--cache-features"])):
        assert entry(["train", *command(home, tmp_path / name, *words, *more)]) == 0
        found.append([record["loss"] for record in json.loads(capsys.readouterr().out)["records"]])
    assert found[0][-1] < found[0][0] and found[1] == pytest.approx(found[0], rel=1e-4)


def test_flags_of_other_families_are_refused(home, tmp_path, capsys):
    for flag in (["--num-anchors", "4"], ["--draft-rope-theta", "5"], ["--gap-rows", "position"]):
        assert entry(["train", *command(home, tmp_path, "--max-steps", "1", *flag)]) == 2
        assert "mtp-gemma4" in capsys.readouterr().err.strip().splitlines()[-1]


NEEDED = ["--target-model-path", "T", "--train-data-path", "d.npz", "--output-dir", "O", "--mtp", "gemma4"]


def meant(*words: str) -> train_command.Command:
    return parse(train_command.Command, "dloop train", forwarded("train_eagle3.py", [*NEEDED, *words]))


def test_the_published_script_trains_the_assistant(home, target, tmp_path):
    start = ("--ckpt-dir", str(home / "assistant"))
    assert (meant(*start).draft_init_path, meant(*start).ttt_length_dist) == (start[1], (6,))
    assert meant(*start, "--ttt-length-dist", "6,12,18").ttt_length_dist == (6, 12, 18)
    assert meant(*start, "--ttt-length", "5").ttt_length_dist == (5,)
    with pytest.raises(UserError, match="give it as --ckpt-dir"):
        meant()
    eagle = write_drafter(tiny_drafter(target, family="eagle3"), tmp_path, "specforge")
    with pytest.raises(UserError, match="is a drafter of eagle3; give a head, or leave out --mtp"):
        meant("--ckpt-dir", str(eagle))
    with pytest.raises(UserError, match="--mtp gemma4 trains a head that is there"):
        meant("--draft-model-config", "c.json")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_example_trains_the_assistant(home, tmp_path):
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "d.jsonl", "CKPT": str(home / "assistant")}
    words = ["bash", str(EXAMPLE), "gemma4"]
    given = subprocess.run(words, env=env, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.split("\n")
    at = given.index(str(EXAMPLE.parents[1] / "scripts" / "train_eagle3.py"))
    command = parse(train_command.Command, "dloop train", forwarded("train_eagle3.py", given[at + 1 : -1]))
    assert (command.target_model_path, command.draft_init_path) == ("google/gemma-4-12B-it", str(home / "assistant"))
    assert (command.ttt_length_dist, command.num_epochs, command.chat_template) == ((6, 12, 18), 1, "model")


def test_export_writes_the_one_layout(home, tmp_path, capsys):
    words = ["export", "--draft-model", str(home / "assistant"), "--model", str(home / "target")]
    assert entry([*words, "--layout", "specforge", "--output-dir", str(tmp_path / "out")]) == 0
    before, after = (load_file(place / "model.safetensors") for place in (home / "assistant", tmp_path / "out"))
    assert before.keys() == after.keys() and all(torch.equal(before[key], after[key]) for key in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == tiny_assistant(tiny_target("gemma4"))
    capsys.readouterr()
    assert entry([*words, "--layout", "deepspec", "--output-dir", str(tmp_path / "other")]) == 2
    assert "this drafter is mtp-gemma4; use specforge" in capsys.readouterr().err
