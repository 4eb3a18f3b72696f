"""Heads for stop rules, trained on a frozen drafter: what it drafts from places of texts, and the fit.

The drafter drafts as it decodes, shown to a rule that notes every row: so a head learns from the very rows that its
rule will be shown. Rows count up to the first token that the text does not hold, as after a verification.
Source of the soft labels, weights and schedule: SpecDec++ (arXiv 2405.19715).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dloop.drafters.block import BlockDrafter
from dloop.drafters.host import HostDrafter
from dloop.rules.heads import Examples, Head, HeadConfig, HeadKind
from dloop.stop import AfterRule, Drawn, RuledRequest
from dloop.targets.hf import BatchFeatures, HFTarget
from dloop.train.batch import Sample
from dloop.train.optim import learning_rate
from dloop.types import Features, Sampling
from dloop.vocabulary import target_logits

WARMUP = 0.03  # share of the steps; a cosine follows
STATES = {"adaeagle": 1, "disco": 0}  # rows whose states a head reads; all by default


@dataclass
class Note(AfterRule):
    """A rule that ends nothing, and keeps what it was shown."""

    seen: list[Drawn] = field(default_factory=list[Drawn])

    def goes_on(self, drawn: Drawn) -> bool:
        self.seen.append(drawn)
        return True


def config_of(kind: HeadKind, drafter: HostDrafter) -> HeadConfig:
    """What a head of this drafter's stages is like. PACER's block is a block drafter's own."""
    is_block = isinstance(drafter, BlockDrafter)
    facts = {"block": drafter.stage_len} if is_block else {}
    return HeadConfig(
        kind=kind,
        family=drafter.family,
        hidden_size=drafter.config.hidden_size,
        longest=drafter.stage_len,
        reads_token=not is_block,
        **facts,
    )


def starts_of(sample: Sample, stage_len: int, stride: int) -> list[int]:
    """Every `stride`-th place of an anchor, as deep in the text as a stage reaches, before tokens the target wrote."""
    last = len(sample.tokens) - 1 - stage_len
    return [place for place in range(1, last + 1) if sample.labels[place + 1]][::stride]


@torch.no_grad()
def draft_from(
    target: HFTarget, drafter: HostDrafter, sample: Sample, starts: list[int], head: type[Head], seed: int
) -> Examples | None:
    """What the drafter drafts from these places of a text, and how far the text agrees; None without a place."""
    if not starts:
        return None
    tokens = [int(token) for token in sample.tokens]
    features = target.features(torch.tensor([tokens], device=target.device), drafter.taps)
    memory, known, stages = drafter.open(), 0, list[Examples]()
    sampling = Sampling(temperature=1.0, seed=seed) if head.draws else None
    for place in starts:
        memory.extend(0, known, tokens[known:place], rows_of(features, known, place))
        known, note = place, Note()
        (stage,) = memory.draft([RuledRequest(slot=0, anchor=tokens[place], index=0, sampling=sampling, rule=note)])
        truth = tokens[place + 1 : place + 1 + len(stage.tokens)]
        laws = target_logits(features.last[0, place : place + len(truth)], target.vocabulary).float().softmax(-1)
        drawn = torch.tensor(stage.tokens, device=laws.device)
        q = torch.tensor([each.logp for each in note.seen], device=laws.device).exp()
        stages.append(stage_of(note.seen[:], laws.gather(1, drawn[:, None])[:, 0] / q, agreed(stage.tokens, truth)))
    keep = STATES.get(head.kind)
    joined = Examples(*(torch.cat(part) for part in zip(*stages, strict=True)))
    return joined._replace(hidden=joined.hidden[:, :keep])


def rows_of(features: BatchFeatures, start: int, stop: int) -> Features:
    """The features of some positions of the one text."""
    return Features(taps=features.taps[0, start:stop], last=features.last[0, start:stop])


def agreed(drafted: list[int], truth: list[int]) -> int:
    """How many leading tokens are alike."""
    return next((i for i, pair in enumerate(zip(drafted, truth, strict=True)) if pair[0] != pair[1]), len(truth))


def stage_of(seen: list[Drawn], ratio: Float[Tensor, " k"], accepted: int) -> Examples:
    """One stage on the host."""
    rows = [each.row for each in seen]
    return Examples(
        hidden=torch.stack([row.hidden for row in rows])[None].cpu(),
        figures=torch.tensor([[[row.top_logp, row.margin, row.entropy] for row in rows]]),
        soft=ratio.clamp(max=1)[None].cpu(),
        accepted=torch.tensor([accepted]),
    )


class Pass(NamedTuple):
    """One pass over the examples: mean losses."""

    epoch: int  # passes done
    loss: float
    held_out: float | None  # of texts that are not trained on; None without any


@dataclass(frozen=True, kw_only=True)
class FitSettings:
    """How a head is fitted."""

    num_epochs: int = 3
    batch_size: int = 64  # stages
    learning_rate: float = 1e-3
    seed: int = 42


def fit(
    head: Head,
    optimizer: torch.optim.Optimizer,
    train: Examples,
    held_out: Examples | None,
    settings: FitSettings,
    done: int = 0,
) -> Iterator[Pass]:
    """Pass after pass from `done` on; the order of a pass depends on seed and pass alone, so that a run can resume."""
    device, count = next(head.parameters()).device, len(train.accepted)
    per_epoch = -(-count // settings.batch_size)
    for epoch in range(done, settings.num_epochs):
        order = torch.from_numpy(np.random.default_rng([settings.seed, epoch]).permutation(count))
        losses: list[Tensor] = []
        for step, chosen in enumerate(order.split(settings.batch_size), epoch * per_epoch):
            rate = learning_rate(step, settings.num_epochs * per_epoch, settings.learning_rate, WARMUP)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = head.loss(Examples(*(part[chosen].to(device) for part in train)))
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses).mean().item()  # sync
        if not np.isfinite(mean):
            raise RuntimeError(f"the loss is not finite in pass {epoch + 1}; lower the learning rate")
        yield Pass(epoch + 1, mean, None if held_out is None else loss_on(head, held_out, settings.batch_size))


@torch.no_grad()
def loss_on(head: Head, examples: Examples, batch_size: int) -> float:
    """Mean over batches."""
    device = next(head.parameters()).device
    parts = [Examples(*part) for part in zip(*(each.to(device).split(batch_size) for each in examples), strict=True)]
    return float(np.mean([head.loss(part).item() for part in parts]))
