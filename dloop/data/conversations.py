"""Conversations in JSON lines, one a line, in the dialects that data sets use. What is malformed is told, not used."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from dloop.chat import Message
from dloop.errors import UserError

ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


@dataclass(frozen=True)
class Conversation:
    """The turns of one line: perhaps a system prompt, then user and assistant in turn; an assistant at least once."""

    line: int  # from 1
    messages: list[Message]


@dataclass(frozen=True)
class Skipped:
    """A line that is not used, and why."""

    line: int
    reason: str


def read_conversations(path: Path) -> Iterator[Conversation | Skipped]:
    """Every line of a .jsonl in its order. Raises UserError where the file cannot be read."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    yield Conversation(number, parse_line(raw))
                except ValueError as error:
                    yield Skipped(number, str(error))
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror}); give a .jsonl with one conversation a line"
        ) from error


def parse_line(raw: bytes) -> list[Message]:
    """The turns of one line. Raises ValueError with the reason, in a few words without the line's own text."""
    fields = parse_object(raw)
    turns = conversation_of(fields)
    if not isinstance(turns, list):
        raise ValueError("no list 'conversations' or 'messages'")
    messages = [parse_turn(turn) for turn in cast(list[object], turns)]
    check_order([message["role"] for message in messages])
    return messages


def conversation_of(fields: Mapping[str, object]) -> object:
    """What a line holds as its turns, None if nothing. Raises ValueError where it holds two."""
    given = [fields[name] for name in ("conversations", "messages") if fields.get(name) is not None]
    if len(given) > 1:
        raise ValueError("both 'conversations' and 'messages'")
    return given[0] if given else None


def parse_object(raw: bytes) -> Mapping[str, object]:
    """The fields of one line, none if it is no object. Raises ValueError with the reason."""
    try:
        text = raw.decode("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise ValueError("not UTF-8") from None
    if not text:
        raise ValueError("empty line")
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError("bad JSON") from None
    return cast(Mapping[str, object], value) if isinstance(value, Mapping) else {}


def parse_turn(turn: object) -> Message:
    """One turn, as {role, content} or {from, value}. Raises ValueError with the reason."""
    fields = cast(Mapping[str, object], turn) if isinstance(turn, Mapping) else {}
    role, content = fields.get("role", fields.get("from")), fields.get("content", fields.get("value"))
    if not isinstance(role, str):
        raise ValueError("a turn without a role")
    if role not in ROLES:
        raise ValueError(f"unknown role {role[:20]!r}")
    if not isinstance(content, str):
        raise ValueError(f"content of the {ROLES[role]} is no text")
    if ROLES[role] == "assistant" and not content.strip():
        raise ValueError("an assistant turn is empty")
    check_encodable(content)
    return {"role": ROLES[role], "content": content}


def check_encodable(text: str) -> None:
    """Raises ValueError where a text cannot be written down: half a surrogate pair, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8") from None


def check_order(roles: list[str]) -> None:
    """Raises ValueError unless user and assistant take turns, after at most one system prompt."""
    if "assistant" not in roles:
        raise ValueError("no assistant turn")
    spoken = roles[1:] if roles[0] == "system" else roles
    if "system" in spoken:
        raise ValueError("a system turn that is not the first")
    if spoken[0] != "user":
        raise ValueError("starts with an assistant turn")
    for before, after in zip(spoken, spoken[1:], strict=False):
        if before == after:
            raise ValueError(f"two {after} turns in a row")
