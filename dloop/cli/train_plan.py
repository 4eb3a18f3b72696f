"""`dloop train --dry-run`: what a run would do, and with --profile what its steps cost."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from dloop.bench.training import Cost, costs, matrix_rate
from dloop.cli.train import Command
from dloop.drafters.config import BlockConfig
from dloop.records import hardware
from dloop.targets.hf import HFTarget
from dloop.train.batch import TokenFile
from dloop.train.trainer import GraphedStep, Step, TrainSettings, parts_of_steps, seed_step, together

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run before its first step."""

    samples: int
    tokens: int  # of all samples, as they are cut
    labels: int
    steps: int
    epochs: float
    samples_a_step: int
    anchors_a_sample: int  # at most; 0: an unroll
    depths: tuple[int, ...]
    parameters: int
    target_bytes: int


def plan_of(data: TokenFile, target: HFTarget, step: Step | GraphedStep, settings: TrainSettings) -> Plan:
    """Counts of data, steps and weights."""
    model = step.objective.model
    samples = [data.sample(index).labels for index in range(len(data))]
    at_once = together(settings) * settings.accumulation_steps
    return Plan(
        samples=len(data),
        tokens=sum(map(len, samples)),
        labels=int(sum(labels.sum() for labels in samples)),
        steps=settings.num_steps,
        epochs=settings.num_steps * at_once / len(data),
        samples_a_step=at_once,
        anchors_a_sample=step.objective.settings.num_anchors if isinstance(model.config, BlockConfig) else 0,
        depths=settings.depths,
        parameters=sum(p.numel() for p in model.parameters()),
        target_bytes=sum(p.numel() * p.element_size() for p in target.model.parameters()),
    )


def show_plan(
    command: Command, data: TokenFile, target: HFTarget, step: Step | GraphedStep, settings: TrainSettings
) -> None:
    """The plan, and the costs if asked for, on standard output."""
    plan = plan_of(data, target, step, settings)
    document: dict[str, object] = {"schema": 1, "plan": asdict(plan), "hardware": hardware(target.device)}
    lines = list(told(plan))
    if command.profile:
        rate = command.peak_tflops * 1e12 if command.peak_tflops else matrix_rate(target.dtype, target.device)
        seed_step(settings.seed, 0)
        stream = parts_of_steps(data, settings, 0)
        parts = [next(stream).to(target.device) for _ in range(settings.accumulation_steps)]
        found = list(costs(step, parts, sorted(set(plan.depths)), rate, plan.target_bytes))
        origin = "stated" if command.peak_tflops else "measured on a matrix product"
        document |= {"peak_flops_per_s": rate, "peak": origin, "profile": [asdict(cost) for cost in found]}
        lines += [f"peak {rate / 1e12:.2f} TFLOP/s, {origin}", *map(spelled_cost, found)]
    print(json.dumps(document) if command.json else "\n".join(lines))


def told(plan: Plan) -> Iterator[str]:
    """The plan as lines."""
    yield f"data {plan.samples} samples, {plan.tokens} tokens, {plan.labels} of them labels"
    anchors = f", up to {plan.anchors_a_sample} anchors each" if plan.anchors_a_sample else ""
    yield f"run {plan.steps} steps of {plan.samples_a_step} samples{anchors}: {plan.epochs:.2f} passes"
    state = 16 * plan.parameters  # weights, gradient and two moments in float32
    yield (
        f"weights: drafter {plan.parameters / 1e6:.1f} M, with gradient and optimiser {state / GIB:.2f} GiB; "
        f"target {plan.target_bytes / GIB:.2f} GiB"
    )


def spelled_cost(cost: Cost) -> str:
    """One depth as a line."""
    peak = "" if cost.peak_bytes is None else f", peak measured {cost.peak_bytes / GIB:.2f} GiB"
    anchors = f"{cost.anchors} anchors, " if cost.anchors else ""
    return (
        f"depth {cost.depth}: {anchors}{cost.rows} rows, {cost.flops / 1e12:.4f} TFLOP, {cost.ms:.1f} ms a step, "
        f"{cost.utilisation:.1%} of the peak; memory estimate {cost.estimate_bytes / GIB:.2f} GiB "
        f"({cost.kept_bytes / GIB:.2f} kept for the gradient){peak}"
    )
