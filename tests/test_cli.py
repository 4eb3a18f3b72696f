"""The command line: exit codes, one-line errors, strict JSON, text as it comes. Tiny models, the real entry point."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dloop
from dloop.cli import answer, generate
from dloop.cli.args import build
from dloop.cli.main import COMMANDS, entry
from dloop.records import rebuild, round_record
from dloop.settings import Settings
from dloop.testing import good_drafter, tiny_drafter, tiny_target, write_drafter, write_target

ROOT = Path(__file__).resolve().parents[1]
VOCAB = 260  # 256 bytes and a few special tokens
ANSWER = "漢字 and 🙂 naïve"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
OPTIONS = {
    "demo": "--loop-gate --max-new-tokens --prompts --dtype --device --engine --model --draft-model --json "
    "--no-json --debug "
    "--no-debug",
    "generate": "--model --draft-model --baseline --no-baseline --dtype --device --engine --revision --draft-revision "
    "--loop-gate --gate-sum --gate-state --max-stages --gap-rows --stop-rule --gate-head "
    "--max-new-tokens --stop-token-ids --temperature --top-k --top-p "
    "--seed --verify --exact --no-exact --tree-budget --stage-tree-budget --topk-k --tree-width --tree-beta "
    "--draft-depth --draft-rope-theta --mtp-k --prompt --prompt-file --prompt-ids --messages --chat --no-chat "
    "--json --no-json --debug "
    "--no-debug --trace --no-trace",
    "check": "--model --draft-model --dtype --device --engine --revision --draft-revision --prompt --max-new-tokens "
    "--loop-gate "
    "--max-stages --temperature --seed --json --no-json --debug --no-debug --output",
    "doctor": "--model --draft-model --dtype --device --engine --revision --draft-revision --prompts --max-new-tokens "
    "--json --no-json --debug --no-debug --output",
    "chat": "--model --draft-model --baseline --no-baseline --dtype --device --engine --revision --draft-revision "
    "--loop-gate "
    "--gate-sum --gate-state --max-stages --gap-rows --stop-rule --gate-head "
    "--max-new-tokens --stop-token-ids --temperature --top-k --top-p --seed "
    "--verify --exact --no-exact --tree-budget --stage-tree-budget --topk-k --tree-width --tree-beta --draft-depth "
    "--draft-rope-theta --mtp-k --system --json --no-json --debug --no-debug --trace --no-trace",
    "export": "--draft-model --model --layout --output-dir --max-shard-bytes --overwrite --no-overwrite --revision "
    "--draft-revision --json --no-json --debug --no-debug",
    "bench": "--model --draft-model --baseline --no-baseline --dtype --device --engine --revision --draft-revision "
    "--loop-gate "
    "--gate-sum --gate-state --max-stages --gap-rows --stop-rule --gate-head "
    "--max-new-tokens --stop-token-ids --temperature --top-k --top-p --seed "
    "--verify --exact --no-exact --tree-budget --stage-tree-budget --topk-k --tree-width --tree-beta --draft-depth "
    "--draft-rope-theta --mtp-k --dataset --data-dir --max-samples --beside --chat --no-chat --json --no-json --debug "
    "--no-debug --output-dir "
    "--overwrite --no-overwrite",
    "report": "--results --name --calibrations --train-runs --compare --json --no-json --debug --no-debug --tables "
    "--gain --markdown --plot",
    "latency": "--shape --rows --context --repeats --dtype --device --seed --peers --replay --replay-rounds "
    "--synthetic-acceptance --synthetic-stages --json --no-json --debug --no-debug --output --resume --no-resume "
    "--plot",
    "trace": "--json --no-json --debug --no-debug",
    "replay": "--trace --gate-sum --max-stages --costs --cost-context --cost-engine --stage-ms --verify-ms "
    "--loop-gate --stop-rule --json --no-json --debug --no-debug --output --plot",
    "calibrate": "--trace --gate-sum --max-stages --costs --cost-context --cost-engine --stage-ms --verify-ms --at "
    "--loop-gate --json --no-json --debug --no-debug --output --plot",
    "tune": "--trace --gate-sum --max-stages --costs --cost-context --cost-engine --stage-ms --verify-ms --loop-gate "
    "--json --no-json --debug --no-debug --output --draft-model",
    "data": "--model --dtype --device --engine --revision --prompts --output --chat-template --max-prompt-tokens "
    "--max-samples --max-new-tokens --temperature --top-k --top-p --seed --live --shard --resume --no-resume --json "
    "--no-json --debug --no-debug",
    "train": "--target-model-path --target-model-backend --draft-init-path --draft-config-path --init-layers "
    "--draft-rope-theta --train-data-path --chat-template --strict-data --no-strict-data --on-the-fly-loader "
    "--no-on-the-fly-loader --max-length "
    "--eval-data-path --eval-samples --eval-max-new-tokens --eval-gate --output-dir --resume --no-resume "
    "--num-epochs --max-steps --batch-size --accumulation-steps --learning-rate --warmup-ratio --max-grad-norm "
    "--seed --log-interval --save-interval --keep-last --report-to --parallel --dist-timeout --dry-run "
    "--no-dry-run --profile --no-profile --peak-tflops "
    "--num-anchors --loss-decay-gamma --position-offset-max "
    "--dspark-ce-loss-alpha --dspark-l1-loss-alpha --dspark-confidence-head-alpha --lambda-base-start "
    "--lambda-base-decay-ratio --dloop-max-stage --dloop-loss-weight --ttt-length-dist --loss-mask-shift "
    "--gap-rows --dtype --device --attention --gradient-checkpointing --no-gradient-checkpointing --cache-features "
    "--no-cache-features --compile --no-compile --cuda-graphs --no-cuda-graphs --json --no-json --debug --no-debug",
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, so that every longer character is split."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=TEMPLATE)


@dataclasses.dataclass(frozen=True)
class Folders:
    """A tiny target with a tokenizer, a drafter that is mostly right on one text, and the text's prompt."""

    target: Path
    drafter: Path
    other: Path  # a drafter for another vocabulary

    @property
    def words(self) -> list[str]:
        return [
            "--model",
            str(self.target),
            "--draft-model",
            str(self.drafter),
            "--dtype",
            "float32",
            "--max-new-tokens",
            "40",
        ]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tiny matrices gain nothing from a second thread and wait for it on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Folders:
    home = tmp_path_factory.mktemp("tiny")
    target = tiny_target(vocab_size=VOCAB)
    write_target(target, home / "target")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(home / "target")
    ids = tokenizer("Hello")["input_ids"]
    text = dloop.generate_autoregressive(target, ids, max_new_tokens=40).tokens
    write_drafter(good_drafter(target, [ids + text]), home / "drafter", "specforge")
    write_drafter(tiny_drafter(tiny_target()), home / "other", "specforge")
    return Folders(home / "target", home / "drafter", home / "other")


@pytest.fixture
def broken(tiny, tmp_path):
    """A copy of the target or the drafter to be spoilt."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(getattr(tiny, name), tmp_path / name))

    return copy


def shell(*words: str) -> subprocess.CompletedProcess[str]:
    """The command as users run it, piped."""
    return subprocess.run(
        [sys.executable, "-m", "dloop", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        encoding="utf-8",
        errors="replace",
    )


def refused(capsys, *words: str) -> str:
    """Run a command line that must end with 2 and one line on standard error; give the line."""
    assert entry(words) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    return err


# the front door


def test_help_lists_the_commands_fast_and_without_torch():
    code = "import sys; from dloop.cli.main import entry; entry(['--help']); sys.exit('torch' in sys.modules)"
    times = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        times.append(time.perf_counter() - started)
        assert done.returncode == 0
    assert min(times) < 0.5
    for name, (_, about) in COMMANDS.items():
        assert f"  {name} " in done.stdout and about in done.stdout


@pytest.mark.parametrize("name", OPTIONS)
def test_help_of_a_command_needs_no_torch(name):
    code = (
        f"import sys; from dloop.cli.main import entry; entry([{name!r}, '--help']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("words", [[], ["--help"], ["help"], ["generate", "--help"], ["--version"]])
def test_asking_for_help_is_no_error(words, capsys):
    assert entry(words) == 0
    assert capsys.readouterr().out


def test_the_version_is_the_packages(capsys):
    entry(["--version"])
    assert capsys.readouterr().out == f"dloop {dloop.__version__}\n"


@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_are_these(name):
    command = import_module(COMMANDS[name].module).Command
    assert build(command, f"dloop {name}").flags == tuple(OPTIONS[name].split())


def test_generate_takes_every_argument_of_the_api_with_its_default():
    flags = {field.name: field.default for field in dataclasses.fields(generate.Command)}
    for field in dataclasses.fields(Settings):
        assert flags[field.name] == field.default, field.name


# errors


def test_an_unknown_command_names_its_neighbour(capsys):
    assert "did you mean generate?" in refused(capsys, "genrate")
    assert "choose one of demo, generate" in refused(capsys, "xyz")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--draft-mode", "x"], "did you mean --draft-model"),
        (["--loop-gate", "x"], "expected NUMBER"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", " \n"], "the prompt is empty"),
        (["--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt cannot be read"),
        (["--prompt", "a", "--prompt-ids", "1"], "--prompt and --prompt-ids are both prompts"),
        (["--prompt-ids", ""], "the prompt is empty"),
        (["--prompt-ids", "1,999"], "outside the vocabulary"),
        (["--prompt-ids", "1", "--max-new-tokens", "5000"], "exceed the context"),
        (["--prompt", "x" * 300], "exceed the context"),
        (["--prompt-ids", "1", "--max-new-tokens", "0"], "max_new_tokens=0 must be at least 1"),
        (["--prompt-ids", "1", "--max-stages", "0"], "max_stages=0 must be at least 1"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature=-1.0 must be"),
        (["--prompt-ids", "1", "--loop-gate", "nan"], "loop_gate=nan is not a threshold"),
        (["--prompt-ids", "1", "--tree-budget", "-1"], "tree_budget=-1 must be 'host' or"),
        (["--prompt-ids", "1", "--stage-tree-budget", "8"], "further stages are trees only where the first one is"),
        (["--prompt-ids", "1", "--mtp-k", "3"], "mtp_k=3 does not apply"),
        (["--prompt-ids", "1", "--exact"], "exact=True needs"),
        (["--prompt-ids", "1", "--device", "tpu9"], "tpu9"),
        (["--messages", "[]"], "--messages must be a JSON list"),
        (["--messages", '[{"role": "user", "content": "a"}]', "--no-chat"], "--messages needs the chat template"),
        (["--prompt-ids", "1", "--baseline"], "--draft-model means nothing with --baseline"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_users_error_is_one_line_and_2(tiny, words, message, capsys):
    line = refused(capsys, "generate", *tiny.words, *words)
    assert line.startswith("dloop generate: error: ") and message in line


def test_a_missing_drafter_names_both_ways_out(tiny, capsys):
    line = refused(capsys, "generate", "--model", str(tiny.target), "--prompt-ids", "1")
    assert "--draft-model" in line and "--baseline" in line


def test_flags_of_the_loop_mean_nothing_without_a_drafter(tiny, capsys):
    words = ["generate", "--model", str(tiny.target), "--baseline", "--prompt-ids", "1", "--loop-gate", "-0.5"]
    assert "--loop-gate means nothing with --baseline" in refused(capsys, *words)


def models_refused(capsys, target: Path, drafter: Path) -> str:
    words = ["--model", str(target), "--draft-model", str(drafter), "--dtype", "float32"]
    words += ["--prompt-ids", "1", "--max-new-tokens", "9"]
    return refused(capsys, "generate", *words)


def test_models_that_do_not_fit_are_refused(tiny, capsys, tmp_path):
    assert "a vocabulary of 97 tokens" in models_refused(capsys, tiny.target, tiny.other)
    assert "is neither a folder here nor a hub id" in models_refused(capsys, tmp_path / "none", tiny.drafter)
    assert "is a drafter" in models_refused(capsys, tiny.drafter, tiny.drafter)
    assert "supported families: dflash, dspark, domino" in models_refused(capsys, tiny.target, tiny.target)
    assert "is a file" in models_refused(capsys, tiny.target, tiny.drafter / "config.json")


def test_a_drafter_of_another_family_is_named(tiny, broken, capsys):
    drafter = broken("drafter")
    config = json.loads((drafter / "config.json").read_text())
    config["architectures"] = ["DFlash2DraftModel"]
    (drafter / "config.json").write_text(json.dumps(config))
    assert "a DFlash 2 drafter" in models_refused(capsys, tiny.target, drafter)
    config["architectures"] = ["DFlashDraftModel"]
    del config["dflash_config"]["projector_type"]
    (drafter / "config.json").write_text(json.dumps(config))
    assert "its config says dflash, its tensor markov_head." in models_refused(capsys, tiny.target, drafter)


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_pickled_weights_are_refused_with_the_conversion(tiny, broken, capsys, name):
    folder = broken(name)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    folders = {"target": tiny.target, "drafter": tiny.drafter, name: folder}
    line = models_refused(capsys, folders["target"], folders["drafter"])
    assert "pytorch_model.bin" in line and "save_file" in line


@pytest.mark.parametrize("name", ["target", "drafter"])
def test_weights_that_are_no_numbers_are_refused(tiny, broken, capsys, name):
    folder = broken(name)
    tensors = load_file(folder / "model.safetensors")
    tensors[sorted(tensors)[-1]].view(-1)[0] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    folders = {"target": tiny.target, "drafter": tiny.drafter, name: folder}
    line = models_refused(capsys, folders["target"], folders["drafter"])
    assert "not finite" in line or "NaN" in line


def test_debug_shows_the_traceback(tiny, capsys):
    assert entry(["generate", *tiny.words, "--prompt-ids", "1,999", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err and err.splitlines()[-1].startswith("dloop generate: error: ")


def test_a_failed_run_is_1_and_one_line(tiny, capsys, monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError("the disk\nis full")

    monkeypatch.setattr(answer, "start", fail)
    assert entry(["generate", *tiny.words, "--prompt-ids", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "dloop generate: failed: RuntimeError: the disk is full; --debug shows the traceback\n"


def test_an_interrupt_is_130(tiny, capsys, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(answer, "start", interrupt)
    assert entry(["generate", *tiny.words, "--prompt-ids", "1"]) == 130
    assert capsys.readouterr().err.split() == ["dloop", "generate:", "interrupted"]


def test_a_closed_pipe_is_quiet(tiny):
    command = f"{sys.executable} -m dloop generate {' '.join(tiny.words)} --prompt Hello | head -c 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True)
    assert done.stderr == b""


# what generate says


def test_the_text_goes_to_standard_output_and_one_line_of_numbers_beside_it(tiny, capsys):
    assert entry(["generate", *tiny.words, "--prompt", "Hello", "--no-chat", "--max-new-tokens", "40"]) == 0
    out, err = capsys.readouterr()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.target)
    target = dloop.load_target(str(tiny.target), dtype="float32")
    tokens = dloop.generate_autoregressive(target, tokenizer("Hello")["input_ids"], max_new_tokens=40).tokens
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    assert out == text + ("" if text.endswith("\n") else "\n")
    assert err.count("\n") == 1
    for piece in ("40 tokens", "ended by length", "tokens/s", "tau ", "rounds of accepted + 1", "stages >= 2"):
        assert piece in err


def test_the_text_comes_round_by_round(tiny, monkeypatch):
    written: list[str] = []

    class Listener(io.StringIO):
        def write(self, text: str) -> int:
            written.append(text)
            return super().write(text)

    monkeypatch.setattr(sys, "stdout", Listener())
    assert entry(["generate", *tiny.words, "--prompt", "Hello", "--no-chat"]) == 0
    pieces = [text for text in written if text not in ("", "\n")]
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny.target)
    target = dloop.load_target(str(tiny.target), dtype="float32")
    drafter = dloop.load_drafter(str(tiny.drafter), target)
    out = dloop.generate(target, drafter, tokenizer("Hello")["input_ids"], max_new_tokens=40)
    assert "".join(pieces) == tokenizer.decode(out.tokens)
    assert len(out.rounds) / 2 < len(pieces) <= len(out.rounds) + 2  # some rounds end inside a character


def generated(capsys, *words: str) -> dict:
    assert entry(["generate", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


@pytest.mark.parametrize("gate", ["1.0", "-0.5", "-inf"])
def test_json_is_one_strict_document_that_agrees_with_python(tiny, capsys, gate):
    document = generated(
        capsys, *tiny.words, "--prompt", "Hello", "--no-chat", "--loop-gate", gate, "--max-new-tokens", "40"
    )
    target = dloop.load_target(str(tiny.target), dtype="float32")
    drafter = dloop.load_drafter(str(tiny.drafter), target)
    out = dloop.generate(target, drafter, document["prompt_ids"], max_new_tokens=40, loop_gate=float(gate))
    assert document["tokens"] == out.tokens and document["first"] == out.first
    assert document["finish_reason"] == out.finish_reason == "length"
    assert document["acceptance_length"] == pytest.approx(out.acceptance_length)
    timeless = [{**record, "draft_s": 0, "verify_s": 0} for record in document["rounds"]]
    assert timeless == [{**round_record(r), "draft_s": 0, "verify_s": 0} for r in out.rounds]
    rebuilt = rebuild(document["first"], document["rounds"])
    assert rebuilt.tokens == document["tokens"]
    assert rebuilt.acceptance_length == pytest.approx(document["acceptance_length"])
    assert document["setting"]["loop_gate"] == (gate if gate == "-inf" else float(gate))


def test_json_is_complete(tiny, capsys):
    document = generated(capsys, *tiny.words, "--prompt", "Hello", "--max-new-tokens", "20")
    assert set(document) == set(
        "schema target draft family setting prompt_ids prompt_sha256 tokens text first finish_reason seed "
        "acceptance_length tokens_per_s exact rounds versions hardware dtype device engine attention".split()
    )
    assert document["schema"] == 1 and document["family"] == "dspark" and document["dtype"] == "float32"
    assert {"dloop", "python", "torch", "transformers"} <= set(document["versions"])
    assert document["setting"]["gap_rows"] == "producing"
    assert document["text"] == PreTrainedTokenizerFast.from_pretrained(tiny.target).decode(document["tokens"])


def test_the_baseline_has_no_drafter_and_the_same_text(tiny, capsys):
    words = ["--prompt", "Hello", "--no-chat", "--max-new-tokens", "40"]
    loop = generated(capsys, *tiny.words, "--loop-gate", "-inf", "--max-stages", "2", *words)
    plain = generated(capsys, "--model", str(tiny.target), "--dtype", "float32", "--baseline", *words)
    assert plain["tokens"] == loop["tokens"]
    assert plain["draft"] is None and plain["family"] is None and plain["acceptance_length"] == 1.0


def test_what_a_gate_learned_goes_from_run_to_run(tiny, capsys, tmp_path):
    words = ["generate", *tiny.words, "--prompt", "Hello", "--loop-gate", "auto", "--json"]
    kept, rounds = tmp_path / "gate.json", 0
    for _ in range(2):
        assert entry([*words, "--gate-state", str(kept)]) == 0
        made = json.loads(capsys.readouterr().out)
        rounds += len(made["rounds"])
        (state,) = json.loads(kept.read_text())["gates"].values()
        assert state["rounds"] == rounds and made["setting"]["loop_gate"] == "auto"
    assert made["setting"]["gate_state"] == str(kept)
    kept.write_text("nothing")
    assert entry([*words, "--gate-state", str(kept)]) == 2
    assert "keeps no gate's state" in capsys.readouterr().err
    assert entry([*words[:-3], "--loop-gate", "-0.5", "--gate-state", str(kept)]) == 2
    assert "--gate-state keeps what --loop-gate auto learns" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "place", "message"),
    [
        *((command, "no/gate.json", "in a folder that is there") for command in ("generate", "chat", "bench")),
        *((command, ".", "is a folder, where a file") for command in ("generate", "chat", "bench")),
        ("bench", "gate.json", "no gate's state"),  # others read it when they have loaded, and then write it
        ("bench", "none.json", "cannot be read"),
    ],
)
def test_a_gate_s_state_that_will_not_do_is_told_of_before_anything_is_loaded(
    tmp_path, capsys, command, place, message
):
    (tmp_path / "gate.json").write_text("nothing")
    (tmp_path / "mine.jsonl").write_text('{"turns": ["Hello"]}\n')
    data = ["--dataset", "mine", "--data-dir", str(tmp_path)]
    words = [command, "--model", "missing", "--draft-model", "missing", "--loop-gate", "auto"]
    words += {"generate": ["--prompt", "Hello"], "chat": [], "bench": data}[command]
    assert entry([*words, "--gate-state", str(tmp_path / place)]) == 2
    line = capsys.readouterr().err.strip()
    assert message in line and "\n" not in line


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_nothing_is_decoded_where_the_gate_s_state_cannot_be_written(tiny, capsys, monkeypatch, command):
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\n"))
    words = [*tiny.words, *(["--prompt", "Hello"] if command == "generate" else [])]
    assert entry([command, *words, "--loop-gate", "auto", "--gate-state", "/proc/gate.json"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "/proc/gate.json cannot be written" in err


def test_a_text_of_one_token_has_no_speed(tiny, capsys):
    document = generated(capsys, *tiny.words, "--prompt", "Hello", "--max-new-tokens", "1")
    assert document["tokens_per_s"] is None and document["acceptance_length"] is None and document["rounds"] == []
    assert entry(["generate", *tiny.words, "--prompt", "Hello", "--max-new-tokens", "1"]) == 0


def test_sampling_repeats_with_its_recorded_seed(tiny, capsys):
    words = [*tiny.words, "--prompt", "Hello", "--temperature", "1", "--max-new-tokens", "12"]
    first = generated(capsys, *words)
    again = generated(capsys, *words, "--seed", str(first["seed"]))
    assert first["tokens"] == again["tokens"]


@pytest.mark.parametrize(
    ("words", "rendered"),
    [
        (["--prompt", "Hi"], "<user>Hi<assistant>"),
        (["--prompt", "Hi", "--chat"], "<user>Hi<assistant>"),
        (["--prompt", "Hi", "--no-chat"], "Hi"),
        (
            ["--messages", '[{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]'],
            "<system>A<user>B<assistant>",
        ),
    ],
)
def test_prompts_go_through_the_chat_template_where_there_is_one(tiny, capsys, words, rendered):
    document = generated(capsys, *tiny.words, *words, "--max-new-tokens", "1")
    assert document["prompt_ids"] == byte_tokenizer()(rendered)["input_ids"]


@pytest.mark.parametrize("how", ["file", "dash", "pipe"])
def test_a_prompt_comes_from_a_file_or_standard_input(tiny, tmp_path, monkeypatch, capsys, how):
    file = tmp_path / "prompt.txt"
    file.write_text(f"{ANSWER}\n")
    monkeypatch.setattr(sys, "stdin", file.open())
    words = {"file": ["--prompt-file", str(file)], "dash": ["--prompt-file", "-"], "pipe": []}[how]
    document = generated(capsys, *tiny.words, "--no-chat", "--max-new-tokens", "1", *words)
    assert document["prompt_ids"] == byte_tokenizer()(ANSWER)["input_ids"]


@pytest.mark.parametrize("content", [b"", b"\n", None, b"\xff\xfe"])
def test_standard_input_without_a_text_is_refused(tiny, tmp_path, monkeypatch, capsys, content):
    file = tmp_path / "prompt.txt"
    file.write_bytes(content or b"")
    monkeypatch.setattr(sys, "stdin", open(os.devnull if content is None else file))
    line = refused(capsys, "generate", *tiny.words)
    assert "the prompt is empty" in line or "standard input cannot be read" in line


def test_the_offline_target_has_a_prompt_and_a_drafter_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", open(os.devnull))
    command = generate.Command(model="smollm2")
    assert generate.drafter_name(command) == "demo"
    assert generate.read_prompt(command).text == generate.DEFAULT_PROMPT
    err = capsys.readouterr().err
    assert "--draft-model demo" in err and generate.DEFAULT_PROMPT in err


def test_without_a_tokenizer_ids_go_in_and_out(goldens, capsys):
    case = goldens / "dspark"
    words = ["--model", str(case / "target"), "--draft-model", str(case / "draft"), "--dtype", "float32"]
    expected = json.loads((case / "expected.json").read_text())["samples"][0]
    prompt = ",".join(map(str, json.loads((case / "case.json").read_text())["prompts"][0]))
    words += ["--prompt-ids", prompt, "--max-new-tokens", "64", "--stop-token-ids", "2", "--loop-gate", "-0.5"]
    assert entry(["generate", *words]) == 0
    assert capsys.readouterr().out.split() == list(map(str, expected["ar_output_ids"]))
    assert generated(capsys, *words)["text"] is None
    assert "has no tokenizer" in refused(capsys, "generate", *words[:6], "--prompt", "Hello")


def test_the_trace_goes_to_standard_error_without_colour_when_piped(tiny):
    done = shell("generate", *tiny.words, "--prompt", "Hello", "--trace", "--loop-gate", "-2", "--max-new-tokens", "20")
    assert done.returncode == 0
    assert "\x1b" not in done.stderr
    assert "round" in done.stderr and "drafted in stage" in done.stderr and "round" not in done.stdout


def test_a_useless_drafter_is_told_once(tiny, capsys, tmp_path):
    drafter = write_drafter(tiny_drafter(tiny_target(vocab_size=VOCAB)), tmp_path / "useless", "specforge")
    words = ["--model", str(tiny.target), "--draft-model", str(drafter), "--dtype", "float32", "--prompt-ids", "40"]
    assert entry(["generate", *words, "--max-new-tokens", "60"]) == 0
    assert capsys.readouterr().err.count("contributes nothing") == 1


# demo


def test_the_demo_is_plain_text_when_piped_and_honest(tiny):
    words = [
        "--model",
        str(tiny.target),
        "--draft-model",
        str(tiny.drafter),
        "--max-new-tokens",
        "16",
        "--prompts",
        "2",
    ]
    done = shell("demo", *words, "--dtype", "float32")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and done.stderr == ""
    assert max(map(len, done.stdout.splitlines())) <= 80
    for piece in ("plain", "host", "loop", "speed-up", "Lossless", "Break-even", "drafted in stage"):
        assert piece in done.stdout


def test_the_demo_as_json_holds_every_run(tiny, capsys):
    words = [
        "--model",
        str(tiny.target),
        "--draft-model",
        str(tiny.drafter),
        "--max-new-tokens",
        "16",
        "--prompts",
        "1",
    ]
    assert entry(["demo", *words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [(row["prompt"], row["way"]) for row in document["rows"][:3]] == [
        ("json", w) for w in ("plain", "host", "loop")
    ]
    for run in document["runs"]:
        assert rebuild(run["first"], run["rounds"]).tokens == run["tokens"]
    assert document["float32_control"]["difference"] is None and document["lossless"]


def test_the_demo_takes_the_faster_number_of_threads_and_says_so(tiny, capsys):
    torch.set_num_threads(2)
    words = ["--model", str(tiny.target), "--draft-model", str(tiny.drafter), "--max-new-tokens", "4", "--prompts", "1"]
    assert entry(["demo", *words, "--dtype", "float32", "--json"]) == 0
    chosen = torch.get_num_threads()
    torch.set_num_threads(1)
    assert json.loads(capsys.readouterr().out)["hardware"]["threads"] == chosen


def test_a_fault_of_the_demo_is_1(tiny, capsys, monkeypatch):
    from dloop.cli import race

    right = race.Match.__call__

    def wrong(self, draft, logits):
        """A verifier that accepts whatever was drafted first."""
        verdict = right(self, draft, logits)
        return (
            dataclasses.replace(verdict, path=[1], bonus=int(logits[1].argmin())) if len(draft.tokens) > 1 else verdict
        )

    monkeypatch.setattr(race.Match, "__call__", wrong)
    words = [
        "--model",
        str(tiny.target),
        "--draft-model",
        str(tiny.drafter),
        "--max-new-tokens",
        "16",
        "--prompts",
        "1",
    ]
    assert entry(["demo", *words, "--dtype", "float32"]) == 1
    out, err = capsys.readouterr()
    assert "Mismatch" in out and "not plain decoding's text" in err


@pytest.mark.parametrize("words", [["--prompts", "5"], ["--prompts", "0"], ["--max-new-tokens", "0"]])
def test_the_demo_refuses_what_it_cannot_do(tiny, words, capsys):
    refused(capsys, "demo", "--model", str(tiny.target), "--draft-model", str(tiny.drafter), *words)


def test_bytes_that_are_no_text_are_refused(tiny, capsys):
    assert entry(["generate", "--model", str(tiny.target), "--baseline", "--prompt", "a\udcff"]) == 2
    assert "UTF-8" in capsys.readouterr().err


def test_a_device_that_cannot_decode_is_refused(tiny, capsys):
    assert entry(["generate", "--model", str(tiny.target), "--baseline", "--prompt-ids", "5", "--device", "meta"]) == 2
    assert "meta" in capsys.readouterr().err
