"""Adaptive-length baselines without a trained part: what they compute, and their published numbers.

Sources: BiLD (arXiv 2302.07863, kssteven418/BigLittleDecoder), SVIP (2411.18462, Geralt-Targaryen/SVIP), AdaEDL
(2410.18351), LLMCad (2309.04255), DISCO (2405.04304; the unsupervised form of transformers' assisted generation),
DDD (2409.00142), threshold adaptation (Draft & Verify, dilab-zju/self-speculative-decoding). Where a method changes
the output, its verification is replaced by the exact one.
"""

import math
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Bool, Float64

from dloop.rules.parameter import parameter
from dloop.stop import AfterRule, BeforeRule, Drawn, Row
from dloop.types import Round

BILD_FALLBACK, BILD_LONGEST = 0.6, 10  # the public code's
SVIP_SCALE, SVIP_MOST, SVIP_LONGEST = 0.15, 0.3, 40  # the public code's; the paper's figure takes 0.18
ADAEDL_GAMMA = 0.2  # the paper's
ADAEDL_START = 0.4  # ours: the paper's was not to be had, and calls it sensitive
STEP, AIM, INERTIA, MEMORY = 0.01, 0.9, 0.9, 0.5  # Draft & Verify's update
LLMCAD_START, LLMCAD_EASE = 0.01, 0.5  # the paper's
DISCO_THRESHOLD, DISCO_LONGEST = 0.4, 20  # transformers' defaults
DISCO_PAIRS, DISCO_MISSED = 5, 3.0  # transformers': pairs before the first fit, what a missed acceptance counts
DDD_FLOOR, DDD_CHECKS, DDD_LONGEST = -0.3, (5, 7, 9), 11  # the paper's


@dataclass(kw_only=True)
class BiLD(BeforeRule):
    """Hand over to the target where the drafter's best token is not likely enough; that token is left out."""

    fallback: float = parameter(BILD_FALLBACK, 0, 1)
    longest: int | None = parameter(BILD_LONGEST)

    def admits(self, row: Row) -> bool:
        return math.exp(row.top_logp) >= self.fallback


@dataclass(kw_only=True)
class SVIP(AfterRule):
    """Stop behind a token whose law is too wide: sqrt(c H) > h. It may only be a bound on the rejection, 1 - beta."""

    c: float = parameter(SVIP_SCALE, 0)
    h: float = parameter(SVIP_MOST, 0)
    longest: int | None = parameter(SVIP_LONGEST)

    def goes_on(self, drawn: Drawn) -> bool:
        return math.sqrt(self.c * drawn.row.entropy) <= self.h


@dataclass(kw_only=True)
class AdaEDL(AfterRule):
    """Stop behind a token whose acceptance, at least 1 - sqrt(gamma H), may be below a threshold that adapts."""

    gamma: float = parameter(ADAEDL_GAMMA, 0)
    start: float = parameter(ADAEDL_START, 0, 1)
    longest: int | None = parameter(None)
    threshold: float = field(init=False)
    rate: float = field(init=False, default=0.0)  # of acceptance, smoothed

    def __post_init__(self) -> None:
        self.threshold = self.start

    def goes_on(self, drawn: Drawn) -> bool:
        return 1 - math.sqrt(self.gamma * drawn.row.entropy) >= self.threshold

    def observe(self, round: Round) -> None:
        """Stricter while less than `AIM` is accepted, else looser, unless the draft could not be longer."""
        if not round.draft.depth:
            return
        self.rate = MEMORY * self.rate + (1 - MEMORY) * round.accepted / round.draft.depth
        aim = self.threshold
        if self.rate < AIM:
            aim += STEP
        elif round.stage_records[-1].reason == "rule":
            aim -= STEP
        self.threshold = INERTIA * self.threshold + (1 - INERTIA) * aim


@dataclass(kw_only=True)
class LLMCad(AfterRule):
    """Stop where no path of the draft is likely any more; the threshold halves after rounds that were all right."""

    start: float = parameter(LLMCAD_START, 0, 1)
    longest: int | None = parameter(None)
    threshold_logp: float = field(init=False)
    before: float = field(init=False, default=0.0)  # of the round's earlier stages
    path: float = field(init=False, default=0.0)  # of the stage

    def __post_init__(self) -> None:
        self.threshold_logp = math.log(self.start) if self.start else -math.inf

    def begin(self) -> None:
        self.before = self.path = 0.0

    def goes_on(self, drawn: Drawn) -> bool:
        if not drawn.row.index:
            self.before += self.path
        self.path = drawn.path_logp
        return self.before + self.path >= self.threshold_logp

    def observe(self, round: Round) -> None:
        """Reconstructed from the paper's prose: alpha / T_c^(rejected share), else alpha / 2."""
        if not round.draft.depth or math.isnan(self.path):  # a broken row teaches nothing
            return
        rejected = 1 - round.accepted / round.draft.depth
        change = -rejected * (self.before + self.path) if rejected > 0 else math.log(LLMCAD_EASE)
        self.threshold_logp = min(self.threshold_logp + change, 0.0)  # a threshold above 1 would say no more


@dataclass(kw_only=True)
class DISCO(AfterRule):
    """Stop behind a drawn token that was unlikely; the threshold is the best one on everything seen so far."""

    threshold: float = parameter(DISCO_THRESHOLD, 0, 1)
    longest: int | None = parameter(DISCO_LONGEST)
    shown: list[float] = field(init=False, default_factory=list[float])  # this round's probabilities
    probs: list[float] = field(init=False, default_factory=list[float])
    matched: list[bool] = field(init=False, default_factory=list[bool])

    def begin(self) -> None:
        self.shown = []

    def goes_on(self, drawn: Drawn) -> bool:
        self.shown.append(math.exp(drawn.logp))
        return self.shown[-1] >= self.threshold

    def observe(self, round: Round) -> None:
        """Tokens count up to the first that was rejected."""
        known = self.shown[: round.accepted + 1]
        if any(map(math.isnan, known)):  # a broken row teaches nothing
            return
        self.probs += known
        self.matched += [index < round.accepted for index in range(len(known))]
        if len(self.probs) > DISCO_PAIRS and len(set(self.matched)) == 2:
            self.threshold = best_threshold(np.array(self.probs), np.array(self.matched))


def best_threshold(probs: Float64[np.ndarray, " n"], matched: Bool[np.ndarray, " n"]) -> float:
    """Of least false alarms + 3 misses, as rates, on these pairs of both classes; the highest of equals."""
    order = np.argsort(-probs, kind="stable")
    last = np.append(np.diff(probs[order]) != 0, True)  # a threshold stands behind the last of equal values
    right = matched[order].cumsum()[last]
    wrong = (~matched[order]).cumsum()[last]
    cost = np.append(DISCO_MISSED, wrong / (~matched).sum() + DISCO_MISSED * (1 - right / matched.sum()))
    return float(np.append(np.inf, probs[order][last])[cost.argmin()])


@dataclass(kw_only=True)
class DDD(AfterRule):
    """At a few depths, stop where all paths of the beam together are not likely enough."""

    floor: float = parameter(DDD_FLOOR)
    checks: tuple[int, ...] = parameter(DDD_CHECKS, 1)  # drafting steps after which it looks
    longest: int | None = parameter(DDD_LONGEST)

    def goes_on(self, drawn: Drawn) -> bool:
        return drawn.row.index + 1 not in self.checks or drawn.mass_logp >= self.floor
