"""Plain decoding of many sequences at once, tokens chosen on the device: for data regeneration.

The host looks only every few steps; what a sequence writes after its end is thrown away. Each text is the one the
sequence gets alone, because a row's logits do not depend on the others.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Int, Int64
from torch import Tensor

from dloop.fast.graphs import Parts
from dloop.fast.ops import kernel_ops
from dloop.fast.rows import FIELDS, TILE, Integers, Layout, blank, bucket_of, units_of
from dloop.fast.target import SHORT_PROMPT, FastTarget, chain_rows, columns_of
from dloop.kernels.shapes import KEYS, NEVER
from dloop.loop import Limits
from dloop.sampling import choose, salt
from dloop.targets.hf import check_logits
from dloop.types import FinishReason, Sampling

EVERY = 16  # steps between two looks


@dataclass(frozen=True)
class Prompt:
    """One sequence to be continued, with its own seed."""

    index: int
    tokens: list[int]
    sampling: Sampling


@dataclass
class Text:
    """A sequence while it grows."""

    prompt: Prompt
    tokens: list[int]
    finish: FinishReason | None


@dataclass(frozen=True)
class Finished:
    """A finished text."""

    index: int
    seed: int
    tokens: list[int]
    finish: FinishReason


class Decoder:
    """At most `live` sequences, each the one row of its slot. Sampling settings but the seed are shared."""

    def __init__(self, target: FastTarget, live: int, limits: Limits, sampling: Sampling) -> None:
        self.most, self.live, device = live, bucket_of(live), target.device
        self.session = target.open((), self.live)
        self.memory = self.session.memory
        self.limits, self.sampling = limits, sampling
        heads = target.stack.heads
        self.ops = kernel_ops(columns_of(heads, 1).count)
        self.layout = Layout(rows=self.live, tile_rows=columns_of(heads, 1).rows, tree=False)
        self.block: Int[Tensor, " n"] = torch.from_numpy(self._empty()).to(device)
        self.alive: Int[Tensor, " R"] = torch.zeros(self.live, dtype=torch.int32, device=device)
        self.salts: Int64[Tensor, " R"] = torch.zeros(self.live, dtype=torch.int64, device=device)
        self.out: Int[Tensor, "T R"] = torch.zeros(EVERY, self.live, dtype=torch.int32, device=device)
        self.step: Int64[Tensor, " one"] = torch.zeros(1, dtype=torch.int64, device=device)
        self.texts: dict[int, Text] = {}
        self.graph: Parts | None = None
        self.captured: Tensor | None = None  # the store the graph was captured over

    def _empty(self) -> Integers:
        """Rows that stand nowhere; one attention tile a row, for good."""
        block, _ = blank(self.layout)
        table = block[FIELDS * self.live : self.layout.counts].reshape(self.live, TILE)
        table[:, 0] = table[:, 2] = np.arange(self.live)
        table[:, 1], table[:, 3] = 1, NEVER
        block[self.layout.counts] = self.live
        return block

    def _make_room(self, rows: int) -> None:
        """Let every slot hold this many rows. The step's graph follows the store, whoever moved it."""
        self.memory.make_room(self.live - 1, rows)
        if self.memory.graphs.enabled and self.captured is not self.memory.store.keys:
            kept = self.block.clone(), self.alive.clone()
            self.step.zero_()  # capturing takes a step
            self.graph = self.memory.graphs.capture(self._step)[0]
            self.block.copy_(kept[0])
            self.alive.copy_(kept[1])
            self.captured = self.memory.store.keys

    @torch.no_grad()
    def _step(self) -> None:
        """One token more for every row that lives."""
        batch = self.layout.views(self.block, [])
        logits = self.memory.forward(self.ops, self.layout, [], self.live, self.block)[2]
        picks = choose(logits, self.sampling, self.salts, batch.place.position + 1).int()  # as the judge does
        self.out.index_copy_(0, self.step, picks[None])
        self.step += 1
        batch.token.copy_(torch.where(self.alive > 0, picks, 0))
        for field in (batch.place.index, batch.place.position, batch.place.visible):
            field += self.alive

    def run(self, prompts: Iterable[Prompt]) -> Iterator[Finished]:
        """Continue all prompts, in the order in which they end."""
        waiting = iter(prompts)
        while True:
            self._admit(waiting)
            yield from self._leave()
            if not self.texts:
                return
            self._advance()
            yield from self._leave()

    def _admit(self, waiting: Iterator[Prompt]) -> None:
        """Fill free slots; short prompts share a forward."""
        free = [slot for slot in range(self.most) if slot not in self.texts]
        group: dict[int, Prompt] = {}
        for slot, prompt in zip(free, waiting, strict=False):
            if sum(len(other.tokens) for other in group.values()) + len(prompt.tokens) > SHORT_PROMPT:
                self._prefill(group)
                group = {}
            group[slot] = prompt
        self._prefill(group)

    @torch.no_grad()
    def _prefill(self, group: dict[int, Prompt]) -> None:
        """Read prompts, choose their first tokens, and put them on their rows."""
        if not group:
            return
        texts = {slot: prompt.tokens for slot, prompt in group.items()}
        lengths = [len(tokens) for tokens in texts.values()]
        if sum(lengths) <= SHORT_PROMPT:
            ends = torch.tensor(lengths).cumsum(0) - 1
            seen = self.memory.verify(chain_rows(texts), dict.fromkeys(texts, 0))
            logits = seen.logits[ends.to(seen.logits.device)]
        else:  # one long prompt
            ((slot, tokens),) = texts.items()
            logits = self.memory.prefill(slot, tokens).logits
        check_logits(logits, self.memory.target)
        device = logits.device
        salts = torch.tensor([salt(prompt.sampling.seed) for prompt in group.values()], device=device)
        positions = torch.tensor(lengths, dtype=torch.int32, device=device)
        slots = torch.tensor(list(group), device=device)
        picks = choose(logits, self.sampling, salts, positions).int()
        fields = self.block[: FIELDS * self.live].view(FIELDS, self.live)
        fields[:5, slots] = torch.stack([picks, slots.int(), positions, positions, positions + 1])
        self.alive[slots] = 1
        self.salts[slots] = salts
        for (slot, prompt), token in zip(group.items(), picks.tolist(), strict=True):  # sync
            self.texts[slot] = Text(prompt, [token], self.limits.cut([token], 0)[1])

    def _advance(self) -> None:
        """EVERY steps, then a look: each text takes what it may."""
        longest = max(len(text.prompt.tokens) + len(text.tokens) for text in self.texts.values()) + EVERY
        self._make_room(longest)
        units = torch.tensor(units_of(self.live, -(-longest // KEYS)), dtype=torch.int32)
        self.block[self.layout.counts + 1 : self.layout.counts + 3] = units.to(self.block.device)
        self.step.zero_()
        for _ in range(EVERY):
            if self.graph is None:
                self._step()
            else:
                self.graph.replay()
        for slot, column in enumerate(zip(*self.out.tolist(), strict=True)):  # sync
            if (text := self.texts.get(slot)) is not None:
                taken, text.finish = self.limits.cut(list(column), len(text.tokens))
                text.tokens += taken

    def _leave(self) -> Iterator[Finished]:
        """Take finished texts off their rows."""
        done = {slot: text for slot, text in self.texts.items() if text.finish is not None}
        if done:
            slots = torch.tensor(list(done), device=self.block.device)
            fields = self.block[: FIELDS * self.live].view(FIELDS, self.live)
            fields[:5, slots] = torch.tensor([0, 0, -1, 0, 0], dtype=torch.int32, device=slots.device)[:, None]
            self.alive[slots] = 0
        for slot, text in done.items():
            del self.texts[slot]
            assert text.finish is not None
            yield Finished(text.prompt.index, text.prompt.sampling.seed, text.tokens, text.finish)
