"""`dloop data regenerate`: every assistant turn of a file anew, from servers that run the target."""

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from dloop.cli.args import Common, option, required
from dloop.data.conversations import Skipped
from dloop.data.prepare import read_any
from dloop.data.servers import Asked, Asking, ask_all, read_address
from dloop.errors import UserError, refuse_folder

SERVERS, DATA, SAMPLING = "servers", "data", "sampling"


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Let servers that run the target write every assistant turn of a file anew: training data of its drafters.

    Lines are conversations in any dialect, or {"prompt": "..."}. Several --server-address are asked at once; what one
    fails at another answers, and one that fails again and again is set aside. The output keeps the order of the input.
    Answers are in OUTPUT.parts as they come; --resume goes on there. `dloop data --model ...` answers in this process
    instead, and gives tokens.
    """

    model: str = required("the target's name, as the servers know it", group=SERVERS)
    server_address: list[str] = option([], "OpenAI-compatible servers: host:port, repeatable", group=SERVERS)
    concurrency: int = option(64, "conversations that each server has at a time", group=SERVERS)
    retries: int = option(5, "further tries of a conversation, by each server", group=SERVERS)
    retry_wait: float = option(
        1.0, "seconds to wait after a server's failure; doubled while it goes on failing", group=SERVERS
    )
    timeout: float = option(1800.0, "seconds that one answer may take", group=SERVERS)
    input_file_path: Path = required("conversations: .jsonl", group=DATA)
    output_file_path: Path = required("where the conversations with new answers go: .jsonl", group=DATA)
    num_samples: int | None = option(None, "the first N usable lines; all by default", group=DATA)
    resume: bool = option(False, "go on from what OUTPUT.parts holds; failed lines are tried again", group=DATA)
    temperature: float = option(0.7, "0 is greedy", group=SAMPLING)
    top_p: float = option(0.8, "draw among the likeliest tokens of this mass", group=SAMPLING)
    top_k: int = option(20, "draw among the k likeliest tokens; 0 is off", group=SAMPLING)
    max_tokens: int = option(
        4096, "most tokens of an answer; a longer one is cut and ends its conversation", group=SAMPLING
    )
    thinking: bool = option(
        False, "let the model think; its thoughts stay in the answer as <think> ... </think>", group=SAMPLING
    )


def run(command: Command) -> int:
    refuse(command)
    servers = [read_address(text) for text in command.server_address]
    asked, skipped = read(command)
    asking = Asking(
        model=command.model, temperature=command.temperature, top_p=command.top_p, top_k=command.top_k,
        max_tokens=command.max_tokens, thinking=command.thinking, retries=command.retries, wait_s=command.retry_wait,
        timeout_s=command.timeout,
    )  # fmt: skip
    parts = command.output_file_path.with_name(f"{command.output_file_path.name}.parts")
    known = {**asdict(asking), "input_sha256": digest(command.input_file_path), "num_samples": command.num_samples}
    known = {name: known[name] for name in known if name not in ("retries", "wait_s", "timeout_s")}
    done = earlier(command, parts, known)
    left = [each for each in asked if each.line not in done]
    print(
        f"{len(asked)} conversations, {len(done)} of them answered already, {skipped} lines left out", file=sys.stderr
    )
    failed: dict[int, str] = {}
    with (
        parts.open("a", encoding="utf-8") as file,
        closing(ask_all(left, servers, asking, command.concurrency)) as replies,
    ):
        for reply in replies:
            if reply.error is not None:
                failed[reply.line] = reply.error
                continue
            row = {
                "line": reply.line,
                "conversations": reply.messages,
                "finish_reason": "length" if reply.cut else "stop",
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
    return finish(command, parts, failed)


def refuse(command: Command) -> None:
    if not command.server_address:
        raise UserError(
            "give --server-address host:port (repeatable), or answer in this process: dloop data --model ..."
        )
    for name, least in (("concurrency", 1), ("retries", 0), ("retry_wait", 0), ("timeout", 0), ("max_tokens", 1)):
        if not getattr(command, name) >= least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(command, name)} must be at least {least}")
    output = command.output_file_path
    for path in (command.input_file_path, output):
        if path.suffix != ".jsonl":
            raise UserError(f"{path} must end in .jsonl")
    for beside in ("", ".json", ".parts"):
        refuse_folder(output.with_name(f"{output.name}{beside}"), "--output-file-path")
    if not command.input_file_path.is_file():
        raise UserError(f"--input-file-path {command.input_file_path} does not exist; make it with dloop data prepare")


def read(command: Command) -> tuple[list[Asked], int]:
    """What can be asked, and how many lines cannot; told on standard error."""
    asked: list[Asked] = []
    skipped: list[Skipped] = []
    for item in read_any(command.input_file_path):
        if isinstance(item, Skipped):
            skipped.append(item)
        elif command.num_samples is None or len(asked) < command.num_samples:
            asked.append(Asked(item.line, item.messages))
    for item in skipped[:5]:
        print(f"{command.input_file_path}, line {item.line}: {item.reason}", file=sys.stderr)
    if not asked:
        raise UserError(f"{command.input_file_path} has no conversation to ask; see the lines above")
    return asked, len(skipped)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def rows_of(parts: Path) -> Iterator[dict[str, object]]:
    """What was answered; a line that a killed run or a full disk left torn is none, and is asked again."""
    with parts.open("rb") as file:
        for line in file:
            row = row_of(line)
            if isinstance(row.get("line"), int) and {"conversations", "finish_reason"} <= row.keys():
                yield row


def header_of(parts: Path) -> bytes:
    """The first line."""
    with parts.open("rb") as file:
        return file.readline()


def row_of(line: bytes) -> dict[str, object]:
    """The fields of one line of the parts, none if it is torn."""
    try:
        row: object = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return cast(dict[str, object], row) if isinstance(row, dict) else {}


def earlier(command: Command, parts: Path, known: Mapping[str, object]) -> set[int]:
    """Lines that an unfinished run with the same settings has answered. Raises UserError where there is another."""
    if command.output_file_path.exists():
        raise UserError(f"--output-file-path {command.output_file_path} exists; choose another name, or remove it")
    if parts.exists() and not command.resume:
        raise UserError(f"{parts} holds the answers of an unfinished run; add --resume to go on with it, or remove it")
    header = header_of(parts) if parts.exists() else b""
    if not header.endswith(b"\n"):  # nothing yet, or a run that was killed at its first line
        parts.parent.mkdir(parents=True, exist_ok=True)
        parts.write_text(json.dumps({"run": known}) + "\n", encoding="utf-8")
        return set()
    before = row_of(header).get("run")
    if before is None:
        raise UserError(f"{parts} does not begin with the settings of a run; remove it, its lines are answered anew")
    if before != known:
        raise UserError(f"{parts} is of a run with other settings or another input; use the same ones, or remove it")
    text = parts.read_bytes()
    if not text.endswith(b"\n"):  # a killed run's last line
        parts.write_bytes(text[: text.rindex(b"\n") + 1])
    return {cast(int, row["line"]) for row in rows_of(parts)}


def finish(command: Command, parts: Path, failed: dict[int, str]) -> int:
    """Write the conversations in order, and what is known of them; with failures the parts stay, and the exit is 1."""
    from dloop.data.answers import whole

    if failed:
        for line, reason in sorted(failed.items())[:5]:
            print(f"line {line}: {reason}", file=sys.stderr)
        print(
            f"{len(failed)} conversations have no answer; the same command with --resume tries them again",
            file=sys.stderr,
        )
        return 1
    rows = sorted({cast(int, row["line"]): row for row in rows_of(parts)}.items())
    with whole(command.output_file_path) as file:
        for _, row in rows:
            file.write(f"{json.dumps(row, ensure_ascii=False)}\n".encode())
    about = cast(dict[str, object], row_of(header_of(parts))["run"])
    record = {
        "schema": 1,
        "source": "servers",
        **about,
        "samples": len(rows),
        "cut": sum(r["finish_reason"] == "length" for _, r in rows),
    }
    beside = command.output_file_path.with_name(f"{command.output_file_path.name}.json")
    beside.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    parts.unlink()
    print(json.dumps(record) if command.json else command.output_file_path)
    return 0
