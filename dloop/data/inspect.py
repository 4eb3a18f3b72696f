"""A sample as training sees it, for eyes; and counts of what training makes little of."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby

from rich.text import Text

from dloop.chat import Tokenizer
from dloop.data.conversations import Skipped
from dloop.data.tokenise import named
from dloop.train.batch import Sample

LABEL, GIVEN = "bold green", "dim"


def stretches(sample: Sample, tokenizer: Tokenizer) -> Iterator[tuple[bool, str]]:
    """(whether these are labels, their text with special tokens) of a whole sample."""
    at = 0
    for is_label, group in groupby(sample.labels.tolist()):
        count = len(list(group))
        yield bool(is_label), tokenizer.show(sample.tokens[at : at + count].tolist())
        at += count


def marked(sample: Sample, tokenizer: Tokenizer, *, plain: bool) -> Text:
    """The rendered sample, labels in colour; `plain`: between [[ and ]]."""
    text = Text()
    for is_label, piece in stretches(sample, tokenizer):
        text.append(f"[[{piece}]]" if is_label and plain else piece, style=LABEL if is_label else GIVEN)
    return text


@dataclass
class Account:
    """What a file holds for samples of at most so many tokens."""

    max_length: int
    samples: int = 0
    tokens: int = 0
    labels: int = 0
    empty: list[int] = field(default_factory=list[int])  # lines without a label in reach
    cut: list[int] = field(default_factory=list[int])
    skipped: dict[str, list[int]] = field(default_factory=lambda: defaultdict[str, list[int]](list))

    def add(self, line: int, sample: Sample) -> None:
        """Count one sample, given uncut."""
        kept = sample.labels[: self.max_length]
        self.samples += 1
        self.tokens += len(kept)
        self.labels += int(kept.sum())
        if not kept.any():
            self.empty.append(line)
        if len(sample.tokens) > self.max_length:
            self.cut.append(line)

    @property
    def lines(self) -> int:
        """All that were read."""
        return self.samples + sum(map(len, self.skipped.values()))

    def skip(self, item: Skipped) -> None:
        """Note a line that is left out."""
        self.skipped[item.reason].append(item.line)

    def record(self) -> dict[str, object]:
        """The counts."""
        return {
            "samples": self.samples,
            "tokens": self.tokens,
            "labels": self.labels,
            "empty": len(self.empty),
            "truncated": len(self.cut),
            "skipped": {reason: len(lines) for reason, lines in self.skipped.items()},
        }

    def told(self) -> list[str]:
        """The counts as lines."""
        share = self.labels / max(self.tokens, 1)
        lines = [f"{self.samples} samples, {self.tokens} tokens, {self.labels} labels ({share:.0%})"]
        for what, found in (("without a label", self.empty), (f"cut at {self.max_length} tokens", self.cut)):
            lines.append(f"  {len(found)} {what}" + (f" ({named(found)})" if found else ""))
        return lines + [f"  {len(where)} left out: {why} ({named(where)})" for why, where in self.skipped.items()]
