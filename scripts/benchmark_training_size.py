"""Time a training step at the size of a published model: random weights, one sequence, every host; JSON on the way.

Default: Qwen3-4B, 4,096 tokens, 512 anchors, loop stages 1 to 3. `--shape tiny --tokens 64 --num-anchors 4 --variants
dense` runs on a CPU. A variant is an attention, dense or flex, then what else is on: compile, graphs, recompute.
"""

import gc
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import torch

from dloop.bench.latency.models import Family, drafter_config, fill, random_eagle3, random_target
from dloop.bench.latency.shapes import ALIASES, SHAPES, Shape, shape_of
from dloop.bench.store import write
from dloop.bench.training import costs, matrix_rate
from dloop.cli.args import option, parse
from dloop.drafters.families import build
from dloop.drafters.host import HostModel
from dloop.records import hardware, versions
from dloop.targets.hf import HFTarget
from dloop.train.batch import TokenFile
from dloop.train.cache import features_of
from dloop.train.flex import Attention
from dloop.train.objective import ObjectiveSettings
from dloop.train.objectives import objective_of
from dloop.train.optim import Optimizer
from dloop.train.step import GraphedStep, Step

HOSTS = ("dspark", "dflash", "domino", "eagle3")
EXTRAS = {"compile", "graphs", "recompute"}
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class Command:
    """Time training steps at a published model's size: seconds, memory and utilisation at every depth."""

    shape: str = option("qwen3-4b", "the target's sizes, as for dloop latency")
    tokens: int = option(4096, "of the one sequence; seven eighths of them are labels")
    num_anchors: int = option(512, "most anchors of it")
    hosts: list[str] = option(list(HOSTS), f"some of {', '.join(HOSTS)}")
    variants: list[str] = option(["dense+compile+graphs"], "such as dense, flex+compile, dense+compile+graphs")
    depths: tuple[int, ...] = option((1, 2, 3), "loop stages; EAGLE-3 unrolls so many stages of 7 steps")
    output: Path = option(Path("training-size.json"), "where the figures go")


def built(host: str, shape: Shape, target: HFTarget) -> HostModel:
    """A host of the published design, float32 master weights."""
    if host == "eagle3":
        return random_eagle3(shape, target).model.float().requires_grad_(True)
    with DEVICE:
        model = build(drafter_config(shape, family=cast(Family, host)))
    fill(model, seed=1)
    return model


def step_of(host: str, variant: str, command: Command, target: HFTarget) -> Step | GraphedStep:
    """A fresh host's step with a variant's accelerations."""
    attention, *extras = variant.split("+")
    settings = ObjectiveSettings(
        num_anchors=command.num_anchors, attention=cast(Attention, attention), recompute="recompute" in extras
    )
    objective = objective_of(built(host, shape_of(command.shape), target), target.vocabulary, settings)
    if "compile" in extras:
        objective.compile_parts()
    taps, last = objective.model.config.target_layer_ids, objective.reads_teacher
    features = partial(features_of, target, taps, last=last, compiled="compile" in extras)
    step = Step(objective, features, Optimizer(objective.model.parameters(), 1.0))
    return GraphedStep(step) if "graphs" in extras else step


def measure(command: Command) -> Iterator[dict[str, object]]:
    """The matrix rate, then every host and variant at every depth; what fails is a row with its reason."""
    shape, dtype = shape_of(command.shape), torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    target = random_target(shape, DEVICE, dtype)
    flat = np.random.default_rng(0).integers(0, shape.vocab_size - 1, command.tokens)
    prompt = command.tokens // 8
    data = TokenFile(flat, np.array([[prompt, command.tokens - prompt]]), np.zeros(1, np.int64), command.tokens)
    parts, bytes_of = (
        [data.collate(np.arange(1)).to(DEVICE)],
        sum(p.numel() * p.element_size() for p in target.model.parameters()),
    )
    rate = matrix_rate(dtype, DEVICE)
    yield {"what": "matrix rate", "flops_per_s": rate}
    for host in command.hosts:
        for variant in command.variants:
            row: dict[str, object] = {"host": host, "variant": variant}
            if DEVICE.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            try:
                step = step_of(host, variant, command, target)
                row["parameters"] = sum(p.numel() for p in step.objective.model.parameters())
                depths = command.depths if host != "eagle3" else tuple(7 * depth for depth in command.depths)
                for cost in costs(step, parts, depths, rate, bytes_of):
                    yield {**row, **asdict(cost)}
                if DEVICE.type == "cuda":
                    yield {**row, "reserved_bytes": torch.cuda.max_memory_reserved()}
            except (RuntimeError, torch.OutOfMemoryError) as error:
                yield {**row, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
            step = None


def main(words: list[str]) -> int:
    command = parse(Command, "benchmark_training_size.py", words)
    for variant in command.variants:
        first, *rest = variant.split("+")
        if first not in ("dense", "flex") or not EXTRAS.issuperset(rest):
            raise SystemExit(
                f"--variants {variant} is not known; dense or flex, then some of {', '.join(sorted(EXTRAS))}"
            )
    if unknown := [host for host in command.hosts if host not in HOSTS]:
        raise SystemExit(f"--hosts {unknown[0]} is not known; choose some of {', '.join(HOSTS)}")
    if command.shape not in {**SHAPES, **ALIASES}:
        raise SystemExit(f"--shape {command.shape} is not known; choose one of {', '.join(SHAPES)}")
    facts = {"schema": 1, "setting": asdict(command), "hardware": hardware(DEVICE), "versions": versions()}
    rows: list[dict[str, object]] = []
    for row in measure(command):
        rows.append(row)
        write(command.output, json.dumps({**facts, "rows": rows}, indent=1, default=str) + "\n")
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
