"""`dloop bench` end to end on tiny models and hand-written prompts: files, resuming, ranks, failures, speed-ups."""

import dataclasses
import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import dloop
from dloop.bench import decode, run
from dloop.bench.decode import decode_sample, sample_seed
from dloop.bench.measure import Response, figures
from dloop.bench.store import Store, read_samples, slug
from dloop.bench.tasks import chosen
from dloop.cli import bench
from dloop.cli.main import entry
from dloop.records import prompt_sha256, rebuild
from dloop.settings import Settings
from dloop.testing import good_drafter, tiny_target, write_drafter, write_target

ROOT = Path(__file__).resolve().parents[1]
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
QUESTIONS = ["Hello", "Why is it so?", "Count to ten.", "Name a fruit.", "Sing!"]
LENGTH = 24
TIMES = {
    "tokens_per_s",
    "time_per_output_token_ms",
    "time_to_first_token_ms",
    "time_share",
    "peak_memory_bytes",
    "speedup",
    "speedup_reason",
    "ranks",
}
NUMBER = (int, float)
SCHEMA = {  # system.md 3.5, and what else stands in a summary
    "schema": int,
    "target": str,
    "draft": (str, type(None)),
    "family": (str, type(None)),
    "dataset": str,
    "setting_name": str,
    "setting": dict,
    "acceptance_length": NUMBER,
    "acceptance_length_pooled": NUMBER,
    "acceptance_length_accepted_plus_one": NUMBER,
    "acceptance_length_deepspec": NUMBER,
    "accepted_histogram": dict,
    "tokens_per_s": NUMBER,
    "time_per_output_token_ms": NUMBER,
    "time_to_first_token_ms": NUMBER,
    "speedup": (float, type(None)),
    "speedup_reason": (str, type(None)),
    "responses": int,
    "tokens": int,
    "exact": bool,
    "rounds": int,
    "stages": int,
    "stage_counts": dict,
    "draft_passes": int,
    "verified_tokens": int,
    "full_acceptance_rate": dict,
    "output_share_looped": NUMBER,
    "time_share": dict,
    "peak_memory_bytes": int,
    "intervals": dict,
    "repetition_share": NUMBER,
    "failures": int,
    "failure_messages": list,
    "template_sha256": (str, type(None)),
    "thinking": bool,
    "data_sha256": str,
    "subset": dict,
    "samples": list,
    "ranks": int,
    "versions": dict,
    "hardware": dict,
    "dtype": str,
    "engine": str,
    "attention": str,
    "device": str,
    "commit": (str, type(None)),
    "checkpoint_sha256": dict,
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=TEMPLATE)


@dataclasses.dataclass(frozen=True)
class Folders:
    target: Path
    drafter: Path
    data: Path

    def words(self, out: Path, *more: str, dataset: str = "mine") -> list[str]:
        words = ["--draft-model", str(self.drafter), "--max-stages", "3"]
        return [*self.plain_words(out, dataset), *words, *more]

    def plain_words(self, out: Path, dataset: str = "mine") -> list[str]:
        words = ["bench", "--model", str(self.target), "--dtype", "float32", "--dataset", dataset]
        return [*words, "--data-dir", str(self.data), "--output-dir", str(out), "--max-new-tokens", str(LENGTH)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Folders:
    torch.set_num_threads(1)
    home = tmp_path_factory.mktemp("tiny")
    target, tokenizer = tiny_target(vocab_size=260), byte_tokenizer()
    write_target(target, home / "target")
    tokenizer.save_pretrained(home / "target")
    texts = []
    for question in QUESTIONS:
        ids = tokenizer(f"<user>{question}<assistant>")["input_ids"]
        texts.append(ids + dloop.generate_autoregressive(target, ids, max_new_tokens=LENGTH).tokens)
    write_drafter(good_drafter(target, texts), home / "drafter", "specforge")
    data = home / "data"
    data.mkdir()
    write_set(data, "mine", [[question] for question in QUESTIONS])
    write_set(data, "talk", [["Hello", "And then?"], ["Sing!", "Again."]])
    write_set(data, "long", [["Hello"], ["x" * 300], ["Sing!"]])
    write_set(data, "gsm8k", [[question] for question in QUESTIONS])
    return Folders(home / "target", home / "drafter", data)


def write_set(folder: Path, name: str, rows: list[list[str]]) -> None:
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in rows))


def summary_in(out: Path, dataset: str = "mine") -> dict:
    """The only summary of this set below the folder, baselines left out."""
    (path,) = [p for p in out.rglob("summary.json") if dataset in p.parts and "baseline" not in str(p)]
    return json.loads(path.read_text(), parse_constant=pytest.fail)


def responses_in(out: Path, dataset: str = "mine") -> list[Response]:
    (path,) = [p for p in out.rglob("rounds.jsonl") if dataset in p.parts and "baseline" not in str(p)]
    samples = read_samples(path.read_bytes()).samples
    return [response for sample in samples.values() for response in sample]


def without_times(summary: dict) -> dict:
    kept = {key: value for key, value in summary.items() if key not in TIMES}
    kept["intervals"] = {key: value for key, value in kept["intervals"].items() if key != "tokens_per_s"}
    return kept


@pytest.fixture(scope="module")
def measured(tiny, tmp_path_factory) -> Path:
    """A baseline and the loop after it."""
    out = tmp_path_factory.mktemp("results")
    assert entry([*tiny.plain_words(out), "--baseline"]) == 0
    assert entry(tiny.words(out, "--loop-gate", "-2")) == 0
    return out


# what is left behind


def test_the_folders_are_the_published_ones(tiny, measured):
    target, drafter = slug(str(tiny.target)), slug(str(tiny.drafter))
    files = {str(path.relative_to(measured)) for path in measured.rglob("*") if path.is_file()}
    hardware = summary_in(measured)["hardware"]
    device = slug(hardware["gpu"] or hardware["cpu"])
    setting = "dtype=float32,loop-gate=-2,max-stages=3,max-new-tokens=24"
    folders = [f"{target}/baseline--{device}/mine", f"{target}/{drafter}/mine/{setting}"]
    assert files == {f"{folder}/{name}" for folder in folders for name in ("summary.json", "rounds.jsonl")}


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("Qwen/Qwen3-4B", "Qwen--Qwen3-4B"),
        ("./outputs/run/epoch_1_step_2", "outputs--run--epoch_1_step_2"),
        ("NVIDIA H200", "NVIDIA-H200"),
        ("/models/a/", "models--a"),
        ("loop-gate=-0.5,top-k=3", "loop-gate=-0.5,top-k=3"),
    ],
)
def test_names_become_folders(name, folder):
    assert slug(name).removeprefix(".--") == folder


@pytest.mark.parametrize("name", [".", "..", "/", "a/../b", "$(x) `y`"])
def test_no_name_leaves_the_results(name):
    assert "/" not in slug(name) and slug(name) not in (".", "..")


def test_every_key_of_a_summary_has_its_type(measured):
    for path in measured.rglob("summary.json"):
        summary = json.loads(path.read_text(), parse_constant=pytest.fail)
        assert summary.keys() == SCHEMA.keys()
        assert [key for key, kind in SCHEMA.items() if not isinstance(summary[key], kind)] == []
        assert summary["schema"] == 1
        assert summary["time_share"].keys() == {"draft", "verify", "other"}
        assert sum(summary["time_share"].values()) == pytest.approx(1)
        assert all(len(summary["intervals"][key]) == 2 for key in ("acceptance_length", "tokens_per_s"))
        assert summary["checkpoint_sha256"].keys() == {"target", "draft"}
        assert set(summary["versions"]) >= {"dloop", "torch", "transformers"}
        assert summary["subset"]["complete"] is False and summary["samples"] == chosen(5, 5)


def test_the_summary_is_made_again_from_the_rounds(measured):
    summary, responses = summary_in(measured), responses_in(measured)
    again = json.loads(json.dumps(figures(responses)))
    assert {key: summary[key] for key in again} == again
    taus = [rebuild(r.header["first"], r.rounds).acceptance_length for r in responses]
    assert summary["acceptance_length"] == pytest.approx(sum(taus) / len(taus)) and min(taus) > 1
    assert summary["output_share_looped"] > 0 and max(map(int, summary["stage_counts"])) > 1


def test_texts_are_the_targets_own(tiny, measured):
    target, tokenizer = dloop.load_target(str(tiny.target), dtype="float32"), byte_tokenizer()
    responses = responses_in(measured)
    assert [r.header["sample"] for r in responses] == chosen(5, 5)
    for response in responses:
        ids = tokenizer(f"<user>{QUESTIONS[response.header['sample']]}<assistant>")["input_ids"]
        assert response.header["prompt_sha256"] == prompt_sha256(ids)
        assert response.tokens == dloop.generate_autoregressive(target, ids, max_new_tokens=LENGTH).tokens


def test_a_speedup_is_against_the_baseline_beside_it(measured):
    (path,) = [p for p in measured.rglob("summary.json") if "baseline" in str(p)]
    baseline, loop = json.loads(path.read_text()), summary_in(measured)
    slow, fast = baseline["time_per_output_token_ms"], loop["time_per_output_token_ms"]
    assert loop["speedup"] == pytest.approx(slow / fast) and loop["speedup_reason"] is None
    assert baseline["speedup"] is None and baseline["speedup_reason"] == "this is the baseline"
    assert baseline["acceptance_length"] == 1 and baseline["stages"] == 0


def test_without_a_fitting_baseline_the_reason_is_shown(tiny, measured, tmp_path, capsys):
    assert entry(tiny.words(tmp_path, "--max-samples", "1")) == 0
    assert "no speed-up for mine: no baseline: measure it with --baseline" in " ".join(capsys.readouterr().out.split())
    target = slug(str(tiny.target))
    (tmp_path / target).rename(tmp_path / "kept")
    (tmp_path / target).mkdir()
    (baseline,) = (measured / target).glob("baseline--*")
    (tmp_path / target / baseline.name).symlink_to(baseline)
    assert entry(tiny.words(tmp_path, "--max-new-tokens", "9", "--json")) == 0
    (result,) = json.loads(capsys.readouterr().out)["results"]
    assert result["speedup"] is None
    assert result["speedup_reason"] == f"the baseline has another max_new_tokens: {LENGTH} there, 9 here"


def test_the_table_fits_a_terminal_and_says_what_it_is(tiny, tmp_path, capsys):
    assert entry(tiny.words(tmp_path, dataset="mine,gsm8k")) == 0
    out, err = capsys.readouterr()
    assert err == "" and max(map(len, out.splitlines())) <= 80 and "\x1b" not in out
    for piece in ("tau", "95 %", "tok/s", "speed-up", "repeats", "stages", "2nd on", "failed", "5*", "gsm8k", "…"):
        assert (piece in out) == (piece != "…"), piece


def test_json_is_one_document_with_a_result_a_set(tiny, tmp_path, capsys):
    assert entry(tiny.words(tmp_path, "--max-samples", "2", "--json", dataset="mine,gsm8k")) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert [result["dataset"] for result in document["results"]] == ["mine", "gsm8k"]
    assert document["results"][0] == summary_in(tmp_path)


# conversations


def test_a_further_turn_sees_the_answer(tiny, tmp_path):
    assert entry(tiny.words(tmp_path, dataset="talk")) == 0
    tokenizer, responses = byte_tokenizer(), responses_in(tmp_path, "talk")
    assert [(r.header["sample"], r.header["turn"]) for r in responses] == [(s, t) for s in chosen(2, 2) for t in (0, 1)]
    asked = [["Hello", "And then?"], ["Sing!", "Again."]]
    for first, second in zip(responses[::2], responses[1::2], strict=True):
        one, two = asked[first.header["sample"]]
        answer = tokenizer.decode(first.tokens, skip_special_tokens=True)
        ids = tokenizer(f"<user>{one}<assistant>{answer}<user>{two}<assistant>")["input_ids"]
        assert second.header["prompt_sha256"] == prompt_sha256(ids)
    assert summary_in(tmp_path, "talk")["responses"] == 4


def test_special_tokens_stay_out_of_the_history(tiny, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(decode.Tokenizer, "decode", lambda self, tokens: "ANSWER")
    encode = decode.Decoder.encode
    monkeypatch.setattr(
        decode.Decoder, "encode", lambda self, messages: seen.append(list(messages)) or encode(self, messages)
    )
    assert entry(tiny.words(tmp_path, "--max-samples", "1", dataset="talk")) == 0
    assert [message["role"] for message in seen[-1]] == ["user", "assistant", "user"]
    assert seen[-1][1]["content"] == "ANSWER"  # Tokenizer.decode: without special tokens


# failures


def test_the_garbage_collector_does_not_look_through_models_in_the_midst_of_a_text(tiny, tmp_path, monkeypatch):
    frozen: list[int] = []

    def decoded(*given):
        frozen.append(gc.get_freeze_count())
        return decode_sample(*given)

    before = gc.get_freeze_count()
    monkeypatch.setattr(run, "decode_sample", decoded)
    assert entry(tiny.words(tmp_path, "--max-samples", "1")) == 0
    assert min(frozen) > before + 10_000 and gc.get_freeze_count() == 0


def test_a_failed_sample_is_a_column_of_its_own(tiny, tmp_path, capsys):
    assert entry(tiny.words(tmp_path, dataset="long")) == 1
    out, err = capsys.readouterr()
    assert "long, sample 1, turn 0: UserError: a prompt of" in err and "exceed the context" in " ".join(out.split())
    summary = summary_in(tmp_path, "long")
    assert summary["failures"] == 1 and summary["responses"] == 3
    assert summary["failure_messages"][0]["sample"] == 1 and summary["acceptance_length"] > 1


def test_turns_after_a_failed_one_fail_too(tiny, tmp_path, monkeypatch):
    def fail(*_args):
        raise MemoryError("out of\nmemory")

    monkeypatch.setattr(run, "warm_up", lambda *_: None)
    monkeypatch.setattr(decode, "decode_prompt", fail)
    assert entry(tiny.words(tmp_path, "--max-samples", "1", dataset="talk")) == 1
    errors = [failure["error"] for failure in summary_in(tmp_path, "talk")["failure_messages"]]
    assert errors == ["MemoryError: out of memory", "an earlier turn failed"]


# resuming


@pytest.mark.parametrize("half", [0, 20], ids=["between samples", "inside a sample"])
def test_a_killed_run_continues(tiny, measured, tmp_path, monkeypatch, capsys, half):
    append, count = Store.append, 0

    def killed(self, rank, responses):
        nonlocal count
        if (count := count + 1) == 3:
            with (self.parts / f"rank-{rank}.jsonl").open("a") as file:
                file.write('{"schema": 1, "sample": '[:half])
            raise KeyboardInterrupt
        append(self, rank, responses)

    words = tiny.words(tmp_path, "--loop-gate", "-2")
    monkeypatch.setattr(Store, "append", killed)
    assert entry(words) == 130
    monkeypatch.setattr(Store, "append", append)
    capsys.readouterr()
    assert entry(words) == 0
    assert "2 of 5 samples are on record" in capsys.readouterr().err
    assert without_times(summary_in(tmp_path)) == without_times(summary_in(measured))
    assert not list(tmp_path.rglob("parts"))


def test_a_gate_that_learns_keeps_its_state_beside_the_results_and_a_stopped_run_goes_on_with_it(
    tiny, tmp_path, capsys, monkeypatch
):
    append, taken = Store.append, []

    def killed(self, rank, responses):
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(sum(len(response.rounds) for response in responses))
        append(self, rank, responses)

    words = tiny.words(tmp_path, "--loop-gate", "auto")
    with monkeypatch.context() as patch:
        patch.setattr(Store, "append", killed)
        assert entry(words) == 130
    (path,) = tmp_path.rglob("gate-rank-0.json")
    assert learned_rounds(path) == sum(taken), "the warm-up taught nothing"
    capsys.readouterr()
    assert entry(words) == 0
    assert f"the gate goes on with what it learned from {sum(taken)} rounds" in capsys.readouterr().err
    assert learned_rounds(path) == summary_in(tmp_path)["rounds"]
    assert entry([*words, "--max-samples", "5"]) == 0 and "the gate" not in capsys.readouterr().err, "nothing to do"
    assert entry([*words, "--overwrite"]) == 0
    assert learned_rounds(path) == summary_in(tmp_path)["rounds"]
    other = tiny.words(tmp_path / "from a file", "--loop-gate", "auto", "--gate-state", str(path), "--max-samples", "1")
    before = path.read_bytes()
    assert entry(other) == 0 and path.read_bytes() == before, "a file that was given is read alone"
    (copy,) = (tmp_path / "from a file").rglob("gate-rank-0.json")
    assert learned_rounds(copy) > learned_rounds(path)


def learned_rounds(path: Path) -> int:
    """How much the one gate of a file has seen."""
    (state,) = json.loads(path.read_text())["gates"].values()
    return state["rounds"]


def test_a_finished_run_is_not_decoded_again_but_extended(tiny, measured, tmp_path, monkeypatch):
    decoded = []
    once = run.decode_sample
    monkeypatch.setattr(run, "decode_sample", lambda *args: decoded.append(args[1].index) or once(*args))
    for count, fresh in (("2", chosen(5, 2)), ("2", []), ("5", chosen(5, 5)[2:])):
        decoded.clear()
        assert entry(tiny.words(tmp_path, "--loop-gate", "-2", "--max-samples", count)) == 0
        assert decoded == fresh
    assert without_times(summary_in(tmp_path)) == without_times(summary_in(measured))


def test_the_baseline_takes_the_flags_of_the_runs_beside_it(tiny, tmp_path, capsys):
    few = [*tiny.plain_words(tmp_path), "--baseline", "--max-samples", "1"]
    assert entry([*few, "--draft-depth", "5", "--mtp-k", "3"]) == 0
    assert entry([*few, "--mtp-k", "0"]) == 2
    assert "mtp_k=0 must be at least 1 and at most 1024" in capsys.readouterr().err


@pytest.mark.parametrize("more", [(), ("--overwrite",)], ids=["", "overwrite"])
@pytest.mark.parametrize("name", ["summary.json", "rounds.jsonl", "gate-rank-0.json", "parts/run.json"])
def test_a_folder_where_a_file_goes_is_told_of_before_anything_is_decoded(tiny, tmp_path, capsys, name, more):
    command = tiny.words(tmp_path, "--loop-gate", "auto", "--max-samples", "1", *more)
    assert entry(command) == 0
    (path,) = (each.parent / name for each in tmp_path.rglob("summary.json"))
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    capsys.readouterr()
    assert entry(command) == 2
    assert f"{path} is a folder, where a file is to be written" in capsys.readouterr().err


def test_another_run_in_the_same_folder_is_refused(tiny, tmp_path, capsys):
    words = tiny.words(tmp_path, "--max-samples", "2")
    assert entry(words) == 0
    assert entry(tiny.words(tmp_path, "--max-samples", "1")) == 2
    assert "1 samples that this run leaves out; add --overwrite" in capsys.readouterr().err
    (path,) = tmp_path.rglob("summary.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "data_sha256": "other"}))
    assert entry(words) == 2
    assert "holds a run with another data_sha256; add --overwrite" in capsys.readouterr().err
    assert entry([*tiny.plain_words(tmp_path), "--baseline", "--max-samples", "1"]) == 0
    assert entry([*tiny.plain_words(tmp_path), "--baseline", "--max-samples", "1", "--max-new-tokens", "9"]) == 2
    assert "holds a run with another setting.max_new_tokens; add" in capsys.readouterr().err
    assert entry([*words, "--overwrite"]) == 0
    assert summary_in(tmp_path)["data_sha256"] != "other"


def test_whole_samples_are_read_from_what_was_cut_off(measured):
    (path,) = [p for p in measured.rglob("rounds.jsonl") if "baseline" not in str(p)]
    data, ends = path.read_bytes(), []
    for cut in range(0, len(data), 211):
        found = read_samples(data[:cut])
        assert found.good_bytes <= cut and read_samples(data[: found.good_bytes]) == found
        ends.append(len(found.samples))
    assert ends == sorted(ends) and read_samples(data).good_bytes == len(data)


# settings in turns


def test_settings_beside_one_another_are_what_they_are_alone(tiny, measured, tmp_path, monkeypatch, capsys):
    decoded = []
    once = run.decode_sample
    monkeypatch.setattr(
        run,
        "decode_sample",
        lambda decoder, sample: decoded.append((sample.index, decoder.drafter is None)) or once(decoder, sample),
    )
    words = tiny.words(tmp_path, "--loop-gate", "-2", "--beside", "baseline", "loop-gate=1 verify=match")
    assert entry(words) == 0
    assert decoded == [(index, baseline) for index in chosen(5, 5) for baseline in (False, True, False)]
    out = capsys.readouterr().out
    assert out.count("speed-up") == 3 and "no speed-up" not in out
    summaries = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.rglob("summary.json")}
    for path in measured.rglob("summary.json"):
        assert without_times(summaries[path.parent.name]) == without_times(json.loads(path.read_text()))
    (host,) = [s for s in summaries.values() if "verify=match" in s["setting_name"]]
    assert host["stages"] == host["rounds"] > 0 and host["speedup"] is not None
    assert entry(words) == 0 and len(decoded) == 15


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        ([""], "--beside '' changes nothing; name a flag"),
        (["loop-gate=-2"], "--beside 'loop-gate=-2' is a setting that is measured already"),
        (["baseline", "baseline"], "--beside 'baseline' is a setting that is measured already"),
        (
            ["baseline loop-gate=1", "dtype=bfloat16"],
            "--beside 'dtype=bfloat16' changes dtype, which all settings share",
        ),
        (["help"], "--beside 'help' names no setting; dloop bench --help explains the flags"),
        (["loop-gate=1 help"], "names no setting"),
        (["max-samples=3"], "--beside 'max-samples=3' changes max-samples, which all settings share"),
        (["baseline", "baseline temperature=0.5"], "--beside 'baseline temperature=0.5' is a setting that is measured"),
        (["looped-gate=1"], "--looped-gate is not a flag of dloop bench --beside; did you mean --loop-gate"),
        (["loop-gate=x"], "--loop-gate: got 'x', expected NUMBER"),
        (["draft-model='"], """--beside "draft-model='" cannot be read (No closing quotation)"""),
    ],
)
def test_what_cannot_stand_beside_is_refused(tiny, tmp_path, capsys, beside, message):
    assert entry(tiny.words(tmp_path, "--loop-gate", "-2", "--beside", *beside)) == 2
    assert message in capsys.readouterr().err


def test_a_refused_run_leaves_everything_as_it_was(tiny, measured, tmp_path, capsys):
    for path in measured.rglob("*"):
        if path.is_file():
            copy = tmp_path / path.relative_to(measured)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())
    before = sorted(tmp_path.rglob("*"))
    fewer = ["--max-samples", "2", "--loop-gate", "-2", "--beside", "loop-gate=-3", "baseline"]
    assert entry(tiny.words(tmp_path, *fewer)) == 2
    assert "samples that this run leaves out" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before
    assert entry(["report", "--results", str(tmp_path)]) == 0


def test_two_settings_never_share_a_folder(tiny, tmp_path, capsys):
    for name in ("a b", "a-b"):
        (tmp_path / name).symlink_to(tiny.drafter)
    out = tmp_path / "out"
    words = ["--max-samples", "1", "--max-stages", "3", "--draft-model", str(tmp_path / "a b")]
    words += ["--beside", f"draft-model={tmp_path / 'a-b'}", "--overwrite"]
    assert entry([*tiny.plain_words(out), *words]) == 2
    assert "two settings would be written to" in capsys.readouterr().err and not out.exists()
    assert entry(tiny.words(out, "--beside", f"draft-model={tiny.drafter}/")) == 2
    assert "is a setting that is measured already" in capsys.readouterr().err


def test_plain_decoding_may_have_a_drafter_beside_it(tiny, tmp_path):
    beside = ["--beside", f"draft-model={tiny.drafter} max-stages=3"]
    assert entry([*tiny.plain_words(tmp_path), "--baseline", "--max-samples", "1", *beside]) == 0
    assert summary_in(tmp_path)["stages"] > 0


# sampling, ranks, the command


def test_every_sample_has_its_own_recorded_seed(tiny, tmp_path):
    assert entry(tiny.words(tmp_path, "--temperature", "0.8", "--verify", "match", "--seed", "7")) == 0
    target, tokenizer = dloop.load_target(str(tiny.target), dtype="float32"), byte_tokenizer()
    seeds = set()
    for response in responses_in(tmp_path):
        seed = response.header["seed"]
        seeds.add(seed)
        assert seed == sample_seed(7, response.header["sample"]) and 0 <= seed < 2**63
        ids = tokenizer(f"<user>{QUESTIONS[response.header['sample']]}<assistant>")["input_ids"]
        alone = dloop.generate_autoregressive(target, ids, max_new_tokens=LENGTH, temperature=0.8, seed=seed)
        assert response.tokens == alone.tokens
    assert len(seeds) == 5


def test_seeds_depend_on_the_runs_seed_and_never_change():
    assert len({sample_seed(seed, index) for seed in range(9) for index in range(9)}) == 81
    assert sample_seed(0, 264) == 7586708374064093975


@pytest.mark.slow
def test_two_ranks_are_one_rank(tiny, measured, tmp_path):
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "eval.benchmark"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    more = tiny.words(tmp_path, "--loop-gate", "-2", "--json")[1:]
    done = subprocess.run([sys.executable, *words, *more], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["results"] == [summary_in(tmp_path)]
    assert without_times(summary_in(tmp_path)) == without_times(summary_in(measured))
    texts = [[(r.header["sample"], r.tokens) for r in responses_in(out)] for out in (tmp_path, measured)]
    assert texts[0] == texts[1] and summary_in(tmp_path)["ranks"] == 2


def test_the_published_module_is_the_command():
    words = [sys.executable, "-m", "eval.benchmark", "--help"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "--dataset" in done.stdout


def test_bench_takes_every_argument_of_the_api():
    flags = {field.name: field.default for field in dataclasses.fields(bench.Command)}
    own = {"max_new_tokens": 2048, "seed": 0}
    for field in dataclasses.fields(Settings):
        assert flags[field.name] == own.get(field.name, field.default), field.name


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "host"),
        ({"loop_gate": -0.5}, "loop-gate=-0.5"),
        ({"loop_gate": -math.inf, "gate_sum": "all"}, "loop-gate=-inf,gate-sum=all"),
        ({"loop_gate": "auto"}, "loop-gate=auto"),
        ({"tree_budget": 64, "tree_beta": -0.2}, "tree-budget=64"),
        ({"loop_gate": -0.12345678, "temperature": 1.0}, "loop-gate=-0.12345678,temperature=1"),
        ({"stop_token_ids": (1, 2), "chat": False}, "stop-token-ids=1+2,chat=False"),
        ({"max_samples": 3, "device": "cpu", "overwrite": True}, "host"),
    ],
)
def test_a_setting_is_named_by_what_differs(given, name):
    command = bench.Command(model="m", draft_model="d", dataset="gsm8k", **given)
    assert bench.setting_name(command) == name == slug(name)


def test_the_offline_target_has_a_drafter_of_its_own(capsys):
    assert bench.drafter_name(bench.Command(model="smollm2", dataset="gsm8k"), "dloop bench") == "demo"
    assert capsys.readouterr().err.startswith("dloop bench: without --draft-model")


def test_the_drafter_that_is_taken_is_told_once_for_all_settings(monkeypatch, capsys):
    seen = []
    monkeypatch.setattr("dloop.bench.run.bench", lambda commands, names, drafters: seen.append(drafters))
    words = [
        "bench",
        "--model",
        "smollm2",
        "--dataset",
        "gsm8k",
        "--beside",
        "loop-gate=-1",
        "loop-gate=-2",
        "baseline",
    ]
    assert entry(words) == 0
    assert seen == [["demo", "demo", "demo", None]] and capsys.readouterr().err.count("without --draft-model") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--max-samples", "0"), "--max-samples 0 must be at least 1"),
        (("--dataset", "gsm9k"), "--dataset 'gsm9k' is not known"),
        (("--temperature", "-1"), "temperature=-1.0 must be"),
        (("--max-stages", "0"), "max_stages=0 must be at least 1"),
        (("--max-new-tokens", "0"), "max_new_tokens=0 must be at least 1"),
        (("--loop-gate", "nan"), "loop_gate=nan is not a threshold"),
        (("--tree-budget", "5000"), "tree_budget=5000 must be 'host' or"),
    ],
)
def test_a_users_error_comes_before_the_first_sample(tiny, tmp_path, capsys, more, message):
    assert entry(tiny.words(tmp_path, *more)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("dloop bench: error: ") and message in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("variables", [{"WORLD_SIZE": "2", "RANK": "0"}, {"WORLD_SIZE": "two"}])
def test_ranks_without_torchrun_are_refused(tiny, tmp_path, capsys, monkeypatch, variables):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert entry(tiny.words(tmp_path)) == 2
    assert "start with torchrun" in capsys.readouterr().err
