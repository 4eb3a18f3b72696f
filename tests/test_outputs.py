"""Output files that turn out to be folders are told of in one line, before anything is loaded or decoded."""

import numpy as np
import pytest

from dloop.cli.main import entry

COSTED = "--trace missing.npz --stage-ms 1,1 --verify-ms 1,1"
PAIR = "--model missing --draft-model missing"
DATA = "data --model missing --prompts in.jsonl --output out.npz"
TRACE = f"trace record {PAIR} --prompts in.jsonl --output out.npz"
TRAIN = "--target-model-path missing --train-data-path in.npz --output-dir run"
SERVERS = "data regenerate --model m --server-address here:9 --input-file-path in.jsonl --output-file-path out.jsonl"

CASES = [
    (f"train {TRAIN} --draft-init-path missing", "run/train.csv"),
    (f"train {TRAIN} --draft-init-path missing --resume", "run/train.csv"),
    (f"train {TRAIN} --draft-init-path missing --dry-run", "run/train.csv"),
    (f"train gate-head {TRAIN} --draft-model missing --kind disco --resume", "run/run.json"),
    (f"train gate-head {TRAIN} --draft-model missing --kind disco --resume", "run/training_state.pt"),
    (f"train gate-head {TRAIN} --draft-model missing --kind disco --resume", "run/config.json"),
    (f"train gate-head {TRAIN} --draft-model missing --kind disco --resume", "run/model.safetensors"),
    (DATA, "out.npz.json"),
    (f"{DATA} --resume", "out.npz"),
    (f"{DATA} --resume", "out.npz.parts/run.json"),
    (TRACE, "out.npz.json"),
    (f"{TRACE} --resume", "out.npz"),
    ("data prepare --input in.jsonl --output out.jsonl", "out.jsonl"),
    ("data prepare --input in.jsonl --output out.jsonl", "out.jsonl.bad.jsonl"),
    (SERVERS, "out.jsonl"),
    (SERVERS, "out.jsonl.json"),
    (f"{SERVERS} --resume", "out.jsonl.parts"),
    (f"tune {COSTED} --output out.json", "out.json"),
    (f"calibrate {COSTED} --output out.json", "out.json"),
    (f"calibrate {COSTED} --plot out.png", "out.png"),
    (f"replay {COSTED} --output out.json", "out.json"),
    ("trace sts --trace missing.npz --overwrite --output out.json", "out.json"),
    (f"check {PAIR} --output out.json", "out.json"),
    (f"doctor {PAIR} --output out.json", "out.json"),
    ("latency --shape qwen3-4b --output out.json", "out.json"),
]


@pytest.mark.parametrize(("words", "output"), CASES, ids=[f"{w.split(' --')[0]}-{o}" for w, o in CASES])
def test_an_output_that_is_a_folder_is_told_of_first(tmp_path, monkeypatch, capsys, words, output):
    """The models are missing too: what is told is what was looked at first."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "Hello"}\n')
    np.savez(tmp_path / "in.npz", flat=np.arange(8), lens=np.array([[4, 4]]))
    (tmp_path / output).mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    assert entry(words.split()) == 2
    line = capsys.readouterr().err.strip()
    assert f"{output} is a folder, where a file is to be written" in line and "\n" not in line
    assert sorted(tmp_path.rglob("*")) == before
