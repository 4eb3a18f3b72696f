"""The drafting side: a round's first stage, a further one, reading verified rows, and the loop's own host work."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, cast

import torch

from dloop.bench.latency.floors import Cost, stage_cost, steps_cost
from dloop.bench.latency.models import Pair, random_drafter, random_eagle3
from dloop.bench.latency.shapes import Shape
from dloop.bench.latency.timing import Job, Spread, elapsed_ms, spread
from dloop.drafters.block import BlockDrafter
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.eagle3 import NUM_TAPS
from dloop.errors import UserError
from dloop.fast.chain import FastChainDrafter
from dloop.fast.drafter import FastBlockDrafter
from dloop.gate import ALWAYS_OPEN, FixedGate
from dloop.loop import Drafter, Limits, grow
from dloop.records import Json
from dloop.targets.hf import HFTarget
from dloop.trees.shape import TreeShape
from dloop.types import Draft, Features, Stage, StageRequest

FIRST = StageRequest(slot=0, anchor=1, index=0)
TREE = TreeShape(budget=59)  # EAGLE-3's published one: 60 with the root
HOST_STAGES, HOST_ROUNDS = 4, 50  # stages of a round; rounds of one timing, as one is too short for a clock


class Drafters:
    """Twin and fast path with the same context; features are random, so no target is asked."""

    def __init__(self, pair: Pair, context: int, capacity: int) -> None:
        self.pair = pair
        self.memories: dict[str, Drafter] = {"twin": pair.drafter.open()}
        if pair.fast_drafter is not None:
            self.memories["fast"] = pair.fast_drafter.open(context=capacity)
        self.ends = dict.fromkeys(self.memories, context)
        for memory in self.memories.values():
            memory.extend(0, 0, [0] * context, self.features(context))

    def features(self, count: int) -> Features:
        """Random features of some positions."""
        weight, width = self.pair.drafter.vocabulary.embedding, self.pair.drafter.model.fc.in_features
        taps = torch.randn(count, width, device=weight.device, dtype=weight.dtype)
        return Features(taps=taps, last=taps[:, : weight.shape[1]])

    def first(self) -> list[Job]:
        """A round's first stage, read back to the host."""
        return [Job(name, drafts(memory, FIRST)) for name, memory in self.memories.items()]

    def later(self) -> list[Job]:
        """The second stage: the first one's states fill the gap."""
        return [later(name, memory) for name, memory in self.memories.items()]

    def extend(self, count: int) -> list[Job]:
        """Read `count` verified rows more; the context grows with each use."""
        features = self.features(count)

        def reads(name: str) -> Callable[[], object]:
            def work() -> None:
                self.memories[name].extend(0, self.ends[name], [0] * count, features)
                self.ends[name] += count

            return work

        return [Job(name, reads(name)) for name in self.memories]


class Piece(NamedTuple):
    """Ways to do one piece of work, what it costs at least, and its size for the record."""

    jobs: list[Job]
    cost: Cost
    size: dict[str, Json] = {}


def block_stages(twin: BlockDrafter, target: HFTarget, context: int, capacity: int) -> dict[str, Piece]:
    """The stages of a block family after this context: a round's first, and a further one."""
    try:
        fast = FastBlockDrafter.of(twin)
    except UserError:  # the report has said why
        fast = None
    drafters, size = Drafters(Pair(target, twin, None, fast, None), context, capacity), {"stage_len": twin.stage_len}
    first, later = stage_cost(twin, context), stage_cost(twin, context + twin.stage_len)
    return {
        f"{twin.family}_first": Piece(drafters.first(), first, {**size}),
        f"{twin.family}_later": Piece(drafters.later(), later, {**size}),
    }


def other_stages(shape: Shape, target: HFTarget, context: int, capacity: int) -> Iterator[dict[str, Piece]]:
    """One family after the other, so that its models may go before the next ones come."""
    yield eagle3_stages(random_eagle3(shape, target), context)
    for family in ("dflash", "domino"):
        yield block_stages(random_drafter(shape, target, family=family), target, context, capacity)


def eagle3_stages(twin: ChainDrafter, context: int) -> dict[str, Piece]:
    """EAGLE-3's stages after this context: a chain, a further chain, a tree of the published size."""
    try:
        drafters = {"twin": twin, "fast": FastChainDrafter.of(twin)}
    except UserError:  # the report has said why
        drafters = {"twin": twin}
    width = twin.config.feature_size
    taps = torch.randn(context, NUM_TAPS * width, device=twin.vocabulary.head.device, dtype=twin.vocabulary.head.dtype)
    found: dict[str, Piece] = {}
    for name, trees in (("chain", None), ("tree", TREE)):
        memories = {way: drafter.with_trees(trees).open() for way, drafter in drafters.items()}
        for memory in memories.values():
            memory.extend(0, 0, [0] * context, Features(taps=taps, last=taps[:, :width]))
        shaped = cast(ChainDrafter, twin.with_trees(trees))
        cost = steps_cost(shaped, 1 if trees is None else trees.topk, context)
        found[f"eagle3_{name}"] = Piece([Job(way, drafts(memory, FIRST)) for way, memory in memories.items()], cost)
        if trees is None:
            found["eagle3_later"] = Piece([later(way, memory) for way, memory in memories.items()], cost)
    return found


def drafts(memory: Drafter, request: StageRequest) -> Callable[[], object]:
    """One stage."""
    return lambda: memory.draft([request])


def later(name: str, memory: Drafter) -> Job:
    """The stage after the first, from the token that the first ended with."""
    last = [FIRST]

    def first() -> None:
        (stage,) = memory.draft([FIRST])
        last[0] = replace(FIRST, anchor=stage.tokens[-1], index=1)

    return Job(name, lambda: memory.draft(last), first)


def host_work(stage_len: int, repeats: int) -> Spread:
    """Milliseconds a stage of gate, grafting and records: the loop's own code, given stages that are ready."""
    order = list(range(stage_len))
    stage = Stage(tokens=order, parents=[i - 1 for i in order], logp=[-0.1] * stage_len, spine=order, score=-0.1)
    limits = Limits(max_new_tokens=2**31, max_stages=HOST_STAGES, context=2**31)

    def work() -> None:
        for _ in range(HOST_ROUNDS):
            task = grow(Draft.rooted(1, 0), FIRST, stage_len, FixedGate(ALWAYS_OPEN), limits, 1)
            next(task)
            for _ in range(HOST_STAGES - 1):
                task.send(stage)
            try:
                task.send(stage)
            except StopIteration:
                continue

    work()  # warm
    scale = HOST_STAGES * HOST_ROUNDS
    return spread([elapsed_ms(work, torch.device("cpu")) / scale for _ in range(repeats)])
