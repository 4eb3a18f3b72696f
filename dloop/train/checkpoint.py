"""Checkpoint folders `epoch_{e}_step_{s}`: a standard checkpoint of the host, and what an exact resume needs."""

import json
import logging
import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from dloop import checkpoint
from dloop.drafters.families import write_config
from dloop.drafters.host import HostConfig, HostModel
from dloop.errors import UserError
from dloop.records import Json
from dloop.train.acceptance import Acceptance
from dloop.train.optim import Optimizer
from dloop.train.parallel import gathered, like

STATE, JUDGED, PARTIAL = "training_state.pt", "acceptance.json", ".partial"
NAME = re.compile(r"epoch_(\d+)_step_(\d+)")
logger = logging.getLogger("dloop")


@dataclass(frozen=True)
class Ruler:
    """What measures checkpoints, and the facts that make two measures comparable: they are recorded with each."""

    measure: Callable[[HostModel], Acceptance]
    facts: dict[str, Json]


@dataclass(frozen=True)
class Keeping:
    """What checkpoints carry, and which of them stay."""

    fingerprint: str = ""  # of all that decides the run's numbers
    last: int | None = None  # how many stay beside the best one; None: all
    ruler: Ruler | None = None


class Progress(NamedTuple):
    """How far a run has come."""

    epoch: int = 0
    step: int = 0  # optimiser steps done
    pending: Sequence[Tensor] = ()  # what the steps since the last line of the log reported


class State(NamedTuple):
    """Float32 masters and the optimiser's state, whole."""

    masters: dict[str, Tensor]
    adam: dict[str, object]


def collect(model: HostModel, optimizer: Optimizer) -> State:
    """What a checkpoint holds. All processes must call it."""
    return State(*(cast(dict[str, Any], gathered(x)) for x in (model.state_dict(), optimizer.adam.state_dict())))


def save(output_dir: Path, progress: Progress, config: HostConfig, found: State, fingerprint: str) -> Path:
    """Write weights in bfloat16, float32 masters and optimiser state; the folder appears under its name when whole.

    Raises RuntimeError before anything is written if a value is not finite.
    """
    folder = output_dir / f"epoch_{progress.epoch}_step_{progress.step}"
    masters, adam = found
    weights = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value  # maps of ids stay what they are
        for name, value in masters.items()
    }
    if not all_finite(tensors_in((weights, masters, adam["state"]))):
        raise RuntimeError(
            f"weights or optimiser state are not finite after step {progress.step}, so {folder.name} is not written; "
            "lower the learning rate"
        )
    partial = output_dir / f".{folder.name}{PARTIAL}"
    shutil.rmtree(partial, ignore_errors=True)
    checkpoint.write_checkpoint(partial, write_config(config, "bfloat16"), weights)
    state = {
        "epoch": progress.epoch,
        "step": progress.step,
        "pending": list(progress.pending),
        "fingerprint": fingerprint,
        "masters": masters,
        "optimizer": adam,
    }
    torch.save(state, partial / STATE)
    for path in (*partial.iterdir(), partial):
        settle(path)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    settle(output_dir)
    return folder


def settle(path: Path) -> None:
    """Return when a file, or the names in a folder, are on the disk: a rename must not overtake what it names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def judge(folder: Path, model: HostModel, masters: dict[str, Tensor], ruler: Ruler | None) -> None:
    """Measure a checkpoint's acceptance, if the run measures at all, and write it beside the weights."""
    if ruler is None:
        return
    found = ruler.measure(rebuilt(model, masters))
    text = json.dumps({**found, **ruler.facts}, indent=1, allow_nan=False) + "\n"
    partial = folder / f".{JUDGED}{PARTIAL}"
    partial.write_text(text)
    settle(partial)
    partial.replace(folder / JUDGED)


def check_measures(output_dir: Path, ruler: Ruler | None) -> None:
    """Raises UserError where checkpoints were measured by another ruler: the best one could not be told."""
    if ruler is None:
        return
    for path in (folder / JUDGED for folder in checkpoints(output_dir) if tau_of(folder) > -math.inf):
        known = json.loads(path.read_text())
        for name, value in ruler.facts.items():
            if known.get(name) != value:
                raise UserError(
                    f"{path} was measured with {name}={known.get(name)}, not {value}; resume with the same --eval-... "
                    "flags, or choose another --output-dir"
                )


def judge_earlier(output_dir: Path, model: HostModel, ruler: Ruler | None) -> None:
    """Measure the checkpoints that a killed run left unmeasured."""
    for folder in checkpoints(output_dir):
        if ruler and tau_of(folder) == -math.inf:
            judge(folder, model, read_state(folder)["masters"], ruler)


def rebuilt(model: HostModel, masters: dict[str, Tensor]) -> HostModel:
    """A drafter of its own with these weights."""
    fresh = type(model)(model.config).to(next(model.parameters()).device)
    fresh.load_state_dict(masters)
    return fresh


def tau_of(folder: Path) -> float:
    """The acceptance length that was measured of a checkpoint; below all others without one."""
    try:
        return float(json.loads((folder / JUDGED).read_text())["tau"])
    except (OSError, ValueError, KeyError):
        return -math.inf


def best(output_dir: Path) -> Path | None:
    """The checkpoint with the largest measured acceptance length; the later one of equals. None if none is measured."""
    found = max(checkpoints(output_dir), key=lambda path: (tau_of(path), steps_of(path.name)), default=None)
    return None if found is None or tau_of(found) == -math.inf else found


def prune(output_dir: Path, keep_last: int | None) -> None:
    """Leave the last so many checkpoints, and the best one; and nothing of saves that were killed."""
    for path in output_dir.glob(f".epoch_*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    if keep_last is None:
        return
    ordered = sorted(checkpoints(output_dir), key=lambda path: steps_of(path.name))
    for path in ordered[:-keep_last]:
        if path != best(output_dir):
            doomed = path.rename(path.with_name(f".{path.name}{PARTIAL}"))  # never half a checkpoint under its name
            shutil.rmtree(doomed)


def checkpoints(output_dir: Path) -> list[Path]:
    """All that can be resumed from."""
    found = output_dir.glob("epoch_*_step_*")
    return [path for path in found if (path / STATE).is_file() and NAME.fullmatch(path.name)]


def latest(output_dir: Path) -> Path | None:
    """The checkpoint with the most steps that can be resumed from."""
    return max(checkpoints(output_dir), key=lambda path: steps_of(path.name), default=None)


def steps_of(name: str) -> int:
    """The steps in a checkpoint folder's name; -1 if it is none."""
    match = NAME.fullmatch(name)
    return int(match.group(2)) if match else -1


def resume(folder: Path, model: HostModel, optimizer: Optimizer, *fingerprints: str) -> Progress:
    """Load masters and optimiser state into what was built with the same settings, `fingerprints` being what this and
    earlier versions call them.

    Raises UserError if the state is damaged, not finite, or of other settings.
    """
    state = read_state(folder)
    if state["fingerprint"] not in fingerprints:
        raise UserError(
            f"{folder} was written by a run with other settings, or by another version of dloop "
            f"({state['fingerprint']} instead of {fingerprints[0]}); resume with the same settings or choose another "
            "--output-dir"
        )
    if not all_finite(tensors_in(state)):
        raise UserError(
            f"{folder} holds values that are not finite: its run had diverged; remove it to go on from the one before, "
            "or start anew with a lower --learning-rate"
        )
    current = model.state_dict()
    model.load_state_dict({name: like(value, current[name]) for name, value in state["masters"].items()})
    for index, moments in state["optimizer"]["state"].items():
        for name, value in moments.items():
            moments[name] = like(value, optimizer.parameters[index])
    optimizer.adam.load_state_dict(state["optimizer"])
    optimizer.adam.param_groups[0]["lr"] = optimizer.rate  # the loaded copy is no longer the tensor that set_rate fills
    if state["pending"] is None:
        logger.warning(
            f"{folder} is of an earlier version of dloop, which kept no steps for the log: its next line has the means "
            f"of the steps from {state['step'] + 1} on"
        )
    pending = [values.to(optimizer.rate.device) for values in state["pending"] or []]
    return Progress(int(state["epoch"]), int(state["step"]), pending)


def read_state(folder: Path) -> dict[str, Any]:
    """All that `save` put there; `pending` is None in a state of the first form. Raises UserError if it is damaged."""
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        found = {key: state[key] for key in ("fingerprint", "epoch", "step", "masters", "optimizer")}
        return {**found, "pending": state.get("pending")}
    except Exception as error:  # a damaged archive raises whatever its readers trip over
        raise UserError(
            f"{folder / STATE} cannot be read ({type(error).__name__}); remove that folder to go on before it"
        ) from error


def tensors_in(value: object) -> Iterator[Tensor]:
    """Every tensor in nested dicts, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors_in(list(cast(dict[object, object], value).values()))
    elif isinstance(value, list | tuple):
        for item in cast(list[object], value):
            yield from tensors_in(item)


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor has a NaN or an infinity; one read-back a device."""
    faults: dict[torch.device, Tensor] = {}
    for tensor in tensors:
        fault = ~tensor.isfinite().all()
        faults[tensor.device] = faults[tensor.device] | fault if tensor.device in faults else fault
    return not any(bool(fault) for fault in faults.values())
