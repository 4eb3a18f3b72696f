"""Any data set of conversations as JSON lines in one dialect, with an account of every line that is left out."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import cast

from dloop.chat import Message
from dloop.data.conversations import Conversation, Skipped, check_order, conversation_of, parse_object, parse_turn
from dloop.errors import UserError

PERFECTBLEND = "mlabonne/open-perfectblend"
SETS = {"perfectblend": PERFECTBLEND}


def read_any(path: Path) -> Iterator[Conversation | Skipped]:
    """Conversations, answered or not, in the three dialects, or {"prompt": ...}; every line in its order."""
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    yield Conversation(number, turns_of(parse_object(raw)))
                except ValueError as error:
                    yield Skipped(number, str(error))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); give a .jsonl") from error


def turns_of(fields: Mapping[str, object]) -> list[Message]:
    """The turns of one line; its prompt only where it has no conversation. Raises ValueError with the reason."""
    turns = conversation_of(fields)
    if turns is None and isinstance(fields.get("prompt"), str):
        turns = [{"role": "user", "content": fields["prompt"]}]
    if not isinstance(turns, list) or not turns:
        raise ValueError("no list 'conversations' or 'messages', and no 'prompt'")
    messages = [parse_turn(turn) for turn in cast(list[object], turns)]
    roles = [message["role"] for message in messages]
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise ValueError("no user turn")
    check_order(roles if "assistant" in roles else [*roles, "assistant"])
    return messages


def fetch(name: str) -> Iterable[Mapping[str, object]]:
    """The rows of a published data set. Raises UserError where it cannot be had."""
    try:
        from datasets import load_dataset  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError as error:
        raise UserError(
            f"--dataset {name} needs the package datasets: pip install 'dloop-decoding[train]', or give a file: --input"
        ) from error
    try:
        return cast(Iterable[Mapping[str, object]], load_dataset(SETS[name], split="train"))
    except Exception as error:  # whatever the hub, the network and the readers of archives trip over
        raise UserError(
            f"{SETS[name]} could not be fetched ({type(error).__name__}: {error}); give a file: --input"
        ) from error


def parsed(rows: Iterable[Mapping[str, object]]) -> Iterator[Conversation | Skipped]:
    """Rows of a data set as conversations, numbered from 1."""
    for number, row in enumerate(rows, 1):
        try:
            yield Conversation(number, turns_of(row))
        except ValueError as error:
            yield Skipped(number, str(error))


def write_line(conversation: Conversation) -> bytes:
    """One conversation in the dialect that all commands write, with the line it came from."""
    row = {"id": conversation.line, "conversations": conversation.messages}
    return f"{json.dumps(row, ensure_ascii=False)}\n".encode()
