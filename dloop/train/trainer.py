"""The training run: batches in, steps, records out. Parallelism and compilation are applied from outside."""

import csv
import random
import signal
import threading
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
from dloop.train.batch import TokenFile, TrainBatch, batches, plan_epoch
from dloop.train.block import DSparkObjective, Loss
from dloop.train.checkpoint import Progress, save
from dloop.train.optim import Optimizer, learning_rate

COLUMNS = ("loss", "grad_norm", "host_ce", "host_l1", "host_confidence", "loop_ce", "loop_l1", "loop_confidence")


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
    seed: int = 42
    log_interval: int = 50
    save_interval: int = 1000


class Record(NamedTuple):
    """One line of the log: means over the steps since the line before; `values` in the order of COLUMNS."""

    step: int
    epoch: int
    rate: float
    step_ms: float
    values: list[float]


def depth_at(step: int, max_stage: int, seed: int) -> int:
    """The loop stage trained at a step: the same on every rank and after a resume. 0: none."""
    return random.Random(f"{seed}/{step}").randint(1, max_stage) if max_stage else 0


class Step:
    """One training step on the device; returns COLUMNS without waiting for them."""

    def __init__(
        self, objective: DSparkObjective, features: Callable[[TrainBatch], BatchFeatures], optimizer: Optimizer
    ) -> None:
        self.objective = objective
        self.features = features
        self.optimizer = optimizer

    def __call__(self, parts: list[TrainBatch], depth: int) -> Float[Tensor, " c"]:
        self.optimizer.clear()
        values: list[Tensor] = []
        for batch in parts:
            loss = self.loss(batch, depth)
            (loss.total / len(parts)).backward()
            values.append(summary(loss))
        norm = self.optimizer.step()
        mean = torch.stack(values).mean(0)
        return torch.cat([mean[:1], norm.detach()[None], mean[1:]])

    def loss(self, batch: TrainBatch, depth: int) -> Loss:
        features = self.features(batch)
        half = features.taps.dtype == torch.bfloat16
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=half):
            return self.objective(batch, features, depth)


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


def summary(loss: Loss) -> Float[Tensor, " c"]:
    """[loss, host terms, loop terms], each term as a mean; zeros for a loop stage that was not trained."""
    terms = [loss.total]
    for sums in (loss.host, loss.loop):
        for value in (loss.host if sums is None else sums)[:3]:
            terms.append(torch.zeros_like(value) if sums is None else value / sums.weight.clamp(min=1e-6))
    return torch.stack(terms).detach()


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
    interrupted (Ctrl-C or the consumer's close).
    """
    check(settings)
    optimizer, model = step_once.optimizer, step_once.objective.model
    parts_done, parts = done * settings.accumulation_steps, settings.num_steps * settings.accumulation_steps
    stream = batches(data, settings.batch_size, settings.seed, parts_done, parts)
    per_epoch = steps_per_epoch(data, settings)
    log = Log(output_dir / "train.csv", done)
    saved = step = done
    interrupt = Interrupt()
    try:
        while step < settings.num_steps:
            interrupt.check()
            rate = learning_rate(step, settings.num_steps, settings.learning_rate, settings.warmup_ratio)
            optimizer.set_rate(rate)
            seed_step(settings.seed, step)
            chosen = [next(stream).to(optimizer.rate.device) for _ in range(settings.accumulation_steps)]
            log.add(step_once(chosen, depth_at(step, settings.dloop_max_stage, settings.seed)))
            step += 1
            if step % settings.log_interval == 0 or step == settings.num_steps:
                yield log.line(step, step // per_epoch, rate)
            if step % settings.save_interval == 0:
                save(output_dir, Progress(step // per_epoch, step), model, optimizer, fingerprint)
                saved = step
    finally:
        interrupt.restore()
        if step != saved:
            save(output_dir, Progress(step // per_epoch, step), model, optimizer, fingerprint)


class Interrupt:
    """Ctrl-C asks for an end at the next step's boundary, where weights and step count agree; a second one insists."""

    def __init__(self) -> None:
        self.asked = False
        self.before = signal.getsignal(signal.SIGINT)
        self.in_main_thread = threading.current_thread() is threading.main_thread()
        if self.in_main_thread:
            signal.signal(signal.SIGINT, self._ask)

    def check(self) -> None:
        """Raise KeyboardInterrupt if an end was asked for."""
        if self.asked:
            raise KeyboardInterrupt

    def restore(self) -> None:
        if self.in_main_thread:
            signal.signal(signal.SIGINT, self.before)

    def _ask(self, _signal: int, _frame: object) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


def seed_step(seed: int, step: int) -> None:
    """Anchors depend on (seed, step) alone, so that a resumed run draws the same ones."""
    torch.manual_seed(seed * 1_000_003 + step)


def steps_per_epoch(data: TokenFile, settings: TrainSettings) -> int:
    """Optimiser steps in one pass over the data, at least 1."""
    batches_per_epoch = len(plan_epoch(data.lens.sum(1), settings.batch_size, settings.seed, 0))
    return max(1, batches_per_epoch // settings.accumulation_steps)


def check(settings: TrainSettings) -> None:
    """Refuse counts that cannot be. Raises UserError."""
    for name in ("num_steps", "batch_size", "accumulation_steps", "log_interval", "save_interval"):
        if getattr(settings, name) < 1:
            raise UserError(f"{name}={getattr(settings, name)} must be at least 1")


class Log:
    """Collects steps on the device; writes a CSV line and reads the numbers back once a line."""

    def __init__(self, path: Path, done: int) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if not done or not path.exists():
            with path.open("w", newline="") as file:
                csv.writer(file).writerow(("step", "epoch", "rate", "step_ms", *COLUMNS))
        self.pending: list[Tensor] = []
        self.started = time.perf_counter()

    def add(self, values: Float[Tensor, " c"]) -> None:
        self.pending.append(values)

    def line(self, step: int, epoch: int, rate: float) -> Record:
        values = torch.stack(self.pending).mean(0).tolist()  # sync
        if not all(value == value for value in values):
            raise RuntimeError(
                f"the loss is not a number in steps {step - len(self.pending)}..{step}; lower the learning rate"
            )
        elapsed = (time.perf_counter() - self.started) * 1000 / len(self.pending)
        self.pending = []
        self.started = time.perf_counter()
        with self.path.open("a", newline="") as file:
            csv.writer(file).writerow((step, epoch, f"{rate:.3e}", f"{elapsed:.1f}", *(f"{v:.5f}" for v in values)))
        return Record(step, epoch, rate, elapsed, values)
