"""Block drafters that name a part of the target's tokens: the whole drafter where no other token had a chance."""

import json
from dataclasses import replace
from itertools import product
from typing import cast

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import dloop
from dloop.api import generate
from dloop.cli.main import entry
from dloop.detect import BLOCK_FAMILIES
from dloop.diagnosis.diagnose import diagnose
from dloop.diagnosis.intake import take_in
from dloop.diagnosis.measure import Text
from dloop.diagnosis.tokens import TokenReport
from dloop.drafters.block import BlockDrafter
from dloop.drafters.config import BlockConfig
from dloop.drafters.draft_vocab import maps_of, most_frequent
from dloop.drafters.families import build, loaded
from dloop.errors import UserError
from dloop.fast.drafter import FastBlockDrafter
from dloop.fast.target import FastTarget
from dloop.gate import ALWAYS_OPEN
from dloop.records import acceptance_length
from dloop.sampling import law
from dloop.testing import teach, tiny_drafter, tiny_target, write_drafter, write_target
from dloop.train.acceptance import measure
from dloop.train.batch import TokenFile, TrainBatch
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.packed import PackedStages
from dloop.trees.shape import TreeShape
from dloop.types import Features, Sampling, StageRequest
from dloop.vocabulary import numbered, spread, told

VOCAB = 96
KEPT = torch.tensor([token for token in range(VOCAB) if token % 3 != 1])
SIZED = ("markov_head.markov_w2.weight", "embed_proj.2.weight")  # heads' matrices of a row a word
PROMPT = [5, 9, 11, 60, 2, 2, 7]


def narrowed(whole: BlockDrafter, target, kept: torch.Tensor = KEPT) -> BlockDrafter:
    """The same weights, over these words alone."""
    config = replace(whole.config, draft_vocab_size=len(kept))
    model = build(config).to(target.dtype).to(target.device).eval().requires_grad_(False)
    weights = {name: value.cpu() for name, value in whole.model.state_dict().items()}
    weights |= {name: weights[name][kept] for name in SIZED if name in weights}
    model.load_state_dict(weights | maps_of(kept, config.vocab_size))
    return cast(BlockDrafter, loaded("narrow", model, target.vocabulary))


@pytest.fixture(scope="module")
def target():
    return tiny_target("qwen2", num_layers=3, vocab_size=VOCAB)


def tiny(target, name: str, stage_len: int = 4) -> BlockDrafter:
    """A whole drafter whose head is a copy of its target's."""
    family, _, kind = name.partition(" ")
    drafter = tiny_drafter(
        target, family=family, head=None if kind == "none" else kind or "vanilla", stage_len=stage_len
    )
    return replace(drafter, vocabulary=replace(target.vocabulary, head=target.vocabulary.head.clone()))


@pytest.fixture(scope="module", params=[*BLOCK_FAMILIES, "dspark rnn", "dspark none"])
def both(request, target):
    """(the whole drafter, the narrow one)."""
    whole = tiny(target, request.param)
    return whole, narrowed(whole, target)


@pytest.fixture
def silent(both, monkeypatch):
    """While it is called, the whole head gives the other tokens no chance."""
    linear, whole = F.linear, both[0].vocabulary.head
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, KEPT, False)

    def without(x, weight, bias=None):
        found = linear(x, weight, bias)
        return found.masked_fill(others, -torch.inf) if weight is whole else found

    return lambda: monkeypatch.setattr(F, "linear", without)


def drafted(drafter, target, *, sampling: Sampling | None = None, fast: bool = False):
    """Two stages after a prompt, and one of a second text in the same forward."""
    memory = FastBlockDrafter.of(drafter).with_trees(drafter.trees).open(2, 64) if fast else drafter.open()
    features = target.open(drafter.taps).prefill(0, PROMPT).features
    for slot in (0, 1):
        memory.extend(slot, 0, PROMPT, features)
    first = memory.draft([StageRequest(slot=slot, anchor=3, index=0, sampling=sampling) for slot in (0, 1)])
    return [*first, *memory.draft([StageRequest(slot=0, anchor=first[0].tokens[-1], index=1, sampling=sampling)])]


def assert_alike(found, expected) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.parents, one.spine) == (other.tokens, other.parents, other.spine)
        assert one.logp == pytest.approx(other.logp, abs=1e-4) and one.score == pytest.approx(other.score, abs=1e-4)
        assert (one.probs is None) == (other.probs is None)
        if one.probs is not None:
            torch.testing.assert_close(one.probs, other.probs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("trees", [None, TreeShape(budget=9, stage_budget=9, topk=4, candidates=8, width=3)])
def test_a_narrow_stage_is_the_whole_one_without_the_other_tokens(target, both, silent, trees):
    whole, narrow = (each.with_trees(trees) for each in both)
    found = drafted(narrow, target)
    assert {token for stage in found for token in stage.tokens} <= set(KEPT.tolist())
    assert max(token for stage in found for token in stage.tokens) >= len(KEPT), "ids that no word's number is"
    silent()
    assert_alike(found, drafted(whole, target))


@pytest.mark.parametrize("trees", [None, TreeShape(budget=9, stage_budget=9, topk=4, candidates=8, width=3)])
def test_the_fast_path_drafts_what_the_twin_does(target, both, trees):
    narrow = both[1].with_trees(trees)
    assert_alike(drafted(narrow, target, fast=True), drafted(narrow, target))


@pytest.mark.parametrize("more", [{}, {"top_k": 5}, {"top_p": 0.7}])
def test_laws_are_told_over_the_target_s_vocabulary(target, both, more):
    """The noise is of the draft vocabulary, so tokens differ; given the tokens, the laws are the whole drafter's."""
    whole, narrow = both
    sampling = Sampling(temperature=0.9, seed=4, **more)
    stage, fast = (drafted(narrow, target, sampling=sampling, fast=fast)[0] for fast in (False, True))
    assert_alike([fast], [stage])
    assert stage.probs.shape == (4, VOCAB)
    assert (stage.probs.gather(1, torch.tensor(stage.tokens)[:, None]) > 0).all()
    memory = whole.open()
    memory.extend(0, 0, PROMPT, target.open(whole.taps).prefill(0, PROMPT).features)
    memory.draft([StageRequest(slot=0, anchor=3, index=0)])
    logits = whole.laws(memory.slots[0].hidden[0], torch.tensor(3), stage.tokens).logits
    others = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, KEPT, False)
    expected = law(logits.masked_fill(others, -torch.inf), sampling)
    torch.testing.assert_close(stage.probs, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["dspark", "dspark rnn", "dflash"])
def test_the_kernels_are_their_plain_twins(name):
    pytest.importorskip("triton")
    small = tiny_target(vocab_size=VOCAB)
    twin = narrowed(tiny(small, name), small)
    slow, fast = twin.open(), FastBlockDrafter.of(twin).open(slots=2, context=32)
    fast.memory.kernels = True
    taps = torch.randn(9, 64, generator=torch.Generator().manual_seed(0))
    for slot, session in product((0, 1), (slow, fast)):
        session.extend(slot, 0, [1] * 9, Features(taps=taps, last=taps[:, :32]))
    requests = [StageRequest(slot=slot, anchor=5 + slot, index=0) for slot in (0, 1)]
    assert_alike(fast.draft(requests), slow.draft(requests))


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_texts_are_the_target_s(target, family):
    plain = [generate(target, None, prompt, max_new_tokens=24).tokens for prompt in (PROMPT, [3, 3, 8])]
    drafter = narrowed(tiny(target, family, 3), target)
    teach(drafter, target, [p + t for p, t in zip((PROMPT, [3, 3, 8]), plain, strict=True)], 40)
    static, engines = FastTarget.of(target), {"twin": drafter, "fast": FastBlockDrafter.of(drafter)}
    for (name, each), (prompt, text) in product(engines.items(), zip((PROMPT, [3, 3, 8]), plain, strict=True)):
        host = static if name == "fast" else target
        out = generate(host, each, prompt, max_new_tokens=24, loop_gate=ALWAYS_OPEN, max_stages=2)
        assert out.tokens == text
        options = dict(max_new_tokens=12, temperature=0.8, seed=1, verify="match")
        assert generate(host, each, prompt, **options).tokens == generate(target, None, prompt, **options).tokens
        rejected = generate(host, each, prompt, **options | {"verify": "reject"})
        assert len(rejected.tokens) == 12


def test_numbers_and_ids_are_each_other_s_inverse():
    numbers, known = numbered(torch.arange(VOCAB), KEPT)
    assert torch.equal(known.nonzero()[:, 0], KEPT) and torch.equal(told(numbers[known], KEPT), KEPT)
    laws = torch.rand(2, 3, len(KEPT))
    assert torch.equal(spread(laws, KEPT, VOCAB)[..., KEPT], laws)
    assert spread(laws, KEPT, VOCAB).count_nonzero() == laws.count_nonzero()


def stage_loss(objective, hidden, index: int, batch: TrainBatch, anchors, teacher) -> tuple[dict[str, float], float]:
    """(summed terms, summed weights) of one stage, row by row, from the definition."""
    model, k, gamma = objective.model, objective.model.config.stage_len, objective.settings.loss_decay_gamma
    tokens, width, terms, weight = batch.tokens[0], batch.tokens.shape[1], dict.fromkeys(("ce", "l1", "bce"), 0.0), 0.0
    for number, (anchor, is_kept) in enumerate(
        zip(anchors.positions[0].tolist(), anchors.keep[0].tolist(), strict=True)
    ):
        start = anchor + index * k
        previous = tokens[(start + torch.arange(k)).clamp(max=width - 1)]
        logits, beside = model.teacher_forced(hidden[number], previous, objective.vocabulary)
        for row in range(k if is_kept else 0):
            at = start + row + 1
            known = at < width and bool(batch.loss_mask[0, at]) and int(tokens[at]) in KEPT.tolist()
            if not known and objective.prefix:
                break
            if not known:
                continue
            share = float(np.exp(-row / gamma))
            law_ = logits[row].float().softmax(-1)
            given = teacher[at - 1, KEPT] / teacher[at - 1, KEPT].sum()
            l1 = float((law_ - given).abs().sum())
            terms["ce"] -= share * float(law_[KEPT.tolist().index(int(tokens[at]))].log())
            terms["l1"] += share * l1
            if model.tells_confidence:
                sure = torch.tensor(max(0.0, 1 - l1 / 2))
                terms["bce"] += share * float(F.binary_cross_entropy_with_logits(beside[row].float(), sure))
            weight += share
    return terms, weight


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_training_counts_the_labels_that_can_be_named(target, family):
    drafter = narrowed(tiny(target, family), target)
    tokens = torch.randint(3, VOCAB, (1, 30), generator=torch.Generator().manual_seed(1))
    batch = TrainBatch(tokens, torch.arange(30)[None] > 2, torch.tensor([30]), torch.zeros(1, dtype=torch.int64))
    objective = objective_of(drafter.model, target.vocabulary, ObjectiveSettings(num_anchors=12, loss_decay_gamma=3.0))
    features = target.features(tokens, drafter.taps, last=True)
    anchors = objective.draw(batch)
    found = objective(batch, features, 2, anchors)
    stages = PackedStages.begin(drafter.model, objective.vocabulary, tokens, features.taps, anchors)
    teacher = (features.last[0] @ target.vocabulary.head.T).softmax(-1)
    hidden = [stages.forward()[0] for _ in range(3)]
    sides = [stage_loss(objective, hidden[index], index, batch, anchors, teacher) for index in (0, 2)]
    mixed = []
    for (terms, weight), sums in zip(sides, (found.host, found.loop), strict=True):
        names = ("ce", "l1", "bce") if family == "dspark" else ("ce",)
        shares = (0.1, 0.9, 1.0) if family == "dspark" else (1.0,)
        assert float(sums.weight) == pytest.approx(weight, rel=1e-5) and 0 < weight
        for name, term in zip(names, sums.terms.tolist(), strict=False):
            assert term == pytest.approx(terms[name], rel=1e-4), name
        mixed.append((sum(share * terms[name] for share, name in zip(shares, names, strict=True)), weight))
    (host, host_weight), (loop, loop_weight) = mixed
    share = objective.settings.dloop_loss_weight
    expected = (1 - share) * host / host_weight + share * loop / loop_weight
    if family == "dflash":
        expected = (host + loop) / (host_weight + loop_weight)
    assert float(found.total) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
@pytest.mark.parametrize("layout", ["specforge", "dflash"])
def test_a_checkpoint_keeps_its_vocabulary(target, tmp_path, family, layout):
    drafter = narrowed(tiny(target, family), target)
    write_drafter(drafter, tmp_path / "narrow", layout)
    raw = json.loads((tmp_path / "narrow" / "config.json").read_text())
    assert raw["draft_vocab_size"] == len(KEPT)
    again = dloop.load_drafter(str(tmp_path / "narrow"), target)
    assert again.config == drafter.config and torch.equal(again.model.kept, KEPT)
    assert torch.equal(again.vocabulary.head, target.vocabulary.head[KEPT])
    assert again.vocabulary.embedding is target.vocabulary.embedding
    assert_alike(drafted(again, target), drafted(drafter, target))
    whole = tiny_drafter(target, family=family)
    write_drafter(whole, tmp_path / "whole", layout)
    assert "draft_vocab_size" not in json.loads((tmp_path / "whole" / "config.json").read_text())


def test_the_flat_layout_has_no_place_for_it(target, tmp_path):
    drafter = narrowed(tiny(target, "dspark"), target)
    with pytest.raises(UserError, match="deepspec layout has no draft vocabulary, this drafter's is of 64 tokens"):
        write_drafter(drafter, tmp_path / "narrow", "deepspec")


@pytest.mark.parametrize(
    ("size", "told_as"),
    [
        (0, "draft_vocab_size=0 must be a whole number from 1 to 96"),
        (97, "draft_vocab_size=97 must be a whole number from 1 to 96"),
        (True, "draft_vocab_size=True must be a whole number"),
        (63, r"d2t is \[64\] of torch.int64, expected whole numbers \[63\]"),
    ],
)
def test_sizes_that_cannot_be_are_refused(target, tmp_path, size, told_as):
    drafter = narrowed(tiny(target, "dflash"), target)
    path = write_drafter(drafter, tmp_path, "specforge") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"draft_vocab_size": size}))
    with pytest.raises(UserError, match=told_as):
        dloop.load_drafter(str(tmp_path), target)


def test_a_config_is_shown_as_before(target):
    """Runs are told apart by it: those of earlier versions must go on."""
    assert "draft_vocab_size" not in repr(tiny_drafter(target).config)
    assert isinstance(tiny_drafter(target).config, BlockConfig)


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_a_new_drafter_learns_the_words_of_its_data(target, tmp_path, capsys, family):
    """From the config to a checkpoint that loads, measured on the way; a run that was stopped goes on as it was."""
    write_target(target, tmp_path / "target")
    write_drafter(tiny_drafter(target, family=family), tmp_path / "drafter", "specforge")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    (tmp_path / "new.json").write_text(json.dumps(config | {"draft_vocab_size": 40}))
    flat = np.random.default_rng(0).integers(3, VOCAB - 1, 240).astype(np.uint16)
    np.savez(tmp_path / "tokens.npz", flat=flat, lens=np.array([[5, 25]] * 8))
    words = [
        "train", "--target-model-path", str(tmp_path / "target"), "--train-data-path", str(tmp_path / "tokens.npz"),
        "--batch-size", "2", "--log-interval", "1", "--dtype", "float32", "--device", "cpu", "--num-anchors", "8",
        "--max-steps", "4", "--eval-data-path", str(tmp_path / "tokens.npz"), "--eval-samples", "2",
        "--eval-max-new-tokens", "8",
    ]  # fmt: skip
    new = [*words, "--draft-config-path", str(tmp_path / "new.json")]
    for name, more in (("whole", []), ("halves", ["--save-interval", "2"]), ("halves", ["--resume"])):
        assert entry([*new, *more, "--output-dir", str(tmp_path / name)]) == 0, capsys.readouterr().err
        if more[:1] == ["--save-interval"]:
            (tmp_path / "halves" / "epoch_1_step_4").rename(tmp_path / "later")
    one, two = (tmp_path / name / "epoch_1_step_4" / "model.safetensors" for name in ("whole", "halves"))
    assert one.read_bytes() == two.read_bytes()
    drafter = dloop.load_drafter(str(one.parent), target)
    data = TokenFile.read(tmp_path / "tokens.npz", 64)
    samples = [data.sample(index) for index in range(len(data))]
    written = torch.from_numpy(np.concatenate([each.tokens[each.labels] for each in samples]))
    assert torch.equal(drafter.model.kept, most_frequent(written, 40, VOCAB))
    on = [*words, "--draft-init-path", str(one.parent), "--output-dir", str(tmp_path / "on")]
    assert entry(on) == 0, capsys.readouterr().err
    assert torch.equal(dloop.load_drafter(capsys.readouterr().out.split()[-1], target).model.kept, drafter.model.kept)


@pytest.mark.parametrize("family", BLOCK_FAMILIES)
def test_what_measures_a_drafter_reads_its_words(target, tmp_path, family):
    """Replay is what decoding accepts, alarms see no shift, rules see its rows, the doctor finds it healthy."""
    prompts = [[5, 9, 11, 60, 8, 7], [3, 3, 8, 8, 2, 4]]
    texts = [(prompt, generate(target, None, prompt, max_new_tokens=40).tokens) for prompt in prompts]
    drafter = narrowed(tiny(target, family, 3), target)
    teach(drafter, target, [prompt + answer for prompt, answer in texts], 60)
    found = measure(drafter.model, target, texts, -0.5)
    outs = [generate(target, drafter, p, max_new_tokens=40, loop_gate=-0.5, max_stages=4) for p, _ in texts]
    tau = acceptance_length([each for out in outs for each in out.rounds])
    assert found["tau"] == pytest.approx(tau) and tau > 1
    ruled = generate(target, drafter, prompts[0], max_new_tokens=40, stop_rule="svip")
    assert ruled.tokens == texts[0][1]
    write_drafter(drafter, tmp_path, "specforge")
    told = [Text(prompt, answer) for prompt, answer in texts]
    diagnosis = diagnose(target, take_in("it", tmp_path, target), TokenReport([], None, usable=True), told)
    assert not [each for each in diagnosis.findings if each.severity != "note"], diagnosis.findings


@pytest.mark.gpu
def test_narrow_stages_are_drafted_inside_the_graph():
    target = dloop.load_target("smollm2", dtype="bfloat16", device="cuda", engine="fast")
    ids = torch.arange(target.vocab_size)
    twin = narrowed(cast(BlockDrafter, dloop.load_drafter("demo", target)), target, ids[ids % 3 != 1])
    fast, prompt = FastBlockDrafter.of(twin), list(range(5, 29))
    plain = dloop.generate(target, None, prompt, 64, stop_token_ids=()).tokens
    for budget in (0, 24):
        words = {"loop_gate": -0.5, "max_stages": 2, "stop_token_ids": (), "tree_budget": budget}
        one, other = (dloop.generate(target, each, prompt, 64, **words) for each in (twin, fast))
        assert one.tokens == other.tokens == plain
        alike = [a.draft.tokens == b.draft.tokens for a, b in zip(one.rounds, other.rounds, strict=False)]
        assert sum(alike) > 0.8 * len(alike), "bfloat16 turns near-ties, not most drafts"


@pytest.mark.parametrize("rule", ["svip", "bild"])
def test_a_rule_reads_rows_over_a_single_word(target, rule):
    """There is no second word: its margin is without end."""
    drafter = narrowed(tiny(target, "dflash"), target, torch.tensor([5]))
    text = generate(target, None, PROMPT, max_new_tokens=6).tokens
    assert generate(target, drafter, PROMPT, max_new_tokens=6, stop_rule=rule).tokens == text
