"""The static target: one forward over flat rows of any number of sequences, behind the adapter's own protocol."""

from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from dloop.fast.graphs import Forward, Graphs
from dloop.fast.lease import Leased, lease
from dloop.fast.ops import Ops, kernel_ops, supports
from dloop.fast.plain import PlainOps
from dloop.fast.rows import Layout, Run, bucket_of, pack_rows, runs_of
from dloop.fast.sampler import GraphedSampler
from dloop.fast.stack import Memory, PrefillOps, run_stack
from dloop.fast.weights import Stack, target_stack
from dloop.judge import PLAIN, Sampler
from dloop.kernels.shapes import Heads
from dloop.targets.branches import is_chain
from dloop.targets.hf import HFTarget, check_logits
from dloop.types import Features, Rows, Seen

START_CONTEXT = 2048  # rows of a slot before the store first grows
SHORT_PROMPT = 512  # tokens


@dataclass(frozen=True)
class FastTarget(HFTarget):
    """A loaded target on the fast path. The twin's weights become views of the fused ones."""

    memories: "list[FastMemory]" = field(default_factory=list["FastMemory"], compare=False, repr=False)

    @classmethod
    def of(cls, twin: HFTarget) -> "FastTarget":
        """The same model on the fast path. Raises UserError for what it does not compute."""
        fast = cls(name=twin.name, model=twin.model, stop_ids=twin.stop_ids, folder=twin.folder)
        _ = fast.stack
        return fast

    @cached_property
    def stack(self) -> Stack:
        """Fused weights."""
        return target_stack(self)

    @property
    def engine(self) -> Literal["fast", "twin"]:
        return "fast"

    @property
    def attention(self) -> str:
        return "triton, split at fixed positions" if self.is_exact else "sdpa"

    @property
    def is_exact(self) -> bool:
        """Whether a row's logits never depend on the other rows of its forward."""
        return supports(self.dtype, self.device, self.stack.heads)

    @property
    def sampler(self) -> Sampler:
        return self._graphed if self.is_exact else PLAIN

    @cached_property
    def _graphed(self) -> Sampler:
        return GraphedSampler(self.device)

    def open(self, taps: tuple[int, ...] = (), slots: int = 1, context: int = START_CONTEXT) -> "TargetSession":
        """Memory for one session, at first of this size; stores and graphs of ended sessions are taken over."""
        return lease(
            self.memories,
            lambda memory: memory.taps == taps,
            lambda: FastMemory(self, taps, slots, min(context, self.context)),
            TargetSession,
        )


class FastMemory(Leased):
    """A static store and the graphs over it. One session at a time may use it."""

    def __init__(self, target: FastTarget, taps: tuple[int, ...], slots: int, context: int) -> None:
        self.target = target
        self.taps = taps
        self.store = Memory.empty(target.stack, slots, context)
        self.kernels = target.is_exact
        self.graphs = Graphs(target.device, enabled=self.kernels)

    def make_room(self, slot: int, rows: int) -> bool:
        """Let the store hold this many rows of this slot; whether it moved."""
        moved = self.store.make_room(slot, rows)
        if moved:
            self.graphs.clear()
        return moved

    @torch.no_grad()
    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        """One sequence, by a path that its length alone decides, whatever decodes afterwards: the kernels where they
        are used and the prompt is short, else PyTorch's own.
        """
        rows = chain_rows({slot: tokens})
        if self.kernels and len(tokens) <= SHORT_PROMPT:
            seen = self.verify(rows, {slot: 0})
            return Seen(logits=seen.logits[-1:], features=seen.features)
        self.make_room(slot, len(tokens))
        runs = [Run(slot, 0, len(tokens), 0)]
        layout = Layout(rows=len(tokens), tile_rows=len(tokens), tree=False)
        block = torch.from_numpy(pack_rows(rows, runs, layout)).to(self.target.device)
        tapped, last, logits = self.forward(PrefillOps(), layout, runs, 1, block)
        return Seen(logits=logits, features=Features(taps=tapped, last=last))

    @torch.no_grad()
    def verify(self, rows: Rows, stored: dict[int, int]) -> Seen:
        """One forward over all rows; on a GPU the answer lives until the next one of its bucket."""
        n, runs = len(rows), runs_of(rows.slot, stored)
        for run in runs:
            self.make_room(run.slot, run.base + run.count)
        tree = not all(is_chain(parents_of(rows, run)) for run in runs)
        size = bucket_of(n) if self.kernels else n
        columns = columns_of(self.target.stack.heads, max(run.count for run in runs))
        layout = Layout(rows=size, tile_rows=columns.rows, tree=tree)
        ops: Ops = kernel_ops(columns.count) if self.kernels else PlainOps()
        forward = partial(self.forward, ops, layout, runs, size)
        tapped, last, logits = self.graphs("verify", Forward(layout, pack_rows(rows, runs, layout), forward))
        return Seen(logits=logits[:n], features=Features(taps=tapped[:n], last=last[:n]))

    def forward(
        self, ops: Ops, layout: Layout, runs: list[Run], keep: int, block: Int[Tensor, " n"]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(taps, last states, logits of the last `keep` rows)."""
        batch, vocabulary = layout.views(block, runs), self.target.vocabulary
        tapped, last = run_stack(ops, self.target.stack, vocabulary.embedding, batch, self.store, self.taps)
        return tapped, last, ops.head(last[-keep:], vocabulary.head)


def chain_rows(texts: dict[int, list[int]]) -> Rows:
    """The rows of whole texts, by slot."""
    position = [position for tokens in texts.values() for position in range(len(tokens))]
    return Rows(
        token=[token for tokens in texts.values() for token in tokens],
        slot=[slot for slot, tokens in texts.items() for _ in tokens],
        position=position,
        parent=[row - 1 if position[row] else -1 for row in range(len(position))],
    )


@dataclass(frozen=True)
class Columns:
    """The width of an attention tile."""

    count: int
    rows: int


def columns_of(heads: Heads, rows: int) -> Columns:
    """Columns enough for a run's rows and its padded group of heads: 16, or pieces of 32 or what the group needs."""
    group = 1 << (heads.queries // heads.keys - 1).bit_length()
    count = 16 if rows * group <= 16 else max(32, group)
    return Columns(count=count, rows=count // group)


def parents_of(rows: Rows, run: Run) -> list[int]:
    """The parents of a run's rows, in the run's own numbering."""
    return [p - run.first if p >= 0 else -1 for p in rows.parent[run.first : run.first + run.count]]


class TargetSession:
    """One session's use of a memory, under the loop's law: committed rows + a speculative tail."""

    def __init__(self, memory: FastMemory) -> None:
        self.memory = memory
        self.committed: dict[int, int] = {}

    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        seen = self.memory.prefill(slot, tokens)
        check_logits(seen.logits, self.memory.target)
        self.committed[slot] = len(tokens)
        return seen

    def verify(self, rows: Rows) -> Seen:
        return self.memory.verify(rows, self.committed)

    def commit(self, slot: int, path: list[int]) -> None:
        self.memory.store.keep(slot, self.committed[slot], path)
        self.committed[slot] += len(path)
