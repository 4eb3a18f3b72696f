"""The loops of a response by their number of drafting stages: how many, what they brought, what they took."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dloop.bench.measure import Response
from dloop.records import RoundJson


class Loops(NamedTuple):
    """Some loops, that is rounds: their sums."""

    rounds: int
    tokens: int  # that reached the text
    draft_s: float
    verify_s: float  # the judge and both models' bookkeeping included

    @property
    def seconds(self) -> float:
        """Drafting and verification."""
        return self.draft_s + self.verify_s


@dataclass(frozen=True)
class Looped:
    """What is kept of a response's rounds."""

    by_stages: Mapping[int, Loops]
    peak_memory_bytes: int  # GPU: allocated while it was decoded; CPU: of the process, since its start


def looped(responses: Iterable[Response]) -> list[Looped]:
    """Of every response that has rounds and did not fail: those that `measure.figures` counts."""
    return [
        Looped(counted(response.rounds), response.header["peak_memory_bytes"])
        for response in responses
        if response.rounds and response.header["error"] is None
    ]


def counted(rounds: Sequence[RoundJson]) -> dict[int, Loops]:
    """Loops by number of stages, the fewest first."""
    found: dict[int, list[Loops]] = {}
    for record in sorted(rounds, key=lambda record: len(record["stages"])):
        one = Loops(1, len(record["emitted"]), record["draft_s"], record["verify_s"])
        found.setdefault(len(record["stages"]), []).append(one)
    return {stages: total(alike) for stages, alike in found.items()}


def total(parts: Iterable[Loops]) -> Loops:
    """Their sum."""
    columns = list(zip(*parts, strict=True)) or [(), (), (), ()]
    return Loops(*map(sum, columns))
