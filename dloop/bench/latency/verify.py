"""One verification of n rows, in each way there is, over one committed context."""

from collections.abc import Callable
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import DynamicCache

from dloop.bench.latency.models import Pair
from dloop.bench.latency.timing import Job
from dloop.loop import Target
from dloop.targets.branches import KeyValueLayer, shorten
from dloop.targets.hf import HFTarget, cache_argument
from dloop.types import Rows


class Stock:
    """The forward of a stock loop: transformers' model, eager, with its DynamicCache, cropped after each use."""

    def __init__(self, target: HFTarget, prompt: list[int]) -> None:
        self.target = target
        self.cache = DynamicCache(config=target.config)
        self.committed = len(prompt)
        self.forward(prompt, list(range(len(prompt))), keep=1)

    @torch.no_grad()
    def forward(self, tokens: list[int], positions: list[int], keep: int) -> Float[Tensor, "1 r V"]:
        """Logits of the last `keep` rows, 0 for all; the rows are appended to the cache."""
        model, device = self.target.model, self.target.device
        inputs: dict[str, object] = {
            "input_ids": torch.tensor([tokens], device=device),
            "position_ids": torch.tensor([positions], device=device),
            cache_argument(model): self.cache,
            "use_cache": True,
            "logits_to_keep": keep,
        }
        return cast(Callable[..., dict[str, Tensor]], model)(**inputs)["logits"]

    def verify(self, rows: Rows) -> Float[Tensor, "1 r V"]:
        return self.forward(rows.token, rows.position, keep=0)

    def crop(self) -> None:
        """Back to the context."""
        shorten(cast(list[KeyValueLayer], self.cache.layers), self.committed, [])


class Verifiers:
    """Stock, twin and fast path, each with the same context committed once."""

    def __init__(self, pair: Pair, prompt: list[int], capacity: int) -> None:
        self.context = len(prompt)
        self.stock = Stock(pair.target, prompt)
        taps = pair.drafter.taps
        self.memories: dict[str, Target] = {"twin": pair.target.open(taps)}
        if pair.fast_target is not None:
            self.memories["fast"] = pair.fast_target.open(taps, context=capacity)
        for memory in self.memories.values():
            memory.prefill(0, prompt)

    def jobs(self, tokens: list[int]) -> list[Job]:
        """Verify a chain of these tokens; before each use the tail of the one before is dropped."""
        rows = chain(tokens, self.context)
        found = [Job("stock", lambda: self.stock.verify(rows), self.stock.crop)]
        for name, memory in self.memories.items():
            found.append(verify_job(name, memory, rows))
        return found


def verify_job(name: str, memory: Target, rows: Rows) -> Job:
    """One memory's verification; nothing of it is kept."""
    return Job(name, lambda: memory.verify(rows), lambda: memory.commit(0, []))


def chain(tokens: list[int], context: int) -> Rows:
    """Rows that follow one another after `context` committed ones."""
    count = len(tokens)
    return Rows(
        token=tokens,
        slot=[0] * count,
        position=list(range(context, context + count)),
        parent=list(range(-1, count - 1)),
    )
