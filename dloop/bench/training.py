"""What a training step costs: time, arithmetic, memory, and the share of a peak rate that it reaches."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import torch
from torch import Tensor, UntypedStorage
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from dloop.bench.decode import clock, peak_memory
from dloop.drafters.config import BlockConfig
from dloop.train import pieces
from dloop.train.batch import TrainBatch
from dloop.train.parallel import local
from dloop.train.trainer import GraphedStep, Step
from dloop.train.unroll import UnrollObjective

STEPS = 5  # timed
WARM_UP = 3  # a graph is captured at the second step of a shape
KERNELS = ("flash", "efficient", "cudnn")  # of fused attention
Shape = Sequence[int]
LOGITS = 5  # float32 copies of a piece's logits that live at once: logits, both laws, a product, a gradient


def attention_flops(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    """Of fused attention, masked scores counted; torch 2.11's own formula refuses heads that share keys."""
    batch, heads, rows, dim = query
    return 2 * batch * heads * rows * key[2] * (dim + value[3])


def attention_backward_flops(_: Shape, query: Shape, key: Shape, value: Shape, *__: object, **___: object) -> int:
    """Scores anew, and the gradients of weights, values, queries and keys."""
    batch, heads, rows, dim = query
    return 2 * batch * heads * rows * key[2] * (3 * dim + 2 * value[3])


def flop_counter() -> FlopCounterMode:
    """Counts the FLOPs of matrix products and of fused attention."""
    kinds = [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention") for kind in KERNELS]
    backward = [getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward") for kind in KERNELS]
    formulas = dict.fromkeys(kinds, attention_flops) | dict.fromkeys(backward, attention_backward_flops)
    return FlopCounterMode(display=False, custom_mapping=formulas)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One step at one depth; FLOPs of matrix products as they run, recomputation counted; with flex attention, those
    of attention are left out.
    """

    depth: int
    anchors: int  # kept; 0: an unroll, which starts from every token
    rows: int  # that the drafter's layers run, slots without an anchor and padding counted
    flops: int
    ms: float
    utilisation: float  # of the peak rate
    kept_bytes: int  # by autograd, for the gradient
    estimate_bytes: int
    peak_bytes: int | None  # allocated, measured; None without a GPU


class Kept(saved_tensors_hooks):
    """Counts the bytes that autograd keeps for the gradient beyond the weights, each storage once."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self.known = {local(weight).untyped_storage().data_ptr() for weight in weights}
        self.holders = Counter[int]()
        self.now = self.most = 0
        pack = cast(Callable[[Tensor], Held], torch.compiler.disable(self._pack))  # pyright: ignore[reportUnknownMemberType]
        super().__init__(pack, lambda held: held.tensor)

    def _pack(self, tensor: Tensor) -> "Held":
        return Held(tensor, self)

    def add(self, storage: UntypedStorage, change: int) -> None:
        """One more holder of this storage, or one less."""
        place = storage.data_ptr()
        if place in self.known:
            return
        before = self.holders[place] > 0
        self.holders[place] += change
        self.now += storage.nbytes() * ((self.holders[place] > 0) - before)
        self.most = max(self.most, self.now)


class Held:
    """A tensor that is kept for the gradient until this is dropped."""

    def __init__(self, tensor: Tensor, kept: Kept) -> None:
        self.tensor, self.kept = tensor, kept
        kept.add(tensor.untyped_storage(), 1)

    def __del__(self) -> None:
        self.kept.add(self.tensor.untyped_storage(), -1)


def timed(work: Callable[[], object], steps: int, device: torch.device) -> dict[str, float]:
    """Milliseconds and peak bytes of a piece of work, after three other times."""
    for _ in range(WARM_UP):
        work()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    started = clock(device)
    for _ in range(steps):
        work()
    return {"ms": (clock(device) - started) * 1000 / steps, "peak_bytes": peak_memory(device)}


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """FLOP/s measured on a square matrix product."""
    size = 8192 if device.type == "cuda" else 512
    a, b = torch.randn(2, size, size, device=device, dtype=dtype).unbind()
    return 2 * size**3 / (timed(lambda: a @ b, 10, device)["ms"] / 1000)


def costs(
    step: Step | GraphedStep, parts: list[TrainBatch], depths: Sequence[int], rate: float, target_bytes: int
) -> Iterator[Cost]:
    """Take steps at each depth, at a learning rate of 0: no weight changes. `rate`: the peak, FLOP/s."""
    plain = step.step if isinstance(step, GraphedStep) else step
    device, parameters = parts[0].tokens.device, list(plain.objective.model.parameters())
    words = plain.objective.vocabulary
    states = target_bytes + sum(4 * p.numel() * p.element_size() for p in parameters)  # weights, gradient, Adam's two
    plain.optimizer.set_rate(0.0)
    for depth in depths:
        flops = flops_of(plain, parts, depth)
        kept = Kept([*parameters, words.head, words.embedding])
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with kept:
            plain(parts, depth)
        peak = peak_memory(device)  # of a plain step: a graph's memory is not told apart
        found = timed(partial(step, parts, depth), STEPS, device)
        anchors, rows = rows_of(plain, parts, depth)
        yield Cost(
            depth=depth,
            anchors=anchors,
            rows=rows,
            flops=flops,
            ms=found["ms"],
            utilisation=flops / (found["ms"] / 1000) / rate,
            kept_bytes=kept.most,
            estimate_bytes=states + kept.most + LOGITS * 4 * pieces.ROWS * len(words.head),
            peak_bytes=int(peak) if device.type == "cuda" else None,
        )


def flops_of(step: Step, parts: list[TrainBatch], depth: int) -> int:
    """Counted on the way, uncompiled; flex attention has no count on every torch, so its steps go without attention."""
    objective, settings = step.objective, step.objective.settings
    objective.settings = replace(settings, attention="dense")
    try:
        with torch.compiler.set_stance("force_eager"), flop_counter() as counter:
            step(parts, depth)
    finally:
        objective.settings = settings
    found = {str(kind): count for kind, count in counter.get_flop_counts()["Global"].items()}
    words = () if settings.attention == "dense" else ("attention",)
    if words and isinstance(objective, UnrollObjective):
        words = "attention", "bmm"  # its dense pieces are batched products
    return sum(count for kind, count in found.items() if not any(word in kind for word in words))


def rows_of(step: Step, parts: list[TrainBatch], depth: int) -> tuple[int, int]:
    """(anchors kept, rows that the drafter's layers run) of a step; an unroll has no anchors and starts everywhere."""
    config = step.objective.model.config
    if not isinstance(config, BlockConfig):
        return 0, depth * sum(part.tokens.numel() for part in parts)
    drawn = [step.objective.draw(part).keep for part in parts]
    slots = sum(keep.numel() for keep in drawn)
    return sum(int(keep.sum()) for keep in drawn), slots * config.block_size * (depth + 1)  # sync
