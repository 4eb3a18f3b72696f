"""The paper: draft stage after stage while the gate is open, verify everything in one target forward, repeat.

`decode` decodes one sequence. It never calls a forward for drafting or verification itself: it *asks* (yields a
`StageRequest` or a `VerifyRequest`) and is *answered*. `run_one` answers a single sequence, `run_many` puts the
requests of all live sequences together, so that there is one loop for one sequence and for many.
"""

import itertools
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float
from torch import Tensor

from dloop.gate import Gate, LearnsMeanwhile
from dloop.types import (
    Draft,
    Features,
    FinishReason,
    First,
    Round,
    Rows,
    Sampling,
    Seen,
    Stage,
    StageEnd,
    StageRecord,
    StageRequest,
    Verdict,
    VerifyRequest,
)

Event = First | Round
Task = Generator[StageRequest | VerifyRequest | Event, Stage | Seen | None, None]


@runtime_checkable
class Target(Protocol):
    """A target's memory of some slots. Law: memory = committed rows + a speculative tail."""

    def prefill(self, slot: int, tokens: list[int]) -> Seen:
        """Start the slot anew with these tokens committed; logits of the last position, features of all."""
        ...

    def verify(self, rows: Rows) -> Seen:
        """One forward over all rows; they become the tail of their slots."""
        ...

    def commit(self, slot: int, path: list[int]) -> None:
        """Keep these rows of the slot's last verification (0 = the first of the slot), drop the rest of the tail."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """A drafter's memory of some slots, under the same law: `extend` commits, `draft` writes the tail."""

    @property
    def stage_len(self) -> int:
        """Tokens on the spine of one stage."""
        ...

    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        """Commit verified positions from `position` on (0 starts the slot anew) and drop the tail."""
        ...

    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        """Draft one stage for each request."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A drafter that can begin to read verified positions while the judge is still at work."""

    def read_ahead(self, slot: int, position: int, features: Features) -> None:
        """These features of a chain's rows, from `position` on: `extend` follows with the first of them."""
        ...


class Session(NamedTuple):
    """The two memories one decode works on; no drafter is plain decoding."""

    target: Target
    drafter: Drafter | None


@runtime_checkable
class Judge(Protocol):
    """Decides which drafted tokens the target would have produced."""

    @property
    def drafting(self) -> Sampling | None:
        """How drafts must be drawn for this judge; None: the drafter's most likely tokens."""
        ...

    def first(self, logits: Float[Tensor, " V"], position: int) -> int: ...

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict: ...


@dataclass(frozen=True, kw_only=True)
class Limits:
    """When to stop: the text (max_new_tokens, stop_ids), the round (max_stages), the models (context, positions)."""

    max_new_tokens: int
    stop_ids: frozenset[int] = frozenset()
    max_stages: int = 12
    context: int

    def cut(self, tokens: list[int], produced: int) -> tuple[list[int], FinishReason | None]:
        """Cut at the first stop token (kept) or at the length limit; the earlier wins."""
        room = self.max_new_tokens - produced
        for index, token in enumerate(tokens[:room]):
            if token in self.stop_ids:
                return tokens[: index + 1], "stop"
        return tokens[:room], "length" if len(tokens) >= room else None

    def fits(self, draft: Draft, stage_len: int) -> bool:
        """Whether one more stage stays inside the context."""
        return draft.positions[draft.tip] + stage_len < self.context

    def end(self, draft: Draft, produced: int, stage_len: int) -> StageEnd | None:
        """Why no further stage may follow whatever the gate says; None if one may."""
        if self.stop_ids and not self.stop_ids.isdisjoint(draft.tokens[node] for node in draft.spine[1:]):
            return "stop_token"
        if draft.depth >= self.max_new_tokens - produced:
            return "length"
        if draft.num_stages >= self.max_stages:
            return "max_stages"
        return None if self.fits(draft, stage_len) else "context"


def decode(session: Session, slot: int, prompt: list[int], *, gate: Gate, judge: Judge, limits: Limits) -> Task:
    """Yield requests to be answered, and the text: one `First`, then one `Round` per target forward.

    The emitted tokens are exactly what the target alone would emit under the same judge. Without a drafter every
    round verifies the anchor alone: plain decoding.
    """
    target, drafter = session
    seen = target.prefill(slot, prompt)
    if drafter is not None:
        drafter.extend(slot, 0, prompt, seen.features)
    anchor, position = judge.first(seen.logits[-1], len(prompt)), len(prompt)
    finish = limits.cut([anchor], 0)[1]
    produced, meanwhile = 1, gate.learn_meanwhile if isinstance(gate, LearnsMeanwhile) else None
    yield First(token=anchor, finish=finish)

    while finish is None:
        started = time.perf_counter()
        draft, records = Draft.rooted(anchor, position), []
        if drafter is not None:
            ask = StageRequest(slot=slot, anchor=anchor, index=0, sampling=judge.drafting)
            draft, records = yield from grow(draft, ask, drafter.stage_len, gate, limits, produced)
        drafted = time.perf_counter()
        seen = yield VerifyRequest(slot=slot, draft=draft, meanwhile=meanwhile)
        assert isinstance(seen, Seen)
        if isinstance(drafter, ReadsAhead) and draft.is_chain:
            drafter.read_ahead(slot, position, seen.features)
        verdict = judge(draft, seen.logits)
        kept = [0, *verdict.path]
        target.commit(slot, kept)
        if drafter is not None:
            drafter.extend(slot, position, [draft.tokens[node] for node in kept], seen.features.select(kept))

        seconds = (drafted - started, time.perf_counter() - drafted)
        now = settle(draft, records, verdict, limits, produced, seconds)
        gate.observe(now)
        yield now
        anchor, position, finish = now.emitted[-1], position + len(kept), now.finish
        produced += len(now.emitted)


def grow(
    draft: Draft, ask: StageRequest, stage_len: int, gate: Gate, limits: Limits, produced: int
) -> Generator[StageRequest, Stage | Seen | None, tuple[Draft, list[StageRecord]]]:
    """Draft stage after stage while the gate is open: the confidence-gated drafting loop."""
    records: list[StageRecord] = []
    reason: StageEnd = "open" if limits.fits(draft, stage_len) else "context"
    while reason == "open":
        start = len(draft.tokens)
        stage = yield replace(ask, anchor=draft.tokens[draft.tip], index=len(records))
        assert isinstance(stage, Stage)
        draft = draft.graft(stage)
        ended, threshold = limits.end(draft, produced, stage_len), gate.threshold
        reason = "rule" if stage.cut else ended or "open" if gate.opens(draft) else "gate"
        if reason != "open":  # the stage stays what it is without the loop
            draft = draft.shed(stage.reserve)
        records.append(
            StageRecord(start=start, stop=len(draft.tokens), score=stage.score, gate=threshold, reason=reason)
        )
    return draft, records


def settle(
    draft: Draft,
    records: list[StageRecord],
    verdict: Verdict,
    limits: Limits,
    produced: int,
    seconds: tuple[float, float],
) -> Round:
    """Turn a verdict into the round's record: what was accepted, what reached the text, whether that ends it.

    The laws that drafts were drawn from end with the verdict: each has a value for every token of the vocabulary.
    """
    accepted = [draft.tokens[node] for node in verdict.path]
    bonus = verdict.bonus if limits.stop_ids.isdisjoint(accepted) else None
    emitted, finish = limits.cut(accepted if bonus is None else [*accepted, bonus], produced)
    return Round(
        context_len=draft.positions[0],
        draft=replace(draft, probs=[]),
        stage_records=records,
        path=verdict.path,
        bonus=bonus,
        emitted=emitted,
        draft_s=seconds[0],
        verify_s=seconds[1],
        finish=finish,
    )


def run_one(task: Task, session: Session) -> Generator[Event, None, None]:
    """Answer one sequence's requests; yield its text as it comes."""
    for _, event in run_many([task], session):
        yield event


def run_many(tasks: Sequence[Task], session: Session) -> Iterator[tuple[int, Event]]:
    """Answer all sequences, each in its own slot. Yields (index of the task, event)."""
    return run_queue((lambda _slot, task=task: task for task in tasks), session, live=len(tasks))


def run_queue(begin: Iterable[Callable[[int], Task]], session: Session, live: int) -> Iterator[tuple[int, Event]]:
    """Answer at most `live` sequences at a time: ragged stages first, then one packed verification.

    The requests of all live sequences travel together. `begin` starts each task in the slot it is given, as soon as
    one is free. Yields (index of the task, event).
    """
    waiting = enumerate(begin)
    running: dict[int, tuple[int, Task]] = {}  # by slot
    answers: dict[int, Stage | Seen | None] = {}
    verifying: dict[int, VerifyRequest] = {}
    while True:
        for slot in sorted(set(range(live)) - running.keys()):
            if (following := next(waiting, None)) is None:
                break
            running[slot] = following[0], following[1](slot)
            answers[slot] = None
        if not running:
            return
        drafting: dict[int, StageRequest] = {}
        for slot, answer in answers.items():
            index, task = running[slot]
            request, events = advance(task, answer)
            yield from ((index, event) for event in events)
            if isinstance(request, StageRequest):
                drafting[slot] = request
            elif request is not None:
                verifying[slot] = request
            else:
                del running[slot]
        if drafting:
            assert session.drafter is not None
            answers = dict(zip(drafting, session.drafter.draft(list(drafting.values())), strict=True))
        else:
            answers = dict(zip(verifying, verify_packed(list(verifying.values()), session.target), strict=True))
            verifying = {}


def advance(task: Task, answer: Stage | Seen | None) -> tuple[StageRequest | VerifyRequest | None, list[Event]]:
    """Run one sequence to its next request (None when it has ended); collect the text on the way."""
    events: list[Event] = []
    try:
        item = task.send(answer)
        while isinstance(item, First | Round):
            events.append(item)
            item = task.send(None)
    except StopIteration:
        return None, events
    return item, events


def verify_packed(requests: list[VerifyRequest], target: Target) -> list[Seen]:
    """One target forward over the drafts of all these sequences, cut back into one answer each."""
    if not requests:
        return []
    seen = target.verify(Rows.pack(requests))
    for request in requests:  # a device verifies: what was meant for this time
        if request.meanwhile is not None:
            request.meanwhile()
    stops = list(itertools.accumulate(len(request.draft.tokens) for request in requests))
    return [seen.between(start, stop) for start, stop in itertools.pairwise([0, *stops])]
