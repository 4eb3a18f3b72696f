"""Answers from OpenAI-compatible servers, several at once: every assistant turn of a conversation anew, in its order.

Each server has its own askers, which take from one queue; what one server fails at goes back and another may take it.
Source of the task: SpecForge's regenerate_train_data.py (flags, non-thinking answers, multi-turn conversations).
"""

import http.client
import json
import queue
import threading
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from dloop.chat import Message
from dloop.data.conversations import check_encodable
from dloop.errors import UserError

IN_A_ROW = 8  # failures after which a server is asked no more, beside others


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How answers are drawn, and how patiently."""

    model: str
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    thinking: bool
    retries: int
    wait_s: float  # before a conversation is tried again, doubling
    timeout_s: float


class Asked(NamedTuple):
    """One conversation of a file, its assistant turns to be written anew."""

    line: int
    messages: list[Message]


class Reply(NamedTuple):
    """The conversation with new answers; or why there is none."""

    line: int
    messages: list[Message]
    cut: bool  # an answer that reached the limit of tokens
    error: str | None


class RefusedError(Exception):
    """An answer that no other try will better."""


@dataclass
class Work:
    """What is left to ask, and what came of it."""

    waiting: "queue.Queue[tuple[int, Asked] | None]" = field(default_factory=queue.Queue)
    done: "queue.Queue[Reply | str]" = field(default_factory=queue.Queue)


def read_address(text: str) -> str:
    """host:port or a URL as a URL. Raises UserError at anything else."""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        sound = False
    if not sound:
        raise UserError(f"--server-address {text} is no address; give host:port, such as localhost:30000")
    return url.rstrip("/").removesuffix("/v1")


def ask_all(asked: Iterable[Asked], servers: Sequence[str], asking: Asking, concurrency: int) -> Generator[Reply]:
    """Replies in the order in which they end. Raises RuntimeError when no server is left.

    `concurrency`: conversations that each server has at a time.
    """
    work, pending = Work(), 0
    for each in asked:
        work.waiting.put((0, each))
        pending += 1
    askers = [
        threading.Thread(target=serve, args=(work, server, asking), daemon=True)
        for server in servers
        for _ in range(min(concurrency, max(pending, 1)))
    ]
    for thread in askers:
        thread.start()
    alive = len(askers)
    try:
        while pending:
            found = work.done.get()
            if isinstance(found, Reply):
                pending -= 1
                yield found
                continue
            alive -= 1
            if not alive:
                raise RuntimeError(f"no server answers any more, last: {found}; start it again, then --resume")
    finally:
        for _ in askers:
            work.waiting.put(None)


def serve(work: Work, server: str, asking: Asking) -> None:
    """One asker: until nothing is left, or its server has failed too often in a row."""
    failures = 0
    while (item := work.waiting.get()) is not None:
        tries, asked = item
        try:
            work.done.put(answered(asked, server, asking))
            failures = 0
            continue
        except RefusedError as error:
            work.done.put(Reply(asked.line, asked.messages, False, str(error)))
            continue
        except Exception as error:  # whatever a server may say: an asker that died of it would be waited for for ever
            reason = f"{server}: {type(error).__name__}: {error}"
        failures += 1
        if tries == asking.retries:
            work.done.put(Reply(asked.line, asked.messages, False, reason))
        else:
            time.sleep(asking.wait_s * 2**tries)
            work.waiting.put((tries + 1, asked))
        if failures == IN_A_ROW:
            work.done.put(reason)
            return


def answered(asked: Asked, server: str, asking: Asking) -> Reply:
    """The conversation with every assistant turn asked anew, after the turns before it as they now are."""
    turns = [turn for turn in asked.messages if turn["role"] != "assistant"]
    messages: list[Message] = []
    cut = False
    for turn in turns:
        messages.append(turn)
        if turn["role"] == "user":
            text, finish = complete(messages, server, asking)
            if not text.strip():
                raise RefusedError("an empty answer")
            messages.append({"role": "assistant", "content": text})
            cut = finish == "length"
            if cut:
                break  # what follows would answer half a turn
    return Reply(asked.line, messages, cut, None)


def complete(messages: Sequence[Message], server: str, asking: Asking) -> tuple[str, str]:
    """(the next assistant turn, why it ended)."""
    body = {
        "model": asking.model,
        "messages": list(messages),
        "temperature": asking.temperature,
        "top_p": asking.top_p,
        "max_tokens": asking.max_tokens,
        "chat_template_kwargs": {"enable_thinking": asking.thinking},
        **({"top_k": asking.top_k} if asking.top_k else {}),
    }
    status, raw = post(f"{server}/v1/chat/completions", json.dumps(body).encode(), asking.timeout_s)
    if 400 <= status < 500 and status not in (408, 425, 429):
        raise RefusedError(f"HTTP {status}: {raw[:200].decode(errors='replace')}")
    if status != 200:
        raise ValueError(f"HTTP {status}")
    return read_reply(raw, thinking=asking.thinking)


def read_reply(raw: bytes, *, thinking: bool) -> tuple[str, str]:
    """(text, "stop" or "length") of the first choice. Raises ValueError at others, RefusedError at a filter's."""
    try:
        choice = cast(Mapping[str, object], json.loads(raw)["choices"][0])
        given, finish = choice["message"], choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError("a reply without choices") from error
    if not isinstance(given, Mapping):
        raise ValueError("a message that is no object")
    if finish == "content_filter":
        raise RefusedError("an answer ended by content_filter")
    if finish not in ("stop", "length"):  # half an answer, as from a server that was shut down
        raise ValueError(f"an answer ended by {finish or 'null'}")
    message = cast(Mapping[str, object], given)
    text, thought = message.get("content"), message.get("reasoning_content")
    if text is None:
        text = ""  # cut while it thought
    if not isinstance(text, str):
        raise ValueError("a message without text")
    if thinking and isinstance(thought, str) and thought.strip():
        text = f"<think>\n{thought.strip()}\n</think>\n\n{text}"
    check_encodable(text)
    return text, finish


def post(url: str, body: bytes, timeout_s: float) -> tuple[int, bytes]:
    """(status, body) of one request."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout_s)
    try:
        connection.request("POST", parts.path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
