"""A target's own tokenizer: prompts and conversations to ids, ids to text that grows token by token."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypedDict, cast, overload, runtime_checkable

from jinja2 import TemplateError

from dloop.errors import UserError

FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what decoders write for bytes that are no character yet


class Message(TypedDict):
    """One turn of a conversation."""

    role: str
    content: str


@runtime_checkable
class HFTokenizer(Protocol):
    """What is used of transformers' tokenizers."""

    chat_template: object

    @overload
    def __call__(self, text: str, *, add_special_tokens: bool = True) -> Mapping[str, list[int]]: ...
    @overload
    def __call__(self, text: list[str], *, add_special_tokens: bool = True) -> Mapping[str, list[list[int]]]: ...

    def apply_chat_template(
        self,
        conversation: Sequence[Message],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        tokenize: bool,
        enable_thinking: bool,
    ) -> str: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str: ...


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back, without guesses."""

    inner: HFTokenizer
    name: str

    @property
    def has_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encode(self, text: str) -> list[int]:
        """A plain text, with the special tokens that the tokenizer itself adds."""
        return self.inner(text)["input_ids"]

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """A conversation up to where the answer begins; thinking off where a template knows the word."""
        return self.encode_rendered(self.render(messages, answer=True))

    def render(
        self, messages: Sequence[Message], *, answer: bool, thinking: bool = False, template: str | None = None
    ) -> str:
        """A conversation as the chat template (or this one) writes it; `answer`: up to where the next one begins."""
        if not self.has_template and template is None:
            raise UserError(f"the tokenizer of {self.name} has no chat template; use --no-chat and a plain prompt")
        try:
            return self.inner.apply_chat_template(
                messages,
                chat_template=template,
                add_generation_prompt=answer,
                tokenize=False,
                enable_thinking=thinking,
            )
        except TemplateError as error:
            raise UserError(f"the chat template of {self.name} refuses these messages: {error}") from error

    def encode_rendered(self, text: str) -> list[int]:
        """A text that holds its special tokens already."""
        return self.inner(text, add_special_tokens=False)["input_ids"]

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        """The same for many texts at once."""
        return self.inner(texts, add_special_tokens=False)["input_ids"] if texts else []

    def decode(self, tokens: Sequence[int]) -> str:
        """The text a reader sees."""
        return self._decode(tokens, skip_special=True)

    def show(self, tokens: Sequence[int]) -> str:
        """The text with special tokens visible."""
        return self._decode(tokens, skip_special=False)

    def _decode(self, tokens: Sequence[int], *, skip_special: bool) -> str:
        return self.inner.decode(list(tokens), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)


def load_tokenizer(folder: Path | None, name: str) -> Tokenizer | None:
    """The tokenizer beside a target's weights; None if there is none. Raises UserError where it cannot be read."""
    if folder is None or not any((folder / file).is_file() for file in FILES):
        return None
    from transformers import AutoTokenizer

    try:
        load = AutoTokenizer.from_pretrained  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        inner = cast(HFTokenizer, load(folder, trust_remote_code=False))
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"the tokenizer in {folder} cannot be read ({str(error).strip().splitlines()[0]}); "
            "fetch the checkpoint again, or give --prompt-ids"
        ) from error
    return Tokenizer(inner, name)


def read_messages(text: str) -> list[Message]:
    """Parse a conversation: a JSON list of objects with the strings `role` and `content`."""
    try:
        value: object = json.loads(text)
    except ValueError as error:
        raise UserError(f"--messages is not valid JSON ({error})") from error
    return check_messages(cast(list[object], value) if isinstance(value, list) else [], "--messages")


def check_messages(messages: Sequence[object], name: str) -> list[Message]:
    """A conversation, every turn of which is one. Raises UserError naming the faulty turn."""
    for message in messages:
        fields = cast(Mapping[str, object], message) if isinstance(message, Mapping) else {}
        if not (isinstance(fields.get("role"), str) and isinstance(fields.get("content"), str)):
            raise UserError(f"{name}: {message!r} needs the strings 'role' and 'content'")
    if not messages:
        raise UserError(f'{name} must be a JSON list such as [{{"role": "user", "content": "Hello"}}]')
    return cast(list[Message], list(messages))


def is_text(prompt: object) -> bool:
    """Whether a prompt is a text or a conversation, and no token ids."""
    items = cast(Sequence[object], prompt) if isinstance(prompt, list | tuple) else ()
    return isinstance(prompt, str) or any(isinstance(item, str | Mapping) for item in items)


def encode_prompt(prompt: object, tokenizer: Tokenizer | None, name: str) -> list[int]:
    """A text as it is, or a conversation in the chat template, as ids. Raises UserError where the means are missing."""
    if tokenizer is None:
        raise UserError(f"{name} has no tokenizer beside its weights; give the prompt as token ids")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.encode_chat(check_messages(cast(Sequence[object], prompt), "prompt_ids"))


@dataclass
class Growing:
    """A text that grows token by token. Bytes that are no whole character yet are held back."""

    decode: Callable[[Sequence[int]], str]
    tokens: list[int] = field(default_factory=list[int])
    shown: int = 0  # characters given away

    def push(self, tokens: Sequence[int]) -> str:
        """What these tokens add. The whole text is decoded anew: a token's text depends on its neighbours."""
        self.tokens += tokens
        return self._upto(self.decode(self.tokens).rstrip(UNFINISHED))

    def finish(self) -> str:
        """What was held back to the end."""
        return self._upto(self.decode(self.tokens))

    def _upto(self, text: str) -> str:
        new = text[self.shown :]
        self.shown = max(self.shown, len(text))
        return new
