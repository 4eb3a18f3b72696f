"""Exact replay: a rule that needs no memory is an array, the stages to draft at every start; a walk adds them up."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float64, Int64

from dloop.gate import FixedGate, GateSum
from dloop.gates.costs import Costs
from dloop.gates.trace import Text

Depths = Int64[np.ndarray, " n"]


@dataclass(frozen=True)
class Walk:
    """One text's rounds, R of them, in order."""

    start: Int64[np.ndarray, " R"]  # index of the anchor in the answer
    stages: Int64[np.ndarray, " R"]
    accepted: Int64[np.ndarray, " R"]  # the judge's count, never cut
    emitted: Int64[np.ndarray, " R"]  # tokens that reached the text
    stage_len: int
    rows: Int64[np.ndarray, " R"] | None = None  # that were verified; None: the anchor and whole stages

    @property
    def tokens(self) -> int:
        return int(self.emitted.sum())

    @property
    def acceptance_length(self) -> float:
        """Mean of accepted + 1; nan without a round."""
        return float((self.accepted + 1).mean()) if len(self.accepted) else float("nan")

    @property
    def looped(self) -> int:
        """Emitted tokens that were drafted in a second or later stage."""
        return int((np.minimum(self.accepted, self.emitted) - self.stage_len).clip(min=0).sum())

    def ms(self, costs: Costs) -> float:
        """Milliseconds of all rounds."""
        rows = 1 + self.stages * self.stage_len if self.rows is None else self.rows
        return float((costs.draft_ms(self.stages) + costs.rest_ms(rows)).sum())


def gate_depths(text: Text, gate: FixedGate, max_stages: int) -> Depths:
    """Stages that a fixed gate drafts at every start."""
    opens = read(text, gate.over) >= gate.threshold  # nan, where nothing can follow, opens nothing
    return capped(text, 1 + opens.cumprod(1).sum(1), max_stages)


def read(text: Text, over: GateSum) -> Float64[np.ndarray, "n S"]:
    """What a fixed gate reads after each stage, by the very sums that it makes."""
    if over == "last":
        return text.score
    rows = text.score.tolist()
    return np.array([[sum(row[: s + 1]) for s in range(len(row))] for row in rows]).reshape(text.score.shape)


def capped(text: Text, depths: Depths, max_stages: int) -> Depths:
    """No deeper than the cap, and than a draft can go at that start."""
    return np.minimum(depths, np.minimum(text.stages, max_stages))


def accepted_at(text: Text, depths: Depths, stage_len: int) -> Int64[np.ndarray, " n"]:
    """The judge's count of rounds that draft so many stages."""
    return np.minimum(text.accepted, depths * stage_len)


def walk(text: Text, depths: Depths, stage_len: int) -> Walk:
    """A text decoded with so many stages at every start."""
    return along(accepted_at(text, depths, stage_len), depths, stage_len)


def along(accepted: Int64[np.ndarray, " n"], depths: Depths, stage_len: int) -> Walk:
    """Go from start to start as decoding does: a round's bonus is the next anchor."""
    length = len(accepted)
    ends = np.arange(length) + accepted + 1
    starts, nexts, here = list[int](), ends.tolist(), 0
    while here < len(nexts):
        starts.append(here)
        here = nexts[here]
    visited = np.array(starts, np.int64)
    return Walk(
        start=visited,
        stages=depths[visited],
        accepted=ends[visited] - visited - 1,
        emitted=np.minimum(ends[visited], length) - visited,
        stage_len=stage_len,
    )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Several texts under one rule."""

    acceptance_length: float  # mean over texts of the mean over rounds of accepted + 1
    acceptance_length_pooled: float  # mean over all rounds
    tokens: int  # after each text's first, which prefill gives
    rounds: int
    stages: int
    output_share_looped: float
    ms: float | None  # None: no costs are known

    @property
    def stages_per_round(self) -> float:
        return self.stages / self.rounds if self.rounds else float("nan")

    @property
    def tokens_per_s(self) -> float | None:
        return None if not self.ms else 1000 * self.tokens / self.ms


def figures(walks: Sequence[Walk], costs: Costs | None) -> Figures:
    """All texts together."""
    real = [each for each in walks if len(each.accepted)]
    tokens, rounds = sum(each.tokens for each in real), sum(len(each.accepted) for each in real)
    return Figures(
        acceptance_length=float(np.mean([each.acceptance_length for each in real])) if real else float("nan"),
        acceptance_length_pooled=sum(int((each.accepted + 1).sum()) for each in real) / rounds
        if rounds
        else float("nan"),
        tokens=tokens,
        rounds=rounds,
        stages=sum(int(each.stages.sum()) for each in real),
        output_share_looped=sum(each.looped for each in real) / tokens if tokens else float("nan"),
        ms=None if costs is None else sum(each.ms(costs) for each in real),
    )
