"""run.json of `dloop train`: the flags of a run, what it trains, and the most memory that it took."""

import dataclasses
import json
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch

from dloop.bench.decode import peak_memory
from dloop.bench.run import commit
from dloop.bench.store import write
from dloop.cli.train import Command
from dloop.drafters.config import BlockConfig
from dloop.records import SCHEMA, Json, dumps, hardware, plain, versions
from dloop.targets.hf import HFTarget
from dloop.train.objective import Objective
from dloop.train.trainer import TrainSettings

RUN = "run.json"
NO_SETTING = {"json", "debug", "dry_run", "profile", "peak_tflops"}


def about(
    command: Command, target: HFTarget, objective: Objective, settings: TrainSettings, fingerprint: str
) -> dict[str, Json]:
    """Everything known before the first step."""
    config = objective.model.config
    packed = isinstance(config, BlockConfig)
    flags = {name: value for name, value in dataclasses.asdict(command).items() if name not in NO_SETTING}
    facts: dict[str, object] = {
        "schema": SCHEMA,
        "fingerprint": fingerprint,
        "target": target.name,
        "family": config.family,
        "setting": flags,
        "steps": settings.num_steps,
        "depths": settings.depths,  # stages beyond the first, one drawn a step; of an unroll, its lengths
        "losses": ("first stage and the drawn one" if any(settings.depths) else "first stage")
        if packed
        else "all steps",
        "processes": settings.share.world,
        "parameters": sum(parameter.numel() for parameter in objective.model.parameters()),
        "hardware": hardware(target.device),
        "versions": versions(),
        "commit": commit(),
    }
    return {name: plain(value) for name, value in facts.items()}


@contextmanager
def recorded(output_dir: Path, facts: dict[str, Json], device: torch.device) -> Generator[None, None, None]:
    """Write run.json before the first step and again, with the peak of all sittings so far, when they have ended.

    `peak_memory_bytes`: as in results, allocated on the GPU by this process, checkpoints' measures included; on a CPU
    of the whole process. Null while no sitting has ended.
    """
    path = output_dir / RUN
    before = earlier_peak(path, str(facts["fingerprint"]))
    write(path, dumps({**facts, "peak_memory_bytes": before}) + "\n")
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    try:
        yield
    finally:
        write(path, dumps({**facts, "peak_memory_bytes": max(before or 0, peak_memory(device))}) + "\n")


def earlier_peak(path: Path, fingerprint: str) -> int | None:
    """That of the same run's earlier sittings; None without one, or where it cannot be read."""
    try:
        found: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict) or found.get("fingerprint") != fingerprint:
        return None
    peak = found.get("peak_memory_bytes")
    return peak if isinstance(peak, int) else None
