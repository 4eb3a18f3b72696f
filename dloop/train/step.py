"""One optimiser step on the device, plainly or as captured graphs; what it reports."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.targets.hf import BatchFeatures
from dloop.train.anchors import Anchors
from dloop.train.batch import TrainBatch
from dloop.train.losses import Sums
from dloop.train.objective import Loss, Objective, TotalWeights
from dloop.train.optim import Optimizer
from dloop.train.parallel import add_gradients, total_of


def columns(objective: Objective) -> tuple[str, ...]:
    """What a step reports: the loss, the gradient's norm before clipping, the mean of every term of both sides."""
    return ("loss", "grad_norm", *(f"{side}_{term}" for side in ("host", "loop") for term in objective.terms))


class Step:
    """One training step on the device; returns `columns` without waiting for them.

    The parts of an accumulated step share their denominators: it is the step of one batch that holds them all.
    """

    def __init__(
        self, objective: Objective, features: Callable[[TrainBatch], BatchFeatures], optimizer: Optimizer
    ) -> None:
        self.objective = objective
        self.features = features
        self.optimizer = optimizer
        self.torn = False  # weights have moved on, but the step has not ended

    def __call__(self, parts: list[TrainBatch], depth: int) -> Float[Tensor, " c"]:
        self.optimizer.clear()
        settings = self.objective.settings
        reach = settings.position_offset_max
        placed = [batch.shifted(reach, settings.share) for batch in parts] if reach else parts
        drawn = [(batch, self.objective.draw(batch)) for batch in placed]
        totals = TotalWeights(*total_of(torch.stack(self.objective.total_weights(drawn, depth))).unbind())
        losses: list[Loss] = []
        for batch, anchors in drawn:
            loss = self.loss(batch, depth, anchors, totals)
            loss.total.backward()
            losses.append(loss)
        add_gradients(self.optimizer.parameters)
        self.torn = True
        norm = self.optimizer.step()
        values = summary(losses)
        self.torn = False
        return torch.cat([values[:1], norm.detach()[None], values[1:]])

    def loss(self, batch: TrainBatch, depth: int, anchors: Anchors, totals: TotalWeights) -> Loss:
        """The loss of one part; those of all parts add up."""
        features = self.features(batch)
        half = features.taps.dtype == torch.bfloat16
        with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=half):
            return self.objective(batch, features, depth, anchors, totals)


class GraphedStep:
    """The same step as CUDA graphs, one per (width, depth): a small drafter's step is bound by kernel launches.

    The first step of a shape runs plainly (a real step), the second is captured. Single-part steps only.
    """

    def __init__(self, step: Step) -> None:
        self.step = step
        self.objective, self.optimizer = step.objective, step.optimizer
        self.seen: set[tuple[int, int]] = set()
        self.graphs: dict[tuple[int, int], tuple[torch.cuda.CUDAGraph, TrainBatch, Tensor]] = {}

    @property
    def torn(self) -> bool:
        """Of the plain steps; a replay is whole or not begun."""
        return self.step.torn

    def __call__(self, parts: list[TrainBatch], depth: int) -> Float[Tensor, " c"]:
        (batch,) = parts
        key = (batch.tokens.shape[1], depth)
        if key not in self.seen:
            self.seen.add(key)
            return self.step(parts, depth)
        if key not in self.graphs:
            self.graphs[key] = self._capture(batch, depth)
        graph, buffers, values = self.graphs[key]
        for ours, theirs in zip(buffers.tensors(), batch.tensors(), strict=True):
            ours.copy_(theirs)
        graph.replay()
        return values.clone()

    def _capture(self, batch: TrainBatch, depth: int) -> tuple[torch.cuda.CUDAGraph, TrainBatch, Tensor]:
        buffers = TrainBatch(*(tensor.clone() for tensor in batch.tensors()))
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # a graph has memory of its own: what plain steps held would stay beside it
        first = next(iter(self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=first[0].pool() if first else None):  # graphs never run at the same time
            values = self.step([buffers], depth)
        return graph, buffers, values


def summary(losses: list[Loss]) -> Float[Tensor, " c"]:
    """[loss, host terms, loop terms] of a step, each term as a mean over the rows of all parts and processes; zeros for
    a loop stage that was not trained.
    """
    host = added([loss.host for loss in losses])
    loops = [loss.loop for loss in losses if loss.loop is not None]
    loop = added(loops) if loops else torch.zeros_like(host)
    loss = torch.stack([loss.total.detach() for loss in losses]).sum()[None]
    loss, host, loop = total_of(torch.cat([loss, host, loop])).split([1, len(host), len(loop)])
    return torch.cat([loss, *(sums[:-1] / sums[-1].clamp(min=1e-6) for sums in (host, loop))])


def added(parts: list[Sums]) -> Float[Tensor, " s"]:
    """The sums of all parts: every term, then their weight."""
    return torch.stack([torch.cat([sums.terms, sums.weight[None]]) for sums in parts]).sum(0).detach()
