"""Answers from OpenAI-compatible servers, several at once: every assistant turn of a conversation anew, in its order.

Each server has its own askers, which take from one queue; what one server fails at goes to another before it counts as
failed, and a server that fails again and again is set aside.
Source of the task: SpecForge's regenerate_train_data.py (flags, non-thinking answers, multi-turn conversations).
"""

import http.client
import json
import logging
import math
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast
from urllib.parse import urlsplit

from dloop.chat import Message
from dloop.data.conversations import check_encodable
from dloop.errors import UserError

IN_A_ROW = 8  # failures after which a server is asked no more
THEIRS = (400, 413, 422)  # statuses that a conversation has earned; all others are the server's fault
logger = logging.getLogger("dloop")


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
    wait_s: float  # after a server's failure, doubling while it goes on failing
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
    """What this server will not answer however often it is asked; another one may."""


@dataclass(eq=False)
class Server:
    """One that is asked, and how it fares."""

    address: str
    failures: int = 0  # in a row
    rested: float = -math.inf  # when the wait after the last one ends; what began before it fails by the same cause


@dataclass(eq=False)
class Task:
    """A conversation to ask, and how often it failed at each server."""

    asked: Asked
    failed: Counter[Server] = field(default_factory=Counter[Server])


class Work:
    """What is left to ask, the servers still asked, and what came of it."""

    def __init__(self, asked: Iterable[Asked], servers: Sequence[str], asking: Asking) -> None:
        self.waiting, self.servers, self.asking = deque(map(Task, asked)), [*map(Server, servers)], asking
        self.done: queue.Queue[Reply | RuntimeError] = queue.Queue()
        self.changed = threading.Condition()

    def take(self, server: Server) -> Task | None:
        """The next conversation that failed at no other server less often; None once this server is asked no more."""
        with self.changed:
            while server in self.servers:
                for index, task in enumerate(self.waiting):
                    if task.failed[server] == min(task.failed[each] for each in self.servers):
                        del self.waiting[index]
                        return task
                self.changed.wait()
        return None

    def fail(self, task: Task, server: Server, reason: str, tries: int) -> None:
        """Note failed tries; another server may take the conversation, unless all have had theirs."""
        with self.changed:
            task.failed[server] += tries
            if all(task.failed[each] > self.asking.retries for each in self.servers):
                self.done.put(Reply(task.asked.line, task.asked.messages, False, reason))
            else:
                self.waiting.append(task)
            self.changed.notify_all()

    def rest(self, server: Server, began: float, reason: str) -> float:
        """Count a server's failure, and set it aside after too many in a row; seconds to wait before the next try."""
        with self.changed:
            server.failures += began >= server.rested
            seconds = self.asking.wait_s * 2 ** (server.failures - 1)
            if began >= server.rested:
                server.rested = time.monotonic() + seconds
            if server.failures >= IN_A_ROW and server in self.servers:
                logger.warning(f"{server.address} is asked no more, it failed {IN_A_ROW} times in a row: {reason}")
                self.servers.remove(server)
                if not self.servers:
                    text = (
                        f"no server answers any more, last: {server.address}: {reason}; start it again, then --resume"
                    )
                    self.done.put(RuntimeError(text))
            self.changed.notify_all()
            return seconds

    def end(self) -> None:
        """Ask no more."""
        with self.changed:
            self.servers.clear()
            self.changed.notify_all()


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
    work = Work(asked, servers, asking)
    pending = len(work.waiting)
    for server in [*work.servers]:
        for _ in range(min(concurrency, pending)):
            threading.Thread(target=serve, args=(work, server), daemon=True).start()
    try:
        for _ in range(pending):
            found = work.done.get()
            if isinstance(found, RuntimeError):
                raise found
            yield found
    finally:
        work.end()


def serve(work: Work, server: Server) -> None:
    """One asker: until nothing is left, or its server has failed too often in a row."""
    while (task := work.take(server)) is not None:
        began = time.monotonic()
        try:
            work.done.put(answered(task.asked, server.address, work.asking))
            server.failures = 0
        except RefusedError as error:
            work.fail(task, server, str(error), work.asking.retries + 1)
        except Exception as error:  # whatever a server may say: an asker that died of it would be waited for for ever
            reason = f"{type(error).__name__}: {error}"
            seconds = work.rest(server, began, reason)
            work.fail(task, server, f"{server.address}: {reason}", 1)
            time.sleep(seconds)


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
    if status != 200:
        fault = RefusedError if status in THEIRS else ValueError
        raise fault(f"HTTP {status}: {raw[:200].decode(errors='replace')}")
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
    text, thought = message.get("content"), message.get("reasoning_content") or message.get("reasoning")
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
