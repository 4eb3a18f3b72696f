"""`dloop report --tables`: the paper's tables from real runs of tiny models, their arithmetic done again by hand."""

import json
from collections import defaultdict
from pathlib import Path
from statistics import median

import numpy as np
import pytest
import torch
from test_bench_measure import response, round_of
from test_bench_run import Folders, tiny  # noqa: F401
from test_calibrate import drawn
from test_report import edit, refused, summary_of
from test_train import token_file

import dloop
from dloop.bench.loops import Loops, counted, looped, total
from dloop.bench.naming import Column
from dloop.bench.paper.build import BUILDERS, Sources, paper
from dloop.bench.paper.names import ALL, KNOWN, SETS, chosen
from dloop.bench.results import Condition, Result, SampleKey
from dloop.cli.main import entry
from dloop.cli.train_record import recorded
from dloop.errors import UserError
from dloop.gates import calibration
from dloop.gates.calibration import Point, point_of
from dloop.gates.trace import save

BOTH = ("gsm8k", "mine")
LOOPS = [f"loop,max-stages=3,loop-gate={g}" for g in ("-1", "-2")]


@pytest.fixture(scope="module")
def measured(tiny: Folders, tmp_path_factory) -> Path:  # noqa: F811
    """On two sets: baseline, host, loop at two thresholds, a tree alone and with the loop; a stop rule; the host on a
    third set; host and loop at temperature 1.
    """
    out = tmp_path_factory.mktemp("results")
    others = ["baseline", "loop-gate=-1", "loop-gate=-2", "tree-budget=6", "tree-budget=6 loop-gate=-2"]
    few = ["--max-samples", "3"]
    assert entry([*tiny.words(out, dataset="gsm8k,mine"), *few, "--beside", *others]) == 0
    assert entry(tiny.words(out, *few, "--engine", "twin", "--stop-rule", "svip", dataset="gsm8k,mine")) == 0
    assert entry(tiny.words(out, *few, dataset="talk")) == 0
    assert entry([*tiny.words(out, *few, "--temperature", "1"), "--beside", "loop-gate=-1"]) == 0
    return out


def made(capsys, *words: str) -> dict[str, dict]:
    """The paper's tables of a report, by number."""
    capsys.readouterr()
    assert entry(["report", "--json", *words]) == 0
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["tables"] == []
    return {table["table"]: table for table in document["paper"]}


def only(table: dict) -> list[dict]:
    """The rows of a table's only part, by column."""
    (part,) = table["parts"]
    return [dict(zip(part["columns"], row, strict=True)) for row in part["rows"]]


def folder_of(results: Path, dataset: str, *parts: str) -> Path:
    """The only folder of a set whose setting's name consists of these flags, beside those that all runs have."""
    common = {"dtype=float32", "max-stages=3", "max-new-tokens=24"}
    found = [p.parent for p in results.rglob("summary.json") if p.parent.parent.name == dataset]
    (folder,) = [each for each in found if set(each.name.split(",")) == common | set(parts)]
    return folder


def records_of(folder: Path) -> list[tuple[dict, list[dict]]]:
    """Header and rounds of each response, read without the package."""
    lines = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    starts = [index for index, line in enumerate(lines) if "num_tokens" in line]
    return [(lines[at], lines[at + 1 : end]) for at, end in zip(starts, [*starts[1:], len(lines)], strict=True)]


# names


def test_every_table_has_a_builder_and_a_name():
    assert list(KNOWN) == [*"12345", "A1", "A3", "A4", "A5", "A6", "A7", "F1"] and KNOWN.keys() == BUILDERS.keys()


def test_tables_are_named_in_any_case_once_and_all_of_them():
    assert chosen(("a3", "4", "A3")) == ["A3", "4"]
    assert chosen((ALL, "4")) == list(KNOWN) and chosen((SETS, "f1")) == [SETS, "F1"]
    for bad in (("A2",), ()):
        with pytest.raises(UserError, match="there are sets, all, 1, 2"):
            chosen(bad)


def test_flags_that_no_table_reads_are_refused(measured, capsys):
    words = ["--results", str(measured)]
    assert "'A2' is no table here" in refused(capsys, *words, "--tables", "1,A2")
    assert "add --tables A6" in refused(capsys, *words, "--calibrations", "c.json")
    assert "add --tables A7" in refused(capsys, *words, "--tables", "1", "--train-runs", "out")


# what is printed


def test_all_prints_what_is_there_and_a_line_for_the_rest(measured, tmp_path, capsys):
    page = tmp_path / "page.md"
    assert entry(["report", "--results", str(measured), "--tables", "all", "--markdown", str(page)]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and "…" not in out and "\x1b" not in out
    for number, known in KNOWN.items():
        title = known.title if number == "F1" else f"Table {number}: {known.title}"
        (line,) = [line for line in lines if line.startswith(title)]
        assert (line != title) == (number in ("A6", "A7")), number
        assert number not in ("A6", "A7") or line == f"{title}: nothing to print; it needs {known.needs}"
        assert page.read_text().count(f"## {title}\n") == 1
    legend = [line for line in page.read_text().splitlines() if line.startswith("- host: dspark drafter")]
    assert len(legend) == len(set(legend)) == 2 and "temperature=1" in legend[1]  # once a law
    assert out.count("host: dspark drafter") == 2


def test_the_page_holds_the_json_s_rows(measured, tmp_path, capsys):
    page = tmp_path / "page.md"
    words = ["--results", str(measured), "--tables", "A3,A6", "--markdown", str(page)]
    tables = made(capsys, *words)
    lines = [line for line in page.read_text().splitlines() if line.startswith("| ")]
    assert len(lines) == 2 + len(tables["A3"]["parts"][0]["rows"]) + len(tables["A3"]["parts"][1]["rows"]) + 2
    host = next(row for row in only_greedy(tables["A3"]) if row["setting"] == "host")
    assert f"| dspark | host | {host['stages']} | {host['verifications']} | 1.00 |" in page.read_text()
    assert tables["A6"]["missing"] in page.read_text() and tables["A6"]["parts"] == []


def only_greedy(table: dict) -> list[dict]:
    """The rows at temperature 0 of a table that has both."""
    greedy, _ = table["parts"]
    assert "temperature 0," in greedy["heading"]
    return [dict(zip(greedy["columns"], row, strict=True)) for row in greedy["rows"]]


def test_sets_and_a_table_stand_together(measured, capsys):
    words = ["report", "--results", str(measured), "--name", f"{measured}/*/*/*/*loop-gate=-1*=mild", "--json"]
    assert entry([*words, "--tables", "sets,A3"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert entry(words) == 0
    assert both["tables"] == json.loads(capsys.readouterr().out)["tables"] and len(both["paper"]) == 1


def test_without_tables_several_thresholds_are_still_to_be_named(measured, capsys):
    assert "tell them apart with --name" in refused(capsys, "--results", str(measured))


# speed-ups and acceptance lengths


def gain(folder: Path) -> dict:
    """What a cell of one set must hold, as far as the summary tells."""
    summary = summary_of(folder)
    return {"speedup": summary["speedup"], "tau": summary["acceptance_length"]}


def values(cell: dict) -> dict:
    return {name: each[0] for name, each in cell.items()}


def test_table_1_and_a1_are_the_two_temperatures(measured, capsys):
    tables = made(capsys, "--results", str(measured), "--tables", "1,A1")
    (host,) = only(tables["1"])
    assert (host["family"], host["setting"]) == ("dspark", "host")
    for dataset in (*BOTH, "talk"):
        assert values(host[dataset]) == gain(folder_of(measured, dataset))
        value, low, high = host[dataset]["tau"]
        assert low <= value <= high
    assert host["talk"]["speedup"] == [None, None, None]
    assert values(host["mean"])["tau"] == pytest.approx(
        sum(gain(folder_of(measured, name))["tau"] for name in (*BOTH, "talk")) / 3
    )
    assert values(host["mean"])["speedup"] is None  # one set has none
    notes = tables["1"]["parts"][0]["notes"]
    assert "dspark: not measured: dloop" in notes
    assert "dspark: no speed-up for host (talk): no baseline: measure it with --baseline" in notes
    (warm,) = only(tables["A1"])
    assert "temperature 1," in tables["A1"]["parts"][0]["heading"] and warm.keys() == {"family", "setting", "mine"}
    assert values(warm["mine"])["tau"] == gain(folder_of(measured, "mine", "temperature=1"))["tau"]


def test_table_2_marks_what_each_setting_has(measured, capsys):
    names = ["--name", f"{measured}/*/*/*/dtype=float32,loop-gate=-2,max-stages=3,max-new-tokens=24=dloop"]
    table = made(capsys, "--results", str(measured), "--tables", "2", *names)["2"]
    greedy = only_greedy(table)
    marks = {row["setting"]: (row["loop"], row["trained"]) for row in greedy}
    assert marks == {"host": ("no", "no"), "loop,max-stages=3": ("yes", "no"), "dloop": ("yes", "yes")}
    assert "dspark: not measured: trained" in table["parts"][0]["notes"]
    for row, flags in zip(greedy, ((), ("loop-gate=-1",), ("loop-gate=-2",)), strict=True):
        gains = [gain(folder_of(measured, dataset, *flags)) for dataset in BOTH]
        assert [values(row[dataset]) for dataset in BOTH] == gains
        assert values(row["mean"]) == pytest.approx({key: (gains[0][key] + gains[1][key]) / 2 for key in gains[0]})
    assert "dspark: the mean leaves out talk, which not every setting has" in table["parts"][0]["notes"]


def test_table_3_has_the_stop_rules_beside_host_and_loop(measured, capsys):
    table = made(capsys, "--results", str(measured), "--tables", "3")["3"]
    rows = {row["setting"]: row for row in only(table)}
    assert {name: row["stop rule"] for name, row in rows.items()} == {
        "host": "none", "host,engine=twin,stop-rule=svip": "svip", **dict.fromkeys(LOOPS, "none")
    }  # fmt: skip
    ruled = rows["host,engine=twin,stop-rule=svip"]
    folder = folder_of(measured, "gsm8k", "engine=twin", "stop-rule=svip")
    assert values(ruled["gsm8k"]) == {"speedup": None, "tau": gain(folder)["tau"]}
    assert any("another engine: fast there, twin here" in note for note in table["parts"][0]["notes"])


def test_table_5_has_trees_alone_and_with_the_loop(measured, capsys):
    table = made(capsys, "--results", str(measured), "--tables", "5")["5"]
    alone, both = only(table)
    assert alone["setting"] == "tree,max-stages=3" or alone["setting"] == "tree"
    assert both["setting"].startswith("tree_loop")
    assert values(alone["mine"]) == gain(folder_of(measured, "mine", "tree-budget=6"))
    assert values(both["mine"]) == gain(folder_of(measured, "mine", "loop-gate=-2", "tree-budget=6"))
    assert "dspark: not measured: tree_dloop" in table["parts"][0]["notes"]


def test_table_a5_sweeps_the_threshold_of_one_drafter(measured, capsys):
    table = made(capsys, "--results", str(measured), "--tables", "A5")["A5"]
    rows = only(table)  # at temperature 1, one threshold is no sweep; nor is it of the tree
    assert [(row["g"], row["setting"]) for row in rows] == [("closed", "host"), ("-1", LOOPS[0]), ("-2", LOOPS[1])]
    assert values(rows[2]["gsm8k"]) == gain(folder_of(measured, "gsm8k", "loop-gate=-2"))


def test_thresholds_that_come_with_other_flags_or_weights_are_no_sweep(measured, tmp_path, capsys):
    for name, setting in (("host", {}), ("one", {"loop_gate": -1.0}), ("two", {"loop_gate": -2.0, "seed": 5})):
        folder = tmp_path / "results" / name
        folder.mkdir(parents=True)
        source = folder_of(measured, "mine")
        (folder / "rounds.jsonl").write_bytes((source / "rounds.jsonl").read_bytes())
        (folder / "summary.json").write_text((source / "summary.json").read_text())
        edit(folder, setting={**summary_of(source)["setting"], **setting})
    words = ["--results", str(tmp_path / "results"), "--tables", "A5"]
    table = made(capsys, *words)["A5"]
    assert table["parts"] == [] and "differ in --loop-gate alone" in table["missing"]
    edit(folder, setting={**summary_of(folder)["setting"], "seed": 0})
    assert [row["g"] for row in only(made(capsys, *words)["A5"])] == ["closed", "-1", "-2"]


# loops by their stages


def test_loops_are_counted_by_stages_by_hand():
    rounds = [round_of(5, 8, stages=2), round_of(1, 4), round_of(8, 8, stages=2, emitted=3), round_of(0, 0)]
    rounds[3]["stages"] = []
    found = counted(rounds)  # every round takes 0.25 + 0.5 s
    assert found == {0: Loops(1, 1, 0.25, 0.5), 1: Loops(1, 2, 0.25, 0.5), 2: Loops(2, 6 + 3, 0.5, 1.0)}
    assert total(found.values()) == Loops(4, 12, 1.0, 2.0) and total([]) == (0, 0, 0, 0)
    failed = response([round_of(1, 4)], error="E")
    (kept,) = looped([response(rounds), failed, response([])])
    assert kept.by_stages == found and kept.peak_memory_bytes == 1000


def invented(setting: str, rounds: list[dict], gpu: str | None = "G", **more) -> dict[Column, dict[str, Result]]:
    """A setting on one set, of one response for each list of rounds."""
    responses = [response(part, peak_memory_bytes=2**30 * (1 + n)) for n, part in enumerate(rounds)]
    condition = Condition("t", gpu or "C", "bfloat16", 0.0, 0, 1.0, 64)
    flat = [record for part in rounds for record in part]
    summary = {
        "target": "t", "draft": "d", "family": "dspark", "dataset": "mine", "setting_name": setting,
        "dtype": "bfloat16",
        "engine": "fast", "hardware": {"gpu": gpu, "cpu": "C", "threads": 1}, "setting": {"loop_gate": 1.0},
        "rounds": len(flat), "stages": sum(len(r["stages"]) for r in flat), "data_sha256": "a", "template_sha256": None,
        "tokens": sum(len(r["emitted"]) for r in flat) + len(rounds), "samples": [0], "failure_messages": [],
        "checkpoint_sha256": {"target": "t", "draft": "d"}, "full_acceptance_rate": {}, **more,
    }  # fmt: skip
    summary["setting"] |= {"max_new_tokens": 64, "temperature": 0.0, "top_k": 0, "top_p": 1.0}
    sums = np.array([len(rounds), 0, 0, 0, 1.0 * len(flat)])
    result = Result(Path(setting), summary, {SampleKey(0, "p"): sums}, looped(responses))
    return {Column(condition, "dspark", setting): {"mine": result}}


def rows_by_hand(number: str, found) -> list[list]:
    (table,) = paper([number], Sources(found=found))
    (part,) = table.parts
    return [row[1:] for row in part.rows]


def test_table_4_by_hand():
    rounds = [round_of(3, 4), round_of(1, 4), round_of(20, 20, stages=5), round_of(24, 24, stages=6)]
    found = invented("dloop", [rounds])
    assert rows_by_hand("4", found) == [
        ["dloop", "1", 2, 750.0, 3.0, 250.0, 1.5, 0.5, 6, pytest.approx(6 / 52)],
        ["dloop", "5+", 2, 750.0, 23.0, pytest.approx(1500 / 46), 1.5, 0.5, 46, pytest.approx(46 / 52)],
        ["dloop", "all", 4, 750.0, 13.0, pytest.approx(3000 / 52), 3.0, 1.0, 52, 1.0],
    ]
    assert paper(["4"], Sources(found=invented("host", [[round_of(3, 4)]])))[0].parts == []  # nothing has S > 1


def test_table_a3_by_hand():
    host = [round_of(3, 4)] * 10
    found = invented("host", [host]) | invented("dloop", [[round_of(4, 8, stages=2)] * 6 + [round_of(4, 4)] * 2])
    assert rows_by_hand("A3", found) == [
        ["host", 10, 10, 1.0, 41, None, 10.0, None],
        ["dloop", 14, 8, 1.75, 41, pytest.approx(-0.2), 8.0, pytest.approx(-0.2)],
    ]
    other = invented("host", [host], data_sha256="b") | invented("dloop", [[round_of(4, 8, stages=2)]])
    (part,) = paper(["A3"], Sources(found=other))[0].parts
    assert part.rows[1][6] is None and part.rows[1][8] is None
    assert "dspark: dloop is compared with nothing: host has another set of prompts on mine" in part.notes
    alone = paper(["A3"], Sources(found=invented("dloop", [host])))[0].parts[0]
    assert any("no setting without a loop" in note for note in alone.notes) and alone.rows[0][6] is None


def test_table_a4_by_hand():
    one, two, three = round_of(3, 4), round_of(3, 8, stages=2), round_of(3, 12, stages=3)
    slow = {**two, "draft_s": 0.75, "verify_s": 0.7}
    found = invented("dloop", [[one, one], [one, two, slow], [one], [three, two]])  # peaks of 1, 2, 3 and 4 GiB
    assert rows_by_hand("A4", found) == [
        ["dloop", "1", 4, 250.0, 500.0, 750.0, 3.0],
        ["dloop", "2", 3, pytest.approx(1250 / 3), pytest.approx(1700 / 3), pytest.approx(2950 / 3), 2.0],
        ["dloop", "3", 1, 250.0, 500.0, 750.0, 4.0],
    ]
    (part,) = paper(["A4"], Sources(found=invented("dloop", [[one]], gpu=None)))[0].parts
    assert part.rows[0][-1] is None and any("a CPU's records" in note for note in part.notes)
    deeper = paper(["A4"], Sources(found=invented("dloop", [[one, two]])))[0].parts[0].rows
    assert [row[-1] for row in deeper] == [None, 1.0]  # no response's longest loop has one stage


def test_settings_without_a_common_set_are_not_summed():
    host, loop = invented("host", [[round_of(3, 4)]]), invented("dloop", [[round_of(4, 8, stages=2)]])
    ((column, runs),) = loop.items()
    apart = host | {column: {"other": runs["mine"]}}
    (part,) = paper(["4"], Sources(found=apart))[0].parts
    assert part.rows == [] and part.notes == ["dspark: nothing is summed, as no set has all its settings"]
    tree = {column._replace(family="eagle3"): runs}
    (part,) = paper(["A3"], Sources(found=apart | tree))[0].parts
    assert part.rows[0][0] == "eagle3" and part.notes[0].startswith("dspark: nothing is summed")


def test_real_rounds_are_summed_as_they_are_recorded(measured, capsys):
    tables, hosts = made(capsys, "--results", str(measured), "--tables", "4,A3,A4"), {}
    for name, flags in (("host", ()), (LOOPS[1], ("loop-gate=-2",))):
        found = [pair for dataset in BOTH for pair in records_of(folder_of(measured, dataset, *flags))]
        by_stages = defaultdict(list)
        for _, rounds in found:
            for record in rounds:
                by_stages[str(len(record["stages"]))].append(record)
        rows = {row["S"]: row for row in only_greedy(tables["4"]) if row["setting"] == name}
        assert rows.keys() == {*by_stages, "all"}
        speeds = {row["S"]: row for row in only_greedy(tables["A4"]) if row["setting"] == name}
        for stages, rounds in by_stages.items():
            seconds = [sum(record[key] for record in rounds) for key in ("draft_s", "verify_s")]
            tokens = sum(len(record["emitted"]) for record in rounds)
            assert (rows[stages]["loops"], rows[stages]["tokens"]) == (len(rounds), tokens)
            assert rows[stages]["ms/token"] == pytest.approx(1000 * sum(seconds) / tokens)
            assert speeds[stages]["draft ms"] == pytest.approx(1000 * seconds[0] / len(rounds))
            assert speeds[stages]["verify ms"] == pytest.approx(1000 * seconds[1] / len(rounds))
        assert sum(rows[s]["of time"] for s in by_stages) == pytest.approx(1)
        (counts,) = [row for row in only_greedy(tables["A3"]) if row["setting"] == name]
        assert counts["verifications"] == sum(len(rounds) for _, rounds in found)
        assert counts["stages"] == sum(len(record["stages"]) for _, rounds in found for record in rounds)
        assert counts["tokens"] == sum(header["num_tokens"] for header, _ in found)
        assert counts["time s"] == pytest.approx(sum(header["decode_s"] for header, _ in found))
        hosts = hosts or counts
        changes = [counts[key] / hosts[key] - 1 for key in ("verifications", "time s")]
        assert [counts["verif. change"], counts["time change"]] == ([None] * 2 if counts is hosts else changes)
    assert "dspark: over gsm8k, mine; without talk, which not every setting has" in tables["4"]["parts"][0]["notes"]
    rules = [note for note in tables["A3"]["parts"][0]["notes"] if "stop-rule=svip is compared with nothing" in note]
    assert rules == [
        "dspark: host,engine=twin,stop-rule=svip is compared with nothing: host has another engine on gsm8k"
    ]


def test_figure_1_is_the_summaries_rates(measured, capsys):
    rows = only_greedy(made(capsys, "--results", str(measured), "--tables", "F1")["F1"])
    rates = {name: summary_of(folder_of(measured, name, "loop-gate=-2"))["full_acceptance_rate"] for name in BOTH}
    mine = [row for row in rows if row["setting"] == LOOPS[1]]
    assert [row["stage"] for row in mine] == [str(n) for n in range(1, 1 + max(map(len, rates.values())))]
    for row in mine:
        assert [row[name] for name in BOTH] == [rates[name].get(row["stage"]) for name in BOTH]
        assert row["talk"] is None and row["mean"] == pytest.approx(sum(row[name] for name in BOTH) / 2)


# scores


def test_a_score_of_other_units_opens_as_often():
    score, whole = np.array([0.1, 5.0, 3.0, 3.0, -2.0]), np.array([True, True, False, True, False])
    assert point_of(score, whole, 1) == Point(1, 1, 3)
    assert point_of(score, whole, 2) == Point(3, 2, 3)  # the tie opens too
    assert point_of(score, whole, 0) == Point(0, 0, 3) and point_of(score, whole, 0).precision is None


def test_table_a6_is_what_calibrate_found(tmp_path, capsys):
    trace = drawn()
    for text in trace.texts:
        text.features[..., 2] = np.nan
    save(tmp_path / "t.npz", trace)
    words = ["calibrate", "--trace", str(tmp_path / "t.npz"), "--at", "-0.8", "--output", str(tmp_path / "c.json")]
    assert entry(words) == 0
    table = made(capsys, "--tables", "A6", "--calibrations", str(tmp_path / "c.json"))["A6"]
    rows = {(row["of"], row["score"].partition(":")[0]): row for row in only(table)}
    assert len(rows) == 2 * (1 + 3) and {row["g"] for row in rows.values()} == {"-0.8"}
    for over, name in (("last", "one stage, given its prefix"), ("all", "the whole chain")):
        stages = calibration.stages_of(trace, over, 4)
        row = rows[name, "log-probability, summed"]
        opens = stages.score >= -0.8
        assert row["AUROC"] == calibration.auroc(stages.score, stages.whole) and row["stages"] == len(opens)
        assert (row["opened"], row["precision"]) == (opens.mean(), pytest.approx(stages.whole[opens].mean()))
        row, margin = rows[name, "margin"], stages.figures["margin"]
        best = np.argsort(-margin)[: opens.sum()]
        assert row["AUROC"] == calibration.auroc(margin, stages.whole) and row["opened"] == opens.mean()
        assert row["precision"] == pytest.approx(stages.whole[best].mean())
        row = rows[name, "confidence"]
        assert (row["AUROC"], row["opened"], row["precision"]) == (None, None, None)


def test_files_that_are_no_calibration_are_refused(tmp_path, capsys):
    path = tmp_path / "c.json"
    words = ["--tables", "A6", "--calibrations", str(path)]
    assert "cannot be read" in refused(capsys, *words)
    for text in ("{", "[1]", '{"schema": 1}', '{"schema": 2, "scores": {}}'):
        path.write_text(text)
        assert "what dloop calibrate --output wrote" in refused(capsys, *words)
    lacking = '{"schema": 1, "family": "f", "at": -1, "features": {}, "scores": {%s}}'
    for group in ('"last": {"all": {}}', ""):  # without source, texts and starts too
        path.write_text(lacking % group)
        assert "damaged, or of an older dloop" in refused(capsys, *words)


# training


@pytest.fixture(scope="module")
def trained(tiny: Folders, tmp_path_factory) -> Path:  # noqa: F811
    """Two training runs that differ in depth, and what a checkpoint of one of them brings."""
    home = tmp_path_factory.mktemp("trained")
    token_file(home / "tokens.npz", dloop.load_target(str(tiny.target), dtype="float32"))
    for stages in ("1", "2"):
        words = [
            "train", "--target-model-path", str(tiny.target), "--draft-init-path", str(tiny.drafter), "--max-steps",
            "3",
            "--train-data-path", str(home / "tokens.npz"), "--output-dir", str(home / f"n{stages}"), "--batch-size",
            "2",
            "--num-anchors", "4", "--log-interval", "1", "--dtype", "float32", "--device", "cpu",
            "--dloop-max-stage", stages,
        ]  # fmt: skip
        assert entry(words) == 0
    (drafter,) = (home / "n2").glob("epoch_*")
    words = tiny.words(home / "results", "--max-samples", "3", "--draft-model", str(drafter), "--loop-gate", "-2")
    assert entry([*words, "--beside", "loop-gate=1"]) == 0
    return home


def test_table_a7_joins_runs_with_what_their_checkpoints_bring(trained, capsys):
    results = trained / "results"
    names = [f"{results}/*/*/*/*loop-gate=-2*=dloop", f"{results}/*/*/*/dtype=float32,max-stages*=trained"]
    words = ["--results", str(results), "--tables", "A7", "--train-runs", str(trained / "n1"), str(trained / "n2")]
    table = made(capsys, *words, "--name", *names)["A7"]
    cost, brought = table["parts"]
    rows = [dict(zip(cost["columns"], row, strict=True)) for row in cost["rows"]]
    for row, stages in zip(rows, ("1", "2"), strict=True):
        lines = (trained / f"n{stages}" / "train.csv").read_text().splitlines()
        assert row["ms/step"] == median(float(line.split(",")[3]) for line in lines[1:])
        assert (row["run"], row["depths"]) == (str(trained / f"n{stages}"), ",".join("12"[: int(stages)]))
        assert (row["losses on"], row["loop weight"], row["steps"]) == ("first stage and the drawn one", "0.25", 3)
        assert row["peak GiB"] is None
    assert f"no results of a checkpoint of {trained / 'n1'}" in cost["notes"]
    assert any("on a CPU the record holds" in note for note in cost["notes"])
    rows = [dict(zip(brought["columns"], row, strict=True)) for row in brought["rows"]]
    assert [(row["setting"], row["run"], row["depths"]) for row in rows] == [
        (name, str(trained / "n2"), "1,2") for name in ("trained", "dloop")
    ]
    assert values(rows[1]["mine"])["tau"] == gain(folder_of(results, "mine", "loop-gate=-2"))["tau"]


def test_table_a7_goes_without_results(trained, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    run.mkdir()
    about = json.loads((trained / "n1" / "run.json").read_text())
    assert about["setting"]["dloop_max_stage"] == 1 and about["depths"] == [1] and about["peak_memory_bytes"] > 0
    (run / "train.csv").write_bytes((trained / "n1" / "train.csv").read_bytes())
    gpu = {**about["hardware"], "gpu": "NVIDIA H200"}
    (run / "run.json").write_text(json.dumps({**about, "hardware": gpu, "peak_memory_bytes": 3 * 2**29}))
    words = ["--tables", "A7", "--train-runs", str(run)]
    (row,) = only(made(capsys, *words)["A7"])
    assert row["peak GiB"] == 1.5 and row["family"] == "dspark"
    (run / "run.json").write_text(json.dumps({**about, "hardware": gpu, "peak_memory_bytes": None}))
    table = made(capsys, *words)["A7"]
    assert (
        only(table)[0]["peak GiB"] is None
        and f"{run}: no peak memory: no sitting of it ended" in table["parts"][0]["notes"]
    )


@pytest.mark.parametrize("text", ["{", "[1]", '{"schema": 1}', '{"schema": 9}', '{"fingerprint": "a"}', None])
def test_folders_that_are_no_training_run_are_refused(tmp_path, capsys, text):
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    line = refused(capsys, "--tables", "A7", "--train-runs", str(tmp_path))
    assert "give the --output-dir of a dloop train" in line and str(tmp_path) in line


def test_a_damaged_log_is_refused(trained, tmp_path, capsys):
    (tmp_path / "run.json").write_bytes((trained / "n1" / "run.json").read_bytes())
    for text in ("step,epoch\n1,2\n", "step,step_ms\n1,quick\n", "step,step_ms\n1,nan\n"):
        (tmp_path / "train.csv").write_text(text)
        assert "train.csv cannot be read" in refused(capsys, "--tables", "A7", "--train-runs", str(tmp_path))


def test_a_run_s_record_stands_from_the_start_and_keeps_the_largest_peak(tmp_path):
    path, cpu = tmp_path / "run.json", torch.device("cpu")

    def peak() -> int | None:
        return json.loads(path.read_text())["peak_memory_bytes"]

    with pytest.raises(KeyboardInterrupt), recorded(tmp_path, {"fingerprint": "a"}, cpu):
        assert peak() is None
        raise KeyboardInterrupt
    assert peak() > 0
    path.write_text(json.dumps({"fingerprint": "a", "peak_memory_bytes": 2**60}))
    with recorded(tmp_path, {"fingerprint": "a"}, cpu):
        assert peak() == 2**60
    assert peak() == 2**60
    with recorded(tmp_path, {"fingerprint": "b"}, cpu):
        assert peak() is None  # another run's
    assert 0 < peak() < 2**60
