"""A drafter in another layout is the same drafter: tensors bit for bit, the same config, there and back."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dloop.checkpoint import read_tensors, write_checkpoint
from dloop.cli.main import entry
from dloop.drafters.config import read_dspark
from dloop.drafters.families import READERS
from dloop.drafters.gemma4_config import FAMILY as GEMMA_FAMILY
from dloop.drafters.mtp import FAMILY as MTP_FAMILY
from dloop.export import EMBEDDING, HEAD, early, flat, nested
from dloop.load import load_drafter, load_target
from dloop.testing import CHAIN_KINDS, tiny_drafter, tiny_target, write_drafter, write_target


@pytest.fixture(scope="module", params=["qwen3", "llama_tied"])
def folders(request, tmp_path_factory):
    """A target, and its drafter as training stores it: bfloat16, nested."""
    home = tmp_path_factory.mktemp("export")
    target = tiny_target(request.param)
    target.model.bfloat16()
    write_target(target, home / "target")
    for family in READERS.keys() - {GEMMA_FAMILY}:  # which needs a target that lends its keys
        name = "specforge" if family == "dspark" else family
        write_drafter(tiny_drafter(target, family=family), home / name, "specforge")
    return home


def exported(folders, source, layout, out, *more) -> int:
    return entry(
        ["export", "--draft-model", str(source), "--model", str(folders / "target"), "--layout", layout]
        + ["--output-dir", str(out), *more]
    )


def config(folder) -> dict:
    return json.loads((folder / "config.json").read_text())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("more", [[], ["--max-shard-bytes", "20000"]], ids=["whole", "sharded"])
def test_there_and_back_is_the_same(folders, tmp_path, more):
    source, out, back = folders / "specforge", tmp_path / "deepspec", tmp_path / "back"
    assert exported(folders, source, "deepspec", out, *more) == 0
    assert exported(folders, out, "specforge", back, *more) == 0
    assert same(read_tensors(back), read_tensors(source)) and config(back) == config(source)
    assert ((out / "model.safetensors.index.json").is_file()) == bool(more)
    written = read_tensors(out)
    target = load_target(str(folders / "target"), "bfloat16")
    assert torch.equal(written[EMBEDDING], target.vocabulary.embedding)
    assert torch.equal(written[HEAD], target.vocabulary.head)
    assert read_dspark(config(out), "x") == read_dspark(config(source), "x")
    for folder in (out, back):
        assert load_drafter(str(folder), target).config == load_drafter(str(source), target).config


@pytest.mark.parametrize(("source", "family"), [("dflash", "dflash"), ("domino", "domino"), ("specforge", "dspark")])
def test_every_family_goes_to_the_early_layout_and_back(folders, tmp_path, source, family):
    out, back = tmp_path / "early", tmp_path / "back"
    assert exported(folders, folders / source, "dflash", out) == 0
    assert exported(folders, out, "specforge", back) == 0
    assert same(read_tensors(out), read_tensors(folders / source))
    assert same(read_tensors(back), read_tensors(folders / source)) and config(back) == config(folders / source)
    assert config(out)["architectures"] == ["DFlashDraftModel"] and "emb_dim" not in config(out)
    assert config(out)["dflash_config"].get("projector_type") == (None if family == "dflash" else family)
    target = load_target(str(folders / "target"), "bfloat16")
    drafter = load_drafter(str(out), target)
    assert drafter.family == family and drafter.config == load_drafter(str(folders / source), target).config


@pytest.mark.parametrize("source", ["dflash", "domino"])
def test_deepspec_s_layout_is_dspark_s_alone(folders, tmp_path, source, capsys):
    assert exported(folders, folders / source, "deepspec", tmp_path / "out") == 2
    assert f"the deepspec layout is DSpark's, this drafter is {source}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_an_early_domino_file_leaves_out_is_written_out(folders, tmp_path):
    raw, tensors = config(folders / "domino"), read_tensors(folders / "domino")
    whole = dict(raw["dflash_config"])
    raw["dflash_config"] = {key: whole[key] for key in ("mask_token_id", "emb_dim", "gru_hidden_dim")}
    raw["dflash_config"] |= {"projector_type": "causal_v5", "shift_label": True, "pure_draft_prefix_len": 1}
    heads = ("prefix_gru.", "embed_proj.")
    raw["dflash_config"]["target_layer_ids"] = whole["target_layer_ids"]
    old = {f"logit_head.{key}" if key.startswith(heads) else key: value for key, value in tensors.items()}
    write_checkpoint(tmp_path / "old", {**raw, "architectures": ["DFlashDraftModel"]}, old)
    assert exported(folders, tmp_path / "old", "specforge", tmp_path / "out") == 0
    assert config(tmp_path / "out") == config(folders / "domino")
    assert same(read_tensors(tmp_path / "out"), tensors)


def test_the_deepspec_layout_is_the_published_one(folders, tmp_path):
    exported(folders, folders / "specforge", "deepspec", tmp_path / "out")
    found = config(tmp_path / "out")
    assert found["architectures"] == ["Qwen3DSparkModel"] and "dflash_config" not in found
    for key in ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers", "markov_rank"):
        assert key in found
    assert len(load_file(tmp_path / "out" / "model.safetensors")) == len(read_tensors(folders / "specforge")) + 2


def test_a_layout_stays_what_it_is_and_other_keys_are_kept():
    deepspec = {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "markov_rank": 2, "num_anchors": 512, "x": None}
    assert flat(deepspec) == deepspec
    meant = {"projector_type": "dspark", "attention_mode": "gqa"}
    assert flat(nested(deepspec, "DSparkDraftModel", meant)) == deepspec
    assert nested(early(nested(deepspec, "DSparkDraftModel", meant)), "DSparkDraftModel", meant) == nested(
        deepspec, "DSparkDraftModel", meant
    )
    older = {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark", "block_size": 7}}
    assert flat(older) == {"architectures": ["Qwen3DSparkModel"], "block_size": 7}
    assert "auto_map" not in nested({"auto_map": {}}, "DSparkDraftModel", meant) and "auto_map" not in flat(
        {"auto_map": {}}
    )


def test_a_vocabulary_of_its_own_is_not_lost(folders, tmp_path, capsys):
    exported(folders, folders / "specforge", "deepspec", tmp_path / "out")
    tensors = read_tensors(tmp_path / "out")
    tensors[HEAD][3, 5] += 1
    write_checkpoint(tmp_path / "own", config(tmp_path / "out"), tensors)
    capsys.readouterr()
    assert exported(folders, tmp_path / "own", "specforge", tmp_path / "back") == 2
    assert "lm_head.weight is not its target's" in capsys.readouterr().err
    assert exported(folders, tmp_path / "own", "deepspec", tmp_path / "copy") == 0
    assert same(read_tensors(tmp_path / "copy"), tensors)


@pytest.mark.skipif(not CHAIN_KINDS, reason="Qwen3.5 needs a newer transformers")
def test_a_head_s_copy_of_the_vocabulary_is_left_out(tmp_path):
    target = tiny_target("qwen3_5")
    write_target(target, tmp_path / "target")
    write_drafter(tiny_drafter(target, family=MTP_FAMILY), tmp_path / "head", "specforge")
    head = read_tensors(tmp_path / "head")
    merged = head | {"mtp." + EMBEDDING: target.vocabulary.embedding}
    write_checkpoint(tmp_path / "merged", config(tmp_path / "head"), merged)
    assert exported(tmp_path, tmp_path / "merged", "specforge", tmp_path / "out") == 0
    assert same(read_tensors(tmp_path / "out"), head)


def test_what_is_there_is_only_replaced_when_asked(folders, tmp_path, capsys):
    source, out = folders / "specforge", tmp_path / "out"
    out.mkdir()
    assert exported(folders, source, "deepspec", out, "--max-shard-bytes", "20000") == 0
    assert exported(folders, source, "specforge", out) == 2
    assert "add --overwrite" in capsys.readouterr().err
    assert exported(folders, source, "specforge", out, "--overwrite", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["layout"] == "specforge" and len(document["checkpoint_sha256"]) == 64
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "model.safetensors"]
    assert exported(folders, out, "deepspec", out, "--overwrite") == 0  # onto itself
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    assert exported(folders, source, "specforge", tmp_path / "mine", "--overwrite") == 2
    assert "is no checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-shard-bytes", "0"], "--max-shard-bytes 0"),
        (["--layout", "gguf"], "expected specforge|dflash|deepspec"),
        (["--draft-model", "nowhere"], "neither a folder here"),
        (["--draft-model", "demo"], "a vocabulary of 49152 tokens"),
    ],
)
def test_faulty_commands_end_in_one_line(folders, tmp_path, capsys, more, message):
    assert exported(folders, folders / "specforge", "specforge", tmp_path / "out", *more) == 2
    line = capsys.readouterr().err.strip()
    assert message in line and "\n" not in line and not (tmp_path / "out").exists()
