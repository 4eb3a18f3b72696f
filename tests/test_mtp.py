"""Qwen3.5's MTP head: what loads, what is refused, how long a stage is, and its training."""

import json
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import dloop
from dloop.cli import train as train_command
from dloop.cli.args import parse
from dloop.cli.eagle3_script import forwarded
from dloop.cli.main import entry
from dloop.detect import detect_family
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.mtp import FAMILY, MTP, read_mtp
from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN
from dloop.targets import recurrent
from dloop.targets.hf import HFTarget
from dloop.testing import taught_drafter, tiny_drafter, tiny_qwen35, tiny_target, write_drafter, write_target
from dloop.train.batch import TrainBatch
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.trainer import length_at
from dloop.types import StageRequest

pytestmark = pytest.mark.skipif(not recurrent.is_offered(), reason="Qwen3.5 needs a newer transformers")
PROMPT = [5, 9, 11, 60, 2]
VOCAB = 97
EXAMPLE = Path(__file__).parents[1] / "examples" / "run_dloop_mtp.sh"


def with_head(target: HFTarget, folder: Path, drafter: ChainDrafter | None = None) -> Path:
    """A target's folder whose second shard holds a head, as released: transformers itself never writes one."""
    write_target(target, folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    head = (drafter or tiny_drafter(target, family=FAMILY)).model.state_dict()
    parts = {"model-00001-of-00002.safetensors": tensors, "model-00002-of-00002.safetensors": head}
    for name, part in parts.items():
        save_file(part, folder / name, metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": {key: name for name, part in parts.items() for key in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def tiny() -> HFTarget:
    return tiny_target("qwen3_5", num_layers=3)


@pytest.fixture(scope="module")
def home(tiny, tmp_path_factory) -> Path:
    """A target with its head in its shards, a head of its own, and tokens."""
    folder = tmp_path_factory.mktemp("mtp")
    with_head(tiny, folder / "target")
    write_drafter(tiny_drafter(tiny, family=FAMILY), folder / "head", "specforge")
    flat = np.random.default_rng(0).integers(3, VOCAB, 240).astype(np.uint16)
    np.savez(folder / "tokens.npz", flat=flat, lens=np.array([[5, 25]] * 8))
    return folder


@pytest.fixture(scope="module")
def target(home) -> HFTarget:
    return dloop.load_target(str(home / "target"), dtype="float32")


# What loads

PUBLISHED = {  # of the 9B release: what the head's shape follows from
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "vision_config": {},
    "text_config": {
        "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
        "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 262144, "attention_bias": False,
        "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10], "mrope_interleaved": True,
        },
    },
}  # fmt: skip


def test_the_published_config_gives_the_published_shapes():
    config = read_mtp(PUBLISHED, "config")
    assert (config.rotary_dim, config.num_target_layers, config.stage_len, config.rope_theta) == (64, 32, 3, 1e7)
    with torch.device("meta"):
        shapes = {name: list(t.shape) for name, t in MTP(config).state_dict().items()}
    layer = "mtp.layers.0."
    assert shapes == {
        "mtp.fc.weight": [4096, 8192],
        "mtp.pre_fc_norm_embedding.weight": [4096],
        "mtp.pre_fc_norm_hidden.weight": [4096],
        "mtp.norm.weight": [4096],
        layer + "input_layernorm.weight": [4096],
        layer + "post_attention_layernorm.weight": [4096],
        layer + "self_attn.q_proj.weight": [8192, 4096],
        layer + "self_attn.k_proj.weight": [1024, 4096],
        layer + "self_attn.v_proj.weight": [1024, 4096],
        layer + "self_attn.o_proj.weight": [4096, 4096],
        layer + "self_attn.q_norm.weight": [256],
        layer + "self_attn.k_norm.weight": [256],
        layer + "mlp.gate_proj.weight": [12288, 4096],
        layer + "mlp.up_proj.weight": [12288, 4096],
        layer + "mlp.down_proj.weight": [4096, 12288],
    }


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers=2 is another head"),
        ({"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings=True"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_parameters": {"rope_theta": 1e7}}, "partial_rotary_factor"),
        ({"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2}}, "partial_rotary_factor=2"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_configs_of_another_head_are_refused(change, part):
    with pytest.raises(UserError) as error:
        read_mtp({**PUBLISHED, "text_config": PUBLISHED["text_config"] | change}, "config")
    assert part in str(error.value) and "\n" not in str(error.value)


def test_only_the_tensors_tell_a_head_from_a_target():
    assert detect_family(PUBLISHED, "x", lambda: ["lm_head.weight", "mtp.pre_fc_norm_hidden.weight"]) == FAMILY
    assert detect_family(PUBLISHED, "x", lambda: ["pre_fc_norm_hidden.weight"]) == FAMILY
    with pytest.raises(UserError, match="a plain Qwen3_5ForConditionalGeneration, not a drafter"):
        detect_family(PUBLISHED, "x", lambda: ["lm_head.weight"])


def answer(drafter: ChainDrafter, target: HFTarget) -> list[float]:
    memory = drafter.open()
    memory.extend(0, 0, PROMPT, target.open(drafter.taps).prefill(0, PROMPT).features)
    stages = [memory.draft([StageRequest(slot=0, anchor=1 + index, index=index)])[0] for index in (0, 1)]
    return [logp for stage in stages for logp in [*stage.logp, *map(float, stage.tokens)]]


def test_the_built_in_head_comes_from_the_target_s_shards_and_every_tensor_counts(target, tiny):
    drafter = dloop.load_drafter("mtp", target)
    written = tiny_drafter(tiny, family=FAMILY)
    assert drafter.family == FAMILY and drafter.stage_len == 3
    mine, theirs = drafter.model.state_dict(), written.model.state_dict()
    assert len(mine) == 15 and all(torch.equal(mine[key], theirs[key]) for key in theirs)
    assert drafter.vocabulary.head.data_ptr() == target.vocabulary.head.data_ptr()
    before = answer(drafter, target)
    for key, weight in mine.items():
        saved = weight.clone()
        weight[..., ::2] = weight[..., ::2] * 1.5
        assert answer(drafter, target) != before, f"{key} is never used"
        weight.copy_(saved)
    assert answer(drafter, target) == before


def test_a_target_without_a_head_is_told_so(tiny, tmp_path):
    resaved = dloop.load_target(str(write_target(tiny, tmp_path / "resaved")), dtype="float32")
    plain = dloop.load_target(str(write_target(tiny_target("qwen3"), tmp_path / "plain")), dtype="float32")
    for target in (resaved, plain, tiny):
        with pytest.raises(UserError, match=r"has no mtp\.\* tensors; .* saved by transformers has lost them"):
            dloop.load_drafter("mtp", target)
    with pytest.raises(UserError, match="revision 'v1' of drafter 'mtp'"):
        dloop.load_drafter("mtp", tiny, revision="v1")


FAULTS = {
    "missing": (lambda t: t.pop("mtp.fc.weight"), "is missing 1 tensors: mtp.fc.weight"),
    "more": (lambda t: t.update({"mtp.layers.1.mlp.up_proj.weight": torch.ones(2, 2)}), "has unexpected 1 tensors"),
    "shape": (lambda t: t.update({"mtp.norm.weight": torch.ones(3)}), "has wrongly shaped"),
    "nan": (lambda t: t["mtp.fc.weight"].fill_(float("nan")), "NaN"),
    "another's": (lambda t: t.update({"mtp.x": torch.ones(1)}), "has unexpected 1 tensors: mtp.x"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_heads_that_do_not_fit_are_refused(target, home, tmp_path, case):
    change, message = FAULTS[case]
    tensors = load_file(home / "head" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((home / "head" / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        dloop.load_drafter(str(tmp_path), target)


COPIES = {  # a stored name -> what of the target it copies
    "vllm": {"mtp.embed_tokens.weight": "embedding"},
    "both": {"mtp.embed_tokens.weight": "embedding", "mtp.lm_head.weight": "head"},
    "beside": {"embed_tokens.weight": "embedding", "lm_head.weight": "head"},
    "as-the-target-s": {"model.language_model.embed_tokens.weight": "embedding"},
    "twice": {"mtp.embed_tokens.weight": "embedding", "model.embed_tokens.weight": "embedding"},
}


@pytest.mark.parametrize("prefix", ["mtp.", ""], ids=["prefixed", "bare"])
@pytest.mark.parametrize("case", COPIES)
def test_copies_of_the_target_s_vocabulary_are_taken_and_others_refused(target, home, tmp_path, case, prefix):
    """What vLLM reads stands in some heads; a head has no vocabulary of its own, so nothing else may."""
    head = load_file(home / "head" / "model.safetensors")
    tensors = {prefix + name.removeprefix("mtp."): weight for name, weight in head.items()}
    copies = {
        name if prefix else name.removeprefix("mtp."): getattr(target.vocabulary, part).clone()
        for name, part in COPIES[case].items()
    }
    (tmp_path / "config.json").write_text((home / "head" / "config.json").read_text())

    def load(changed: dict[str, Tensor]) -> ChainDrafter:
        save_file(tensors | copies | changed, tmp_path / "model.safetensors")
        return dloop.load_drafter(str(tmp_path), target)

    drafter = load({})
    assert drafter.vocabulary.embedding.data_ptr() == target.vocabulary.embedding.data_ptr()
    assert drafter.vocabulary.head.data_ptr() == target.vocabulary.head.data_ptr()
    alone = dloop.load_drafter(str(home / "head"), target)
    assert answer(drafter, target) == pytest.approx(answer(alone, target), abs=1e-5)  # files align weights otherwise
    for name, weight in copies.items():
        kind = name.removeprefix("mtp.").removeprefix("model.").removeprefix("language_model.")
        other = weight.clone()
        other[3, 5] += 1
        message = f"{kind} twice" if case == "twice" else f"{kind} is not that of .* none of its own; give the target"
        for changed, said in ((other, message), (weight[:-1].clone(), f"{kind} (is|twice)")):
            with pytest.raises(UserError, match=said):
                load({name: changed})


def test_a_copy_in_the_target_s_shards_is_taken_too(target, home, tmp_path):
    shutil.copytree(home / "target", tmp_path / "target")
    shard = tmp_path / "target" / "model-00002-of-00002.safetensors"
    copy = {"mtp.embed_tokens.weight": target.vocabulary.embedding.clone()}
    save_file(load_file(shard) | copy, shard, metadata={"format": "pt"})
    index = tmp_path / "target" / "model.safetensors.index.json"
    found = json.loads(index.read_text())
    found["weight_map"] |= {name: shard.name for name in copy}
    index.write_text(json.dumps(found))
    merged = dloop.load_target(str(tmp_path / "target"), dtype="float32")
    for drafter in (dloop.load_drafter("mtp", merged), dloop.load_drafter(str(tmp_path / "target"), target)):
        assert answer(drafter, merged) == pytest.approx(answer(dloop.load_drafter("mtp", target), target), abs=1e-5)


def test_nothing_beside_a_head_is_passed_over_but_a_target_s_layers(target, home, tmp_path):
    tensors = load_file(home / "head" / "model.safetensors")
    (tmp_path / "config.json").write_text((home / "head" / "config.json").read_text())
    for name, message in [
        ("extra.weight", r"has unexpected 1 tensors: mtp\.extra\.weight"),
        ("norm.weight", r"stores mtp\.norm\.weight twice, with different values"),
    ]:
        save_file(tensors | {name: torch.ones(32)}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            dloop.load_drafter(str(tmp_path), target)


def test_a_head_fits_its_target_alone(target, home, tmp_path):
    save_file(load_file(home / "head" / "model.safetensors"), tmp_path / "model.safetensors")
    raw = json.loads((home / "head" / "config.json").read_text())
    for change, message in [
        ({"vocab_size": 98}, "a vocabulary of 98 tokens"),
        ({"num_hidden_layers": 5}, "trained on a target of 5 layers"),
        ({"rope_parameters": raw["rope_parameters"] | {"rope_theta": 5e5}}, "RoPE base 500000"),
        (
            {"rope_parameters": raw["rope_parameters"] | {"partial_rotary_factor": 1.0}},
            "turns 1 of each head with the position, .* 0.5; correct partial_rotary_factor",
        ),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(UserError, match=message):
            dloop.load_drafter(str(tmp_path), target)
    for words, message in [({"gap_rows": "position"}, "leaves no gap"), ({"rope_theta": 7.0}, "does not apply to mtp")]:
        with pytest.raises(UserError, match=message):
            dloop.load_drafter(str(home / "head"), target, **words)
    plain, head = tiny_target("qwen3", num_layers=3), dloop.load_drafter(str(home / "head"), target)
    for refused in (
        lambda: dloop.load_drafter(str(home / "head"), plain),
        lambda: dloop.generate(plain, head, PROMPT, 4),
    ):
        with pytest.raises(UserError, match="is a head of Qwen3.5, tiny qwen3 is a qwen3 model; use a drafter"):
            refused()


# What is drafted


def test_a_stage_is_as_long_as_mtp_k_says(target):
    drafter = dloop.load_drafter("mtp", target)
    for steps, length in ((None, 3), (1, 1), (5, 5)):
        out = dloop.generate(target, drafter, PROMPT, 12, mtp_k=steps)
        assert {len(r.drafted) for r in out.rounds} == {length}
        assert out.tokens == dloop.generate_autoregressive(target, PROMPT, 12).tokens
    with pytest.raises(UserError, match="mtp_k=0 must be at least 1"):
        dloop.generate(target, drafter, PROMPT, 4, mtp_k=0)
    with pytest.raises(UserError, match="draft_depth=3 does not apply to mtp-qwen3.5"):
        dloop.generate(target, drafter, PROMPT, 4, draft_depth=3)
    for other in (tiny_drafter(target), tiny_drafter(target, family="eagle3")):
        with pytest.raises(UserError, match="mtp_k=3 does not apply"):
            dloop.generate(target, other, PROMPT, 4, mtp_k=3, tree_budget=0)
    with pytest.raises(UserError, match="tree_budget=60: .* recurrent layers"):
        dloop.generate(target, tiny_drafter(target, family="eagle3"), PROMPT, 4, tree_budget=60)
    with pytest.raises(UserError, match="tree_budget=8: .* recurrent layers"):
        dloop.generate(target, drafter, PROMPT, 4, tree_budget=8)


def test_a_taught_head_is_right_at_times_and_loops(tiny):
    """Neither 0 nor 1: acceptance of a head trained a moment on two texts, on a third."""
    texts = [PROMPT + dloop.generate_autoregressive(tiny, PROMPT, 30, temperature=0.8, seed=s).tokens for s in (0, 1)]
    drafter = taught_drafter(tiny, texts, family=FAMILY, steps=50)
    plain = dloop.generate_autoregressive(tiny, texts[0][:12], 30)
    for gate in (1.0, -2.0, ALWAYS_OPEN):
        out = dloop.generate(tiny, drafter, texts[0][:12], 30, loop_gate=gate, max_stages=3)
        assert out.tokens == plain.tokens
        drafted = sum(len(r.drafted) for r in out.rounds)
        assert 0 < sum(r.accepted for r in out.rounds) < drafted


def test_the_command_takes_the_built_in_head(home, capsys):
    words = ["generate", "--model", str(home / "target"), "--draft-model", "mtp", "--prompt-ids", "5,9,11", "--json"]
    words += ["--dtype", "float32", "--device", "cpu", "--max-new-tokens", "8", "--mtp-k", "2", "--loop-gate", "-inf"]
    assert entry(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert {len(stage["tokens"]) for r in found["rounds"] for stage in r["stages"]} == {2}


# Training


def random_batch(lengths: list[int], width: int) -> TrainBatch:
    tokens = torch.randint(3, VOCAB, (len(lengths), width), generator=torch.Generator().manual_seed(4))
    held = torch.tensor(lengths)
    inside = torch.arange(width) < held[:, None]
    return TrainBatch(tokens * inside, inside & (torch.arange(width) >= 4), held, torch.zeros(len(lengths)).long())


def test_a_batch_is_its_samples_and_padding_changes_nothing(tiny):
    drafter = tiny_drafter(tiny, family=FAMILY)
    objective = objective_of(drafter.model, drafter.vocabulary, ObjectiveSettings())
    wide = random_batch([30, 21], 40)
    whole = sum(objective.step_sums(wide, tiny.features(wide.tokens, ()), 6)).item()
    parts = 0.0
    for i, length in enumerate((30, 21)):
        own = [x[i : i + 1] for x in wide.tensors()]
        part = TrainBatch(own[0][:, :length], own[1][:, :length], *own[2:])
        parts += sum(objective.step_sums(part, tiny.features(part.tokens, ()), 6)).item()
    assert whole == pytest.approx(parts, rel=1e-5)


def command(home: Path, out: Path, *more: str) -> list[str]:
    return [
        "--target-model-path", str(home / "target"), "--train-data-path", str(home / "tokens.npz"), "--output-dir",
        str(out), "--batch-size", "2", "--log-interval", "1", "--dtype", "float32", "--device", "cpu", *more,
    ]  # fmt: skip


@pytest.mark.parametrize("start", ["mtp", "head"])
def test_the_command_trains_a_head_into_the_host_s_format(home, target, tmp_path, capsys, start):
    name = start if start == "mtp" else str(home / "head")
    assert entry(["train", *command(home, tmp_path, "--draft-init-path", name, "--max-steps", "4", "--json")]) == 0
    done = json.loads(capsys.readouterr().out)
    before, after = (load_file(Path(p) / "model.safetensors") for p in (home / "head", done["checkpoint"]))
    assert before.keys() == after.keys() and len(after) == 15
    assert all(after[key].dtype == torch.bfloat16 and not torch.equal(before[key], after[key]) for key in after)
    raw = json.loads((Path(done["checkpoint"]) / "config.json").read_text())
    theirs = json.loads(((home / "target" if start == "mtp" else home / "head") / "config.json").read_text())
    assert raw == theirs | {"dtype": "bfloat16"}, "the target's own config, and the tensors' type"
    drafter = dloop.load_drafter(done["checkpoint"], target)
    assert drafter.family == FAMILY
    assert (
        dloop.generate(target, drafter, PROMPT, 10).tokens == dloop.generate_autoregressive(target, PROMPT, 10).tokens
    )
    lengths = [length_at(step, (3, 6, 9), 42) for step in range(4)]  # one, two or three stages of the host
    assert [record["loop_ce"] > 0 for record in done["records"]] == [length > 3 for length in lengths]


def test_training_lowers_the_loss_and_leaves_the_target_alone(home, tmp_path, capsys):
    words = command(
        home, tmp_path, "--draft-init-path", "mtp", "--max-steps", "30", "--learning-rate", "3e-3", "--json"
    )
    assert entry(["train", *words, "--ttt-length-dist", "3"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert records[-1]["loss"] < records[0]["loss"]


def test_flags_of_other_families_are_refused(home, tmp_path, capsys):
    for flag in (["--num-anchors", "4"], ["--draft-rope-theta", "5"], ["--gap-rows", "position"]):
        assert entry(["train", *command(home, tmp_path, "--draft-init-path", "mtp", "--max-steps", "1", *flag)]) == 2
        line = capsys.readouterr().err.strip().splitlines()[-1]
        assert "mtp-qwen3.5" in line


NEEDED = ["--target-model-path", "T", "--train-data-path", "d.npz", "--output-dir", "O", "--mtp", "qwen3.5"]


def meant(*words: str) -> train_command.Command:
    return parse(train_command.Command, "dloop train", forwarded("train_eagle3.py", [*NEEDED, *words]))


def test_the_published_script_trains_the_head(home, tmp_path):
    assert (meant().draft_init_path, meant().ttt_length_dist) == ("mtp", (3,))
    assert meant("--ttt-length-dist", "3,6,9").ttt_length_dist == (3, 6, 9)
    assert meant("--ttt-length", "5").ttt_length_dist == (5,)
    assert meant("--ckpt-dir", str(home / "head")).draft_init_path == str(home / "head")
    eagle = write_drafter(tiny_drafter(tiny_target("qwen3", num_layers=4), family="eagle3"), tmp_path, "specforge")
    with pytest.raises(UserError, match="is a drafter of eagle3; give a head, or leave out --mtp"):
        meant("--ckpt-dir", str(eagle))
    with pytest.raises(UserError, match="--mtp qwen3.5 trains a head that is there"):
        meant("--draft-model-config", "c.json")


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_example_trains_the_built_in_head(home, tmp_path):
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)

    def example(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "d.jsonl", **env}
        return subprocess.run(["bash", str(EXAMPLE), *words], env=env, cwd=tmp_path, capture_output=True, text=True)

    for start, env in (("mtp", {}), (str(home / "head"), {"CKPT": str(home / "head")})):
        given = example("qwen3.5", **env).stdout.split("\n")[:-1]
        at = given.index(str(EXAMPLE.parents[1] / "scripts" / "train_eagle3.py"))
        command = parse(train_command.Command, "dloop train", forwarded("train_eagle3.py", given[at + 1 :]))
        assert (command.target_model_path, command.draft_init_path) == ("Qwen/Qwen3.5-9B", start)
        assert (command.ttt_length_dist, command.num_epochs, command.chat_template) == ((3, 6, 9), 1, "model")
    done = example("9B")
    assert done.returncode == 2 and done.stderr.strip().endswith("run_dloop_mtp.sh qwen3.5|gemma4")


def test_a_config_that_was_read_is_written_again():
    raw = tiny_qwen35(tiny_target("qwen3_5"))
    config = read_mtp({**raw, "auto_map": {"AutoModel": "x.y"}}, "config")
    assert json.loads(config.published) == raw, "code of others is never passed on"
    assert replace(config, published="{}") != config
