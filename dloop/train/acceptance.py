"""How long drafts are accepted, measured while a drafter is trained: on greedy texts of the target, as deployed.

Block drafters by exact replay, autoregressive ones by real drafting and verification.
"""

import copy
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch

from dloop.api import generate
from dloop.drafters.block import BlockModel
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.families import loaded
from dloop.drafters.host import HostModel
from dloop.gates.walk import figures
from dloop.records import acceptance_length
from dloop.targets.hf import HFTarget
from dloop.train.replay import trace, walk
from dloop.types import Round
from dloop.vocabulary import narrowed

NEVER_OPENS = 1.0
STAGES = 4  # at most, in a round
Text = tuple[list[int], list[int]]  # a prompt, and what the target wrote greedily after it


class Acceptance(TypedDict):
    """Means over rounds of accepted + 1."""

    tau: float  # with the loop, under the gate
    tau_host: float  # one stage a round
    stages: list[float]  # accepted tokens of stage 1, 2 ... where all before were accepted whole; as far as any was
    texts: int


class Tally(NamedTuple):
    """Accepted tokens of a stage, and how often it was reached."""

    accepted: int
    reached: int


@torch.no_grad()
def measure(model: HostModel, target: HFTarget, texts: Sequence[Text], gate: float) -> Acceptance:
    """A copy in the target's type drafts, as a checkpoint would: the weights of a run are float32."""
    deployed = copy.deepcopy(model).to(target.dtype).eval()
    if isinstance(deployed, BlockModel):
        return replayed(deployed, target, texts, gate)
    return decoded(deployed, target, texts, gate)


def replayed(model: BlockModel, target: HFTarget, texts: Sequence[Text], gate: float) -> Acceptance:
    """From every start position of every text."""
    words = narrowed(target.vocabulary, model.kept)
    traces = [trace(model, words, target, prompt, answer, STAGES) for prompt, answer in texts]
    tallies: list[Tally] = []
    for stage in range(STAGES):
        whole = [(each.accepted[:, :stage] == each.stage_len).all(1) for each in traces]
        found = torch.cat([each.accepted[kept, stage] for each, kept in zip(traces, whole, strict=True)])
        tallies.append(Tally(int(found.sum()), len(found)))
    taus = [figures([walk(each, at) for each in traces], None).acceptance_length_pooled for at in (gate, NEVER_OPENS)]
    return summed(taus, tallies, len(texts))


def decoded(model: HostModel, target: HFTarget, texts: Sequence[Text], gate: float) -> Acceptance:
    """In the rounds of these texts alone."""
    drafter = loaded("in training", model, target.vocabulary)
    if isinstance(drafter, ChainDrafter):
        drafter = drafter.at_depth(model.config.stage_len)
    taus: list[float] = []
    rounds: list[Round] = []
    for at in (NEVER_OPENS, gate):
        rounds = [
            each
            for prompt, answer in texts
            for each in generate(
                target, drafter, prompt, max_new_tokens=len(answer), loop_gate=at, max_stages=STAGES, tree_budget=0
            ).rounds
        ]
        taus.append(acceptance_length(rounds))
    k = model.config.stage_len
    tallies: list[Tally] = []
    for stage in range(STAGES):
        reached = [each.accepted - stage * k for each in rounds if each.stages > stage and each.accepted >= stage * k]
        tallies.append(Tally(sum(min(k, count) for count in reached), len(reached)))
    return summed(taus[::-1], tallies, len(texts))


def summed(taus: Sequence[float], tallies: Sequence[Tally], texts: int) -> Acceptance:
    """The record."""
    means = [tally.accepted / tally.reached for tally in tallies if tally.reached]
    return {"tau": taus[0], "tau_host": taus[1], "stages": means, "texts": texts}
