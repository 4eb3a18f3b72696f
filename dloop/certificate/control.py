"""The target alone as the control: its own text, several rows at a time. What flips here is no drafter's fault."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.certificate.findings import ControlFinding, Fault, Pair, Plan
from dloop.certificate.ground import Ground, Place, Text
from dloop.certificate.margins import Difference, deviation, scores_of
from dloop.loop import Target
from dloop.types import Rows


class Block(NamedTuple):
    """One verification of a known text: so many rows from token `begin` on, of which the first ones are kept."""

    begin: int
    rows: int
    kept: int


def control_sizes(pair: Pair, plan: Plan) -> list[int]:
    """Rows of a verification: of the host's round, and of the longest with the loop."""
    stage_len = pair.drafter.stage_len
    return sorted({1 + stage_len, 1 + stage_len * plan.max_stages})


def check_control(pair: Pair, ground: Ground, rows: int, place: Place) -> tuple[ControlFinding, list[Fault]]:
    """Give plain decoding's text to the target alone, several rows at a time; all rows are kept."""
    plain = ground.plain
    last = len(plain.tokens) - 1  # nothing follows the text's last token
    blocks = [Block(begin, *[min(rows, last - begin)] * 2) for begin in range(0, last, rows)]
    found = verified_rows(pair.target.open(), ground.prompt, plain.tokens, blocks)
    apart, picks = deviation(found, plain.rows), found.argmax(-1)
    own = torch.tensor(plain.tokens, device=picks.device)
    gaps = plain.rows.gather(1, own[:, None]).float() - plain.rows.gather(1, picks[:, None]).float()
    flipped = (picks != own) & (found.amax(-1) > found.gather(1, own[:, None])[:, 0])  # equal logits are no flip
    finding = ControlFinding(
        rows=rows,
        tokens=len(plain.tokens),
        flips=int(flipped.sum()),
        largest_gap=float((gaps[:, 0] * flipped).max()),
        deviation=float(apart.max()),
    )
    faults: list[Fault] = []
    if not finding.deviation <= ground.limit:
        index = int(apart.argmax())
        fault = place.fault("control", finding.deviation, ground.limit)
        token, other = plain.tokens[index], int(picks[index])
        faults = [replace(fault, index=index, plain=token, other=other, gap=float(gaps[index]))]
    return finding, faults


def turns_over(pair: Pair, ground: Ground, text: Text, difference: Difference) -> bool:
    """Whether the target alone, in the very blocks in which this text was verified, prefers the other token too.

    Rows see nothing but what stands before them: if it does not, something of the drafts came into play.
    """
    blocks = [
        Block(round.context_len - len(ground.prompt), len(round.draft.tokens), round.accepted + 1)
        for round in text.generation.rounds
    ]
    needed = [block for block in blocks if block.begin < difference.index]
    rows = verified_rows(pair.target.open(), ground.prompt, ground.plain.tokens, needed)
    scores = scores_of(rows[difference.index], ground.sampling, len(ground.prompt) + difference.index)
    return bool(scores[difference.other] >= scores[difference.plain])


def verified_rows(
    memory: Target, prompt: list[int], tokens: Sequence[int], blocks: Sequence[Block]
) -> Float[Tensor, "T V"]:
    """The logits of these tokens (the first is prefill's), verified block by block."""
    seen = [memory.prefill(0, prompt).logits.clone()]
    for begin, size, kept in blocks:
        block = padded(tokens[begin : begin + size], size)
        rows = Rows(
            token=block,
            slot=[0] * size,
            position=list(range(len(prompt) + begin, len(prompt) + begin + size)),
            parent=list(range(-1, size - 1)),
        )
        seen.append(memory.verify(rows).logits[:kept].clone())  # a target may answer into the same memory again
        memory.commit(0, list(range(kept)))
    return torch.cat(seen)[: len(tokens)]


def padded(tokens: Sequence[int], size: int) -> list[int]:
    """A block beyond the text's end repeats the last token: such rows come after all that are read."""
    return [*tokens, *itertools.repeat(tokens[-1], size - len(tokens))]
