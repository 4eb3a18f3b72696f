"""The published training command: it parses, means what it says, and refuses by name what is not offered."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dloop.cli import train
from dloop.cli.args import parse
from dloop.cli.train_script import TAKEN, Published, forwarded
from dloop.errors import UserError
from dloop.testing import tiny_drafter, tiny_target, write_drafter, write_target

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {name: ROOT / "scripts" / f"{name}.py" for name in ("train_dflash", "train_domino", "train_eagle3")}
SCRIPT = SCRIPTS["train_dflash"]
EXAMPLES = ROOT / "examples"
PUBLISHED = r"""
torchrun --nnodes $NNODES --node_rank $NODE_RANK --master_addr $MASTER_ADDR \
    --master_port $MASTER_PORT --nproc_per_node 8 scripts/train_dflash.py \
    --target-model-path Qwen/Qwen3-4B \
    --target-model-backend hf \
    --draft-init-path deepseek-ai/dspark_qwen3_4b_block7 \
    --train-data-path ./cache/dataset/perfectblend_qwen3-4b_regen.jsonl \
    --on-the-fly-loader \
    --chat-template qwen \
    --max-length 4096 \
    --output-dir ./outputs/dloop-dspark-qwen3-4b \
    --num-epochs 1 --batch-size 1 \
    --learning-rate 6e-4 --warmup-ratio 0.04 --max-grad-norm 1.0 --seed 42 \
    --attention-backend flex_attention \
    --num-anchors 512 --loss-decay-gamma 4.0 \
    --dloop-max-stage 3 --dloop-loss-weight 0.25
"""
NEEDED = ["--target-model-path", "T", "--draft-init-path", "D", "--train-data-path", "d.jsonl", "--output-dir", "O"]


def words_after_script(text: str) -> list[str]:
    words = shlex.split(text.replace("\\\n", " "))
    return words[words.index("scripts/train_dflash.py") + 1 :]


def train_command(words: list[str]) -> train.Command:
    """What `dloop train` makes of a published command line."""
    return parse(train.Command, "dloop train", forwarded("train_dflash.py", words))


def test_the_published_command_parses_and_means_what_it_says(capsys):
    command = train_command(words_after_script(PUBLISHED))
    assert command == train.Command(
        target_model_path="Qwen/Qwen3-4B",
        draft_init_path="deepseek-ai/dspark_qwen3_4b_block7",
        train_data_path=Path("cache/dataset/perfectblend_qwen3-4b_regen.jsonl"),
        chat_template="qwen",
        on_the_fly_loader=True,
        max_length=4096,
        output_dir=Path("outputs/dloop-dspark-qwen3-4b"),
        num_epochs=1,
        batch_size=1,
        learning_rate=6e-4,
        warmup_ratio=0.04,
        max_grad_norm=1.0,
        seed=42,
        num_anchors=512,
        loss_decay_gamma=4.0,
        dloop_max_stage=3,
        dloop_loss_weight=0.25,
    )
    assert capsys.readouterr().err == ""


def test_the_published_defaults_hold_where_a_flag_is_left_out():
    command = train_command(NEEDED)
    assert (command.num_epochs, command.chat_template, command.loss_decay_gamma) == (6, "qwen", float("inf"))
    assert (command.max_length, command.save_interval, command.log_interval, command.seed) == (3072, 1000, 50, 42)


def test_the_published_flags_of_dflash_and_domino_arrive():
    """`--position-offset-max`, and what `train_domino.py` adds."""
    words = "--position-offset-max 28672 --dloop-max-stage 0 --lambda-base-start 0.8 --lambda-base-decay-ratio 1.0"
    command = train_command([*NEEDED, *words.split()])
    assert (command.position_offset_max, command.dloop_max_stage) == (28672, 0)
    assert (command.lambda_base_start, command.lambda_base_decay_ratio) == (0.8, 1.0)
    bare = train_command(NEEDED)
    assert (bare.position_offset_max, bare.lambda_base_start, bare.lambda_base_decay_ratio) == (0, 1.0, 0.5)
    for family in ("dflash", "dspark", "domino"):
        train_command([*NEEDED, "--loss-type", family])


def test_evaluation_and_trackers_are_passed_on():
    command = train_command([*NEEDED, "--eval-data-path", "held.jsonl", "--report-to", "tensorboard"])
    assert (command.eval_data_path, command.report_to) == (Path("held.jsonl"), "tensorboard")
    assert train_command([*NEEDED, "--report-to", "none"]).report_to == "csv"
    with pytest.raises(UserError, match="--report-to"):
        train_command([*NEEDED, "--report-to", "wandb"])


def test_every_flag_arrives():
    words = [
        "--init-layers",
        "2,3",
        "--resume",
        "--gap-rows",
        "position",
        "--strict-data",
        "--max-steps",
        "7",
        "--json",
    ]
    command = train_command([*NEEDED, *words, "--chat-template", "model"])
    assert command.init_layers == (2, 3) and command.resume and command.gap_rows == "position" and command.json
    assert command.strict_data and command.max_steps == 7 and command.chat_template == "model"


@pytest.mark.parametrize("backend", ["sdpa", "flex_attention", "eager"])
def test_every_attention_backend_is_taken_and_told(backend, capsys):
    command = train_command([*NEEDED, "--attention-backend", backend])
    assert command.attention == "dense"
    assert capsys.readouterr().err.count("SDPA is used") == (backend == "eager")


@pytest.mark.parametrize(
    "words",
    [
        "--is-preformatted",
        "--trust-remote-code",
        "--tp-size 2",
        "--embedding-key wte.weight",
        "--lm-head-key head",
        "--loss-type dpace",
        "--dpace-alpha 0.7",
    ],
)
def test_what_is_not_offered_is_refused_with_the_way_out(words):
    flag = words.split()[0]
    with pytest.raises(UserError, match=f"^{re.escape(words)} is not offered: .+"):
        forwarded("train_dflash.py", [*NEEDED, *words.split()])
    assert flag.removeprefix("--").replace("-", "_") in TAKEN


def test_what_means_nothing_here_is_taken():
    words = "--dataloader-num-workers 4 --build-dataset-num-proc 8 --cache-dir c --dist-timeout 9 --eval-interval 5"
    assert train_command([*NEEDED, *words.split(), "--tp-size", "1", "--lm-head-key", "lm_head.weight"])
    with pytest.raises(UserError, match="not a flag"):
        parse(Published, "x", [*NEEDED, "--sglang-mem-fraction-static", "0.4"])


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    home = tmp_path_factory.mktemp("script")
    target = tiny_target("llama")
    write_target(target, home / "target")
    write_drafter(tiny_drafter(target), home / "drafter", "deepspec")
    for family in ("dflash", "domino"):
        write_drafter(tiny_drafter(target, family=family), home / family, "dflash")
    np.savez(home / "t.npz", flat=np.arange(3, 93, dtype=np.uint16), lens=np.array([[5, 25]] * 3))
    return home


def of(folders, *more) -> list[str]:
    return [
        "--target-model-path", str(folders / "target"), "--draft-init-path", str(folders / "drafter"),
        "--train-data-path", str(folders / "t.npz"), "--output-dir", str(folders / "out"), *more,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "right", "wrong"), [("--block-size", 4, 16), ("--num-draft-layers", 2, 1), ("--mask-token-id", 96, 95)]
)
def test_the_drafters_shape_is_checked_against_its_config(folders, flag, right, wrong):
    forwarded("x", of(folders, flag, str(right)))
    forwarded("x", of(folders, "--draft-init-path", str(folders / "domino"), flag, str(right)))
    with pytest.raises(UserError, match=f"{flag} {wrong} is not the drafter's, whose config says {right}"):
        forwarded("x", of(folders, flag, str(wrong)))


def test_the_script_trains_and_fails_in_one_line(folders):
    def run(*more: str, **env: str) -> subprocess.CompletedProcess[str]:
        words = of(folders, "--max-steps", "1", "--num-anchors", "2", "--dtype", "float32", "--device", "cpu", *more)
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **env}
        return subprocess.run([sys.executable, str(SCRIPT), *words], env=env, capture_output=True, text=True)

    done = run("--attention-backend", "sdpa")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).name.endswith("_step_1")
    for more, env, message in [
        (["--tp-size", "2"], {}, "train_dflash.py: error: --tp-size 2"),
        (["--target-model-backend", "sglang", "--attention-backend", "sdpa"], {}, "--target-model-backend sglang"),
        (["--attention-backend", "sdpa"], {"WORLD_SIZE": "8"}, "WORLD_SIZE=8"),
    ]:
        done = run(*more, **env)
        assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def loaded(name: str):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, SCRIPTS[name])
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_script_is_a_thin_forwarder_with_help(name, capsys):
    assert len(SCRIPTS[name].read_text().splitlines()) <= 30
    assert loaded(name).main(["--help"]) == 0
    assert "--dloop-max-stage" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "family"), [("train_dflash", "dflash"), ("train_domino", "domino")])
def test_each_script_trains_its_family_with_and_without_the_loop(folders, name, family, tmp_path, capsys):
    given = ["--draft-init-path", str(folders / family), "--max-steps", "1", "--num-anchors", "2", "--dtype", "float32"]
    for stage in ("0", "2"):
        out = tmp_path / stage
        more = ["--device", "cpu", "--dloop-max-stage", stage, "--output-dir", str(out)]
        assert loaded(name).main(of(folders, *given, *more)) == 0
        assert Path(capsys.readouterr().out.strip()).parent == out
    assert loaded(name).main(of(folders, *given, "--tp-size", "2")) == 2
    assert f"{name}.py: error: --tp-size 2" in capsys.readouterr().err


# the examples


def example(tmp_path, *words: str, host: str = "dspark", **env: str) -> subprocess.CompletedProcess[str]:
    """Run a host's example with a torchrun that only shows what it was given."""
    (tmp_path / "torchrun").write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **env}
    return subprocess.run(
        ["bash", str(EXAMPLES / f"run_dloop_{host}.sh"), *words], env=env, cwd=tmp_path, capture_output=True, text=True
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("size", ["4B", "8B"])
def test_the_example_is_the_published_command(tmp_path, size):
    given = example(tmp_path, size, DATA="d.jsonl").stdout.split("\n")[:-1]
    at = given.index(str(SCRIPT))
    published = PUBLISHED.replace("4B", size).replace("4b", size.lower())
    published = published.replace(f"./cache/dataset/perfectblend_qwen3-{size.lower()}_regen.jsonl", "d.jsonl")
    assert given[at + 1 :] == words_after_script(published)
    assert given[:at] == shlex.split(
        "--nnodes 1 --node_rank 0 --master_addr 127.0.0.1 --master_port 29500 --nproc_per_node 1"
    )


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("host", "script", "drafter", "own"),
    [
        ("dflash", "train_dflash", "z-lab/Qwen3-8B-DFlash-b16", {"position_offset_max": 28672, "num_anchors": 512}),
        ("domino", "train_domino", "Huang2020/Qwen3-8B-Domino-b16", {"dloop_loss_weight": 0.25, "num_anchors": 256}),
    ],
)
def test_the_examples_of_the_other_hosts_parse(tmp_path, host, script, drafter, own):
    given = example(tmp_path, "8B", host=host, DATA="d.jsonl").stdout.split("\n")[:-1]
    at = given.index(str(SCRIPTS[script]))
    command = train_command(given[at + 1 :])
    assert (command.target_model_path, command.draft_init_path) == ("Qwen/Qwen3-8B", drafter)
    assert (command.loss_decay_gamma, command.dloop_max_stage, command.num_epochs) == (7.0, 3, 1)
    assert command.output_dir == Path(f"outputs/dloop-{host}-qwen3-8b")
    assert {name: getattr(command, name) for name in own} == own


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_example_takes_its_settings_from_the_environment(tmp_path):
    env = {"DATA": "d", "CKPT": "mine", "NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "h", "MASTER_PORT": "9"}
    given = example(tmp_path, "4B", **env).stdout.split("\n")
    assert given[:8] == "--nnodes 2 --node_rank 1 --master_addr h --master_port 9".split()
    assert given[given.index("--draft-init-path") + 1] == "mine"
    for words, env, message in [([], {"DATA": "d"}, "usage"), (["5B"], {"DATA": "d"}, "usage"), (["4B"], {}, "DATA")]:
        done = example(tmp_path, *words, **env)
        assert done.returncode == 2 and message in done.stderr
