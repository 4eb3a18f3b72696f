"""Acceptance by exact replay: what every gate would have accepted on a text the target wrote greedily.

A stage's hidden states depend on its anchor, not on the tokens drafted after it. So for every position of a fixed
greedy text one packed forward gives the proposals of stage 1, and, where stage 1 matches the text whole, those of
stage 2, and so on: exactly what decoding would have drafted.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dloop.drafters.block import BlockModel
from dloop.gates.walk import Walk, along
from dloop.targets.hf import HFTarget
from dloop.train.anchors import Anchors
from dloop.train.packed import PackedStages
from dloop.types import Vocabulary


class Trace(NamedTuple):
    """Every start position of one greedy text: stage s+1 (column s) is meaningful while all before it match whole."""

    accepted: Int[Tensor, "n S"]  # leading tokens of the stage that equal the text
    score: Float[Tensor, "n S"]  # summed top-1 log-probability
    stage_len: int


@torch.no_grad()
def trace(
    model: BlockModel, vocabulary: Vocabulary, target: HFTarget, prompt: list[int], answer: list[int], num_stages: int
) -> Trace:
    """Draft from every position of the answer; all stages of all positions in a few packed forwards."""
    tokens = torch.tensor([prompt + answer], device=target.device)
    features = target.features(tokens, model.config.target_layer_ids)
    anchors = every_anchor(tokens, len(prompt))
    return follow(PackedStages.begin(model, vocabulary, tokens, features.taps, anchors), num_stages)


def every_anchor(tokens: Int[Tensor, "1 T"], first: int) -> Anchors:
    """All positions from `first` on that have a token after them."""
    positions = torch.arange(first, tokens.shape[1] - 1, device=tokens.device)[None]
    return Anchors(positions, torch.ones_like(positions, dtype=torch.bool))


@torch.no_grad()
def follow(stages: PackedStages, num_stages: int) -> Trace:
    """Run the stages of one text's anchors, and compare what they propose with the text."""
    tokens, model = stages.tokens, stages.model
    accepted: list[Tensor] = []
    score: list[Tensor] = []
    k, width = model.config.stage_len, tokens.shape[1]
    for index in range(num_stages):
        hidden = stages.forward()[0]
        starts = stages.starts(index)[0]
        proposal = model.propose(hidden, tokens[0, starts.clamp(max=width - 1)], stages.vocabulary)
        where = starts[:, None] + torch.arange(1, k + 1, device=tokens.device)
        truth = tokens[0, where.clamp(max=width - 1)]
        right = (proposal.tokens == truth) & (where < width)
        accepted.append(right.long().cumprod(-1).sum(-1))
        score.append(proposal.top_logp.sum(-1))
    return Trace(torch.stack(accepted, 1).cpu(), torch.stack(score, 1).float().cpu(), k)


def walk(trace: Trace, gate: float | None) -> Walk:
    """Decode along the text under a fixed gate on the last stage; None is the oracle, which goes on exactly while
    everything drafted is right. The text ends like `max_new_tokens` does.

    Stages beyond a miss, which are drafted in vain, are not known here and not counted: they change no round.
    """
    going = trace.accepted[:, :-1] == trace.stage_len
    if gate is not None:
        going &= trace.score[:, :-1].double() >= gate
    depths = 1 + going.long().cumprod(1).sum(1)
    drafted = torch.arange(trace.accepted.shape[1]) < depths[:, None]
    return along((trace.accepted * drafted).sum(1).numpy(), depths.numpy(), trace.stage_len)
