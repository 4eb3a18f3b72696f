"""The drafting side: a round's first stage, a further one, reading verified rows, and the loop's own host work."""

from collections.abc import Callable

import torch

from dloop.bench.latency.models import Pair
from dloop.bench.latency.timing import Job, Spread, elapsed_ms, spread
from dloop.gate import ALWAYS_OPEN, FixedGate
from dloop.loop import Drafter, Limits, grow
from dloop.types import Draft, Features, Stage, StageRequest

FIRST, LATER = StageRequest(slot=0, anchor=1, index=0), StageRequest(slot=0, anchor=2, index=1)
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
        return [Job(name, drafts(memory, LATER), drafts(memory, FIRST)) for name, memory in self.memories.items()]

    def extend(self, count: int) -> list[Job]:
        """Read `count` verified rows more; the context grows with each use."""
        features = self.features(count)

        def reads(name: str) -> Callable[[], object]:
            def work() -> None:
                self.memories[name].extend(0, self.ends[name], [0] * count, features)
                self.ends[name] += count

            return work

        return [Job(name, reads(name)) for name in self.memories]


def drafts(memory: Drafter, request: StageRequest) -> Callable[[], object]:
    """One stage."""
    return lambda: memory.draft([request])


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
