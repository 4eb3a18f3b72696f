"""The gate that nobody tunes: another stage follows where the tokens it should bring are worth more than its time.

    open  iff  expected tokens of a further stage  >  THETA * rate * its seconds

with rate the tokens a second that decoding makes: the time could be spent on those. Everything is learned while
decoding, from finished rounds alone: what a stage brings (`value`), what it costs and the rate (`clock`). A round is
learned from while the next one is verified, when the host has nothing else to do: a decision knows all rounds but the
last. Gates of one pair share what they learn. Nothing that was drafted is ever taken back, and a decision reads nothing
but earlier rounds and what will be verified anyway, so the text's law stays the target's.

With n sequences alive a stage keeps n sequences waiting, and serves all that draft it: the first that would open it
counts on those that are asked after it, the others pay for their rows alone.
Source: the marginal rule of fractional programming (Dinkelbach) for tokens over time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import NamedTuple

from dloop.gates.clock import Clock, Times
from dloop.gates.value import Value
from dloop.types import Draft, Round

THETA = 1.1  # a round after one that was right throughout begins in an easy passage, worth more than the mean
COLD_ROUNDS, COLD_THRESHOLD = 10, -0.5  # until so many rounds are known, the paper's gate on the whole chain
PROBE_SHARE = 0.003  # of the time may go into stages that are drafted for what they teach
HURRY = 10  # times sooner the next of these comes after a surprise
PROBE_FROM = 0.5  # of the most that is ever expected: only after such chains
SURPLUS_GAIN = 0.02


class Price(NamedTuple):
    """What a further stage costs, in tokens that its time would have made."""

    stage: float  # its forward, once for all that draft it
    rows: float  # its rows in the verification


@dataclass
class Learner:
    """What all gates of one pair share."""

    value: Value
    clock: Clock = field(default_factory=Clock)
    rounds: int = 0
    learned: int = 0  # of them
    nodes: float = 0.0  # of a further stage; 0: none was seen
    surplus: float = 0.0  # tokens that a decision wins where the stage is drafted anyway, in the mean
    since_probe: int = 0  # steps
    live: int = 1
    joined: int = 0  # gates made since the last step
    finished: int = 0  # rounds of the step that is being observed
    pending: list[Round] = field(default_factory=list[Round], repr=False)  # those of them that teach
    lessons: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]], repr=False)  # of that step
    due: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]], repr=False)  # of the step before
    shown: float | None = COLD_THRESHOLD  # the threshold since the last step
    asked: dict[int, int] = field(default_factory=dict[int, int], repr=False)  # sequences, by stages drafted
    opened: dict[int, int] = field(default_factory=dict[int, int], repr=False)
    cutting: dict[int, int] = field(default_factory=dict[int, int], repr=False)  # by rules, which ask no gate
    cuts: dict[int, int] = field(default_factory=dict[int, int], repr=False)  # in the step before
    step: int = 0
    lock: Lock = field(default_factory=Lock, repr=False, compare=False)  # gates of several threads may share it

    @property
    def times(self) -> Times | None:
        """What stages and rows take now; None in a cold start."""
        return self.clock.at(self.live) if self.learned >= COLD_ROUNDS else None

    def gate(self, *, teaches: bool = True) -> "Auto":
        """A gate for one more sequence, which begins between two steps."""
        with self.lock:
            self.begin()
            self.joined += 1
        return Auto(self, teaches)

    def observe(self, round: Round) -> None:
        """A finished round of at least one stage, to be learned from when there is time."""
        self.rounds += 1
        self.lessons.append(partial(self._learn, round))
        self.pending.append(round)

    def _learn(self, round: Round) -> None:
        self.learned += 1
        self.value.learn(round)
        if round.stages > 1:
            last = round.stage_records[-1]
            self.nodes += (last.stop - last.start - self.nodes) * (0.1 if self.nodes else 1.0)

    def begin(self) -> None:
        """All rounds of a step are there when the next stage is drafted, or another follows: what they teach is due."""
        if not self.finished:
            return
        self.learn()
        self.due = self.lessons
        self.live = max(self.finished, self.joined)
        if len(self.pending) == self.finished:
            self.due.append(partial(self.clock.add, self.pending))
        self.lessons, self.pending, self.asked, self.opened = [], [], {}, {}
        self.cuts, self.cutting = self.cutting, {}
        self.finished = self.joined = 0
        self.since_probe += 1
        self.step += 1

    def learn(self) -> None:
        """What is due: before the next rounds are observed, whoever finds the time."""
        if self.due:
            for lesson in self.due:
                lesson()
            self.due = []
            self.shown = self.threshold

    def settle(self) -> None:
        """Learn from all rounds there are."""
        self.begin()
        self.learn()

    def opens(self, stage: int, score: float, survivals: list[float], size: int) -> bool:
        """Whether the sequence that is asked now drafts on after `stage` stages, the last one of `size` nodes."""
        self.asked[stage] = self.asked.get(stage, 0) + 1
        self.live = max(self.live, self.joined)
        times = self.times
        opens = score >= COLD_THRESHOLD if times is None else self._pays(stage, survivals, times, size)
        self.opened[stage] = self.opened.get(stage, 0) + opens
        return opens

    def price(self, times: Times, size: float) -> Price:
        each = THETA * self.live * times.rate
        return Price(each * times.draft.slope, each * times.verify.slope * (self.nodes or size))

    def _pays(self, stage: int, survivals: list[float], times: Times, size: int) -> bool:
        price, worth = self.price(times, size), self.value.expected(survivals)
        if worth != worth:  # a broken drafter does not loop
            return False
        won = worth - price.rows
        shared = 0.0 if self.opened.get(stage) else price.stage - self._waiting(stage) * self.surplus
        self.surplus += SURPLUS_GAIN * (max(0.0, won) - self.surplus)
        return won > max(0.0, shared) or self._probes(worth, sum(price) / (self.live * times.tokens_per_step), times)

    def _waiting(self, stage: int) -> int:
        """Sequences that are asked after this one whether they draft on after `stage` stages, if rules cut as many
        as in the step before.
        """
        drafting = self.live if stage == 1 else self.opened.get(stage - 1, 1)
        return max(0, drafting - self.cuts.get(stage, 0) - self.asked[stage])

    def _probes(self, worth: float, steps: float, times: Times) -> bool:
        """Now and then a promising stage, as dear as so many steps, is drafted for what it teaches."""
        hurry = HURRY if times.draft.streaks[1] or times.verify.streaks[1] else 1
        due = hurry * PROBE_SHARE * self.since_probe >= steps and worth >= PROBE_FROM * self.value.most
        if due:
            self.since_probe = 0
        return due

    @property
    def threshold(self) -> float | None:
        """The chain score from which the next step's first asked opens, as far as scores alone decide."""
        if (times := self.times) is None:
            return COLD_THRESHOLD
        price = self.price(times, 1.0)
        return self.value.threshold(price.rows + max(0.0, price.stage - (self.live - 1) * self.surplus))


@dataclass
class Auto:
    """One sequence's gate."""

    learner: Learner
    teaches: bool = True  # whether its rounds are learned from
    survivals: list[float] = field(default_factory=list[float])  # of the stages of the draft in hand
    last: Round | None = None  # right to its end, and no further stage was drafted
    step: int = -1  # the learner's, when the last round finished

    @property
    def threshold(self) -> float | None:
        """What the scores of the whole chain are held against; None where they do not decide alone."""
        return self.learner.shown

    def learn_meanwhile(self) -> None:
        with self.learner.lock:
            self.learner.settle()

    def opens(self, draft: Draft) -> bool:
        if draft.num_stages == 1:
            self.survivals = []
        size = draft.stops[-1] - (draft.stops[-2] if draft.num_stages > 1 else 1)
        with self.learner.lock:
            self.learner.begin()
            self.survivals.append(self.learner.value.survival(draft))
            return self.learner.opens(draft.num_stages, sum(draft.scores), self.survivals, size)

    def observe(self, round: Round) -> None:
        with self.learner.lock:
            self.learner.learn()
            self._observe(round)

    def _observe(self, round: Round) -> None:
        learner, cut = self.learner, round.stages > 0 and round.stage_records[-1].reason == "rule"
        if self.step == learner.step:  # since its last round rules cut every stage: nobody was asked
            learner.settle()
        self.step = learner.step
        learner.finished += 1
        learner.cutting[round.stages] = learner.cutting.get(round.stages, 0) + cut
        if not round.stages or not self.teaches or math.isnan(sum(round.scores)):
            self.last = None  # no room for a stage: nothing was decided; a broken drafter: nothing is known
            return
        if self.last is not None:
            first = round.stage_records[0].stop
            tokens = sum(node < first for node in round.path)
            learner.lessons.append(partial(learner.value.hindsight, self.last, tokens))
        right = round.path[-1:] == [round.draft.tip] and round.finish is None
        self.last = round if right and not cut else None
        learner.observe(round)
