"""Baselines that read a trained part: DSpark's confidence head, or a head of their own (`dloop.rules.heads`).

Sources: DSpark (arXiv 2607.05147, deepseek-ai/DeepSpec), SpecDec++ (2405.19715), DISCO (2405.04304), AdaEAGLE
(2412.18910), PACER (2602.01274).
"""

import math
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dloop.rules.heads import AcceptanceHead, BlockHead, FigureHead, LengthHead, figures_of
from dloop.rules.parameter import REQUIRED, parameter
from dloop.rules.sts import read_temperatures
from dloop.stop import AfterRule, BeforeRule, Drawn, Row

SPECDECPP_REJECTED, SPECDECPP_LEAST, SPECDECPP_LONGEST = 0.3, 2, 20  # the public code's; its sample script takes 0.7
DISCO_LONGEST = 20  # as in its unsupervised form
THRESHOLD = 0.5  # ours, where nothing published was to be had: more likely than not


@dataclass(kw_only=True)
class ConfidenceCut(BeforeRule):
    """DSpark: verify up to the first row whose confidence is below the threshold. Published: 0 (off), swept to 0.8."""

    threshold: float = parameter(REQUIRED, 0, 1)
    sts: Path | None = parameter(None)  # temperatures of `dloop trace sts`, one a row of the block
    temperatures: list[float] = field(init=False, default_factory=list[float])

    def __post_init__(self) -> None:
        if self.sts is not None:
            self.temperatures = read_temperatures(self.sts)

    def admits(self, row: Row) -> bool:
        assert row.confidence is not None
        scale = self.temperatures[row.index] if self.temperatures else 1.0
        return sigmoid(row.confidence / scale) >= self.threshold


@dataclass(kw_only=True)
class SpecDecPP(BeforeRule):
    """Stop where it is too likely that one of the tokens so far is rejected: 1 - prod p > h.

    Blocks of DSpark take its confidence for p. Of an autoregressive drafter a row's state has read the token before,
    so a token is judged by the next row: its own is left out, for what is known before it is drawn.
    """

    head: AcceptanceHead | None = None
    h: float = parameter(SPECDECPP_REJECTED, 0, 1)
    least: int = parameter(SPECDECPP_LEAST, 0)
    longest: int | None = parameter(SPECDECPP_LONGEST)
    survival: float = field(init=False, default=1.0)

    def begin(self) -> None:
        self.survival = 1.0

    def admits(self, row: Row) -> bool:
        if row.depth or self.head is None or not self.head.config.reads_token:
            self.survival *= self.chance(row)
        return row.depth < self.least or 1 - self.survival <= self.h

    def chance(self, row: Row) -> float:
        """Of acceptance."""
        if self.head is not None:
            return sigmoid(self.head(row.hidden).item())  # sync
        assert row.confidence is not None
        return sigmoid(row.confidence)


@dataclass(kw_only=True)
class DISCOHead(BeforeRule):
    """DISCO's classifier: stop where a row's token will likely be rejected."""

    head: FigureHead
    threshold: float = parameter(THRESHOLD, 0, 1)
    longest: int | None = parameter(DISCO_LONGEST)

    def admits(self, row: Row) -> bool:
        device = row.hidden.device
        logit = self.head(figures_of(row).to(device), torch.tensor(float(row.index), device=device))
        return sigmoid(logit.item()) >= self.threshold  # sync


@dataclass(kw_only=True)
class AdaEAGLE(BeforeRule):
    """Draft as many tokens as the head predicts when the anchor has been read."""

    head: LengthHead
    longest: int | None = parameter(None)  # by default as long as the head was trained for
    length: int = field(init=False, default=0)

    def admits(self, row: Row) -> bool:
        if not row.index:
            length = self.head(row.hidden).item()  # sync
            self.length = round(length) if math.isfinite(length) else 0  # a broken head is sure of no token
        return row.index < self.length


@dataclass(kw_only=True)
class PACER(AfterRule):
    """Behind every block of drafted tokens: go on while their predicted acceptance is high enough on average."""

    head: BlockHead
    threshold: float = parameter(THRESHOLD, 0, 1)
    longest: int | None = parameter(None)
    rows: list[torch.Tensor] = field(init=False, default_factory=list[torch.Tensor])

    def begin(self) -> None:
        self.rows = []

    def goes_on(self, drawn: Drawn) -> bool:
        self.rows.append(drawn.row.hidden)
        if len(self.rows) < self.head.config.block and drawn.row.index + 1 < drawn.row.stage_len:
            return True
        score = self.head(torch.stack(self.rows)[None]).sigmoid().mean().item()  # sync
        self.rows = []
        return score >= self.threshold


def sigmoid(logit: float) -> float:
    """Without overflow."""
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))
