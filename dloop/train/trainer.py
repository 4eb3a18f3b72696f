"""The training run: batches in, steps, records out. Parallelism and compilation are applied from outside."""

import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.train.alarms import Frozen
from dloop.train.batch import TokenFile, TrainBatch, batches, samples_of_batch
from dloop.train.checkpoint import Keeping, Progress, collect, judge, prune, save
from dloop.train.interrupt import Interrupt
from dloop.train.log import CSV, Log, Record
from dloop.train.optim import learning_rate
from dloop.train.parallel import ALONE, Share, wait
from dloop.train.step import GraphedStep, Step, columns

ALL, START = Keeping(), Progress()
logger = logging.getLogger("dloop")


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
    share: Share = ALONE  # of the processes that share a batch of batch_size samples each
    seed: int = 42
    log_interval: int = 50
    save_interval: int = 1000

    @property
    def depths(self) -> tuple[int, ...]:
        """What each step draws one of: an unroll's length, or the loop stage; 0 is the host objective alone."""
        return self.ttt_lengths or tuple(range(1, self.dloop_max_stage + 1)) or (0,)


@dataclass
class Run:
    """What is on the way while steps are taken."""

    step_once: Step | GraphedStep
    data: TokenFile
    settings: TrainSettings
    output_dir: Path
    keeping: Keeping
    interrupt: Interrupt
    log: Log
    frozen: Frozen

    def keep(self, step: int) -> None:
        """Write a checkpoint, measure it, and remove those that need not stay: one process does, all wait."""
        optimizer, model = self.step_once.optimizer, self.step_once.objective.model
        with self.interrupt.held():
            self.log.check(step)
            progress = Progress(epoch_at(step, self.data, self.settings), step, self.log.pending)
            found = collect(model, optimizer)
            if not self.settings.share.rank:
                folder = save(self.output_dir, progress, model.config, found, self.keeping.fingerprint)
                judge(folder, model, found.masters, self.keeping.ruler)
                prune(self.output_dir, self.keeping.last)
            wait()

    def note(self, step: int, values: Float[Tensor, " c"]) -> Record | None:
        """Take down what a step reported; a record where one is due."""
        self.log.add(values)
        if silent := self.frozen.look():
            logger.warning(silent)
        if step % self.settings.log_interval and step != self.settings.num_steps:
            return None
        return self.log.line(step, epoch_at(step, self.data, self.settings), rate_at(step - 1, self.settings))


def depth_at(step: int, max_stage: int, seed: int) -> int:
    """The loop stage trained at a step: the same on every rank and after a resume. 0: none."""
    return random.Random(f"{seed}/{step}").randint(1, max_stage) if max_stage else 0


def length_at(step: int, lengths: tuple[int, ...], seed: int) -> int:
    """The unroll's length at a step, each as likely: the same on every rank and after a resume."""
    return random.Random(f"{seed}/{step}").choice(lengths)


def train(
    step_once: Step | GraphedStep,
    data: TokenFile,
    settings: TrainSettings,
    output_dir: Path,
    *,
    begun: Progress = START,
    keeping: Keeping = ALL,
) -> Iterator[Record]:
    """Train on from where it has `begun`; yield a record every `log_interval` steps. Saves on the way, at the end, and
    when interrupted (Ctrl-C or the consumer's close), but not what a step left half done. Raises RuntimeError, and
    saves no more, once a value is not finite.
    """
    share = settings.share
    stream = parts_of_steps(data, settings, begun.step)
    path = None if share.rank else output_dir / CSV
    log = Log(path, columns(step_once.objective), begun, partial(samples_of_step, data, settings))
    saved = step = begun.step
    frozen = Frozen(step_once.objective.model)
    run = Run(step_once, data, settings, output_dir, keeping, Interrupt(), log, frozen)
    try:
        while step < settings.num_steps:
            run.interrupt.check()
            values = advance(step_once, stream, settings, step)
            step += 1
            if record := run.note(step, values):
                yield record
            if step % settings.save_interval == 0:
                saved = step  # what fails once is not tried again
                run.keep(step)
    finally:
        try:
            together = share.world == 1 or run.interrupt.agreed or step == settings.num_steps
            if step != saved and together and not run.interrupt.insisted and not step_once.torn:
                run.keep(step)
        finally:
            run.interrupt.restore()


def parts_of_steps(data: TokenFile, settings: TrainSettings, done: int) -> Iterator[TrainBatch]:
    """The batches of all steps from `done` on, one after another."""
    first, last = (count * settings.accumulation_steps for count in (done, settings.num_steps))
    return batches(data, together(settings), settings.seed, first, last, settings.share)


def together(settings: TrainSettings) -> int:
    """Samples of a batch, those of all processes."""
    return settings.batch_size * settings.share.world


def samples_of_step(data: TokenFile, settings: TrainSettings, step: int) -> list[int]:
    """The numbers (from 0) of the samples that a 0-based step reads."""
    first = step * settings.accumulation_steps
    chosen = (
        samples_of_batch(data, together(settings), settings.seed, first + part)
        for part in range(settings.accumulation_steps)
    )
    return [int(index) for part in chosen for index in part]


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
    return max(1, len(data) // together(settings))


def epoch_at(step: int, data: TokenFile, settings: TrainSettings) -> int:
    """Whole passes over the data after so many steps."""
    return step * settings.accumulation_steps // batches_per_epoch(data, settings)


def steps_of_epochs(num_epochs: int, data: TokenFile, settings: TrainSettings) -> int:
    """Steps in so many passes, at least 1: batches that do not fill a last step are left out once, not every pass."""
    return max(1, num_epochs * batches_per_epoch(data, settings) // settings.accumulation_steps)
