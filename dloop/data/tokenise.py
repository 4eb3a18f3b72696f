"""Conversations to samples: tokens, labels, and an account of every line that was left out."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dloop.data.chat_templates import ChatTemplate
from dloop.data.conversations import Conversation, Skipped, read_conversations
from dloop.errors import UserError
from dloop.train.batch import Sample

TOGETHER = 64  # conversations given to the tokenizer at once: it works on them in parallel
MOST_EMPTY = 0.05  # share of samples without a label from which the template or the data is at fault
SHOWN = 5  # line numbers named for each reason
EMPTY = "no label within --max-length"


def tokenise(
    conversations: Iterable[Conversation | Skipped], template: ChatTemplate, max_length: int
) -> Iterator[tuple[int, Sample] | Skipped]:
    """(line, sample) for every conversation, in order, cut at `max_length`.

    An answer is tokenised on its own, after a header that ends where decoding's prompt ends: training and decoding
    then see the same tokens even where a tokenizer would merge across that edge.
    """
    for group in grouped(conversations, TOGETHER):
        pieces: dict[int, list[str]] = {}
        faults: dict[int, str] = {}
        for item in group:
            try:
                if isinstance(item, Conversation):
                    pieces[item.line] = template.pieces(item.messages)
            except (ValueError, UserError) as error:  # the latter: a template that refuses these roles
                faults[item.line] = str(error)
        encoded = iter(template.tokenizer.encode_all([text for texts in pieces.values() for text in texts]))
        for item in group:
            if isinstance(item, Skipped):
                yield item
            elif item.line in faults:
                yield Skipped(item.line, faults[item.line])
            else:
                yield item.line, joined([next(encoded) for _ in pieces[item.line]], max_length)


def grouped(conversations: Iterable[Conversation | Skipped], size: int) -> Iterator[list[Conversation | Skipped]]:
    """Lists of at most this many."""
    group: list[Conversation | Skipped] = []
    for item in conversations:
        group.append(item)
        if len(group) == size:
            yield group
            group = []
    yield group


def joined(pieces: list[list[int]], max_length: int) -> Sample:
    """One sample; every second piece is an answer."""
    labels = np.repeat(np.arange(len(pieces)) % 2 == 1, [len(piece) for piece in pieces])
    tokens = np.array([token for piece in pieces for token in piece], np.int32)
    return Sample(tokens[:max_length], labels[:max_length])


@dataclass
class Collection:
    """Samples to train on, and what was left out."""

    path: Path
    min_labels: int
    samples: list[Sample] = field(default_factory=list[Sample])
    skipped: dict[str, list[int]] = field(default_factory=lambda: defaultdict[str, list[int]](list))
    short: list[int] = field(default_factory=list[int])  # lines with fewer labels than min_labels, but some
    empty: list[int] = field(default_factory=list[int])

    def add(self, item: tuple[int, Sample] | Skipped, *, strict: bool) -> None:
        """Take a sample or note why not. Raises UserError at a malformed line if `strict`."""
        if isinstance(item, Skipped):
            if strict:
                raise UserError(f"{self.path}, line {item.line}: {item.reason}; mend it or leave out --strict-data")
            self.skipped[item.reason].append(item.line)
            return
        line, sample = item
        num_labels = int(sample.labels.sum())
        if num_labels >= max(1, self.min_labels):
            self.samples.append(sample)
        else:
            (self.short if num_labels else self.empty).append(line)

    def check(self) -> None:
        """Raises UserError if many samples have no label: a wrong template would silently train on nothing."""
        total = len(self.samples) + len(self.short) + len(self.empty)
        if len(self.empty) > MOST_EMPTY * total:
            raise UserError(
                f"{len(self.empty)} of {total} samples of {self.path} have an empty loss mask, first: line "
                f"{self.empty[0]}; check --chat-template, and --max-length against the length of the prompts"
            )

    def summary(self) -> list[str]:
        """What was used and what was not, a line for each reason."""
        total = len(self.samples) + len(self.short) + len(self.empty) + sum(map(len, self.skipped.values()))
        reasons = [("skipped", lines, reason) for reason, lines in self.skipped.items()]
        reasons += [("dropped", self.short, f"fewer than {self.min_labels} labels"), ("dropped", self.empty, EMPTY)]
        lines = [f"{self.path}: {len(self.samples)} of {total} conversations to train on"]
        return lines + [f"  {verb} {len(where)}: {why} ({named(where)})" for verb, where, why in reasons if where]


def named(lines: list[int]) -> str:
    """The first of these line numbers."""
    more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
    return f"line{'s' if len(lines) > 1 else ''} {', '.join(map(str, lines[:SHOWN]))}{more}"


def samples_of(path: Path, template: ChatTemplate, max_length: int) -> Iterator[tuple[int, Sample] | Skipped]:
    """Every line of a .jsonl as a sample, or why not."""
    return tokenise(read_conversations(path), template, max_length)
