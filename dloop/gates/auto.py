"""The gate that nobody tunes: another stage follows where the tokens it should bring are worth more than its time.

    open  iff  expected tokens of a further stage  >  THETA * rate * its milliseconds

with rate the tokens per second that decoding makes: the time could be spent on those. Everything is learned while
decoding, from finished rounds alone: what a stage brings (`value`), what it costs (`clock`), the rate. Gates of one
pair share what they learn; each sequence has a rate of its own beside the shared one. Nothing that was drafted is ever
taken back, and the decision sees nothing that verification could be swayed by, so the text's law stays the target's.

With n sequences alive a stage keeps n sequences waiting, and serves all that draft it: the first that would open it
counts on those after it, the others pay for their rows alone.
Source: marginal rule of fractional programming (Dinkelbach) on tokens over time.
"""

from dataclasses import dataclass, field

from dloop.gates.clock import Clock, Times
from dloop.gates.value import Value
from dloop.types import Draft, Round

THETA = 1.1  # a round after one that was right throughout begins in an easy passage, worth more than the mean
COLD_ROUNDS, COLD_THRESHOLD = 20, -0.5  # until so many rounds are known, the paper's gate on the whole chain
PROBE_EVERY = 128  # steps between stages that are drafted only to learn
PROBE_FROM = 0.5  # of the most that is ever expected: only such chains are probed
OWN_FORGETTING, OWN_SHARE, OWN_ROUNDS = 0.9, 0.25, 20  # a sequence's own rate: fading; its share, half of it after
SURPLUS_GAIN = 0.02


@dataclass
class Learner:
    """What all gates of one pair share."""

    value: Value
    clock: Clock = field(default_factory=Clock)
    rounds: int = 0
    nodes: float = 0.0  # of a further stage; 0: none was seen
    surplus: float = 0.0  # what a decision wins in tokens if the stage runs anyway, in the mean
    since_probe: int = 0  # steps
    live: int = 1
    pending: list[Round] = field(default_factory=list[Round], repr=False)  # of the step that is being observed
    asked: dict[int, int] = field(default_factory=dict[int, int], repr=False)  # sequences, by stages drafted
    opened: dict[int, int] = field(default_factory=dict[int, int], repr=False)

    def observe(self, round: Round) -> None:
        """Learn from a finished round with at least one stage."""
        self.value.learn(round)
        self.rounds += 1
        if round.stages > 1:
            last = round.stage_records[-1]
            self.nodes += (last.stop - last.start - self.nodes) * (0.1 if self.nodes else 1.0)
        self.pending.append(round)

    def settle(self) -> None:
        """All rounds of a step are there when the next stage is asked about: learn its times."""
        if self.pending:
            self.live = len(self.pending)
            self.clock.add(self.pending)
            self.pending, self.asked, self.opened = [], {}, {}
            self.since_probe += 1

    def waiting(self, stage: int) -> int:
        """Sequences that will be asked after this one whether the stage after `stage` is drafted."""
        drafting = self.live if stage == 1 else self.opened.get(stage - 1, 1)
        return max(0, drafting - self.asked.get(stage, 0))

    def note(self, stage: int, *, opens: bool) -> None:
        self.opened[stage] = self.opened.get(stage, 0) + opens


@dataclass
class Price:
    """What a further stage costs in tokens that its time would have made."""

    stage: float  # its forward, once for all that draft it
    rows: float  # its rows in the verification


@dataclass
class Auto:
    """One sequence's gate."""

    learner: Learner
    teaches: bool = True  # whether its rounds are learned from
    tokens: float = 0.0  # its own rate, fading
    seconds: float = 0.0
    rounds: int = 0
    last: Round | None = None  # right to its end, and no further stage was drafted

    @property
    def threshold(self) -> float | None:
        """The chain score from which it opens at the present rate and costs, as far as scores alone decide."""
        times = self.times()
        if times is None:
            return COLD_THRESHOLD
        price, others = self.price(times, self.learner.nodes or 1.0), self.learner.live - 1
        return self.learner.value.threshold(price.rows + max(0.0, price.stage - others * self.learner.surplus))

    def times(self) -> Times | None:
        """None in a cold start."""
        return self.learner.clock.at(self.learner.live) if self.learner.rounds >= COLD_ROUNDS else None

    def price(self, times: Times, nodes: float) -> Price:
        """At the shared rate, drawn towards this sequence's own."""
        rate = times.rate
        if self.seconds:
            own = OWN_SHARE * self.rounds / (self.rounds + OWN_ROUNDS)
            rate += own * (self.tokens / self.seconds - rate)
        each = THETA * self.learner.live * rate
        return Price(each * times.draft.slope, each * times.verify.slope * nodes)

    def opens(self, draft: Draft) -> bool:
        learner, stage = self.learner, draft.num_stages
        learner.settle()
        learner.asked[stage] = learner.asked.get(stage, 0) + 1
        learner.live = max(learner.live, learner.asked[stage])  # more have joined since the last step
        times = self.times()
        opens = sum(draft.scores) >= COLD_THRESHOLD if times is None else self._pays(draft, times)
        learner.note(stage, opens=opens)
        return opens

    def _pays(self, draft: Draft, times: Times) -> bool:
        learner, stage = self.learner, draft.num_stages
        size = draft.stops[-1] - (draft.stops[-2] if stage > 1 else 1)
        price, worth = self.price(times, learner.nodes or size), learner.value.expected(draft)
        won = worth - price.rows
        others = 0.0 if learner.opened.get(stage) else price.stage - learner.waiting(stage) * learner.surplus
        learner.surplus += SURPLUS_GAIN * (max(0.0, won) - learner.surplus) if won == won else 0.0
        if won > max(0.0, others):
            return True
        if learner.since_probe >= PROBE_EVERY and worth >= PROBE_FROM * learner.value.most:
            learner.since_probe = 0
            return True
        return False

    def observe(self, round: Round) -> None:
        if not round.stages:  # no room for a stage: nothing was decided
            return
        self.tokens = OWN_FORGETTING * self.tokens + len(round.emitted)
        self.seconds = OWN_FORGETTING * self.seconds + round.draft_s + round.verify_s
        self.rounds += 1
        if not self.teaches:
            return
        if self.last is not None:
            first = round.stage_records[0].stop
            self.learner.value.hindsight(self.last, sum(node < first for node in round.path))
        right = round.path[-1:] == [round.draft.tip] and round.finish is None
        self.last = round if right else None
        self.learner.observe(round)
