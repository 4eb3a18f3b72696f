"""What `dloop train` watches: acceptance on held-out prompts, alarms before the first step, trackers."""

import hashlib
import json
import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np

from dloop import checkpoint
from dloop.batch import generate_numbered
from dloop.bench.run import template_sha256
from dloop.chat import load_tokenizer
from dloop.cli.train import Command
from dloop.cli.train_data import check_tokens
from dloop.cli.train_show import Tracker
from dloop.data.prompts import NO_ROOM, Prompts, prompt_encoder, read_questions
from dloop.data.tokenise import EMPTY, named
from dloop.drafters.host import HostModel
from dloop.errors import UserError
from dloop.records import Json, number
from dloop.settings import Settings
from dloop.targets.hf import HFTarget
from dloop.train.acceptance import Acceptance, Text, measure
from dloop.train.alarms import shift_of_labels
from dloop.train.batch import TokenFile
from dloop.train.cache import features_of
from dloop.train.checkpoint import Ruler
from dloop.train.objective import Objective

AT_ONCE = 16  # texts that the target writes together
PROBED = 64  # samples that are read before the first step
logger = logging.getLogger("dloop")


def ruler_of(command: Command, target: HFTarget) -> Ruler | None:
    """What measures each checkpoint; None without --eval-data-path. The target writes its greedy texts now, once."""
    if command.eval_data_path is None:
        return None
    prompts = held_out(command, target)
    settings = Settings(max_new_tokens=command.eval_max_new_tokens, temperature=0.0, seed=0)
    done = {text.index: text.tokens for text in generate_numbered(target, None, enumerate(prompts), settings, AT_ONCE)}
    texts: list[Text] = [(prompt, list(done[index])) for index, prompt in enumerate(prompts) if len(done[index]) > 1]
    if not texts:
        raise UserError(f"{command.eval_data_path}: {target.name} ends every answer at once; give other prompts")
    print(f"dloop train: each checkpoint is measured on {len(texts)} greedy texts", file=sys.stderr)
    facts: dict[str, Json] = {
        "gate": number(command.eval_gate),
        "texts_sha256": hashlib.sha256(repr(texts).encode()).hexdigest(),
    }
    return Ruler(partial(told, measure, target, texts, command.eval_gate), facts)


def told(
    work: Callable[[HostModel, HFTarget, list[Text], float], Acceptance],
    target: HFTarget,
    texts: list[Text],
    gate: float,
    model: HostModel,
) -> Acceptance:
    """Measure, with a line on standard error."""
    found = work(model, target, texts, gate)
    stages = " ".join(f"{value:.2f}" for value in found["stages"])
    print(f"tau {found['tau']:.3f} (host alone {found['tau_host']:.3f}; by stage {stages})", file=sys.stderr)
    return found


def held_out(command: Command, target: HFTarget) -> list[list[int]]:
    """Prompts in ids: of a token file, or the first questions of conversations; what is left out is told."""
    path = cast(Path, command.eval_data_path)
    room = target.context - command.eval_max_new_tokens
    found = of_tokens(path, command, target, room) if path.suffix == ".npz" else of_lines(path, command, target, room)
    prompts: list[list[int]] = []
    left_out: dict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(found, 1):
        if isinstance(item, str):
            left_out[item].append(place)
            continue
        prompts.append(item)
        if len(prompts) == command.eval_samples:
            break
    for reason, where in left_out.items():
        print(f"dloop train: {path}: left out {len(where)}: {reason} ({named(where)})", file=sys.stderr)
    if not prompts:
        raise UserError(
            f"--eval-data-path {path} has no prompt that leaves room for --eval-max-new-tokens "
            f"{command.eval_max_new_tokens}; give others"
        )
    return prompts


def of_tokens(path: Path, command: Command, target: HFTarget, room: int) -> Iterator[list[int] | str]:
    """The prompt of every sample, or why it is none."""
    data = TokenFile.read(path, command.max_length, "--eval-data-path")
    check_tokens(path, data, target)
    for index in range(len(data)):
        tokens, labels = data.sample(index)
        ids = tokens[: int(labels.argmax())].tolist()
        if not labels.any():
            yield EMPTY
        elif not ids:
            yield "no token before the first label"
        else:
            yield ids if len(ids) <= room else NO_ROOM


def of_lines(path: Path, command: Command, target: HFTarget, room: int) -> Iterator[list[int] | str]:
    """The first question of every line, or why it is none."""
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None:
        raise UserError(f"{target.name} has no tokenizer beside its weights; give tokens (.npz) as --eval-data-path")
    encode = prompt_encoder(command.chat_template, tokenizer)
    for item in read_questions(path, "--eval-data-path"):
        read = Prompts(path, encode, room)
        read.add(item)
        yield read.used[0].tokens.tolist() if read.used else next(iter(read.skipped))


def raise_alarms(command: Command, target: HFTarget, data: TokenFile, objective: Objective) -> None:
    """Warn of data of another target or template, of samples without a label, and of labels off by one."""
    for how in stale(command.train_data_path, target):
        logger.warning(f"{command.train_data_path} was {how}; make it again")
    empty = (
        []
        if data.labels is not None
        else np.flatnonzero(  # conversations were counted when they were read
            (data.lens[:, 1] == 0) | (data.lens[:, 0] >= data.max_length)
        ).tolist()
    )
    if empty:
        shown = ", ".join(map(str, empty[:5]))
        logger.warning(
            f"{len(empty)} of {len(data)} samples have no label within --max-length {command.max_length}, such as "
            f"{shown} (from 0): a step of them alone learns nothing"
        )
    labels = [int(data.sample(index).labels.sum()) for index in range(min(len(data), PROBED))]
    if not any(labels):
        raise UserError(
            f"{command.train_data_path}: none of the first {len(labels)} samples has a label within --max-length "
            f"{command.max_length}; raise it, or look at the data with dloop data inspect"
        )
    if data.labels is not None and 0 in labels:
        logger.warning(f"{labels.count(0)} of the first {len(labels)} conversations have no label and weigh nothing")
    batch = data.collate(np.array([int(np.argmax(labels))])).to(target.device)
    taps = objective.model.config.target_layer_ids
    features = features_of(target, taps, batch, last=objective.reads_teacher)
    shift = shift_of_labels(objective, batch, features)
    if shift is not None:
        logger.warning(
            f"the drafter's predictions fit the token {'before' if shift < 0 else 'after'} each label better than the "
            "label: was it trained with another label_shift, or are the features of another layer or position?"
        )


def stale(path: Path, target: HFTarget) -> list[str]:
    """How these data came about by what `dloop data` recorded beside them, where that is not so of this target."""
    record = path.with_name(f"{path.name}.json")
    if target.folder is None or not record.is_file():
        return []
    try:
        read: object = json.loads(record.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return []  # some other file of this name
    if not isinstance(read, dict):
        return []
    known = cast(dict[str, object], read)
    tokenizer = load_tokenizer(target.folder, target.name)
    now: dict[str, object] = {"checkpoint_sha256": {"target": checkpoint.sha256(target.folder)}}
    if tokenizer is not None and known.get("template_sha256") is not None:
        now["template_sha256"] = template_sha256(tokenizer)
    names = {"checkpoint_sha256": "target", "template_sha256": "chat template"}
    other = [names[key] for key, value in now.items() if key in known and known[key] != value]
    found = [f"made with another {name} than this run's" for name in other]
    model = known.get("model")
    if known.get("source") == "servers" and isinstance(model, str) and last_part(model) != last_part(target.name):
        found.append(f"written by servers of {model}, which by its name is not this run's target, {target.name}")
    return found


def last_part(name: str) -> str:
    """What a hub id and a folder of the same checkpoint have in common; a server knows no more of its model."""
    return Path(name).absolute().name.casefold()


def tracker_of(command: Command) -> Callable[[int], AbstractContextManager[Tracker | None]]:
    """What --report-to names, to be opened with the steps that are done: what was told of later ones is dropped.

    Raises UserError where it is not installed.
    """
    if command.report_to == "csv":
        return lambda _: nullcontext()
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise UserError(
            f"--report-to tensorboard needs a package that is not installed ({error}): pip install tensorboard, or "
            "use --report-to csv"
        ) from error
    folder = str(command.output_dir / "tensorboard")
    return lambda done: closing(cast(Tracker, SummaryWriter(folder, purge_step=done + 1)))
