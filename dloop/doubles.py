"""Scripted doubles, part of `dloop.testing`: a target with a table of logits, a drafter with a script.

They need no model, and both check what the loop tells them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.types import Features, Rows, Seen, Stage, StageRequest

Script = Callable[[list[int], int], Stage]  # (the text up to the anchor, included; index of the stage) -> the stage


@dataclass
class TableTarget:
    """A target without a model: the whole text chooses a row of the table, so a forgotten token shows at once.

    Features hold (token, position). Rows at a wrong position and paths that are no branch are assertion errors.
    """

    table: Float[Tensor, "M V"]
    texts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # committed, by slot
    tails: dict[int, list[list[int]]] = field(default_factory=dict[int, list[list[int]]])  # text at each verified row

    @classmethod
    def random(cls, vocab_size: int, seed: int = 0, scale: float = 2.0) -> "TableTarget":
        """A table of 997 rows of normal logits."""
        return cls(scale * torch.randn(997, vocab_size, generator=torch.Generator().manual_seed(seed)))

    def logits(self, text: Sequence[int]) -> Float[Tensor, " V"]:
        mark = 1
        for token in text:
            mark = (mark * 31 + token + 1) % 1_000_003
        return self.table[mark % len(self.table)]

    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        self.texts[slot], self.tails[slot] = list(tokens), []
        facts = torch.tensor([[token, position] for position, token in enumerate(tokens)], dtype=torch.float32)
        return Seen(logits=self.logits(tokens)[None], features=Features(taps=facts, last=facts))

    def verify(self, rows: Rows) -> Seen:
        texts: list[list[int]] = []
        for token, slot, position, parent in zip(rows.token, rows.slot, rows.position, rows.parent, strict=True):
            texts.append([*(texts[parent] if parent >= 0 else self.texts[slot]), token])
            assert position == len(texts[-1]) - 1, f"the row at position {position} stands after {position} others"
        for slot in set(rows.slot):
            self.tails[slot] = [text for text, owner in zip(texts, rows.slot, strict=True) if owner == slot]
        facts = torch.tensor(list(zip(rows.token, rows.position, strict=True)), dtype=torch.float32)
        logits = torch.stack([self.logits(text) for text in texts])
        return Seen(logits=logits, features=Features(taps=facts, last=facts))

    def commit(self, slot: int, path: list[int]) -> None:
        for node in path:
            text = self.tails[slot][node]
            assert text[:-1] == self.texts[slot], f"path {path} is not a branch of what was verified"
            self.texts[slot] = text
        self.tails[slot] = []


@dataclass
class ScriptedDrafter:
    """A drafter that does what its script says. It keeps the text it was told, and checks that nothing is missing."""

    stage_len: int
    script: Script
    texts: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # committed, by slot
    tails: dict[int, list[int]] = field(default_factory=dict[int, list[int]])  # anchor and spines of this round

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        before = self.texts[slot] if position else []
        assert len(before) == position and len(features.taps) == len(tokens), "tokens missing or given twice"
        self.texts[slot], self.tails[slot] = before + tokens, []

    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        return [self._stage(request) for request in requests]

    def _stage(self, request: StageRequest) -> Stage:
        tail = self.tails[request.slot] if request.index else [request.anchor]
        assert tail[-1:] == [request.anchor], f"anchor {request.anchor} does not continue the tail {tail}"
        stage = self.script(self.texts[request.slot] + tail, request.index)
        self.tails[request.slot] = tail + [stage.tokens[node] for node in stage.spine]
        return stage


def chain(tokens: list[int], score: float = -0.1) -> Stage:
    """A stage without branches."""
    order = list(range(len(tokens)))
    return Stage(tokens=tokens, parents=[i - 1 for i in order], logp=[score] * len(tokens), spine=order, score=score)


def replay(stages: Iterable[Stage]) -> Script:
    """The script that gives these stages one after the other."""
    remaining = iter(stages)
    return lambda text, index: next(remaining)


def knowing(text: list[int], stage_len: int, num_right: int, score: float = -0.1) -> Script:
    """The script that knows the whole text: the first `num_right` tokens of every round are right, the others wrong."""

    def script(before: list[int], index: int) -> Stage:
        truth = (text[len(before) :] + [0] * stage_len)[:stage_len]
        right = max(0, num_right - index * stage_len)
        return chain([token if i < right else (token + 1) % 2 for i, token in enumerate(truth)], score)

    return script
