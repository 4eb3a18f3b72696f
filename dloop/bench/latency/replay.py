"""Rounds replayed through a loop: recorded decisions, real device work.

`decode` itself runs; only the gate and the judge read a script. Every stage, verification, commit and extension is
computed, and the judge's own choice too, so a replay costs what the decode cost, whatever the random weights think.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.bench.decode import clock
from dloop.bench.latency.models import Pair
from dloop.bench.latency.rounds import Script, Scripts, Step
from dloop.bench.latency.timing import spread
from dloop.gate import FixedGate
from dloop.judge import Match
from dloop.loop import Limits, Session, decode, run_one
from dloop.types import Draft, Round, Sampling, Verdict

PLAIN_ROUNDS = 16  # plain decoding's tokens a response
PASSES = 3  # timed, after one that is not
NO_LIMITS = Limits(max_new_tokens=2**31, max_stages=2**31, context=2**31)


@dataclass
class ScriptedGate:
    """Opens as often as each round's script says."""

    steps: Sequence[Step]
    index: int = 0

    @property
    def threshold(self) -> float | None:
        """None: a script has no threshold."""
        return None

    def opens(self, draft: Draft) -> bool:
        return draft.num_stages < self.steps[self.index].stages

    def observe(self, round: Round) -> None:
        self.index += 1


@dataclass
class ScriptedJudge:
    """Accepts as many tokens as the script says, after the greedy judge has done its work."""

    judge: Match
    steps: Sequence[Step]
    index: int = 0

    @property
    def drafting(self) -> Sampling | None:
        """As the judge says."""
        return self.judge.drafting

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return self.judge.first(logits, position)

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        accepted = self.steps[self.index].accepted
        self.index += 1
        return Verdict(path=list(range(1, accepted + 1)), bonus=self.judge(draft, logits).bonus)


class Played(NamedTuple):
    """One response replayed."""

    seconds: float  # prefill left out
    rounds: list[Round]


class Turn(NamedTuple):
    """A response through one loop, and the same context decoded plainly."""

    loop: str
    played: Played
    plain: Played


class Work(NamedTuple):
    """What was computed."""

    rounds: int
    stages: int
    verified_rows: int
    accepted: int


@dataclass(frozen=True)
class Pace:
    """One loop's time, over all responses and passes."""

    ms_per_round: float
    quartiles_ms_per_round: list[float]  # over responses and passes
    plain_ms_per_token: float
    tokens_per_round: float
    work: Work  # of one pass

    @property
    def speedup(self) -> float:
        """Over the same engine's plain decoding."""
        return self.plain_ms_per_token * self.tokens_per_round / self.ms_per_round


def play(session: Session, script: Script, prompt: list[int], device: torch.device) -> Played:
    """Decode the script's rounds; without a drafter, plain rounds."""
    match, steps = Match(Sampling()), script.steps
    if session.drafter is None:
        task = decode(session, 0, prompt, gate=FixedGate(), judge=match, limits=NO_LIMITS)
    else:
        gate, judge = ScriptedGate(steps), ScriptedJudge(match, steps)
        task = decode(session, 0, prompt, gate=gate, judge=judge, limits=NO_LIMITS)
    events = run_one(task, session)
    next(events)
    started = clock(device)
    rounds = [event for event in itertools.islice(events, len(steps)) if isinstance(event, Round)]
    return Played(clock(device) - started, rounds)


def sessions(pair: Pair, capacity: int) -> dict[str, Session]:
    """The slow loop over transformers' own forward, and the fast one."""
    taps = pair.drafter.taps
    found = {"stock": Session(pair.target.open(taps), pair.drafter.open())}
    if pair.fast_target is not None and pair.fast_drafter is not None:
        memory = pair.fast_target.open(taps, context=capacity)
        found["fast"] = Session(memory, pair.fast_drafter.open(context=capacity))
    return found


def replay(pair: Pair, scripts: Scripts, seed: int) -> Iterator[list[Turn]]:
    """Play all responses through both loops in turns; a first pass, which captures and compiles, gives nothing."""
    device, loops = pair.target.device, sessions(pair, scripts.longest)
    generator = torch.Generator().manual_seed(seed)
    for index in range(1 + PASSES):
        for script in scripts.responses:
            prompt = torch.randint(pair.target.vocab_size, (script.context,), generator=generator).tolist()
            short = Script(script.context, script.steps[:PLAIN_ROUNDS])
            turns = [
                Turn(name, play(loop, script, prompt, device), play(loop._replace(drafter=None), short, prompt, device))
                for name, loop in loops.items()
            ]
            yield turns if index > 0 else []


def pace(turns: Sequence[Turn]) -> Pace:
    """Sums over all responses of one loop: a long one counts by its rounds."""
    rounds = [round for turn in turns for round in turn.played.rounds]
    work = work_of(rounds)
    each = spread([1000 * turn.played.seconds / len(turn.played.rounds) for turn in turns])
    return Pace(
        ms_per_round=1000 * sum(turn.played.seconds for turn in turns) / len(rounds),
        quartiles_ms_per_round=[each.low, each.high],
        plain_ms_per_token=1000
        * sum(turn.plain.seconds for turn in turns)
        / sum(len(turn.plain.rounds) for turn in turns),
        tokens_per_round=1 + work.accepted / work.rounds,
        work=Work(*(count // PASSES for count in work)),
    )


def work_of(rounds: Sequence[Round]) -> Work:
    """Read from what the loop yielded."""
    return Work(
        rounds=len(rounds),
        stages=sum(round.stages for round in rounds),
        verified_rows=sum(len(round.draft.tokens) for round in rounds),
        accepted=sum(round.accepted for round in rounds),
    )
