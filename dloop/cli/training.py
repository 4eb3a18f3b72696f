"""A whole training run from its flags: load, build, train, report."""

import hashlib
import json
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dloop import checkpoint
from dloop.cli.answer import hush
from dloop.cli.train import Command
from dloop.cli.train_data import check_data, is_jsonl, read_jsonl
from dloop.drafters.config import read_dspark
from dloop.drafters.dspark import DSpark
from dloop.errors import UserError
from dloop.load import check_device, check_pair, load_drafter, load_target
from dloop.targets.hf import BatchFeatures, HFTarget
from dloop.train.batch import TokenFile, TrainBatch
from dloop.train.block import DSparkObjective, ObjectiveSettings
from dloop.train.cache import cache_features
from dloop.train.checkpoint import latest, resume
from dloop.train.losses import DSparkWeights
from dloop.train.optim import Optimizer
from dloop.train.start import from_target
from dloop.train.trainer import COLUMNS, GraphedStep, Record, Step, TrainSettings, check, steps_of_epochs, train

MOST_ANCHORS = 100_000
RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (  # written so that NaN breaks every one
    ("max_length", lambda value: value >= 2, "at least 2"),
    ("num_epochs", lambda value: value >= 1, "at least 1"),
    ("learning_rate", lambda value: 0 < value < math.inf, "above 0 and finite"),
    ("warmup_ratio", lambda value: 0 <= value < 1, "at least 0 and below 1"),
    ("max_grad_norm", lambda value: value > 0, "above 0 (inf clips nothing)"),
    ("seed", lambda value: 0 <= value < 2**31, "at least 0 and below 2^31"),
    ("num_anchors", lambda value: 1 <= value <= MOST_ANCHORS, f"at least 1 and at most {MOST_ANCHORS}"),
    ("loss_decay_gamma", lambda value: value > 0, "above 0 (inf weighs all rows alike)"),
    ("dspark_ce_loss_alpha", lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    ("dspark_l1_loss_alpha", lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    ("dspark_confidence_head_alpha", lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    ("dloop_max_stage", lambda value: value >= 0, "at least 0 (0 trains the host alone)"),
    ("dloop_loss_weight", lambda value: 0 <= value <= 1, "a weight from 0 to 1"),
)


def run(command: Command) -> int:
    """Train; one line of progress a record on standard error, with --json one document at the end."""
    refuse_unsupported(command)
    refuse_numbers(command)
    hush()
    device = ("cuda" if torch.cuda.is_available() else "cpu") if command.device == "auto" else command.device
    where = check_device(device)
    data = None if is_jsonl(command.train_data_path) else TokenFile.read(command.train_data_path, command.max_length)
    make_writable(command.output_dir)
    target = load_target(command.target_model_path, command.dtype, device)
    model = start_model(command, target).to(where)
    data = data or read_jsonl(command, target, model.config)
    check_data(data, target, command)
    settings = settings_of(command, data)
    optimizer = Optimizer(model.parameters(), command.max_grad_norm)
    fingerprint = fingerprint_of(command, model, settings, data)
    done = begin(command, model, optimizer, fingerprint)
    step = build_step(command, model, target, data, optimizer)
    records = follow(
        train(step, data, settings, command.output_dir, done=done, fingerprint=fingerprint), settings, done
    )
    finished = latest(command.output_dir)
    if command.json:
        rows = [{"step": r.step, "epoch": r.epoch, "rate": r.rate, "step_ms": r.step_ms, **named(r)} for r in records]
        print(json.dumps({"schema": 1, "checkpoint": str(finished), "steps": settings.num_steps, "records": rows}))
    else:
        print(finished)
    return 0


def refuse_unsupported(command: Command) -> None:
    """Flags that cannot be honoured here are refused by name, before anything is loaded."""
    processes = os.environ.get("WORLD_SIZE") or "1"
    if processes != "1":
        raise UserError(
            f"WORLD_SIZE={processes}: training runs as one process so far; start it with --nnodes 1 --nproc_per_node 1 "
            f"or without torchrun (--accumulation-steps {processes} keeps the batch of a step)"
        )
    if command.target_model_backend == "sglang":
        raise UserError("--target-model-backend sglang is not offered; hf runs the target inside the trainer")
    if (command.draft_init_path is None) == (command.draft_config_path is None):
        raise UserError("give either --draft-init-path (a drafter to start from) or --draft-config-path (a new one)")
    if command.init_layers is not None and command.draft_init_path is not None:
        raise UserError(
            f"--init-layers {','.join(map(str, command.init_layers))} has no use with --draft-init-path, which brings "
            "its own layers; leave one of them out"
        )
    if command.cuda_graphs and command.accumulation_steps > 1:
        raise UserError("--cuda-graphs needs --accumulation-steps 1; leave one of them out")


def refuse_numbers(command: Command) -> None:
    """Raises UserError at a number no run can use, NaN included."""
    for name, holds, words in RULES:
        value = getattr(command, name)
        if not holds(value):
            raise UserError(f"--{name.replace('_', '-')} {value} must be {words}")
    if command.num_anchors > command.max_length:
        raise UserError(
            f"--num-anchors {command.num_anchors} is more than --max-length {command.max_length}, and a token is one "
            "anchor at most; give as many anchors as tokens or fewer"
        )


def make_writable(folder: Path) -> None:
    """Make the output folder. Raises UserError if it cannot be made or written to: now, not after the first steps."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"--output-dir {folder} cannot be written to ({error.strerror}); choose another folder"
        ) from error


def start_model(command: Command, target: HFTarget) -> DSpark:
    """Float32 master weights, from a drafter or from the target's own layers."""
    if command.draft_init_path is not None:
        drafter = load_drafter(command.draft_init_path, target, gap_rows=command.gap_rows)
        return cast(DSpark, drafter.model).float().requires_grad_(True)
    assert command.draft_config_path is not None
    source = str(command.draft_config_path)
    config = read_dspark(checkpoint.read_json(command.draft_config_path, "--draft-config-path"), source)
    if command.gap_rows is not None:
        config = replace(config, gap_rows=command.gap_rows)
    check_pair(config, target, source)
    last = tuple(range(target.num_layers - config.num_layers, target.num_layers))
    layers = last if command.init_layers is None else command.init_layers
    return from_target(config, target, layers, command.seed)


def settings_of(command: Command, data: TokenFile) -> TrainSettings:
    """How long and how fast, from the flags."""
    settings = TrainSettings(
        num_steps=1,
        batch_size=command.batch_size,
        learning_rate=command.learning_rate,
        warmup_ratio=command.warmup_ratio,
        max_grad_norm=command.max_grad_norm,
        accumulation_steps=command.accumulation_steps,
        dloop_max_stage=command.dloop_max_stage,
        seed=command.seed,
        log_interval=command.log_interval,
        save_interval=command.save_interval,
    )
    if command.max_steps is not None:
        return replace(settings, num_steps=command.max_steps)
    check(settings)
    return replace(settings, num_steps=steps_of_epochs(command.num_epochs, data, settings))


def build_step(
    command: Command, model: DSpark, target: HFTarget, data: TokenFile, optimizer: Optimizer
) -> Step | GraphedStep:
    """The objective and one step of it, with the accelerations asked for."""
    objective = DSparkObjective(
        model,
        target.vocabulary,
        ObjectiveSettings(
            num_anchors=command.num_anchors,
            loss_decay_gamma=command.loss_decay_gamma,
            dloop_loss_weight=command.dloop_loss_weight,
            weights=DSparkWeights(
                ce=command.dspark_ce_loss_alpha,
                l1=command.dspark_l1_loss_alpha,
                confidence=command.dspark_confidence_head_alpha,
            ),
        ),
    )
    if command.compile:
        objective.row_sums = torch.compile(objective.row_sums)
    taps = model.config.target_layer_ids
    if command.cache_features:
        features = cache_features(target, data, taps, max(command.batch_size, 16))
    else:
        features = partial(features_of, target, taps)
    step = Step(objective, features, optimizer)
    if not command.cuda_graphs:
        return step
    if target.device.type != "cuda":
        raise UserError(f"--cuda-graphs needs a GPU, this run is on {target.device}; leave it out")
    return GraphedStep(step)


def features_of(target: HFTarget, taps: tuple[int, ...], batch: TrainBatch) -> BatchFeatures:
    """The target's features of a batch, computed on the spot."""
    return target.features(batch.tokens, taps)


def begin(command: Command, model: DSpark, optimizer: Optimizer, fingerprint: str) -> int:
    """Steps already done: those of the checkpoint resumed from, or 0 in a folder that holds none."""
    found = latest(command.output_dir)
    if command.resume and found is not None:
        return resume(found, model, optimizer, fingerprint).step
    if found is not None:
        raise UserError(f"{command.output_dir} already holds {found.name}; add --resume or choose another --output-dir")
    return 0


def fingerprint_of(command: Command, model: DSpark, settings: TrainSettings, data: TokenFile) -> str:
    """Everything that decides the numbers of a run, data and starting weights by content; a resume must agree in it."""
    objective = [
        getattr(command, name) for name in vars(command) if name.startswith(("dspark_", "dloop_", "loss_", "num_anc"))
    ]
    facts = (
        model.config,
        replace(settings, log_interval=1, save_interval=1),
        objective,
        command.target_model_path,
        command.dtype,
    )
    arrays = [data.flat, data.lens] + ([] if data.labels is None else [data.labels])
    start = (value.detach().cpu().numpy() for value in model.state_dict().values())
    return hashlib.sha256(repr((facts, data.max_length, digest(arrays), digest(start))).encode()).hexdigest()[:12]


def digest(arrays: Iterable[np.ndarray]) -> str:
    """A hash of types, shapes and contents."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(repr((array.dtype.str, array.shape)).encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()


def follow(stream: Iterator[Record], settings: TrainSettings, done: int) -> list[Record]:
    """Show the records as they come; quiet when standard error is not a terminal, but for one line each."""
    records: list[Record] = []
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("training", total=settings.num_steps, completed=done)
        for record in stream:
            records.append(record)
            progress.update(task, completed=record.step, description=describe(record))
    return records


def named(record: Record) -> dict[str, float]:
    """A record's values by column."""
    return dict(zip(COLUMNS, record.values, strict=True))


def describe(record: Record) -> str:
    """One line for the progress bar."""
    return f"loss {record.values[0]:.3f}  rate {record.rate:.1e}  {record.step_ms:.0f} ms/step"
