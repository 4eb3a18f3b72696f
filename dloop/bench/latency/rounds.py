"""What is to be replayed: how many stages each round had, how many of its tokens were accepted, after which context."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dloop.bench.measure import Response
from dloop.bench.store import read_samples
from dloop.errors import UserError
from dloop.records import RoundJson


@dataclass(frozen=True)
class Step:
    """One round: its stages, and the judge's count."""

    stages: int
    accepted: int


@dataclass(frozen=True)
class Script:
    """One response's rounds after a prompt of `context` tokens."""

    context: int
    steps: list[Step]


@dataclass(frozen=True)
class Scripts:
    """All that is replayed."""

    responses: list[Script]
    stage_len: int

    @property
    def steps(self) -> list[Step]:
        return [step for script in self.responses for step in script.steps]

    @property
    def longest(self) -> int:
        """Rows that a memory must hold."""
        widest = max(1 + step.stages * self.stage_len for step in self.steps)
        return widest + max(s.context + sum(step.accepted + 1 for step in s.steps) for s in self.responses)


def read_scripts(path: Path, most_rounds: int) -> Scripts:
    """The first rounds of a `rounds.jsonl`. Raises UserError for what cannot be replayed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"--replay {path} cannot be read ({error.strerror}); give a rounds.jsonl of dloop bench"
        ) from error
    found = read_samples(data)
    if found.good_bytes < len(data) or not found.samples:
        raise UserError(
            f"--replay {path} is no whole rounds.jsonl ({found.good_bytes} of {len(data)} bytes make sense); "
            "give one that dloop bench has finished"
        )
    return scripted([response for sample in found.samples.values() for response in sample], most_rounds, path)


def scripted(responses: Sequence[Response], most_rounds: int, path: Path) -> Scripts:
    """The scripts of these responses. A response ends before its first round without a stage: its context was full."""
    scripts: list[Script] = []
    left = most_rounds
    for response in responses:
        drafted = list(takewhile(lambda record: record["stages"], response.rounds))[:left]
        if drafted:
            scripts.append(Script(drafted[0]["context_len"], [step_of(record, path) for record in drafted]))
            left -= len(drafted)
    used = [record for response in responses for record in response.rounds]
    sizes = {len(stage["tokens"]) for record in used for stage in record["stages"]}
    if len(sizes) != 1:
        found = f"of {', '.join(map(str, sorted(sizes)))} tokens" if sizes else "at all"
        raise UserError(f"--replay {path} has no stages of one size ({found}); give a block drafter's rounds")
    return Scripts(scripts, sizes.pop())


def step_of(record: RoundJson, path: Path) -> Step:
    """One round of a chain."""
    if record["path"] != list(range(1, record["accepted"] + 1)):
        raise UserError(f"--replay {path} holds trees, which are not replayed; give the rounds of a run without trees")
    return Step(len(record["stages"]), record["accepted"])


class Chance(NamedTuple):
    """How acceptance is drawn."""

    token: float  # chance of each drafted token, as long as all before it were right
    stages: int  # of each round
    rounds: int  # after each context
    seed: int


def drawn_scripts(chance: Chance, stage_len: int, contexts: Sequence[int]) -> Scripts:
    """Rounds that nobody decoded."""
    generator = np.random.default_rng(chance.seed)
    scripts: list[Script] = []
    for context in contexts:
        right = generator.random((chance.rounds, chance.stages * stage_len)) < chance.token
        accepted: list[int] = right.cumprod(1).sum(1).tolist()
        scripts.append(Script(context, [Step(chance.stages, count) for count in accepted]))
    return Scripts(scripts, stage_len)
