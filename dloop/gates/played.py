"""Any gate on a trace, memory included: `decode` itself runs, and the trace answers in place of models and judge."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from dloop.drafters.watched import watched_chain
from dloop.gate import Gate
from dloop.gates.costs import Costs
from dloop.gates.trace import Ground, Text
from dloop.gates.walk import Walk
from dloop.loop import Session, decode, run_one
from dloop.stop import StopRule, under, watch_of
from dloop.types import Draft, Features, Round, Rows, Sampling, Seen, Stage, StageRequest, Verdict


@dataclass
class TracedTarget:
    """A target without logits: the judge does not read any."""

    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        return nothing(len(tokens))

    def verify(self, rows: Rows) -> Seen:
        return nothing(len(rows))

    def commit(self, slot: int, path: list[int]) -> None:
        """Nothing is remembered."""


def nothing(count: int) -> Seen:
    """The answer for so many rows, without a column."""
    empty = torch.zeros(count, 0)
    return Seen(logits=empty, features=Features(taps=empty, last=empty))


@dataclass
class TracedDrafter:
    """Drafts what the trace says of the start it stands at."""

    text: Text
    stage_len: int
    start: int = 0
    features: tuple[str, ...] = ()  # what rows tell beside their log-probability

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        self.start = position + len(tokens) - len(self.text.prompt)

    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        return [self._ruled(request, self._stage(request.index)) for request in requests]

    def _ruled(self, request: StageRequest, stage: Stage) -> Stage:
        """What a rule leaves of a stage."""
        if (watch := watch_of(request, self.stage_len)) is None:
            return stage
        rows = self.text.features[self.start, request.index]
        told = [dict(zip(self.features, each.tolist(), strict=True)) for each in rows]
        numbers = [
            [logp, each["margin"], each["entropy"], each["confidence"]]  # nan: no such head, or a broken row of it
            for logp, each in zip(stage.logp, told, strict=True)
        ]
        return watched_chain(stage, numbers, torch.zeros(len(numbers), 0), watch)

    def _stage(self, index: int) -> Stage:
        order = list(range(self.stage_len))
        return Stage(
            tokens=self.text.tokens[self.start, index].tolist(),
            parents=[i - 1 for i in order],
            logp=self.text.logp[self.start, index].tolist(),
            spine=order,
            score=float(self.text.score[self.start, index]),
        )


@dataclass(frozen=True)
class TracedJudge:
    """Accepts what the trace says; past the end of the text there is no bonus, and no need of one."""

    text: Text

    @property
    def drafting(self) -> Sampling | None:
        """Traced drafts are the drafter's most likely tokens."""
        return None

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return int(self.text.answer[0])

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        start = draft.positions[0] - len(self.text.prompt)
        count = min(int(self.text.accepted[start]), draft.depth)
        following = start + count + 1
        bonus = int(self.text.answer[following]) if following < len(self.text.answer) else None
        return Verdict(path=list(range(1, count + 1)), bonus=bonus)


@dataclass(frozen=True)
class Priced:
    """A gate that observes rounds as long as the costs say, not as long as their replay took."""

    gate: Gate
    costs: Costs
    stage_len: int

    @property
    def threshold(self) -> float | None:
        """The gate's own."""
        return self.gate.threshold

    def opens(self, draft: Draft) -> bool:
        return self.gate.opens(draft)

    def observe(self, round: Round) -> None:
        self.gate.observe(priced(round, self.costs, self.stage_len))


def priced(round: Round, costs: Costs, stage_len: int) -> Round:
    """A round with the seconds that the costs give it."""
    stages, rows = np.array([round.stages]), np.array([len(round.draft.tokens)])
    draft_ms, rest_ms = float(costs.draft_ms(stages)[0]), float(costs.rest_ms(rows)[0])
    return replace(round, draft_s=draft_ms / 1000, verify_s=rest_ms / 1000)


@dataclass(frozen=True)
class Ruled:
    """A stop rule, and what the trace keeps of each row for it."""

    rule: StopRule
    features: tuple[str, ...]


def play(
    text: Text,
    ground: Ground,
    gate: Gate,
    costs: Costs | None = None,
    max_stages: int | None = None,
    ruled: Ruled | None = None,
) -> list[Round]:
    """The rounds that decoding this text under this gate would have; seconds by the costs, else of the replay itself.

    `max_stages`: at most the trace's own, which None takes. `ruled`: under this stop rule too, for block drafters.
    """
    limits = ground.limits if max_stages is None else replace(ground.limits, max_stages=max_stages)
    asked = gate if costs is None else Priced(gate, costs, ground.stage_len)
    drafter = TracedDrafter(text, ground.stage_len, features=ruled.features if ruled else ())
    session = Session(TracedTarget(), drafter)
    task = decode(session, 0, text.prompt.tolist(), gate=asked, judge=TracedJudge(text), limits=limits)
    if ruled is not None:
        task = under(task, ruled.rule)
    rounds = [event for event in run_one(task, session) if isinstance(event, Round)]
    return rounds if costs is None else [priced(round, costs, ground.stage_len) for round in rounds]


def walked(rounds: Sequence[Round], prompt_len: int, stage_len: int) -> Walk:
    """Real or replayed rounds of one text, as a walk."""
    return Walk(
        start=np.array([round.context_len - prompt_len for round in rounds], np.int64),
        stages=np.array([round.stages for round in rounds], np.int64),
        accepted=np.array([round.accepted for round in rounds], np.int64),
        emitted=np.array([len(round.emitted) for round in rounds], np.int64),
        rows=np.array([len(round.draft.tokens) for round in rounds], np.int64),
        stage_len=stage_len,
    )
