"""The eight benchmarks: which samples, in which order, in which words; what happens without their data."""

import json
import sys
from types import SimpleNamespace

import pytest

from dloop.bench import tasks
from dloop.bench.tasks import TASKS, Sample, chosen, load, names_of
from dloop.cli.main import entry
from dloop.errors import UserError

PUBLISHED = {  # rows, used, first rows after the shuffle (block-drafters.md 4.4; the last three: computed, order only)
    "gsm8k": (1319, 128, [264, 725, 996, 586, 1010, 12]),
    "math500": (500, 128, [221, 434, 109, 334, 375, 71]),
    "mbpp": (257, 128, [252, 92, 246, 54, 203, 149]),
    "livecodebench": (1055, 128, [212, 515, 638, 734, 305, 553]),
    "alpaca": (52002, 128, [35925, 31064, 48165, 49117, 30750, 201]),
    "aime25": (30, 30, None),
    "humaneval": (164, 164, None),
    "mt-bench": (80, 80, None),
}
ROWS = {
    "gsm8k": ({"question": "Two and two?"}, [f"Two and two?\n{tasks.STEP_BY_STEP}"]),
    "math500": ({"problem": "$1+1$?"}, [f"$1+1$?\n{tasks.STEP_BY_STEP}"]),
    "aime25": ({"problem": "$1+1$?"}, [f"$1+1$?\n{tasks.STEP_BY_STEP}"]),
    "humaneval": (
        {"prompt": "def f():\n"},
        [
            "Write a solution to the following problem and make sure that it passes the tests:\n"
            "```python\ndef f():\n\n```"
        ],
    ),
    "mbpp": ({"prompt": "Write f."}, ["Write f."]),
    "mt-bench": ({"prompt": ["Ask.", "Ask again."]}, ["Ask.", "Ask again."]),
    "alpaca": ({"instruction": "Add.", "input": "1, 2"}, ["Add.\n\nInput:\n1, 2"]),
}


def folder_with(tmp_path, name: str, count: int):
    lines = [json.dumps({"turns": [f"question {index}"]}) for index in range(count)]
    (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_and_order_are_the_published_ones(name):
    rows, used, first = PUBLISHED[name]
    assert (TASKS[name].rows, TASKS[name].used) == (rows, used)
    order = chosen(rows, used)
    assert len(set(order)) == used and max(order) < rows
    assert first is None or order[:6] == first


def test_the_eight_sets_are_these():
    assert list(TASKS) == "gsm8k math500 aime25 humaneval mbpp livecodebench mt-bench alpaca".split()
    assert names_of("all", None) == list(TASKS)
    assert names_of("mbpp, gsm8k,mbpp", None) == ["mbpp", "gsm8k"]


@pytest.mark.parametrize("name", ROWS)
def test_prompts_have_the_published_form(name):
    row, turns = ROWS[name]
    assert TASKS[name].turns(row) == turns


def test_alpaca_without_input_is_the_instruction():
    assert TASKS["alpaca"].turns({"instruction": "Add.", "input": ""}) == ["Add."]


@pytest.mark.parametrize("code", ["", "class A:\n    "])
def test_livecodebench_names_the_form_of_the_answer(code):
    (text,) = TASKS["livecodebench"].turns({"question_content": "Sort.", "starter_code": code})
    expert, question, form, answer = text.split("\n\n")
    assert expert.startswith("You are an expert Python programmer.") and expert.count(". ") == 2
    assert question == "### Question:\nSort."
    inside = code or "# YOUR CODE HERE"
    words = "Use the following code structure" if code else "Write your code in the following format"
    assert form == f"### Format: {words}:\n```python\n{inside}\n```"
    assert answer == "### Answer: (use the provided format with backticks)"


def test_a_folder_gives_finished_prompts_in_the_same_order(tmp_path):
    data = load("gsm8k", folder_with(tmp_path, "gsm8k", 1319))
    assert data.samples[:2] == [Sample(264, ["question 264"]), Sample(725, ["question 725"])]
    assert len(data.samples) == 128 and data.is_complete


@pytest.mark.parametrize(
    ("count", "max_samples", "used"), [(1319, 5, 5), (40, None, 40), (40, 100, 40), (1320, None, 128)]
)
def test_another_choice_than_the_published_one_is_marked(tmp_path, count, max_samples, used):
    data = load("gsm8k", folder_with(tmp_path, "gsm8k", count), max_samples)
    assert len(data.samples) == used and not data.is_complete


def test_more_samples_begin_with_the_fewer(tmp_path):
    folder = folder_with(tmp_path, "mbpp", 257)
    assert load("mbpp", folder, 9).samples[:4] == load("mbpp", folder, 4).samples


def test_a_folder_may_hold_other_sets(tmp_path):
    data = load("mine", folder_with(tmp_path, "mine", 3))
    assert names_of("mine,gsm8k", tmp_path) == ["mine", "gsm8k"]
    assert [sample.index for sample in data.samples] == chosen(3, 3) and not data.is_complete


def test_the_hash_is_of_the_whole_set(tmp_path):
    folder = folder_with(tmp_path, "mine", 3)
    before = load("mine", folder, 1).sha256
    assert load("mine", folder).sha256 == before
    assert load("mine", folder_with(tmp_path, "mine", 4), 1).sha256 != before


@pytest.mark.parametrize("given", ["gsm9k", "", "gsm8k,", "../secret", "none"])
def test_an_unknown_set_lists_the_choices(tmp_path, given):
    for folder in (None, tmp_path):
        with pytest.raises(UserError, match="choose all, or some of gsm8k,math500"):
            names_of(given, folder)


@pytest.mark.parametrize("line", ["{", "[]", '{"turns": []}', '{"turns": [1]}', '{"turns": [" "]}', '{"turns": "a"}'])
def test_a_broken_line_is_named(tmp_path, line):
    (tmp_path / "mine.jsonl").write_text('{"turns": ["a"]}\n' + line)
    with pytest.raises(UserError, match="mine.jsonl, line 2"):
        load("mine", tmp_path)


def test_an_empty_file_and_no_samples_are_refused(tmp_path):
    (tmp_path / "mine.jsonl").write_text("\n")
    with pytest.raises(UserError, match="is empty"):
        load("mine", tmp_path)
    with pytest.raises(UserError, match="--max-samples 0"):
        load("mine", folder_with(tmp_path, "mine", 3), 0)


def test_without_the_package_both_ways_out_are_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert entry(["bench", "--model", "smollm2", "--draft-model", "demo", "--dataset", "gsm8k"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "dloop-decoding[bench]" in line and "--data-dir DIR with DIR/gsm8k.jsonl" in line


class Rows(list):
    def select_columns(self, columns):
        return Rows({column: row[column] for column in columns} for row in self)


@pytest.mark.parametrize("name", ["gsm8k", "livecodebench"])
def test_a_download_becomes_prompts(monkeypatch, name):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        row = {"question": "Why?", "answer": 1, "question_content": "Why?", "starter_code": "", "private": "large"}
        return Rows([row] * 3)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    data = load(name, None)
    assert len(data.samples) == 3 and "Why?" in data.samples[0].turns[0]
    if name == "gsm8k":
        assert asked == [(("openai/gsm8k", "main"), {"split": "test"})]
    else:
        files = asked[0][1]["data_files"]
        assert [file.rpartition("/")[2] for file in files] == ["test.jsonl", *(f"test{i}.jsonl" for i in range(2, 7))]


def test_a_failed_download_is_the_users_to_solve(monkeypatch):
    def load_dataset(*_args, **_kwargs):
        raise ConnectionError("no route\nto host")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    with pytest.raises(UserError, match=r"could not be fetched .*no route.*--data-dir DIR with DIR/mbpp.jsonl"):
        load("mbpp", None)
