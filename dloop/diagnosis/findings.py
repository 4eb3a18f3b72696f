"""What a diagnosis is made of: findings, what each probe measured, and how far drafts were accepted."""

from dataclasses import dataclass
from typing import Literal

from dloop.diagnosis.compare import MARGIN

Severity = Literal["fault", "warning", "note"]
Cause = Literal[
    "pair",  # another target
    "config",
    "weights",
    "taps",
    "tap_order",
    "norm",
    "rope_theta",
    "positions",
    "mask_token_id",
    "label_shift",
    "layer_order",
    "vocabulary",  # embedding and head
    "tokenizer",
    "template",
    "acceptance",
]
SEVERITIES: tuple[Severity, ...] = ("fault", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something wrong, or odd, with a pair."""

    severity: Severity
    cause: Cause
    what: str
    evidence: str
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A mean of accepted + 1 over start positions, and what it is above that of the pair as configured."""

    length: float
    gain: float
    low: float  # of the gain's interval
    high: float

    @property
    def is_clear(self) -> bool:
        """Whether the gain is no chance and worth a finding, see `dloop.diagnosis.compare`."""
        return self.low > 0 and self.gain >= MARGIN * (self.length - self.gain)


@dataclass(frozen=True, kw_only=True)
class Probed:
    """One thing changed, and what came of it, over the rows and positions that both setups have.

    What turns out worse on the first texts is not measured on the others.
    """

    cause: Cause
    change: str
    positions: int
    greedy: Gain  # the drafter's most likely tokens: the acceptance length
    drawn: Gain  # tokens drawn from the drafter's law: what to expect of them, see `dloop.diagnosis.measure`

    @property
    def is_better(self) -> bool:
        """Whether the change helps by either measure, and does no harm by the other."""
        return min(self.greedy.gain, self.drawn.gain) > 0 and (self.greedy.is_clear or self.drawn.is_clear)

    @property
    def gain(self) -> float:
        """Mean of both measures, to put probes in order."""
        return (self.greedy.gain + self.drawn.gain) / 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """How far the drafts of a pair are accepted on greedy texts of the target."""

    texts: int
    positions: int  # start positions with a whole stage of text after them
    acceptance_length: float  # mean over texts of the mean over rounds of accepted + 1, of the host's own decoding
    every_position: float  # mean over every start position of accepted + 1
    low: float  # of the latter's interval
    high: float
    drawn: float  # mean over every start position of accepted + 1 to expect of tokens drawn from the drafter's law
    rows: list[float | None]  # acceptance of each row where all rows before it were accepted; None: never reached


@dataclass(frozen=True, kw_only=True)
class Expected:
    """The acceptance length to expect, and who says so."""

    low: float  # below it something is wrong
    high: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """All that was found, the gravest first."""

    findings: list[Finding]
    measured: Measured | None
    not_measured: str | None  # why not
    probes: list[Probed]
    expected: Expected | None

    @property
    def is_healthy(self) -> bool:
        return not any(finding.severity == "fault" for finding in self.findings)


def ranked(findings: list[Finding]) -> list[Finding]:
    """The gravest first; in their order else."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))
