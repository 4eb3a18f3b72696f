"""Conversations that are tokenised when a batch wants them: what is held is where each line begins.

A sample is a pure function of its line, and batches are one of (seed, step): runs share and resume as with tokens.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dloop.data.chat_templates import ChatTemplate
from dloop.data.conversations import Conversation, Skipped, parse_line, read_conversations
from dloop.data.tokenise import Collection, tokenise
from dloop.errors import UserError
from dloop.train.batch import Sample, TokenFile

BYTES = 4  # of a token, about: what samples are sorted by, so that like lengths stand together
NOTHING = Sample(np.zeros(1, np.int64), np.zeros(1, bool))  # weighs nothing


@dataclass(frozen=True)
class OnTheFly(TokenFile):
    """A .jsonl of conversations; `starts` are places in the file, `lens` estimates."""

    path: Path = Path()
    template: ChatTemplate | None = None
    vocab_size: int = 0

    @classmethod
    def index(cls, account: Collection, template: ChatTemplate, max_length: int, vocab_size: int) -> "OnTheFly":
        """Read every line once, and note those that are conversations; the others go to the account.

        Raises UserError without a sample.
        """
        path = account.path
        with path.open("rb") as file:
            sizes = np.array([len(raw) for raw in file], np.int64)
        starts = np.concatenate([[0], sizes.cumsum()])
        kept: list[int] = []
        for item in read_conversations(path):
            if isinstance(item, Conversation):
                kept.append(item.line - 1)
            else:
                account.skipped[item.reason].append(item.line)
        if not kept:
            raise UserError(f"{path} has no conversation to train on; see the summary above for the reasons")
        lens = np.stack([np.zeros(len(kept), np.int64), sizes[kept] // BYTES + 1], 1)
        none = np.zeros(0, np.int64)
        return cls(none, lens, starts[kept], max_length, none.astype(bool), path, template, vocab_size)

    def sample(self, index: int) -> Sample:
        """One sample, cut at `max_length`; one that the template cannot write weighs nothing. Raises UserError at a
        token beyond the vocabulary.
        """
        assert self.template is not None
        with self.path.open("rb") as file:
            file.seek(int(self.starts[index]))
            messages = parse_line(file.readline())
        (item,) = tokenise([Conversation(index, messages)], self.template, self.max_length)
        if isinstance(item, Skipped) or not len(item[1].tokens):
            return NOTHING
        tokens, labels = item[1]
        if tokens.max() >= self.vocab_size:
            raise UserError(
                f"{self.path}: the tokenizer gives token {tokens.max()}, the target knows {self.vocab_size}"
            )
        return Sample(tokens.astype(np.int64), labels)

    def contents(self) -> list[np.ndarray]:
        """The file's hash, and how it is written."""
        assert self.template is not None
        with self.path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256")
        template = self.template
        written = repr(
            (template.header, template.footer, template.system, template.jinja, template.tokenizer.inner.chat_template)
        )
        found.update(written.encode())
        return [np.frombuffer(found.digest(), np.uint8)]
