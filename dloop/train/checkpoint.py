"""Checkpoint folders `epoch_{e}_step_{s}`: a standard checkpoint of the host, and what an exact resume needs."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import torch

from dloop import checkpoint
from dloop.drafters.config import write_dspark
from dloop.drafters.dspark import DSpark
from dloop.errors import UserError
from dloop.train.optim import Optimizer

STATE = "training_state.pt"
NAME = re.compile(r"epoch_(\d+)_step_(\d+)")


class Progress(NamedTuple):
    """How far a run has come."""

    epoch: int
    step: int  # optimiser steps done


def save(output_dir: Path, progress: Progress, model: DSpark, optimizer: Optimizer, fingerprint: str) -> Path:
    """Write weights in bfloat16, float32 masters and optimiser state; the folder appears under its name when whole."""
    folder = output_dir / f"epoch_{progress.epoch}_step_{progress.step}"
    partial = output_dir / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    weights = {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}
    checkpoint.write_checkpoint(partial, write_dspark(model.config, "bfloat16"), weights)
    state = {
        "epoch": progress.epoch,
        "step": progress.step,
        "fingerprint": fingerprint,
        "masters": model.state_dict(),
        "optimizer": optimizer.adam.state_dict(),
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


def resume(folder: Path, model: DSpark, optimizer: Optimizer, fingerprint: str) -> Progress:
    """Load masters and optimiser state into what was built with the same settings."""
    state = torch.load(folder / STATE, map_location="cpu", weights_only=True)
    if state["fingerprint"] != fingerprint:
        raise UserError(
            f"{folder} was written by a run with other settings ({state['fingerprint']} instead of {fingerprint}); "
            "resume with the same settings or choose another --output-dir"
        )
    model.load_state_dict(state["masters"])
    optimizer.adam.load_state_dict(state["optimizer"])
    optimizer.adam.param_groups[0]["lr"] = optimizer.rate  # the loaded copy is no longer the tensor that set_rate fills
    return Progress(int(state["epoch"]), int(state["step"]))
