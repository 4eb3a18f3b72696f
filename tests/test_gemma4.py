"""Gemma 4 as a target: windows that never lose a row, rejections beyond them, and the keys and values it lends."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

import dloop
from dloop.cli.main import entry
from dloop.detect import check_target
from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN, FixedGate
from dloop.judge import Match
from dloop.lent import FULL, KINDS, LENT, SLIDING, LentKind, in_rows, of_rows
from dloop.loop import Limits, Session, decode
from dloop.sampling import Sampling
from dloop.targets import release
from dloop.targets.gemma4 import Gemma4Memory, Gemma4Target
from dloop.testing import ScriptedDrafter, chain, gather, tiny_target, write_target
from dloop.tiny import WINDOW, fill, window_layers
from dloop.types import Draft, Rows, Verdict

pytestmark = pytest.mark.skipif(not release.is_offered(), reason="Gemma 4 needs a newer transformers")

TOLERANCE = 1e-5
PROMPT = [5, 9, 11, 60, 2]
LONG = [(7 * i) % 97 for i in range(3 * WINDOW)]
K, STAGES = 3, 3


@pytest.fixture(scope="module")
def target() -> Gemma4Target:
    return tiny_target("gemma4", num_layers=4)


@torch.no_grad()
def sequential(target: Gemma4Target, text: list[int]) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of all layers after one plain pass over the text: the library's own masks, no memory of ours."""
    found: list[tuple[Tensor, Tensor]] = []
    handles = [
        layer.self_attn.register_forward_hook(noting(found), with_kwargs=True) for layer in target.backbone.layers
    ]
    try:
        target.backbone(input_ids=torch.tensor([text]), use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


def noting(found: list[tuple[Tensor, Tensor]]):
    """Computes a layer's keys and values anew from what it was given."""

    def hook(module, _args, given, _output):
        states, (cos, sin) = given["hidden_states"], given["position_embeddings"]
        keys = module.k_proj(states).unflatten(-1, (-1, module.head_dim))
        values = keys if module.v_proj is None else module.v_proj(states).unflatten(-1, (-1, module.head_dim))
        keys, values = module.k_norm(keys), module.v_norm(values)
        first, second = keys.chunk(2, -1)
        turned = keys * cos[:, :, None] + torch.cat([-second, first], -1) * sin[:, :, None]
        found.append((turned.transpose(1, 2), values.transpose(1, 2)))

    return hook


def check_memory(memory: Gemma4Memory, text: list[int], slot: int = 0) -> None:
    for index, (layer, pair) in enumerate(
        zip(memory.caches[slot].layers, sequential(memory.target, text), strict=True)
    ):
        for name, mine, expected in zip(("keys", "values"), (layer.keys, layer.values), pair, strict=True):
            assert mine.shape == expected.shape, f"{name} {index}: {mine.shape} instead of {expected.shape}"
            worst = (mine - expected).abs().max().item()
            assert worst <= TOLERANCE, f"{name} {index} differ by {worst:.2g}"


@dataclass
class Forced:
    """A judge that accepts as many nodes as it is told, one number a round."""

    counts: list[int]
    drafts: list[Draft] = field(default_factory=list)
    drafting: None = None

    def first(self, logits: Tensor, position: int) -> int:
        return 1

    def __call__(self, draft: Draft, logits: Tensor) -> Verdict:
        count = min(self.counts[len(self.drafts) % len(self.counts)], len(draft.drafted))
        self.drafts.append(draft)
        return Verdict(path=list(range(1, 1 + count)), bonus=(11 * len(self.drafts)) % 97)


class Watched(Gemma4Memory):
    """Holds the law after every commit."""

    def prefill(self, slot: int, tokens: list[int]):
        self.text = list(tokens)
        return super().prefill(slot, tokens)

    def verify(self, rows: Rows):
        self.asked = rows
        return super().verify(rows)

    def commit(self, slot: int, path: list[int]) -> None:
        super().commit(slot, path)
        self.text += [self.asked.token[node] for node in path]
        check_memory(self, self.text, slot)


def decode_forced(memory: Watched, judge: Forced, prompt: list[int]) -> None:
    drafter = ScriptedDrafter(K, lambda text, index: chain([(text[-1] * 7 + i + index) % 97 for i in range(K)]))
    session = Session(memory, drafter)
    limits = Limits(max_new_tokens=70, max_stages=STAGES, context=memory.target.context)
    gather([decode(session, 0, prompt, gate=FixedGate(ALWAYS_OPEN), judge=judge, limits=limits)], session)


@pytest.mark.parametrize("prompt", [PROMPT, LONG], ids=["short", "beyond the window"])
def test_memory_equals_a_sequential_run_s_whatever_was_accepted(target, prompt):
    """0, 1, ..., S * k tokens of a round, in bursts longer than the window."""
    assert STAGES * K > WINDOW
    judge = Forced(counts=[0, 9, 4, 1, 6, 2, 8, 5, 3, 7])
    decode_forced(Watched(target, (0, 1)), judge, prompt)
    assert sum(len(draft.drafted) == STAGES * K for draft in judge.drafts) >= len(judge.counts)


class KeepsOneMore(Watched):
    """Planted: the first rejected row stays."""

    def commit(self, slot, path):
        more = [*path, len(path)] if len(path) < len(self.asked) else path
        super().commit(slot, more)
        self.text = self.text[: len(self.text) - len(more) + len(path)]
        check_memory(self, self.text, slot)


def test_a_memory_that_is_not_rolled_back_is_caught(target):
    with pytest.raises(AssertionError, match="keys 0"):
        decode_forced(KeepsOneMore(target, ()), Forced(counts=[2]), PROMPT)


def test_texts_are_transformers_own_beyond_the_window(target):
    for prompt in (PROMPT, LONG):
        plain = dloop.generate_autoregressive(target, prompt, 40).tokens
        ids = target.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)).long(), max_new_tokens=40,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        assert plain == ids[0, len(prompt) :].tolist() and len(set(plain)) > 10


def test_logits_are_bent_as_the_model_bends_them(target):
    tokens = torch.tensor([LONG])
    expected = target.model(tokens).logits
    assert torch.allclose(target.logits(target.features(tokens, ()).last), expected, atol=TOLERANCE)
    seen = target.open().prefill(0, LONG)
    assert torch.allclose(seen.logits[0], expected[0, -1], atol=TOLERANCE)
    flat = torch.nn.functional.linear(seen.features.last[-1], target.vocabulary.head)
    assert (flat - seen.logits[0]).abs().max() > 0.1 and seen.logits.abs().max() < target.softcap


# Keys and values lent


def test_what_is_lent_is_the_last_layer_of_each_kind(target):
    assert target.lends == {
        SLIDING: LentKind(heads=2, head_dim=8, window=WINDOW, rope_theta=10_000.0, turning=1.0),
        FULL: LentKind(heads=1, head_dim=16, window=None, rope_theta=100_000.0, turning=0.5),
    }
    assert tuple(target.lends) == KINDS
    memory = target.open((LENT,))
    seen = [
        memory.prefill(0, LONG),
        memory.verify(Rows(token=[1, 2, 3], slot=[0] * 3, position=[21, 22, 23], parent=[-1, 0, 1])),
    ]
    pairs = sequential(target, [*LONG, 1, 2, 3])
    rows = torch.cat([part.features.taps for part in seen])[None]
    assert rows.shape[-1] == target.width_of((LENT,))
    for kind, (keys, values) in of_rows(rows, target.lends).items():
        expected = pairs[{SLIDING: 2, FULL: 3}[kind]]
        assert torch.allclose(keys, expected[0], atol=TOLERANCE) and torch.allclose(values, expected[1], atol=TOLERANCE)
    whole = target.features(torch.tensor([[*LONG, 1, 2, 3]]), (LENT,))
    assert torch.allclose(whole.taps, rows, atol=TOLERANCE)


def test_rows_are_put_side_by_side_and_taken_apart():
    shapes = {
        kind: LentKind(heads=h, head_dim=d, window=None, rope_theta=1.0, turning=1.0)
        for kind, h, d in ((SLIDING, 2, 3), (FULL, 1, 5))
    }
    pairs = {
        kind: (torch.randn(2, s.heads, 6, s.head_dim), torch.randn(2, s.heads, 6, s.head_dim))
        for kind, s in shapes.items()
    }
    found = of_rows(in_rows(pairs, 4), shapes)
    assert all(
        torch.equal(mine, theirs[:, :, 2:])
        for kind in KINDS
        for mine, theirs in zip(found[kind], pairs[kind], strict=True)
    )


# Loading

OTHERS = {  # the smaller releases: embeddings for every layer, layers that share keys and values, experts
    "for each layer": {"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 2},
    "experts": {
        "hidden_size_per_layer_input": 0, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
}  # fmt: skip


@pytest.mark.parametrize("more", OTHERS.values(), ids=OTHERS)
def test_the_other_releases_decode_and_lend_too(more):
    sizes = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "eos_token_id": None,
    }  # fmt: skip
    config = AutoConfig.for_model("gemma4_text", **sizes, **window_layers(4), **more)
    model = AutoModelForCausalLM.from_config(config).eval()
    fill(model, 3)
    target = Gemma4Target(name="tiny", model=model.requires_grad_(False), stop_ids=frozenset())
    text = dloop.generate_autoregressive(target, LONG, 20).tokens
    ids = model.generate(
        torch.tensor([LONG]),
        attention_mask=torch.ones(1, 21).long(),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
    )
    assert text == ids[0, 21:].tolist()
    seen = target.open((LENT,)).prefill(0, LONG)
    assert seen.features.taps.shape == (21, target.width_of((LENT,)))
    scripted = ScriptedDrafter(K, lambda before, index: chain([3, 4, 5]))
    session = Session(target.open(), scripted)
    limits = Limits(max_new_tokens=20, max_stages=STAGES, context=256)

    done = gather(
        [decode(session, 0, LONG, gate=FixedGate(ALWAYS_OPEN), judge=Match(Sampling()), limits=limits)], session
    )
    assert done[0].tokens == text


def test_a_checkpoint_loads_on_the_twin(target, tmp_path):
    folder = write_target(target, tmp_path)
    read = dloop.load_target(str(folder), dtype="float32")
    assert isinstance(read, Gemma4Target) and read.forks and read.engine == "twin" and read.context == 256
    with pytest.raises(UserError, match="the fast path has no sliding-window layers"):
        dloop.load_target(str(folder), dtype="float32", engine="fast")
    halved = dloop.load_target(str(folder), dtype="bfloat16")
    assert dloop.generate_autoregressive(halved, PROMPT, 8).tokens


def test_an_older_transformers_is_refused_with_the_way_out(target, tmp_path, monkeypatch):
    folder = write_target(target, tmp_path)
    monkeypatch.setattr(release, "version", lambda name: "5.9.0")
    with pytest.raises(UserError, match=r"a Gemma 4 model, which needs transformers >= 5.16, not 5.9.0: pip install"):
        dloop.load_target(str(folder))


BASE = {
    "model_type": "gemma4_unified",
    "text_config": {
        "layer_types": [SLIDING, FULL],
        "rope_parameters": {FULL: {"rope_type": "proportional"}, SLIDING: {"rope_type": "default"}},
    },
}


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"layer_types": [SLIDING, "chunked_attention"]}, "must be a list of sliding_attention and full_attention"),
        ({"layer_types": "full_attention"}, "must be a list"),
        ({"use_bidirectional_attention": "all"}, "lets every token see those behind it"),
        ({"rope_parameters": {FULL: {"rope_type": "dynamic"}}}, "RoPE of type 'dynamic'"),
        ({"quantization_config": {"quant_method": "awq"}}, "is quantised"),
    ],
)
def test_configs_that_cannot_be_decoded_are_refused(change, part):
    check_target(BASE, "x")
    with pytest.raises(UserError, match=part):
        check_target({**BASE, "text_config": BASE["text_config"] | change}, "x")


def test_the_command_decodes_it(target, tmp_path, capsys):
    folder = write_target(target, tmp_path)
    words = ["generate", "--model", str(folder), "--baseline", "--prompt-ids", "5,9,11", "--dtype", "float32"]
    assert entry([*words, "--max-new-tokens", "4", "--device", "cpu"]) == 0
    assert capsys.readouterr().out
