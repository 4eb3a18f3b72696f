"""Qwen3.5 as a target: what was rejected leaves no trace in states that cannot be shortened, and costs no forward."""

import gc
import importlib.metadata
import weakref
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import dloop
from dloop.cli.main import entry
from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN, FixedGate
from dloop.loop import Limits, Session, decode
from dloop.targets import recurrent, release
from dloop.targets.hf import cache_argument
from dloop.targets.recurrent import LINEAR, RecurrentMemory, RecurrentTarget
from dloop.testing import ScriptedDrafter, chain, gather, tiny_target, write_target
from dloop.types import Draft, Rows, Verdict

pytestmark = pytest.mark.skipif(not recurrent.is_offered(), reason="Qwen3.5 needs a newer transformers")

TOLERANCE = 1e-5
PROMPT = [5, 9, 11, 60, 2]
K, STAGES = 3, 3


@pytest.fixture(scope="module")
def target() -> RecurrentTarget:
    return tiny_target("qwen3_5", num_layers=4)


def tensors_of(cache: DynamicCache, kinds: list[str]) -> dict[str, Tensor]:
    """All that a cache remembers, by layer."""
    found = {}
    for index, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=True)):
        names = ("conv_states", "recurrent_states") if kind == LINEAR else ("keys", "values")
        parts = (getattr(layer, name) for name in names)
        found |= {f"{name} {index}": p[0] if kind == LINEAR else p for name, p in zip(names, parts, strict=True)}
    return found


@torch.no_grad()
def sequential(target: RecurrentTarget, text: list[int]) -> dict[str, Tensor]:
    """What the library remembers after the text, fed token by token after the prompt: as plain decoding does."""
    cache, backbone = DynamicCache(config=target.config), target.backbone
    for part in (text[: len(PROMPT)], *([token] for token in text[len(PROMPT) :])):
        backbone(input_ids=torch.tensor([part]), use_cache=True, **{cache_argument(backbone): cache})
    return tensors_of(cache, target.config.layer_types)


def check_states(memory: RecurrentMemory, text: list[int], slot: int = 0) -> None:
    found = tensors_of(memory.caches[slot], memory.target.config.layer_types)
    for name, expected in sequential(memory.target, text).items():
        assert found[name].shape == expected.shape, f"{name}: {found[name].shape} instead of {expected.shape}"
        worst = (found[name] - expected).abs().max().item()
        assert worst <= TOLERANCE, f"{name} differ by {worst:.2g}"


def rows(tokens: list[int], position: int, slot: int = 0) -> Rows:
    count = len(tokens)
    positions = list(range(position, position + count))
    return Rows(token=tokens, slot=[slot] * count, position=positions, parent=list(range(-1, count - 1)))


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


class Watched(RecurrentMemory):
    """Holds the law after every commit."""

    def prefill(self, slot: int, tokens: list[int]):
        self.text, self.checks = list(tokens), 0
        return super().prefill(slot, tokens)

    def verify(self, rows: Rows):
        self.asked = rows
        return super().verify(rows)

    def commit(self, slot: int, path: list[int]) -> None:
        super().commit(slot, path)
        self.text += [self.asked.token[node] for node in path]
        check_states(self, self.text, slot)
        self.checks += 1


def decode_forced(memory: Watched, judge: Forced) -> None:
    drafter = ScriptedDrafter(K, lambda text, index: chain([(text[-1] * 7 + i + index) % 97 for i in range(K)]))
    session = Session(memory, drafter)
    limits = Limits(max_new_tokens=70, max_stages=STAGES, context=memory.target.context)
    gather([decode(session, 0, PROMPT, gate=FixedGate(ALWAYS_OPEN), judge=judge, limits=limits)], session)


def test_states_equal_a_sequential_run_s_whatever_was_accepted(target):
    """0, 1, ..., S * k tokens of a round."""
    judge = Forced(counts=[0, 9, 4, 1, 6, 2, 8, 5, 3, 7])
    memory = Watched(target, (0, 1))
    decode_forced(memory, judge)
    whole = [draft for draft in judge.drafts if len(draft.drafted) == STAGES * K]
    assert len(whole) >= len(judge.counts), "each count met a draft of three stages"
    assert memory.checks == len(judge.drafts)


class KeepsEverything(Watched):
    """Planted: the states stay where the verification left them."""

    def _put_back(self, slot, state):
        pass


class KeepsOneMore(Watched):
    """Planted: the first rejected row is replayed too."""

    def commit(self, slot, path):
        if len(path) < len(self.asked):
            tail = self.tails[slot]
            shortened = recurrent.Reads(*(part[:, 1:] for part in tail.reads))
            self.tails[slot] = recurrent.Tail(tail.before, shortened)
        super().commit(slot, path)


class ForgetsTheWindow(Watched):
    """Planted: the convolution's last inputs are not put back."""

    def _put_back(self, slot, state):
        super()._put_back(slot, state._replace(window=self._state(slot).window))


@pytest.mark.parametrize("planted", [KeepsEverything, KeepsOneMore, ForgetsTheWindow])
def test_a_memory_that_is_not_rolled_back_is_caught(target, planted):
    with pytest.raises(AssertionError, match="states .* differ by"):
        decode_forced(planted(target, ()), Forced(counts=[2]))


def test_nothing_kept_and_prompts_shorter_than_the_window(target):
    memory = target.open()
    for prompt in ([7], [7, 8], list(range(1, 70))):
        memory.prefill(0, prompt)
        before = {name: t.clone() for name, t in tensors_of(memory.caches[0], target.config.layer_types).items()}
        memory.verify(rows([3, 4, 5], len(prompt)))
        memory.commit(0, [])
        after = tensors_of(memory.caches[0], target.config.layer_types)
        assert all(torch.equal(after[name], before[name]) for name in before)


def test_slots_keep_their_own_states(target):
    memory, prompts = target.open(), [PROMPT, list(reversed(PROMPT))]
    for slot, prompt in enumerate(prompts):
        memory.prefill(slot, prompt)
    both = [rows([30, 31, 32], 5, 0), rows([40, 41, 42, 43], 5, 1)]
    parents = [*both[0].parent, *(p + 3 if p >= 0 else -1 for p in both[1].parent)]
    memory.verify(
        Rows(
            token=both[0].token + both[1].token,
            slot=both[0].slot + both[1].slot,
            position=both[0].position + both[1].position,
            parent=parents,
        )
    )
    memory.commit(1, [0, 1])
    memory.commit(0, [0])
    check_states(memory, [*prompts[0], 30], 0)
    check_states(memory, [*prompts[1], 40, 41], 1)


def test_a_rejection_costs_no_forward_and_leaves_nothing_behind(target):
    memory, calls = target.open(), []
    handle = target.backbone.register_forward_hook(lambda *_: calls.append(1))
    memory.prefill(0, PROMPT)
    text = list(PROMPT)
    try:
        for count in (1, 3, 0, 2, 4):
            memory.verify(rows([8, 9, 10, 11], len(text)))
            held = [weakref.ref(t) for t in (*memory.tails[0].before, *memory.tails[0].reads)]
            assert memory.tails[0].reads.mixed.shape[:2] == (len(target.mixers), 4), "one verification's rows"
            memory.commit(0, list(range(count)))
            text += [8, 9, 10, 11][:count]
            gc.collect()
            assert not memory.tails
            assert not count or not any(ref() is not None for ref in held), "where nothing is kept, the copy is it"
    finally:
        handle.remove()
    assert len(calls) == 6
    assert not any(part._forward_hooks for mixer in target.mixers for part in mixer.modules())


def test_texts_are_transformers_own_with_any_drafter(target):
    plain = dloop.generate_autoregressive(target, PROMPT, 40).tokens
    model = target.model
    ids = model.generate(
        torch.tensor([PROMPT]), attention_mask=torch.ones(1, 5).long(), max_new_tokens=40, do_sample=False,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    assert plain == ids[0, len(PROMPT) :].tolist() and len(set(plain)) > 10


TREES = [{"tree_budget": 60}, {"stage_tree_budget": 8}]


@pytest.mark.parametrize("words", TREES, ids=lambda words: next(iter(words)))
def test_trees_are_refused_before_the_first_token_with_the_reason(target, words):
    calls = []
    handle = target.backbone.register_forward_hook(lambda *_: calls.append(1))
    try:
        with pytest.raises(UserError, match="recurrent layers, whose state follows one path.*use 0"):
            dloop.stream(target, None, PROMPT, 8, **words)
    finally:
        handle.remove()
    assert not calls


def test_the_memory_refuses_branches_too(target):
    memory = target.open()
    memory.prefill(0, PROMPT)
    with pytest.raises(ValueError, match="recurrent layers"):
        memory.verify(Rows(token=[1, 2, 3], slot=[0] * 3, position=[5, 6, 6], parent=[-1, 0, 0]))
    memory.verify(rows([1, 2, 3], 5))
    with pytest.raises(ValueError, match="recurrent layers"):
        memory.commit(0, [0, 2])


# Loading


def test_a_checkpoint_of_texts_alone_loads(target, tmp_path, caplog):
    folder = write_target(target, tmp_path)
    read = dloop.load_target(str(folder), dtype="float32")
    assert isinstance(read, RecurrentTarget) and not read.forks and read.engine == "twin"
    assert sum("without flash-linear-attention" in r.message for r in caplog.records) == 1, "said once"
    assert (
        dloop.generate_autoregressive(read, PROMPT, 12).tokens
        == dloop.generate_autoregressive(target, PROMPT, 12).tokens
    )
    with pytest.raises(UserError, match="the fast path has no recurrent layers"):
        dloop.load_target(str(folder), dtype="float32", engine="fast")


def test_where_flash_linear_attention_is_installed_nothing_is_said(monkeypatch, caplog):
    monkeypatch.setattr(recurrent.importlib.util, "find_spec", lambda name: object())
    recurrent.tell_path("some/model")
    assert not caplog.records


def test_an_older_transformers_is_refused_with_the_way_out(target, tmp_path, monkeypatch):
    folder = write_target(target, tmp_path)
    monkeypatch.setattr(release, "version", lambda name: "5.8.1")
    with pytest.raises(UserError, match=r"needs transformers >= 5.16, not 5.8.1: pip install"):
        dloop.load_target(str(folder))
    assert importlib.metadata.version("transformers") != "5.8.1"


def test_a_bfloat16_target_rolls_back_too(target, tmp_path):
    """States are rounded where the library rounds them: what is replayed is within rounding of a sequential run."""
    read = dloop.load_target(str(write_target(target, tmp_path)), dtype="bfloat16")
    memory = read.open()
    memory.prefill(0, PROMPT)
    memory.verify(rows([8, 9, 10, 11], 5))
    memory.commit(0, [0, 1])
    found = tensors_of(memory.caches[0], read.config.layer_types)
    for name, expected in sequential(read, [*PROMPT, 8, 9]).items():
        assert found[name].dtype == expected.dtype and found[name].shape == expected.shape
        assert torch.allclose(found[name].float(), expected.float(), rtol=0.05, atol=0.05), name


def test_the_command_decodes_it_and_refuses_a_tree(target, tmp_path, capsys):
    folder = write_target(target, tmp_path)
    words = ["generate", "--model", str(folder), "--baseline", "--prompt-ids", "5,9,11", "--dtype", "float32"]
    assert entry([*words, "--max-new-tokens", "4", "--device", "cpu"]) == 0
    capsys.readouterr()
    assert entry([*words, "--tree-budget", "60"]) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert "recurrent layers" in line
