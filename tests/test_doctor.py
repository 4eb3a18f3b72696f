"""`dloop doctor`: each of many planted faults is named first, and a right pair is found healthy."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import test_cli
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dloop
from dloop.chat import load_tokenizer
from dloop.cli import doctor, doctor_run
from dloop.cli.main import entry
from dloop.diagnosis.compare import interval_of
from dloop.diagnosis.diagnose import best_of, diagnose, try_all
from dloop.diagnosis.expected import PUBLISHED, Released, expected_of, judge_acceptance
from dloop.diagnosis.findings import Diagnosis, Expected, Finding, Measured
from dloop.diagnosis.intake import take_in
from dloop.diagnosis.measure import Text, accepted_of, marks_of, measured, read_texts, stages_of, trace_of
from dloop.diagnosis.probes import tap_probes
from dloop.diagnosis.setup import Setup, Tap
from dloop.diagnosis.tensors import check_tensors
from dloop.diagnosis.tokens import TokenReport, check_tokens
from dloop.drafters.block import BlockDrafter
from dloop.errors import UserError
from dloop.gate import NEVER_OPENS
from dloop.load import load_drafter, load_target
from dloop.sampling import Draw
from dloop.targets.hf import HFTarget
from dloop.testing import good_drafter, teach, tiny_drafter, tiny_target, write_drafter
from dloop.train.replay import walk
from dloop.types import Sampling

STEPS = {"dspark": 60, "dflash": 70, "domino": 70}  # right on most of the texts, not on all
TEMPLATE = test_cli.TEMPLATE.replace("<assistant>", "{% if add_generation_prompt %}<assistant>{% endif %}")
FAMILIES = tuple(STEPS)
QUIET = TokenReport([], None, usable=True)
tiny = test_cli.tiny  # a fixture


@dataclass(frozen=True)
class World:
    """A target, its greedy texts, and drafters taught on them, as files."""

    target: HFTarget
    texts: list[Text]
    home: Path

    def teach(self, family: str, change: Callable[[BlockDrafter], None] = lambda drafter: None) -> BlockDrafter:
        """A drafter of this family, changed before it was taught."""
        drafter = tiny_drafter(self.target, family=family)
        change(drafter)
        teach(drafter, self.target, [text.prompt + text.answer for text in self.texts], STEPS[family])
        return drafter

    def folder(self, family: str, tmp_path: Path) -> Path:
        """A copy of its files, to be spoilt."""
        return Path(shutil.copytree(self.home / family, tmp_path / family))

    def examine(self, folder: Path) -> Diagnosis:
        return diagnose(self.target, take_in("it", folder, self.target), QUIET, self.texts)


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    torch.set_num_threads(1)
    target, home = tiny_target(), tmp_path_factory.mktemp("world")
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, 90, (6,), generator=generator).tolist() for _ in range(4)]
    texts = [Text(p, dloop.generate_autoregressive(target, p, max_new_tokens=40).tokens) for p in prompts]
    made = World(target, texts, home)
    for family, layout in (("dspark", "deepspec"), ("dflash", "specforge"), ("domino", "specforge")):
        write_drafter(made.teach(family), home / family, layout)
    return made


def edit_config(folder: Path, **changes: object) -> None:
    """Set keys wherever the file keeps them."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        level = config["dflash_config"] if key in config.get("dflash_config", {}) else config
        level[key] = value
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, path, metadata={"format": "pt"})


def first_of(diagnosis: Diagnosis) -> Finding:
    assert not diagnosis.is_healthy
    return diagnosis.findings[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_right_pair_is_healthy(world, family):
    diagnosis = world.examine(world.home / family)
    assert diagnosis.is_healthy and diagnosis.findings == []
    assert diagnosis.measured.every_position > 2 and len(diagnosis.probes) > 15
    assert not any(probe.is_better for probe in diagnosis.probes)


# faults of config.json


def rope(folder: Path) -> None:
    """A base that matters on texts of 46 tokens."""
    edit_config(folder, rope_theta=100.0, rope_parameters={"rope_type": "default", "rope_theta": 100.0})


CONFIG_FAULTS = {
    "taps": (lambda folder: edit_config(folder, target_layer_ids=[-1, 1]), "taps +1: [0, 2]"),
    "tap_order": (lambda folder: edit_config(folder, target_layer_ids=[2, 0]), "taps in reverse: [0, 2]"),
    "rope_theta": (rope, "RoPE base 10000"),
    "mask_token_id": (lambda folder: edit_config(folder, mask_token_id=95), "mask token 96"),
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cause", CONFIG_FAULTS)
def test_a_wrong_config_is_named_first(world, tmp_path, family, cause):
    spoil, change = CONFIG_FAULTS[cause]
    folder = world.folder(family, tmp_path)
    spoil(folder)
    found = first_of(world.examine(folder))
    assert (found.cause, found.severity) == (cause, "fault") and found.what.endswith(change)
    assert "config.json" in found.remedy


# faults of the weights


def slabs_reversed(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.cat(tensors["fc.weight"].chunk(2, 1)[::-1], 1)


def layers_swapped(tensors: dict[str, torch.Tensor]) -> None:
    for name in [name for name in tensors if name.startswith("layers.0.")]:
        other = name.replace("layers.0.", "layers.1.")
        tensors[name], tensors[other] = tensors[other], tensors[name]


def gain_too_large(tensors: dict[str, torch.Tensor]) -> None:
    tensors["hidden_norm.weight"] *= 8


def another_embedding(tensors: dict[str, torch.Tensor]) -> None:
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].roll(1, 0)


def another_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)


@pytest.mark.parametrize(
    ("spoil", "cause", "change"),
    [
        (slabs_reversed, "tap_order", "taps in reverse: [2, 0]"),
        (layers_swapped, "layer_order", "layers in the order [1, 0]"),
        (gain_too_large, "norm", "hidden_norm with its gain scaled to 1"),
        (another_embedding, "vocabulary", "the target's embedding"),
        (another_head, "vocabulary", "the target's head"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_wrong_weights_are_named_first(world, tmp_path, spoil, cause, change):
    folder = world.folder("dspark", tmp_path)
    edit_tensors(folder, spoil)
    found = first_of(world.examine(folder))
    assert found.cause == cause and found.what.endswith(change)


def test_missing_and_renamed_weights_are_named_first(world, tmp_path):
    folder = world.folder("dspark", tmp_path)
    edit_tensors(folder, lambda tensors: tensors.update(other=tensors.pop("layers.1.mlp.up_proj.weight")))
    diagnosis = world.examine(folder)
    assert diagnosis.measured is None and [found.cause for found in diagnosis.findings] == ["weights", "weights"]
    assert "is missing tensors: layers.1.mlp.up_proj.weight" in diagnosis.findings[0].what
    assert "has unexpected tensors: other" in diagnosis.findings[1].what


# faults of training


def without_norm(drafter: BlockDrafter) -> None:
    drafter.model.hidden_norm = nn.Identity()


def late(drafter: BlockDrafter) -> None:
    """Its context stands one position too far."""

    class Late(type(drafter.model)):
        def project(self, states, positions):
            return super().project(states, positions + (len(positions[0]) > 40))  # the context, not the block's gap

    drafter.model.__class__ = Late


def test_a_norm_left_out_in_training_is_named_first(world, tmp_path):
    drafter = world.teach("dspark", without_norm)
    drafter.model.hidden_norm = type(drafter.model.norm)(drafter.config.hidden_size, 1e-6)
    found = first_of(world.examine(write_drafter(drafter, tmp_path / "it", "specforge")))
    assert found.cause == "norm" and found.what.endswith("hidden_norm left out")


def test_positions_off_by_one_are_named_first(world, tmp_path):
    drafter = world.teach("dflash", late)
    drafter.model.__class__ = type(drafter.model).__mro__[1]
    found = first_of(world.examine(write_drafter(drafter, tmp_path / "it", "specforge")))
    assert found.cause == "positions" and found.what.endswith("-1")


def test_next_token_labels_in_same_position_clothes_are_named_first(world, tmp_path):
    """DeepSpec's own "DFlash" under z-lab's name."""
    drafter = tiny_drafter(world.target, family="dspark", head=None, stage_len=5)
    drafter.model.confidence_head = None
    drafter.model.config = replace(drafter.config, confidence_head=False)
    teach(drafter, world.target, [text.prompt + text.answer for text in world.texts], STEPS["dflash"])
    folder = write_drafter(drafter, tmp_path / "it", "specforge")
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["DFlashDraftModel"]
    del config["dflash_config"]["projector_type"]
    (folder / "config.json").write_text(json.dumps(config))
    found = first_of(world.examine(folder))
    assert found.cause == "label_shift" and "markov_rank to 0" in found.remedy


def test_an_untaught_drafter_contributes_nothing(world, tmp_path):
    folder = write_drafter(tiny_drafter(world.target, family="dflash"), tmp_path / "it", "specforge")
    found = first_of(world.examine(folder))
    assert found.cause == "acceptance" and "contributes nothing" in found.what


def test_a_drafter_of_another_target_is_told_and_not_run(world, tmp_path):
    folder = world.folder("dspark", tmp_path)
    edit_config(folder, num_target_layers=9)
    diagnosis = world.examine(folder)
    assert first_of(diagnosis).cause == "pair" and diagnosis.measured is None


def test_a_config_without_a_key_is_told(world, tmp_path):
    folder = world.folder("dspark", tmp_path)
    edit_config(folder, block_size=None)
    found = first_of(world.examine(folder))
    assert found.cause == "config" and "'block_size'" in found.what


# the demo's pair, whose drafter taps the layers 8, 18 and 28 of 30


@pytest.fixture(scope="module")
def demo(smollm2_dir) -> tuple[Setup, HFTarget, list[Text]]:
    target = load_target("smollm2", "bfloat16")
    prompts = list(doctor.PROMPTS)
    texts = list(doctor_run.written(target, load_tokenizer(target.folder, "it"), prompts, 32))
    return Setup.of(load_drafter("demo", load_target("smollm2", "bfloat16", engine="twin"))), target, texts


@pytest.mark.slow
@pytest.mark.parametrize("offset", [0, -1])
def test_the_demos_taps_off_by_a_layer_are_found(demo, offset):
    """One layer too low costs this drafter a twelfth of its accepted tokens, no more."""
    right, target, texts = demo
    wrong = replace(right, taps=tuple(Tap(tap.layer + offset) for tap in right.taps))
    probes = [probe for probe in tap_probes(wrong, target) if probe.cause == "taps"]
    _, results = try_all(wrong, probes, target, texts, lambda done, total: None)
    best = best_of(results)
    if offset == 0:
        assert best is None
    else:
        assert best is not None and probes[best].change == f"taps {-offset:+d}: [8, 18, 28]"


# what the figures are


def test_the_acceptance_length_is_that_of_decoding(world):
    drafter = load_drafter(str(world.home / "dflash"), world.target)
    reads = read_texts(world.target, world.texts, [Tap(layer) for layer in drafter.taps])
    traces, lengths = [trace_of(Setup.of(drafter), read) for read in reads], list[float]()
    for (prompt, answer), trace in zip(world.texts, traces, strict=True):
        out = dloop.generate(world.target, drafter, prompt, max_new_tokens=len(answer), loop_gate=NEVER_OPENS)
        assert len(walk(trace, NEVER_OPENS).start) == len(out.rounds)
        lengths.append(len(out.tokens) / len(out.rounds))  # the first token comes free, the last round's bonus is cut
    marks = [marks_of(Setup.of(drafter), read) for read in reads]
    assert measured(traces, marks).acceptance_length == pytest.approx(sum(lengths) / len(lengths), abs=0.15)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_accepted_given_the_rows_before(world, family):
    drafter = load_drafter(str(world.home / family), world.target)
    reads = read_texts(world.target, world.texts, [Tap(layer) for layer in drafter.taps])
    traces = [trace_of(Setup.of(drafter), read) for read in reads]
    marks = [marks_of(Setup.of(drafter), read) for read in reads]
    for trace, text in zip(traces, marks, strict=True):  # the text's own tokens before a row: as if all were accepted
        assert torch.equal(accepted_of(trace), text.accepted())
    figures, accepted = measured(traces, marks), torch.cat([text.accepted() for text in marks])
    chance, total = 1.0, 0.0
    for rate in figures.rows:
        chance *= rate
        total += chance
    assert total + 1 == pytest.approx(float(accepted.mean()) + 1) == pytest.approx(figures.every_position)


def test_drawn_drafts_are_accepted_as_often_as_the_drafters_law_says(world):
    """Drafts drawn a thousand times from the drafter's law at one position, and counted."""
    drafter = load_drafter(str(world.home / "dspark"), world.target)
    read = read_texts(world.target, world.texts[:1], [Tap(layer) for layer in drafter.taps])[0]
    setup, place, k = Setup.of(drafter), 10, drafter.config.stage_len
    expected = float(marks_of(setup, read).expected()[place])
    stages = stages_of(setup, read)
    with torch.no_grad():
        hidden = stages.forward()[0, place]
        anchor = stages.starts(0)[0, place]
        truth = read.tokens[0, anchor + 1 : anchor + 1 + k]
        total = 0
        for seed in range(1000):
            draw = Draw(Sampling(temperature=1.0, seed=seed), int(anchor) + 1)
            proposal = drafter.model.propose(hidden, read.tokens[0, anchor], drafter.vocabulary, draw)
            total += int((proposal.tokens == truth).long().cumprod(0).sum())
    assert 0.2 < expected < k - 0.2 and total / 1000 == pytest.approx(expected, abs=4 * k / 2 / 1000**0.5)


def test_the_interval_holds_its_mean_and_shrinks_with_data():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0))
    few, many = interval_of([values[:80]]), interval_of([values])
    assert few.low < few.mean < few.high and many.low < many.mean < many.high
    assert many.high - many.low < few.high - few.low
    same = interval_of([torch.ones(30)])
    assert same == (1.0, 1.0, 1.0)


def figures(tau: float) -> Measured:
    return Measured(
        texts=4,
        positions=200,
        acceptance_length=tau,
        every_position=tau,
        low=tau - 0.1,
        high=tau + 0.1,
        drawn=tau,
        rows=[0.5],
    )


def test_expected_and_measured_acceptance(world):
    config = json.loads((world.home / "dspark" / "config.json").read_text())
    drafter = load_drafter(str(world.home / "dspark"), world.target)
    assert expected_of(config, drafter.config, "it") is None
    config["dloop_config"] = {"acceptance_length": 3.0}
    told = expected_of(config, drafter.config, "it")
    assert told is not None and told.low == told.high == 3.0
    assert judge_acceptance(figures(2.9), told) == []
    assert [found.severity for found in judge_acceptance(figures(1.5), told)] == ["fault"]
    assert judge_acceptance(figures(1.5), None) == []
    config["dloop_config"] = {"acceptance_length": 30}
    with pytest.raises(UserError, match="must lie between 1 and 5"):
        expected_of(config, drafter.config, "it")
    published = replace(drafter.config, block_size=7, hidden_size=2560, num_target_layers=36)
    assert expected_of({}, published, "it") == PUBLISHED[Released("dspark", 7, 2560, 36)]
    assert isinstance(PUBLISHED[Released("dspark", 7, 2560, 36)], Expected)


def test_odd_tensors_are_told(world):
    drafter = load_drafter(str(world.home / "dspark"), world.target)
    assert check_tensors(drafter, {}) == []
    spoilt = replace(drafter, model=Setup.of(drafter).gained(torch.full((32,), 1e4)).model)
    assert "hidden_norm.weight is implausible" in check_tensors(spoilt, {})[0].what
    with torch.no_grad():
        drafter.model.norm.weight.zero_()
        drafter.model.fc.weight.zero_()
        drafter.model.layers[1].mlp.down_proj.weight.copy_(drafter.model.layers[0].mlp.down_proj.weight)
    told = [(found.severity, found.what) for found in check_tensors(drafter, {"dtype": "float16"})]
    assert told == [
        ("warning", "all values of fc.weight are zero"),
        ("fault", "all values of norm.weight are zero"),
        ("warning", "layer 1 is a copy of layer 0"),
        ("note", "the weights are stored in float16"),
    ]


# the tokenizer and its template


def tokens_of(target: Path, drafter: Path | None = None) -> list[Finding]:
    return check_tokens(load_target(str(target), "float32"), drafter).findings


def give_template(target: Path, template: str | None) -> None:
    """Its tokenizer anew, with this template and a beginning mark."""
    tokenizer = test_cli.byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<begin>"})
    tokenizer.chat_template = template
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        (target / name).unlink(missing_ok=True)
    tokenizer.save_pretrained(target)


@pytest.fixture
def target(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny.target, tmp_path / "target"))


def test_a_sound_tokenizer_gives_no_finding(target):
    give_template(target, TEMPLATE)
    assert tokens_of(target, target) == []


def test_a_tokenizer_of_another_model_is_named_first(target):
    tokenizer = test_cli.byte_tokenizer()
    tokenizer.add_tokens([f"more{i}" for i in range(20)])
    tokenizer.save_pretrained(target)
    found = tokens_of(target)[0]
    assert (found.severity, found.cause) == ("fault", "tokenizer") and "more tokens" in found.what


def test_tokenizers_that_differ_are_named_first(tiny, tmp_path):
    tokens = json.loads((tiny.target / "tokenizer.json").read_text())
    letters = sorted(tokens["model"]["vocab"])
    tokens["model"]["vocab"] = {letter: index for index, letter in enumerate(letters[::-1])}
    drafter = Path(shutil.copytree(tiny.target, tmp_path / "drafter"))
    (drafter / "tokenizer.json").write_text(json.dumps(tokens))
    found = tokens_of(tiny.target, drafter)[0]
    assert (found.severity, found.cause) == ("fault", "tokenizer") and "id 0 is" in found.evidence


def test_no_tokenizer_is_named(target):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (target / name).unlink()
    assert [found.what for found in tokens_of(target)] == ["the target has no tokenizer"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "has no chat template"),
        ("<begin><begin>" + TEMPLATE, "writes the beginning mark twice"),
        ("<begin>{% for m in messages %}<{{ m.role }}>{% endfor %}", "drops the user's words"),
        ("<begin>{% for m in messages %}{{ m.content }}{% endfor %}", "does not open the answer"),
    ],
)
def test_a_faulty_template_is_named_first(target, template, message):
    give_template(target, template)
    found = tokens_of(target)[0]
    assert found.cause == "template" and message in found.what


# the command


def words(tiny, *more: str) -> list[str]:
    return ["doctor", "--model", str(tiny.target), "--draft-model", str(tiny.drafter), "--dtype", "float32", *more]


def test_the_command_finds_a_fault_and_ends_with_1(tiny, tmp_path, capsys):
    drafter = Path(shutil.copytree(tiny.drafter, tmp_path / "drafter"))
    edit_tensors(drafter, lambda tensors: tensors.pop("norm.weight"))
    asked = ["doctor", "--model", str(tiny.target), "--draft-model", str(drafter), "--dtype", "float32"]
    assert entry([*asked, "--json", "--output", str(tmp_path / "it.json")]) == 1
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document == json.loads((tmp_path / "it.json").read_text()) and document["schema"] == 1
    assert not document["healthy"] and document["findings"][0]["cause"] == "weights"
    assert "dloop doctor: fault: weights" in err


@pytest.mark.parametrize("healthy", [True, False])
def test_the_command_tells_what_it_measured(tiny, tmp_path, capsys, healthy):
    """A drafter that is right on the very texts the doctor reads, and one that is right on others."""
    (tmp_path / "prompts.txt").write_text("Hello\n\nHi\n")
    words, folder = ["--prompts", str(tmp_path / "prompts.txt"), "--max-new-tokens", "40"], tiny.drafter
    if healthy:
        target = load_target(str(tiny.target), "float32", engine="twin")
        tokenizer = load_tokenizer(tiny.target, "it")
        ids = [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in ("Hello", "Hi")]
        texts = [prompt + dloop.generate_autoregressive(target, prompt, max_new_tokens=40).tokens for prompt in ids]
        folder = write_drafter(good_drafter(target, texts), tmp_path / "drafter", "specforge")
    asked = ["doctor", "--model", str(tiny.target), "--draft-model", str(folder), "--dtype", "float32"]
    assert entry([*asked, *words]) == (0 if healthy else 1)
    out, err = capsys.readouterr()
    told = " ".join(out.split())
    assert (
        "one thing changed positions tau at least drawn at least" in told
        and "row accepted" in told
        and "not judged" in told
    )
    assert ("Healthy: none of" in told) == healthy and ("contributes nothing" in err) != healthy
    assert ("####" in told) == healthy


def test_texts_too_short_are_no_proof_of_health(tiny, capsys, monkeypatch):
    monkeypatch.setattr(doctor_run, "written", lambda *_: iter([Text([1, 2], [3])]))
    assert entry(words(tiny)) == 0
    out = capsys.readouterr().out
    assert "Not measured" in out and "acceptance was not measured" in out and "Healthy" not in out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-new-tokens", "2"], "give at least 8"),
        (["--prompts", "/nowhere/it.txt"], "/nowhere/it.txt cannot be read"),
        (["--output", "/nowhere/it.json"], "--output"),
    ],
)
def test_a_users_error_is_one_line_and_2(tiny, more, message, capsys):
    assert message in test_cli.refused(capsys, *words(tiny, *more))


def test_a_pair_is_needed(tiny, capsys):
    line = test_cli.refused(capsys, "doctor", "--model", str(tiny.target))
    assert "needs --draft-model" in line


def test_the_offline_pair_needs_no_names(capsys):
    assert doctor.drafter_name("smollm2", None, "dloop doctor", "") == "demo"
    assert "--draft-model demo" in capsys.readouterr().err
    assert doctor_run.DEMO.is_dir()
