"""Acceptance of a drafter's first stage on fixed greedy texts, as configured or with one thing changed.

Setups are compared by two measures: how many of the drafter's most likely tokens are accepted, and how many to expect
if tokens were drawn from its law: with the text's own tokens as previous ones, the product of the probabilities of the
tokens up to a row, summed over the rows. The first moves by whole tokens, where the most likely token changes; the
second varies less from position to position, so that fewer positions tell a small difference. Some faults move a
drafter's choices more than its probabilities, so both are asked.

The target reads each text once and all layers that any probe taps are kept; a setup then costs a drafter's forward.
Further stages, and with them the reading of the gap rows, play no part: the host must be right before the loop can be.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from dloop.diagnosis.compare import interval_of
from dloop.diagnosis.findings import Gain, Measured
from dloop.diagnosis.setup import Setup, Tap
from dloop.gates.walk import figures
from dloop.targets.hf import HFTarget
from dloop.train.packed import PackedStages
from dloop.train.replay import Trace, every_anchor, follow, walk
from dloop.vocabulary import numbered

CHUNK = 64  # positions whose logits are held at once


class Text(NamedTuple):
    """A prompt and what the target answered greedily."""

    prompt: list[int]
    answer: list[int]


class Marks(NamedTuple):
    """What a drafter's rows say about the tokens of a text, at n positions, the tokens before a row being known."""

    right: Bool[Tensor, "n k"]  # whether the most likely token is the text's
    logp: Float[Tensor, "n k"]  # log-probability of the text's token

    def accepted(self) -> Float[Tensor, " n"]:
        """Leading tokens that are right: what greedy drafting would have accepted."""
        return self.right.long().cumprod(1).sum(1).float()

    def expected(self) -> Float[Tensor, " n"]:
        """Leading tokens to expect right if drafts were drawn from the drafter's law."""
        return self.logp.cumsum(1).exp().sum(1)


@dataclass(frozen=True)
class Read:
    """One text, and the outputs of the layers that may be tapped."""

    tokens: Int[Tensor, "1 T"]
    first: int  # position of the answer's first token
    states: dict[Tap, Float[Tensor, "1 T D"]]


def read_texts(target: HFTarget, texts: Iterable[Text], taps: Iterable[Tap]) -> list[Read]:
    """Run the target once over each text."""
    wanted = list(dict.fromkeys(taps))
    layers = tuple(sorted({tap.layer for tap in wanted}))
    norm = target.backbone.get_submodule("norm")
    found: list[Read] = []
    for prompt, answer in texts:
        tokens = torch.tensor([prompt + answer], device=target.device)
        with torch.no_grad():
            slabs = target.features(tokens, layers, last=False).taps.split(target.hidden_size, -1)
            raw = dict(zip(layers, slabs, strict=True))
            states = {tap: norm(raw[tap.layer]) if tap.normed else raw[tap.layer] for tap in wanted}
        found.append(Read(tokens, len(prompt), states))
    return found


def stages_of(setup: Setup, read: Read) -> PackedStages:
    """The drafter at every position of one answer, before its first stage."""
    taps = torch.cat([read.states[tap] for tap in setup.taps], -1)
    shift = torch.tensor([max(0, -setup.row_offset)], device=taps.device)  # positions stay at 0 or above
    anchors = every_anchor(read.tokens, read.first)
    stages = PackedStages.begin(setup.model, setup.vocabulary, read.tokens, taps, anchors, shift)
    return replace(stages, offsets=stages.offsets + setup.row_offset)


@torch.no_grad()
def trace_of(setup: Setup, read: Read) -> Trace:
    """The first stage from every position of one answer."""
    return follow(stages_of(setup, read), 1)


@torch.no_grad()
def marks_of(setup: Setup, read: Read) -> Marks:
    """The same in two figures a row, at every position that a whole stage of text follows."""
    stages, tokens = stages_of(setup, read), read.tokens[0]
    k = setup.model.config.stage_len
    hidden, starts = stages.forward()[0], stages.starts(0)[0]
    ahead = torch.arange(k, device=tokens.device)
    parts: list[Marks] = []
    for start, rows in zip(starts[: whole_stages(len(starts), k)].split(CHUNK), hidden.split(CHUNK), strict=False):
        where = start[:, None] + ahead
        logits, _ = setup.model.teacher_forced(rows[: len(start)], tokens[where], setup.vocabulary)
        truth, known = numbered(tokens[where + 1], setup.vocabulary.kept)
        wide = logits.float()
        logp = wide.gather(-1, truth[..., None])[..., 0] - wide.logsumexp(-1)
        logp = logp.where(known, -torch.inf)  # what it cannot name it never drafts
        parts.append(Marks(((wide.argmax(-1) == truth) & known).cpu(), logp.cpu()))  # sync
    return Marks(torch.cat([part.right for part in parts]), torch.cat([part.logp for part in parts]))


def whole_stages(anchors: int, stage_len: int) -> int:
    """How many of the positions of a text that have a token after them have a whole stage."""
    return max(anchors - stage_len + 1, 0)


def accepted_of(trace: Trace) -> Float[Tensor, " n"]:
    """Accepted tokens at every position that a whole stage of text follows."""
    return trace.accepted[: whole_stages(len(trace.accepted), trace.stage_len), 0].float()


def gains_of(ours: list[Marks], theirs: list[Marks]) -> tuple[int, Gain, Gain]:
    """(positions, gain of greedy drafts, of drawn ones) over the rows and positions that both have in our texts."""
    rows = min(ours[0].logp.shape[1], theirs[0].logp.shape[1])
    pairs = [common(a, b, rows) for a, b in zip(ours, theirs, strict=False)]
    greedy = gain_of([(a.accepted(), b.accepted()) for a, b in pairs])
    return sum(len(a.logp) for a, _ in pairs), greedy, gain_of([(a.expected(), b.expected()) for a, b in pairs])


def gain_of(pairs: list[tuple[Float[Tensor, " n"], Float[Tensor, " n"]]]) -> Gain:
    """What the first of two counts of accepted tokens gains, text by text."""
    gain = interval_of([a - b for a, b in pairs])
    length = float(torch.cat([a for a, _ in pairs]).mean()) + 1
    return Gain(length=length, gain=gain.mean, low=gain.low, high=gain.high)


def common(a: Marks, b: Marks, rows: int) -> tuple[Marks, Marks]:
    """Both, cut to what both have."""
    count = min(len(a.logp), len(b.logp))
    first, second = (Marks(x.right[:count, :rows], x.logp[:count, :rows]) for x in (a, b))
    return first, second


def measured(traces: list[Trace], marks: list[Marks]) -> Measured:
    """The figures of one setup."""
    accepted = [accepted_of(trace) for trace in traces]
    every = interval_of(accepted)
    pooled = torch.cat(accepted)
    reached = [int((pooled >= row).sum()) for row in range(traces[0].stage_len + 1)]
    walks = [walk(trace, 1.0) for trace in traces]
    return Measured(
        texts=len(traces),
        positions=len(pooled),
        acceptance_length=figures(walks, None).acceptance_length,
        every_position=every.mean + 1,
        low=every.low + 1,
        high=every.high + 1,
        drawn=float(torch.cat([text.expected() for text in marks]).mean()) + 1,
        rows=[reached[row + 1] / reached[row] if reached[row] else None for row in range(traces[0].stage_len)],
    )
