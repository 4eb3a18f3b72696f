"""Checkpoint folders `epoch_{e}_step_{s}`: a standard checkpoint of the host, and what an exact resume needs."""

import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor

from dloop import checkpoint
from dloop.drafters.families import write_config
from dloop.drafters.host import HostModel
from dloop.errors import UserError
from dloop.train.optim import Optimizer

STATE = "training_state.pt"
NAME = re.compile(r"epoch_(\d+)_step_(\d+)")


class Progress(NamedTuple):
    """How far a run has come."""

    epoch: int
    step: int  # optimiser steps done


def save(output_dir: Path, progress: Progress, model: HostModel, optimizer: Optimizer, fingerprint: str) -> Path:
    """Write weights in bfloat16, float32 masters and optimiser state; the folder appears under its name when whole.

    Raises RuntimeError before anything is written if a value is not finite.
    """
    folder = output_dir / f"epoch_{progress.epoch}_step_{progress.step}"
    weights = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value  # maps of ids stay what they are
        for name, value in model.state_dict().items()
    }
    masters, adam = model.state_dict(), optimizer.adam.state_dict()
    if not all_finite(tensors_in((weights, masters, adam["state"]))):
        raise RuntimeError(
            f"weights or optimiser state are not finite after step {progress.step}, so {folder.name} is not written; "
            "lower the learning rate"
        )
    partial = output_dir / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    checkpoint.write_checkpoint(partial, write_config(model.config, "bfloat16"), weights)
    state = {
        "epoch": progress.epoch,
        "step": progress.step,
        "fingerprint": fingerprint,
        "masters": masters,
        "optimizer": adam,
    }
    torch.save(state, partial / STATE)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return folder


def latest(output_dir: Path) -> Path | None:
    """The checkpoint with the most steps that can be resumed from."""
    found = [
        path for path in output_dir.glob("epoch_*_step_*") if (path / STATE).is_file() and NAME.fullmatch(path.name)
    ]
    return max(found, key=lambda path: steps_of(path.name), default=None)


def steps_of(name: str) -> int:
    """The steps in a checkpoint folder's name; -1 if it is none."""
    match = NAME.fullmatch(name)
    return int(match.group(2)) if match else -1


def resume(folder: Path, model: HostModel, optimizer: Optimizer, fingerprint: str) -> Progress:
    """Load masters and optimiser state into what was built with the same settings.

    Raises UserError if the state is damaged, not finite, or of other settings.
    """
    try:
        state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
        found = [state[key] for key in ("fingerprint", "epoch", "step", "masters", "optimizer")]
    except Exception as error:  # a damaged archive raises whatever its readers trip over
        raise UserError(
            f"{folder / STATE} cannot be read ({type(error).__name__}); remove that folder to go on before it"
        ) from error
    if state["fingerprint"] != fingerprint:
        raise UserError(
            f"{folder} was written by a run with other settings ({state['fingerprint']} instead of {fingerprint}); "
            "resume with the same settings or choose another --output-dir"
        )
    if not all_finite(tensors_in(found)):
        raise UserError(
            f"{folder} holds values that are not finite: its run had diverged; remove it to go on from the one before, "
            "or start anew with a lower --learning-rate"
        )
    model.load_state_dict(state["masters"])
    optimizer.adam.load_state_dict(state["optimizer"])
    optimizer.adam.param_groups[0]["lr"] = optimizer.rate  # the loaded copy is no longer the tensor that set_rate fills
    return Progress(int(state["epoch"]), int(state["step"]))


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
