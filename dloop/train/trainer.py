"""The training run: batches in, steps, records out. Parallelism and compilation are applied from outside."""

import csv
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.errors import UserError
from dloop.targets.hf import BatchFeatures
from dloop.train.anchors import Anchors
from dloop.train.batch import TokenFile, TrainBatch, batches
from dloop.train.checkpoint import Progress, save
from dloop.train.interrupt import Interrupt
from dloop.train.losses import Sums
from dloop.train.objective import Loss, Objective, TotalWeights
from dloop.train.optim import Optimizer, learning_rate


def columns(objective: Objective) -> tuple[str, ...]:
    """What a step reports: the loss, the gradient's norm before clipping, the mean of every term of both sides."""
    return ("loss", "grad_norm", *(f"{side}_{term}" for side in ("host", "loop") for term in objective.terms))


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long and how fast; what the loss is made of stands in `ObjectiveSettings`."""

    num_steps: int
    batch_size: int
    learning_rate: float = 6e-4
    warmup_ratio: float = 0.04
    max_grad_norm: float = 1.0
    accumulation_steps: int = 1
    dloop_max_stage: int = 3  # loop stage k ~ U{1..K} each step; 0: the host objective alone
    ttt_lengths: tuple[int, ...] = ()  # autoregressive drafters: the unroll's length, one of these each step
    seed: int = 42
    log_interval: int = 50
    save_interval: int = 1000


class Record(NamedTuple):
    """One line of the log: means over the steps since the line before; `values` in the order of `columns`."""

    step: int
    epoch: int
    rate: float
    step_ms: float
    values: list[float]


def depth_at(step: int, max_stage: int, seed: int) -> int:
    """The loop stage trained at a step: the same on every rank and after a resume. 0: none."""
    return random.Random(f"{seed}/{step}").randint(1, max_stage) if max_stage else 0


def length_at(step: int, lengths: tuple[int, ...], seed: int) -> int:
    """The unroll's length at a step, each as likely: the same on every rank and after a resume."""
    return random.Random(f"{seed}/{step}").choice(lengths)


class Step:
    """One training step on the device; returns `columns` without waiting for them.

    The parts of an accumulated step share their denominators: it is the step of one batch that holds them all.
    """

    def __init__(
        self, objective: Objective, features: Callable[[TrainBatch], BatchFeatures], optimizer: Optimizer
    ) -> None:
        self.objective = objective
        self.features = features
        self.optimizer = optimizer

    def __call__(self, parts: list[TrainBatch], depth: int) -> Float[Tensor, " c"]:
        self.optimizer.clear()
        reach = self.objective.settings.position_offset_max
        placed = [batch.shifted(reach) for batch in parts] if reach else parts
        drawn = [(batch, self.objective.draw(batch)) for batch in placed]
        totals = self.objective.total_weights(drawn, depth)
        losses: list[Loss] = []
        for batch, anchors in drawn:
            loss = self.loss(batch, depth, anchors, totals)
            loss.total.backward()
            losses.append(loss)
        norm = self.optimizer.step()
        values = summary(losses)
        return torch.cat([values[:1], norm.detach()[None], values[1:]])

    def loss(self, batch: TrainBatch, depth: int, anchors: Anchors, totals: TotalWeights) -> Loss:
        """The loss of one part; those of all parts add up."""
        features = self.features(batch)
        half = features.taps.dtype == torch.bfloat16
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=half):
            return self.objective(batch, features, depth, anchors, totals)


class GraphedStep:
    """The same step as CUDA graphs, one per (width, depth): a small drafter's step is bound by kernel launches.

    The first step of a shape runs plainly (a real step), the second is captured. Single-part steps only.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.objective, self.optimizer = step.objective, step.optimizer
        self.seen: set[tuple[int, int]] = set()
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, TrainBatch, Tensor]] = {}

    def __call__(self, parts: list[TrainBatch], depth: int) -> Float[Tensor, " c"]:
        (batch,) = parts
        key = (batch.tokens.shape[1], depth)
        if key not in self.seen:
            self.seen.add(key)
            return self.step(parts, depth)
        if key not in self.graphs:
            self.graphs[key] = self._capture(batch, depth)
        graph, buffers, values = self.graphs[key]
        for ours, theirs in zip(buffers.tensors(), batch.tensors(), strict=True):
            ours.copy_(theirs)
        graph.replay()
        return values.clone()

    def _capture(self, batch: TrainBatch, depth: int) -> tuple[torch.cuda.CUDAGraph, TrainBatch, Tensor]:
        buffers = TrainBatch(*(tensor.clone() for tensor in batch.tensors()))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        first = next(iter(self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=first[0].pool() if first else None):  # graphs never run at the same time
            values = self.step([buffers], depth)
        return graph, buffers, values


def summary(losses: list[Loss]) -> Float[Tensor, " c"]:
    """[loss, host terms, loop terms] of a step, each term as a mean over the rows of all parts; zeros for a loop stage
    that was not trained.
    """
    host = added([loss.host for loss in losses])
    loops = [loss.loop for loss in losses if loss.loop is not None]
    loop = added(loops) if loops else torch.zeros_like(host)
    means = [sums[:-1] / sums[-1].clamp(min=1e-6) for sums in (host, loop)]
    return torch.cat([torch.stack([loss.total.detach() for loss in losses]).sum()[None], *means])


def added(parts: list[Sums]) -> Float[Tensor, " s"]:
    """The sums of all parts: every term, then their weight."""
    return torch.stack([torch.cat([sums.terms, sums.weight[None]]) for sums in parts]).sum(0).detach()


def train(
    step_once: Step | GraphedStep,
    data: TokenFile,
    settings: TrainSettings,
    output_dir: Path,
    *,
    done: int = 0,
    fingerprint: str = "",
) -> Iterator[Record]:
    """Train from step `done` on; yield a record every `log_interval` steps. Saves on the way, at the end, and when
    interrupted (Ctrl-C or the consumer's close). Raises RuntimeError, and saves no more, once a value is not finite.
    """
    check(settings)
    optimizer, model = step_once.optimizer, step_once.objective.model
    stream = parts_of_steps(data, settings, done)
    log = Log(output_dir / "train.csv", columns(step_once.objective), done)
    saved = step = done
    interrupt = Interrupt()

    def keep() -> None:
        with interrupt.held():
            log.check(step)
            save(output_dir, Progress(epoch_at(step, data, settings), step), model, optimizer, fingerprint)

    try:
        while step < settings.num_steps:
            interrupt.check()
            log.add(advance(step_once, stream, settings, step))
            step += 1
            if step % settings.log_interval == 0 or step == settings.num_steps:
                yield log.line(step, epoch_at(step, data, settings), rate_at(step - 1, settings))
            if step % settings.save_interval == 0:
                keep()
                saved = step
    finally:
        try:
            if step != saved and not interrupt.insisted:
                keep()
        finally:
            interrupt.restore()


def parts_of_steps(data: TokenFile, settings: TrainSettings, done: int) -> Iterator[TrainBatch]:
    """The batches of all steps from `done` on, one after another."""
    first, last = (count * settings.accumulation_steps for count in (done, settings.num_steps))
    return batches(data, settings.batch_size, settings.seed, first, last)


def rate_at(step: int, settings: TrainSettings) -> float:
    """The learning rate of a 0-based step."""
    return learning_rate(step, settings.num_steps, settings.learning_rate, settings.warmup_ratio)


def advance(
    step_once: Step | GraphedStep, stream: Iterator[TrainBatch], settings: TrainSettings, step: int
) -> Float[Tensor, " c"]:
    """Take one step with the next batches; `columns`."""
    step_once.optimizer.set_rate(rate_at(step, settings))
    if not settings.dloop_max_stage:
        step_once.objective.begin_host_step(step, settings.num_steps)
    seed_step(settings.seed, step)
    chosen = [next(stream).to(step_once.optimizer.rate.device) for _ in range(settings.accumulation_steps)]
    if settings.ttt_lengths:
        return step_once(chosen, length_at(step, settings.ttt_lengths, settings.seed))
    return step_once(chosen, depth_at(step, settings.dloop_max_stage, settings.seed))


def seed_step(seed: int, step: int) -> None:
    """Anchors depend on (seed, step) alone, so that a resumed run draws the same ones."""
    torch.manual_seed(seed * 1_000_003 + step)


def batches_per_epoch(data: TokenFile, settings: TrainSettings) -> int:
    """Batches in one pass over the data, at least 1."""
    return max(1, len(data) // settings.batch_size)


def epoch_at(step: int, data: TokenFile, settings: TrainSettings) -> int:
    """Whole passes over the data after so many steps."""
    return step * settings.accumulation_steps // batches_per_epoch(data, settings)


def steps_of_epochs(num_epochs: int, data: TokenFile, settings: TrainSettings) -> int:
    """Steps in so many passes, at least 1: batches that do not fill a last step are left out once, not every pass."""
    return max(1, num_epochs * batches_per_epoch(data, settings) // settings.accumulation_steps)


def check(settings: TrainSettings) -> None:
    """Refuse counts that cannot be. Raises UserError."""
    for name in ("num_steps", "batch_size", "accumulation_steps", "log_interval", "save_interval"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name}={getattr(settings, name)} must be at least 1")


class Log:
    """Collects steps on the device; writes a CSV line and reads the numbers back once a line."""

    def __init__(self, path: Path, names: tuple[str, ...], done: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not done or not path.exists():
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(("step", "epoch", "rate", "step_ms", *names))
        self.pending: list[Tensor] = []
        self.started = time.perf_counter()

    def add(self, values: Float[Tensor, " c"]) -> None:
        self.pending.append(values)

    def check(self, step: int) -> list[float]:
        """The means since the last line. Raises RuntimeError if one is not finite."""
        if not self.pending:
            return []
        values = torch.stack(self.pending).mean(0).tolist()  # sync
        if not all(map(math.isfinite, values)):
            raise RuntimeError(
                f"the loss is not finite in steps {step - len(self.pending) + 1}..{step}, so no checkpoint of them is "
                "written; lower the learning rate"
            )
        return values

    def line(self, step: int, epoch: int, rate: float) -> Record:
        """Write the means since the last line. Raises RuntimeError if one is not finite."""
        values = self.check(step)
        elapsed = (time.perf_counter() - self.started) * 1000 / len(self.pending)
        self.pending = []
        self.started = time.perf_counter()
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow((step, epoch, f"{rate:.3e}", f"{elapsed:.1f}", *(f"{v:.5f}" for v in values)))
        return Record(step, epoch, rate, elapsed, values)
