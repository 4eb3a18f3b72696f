"""A drafter in another layout is the same drafter: tensors bit for bit, the same config, there and back."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dloop.checkpoint import read_tensors, write_checkpoint
from dloop.cli.main import entry
from dloop.drafters.config import read_dspark
from dloop.export import EMBEDDING, HEAD, flat, nested
from dloop.load import load_drafter, load_target
from dloop.testing import tiny_drafter, tiny_target, write_drafter, write_target


@pytest.fixture(scope="module", params=["qwen3", "llama_tied"])
def folders(request, tmp_path_factory):
    """A target, and its drafter as training stores it: bfloat16, nested."""
    home = tmp_path_factory.mktemp("export")
    target = tiny_target(request.param)
    target.model.bfloat16()
    write_target(target, home / "target")
    write_drafter(tiny_drafter(target), home / "specforge", "specforge")
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
    assert flat(nested(deepspec)) == deepspec
    older = {"architectures": ["DFlashDraftModel"], "dflash_config": {"projector_type": "dspark", "block_size": 7}}
    assert flat(older) == {"architectures": ["Qwen3DSparkModel"], "block_size": 7}
    assert "auto_map" not in nested({"auto_map": {}}) and "auto_map" not in flat({"auto_map": {}})


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
        (["--layout", "gguf"], "expected specforge|deepspec"),
        (["--draft-model", "nowhere"], "neither a folder here"),
        (["--draft-model", "demo"], "a vocabulary of 49152 tokens"),
    ],
)
def test_faulty_commands_end_in_one_line(folders, tmp_path, capsys, more, message):
    assert exported(folders, folders / "specforge", "specforge", tmp_path / "out", *more) == 2
    line = capsys.readouterr().err.strip()
    assert message in line and "\n" not in line and not (tmp_path / "out").exists()
