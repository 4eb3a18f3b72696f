"""`dloop report` on folders that `dloop bench` wrote for tiny models, and on the same folders spoilt by hand."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from test_bench_run import Folders, tiny  # noqa: F401

from dloop.bench.compare import compare, tau_gain
from dloop.bench.measure import figures, resample
from dloop.bench.naming import automatic, columns, opens, parse_names
from dloop.bench.report import draw, paired, slowness, tables
from dloop.bench.results import Result, SampleKey, read_results
from dloop.bench.store import read_samples
from dloop.cli.main import entry

HOST, LOOP = "dtype=float32,max-stages=3,max-new-tokens=24", "dtype=float32,loop-gate=-2,max-stages=3,max-new-tokens=24"
LOOP_NAME = "loop,max-stages=3"
GAIN_KEYS = "target family dataset setting tau tokens_per_s speedup full_acceptance_rate n temperature gpu".split()


@pytest.fixture(scope="module")
def measured(tiny: Folders, tmp_path_factory) -> Path:  # noqa: F811
    """Baseline, host and loop on two sets, the first two on a third one of conversations."""
    out = tmp_path_factory.mktemp("results")
    assert entry([*tiny.plain_words(out, "gsm8k,mine,talk"), "--baseline"]) == 0
    assert entry(tiny.words(out, dataset="gsm8k,mine,talk")) == 0
    assert entry(tiny.words(out, "--loop-gate", "-2", dataset="gsm8k,mine")) == 0
    return out


@pytest.fixture
def copied(measured, tmp_path) -> Path:
    return Path(shutil.copytree(measured, tmp_path / "results"))


def folder_in(results: Path, dataset: str, setting: str) -> Path:
    (path,) = [p.parent for p in results.rglob("summary.json") if dataset in p.parts and setting in str(p.parent)]
    return path


def edit(folder: Path, **changes) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def told(capsys, *words: str) -> dict:
    """The document of a report."""
    capsys.readouterr()
    assert entry(["report", "--json", *words]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def refused(capsys, *words: str) -> str:
    capsys.readouterr()
    assert entry(["report", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("dloop report: error: ")
    return err


def rows_of(document: dict) -> dict[tuple[str, str], dict]:
    (table,) = document["tables"]
    return {(row["dataset"], row["setting"]): row for row in table["rows"]}


# tables


def test_rows_are_the_summaries_figures_and_intervals(measured, capsys):
    document = told(capsys, "--results", str(measured))
    rows = rows_of(document)
    assert list(rows) == [
        ("gsm8k", "baseline"),
        ("gsm8k", "host"),
        ("gsm8k", LOOP_NAME),
        ("mine", "baseline"),
        ("mine", "host"),
        ("mine", LOOP_NAME),
        ("talk", "baseline"),
        ("talk", "host"),
    ]
    folders = {"baseline": "baseline--", "host": HOST, LOOP_NAME: "loop-gate=-2"}
    for (dataset, setting), row in rows.items():
        summary = summary_of(folder_in(measured, dataset, folders[setting]))
        assert row["figures"]["tau"] == [summary["acceptance_length"], *summary["intervals"]["acceptance_length"]]
        assert row["figures"]["tokens_per_s"] == [summary["tokens_per_s"], *summary["intervals"]["tokens_per_s"]]
        assert row["figures"]["speedup"][0] == summary["speedup"]
        assert row["full_acceptance_rate"] == summary["full_acceptance_rate"].get("1")
        assert row["repetition"] == summary["repetition_share"] and row["failures"] == summary["failures"]
        assert row["n"] == len(summary["samples"]) and row["family"] == summary["family"]
        assert row["looped"] == (None if setting == "baseline" else summary["output_share_looped"])


def test_a_mean_counts_every_set_once_and_only_sets_that_all_settings_have(measured, capsys):
    document = told(capsys, "--results", str(measured))
    (table,) = document["tables"]
    rows = rows_of(document)
    assert table["mean_sets"] == ["gsm8k", "mine"]
    for row in table["means"]:
        parts = [rows[name, row["setting"]] for name in table["mean_sets"]]
        for name in ("tau", "tokens_per_s", "speedup"):
            values = [part["figures"][name] for part in parts]
            if row["setting"] == "baseline" and name == "speedup":
                assert row["figures"][name] == [None, None, None]
                continue
            value, low, high = row["figures"][name]
            assert value == pytest.approx(sum(v[0] for v in values) / 2) and low <= value <= high
        assert row["n"] == sum(part["n"] for part in parts)


def test_a_speedups_interval_draws_the_same_samples_of_both_sides(measured):
    found = {r.folder.name + r.dataset: r for r in read_results([str(measured)])}
    run, baseline = (next(r for n, r in found.items() if n.startswith(s) and "gsm8k" in n) for s in (HOST, "gsm8k"))
    assert baseline.is_baseline and not run.is_baseline
    speedup = draw(run, baseline)[2]
    pairs = paired(baseline, run)
    order = np.random.default_rng(0).integers(5, size=(2000, 5))
    times = [pairs[order][..., column].sum(1) / pairs[order][..., column - 2].sum(1) for column in (2, 7)]
    assert np.allclose(speedup, times[0] / times[1])
    assert not np.allclose(speedup, draw(run, baseline, 1)[2])
    assert slowness(paired(run, run)).tolist() == [1.0] * 5


def test_the_table_in_the_terminal_is_whole_and_says_what_it_is(measured, capsys):
    capsys.readouterr()
    assert entry(["report", "--results", str(measured), "--compare", "host", LOOP_NAME]) == 0
    out, err = capsys.readouterr()
    assert err == "" and "…" not in out and "\x1b" not in out
    flat = " ".join(out.split())
    for piece in ("mean of 2", "the mean leaves out talk", "baseline: plain decoding", "A = host, on the same prompts"):
        assert piece in flat, piece
    assert f"{summary_of(folder_in(measured, 'mine', HOST))['acceptance_length']:.2f}" in out


def test_the_page_holds_the_same_cells(measured, tmp_path, capsys):
    page = tmp_path / "page.md"
    assert entry(["report", "--results", str(measured), "--markdown", str(page)]) == 0
    lines = [line for line in page.read_text().splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert rows[0][:4] == ["set", "setting", "n", "tau"] and len(rows) == 2 + 8 + 3
    summary = summary_of(folder_in(measured, "gsm8k", HOST))
    assert rows[3][1:4] == ["host", "5\\*", f"{summary['acceptance_length']:.2f}"]
    assert [row[0] for row in rows[2:]] == ["gsm8k", "", "", "mine", "", "", "talk", "", "mean of 2", "", ""]


# speed-ups


def test_a_baseline_measured_later_still_counts(copied, capsys):
    before = rows_of(told(capsys, "--results", str(copied)))["mine", "host"]["figures"]["speedup"]
    edit(folder_in(copied, "mine", HOST), speedup=None, speedup_reason="no baseline: measure it with --baseline")
    after = rows_of(told(capsys, "--results", str(copied)))["mine", "host"]
    assert after["figures"]["speedup"] == before and None not in before and after["reason"] is None


def test_without_a_baseline_at_hand_the_summary_is_believed(measured, capsys):
    folder = folder_in(measured, "mine", HOST)
    row = rows_of(told(capsys, "--results", str(folder)))["mine", "host"]
    assert row["figures"]["speedup"] == [summary_of(folder)["speedup"], None, None]


def test_nothing_is_divided_across_gpu_types(copied, capsys):
    gpu = {**summary_of(folder_in(copied, "mine", HOST))["hardware"], "gpu": "NVIDIA H200"}
    edit(folder_in(copied, "mine", HOST), hardware=gpu)
    document = told(capsys, "--results", str(copied))
    assert len(document["tables"]) == 2
    (row,) = [row for table in document["tables"] if table["machine"] == "NVIDIA H200" for row in table["rows"]]
    assert row["figures"]["speedup"] == [None, None, None]
    assert row["reason"].startswith("the baseline has another machine: ") and row["reason"].endswith("NVIDIA H200 here")
    assert entry(["report", "--results", str(copied)]) == 0
    assert "no speed-up for host (mine): the baseline has another machine" in " ".join(capsys.readouterr().out.split())


# names


@pytest.mark.parametrize(
    ("draft", "flags", "setting", "name"),
    [
        (None, "baseline", {}, "baseline"),
        ("a/b", "host", {}, "host"),
        ("a/b", "loop-gate=-0.5", {"loop_gate": -0.5}, "loop"),
        ("a/b", "loop-gate=0", {"loop_gate": 0}, "loop"),
        ("a/b", "loop-gate=-inf,gate-sum=all", {"loop_gate": "-inf"}, "loop,gate-sum=all"),
        ("a/b", "gate-sum=all,max-stages=3", {}, "host"),
        ("a/b", "dtype=float32,temperature=1,verify=match", {}, "host,verify=match"),
        ("a/b", "loop-gate=-0.5,max-stages=3", {"loop_gate": -0.5}, "loop,max-stages=3"),
        ("demo", "host", {}, "trained"),
        ("demo", "loop-gate=-0.5", {"loop_gate": -0.5}, "dloop"),
        ("a/b", "tree-budget=64", {"tree_budget": 64}, "tree"),
        ("a/b", "tree-budget=0", {"tree_budget": 0}, "host,tree-budget=0"),
        ("demo", "tree-budget=64,loop-gate=-1", {"tree_budget": 64, "loop_gate": -1}, "tree_dloop"),
    ],
)
def test_names_come_from_gate_and_drafter(draft, flags, setting, name):
    chosen = {"loop_gate": 1.0, "tree_budget": "host", **setting}
    assert automatic(Result(Path("f"), {"draft": draft, "setting_name": flags, "setting": chosen}, {})) == name


@pytest.mark.parametrize(("gate", "open_"), [(1.0, False), (0.1, False), (0, True), (-3, True), ("-inf", True)])
def test_a_positive_threshold_never_opens(gate, open_):
    assert opens(gate) is open_ and not opens("inf") and opens("auto")


def test_what_the_records_do_not_tell_must_be_named(copied, capsys):
    for dataset in ("gsm8k", "mine"):
        edit(folder_in(copied, dataset, "loop-gate=-2"), draft="out/epoch_1_step_9")
    line = refused(capsys, "--results", str(copied))
    assert "was trained with a loop stage is not on record" in line and "--name FOLDER=SETTING" in line
    names = ["--name", f"{copied}/*/*/*/{LOOP}=dloop"]
    assert ("mine", "dloop") in rows_of(told(capsys, "--results", str(copied), *names))


def test_two_runs_in_one_place_are_refused_and_named_apart(copied, capsys):
    first = folder_in(copied, "mine", "loop-gate=-2")
    second = Path(shutil.copytree(first, first.parent / LOOP.replace("-2", "-1")))
    line = refused(capsys, "--results", str(copied))
    assert str(first) in line and str(second) in line and "--name" in line
    rows = rows_of(told(capsys, "--results", str(copied), "--name", f"{second}=steeper"))
    assert ("mine", "steeper") in rows and ("mine", LOOP_NAME) in rows


@pytest.mark.parametrize("change", ["flags", "weights"])
def test_a_setting_is_one_kind_of_run_on_all_sets(copied, capsys, change):
    folder = folder_in(copied, "mine", "loop-gate=-2")
    hashes = {**summary_of(folder)["checkpoint_sha256"], "draft": "other"}
    changes = {"setting_name": LOOP.replace("-2", "-1")} if change == "flags" else {"checkpoint_sha256": hashes}
    edit(folder, **changes)
    line = refused(capsys, "--results", str(copied))
    assert str(folder) in line and str(folder_in(copied, "gsm8k", "loop-gate=-2")) in line


def test_names_that_cannot_be_are_refused(measured, capsys):
    words = ["--results", str(measured), "--name"]
    assert "is not FOLDER=SETTING" in refused(capsys, *words, "loop")
    assert "is not FOLDER=SETTING" in refused(capsys, *words, "a=two words")
    assert "names no folder" in refused(capsys, *words, f"{measured}/nothing=x")
    assert "is named twice" in refused(capsys, *words, f"{measured}=x", f"{measured}/*=y")
    assert "would both be 'x'" in refused(capsys, *words, f"{measured}/*/*/*/*=x")


# gain


def test_the_published_list_has_its_form(measured, tmp_path, capsys):
    path = tmp_path / "gain-tiny.json"
    assert entry(["report", "--results", str(measured), "--gain", str(path)]) == 0
    listed = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert all(list(entry_) == GAIN_KEYS for entry_ in listed) and len(listed) == 8
    rows = rows_of(told(capsys, "--results", str(measured)))
    for found in listed:
        row = rows[found["dataset"], found["setting"]]
        assert (found["family"] is None) == (found["setting"] == "baseline") == (found["speedup"] is None)
        assert [found[key] for key in ("tau", "tokens_per_s", "speedup")] == [v[0] for v in row["figures"].values()]
        assert found["n"] == row["n"] and found["temperature"] == 0 and found["gpu"]


def test_the_published_list_is_unique(copied, tmp_path, capsys):
    first = folder_in(copied, "mine", "baseline")
    second = Path(shutil.copytree(first, copied / "other"))
    edit(second, hardware={**summary_of(second)["hardware"], "gpu": "NVIDIA H200"})
    assert entry(["report", "--results", str(copied)]) == 0  # two tables
    line = refused(capsys, "--results", str(copied), "--gain", str(tmp_path / "g.json"))
    assert str(first) in line and str(second) in line and not (tmp_path / "g.json").exists()


# comparisons


def test_a_comparison_is_paired_by_prompt(copied, capsys):
    words = ["--results", str(copied), "--compare", "host", LOOP_NAME]
    rows = told(capsys, *words)["compare"]["rows"]
    assert [row["dataset"] for row in rows] == ["gsm8k", "mine", "(mean)"] and rows[0]["left_out"] == 0
    taus = [summary_of(folder_in(copied, "gsm8k", s))["acceptance_length"] for s in (HOST, "loop-gate=-2")]
    value, low, high = rows[0]["tau"]
    assert value == pytest.approx(taus[1] - taus[0]) and low <= value <= high
    path = folder_in(copied, "gsm8k", "loop-gate=-2") / "rounds.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    lines[0] = json.dumps({**json.loads(lines[0]), "prompt_sha256": "another"}) + "\n"
    path.write_text("".join(lines))
    again = told(capsys, *words)["compare"]["rows"]
    assert (again[0]["pairs"], again[0]["left_out"]) == (4, 2) and again[1:2] == rows[1:2]


def test_a_setting_differs_from_itself_by_nothing_and_swaps_sign(measured, capsys):
    same = told(capsys, "--results", str(measured), "--compare", "host", "host")["compare"]["rows"][0]
    assert same["tau"] == [0, 0, 0] and same["speed"] == [1, 1, 1]
    one, two = (
        told(capsys, "--results", str(measured), "--compare", *pair)["compare"]["rows"][1]
        for pair in (("host", LOOP_NAME), (LOOP_NAME, "host"))
    )
    assert one["tau"] == pytest.approx([-two["tau"][i] for i in (0, 2, 1)])
    assert one["speed"] == pytest.approx([1 / two["speed"][i] for i in (0, 2, 1)], rel=1e-3)


def test_comparisons_that_cannot_be_are_refused(copied, capsys):
    words = ["--results", str(copied), "--compare"]
    assert "'hots' is no setting here; there are baseline, host" in refused(capsys, *words, "host", "hots")
    assert "takes two settings" in refused(capsys, *words, "host")
    for dataset in ("gsm8k", "mine"):
        edit(folder_in(copied, dataset, "loop-gate=-2"), template_sha256="other")
    assert "have another set of prompts" in refused(capsys, *words, "host", LOOP_NAME)
    for dataset in ("gsm8k", "mine"):
        edit(folder_in(copied, dataset, "loop-gate=-2"), dtype="bfloat16")
    assert "no set was measured with both on one machine" in refused(capsys, *words, "host", LOOP_NAME)


def made_up(name: str, rng, shift: float = 0.0) -> Result:
    """400 samples of one response each; what they share is larger than what differs."""
    summary = {"target": "t", "draft": "d", "family": "f", "dataset": name, "hardware": HARDWARE, "dtype": "float32"}
    common = np.random.default_rng(7).normal(4, 1, 400)
    rows = np.stack([np.ones(400), common + shift + rng.normal(0, 0.1, 400), np.full(400, 2.0)], 1)
    rows = np.concatenate([rows, np.ones((400, 2))], 1)
    return Result(Path(name), summary, {SampleKey(index, "p"): row for index, row in enumerate(rows)})


HARDWARE = {"gpu": "G", "cpu": "C", "threads": 1}


def test_intervals_are_as_wide_as_theory_says():
    rng = np.random.default_rng(3)
    one, other = made_up("a", rng), made_up("a", rng, 0.05)
    unpaired = np.ptp(np.percentile(draw(one, None)[0], [2.5, 97.5]))
    assert unpaired == pytest.approx(2 * 1.96 / 20, rel=0.15)  # spread 1 over 400 samples
    sums = [draw(one, None, stream)[0] for stream in (1, 2)]
    assert abs(np.corrcoef(*sums)[0, 1]) < 0.1  # sets of a mean are drawn apart
    gains = tau_gain(resample(paired(one, other)))
    assert np.ptp(np.percentile(gains, [2.5, 97.5])) == pytest.approx(2 * 1.96 * 0.1 * 2**0.5 / 20, rel=0.15)


# pictures


def test_the_picture_is_drawn(measured, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    for name, start in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        assert entry(["report", "--results", str(measured), "--plot", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_bytes().startswith(start)
    text = (tmp_path / "a.svg").read_text()
    assert "mean of 2" in text and LOOP_NAME in text
    baseline = folder_in(measured, "mine", "baseline")
    assert "no speed-up to draw" in refused(capsys, "--results", str(baseline), "--plot", str(tmp_path / "b.png"))


def test_a_picture_needs_the_extra_and_a_known_kind(measured, tmp_path, capsys, monkeypatch):
    words = ["--results", str(measured), "--plot"]
    assert "must end in .png, .svg, .pdf" in refused(capsys, *words, str(tmp_path / "a.jpg"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "dloop-decoding[plot]" in refused(capsys, *words, str(tmp_path / "a.png"))


# bad input


def spoil_rounds(folder: Path, change) -> None:
    path = folder / "rounds.jsonl"
    path.write_bytes(change(path.read_bytes()))


SPOILT = {
    "schema": (lambda f: edit(f, schema=2), "has schema 2, this dloop reads schema 1"),
    "schema of rounds": (
        lambda f: spoil_rounds(f, lambda data: data.replace(b'"schema": 1', b'"schema": 3', 1)),
        "has schema 3, this dloop reads schema 1",
    ),
    "broken": (lambda f: (f / "summary.json").write_text("{"), "cannot be read"),
    "another file": (lambda f: (f / "summary.json").write_text('{"a": 1}'), "is no summary of dloop bench"),
    "no object": (lambda f: (f / "summary.json").write_text("[1]"), "is no summary of dloop bench"),
    "ill-typed": (lambda f: edit(f, dtype=3, failures=None), "failures, dtype missing or ill-typed"),
    "setting": (lambda f: edit(f, setting={"temperature": 0.0}), "setting.top_k, setting.top_p"),
    "ill-typed below": (
        lambda f: edit(f, hardware={"gpu": 3, "cpu": "a", "threads": "two"}, subset={"complete": "yes"}),
        "subset.complete, hardware.gpu, hardware.threads missing or ill-typed",
    ),
    "a hash ill-typed": (
        lambda f: edit(f, checkpoint_sha256={"target": "t", "draft": 3}),
        "checkpoint_sha256.draft missing or ill-typed",
    ),
    "a rate ill-typed": (
        lambda f: edit(f, full_acceptance_rate={"1": "half"}),
        "full_acceptance_rate missing or ill-typed",
    ),
    "no rounds": (lambda f: (f / "rounds.jsonl").unlink(), "has a summary.json but no rounds.jsonl"),
    "cut off": (lambda f: spoil_rounds(f, lambda data: data[:-9]), "does not hold the samples of its summary"),
    "a field missing": (
        lambda f: spoil_rounds(f, lambda data: data.replace(b'"num_tokens"', b'"num_token"', 1)),
        "holds damaged records (KeyError: 'num_tokens')",
    ),
    "a field ill-typed": (
        lambda f: spoil_rounds(f, lambda data: data.replace(b'"accepted": ', b'"accepted": [], "was": ', 1)),
        "holds damaged records (TypeError",
    ),
    "other samples": (lambda f: edit(f, samples=[0, 1]), "does not hold the samples of its summary"),
    "another tau": (lambda f: edit(f, acceptance_length=9.5), "summary.json tells 9.5"),
    "under way": (lambda f: (f / "parts").mkdir(), "holds a run under way"),
}


@pytest.mark.parametrize(("spoil", "message"), SPOILT.values(), ids=SPOILT)
def test_bad_folders_are_refused_by_name(copied, capsys, spoil, message):
    folder = folder_in(copied, "mine", HOST)
    spoil(folder)
    line = refused(capsys, "--results", str(copied))
    assert message in line and str(folder) in line


def test_folders_without_results_are_refused(tmp_path, capsys):
    assert "is no folder" in refused(capsys, "--results", str(tmp_path / "none"))
    assert "holds no summary.json" in refused(capsys, "--results", str(tmp_path))
    assert "make it first" in refused(capsys, "--results", str(tmp_path), "--markdown", str(tmp_path / "no" / "p.md"))


def test_a_folder_given_twice_is_read_once(measured):
    twice = read_results([str(measured), str(folder_in(measured, "mine", HOST))])
    assert len(twice) == len(read_results([str(measured)])) == 8


def test_sums_are_the_figures_of_bench(measured):
    for run in read_results([str(measured)]):
        responses = [r for s in read_samples((run.folder / "rounds.jsonl").read_bytes()).samples.values() for r in s]
        expected = figures(responses)
        count, tau, ms, tokens, seconds = sum(run.samples.values())
        assert tau / count == pytest.approx(expected["acceptance_length"])
        assert ms / count == pytest.approx(expected["time_per_output_token_ms"])
        assert tokens / seconds == pytest.approx(expected["tokens_per_s"])


def test_the_functions_give_what_the_command_tells(measured, capsys):
    found = columns(read_results([str(measured)]), parse_names([]))
    (table,) = tables(found)
    document = told(capsys, "--results", str(measured), "--compare", "baseline", "host")
    assert [row.figures.tau.value for row in table.rows] == [
        row["figures"]["tau"][0] for row in document["tables"][0]["rows"]
    ]
    assert [row.tau.value for row in compare(found, "baseline", "host")] == [
        row["tau"][0] for row in document["compare"]["rows"]
    ]
