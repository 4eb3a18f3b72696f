"""Prompts in JSON lines: the question that each line asks first, in the target's ids. What is not asked is told."""

import gzip
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import numpy as np

from dloop.chat import Message, Tokenizer
from dloop.data.chat_templates import TemplateName, qwen
from dloop.data.conversations import Skipped, parse_object, parse_turn
from dloop.data.tokenise import named
from dloop.errors import UserError

FORMS = ("prompt", "turns", "conversations", "messages")
NO_ROOM = "leaves no room for the answer in the target's context"
Encode = Callable[[list[Message]], list[int]]


@dataclass(frozen=True)
class Question:
    """What a line asks first: perhaps a system prompt, then one user turn."""

    line: int  # from 1
    messages: list[Message]
    asks_more: bool  # the line has further user turns, which are not asked


@dataclass(frozen=True)
class Prompt:
    """A question, and its ids as decoding gives them to the target."""

    question: Question
    tokens: np.ndarray


def read_questions(path: Path, flag: str = "--prompts") -> Iterator[Question | Skipped]:
    """Every line of a .jsonl or .jsonl.gz in its order. Raises UserError where the file, named by `flag`, cannot be
    read.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    yield parse_question(number, parse_object(raw))
                except ValueError as error:
                    yield Skipped(number, str(error))
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(
            f'{flag} {path} cannot be read ({reason}); give JSON lines such as {{"prompt": "..."}}'
        ) from error


def parse_question(number: int, fields: Mapping[str, object]) -> Question:
    """The first question of a line in any of its forms. Raises ValueError with the reason."""
    given = [name for name in FORMS if name in fields]
    if len(given) != 1:
        raise ValueError(f"both {given[0]!r} and {given[1]!r}" if given else f"none of {', '.join(map(repr, FORMS))}")
    value = fields[given[0]]
    if given[0] == "prompt":
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{given[0]!r} is no list with something in it")
    turns = cast(list[object], value)
    if given[0] in ("prompt", "turns"):
        turns = [{"role": "user", "content": text} for text in turns]
    head = [parse_turn(turn) for turn in turns[:1]]
    if head[0]["role"] == "system":
        head += [parse_turn(turn) for turn in turns[1:2]]
    if head[-1]["role"] != "user":
        raise ValueError("starts with an assistant turn" if head[-1]["role"] == "assistant" else "no user turn")
    if not head[-1]["content"].strip():
        raise ValueError("the user turn is empty")
    return Question(number, head, any(is_users(turn) for turn in turns[len(head) :]))


def is_users(turn: object) -> bool:
    """Whether this is a user's turn, as far as it is a turn at all."""
    fields = cast(Mapping[str, object], turn) if isinstance(turn, Mapping) else {}
    return fields.get("role", fields.get("from")) in ("user", "human")


def prompt_encoder(name: TemplateName | Literal["none"], tokenizer: Tokenizer) -> Encode:
    """How decoding turns a question into ids: by the target's template, by "qwen", or as a plain text ("none").

    The encoder raises ValueError for what it cannot write. Raises UserError where the template does not fit.
    """
    if name == "qwen":
        template = qwen(tokenizer)
        return lambda messages: tokenizer.encode_rendered(template.prompt(messages))
    if name == "model" and not tokenizer.has_template:
        raise UserError(
            f"{tokenizer.name} has no chat template; use --chat-template qwen, or none to give prompts as they are"
        )
    return tokenizer.encode_chat if name == "model" else plain_encoder(tokenizer)


def plain_encoder(tokenizer: Tokenizer) -> Encode:
    """Texts as they are, with the special tokens that the tokenizer itself adds."""

    def encode(messages: list[Message]) -> list[int]:
        if len(messages) > 1:
            raise ValueError("a system prompt, and no chat template to write it with")
        return tokenizer.encode(messages[0]["content"])

    return encode


@dataclass
class Prompts:
    """Prompts to answer, and an account of every line that is left out."""

    path: Path
    encode: Encode
    room: int  # most tokens of a prompt that leave room for the answer
    max_tokens: int | None = None
    max_samples: int | None = None
    lines: int = 0
    asking_more: int = 0  # used lines whose further turns are not asked
    used: list[Prompt] = field(default_factory=list[Prompt])
    skipped: dict[str, list[int]] = field(default_factory=lambda: defaultdict[str, list[int]](list))

    def add(self, item: Question | Skipped) -> None:
        """Take a question or note why not."""
        self.lines += 1
        reason = item.reason if isinstance(item, Skipped) else self._take(item)
        if reason is not None:
            self.skipped[reason].append(item.line)

    def _take(self, question: Question) -> str | None:
        """Use a question; the reason if it is not used."""
        if self.max_samples is not None and len(self.used) >= self.max_samples:
            return f"beyond --max-samples {self.max_samples}"
        try:
            tokens = self.encode(question.messages)
        except ValueError as error:  # a UserError too: a template that refuses a system prompt
            return str(error)
        if not tokens:
            return "no token"
        if self.max_tokens is not None and len(tokens) > self.max_tokens:
            return f"more than --max-prompt-tokens {self.max_tokens}"
        if len(tokens) > self.room:
            return NO_ROOM
        self.used.append(Prompt(question, np.array(tokens, np.int32)))
        self.asking_more += question.asks_more
        return None

    def summary(self) -> list[str]:
        """What is used and what is not, a line for each reason."""
        lines = [f"{self.path}: {len(self.used)} of {self.lines} prompts to answer"]
        lines += [f"  left out {len(where)}: {why} ({named(where)})" for why, where in self.skipped.items()]
        if self.asking_more:
            lines.append(f"  {self.asking_more} conversations are asked their first question alone")
        return lines
