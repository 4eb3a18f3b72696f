"""What a certificate is made of: faults, and what each part found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from dloop.certificate.margins import Difference
from dloop.drafters.host import HostDrafter
from dloop.loop import Judge
from dloop.settings import Settings, judge_of
from dloop.targets.hf import HFTarget
from dloop.types import Sampling

Part = Literal["greedy", "sampled", "law", "memory"]
Kind = Literal["reference", "judge", "verification", "control", "ending", "law", "target_memory", "drafter_memory"]
DTypeName = Literal["float32", "bfloat16"]
SURE = 1.645  # standard deviations: 95 % on one side

POINTS_AT: dict[Kind, str] = {
    "reference": "plain decoding's logits are not those of one forward over the whole text: the target's positions, "
    "mask or memory, with or without a drafter",
    "control": "the target alone, given its own text several rows at a time, gives other logits than row by row: "
    "positions, mask or kernels of a verification; the drafter is not to blame",
    "verification": "verified rows are not plain decoding's, though the target alone passes: rows left in its memory "
    "after a rejection, or a wrong parent or position of a draft",
    "judge": "the token is not the best of the row it was chosen from: the rule of acceptance, the bonus, or the "
    "noise of sampling",
    "ending": "the same tokens, but the text ends elsewhere: stop tokens or the length limit",
    "law": "sampled tokens do not follow the target's law: the rule of rejection, its residual, or the law q that "
    "drafts are said to be drawn from",
    "target_memory": "after a rejection the target answers otherwise than a fresh one fed the committed tokens: rows "
    "that are kept, dropped or misplaced",
    "drafter_memory": "after a rejection the drafter drafts otherwise than a fresh one fed the committed tokens: "
    "stale rows; the text stays right, acceptance suffers",
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What is certified, in one arithmetic. `judge_of` gives the rule of acceptance."""

    target: HFTarget
    drafter: HostDrafter
    dtype: DTypeName
    judge_of: Callable[[Settings, Sampling, HostDrafter | None], Judge] = judge_of


@dataclass(frozen=True, kw_only=True)
class Plan:
    """On what a pair is tried."""

    prompts: dict[str, list[int]]  # by a short name
    gates: tuple[float, ...]
    max_new_tokens: int
    max_stages: int
    temperature: float  # of the sampling parts
    seed: int


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that rounding does not explain."""

    part: Part
    kind: Kind
    dtype: str
    prompt: str | None = None  # None: all of them together
    gate: float | None = None  # None: no drafter took part
    index: int | None = None  # of the token in the answer
    plain: int | None = None  # plain decoding's token there, and the other one
    other: int | None = None
    gap: float | None = None  # see Difference
    measured: float  # what went too far (a gap, a deviation, a p-value), and how far it may go
    limit: float

    @property
    def points_at(self) -> str:
        return POINTS_AT[self.kind]

    @property
    def harms_text(self) -> bool:
        """Whether losslessness is at stake: a drafter is repaired by the target, whatever it drafts."""
        return self.kind != "drafter_memory"


@dataclass(frozen=True, kw_only=True)
class GateFinding:
    """One text decoded with the drafter, against plain decoding's."""

    gate: float
    tokens: int
    acceptance_length: float
    difference: Difference | None  # within rounding, unless it is among the faults
    near_tie: float | None  # the largest gap that is rounding, at the difference
    alone: bool | None  # whether the target alone, in the same blocks, prefers the other token too
    deviation: float  # largest, of the verified rows before the texts part


@dataclass(frozen=True, kw_only=True)
class ControlFinding:
    """Plain decoding's text, verified by the target alone, several rows at a time."""

    rows: int
    tokens: int
    flips: int  # tokens that would have been others
    largest_gap: float  # of those, in plain decoding's logits
    deviation: float


@dataclass(frozen=True, kw_only=True)
class TextFinding:
    """One prompt, decoded plainly and with every gate, greedily or sampled with one seed."""

    part: Part
    prompt: str
    text: list[int]  # plain decoding's
    noise: float  # largest deviation of plain decoding from one forward over the whole text
    limit: float  # of deviations
    gates: list[GateFinding]
    controls: list[ControlFinding]
    faults: list[Fault]


@dataclass(frozen=True, kw_only=True)
class LawFinding:
    """Texts sampled by rejection: every token against the target's law at its place. See `dloop.certificate.law`."""

    part: Part = "law"
    texts: int
    tokens: int
    drafted: int  # of these, where a draft was judged
    lean: float  # how far drafted places lean to what the drafter favours, in standard deviations
    lean_limit: float
    planted_lean: float  # what a rule would show that after a rejection draws from p, not from p's excess over q
    counts: list[int]  # all tokens, by eighths of the law
    statistic: float  # chi-square of the counts
    p_value: float
    false_alarm: float  # the chance, of either test, of a fault where there is none
    forbidden: int  # tokens that the law excludes
    faults: list[Fault]

    @property
    def is_sharp(self) -> bool:
        """Whether the planted wrong rule would be caught here, with a chance of 95 %."""
        return self.planted_lean >= self.lean_limit + SURE


@dataclass(frozen=True, kw_only=True)
class MemoryFinding:
    """After rounds with a rejection: both memories against fresh ones fed the committed tokens."""

    part: Part = "memory"
    prompt: str
    probes: int
    target_deviation: float  # largest, of logits
    target_limit: float
    drafter_deviation: float  # largest difference of a log-probability that it drafts with
    drafter_limit: float
    faults: list[Fault]


Finding: TypeAlias = TextFinding | LawFinding | MemoryFinding
