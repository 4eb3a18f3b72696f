"""Conversations as a chat template writes them, cut where the assistant's own words begin and end.

Source of the label rule and of the template "qwen": SpecForge's data scripts (everything after an assistant header up
to and including the end-of-turn mark and its newline).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Literal

from dloop.chat import Message, Tokenizer
from dloop.errors import UserError

TemplateName = Literal["model", "qwen"]
SYSTEM = "You are a helpful assistant."  # what "qwen" inserts
CHATML_HEADER, CHATML_FOOTER = "<|im_start|>assistant\n", "<|im_end|>\n"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST, SECOND, ASKED = "Zebra one", "Zebra two", "Zebra asks"  # words no template writes


@dataclass(frozen=True)
class ChatTemplate:
    """How one target writes conversations: `header` opens an assistant turn, `footer` ends it."""

    tokenizer: Tokenizer
    header: str
    footer: str
    system: str | None = None  # inserted where a conversation has none
    jinja: str | None = None  # None: the tokenizer's own

    def render(self, messages: Sequence[Message]) -> str:
        """The whole conversation as text, without a prompt for a further answer."""
        return self.tokenizer.render(self.with_system(messages), answer=False, template=self.jinja)

    def prompt(self, messages: Sequence[Message]) -> str:
        """A conversation up to where decoding's answer begins, thinking off."""
        return self.tokenizer.render(self.with_system(messages), answer=True, template=self.jinja)

    def with_system(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The conversation with the template's own system prompt where it has none."""
        if self.system is None or messages[0]["role"] == "system":
            return messages
        inserted: Message = {"role": "system", "content": self.system}
        return [inserted, *messages]

    def pieces(self, messages: Sequence[Message]) -> list[str]:
        """The rendered text in pieces: what is given, an answer with its end, what is given, an answer ...

        Raises ValueError if the template's marks do not tell the answers apart, as when a turn quotes them.
        """
        text = self.render(messages)
        num_answers = sum(message["role"] == "assistant" for message in messages)
        marks = (self.header, self.footer.strip() or self.footer)
        if any(mark in message["content"] for message in messages for mark in marks):
            raise ValueError("a turn quotes the chat template's own marks")
        pieces: list[str] = []
        while self.header in text:
            end = text.index(self.header) + len(self.header)
            stop = self.end_of_answer(text, end)
            pieces += [text[:end], text[end:stop]]
            text = text[stop:]
        if len(pieces) != 2 * num_answers:
            raise ValueError(f"the chat template shows {len(pieces) // 2} of {num_answers} answers")
        return [*pieces, text]

    def end_of_answer(self, text: str, start: int) -> int:
        """Where the answer's footer ends; the last one may lack its newline. Raises ValueError without a footer."""
        at = text.find(self.footer, start)
        if at >= 0:
            return at + len(self.footer)
        if not text.endswith(self.footer.strip()):
            raise ValueError("the chat template shows an answer without an end")
        return len(text)


def chat_template(name: TemplateName, tokenizer: Tokenizer) -> ChatTemplate:
    """The template of this name for this tokenizer. Raises UserError if it does not fit."""
    return qwen(tokenizer) if name == "qwen" else own(tokenizer)


def qwen(tokenizer: Tokenizer) -> ChatTemplate:
    """ChatML with a system prompt: as the tokenizer's own template writes it, else as ChatML is written plainly."""
    for mark in ("<|im_start|>", "<|im_end|>"):
        if len(tokenizer.encode_rendered(mark)) != 1:
            raise UserError(
                f"--chat-template qwen needs the token {mark}, which {tokenizer.name} does not have; "
                "use --chat-template model"
            )
    template = ChatTemplate(tokenizer, CHATML_HEADER, CHATML_FOOTER, SYSTEM)
    if not tokenizer.has_template or CHATML_HEADER not in template.render(probe(1)):
        return ChatTemplate(tokenizer, CHATML_HEADER, CHATML_FOOTER, SYSTEM, CHATML)
    return template


def own(tokenizer: Tokenizer) -> ChatTemplate:
    """The tokenizer's own template; its marks are read off two small conversations."""
    if not tokenizer.has_template:
        raise UserError(f"{tokenizer.name} has no chat template; use --chat-template qwen, or give tokens (.npz)")
    once, twice = (tokenizer.render(probe(turns), answer=False) for turns in (1, 2))
    asked = tokenizer.render(probe(1)[:1], answer=False)
    prompted = tokenizer.render(probe(1)[:1], answer=True, thinking=True)
    where = twice.find(FIRST)
    if prompted.startswith(asked) and where >= 0 and FIRST in once:
        before = twice[twice.index(ASKED) : where]
        prompt = prompted[prompted.index(ASKED) :]
        header = commonprefix([before, prompt])[len(asked) - asked.index(ASKED) :]
        footer = once[once.index(FIRST) + len(FIRST) :]
        if header.strip() and footer.strip() and footer in twice:
            return ChatTemplate(tokenizer, header, footer)
    raise UserError(
        f"the chat template of {tokenizer.name} does not mark where answers begin and end; use --chat-template qwen, "
        "or give tokens (.npz)"
    )


def probe(turns: int) -> list[Message]:
    """A conversation of one or two questions and answers."""
    messages: list[Message] = []
    for answer in (FIRST, SECOND)[:turns]:
        messages.append({"role": "user", "content": ASKED})
        messages.append({"role": "assistant", "content": answer})
    return messages
