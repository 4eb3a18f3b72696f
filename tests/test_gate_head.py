"""Heads for stop rules: examples are what decoding would draft, the loss falls, runs resume, rules read what was
trained; and the temperatures of DSpark's confidences.
"""

import json
import math
from importlib import import_module

import numpy as np
import pytest
import test_cli
import torch

import dloop
from dloop.cli import train_gate_head_run
from dloop.cli.main import PARTS, entry
from dloop.errors import UserError
from dloop.gate import FixedGate
from dloop.gates import record
from dloop.gates.costs import Costs
from dloop.gates.played import Ruled, play, walked
from dloop.gates.trace import save
from dloop.rules.choose import maker_of
from dloop.rules.heads import (
    HEADS,
    REJECTED_WEIGHT,
    UNDER_WEIGHT,
    Examples,
    HeadConfig,
    load_head,
    read_config,
    save_head,
)
from dloop.rules.replayed import pairs_of, replay_maker
from dloop.rules.sts import calibration_error, chance, fit, read_temperatures
from dloop.settings import Settings
from dloop.testing import good_drafter, taught_drafter, tiny_drafter, tiny_target, write_drafter, write_target
from dloop.train.batch import Sample
from dloop.train.gate_head import FitSettings, config_of, draft_from, starts_of
from dloop.train.gate_head import fit as fit_head
from dloop.types import Features, Sampling, StageRequest
from dloop.vocabulary import target_logits

K, LENGTH = 4, 40
PROMPT = [5, 9, 3, 11, 7]
GATE_HEAD = (
    "--target-model-path --draft-model --kind --train-data-path --chat-template --max-length --max-samples --stride "
    "--held-out --longest --output-dir --resume --no-resume --num-epochs --batch-size --learning-rate --seed --dtype "
    "--device --json --no-json --debug --no-debug"
)


def sample_of(target, prompt=PROMPT) -> Sample:
    answer = dloop.generate_autoregressive(target, prompt, LENGTH, stop_token_ids=[]).tokens
    tokens = np.array([*prompt, *answer])
    return Sample(tokens, np.arange(len(tokens)) >= len(prompt))


def drafter_of(target, family: str, texts):
    if family == "dspark":
        return good_drafter(target, texts, stage_len=K)
    return taught_drafter(target, texts, family=family, stage_len=K, steps=25)


@pytest.fixture(scope="module", params=["dspark", "dflash", "domino", "eagle3"])
def pair(request):
    target = tiny_target("qwen3", seed=5)
    sample = sample_of(target)
    return target, drafter_of(target, request.param, [sample.tokens.tolist()]), sample


def test_the_examples_are_what_decoding_drafts_and_how_far_it_is_accepted(pair):
    target, drafter, sample = pair
    starts = starts_of(sample, K, 1)
    assert starts[0] == len(PROMPT) - 1 and starts[-1] == len(sample.tokens) - 1 - K
    found = draft_from(target, drafter, sample, starts, HEADS["pacer"], seed=0)
    settings = Settings(max_new_tokens=LENGTH, max_stages=1, stop_token_ids=[], draft_depth=K, tree_budget=0)
    if drafter.family != "eagle3":
        settings = Settings(max_new_tokens=LENGTH, max_stages=1, stop_token_ids=[])
    recording = record.begin(target, drafter, PROMPT, settings)
    (text,) = recording.trace(list(recording.stream)).texts
    decoded = text.accepted[: len(starts) - 1]  # the trace's first start is the first token of the answer
    assert found.accepted[1:].tolist() == decoded.tolist()
    np.testing.assert_allclose(found.figures[1:, :, 0], text.logp[: len(decoded), 0], atol=1e-4)
    assert found.hidden.shape == (len(starts), K, drafter.config.hidden_size)


def test_soft_labels_are_the_chance_of_acceptance(pair):
    target, drafter, sample = pair
    starts = starts_of(sample, K, 3)
    found = draft_from(target, drafter, sample, starts, HEADS["specdec++"], seed=3)
    assert 0 <= found.soft.min() and found.soft.max() <= 1
    features = target.features(torch.tensor([sample.tokens.tolist()]), drafter.taps)
    memory, drawn = drafter.open(), []
    known = 0
    for place in starts:
        taps, last = features.taps[0, known:place], features.last[0, known:place]
        memory.extend(0, known, sample.tokens[known:place].tolist(), Features(taps=taps, last=last))
        known = place
        ask = StageRequest(
            slot=0, anchor=int(sample.tokens[place]), index=0, sampling=Sampling(temperature=1.0, seed=3)
        )
        drawn += memory.draft([ask])
    for index, (place, stage) in enumerate(zip(starts, drawn, strict=True)):
        p = target_logits(features.last[0, place], target.vocabulary).softmax(-1)[stage.tokens[0]].item()
        q = stage.probs[0, stage.tokens[0]].item()
        assert found.soft[index, 0].item() == pytest.approx(min(1.0, p / q), rel=1e-3)


def head_of(kind: str, family: str, *, reads_token: bool):
    return HEADS[kind](HeadConfig(kind=kind, family=family, hidden_size=8, longest=3, reads_token=reads_token))


def test_the_losses_are_the_published_ones():
    soft = torch.tensor([[0.9, 0.2, 0.5]])
    examples = Examples(torch.randn(1, 3, 8), torch.randn(1, 3, 3), soft, torch.tensor([1]))
    head = head_of("specdec++", "dspark", reads_token=False)
    p = head(examples.hidden)[0].sigmoid().tolist()
    known, weight = [(0.9, p[0]), (0.2, p[1])], REJECTED_WEIGHT  # the third comes after a rejection
    total = -sum(y * math.log(c) + weight * (1 - y) * math.log(1 - c) for y, c in known)
    assert head.loss(examples).item() == pytest.approx(total / sum(y + weight * (1 - y) for y, _ in known), rel=1e-4)
    shifted = head_of("specdec++", "eagle3", reads_token=True)
    p = shifted(examples.hidden)[0].sigmoid().tolist()
    known = [(0.9, p[1]), (0.2, p[2])]  # a row has read the token before
    total = -sum(y * math.log(c) + weight * (1 - y) * math.log(1 - c) for y, c in known)
    assert shifted.loss(examples).item() == pytest.approx(total / sum(y + weight * (1 - y) for y, _ in known), rel=1e-4)
    lengths = head_of("adaeagle", "eagle3", reads_token=True)
    said = lengths(examples.hidden[:, 0]).item()
    assert lengths.loss(examples).item() == pytest.approx((1 - said) * (UNDER_WEIGHT if said < 1 else -1), rel=1e-4)


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_learns_and_its_rule_reads_it(pair, kind, tmp_path):
    target, drafter, sample = pair
    examples = draft_from(target, drafter, sample, starts_of(sample, K, 1), HEADS[kind], seed=1)
    torch.manual_seed(0)
    head = HEADS[kind](config_of(kind, drafter))
    settings = FitSettings(num_epochs=25, batch_size=8, learning_rate=3e-3)
    passes = list(fit_head(head, torch.optim.AdamW(head.parameters()), examples, None, settings))
    assert passes[-1].loss < 0.8 * passes[0].loss
    save_head(head, tmp_path)
    rule = {"disco": "disco-ffn"}.get(kind, kind)
    options = {"stop_rule": rule, "gate_head": tmp_path, "stop_token_ids": [], "loop_gate": -9.0, "max_stages": 2}
    drafts = []
    for bias in (None, 8.0, -8.0):
        if bias is not None:  # what is drafted is the head's choice
            for name, value in head.state_dict().items():
                value.fill_(bias if name.endswith(("out.bias", "layers.2.bias")) else 0.0)
            save_head(head, tmp_path)
        out = dloop.generate(target, drafter, PROMPT, LENGTH, tree_budget=0, **options)
        assert out.tokens == sample.tokens[len(PROMPT) :].tolist()
        drafts.append(sum(len(r.drafted) for r in out.rounds) / len(out.rounds))
    assert drafts[1] > 1.5 * drafts[2]


# The command


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A tiny pair and texts as tokens."""
    home = tmp_path_factory.mktemp("head")
    target = tiny_target("qwen3", seed=5, vocab_size=test_cli.VOCAB)
    write_target(target, home / "target")
    test_cli.byte_tokenizer().save_pretrained(home / "target")
    samples = [sample_of(target, [*PROMPT, extra]) for extra in (1, 2, 3, 4)]
    flat = np.concatenate([sample.tokens for sample in samples])
    np.savez(home / "data.npz", flat=flat, lens=np.array([[len(PROMPT) + 1, LENGTH]] * 4))
    texts = [sample.tokens.tolist() for sample in samples]
    write_drafter(good_drafter(target, texts, stage_len=K), home / "drafter", "specforge")
    write_drafter(tiny_drafter(target, family="eagle3"), home / "eagle3", "specforge")
    return home


def words(home, output, kind="adaeagle", *more: str) -> list[str]:
    return [
        "train", "gate-head", "--target-model-path", str(home / "target"), "--draft-model", str(home / "drafter"),
        "--kind", kind, "--train-data-path", str(home / "data.npz"), "--output-dir", str(output), "--dtype", "float32",
        "--device", "cpu", "--num-epochs", "3", "--batch-size", "8", "--held-out", "0.25", *more,
    ]  # fmt: skip


def test_the_flags_are_these():
    module = import_module(PARTS["train"]["gate-head"].module)
    assert test_cli.build(module.Command, "dloop train gate-head").flags == tuple(GATE_HEAD.split())


def test_a_head_from_the_command_line_serves_generate(home, tmp_path, capsys):
    assert entry(words(home, tmp_path / "head", "adaeagle", "--json")) == 0
    made = json.loads(capsys.readouterr().out)
    assert len(made["passes"]) == 3 and all(each["held_out"] is not None for each in made["passes"])
    assert not (tmp_path / "head" / "parts").exists()
    assert read_config(tmp_path / "head").longest == K
    models = ["--model", str(home / "target"), "--draft-model", str(home / "drafter"), "--dtype", "float32"]
    command = ["generate", *models, "--prompt-ids", "5,9,3,11,7,1", "--max-new-tokens", "12", "--json"]
    rule = ["--engine", "twin", "--stop-rule", "adaeagle", "--gate-head", str(tmp_path / "head")]
    assert entry([*command, *rule]) == 0
    found = json.loads(capsys.readouterr().out)
    assert entry([*command, "--loop-gate", "1"]) == 0
    assert found["tokens"] == json.loads(capsys.readouterr().out)["tokens"]
    assert found["setting"]["stop_rule"] == "adaeagle" and found["setting"]["gate_head"] == str(tmp_path / "head")
    assert entry([*command, "--stop-rule", "svip", "--engine", "fast"]) == 2
    assert "--engine twin" in capsys.readouterr().err


def test_a_stopped_run_goes_on_to_the_same_head(home, tmp_path, monkeypatch, capsys):
    assert entry(words(home, tmp_path / "whole")) == 0
    keep, save = train_gate_head_run.keep, train_gate_head_run.save_head
    kept, saved = [], []

    def interrupted_keep(*arguments):
        keep(*arguments)
        kept.append(1)
        if len(kept) == 2:
            raise KeyboardInterrupt

    def interrupted_save(*arguments):
        saved.append(1)
        if len(saved) == 2:
            raise KeyboardInterrupt
        save(*arguments)

    output = tmp_path / "stopped"
    monkeypatch.setattr(train_gate_head_run, "keep", interrupted_keep)
    assert entry(words(home, output)) == 130
    monkeypatch.setattr(train_gate_head_run, "keep", keep)
    monkeypatch.setattr(train_gate_head_run, "save_head", interrupted_save)
    assert entry(words(home, output, "adaeagle", "--resume")) == 130
    monkeypatch.setattr(train_gate_head_run, "save_head", save)
    capsys.readouterr()
    assert entry(words(home, output, "adaeagle", "--resume")) == 0
    assert "pass 1/3" not in capsys.readouterr().err
    one, other = (load_head(folder, torch.device("cpu")).state_dict() for folder in (tmp_path / "whole", output))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert entry(words(home, output, "adaeagle", "--resume")) == 0  # done: nothing is drafted again
    assert not (output / "parts").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--stride", "0"], "--stride 0 must be at least 1"),
        (["--held-out", "1"], "--held-out 1.0 must be at least 0 and below 1"),
        (["--learning-rate", "nan"], "--learning-rate nan must be above 0"),
        (["--longest", "3"], "a stage of dspark is its block"),
        (["--train-data-path", "/nowhere.npz"], "/nowhere.npz does not exist"),
    ],
)
def test_what_the_command_refuses(home, tmp_path, capsys, more, message):
    assert entry(words(home, tmp_path / "head", "disco", *more)) == 2
    assert message in capsys.readouterr().err


def test_specdecpp_needs_a_row_after_the_token(home, tmp_path, capsys):
    more = ("--draft-model", str(home / "eagle3"), "--longest", "1")
    assert entry(words(home, tmp_path / "head", "specdec++", *more)) == 2
    assert "give --longest 2 or more" in capsys.readouterr().err


def test_another_run_s_folder_is_refused(home, tmp_path, capsys):
    assert entry(words(home, tmp_path, "disco")) == 0
    assert entry(words(home, tmp_path, "disco")) == 2
    assert "is not empty" in capsys.readouterr().err
    assert entry(words(home, tmp_path, "disco", "--resume", "--seed", "7")) == 2
    assert "with other settings" in capsys.readouterr().err


# Temperatures


def test_the_temperature_that_made_the_confidences_is_found_again():
    random = np.random.default_rng(0)
    true = random.normal(1.0, 1.5, (20000, 3))
    accepted = (random.random(true.shape) < chance(true)).cumprod(1).astype(bool)
    told = true * np.array([3.0, 0.5, 1.0])  # over-confident, shy, right
    found = fit(told, accepted)
    assert found.temperatures == pytest.approx([3.0, 0.5, 1.0], rel=0.35)
    assert found.after < 0.02 < 0.05 < found.before


def test_calibration_error_is_the_mean_distance_over_bins():
    said, happened = np.array([0.11, 0.12, 0.9, 1.0]), np.array([True, False, True, True])
    expected = (abs(0.23 - 1) + abs(0.9 - 1) + 0) / 4
    assert calibration_error(said, happened) == pytest.approx(expected)


@pytest.fixture(scope="module")
def traced():
    target = tiny_target("qwen3", seed=5)
    sample = sample_of(target)
    drafter = good_drafter(target, [sample.tokens.tolist()], stage_len=K)
    settings = Settings(max_new_tokens=LENGTH, max_stages=2, stop_token_ids=[])
    recording = record.begin(target, drafter, PROMPT, settings)
    return target, drafter, recording.trace(list(recording.stream))


def test_sts_from_a_trace_to_the_rule(traced, tmp_path, capsys):
    target, drafter, trace = traced
    save(tmp_path / "trace.npz", trace)
    command = ["trace", "sts", "--trace", str(tmp_path / "trace.npz"), "--output", str(tmp_path / "sts.json")]
    assert entry([*command, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["ece_after"] <= made["ece_before"] and len(made["temperatures"]) == K
    assert read_temperatures(tmp_path / "sts.json") == made["temperatures"]
    logits, accepted = pairs_of(trace, "here")
    assert logits.shape == accepted.shape == (int((trace.texts[0].stages > 0).sum()), K)
    spec = f"dspark:threshold=0.4,sts={tmp_path / 'sts.json'}"
    assert maker_of(spec, None, drafter)().temperatures == made["temperatures"]
    out = dloop.generate(target, drafter, PROMPT, LENGTH, stop_rule=spec, stop_token_ids=[])
    assert out.tokens == trace.texts[0].answer.tolist()
    assert entry(command) == 2
    assert "exists" in capsys.readouterr().err
    (tmp_path / "short.json").write_text('{"temperatures": [1.0]}')
    with pytest.raises(UserError, match="is not for stages of 4"):
        maker_of(f"dspark:threshold=0.4,sts={tmp_path / 'short.json'}", None, drafter)


# Replay


RULES = ["bild:fallback=0.8", "svip", "adaedl", "llmcad:start=0.5", "disco", "ddd:checks=2,floor=-0.2",
         "specdec++:least=1", "dspark:threshold=0.5"]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("gate", [1.0, -1.0])
def test_a_replayed_rule_has_the_real_rounds(traced, rule, gate):

    target, drafter, trace = traced
    (text,) = trace.texts
    real = dloop.generate(
        target, drafter, PROMPT, LENGTH, stop_rule=rule, loop_gate=gate, max_stages=2, stop_token_ids=[]
    ).rounds
    ruled = Ruled(replay_maker(rule, trace)(), trace.features)
    costs = Costs(first_ms=1.0, later_ms=0.8, rows=(1, 8, 64), verify_ms=(3.0, 3.3, 4.0), loop_ms=0.02, extend_ms=0.2)
    played = play(text, trace.ground, FixedGate(gate), costs, ruled=ruled)
    assert [(r.drafted, r.accepted, r.emitted) for r in played] == [(r.drafted, r.accepted, r.emitted) for r in real]
    ends = [r.stage_records[-1].reason for r in real]
    assert ends == [r.stage_records[-1].reason for r in played]
    total = sum(r.draft_s + r.verify_s for r in played) * 1000
    walk = walked(played, len(PROMPT), K)
    assert walk.ms(costs) == pytest.approx(total)
    if "rule" in ends:
        assert walk.ms(costs) < walked(played, len(PROMPT), K).__class__(**{**vars(walk), "rows": None}).ms(costs)


def test_the_replay_command_takes_rules(traced, tmp_path, capsys):
    save(tmp_path / "trace.npz", traced[2])
    command = ["replay", "--trace", str(tmp_path / "trace.npz"), "--json", "--stage-ms", "1,1", "--verify-ms", "5,0.1"]
    assert entry([*command, "--stop-rule", "svip", "--stop-rule", "dspark:threshold=0.5"]) == 0
    rows = {row["gate"]: row for row in json.loads(capsys.readouterr().out)["gates"]}
    assert {"svip", "dspark:threshold=0.5"} <= rows.keys() and rows["svip"]["tokens_per_s"] > 0
    assert rows["svip"]["stages_per_round"] == pytest.approx(1, abs=0.1)
    assert entry([*command, "--stop-rule", "pacer"]) == 2
    assert "traces hold no states" in capsys.readouterr().err
