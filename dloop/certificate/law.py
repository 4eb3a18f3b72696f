"""Does text sampled by rejection follow the target's law? Two tests on real texts of the pair.

Given what stands before it, every token is a draw from the target's law p, whatever was accepted until then; p is
computed by one forward over the finished text. So the tokens of all texts share one test, in any context:

- lean: where a draft from the law q was judged, the token's min(1, q / p), less its mean under p, adds up to nothing
  but noise of known variance. Wrong acceptance, a wrong residual or a misstated q all lean to one side. A rule that
  draws from p after a rejection shifts each place by just that variance, so that what it would show is known exactly.
- places: lay the vocabulary along [0, 1], each token as wide as p makes it; where the drawn one lies (anywhere within
  its width) is uniform (Rosenblatt 1952, randomised for discrete laws). Chi-square over eighths; bonus tokens too.

Texts are drawn until the first test is sharp: that depends on the laws alone, so that stopping there is no choice
among outcomes.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.certificate.findings import SURE, Fault, LawFinding, Pair, Plan
from dloop.certificate.ground import Text, decode_text, full_rows
from dloop.sampling import law
from dloop.settings import Settings, sampling_of

BINS = 8
FALSE_ALARM = 1e-4  # of each test
LEAN_LIMIT = 3.891  # standard deviations, both sides, for that rate
ENOUGH = (LEAN_LIMIT + SURE) ** 2  # the variance at which the planted rule is seen with a chance of 95 %
MOST_TEXTS = 6  # of each prompt and gate


class Spot(NamedTuple):
    """One token, where it was drawn."""

    token: int
    p: Float[Tensor, " V"]  # the target's law
    q: Float[Tensor, " V"] | None  # what the draft was drawn from; None: no draft was judged


@dataclass
class Tally:
    """What the tokens of many texts add up to."""

    generator: torch.Generator
    counts: list[int] = field(default_factory=lambda: [0] * BINS)
    texts: int = 0
    drafted: int = 0
    forbidden: int = 0
    lean: float = 0.0
    variance: float = 0.0

    def add(self, spot: Spot) -> None:
        """Count one token."""
        p = spot.p.double()
        ratio = None if spot.q is None else torch.where(p > 0, spot.q.double() / p, 0.0)
        self.forbidden += not bool(p[spot.token] > 0)
        within = float(torch.rand((), generator=self.generator, dtype=torch.float64))
        place = place_of(p, -p if ratio is None else ratio, spot.token, within)
        self.counts[min(int(place * BINS), BINS - 1)] += 1
        if ratio is not None:
            favour = ratio.clamp(max=1)
            mean = (p * favour).sum()
            self.drafted += 1
            self.lean += float(favour[spot.token] - mean)
            self.variance += float((p * (favour - mean) ** 2).sum())

    @property
    def statistic(self) -> float:
        """Chi-square against equal counts."""
        each = sum(self.counts) / BINS
        return sum((count - each) ** 2 for count in self.counts) / each

    @property
    def p_value(self) -> float:
        """The chance of a statistic this large where all is right."""
        freedom, statistic = torch.tensor([BINS - 1, self.statistic], dtype=torch.float64)
        return float(torch.special.gammaincc(freedom / 2, statistic / 2))

    @property
    def deviations(self) -> float:
        """The lean in standard deviations; 0 where no place can lean."""
        return self.lean / math.sqrt(self.variance) if self.variance else 0.0


def check_law(pair: Pair, plan: Plan) -> LawFinding:
    """Sample prompt after prompt, gate after gate by rejection, each text with a seed of its own, and test them all."""
    tally = Tally(torch.Generator().manual_seed(plan.seed))
    cases = list(itertools.product(plan.prompts.values(), plan.gates))
    for index in range(MOST_TEXTS * len(cases)):
        if index >= len(cases) and tally.variance >= ENOUGH:
            break
        for spot in spots(pair, plan, *cases[index % len(cases)], plan.seed + index):
            tally.add(spot)
        tally.texts += 1
    return LawFinding(
        texts=tally.texts,
        tokens=sum(tally.counts),
        drafted=tally.drafted,
        lean=tally.deviations,
        lean_limit=LEAN_LIMIT,
        planted_lean=math.sqrt(tally.variance),
        counts=tally.counts,
        statistic=tally.statistic,
        p_value=tally.p_value,
        false_alarm=FALSE_ALARM,
        forbidden=tally.forbidden,
        faults=faults_of(tally, pair.dtype),
    )


def faults_of(tally: Tally, dtype: str) -> list[Fault]:
    """The first of the tests that fails."""
    fault = Fault(part="law", kind="law", dtype=dtype, measured=abs(tally.deviations), limit=LEAN_LIMIT)
    if tally.forbidden:
        return [replace(fault, measured=float(tally.forbidden), limit=0.0)]
    if not abs(tally.deviations) <= LEAN_LIMIT:
        return [fault]
    return [] if tally.p_value >= FALSE_ALARM else [replace(fault, measured=tally.p_value, limit=FALSE_ALARM)]


def spots(pair: Pair, plan: Plan, prompt: list[int], gate: float, seed: int) -> Iterator[Spot]:
    """All tokens of one sampled text."""
    settings = Settings(
        max_new_tokens=plan.max_new_tokens,
        max_stages=plan.max_stages,
        loop_gate=gate,
        temperature=plan.temperature,
        seed=seed,
        verify="reject",
        tree_budget=0,  # the control and the law are told of chains alone
    )
    text = decode_text(pair, pair.drafter, prompt, settings)
    p = law(full_rows(pair.target, prompt, text.tokens), sampling_of(settings))
    yield from map(Spot, text.tokens, p, drafted_laws(text))


def drafted_laws(text: Text) -> list[Float[Tensor, " V"] | None]:
    """For each token the law that the draft in its place was drawn from; None: the first token, and bonus tokens."""
    laws: list[Tensor | None] = [None]
    for round, rows in zip(text.generation.rounds, text.laws, strict=True):
        laws += [rows[index] if index < len(rows) else None for index in range(len(round.emitted))]
    return laws


def place_of(p: Float[Tensor, " V"], order: Float[Tensor, " V"], token: int, within: float) -> float:
    """Where in [0, 1] a token lies among tokens laid out in this order; `within` chooses a point of its width."""
    before, same = p[order < order[token]].sum(), p[order == order[token]].sum()
    return float((before + within * same) / p.sum())
