"""`dloop data prepare`: a published data set, or any file of conversations, in one dialect."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option
from dloop.data.conversations import Conversation, Skipped
from dloop.data.prepare import fetch, parsed, read_any, write_line
from dloop.errors import UserError, refuse_folder

FOLDER = Path("cache/dataset")


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Write conversations in one dialect, one a line; lines that cannot be used are listed in OUTPUT.bad.jsonl.

    Input: {"conversations": [...]} or {"messages": [...]} with turns {role, content} or {from, value}, or
    {"prompt": "..."} without either. --dataset perfectblend fetches mlabonne/open-perfectblend through Hugging Face
    datasets.
    """

    dataset: Literal["perfectblend"] | None = option(None, "a published data set", group="data")
    input: Path | None = option(None, "a file of conversations: .jsonl", group="data")
    output: Path | None = option(None, "default: cache/dataset/NAME_train.jsonl", group="data")
    max_samples: int | None = option(None, "the first N usable ones; all by default", group="data")
    strict: bool = option(False, "stop at the first line that cannot be used", group="data")


def run(command: Command) -> int:
    name = command.dataset or (command.input or Path()).stem
    output = command.output or FOLDER / f"{name}_train.jsonl"
    listed = output.with_name(f"{output.name}.bad.jsonl")
    refuse(command, output, listed)
    items: Iterator[Conversation | Skipped] = (
        read_any(command.input) if command.input is not None else parsed(fetch(command.dataset or ""))
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    bad: list[Skipped] = []
    written = write(command, items, output, bad)
    listed.unlink(missing_ok=True)
    if bad:
        listed.write_text("".join(json.dumps({"line": one.line, "reason": one.reason}) + "\n" for one in bad))
    reasons = Counter(one.reason for one in bad)
    for reason, count in reasons.most_common():
        print(f"left out {count}: {reason} (lines in {listed})", file=sys.stderr)
    record = {"schema": 1, "output": str(output), "samples": written, "left_out": dict(reasons)}
    print(json.dumps(record) if command.json else output)
    return 0


def refuse(command: Command, output: Path, listed: Path) -> None:
    if (command.dataset is None) == (command.input is None):
        raise UserError("give either --dataset perfectblend or --input FILE.jsonl")
    if command.input is not None and not command.input.is_file():
        raise UserError(f"--input {command.input} does not exist; give a .jsonl of conversations")
    if command.input is not None and any(path.exists() and path.samefile(command.input) for path in (output, listed)):
        raise UserError(f"--input {command.input} would be overwritten; give another --output")
    for path in (output, listed):
        refuse_folder(path, "--output")
    if command.max_samples is not None and command.max_samples < 1:
        raise UserError(f"--max-samples {command.max_samples} must be at least 1")


def write(command: Command, items: Iterator[Conversation | Skipped], output: Path, bad: list[Skipped]) -> int:
    """How many were written; the file appears when all of them are."""
    from dloop.data.answers import whole  # NumPy only from here on

    source, written = command.input or command.dataset, 0
    with whole(output) as file:
        for item in items:
            if isinstance(item, Skipped):
                if command.strict:
                    raise UserError(f"{source}, line {item.line}: {item.reason}; mend it or leave out --strict")
                bad.append(item)
            elif written != command.max_samples:
                file.write(write_line(item))
                written += 1
        if not written:
            raise UserError(f"{source} has no conversation that can be used ({len(bad)} bad lines)")
    return written
