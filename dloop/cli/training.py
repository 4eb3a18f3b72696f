"""A whole training run from its flags: load, build, train, report."""

import hashlib
import json
import logging
import os
import sys
from collections.abc import Iterable
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from dloop import checkpoint
from dloop.cli.answer import device_of, hush
from dloop.cli.train import Command
from dloop.cli.train_checks import (
    make_writable,
    refuse_for_family,
    refuse_large_batch,
    refuse_numbers,
    refuse_unsupported,
)
from dloop.cli.train_data import check_data, is_jsonl, read_jsonl
from dloop.cli.train_plan import show_plan
from dloop.cli.train_record import RUN, about, recorded
from dloop.cli.train_show import follow, tracked
from dloop.cli.train_watch import raise_alarms, ruler_of, tracker_of
from dloop.detect import detect_family
from dloop.drafters.config import BlockConfig
from dloop.drafters.families import READERS
from dloop.drafters.host import HostConfig, HostModel
from dloop.errors import UserError
from dloop.load import check_device, load_drafter, load_target
from dloop.misfits import check_pair
from dloop.targets.hf import HFTarget
from dloop.train import fingerprint
from dloop.train.batch import TokenFile
from dloop.train.cache import cache_features, features_of
from dloop.train.checkpoint import Keeping, Progress, best, check_measures, judge_earlier, latest, resume, tau_of
from dloop.train.failing import ending_together
from dloop.train.flex import Attention, check_flex
from dloop.train.log import CSV, earlier
from dloop.train.losses import DSparkWeights
from dloop.train.objective import Objective, ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.optim import Optimizer
from dloop.train.parallel import ALONE, Share, from_environment, join, shard
from dloop.train.start import choose_vocabulary, fresh
from dloop.train.trainer import (
    START,
    GraphedStep,
    Record,
    Step,
    TrainSettings,
    columns,
    steps_of_epochs,
    together,
    train,
)


def run(command: Command) -> int:
    """Train; one line of progress a record on standard error, with --json one document at the end."""
    refuse_unsupported(command)
    refuse_numbers(command)
    hush()
    share = from_environment()
    device = device_of(command.device)
    if share.world > 1 and device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    join(share, check_device(device), command.dist_timeout)
    with ending_together(share):
        if not share.rank:
            return work(command, share, device)
        logging.getLogger("dloop").setLevel(logging.ERROR)  # one process speaks for all
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
            return work(command, share, device)


def work(command: Command, share: Share, device: str) -> int:
    """What every process does."""
    data = None
    if not is_jsonl(command.train_data_path):
        data = TokenFile.read(command.train_data_path, command.max_length)
        if command.on_the_fly_loader:
            print("dloop train: --on-the-fly-loader: a token file holds tokens already", file=sys.stderr)
    open_tracker = tracker_of(command)
    make_writable(command.output_dir, CSV, RUN, dry=command.dry_run)
    target = load_target(command.target_model_path, command.dtype, device, engine="twin")
    model = start_model(command, target).to(target.device)
    refuse_for_family(command, model.config, target)
    data = data or read_jsonl(command, target, model.config)
    check_data(data, target, command)
    refuse_large_batch(command, len(data), share)
    if command.draft_config_path is not None:
        choose_vocabulary(model, data)
    settings = settings_of(command, data, model.config, share)
    fingerprints = fingerprints_of(command, model, target, settings, data)
    objective = build_objective(command, model, target, share)
    raise_alarms(command, target, data, objective)
    if share.world > 1 and command.parallel == "fsdp":
        shard(objective)
    optimizer = Optimizer(model.parameters(), command.max_grad_norm)
    begun = begin(command, model, optimizer, fingerprints)
    step = build_step(command, objective, target, data, optimizer)
    keeping = Keeping(fingerprints[0], command.keep_last, None if share.rank else ruler_of(command, target))
    check_measures(command.output_dir, keeping.ruler)
    if command.dry_run:
        earlier(command.output_dir / CSV, columns(objective), begun.step)
        show_plan(command, data, target, step, settings)
        return 0
    judge_earlier(command.output_dir, model, keeping.ruler)
    facts = about(command, target, objective, settings, fingerprints[0])
    record = nullcontext() if share.rank else recorded(command.output_dir, facts, target.device)
    with record, nullcontext() if share.rank else open_tracker(begun.step) as tracker:
        stream = train(step, data, settings, command.output_dir, begun=begun, keeping=keeping)
        records = follow(tracked(stream, tracker, columns(objective)), settings, begun.step)
    report(command, records, settings, columns(objective))
    return 0


def report(command: Command, records: list[Record], settings: TrainSettings, names: tuple[str, ...]) -> None:
    """The last checkpoint, and the best one if any was measured."""
    finished, leading = latest(command.output_dir), best(command.output_dir)
    if command.json:
        names = ("step", "epoch", "rate", "step_ms", *names)
        rows = [dict(zip(names, (*r[:4], *r.values), strict=True)) for r in records]
        named = {"checkpoint": str(finished), "best": None if leading is None else str(leading)}
        print(json.dumps({"schema": 1, **named, "steps": settings.num_steps, "records": rows}))
    else:
        if leading is not None:
            print(f"dloop train: best measured: {leading.name}, tau {tau_of(leading):.3f}", file=sys.stderr)
        print(finished)


def start_model(command: Command, target: HFTarget) -> HostModel:
    """Float32 master weights, from a drafter or from the target's own layers."""
    if command.draft_init_path is not None:
        name, base = command.draft_init_path, command.draft_rope_theta
        drafter = load_drafter(name, target, gap_rows=command.gap_rows, rope_theta=base)
        if drafter.vocabulary.embedding is not target.vocabulary.embedding and drafter.config.own_head:
            raise UserError(
                f"--draft-init-path {name} has an embed_tokens.weight that is not its target's, and training keeps the "
                "target's; start from a drafter that was trained with it"
            )
        return drafter.model.float().requires_grad_(True)
    assert command.draft_config_path is not None
    source = str(command.draft_config_path)
    config = read_config(command.draft_config_path, "--draft-config-path")
    config = config.for_target(target.num_layers)
    if command.gap_rows is not None and isinstance(config, BlockConfig):
        config = replace(config, gap_rows=command.gap_rows)
    check_pair(config, target, source)
    count = config.num_layers if isinstance(config, BlockConfig) else 0
    last = tuple(range(target.num_layers - count, target.num_layers))
    layers = last if command.init_layers is None else command.init_layers
    return fresh(config, target, layers, command.seed)


def read_config(path: Path, what: str) -> HostConfig:
    """The config of a drafter of any family. Raises UserError naming what is wrong with it."""
    raw = checkpoint.read_json(path, what)
    return READERS[detect_family(raw, str(path))](raw, str(path))


def settings_of(command: Command, data: TokenFile, config: HostConfig, share: Share) -> TrainSettings:
    """How long and how fast, from the flags."""
    settings = TrainSettings(
        num_steps=1,
        batch_size=command.batch_size,
        learning_rate=command.learning_rate,
        warmup_ratio=command.warmup_ratio,
        max_grad_norm=command.max_grad_norm,
        accumulation_steps=command.accumulation_steps,
        dloop_max_stage=command.dloop_max_stage,
        ttt_lengths=() if isinstance(config, BlockConfig) else command.ttt_length_dist or published_lengths(config),
        share=share,
        seed=command.seed,
        log_interval=command.log_interval,
        save_interval=command.save_interval,
    )
    return replace(settings, num_steps=command.max_steps or steps_of_epochs(command.num_epochs, data, settings))


def published_lengths(config: HostConfig) -> tuple[int, ...]:
    """Unrolls of one, two and three of the host's stages."""
    return tuple(config.stage_len * stages for stages in (1, 2, 3))


def build_objective(command: Command, model: HostModel, target: HFTarget, share: Share) -> Objective:
    """What the family minimises, from the flags."""
    weights = DSparkWeights(
        ce=command.dspark_ce_loss_alpha,
        l1=command.dspark_l1_loss_alpha,
        confidence=command.dspark_confidence_head_alpha,
    )
    settings = ObjectiveSettings(
        num_anchors=command.num_anchors,
        loss_decay_gamma=command.loss_decay_gamma,
        dloop_loss_weight=command.dloop_loss_weight,
        position_offset_max=command.position_offset_max,
        lambda_base_start=command.lambda_base_start,
        lambda_base_decay_ratio=command.lambda_base_decay_ratio,
        attention=attention_of(command, model.config, target.device),
        recompute=command.gradient_checkpointing,
        share=share,
        loss_mask_shift=command.loss_mask_shift,
        weights=weights,
    )
    return objective_of(model, target.vocabulary, settings)


def build_step(
    command: Command, objective: Objective, target: HFTarget, data: TokenFile, optimizer: Optimizer
) -> Step | GraphedStep:
    """One step of the objective, with the accelerations asked for."""
    if command.compile:
        objective.compile_parts()
    taps, last = objective.model.config.target_layer_ids, objective.reads_teacher
    if command.cache_features:
        features = cache_features(target, data, taps, max(command.batch_size, 16), last=last)
    else:
        features = partial(features_of, target, taps, last=last, compiled=command.compile)
    step = Step(objective, features, optimizer)
    if not command.cuda_graphs:
        return step
    if target.device.type != "cuda":
        raise UserError(f"--cuda-graphs needs a GPU, this run is on {target.device}; leave it out")
    return GraphedStep(step)


def attention_of(command: Command, config: HostConfig, device: torch.device) -> Attention:
    """What packed stages and unrolls attend with."""
    if command.attention == "flex":
        check_flex(config, device)
    return command.attention


def begin(command: Command, model: HostModel, optimizer: Optimizer, fingerprints: list[str]) -> Progress:
    """What is done already: by the checkpoint resumed from, or nothing in a folder that holds none."""
    found = latest(command.output_dir)
    if command.resume and found is not None:
        return resume(found, model, optimizer, *fingerprints)
    if found is not None:
        raise UserError(f"{command.output_dir} already holds {found.name}; add --resume or choose another --output-dir")
    return START


def fingerprints_of(
    command: Command, model: HostModel, target: HFTarget, settings: TrainSettings, data: TokenFile
) -> list[str]:
    """Everything that decides the numbers of a run, target, data and starting weights by content; a resume must agree
    in it. First as it is written, then as earlier versions wrote it.
    """
    prefixes = ("dspark_", "dloop_", "lambda_", "loss_", "num_anc", "position_")  # unroll lengths are in the settings
    objective = [getattr(command, name) for name in vars(command) if name.startswith(prefixes)]
    chosen = replace(settings, log_interval=1, save_interval=1, batch_size=together(settings), share=ALONE)
    start = (value.detach().cpu().numpy() for value in model.state_dict().values())
    contents = (data.max_length, digest(data.contents()), digest(start))
    ways = (fingerprint.sampled_sha256, fingerprint.sampled_by_file)
    known = [way(target.folder) for way in ways] if target.folder else [target.name]
    found = [
        ((model.config, chosen, objective, of_target, command.dtype), *contents)
        for of_target in (*known, command.target_model_path)
    ]
    return [hashlib.sha256(repr(facts).encode()).hexdigest()[:12] for facts in found]


def digest(arrays: Iterable[np.ndarray]) -> str:
    """A hash of types, shapes and contents."""
    found = hashlib.sha256()
    for array in arrays:
        found.update(repr((array.dtype.str, array.shape)).encode())
        found.update(np.ascontiguousarray(array).data)
    return found.hexdigest()
