"""The eight benchmarks: where they come from, how many samples are used, what their prompts look like. No torch.

Prompt forms and counts are the published ones (dflash's benchmark, DLoop's README): acceptance depends on them.
"""

import hashlib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from dloop.errors import UserError

Row = Mapping[str, object]

SHUFFLE_SEED = 0
OTHER_SET_SAMPLES = 128  # of a set that is not one of the eight
STEP_BY_STEP = "Please reason step by step, and put your final answer within \\boxed{}."
PASS_THE_TESTS = "Write a solution to the following problem and make sure that it passes the tests:"
EXPERT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program"
)
WITH_STARTER = "Use the following code structure"
WITHOUT_STARTER = "Write your code in the following format"
WAYS_OUT = "install the extra (pip install 'dloop-decoding[bench]'), or give --data-dir DIR with DIR/{name}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One benchmark as published."""

    source: str  # data set on the hub
    config: str | None = None
    split: str = "test"
    files: tuple[str, ...] = ()  # read these JSON files of the source instead of a config
    columns: tuple[str, ...]
    rows: int
    used: int
    turns: Callable[[Row], list[str]]


@dataclass(frozen=True)
class Sample:
    """One conversation to be held; `index` is its row in the unshuffled set."""

    index: int
    turns: list[str]


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """The samples of a run, and what they were taken from."""

    name: str
    rows: int
    official_rows: int | None  # None: not one of the eight
    official_samples: int | None
    sha256: str  # of all rows' prompts
    samples: list[Sample]

    @property
    def is_complete(self) -> bool:
        """Whether the published samples are measured, all of them and no others."""
        return (self.rows, len(self.samples)) == (self.official_rows, self.official_samples)


@runtime_checkable
class HubDataset(Protocol):
    """What is used of `datasets.Dataset`."""

    def select_columns(self, column_names: list[str]) -> "HubDataset": ...

    def __iter__(self) -> Iterator[Row]: ...


@runtime_checkable
class Datasets(Protocol):
    """What is used of the package `datasets`."""

    def load_dataset(
        self, path: str, name: str | None = None, *, split: str, data_files: list[str] | None = None
    ) -> HubDataset: ...


def math_turns(column: str) -> Callable[[Row], list[str]]:
    """The question, and the instruction of Qwen's model cards."""
    return lambda row: [f"{row[column]}\n{STEP_BY_STEP}"]


def humaneval_turns(row: Row) -> list[str]:
    """A task, and the function to be completed in a fence."""
    return [f"{PASS_THE_TESTS}\n```python\n{row['prompt']}\n```"]


def livecodebench_turns(row: Row) -> list[str]:
    """The problem, and the form of the answer; all of it in one user turn."""
    code = row["starter_code"]
    form, inside = (WITH_STARTER, code) if code else (WITHOUT_STARTER, "# YOUR CODE HERE")
    return [
        f"{EXPERT}\n\n### Question:\n{row['question_content']}\n\n### Format: {form}:\n```python\n{inside}\n```\n\n"
        "### Answer: (use the provided format with backticks)"
    ]


def alpaca_turns(row: Row) -> list[str]:
    """The instruction, with its input if it has one."""
    return [f"{row['instruction']}\n\nInput:\n{row['input']}" if row["input"] else str(row["instruction"])]


TASKS = {
    "gsm8k": Task(
        source="openai/gsm8k",
        config="main",
        columns=("question",),
        rows=1319,
        used=128,
        turns=math_turns("question"),
    ),
    "math500": Task(
        source="HuggingFaceH4/MATH-500", columns=("problem",), rows=500, used=128, turns=math_turns("problem")
    ),
    "aime25": Task(
        source="MathArena/aime_2025",
        split="train",
        columns=("problem",),
        rows=30,
        used=30,
        turns=math_turns("problem"),
    ),
    "humaneval": Task(source="openai/openai_humaneval", columns=("prompt",), rows=164, used=164, turns=humaneval_turns),
    "mbpp": Task(
        source="google-research-datasets/mbpp",
        config="sanitized",
        columns=("prompt",),
        rows=257,
        used=128,
        turns=lambda row: [str(row["prompt"])],
    ),
    "livecodebench": Task(
        source="livecodebench/code_generation_lite",
        files=("test.jsonl", "test2.jsonl", "test3.jsonl", "test4.jsonl", "test5.jsonl", "test6.jsonl"),
        columns=("question_content", "starter_code"),
        rows=1055,
        used=128,
        turns=livecodebench_turns,
    ),
    "mt-bench": Task(
        source="HuggingFaceH4/mt_bench_prompts",
        split="train",
        columns=("prompt",),
        rows=80,
        used=80,
        turns=lambda row: list(cast(list[str], row["prompt"])),
    ),
    "alpaca": Task(
        source="tatsu-lab/alpaca",
        split="train",
        columns=("instruction", "input"),
        rows=52002,
        used=128,
        turns=alpaca_turns,
    ),
}


def names_of(given: str, data_dir: Path | None) -> list[str]:
    """The sets that --dataset asks for: one, some, or all eight. With a folder, other names too."""
    names = list(TASKS) if given == "all" else list(dict.fromkeys(part.strip() for part in given.split(",")))
    for name in names:
        if name in TASKS:
            continue
        if data_dir is None or not name or "/" in name or not (data_dir / f"{name}.jsonl").is_file():
            hint = f", or a file in --data-dir {data_dir}" if data_dir else ""
            raise UserError(f"--dataset {name!r} is not known; choose all, or some of {','.join(TASKS)}{hint}")
    return names


def load(name: str, data_dir: Path | None, max_samples: int | None = None) -> DataSet:
    """The samples to measure: the first ones after a shuffle with seed 0, as many as published or `max_samples`."""
    task = TASKS.get(name)
    rows = read_prompts(data_dir / f"{name}.jsonl") if data_dir else download(name)
    if max_samples is not None and max_samples < 1:
        raise UserError(f"--max-samples {max_samples} must be at least 1")
    used = max_samples if max_samples is not None else task.used if task else OTHER_SET_SAMPLES
    return DataSet(
        name=name,
        rows=len(rows),
        official_rows=task.rows if task else None,
        official_samples=task.used if task else None,
        sha256=hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        samples=[Sample(index, rows[index]) for index in chosen(len(rows), used)],
    )


def chosen(num_rows: int, count: int) -> list[int]:
    """Rows to use, in their order: the start of the permutation that `datasets` makes of seed 0."""
    from numpy.random import default_rng

    order: list[int] = default_rng(SHUFFLE_SEED).permutation(num_rows).tolist()
    return order[:count]


def read_prompts(path: Path) -> list[list[str]]:
    """Finished prompts, a line each: {"turns": ["first question", "second", ...]}."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}); --data-dir must hold one file NAME.jsonl a set") from error
    rows = [turns_of(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError(f'{path} is empty; give a line {{"turns": ["..."]}} for each sample')
    return rows


def turns_of(line: str, where: str) -> list[str]:
    """One line's turns. Raises UserError naming the place."""
    try:
        value: object = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not valid JSON ({error})") from error
    turns = cast(dict[str, object], value).get("turns") if isinstance(value, dict) else None
    texts = cast(list[object], turns) if isinstance(turns, list) else []
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise UserError(f'{where} must be {{"turns": ["...", ...]}} with one text or more')
    return cast(list[str], texts)


def download(name: str) -> list[list[str]]:
    """All rows of one of the eight sets, from the hub, as finished prompts."""
    task = TASKS[name]
    try:
        datasets = cast(Datasets, importlib.import_module("datasets"))
    except ImportError as error:
        ways = WAYS_OUT.format(name=name)
        raise UserError(f"--dataset {name} is downloaded with the package datasets, not found here; {ways}") from error
    files = [f"hf://datasets/{task.source}/{file}" for file in task.files]
    try:
        if files:
            found = datasets.load_dataset("json", split="train", data_files=files)
        else:
            found = datasets.load_dataset(task.source, task.config, split=task.split)
        return [task.turns(row) for row in found.select_columns(list(task.columns))]
    except Exception as error:  # whatever the package and the network raise: there is one way out
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"--dataset {name} could not be fetched from {task.source} ({reason}); check the network, "
            f"or give --data-dir DIR with DIR/{name}.jsonl"
        ) from error
