"""Where does a stage end? Stop rules of adaptive-length drafting, and what each kind may do to a drafted token.

Output keeps the target's law as long as whether a token is drafted at all does not depend on its own value or on what
comes after it. So there are two kinds of rules, and a rule cannot leave its kind: a `BeforeRule` sees a `Row`, which
knows nothing of the token drawn from it, and may leave that token out; an `AfterRule` sees the drawn token too, and may
only end the stage behind it. `Watch` alone turns answers into cuts.
"""

from abc import ABC, abstractmethod
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from dloop.loop import Task
from dloop.types import Round, Seen, Stage, StageRequest


@dataclass(frozen=True, kw_only=True)
class Row:
    """A position before its token is drawn: of a tree level, the best row of its beam. Filled by the drafter.

    Log-probabilities are natural, un-tempered, over the vocabulary the head computes, like the gate's.
    """

    index: int  # within the stage
    depth: int  # drafted tokens before it in this round
    stage_len: int
    top_logp: float  # of the likeliest token
    margin: float  # top_logp less that of the second
    entropy: float  # nats
    confidence: float | None  # DSpark's logit of this row's acceptance; None where there is no such head
    hidden: Float[Tensor, " D"]  # the drafter's state that gave the row's law


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A position after its token was drawn."""

    row: Row
    logp: float  # of the token; of a level, of the best row's likeliest
    path_logp: float  # of the stage so far: summed top_logp; of a tree its best path
    mass_logp: float  # log of the summed probability of all paths of the beam; a chain is a beam of one


class Rule:
    """What both kinds share. One object a sequence: it may remember."""

    def begin(self) -> None:
        """A round begins: forget the last one."""

    def observe(self, round: Round) -> None:
        """Learn from a finished round."""


class BeforeRule(Rule, ABC):
    """Decides by what is known before the token is drawn: it may leave the token out."""

    @abstractmethod
    def admits(self, row: Row) -> bool:
        """Whether this row's token is drafted. No later row is shown after a no."""


class AfterRule(Rule, ABC):
    """May look at the drawn token: that one stays, whatever it says."""

    @abstractmethod
    def goes_on(self, drawn: Drawn) -> bool:
        """Whether another token follows this one."""


StopRule: TypeAlias = BeforeRule | AfterRule


@dataclass(frozen=True, kw_only=True)
class RuledRequest(StageRequest):
    """Asks for one stage that ends where the rule says."""

    rule: StopRule


@dataclass
class Watch:
    """Shows one stage's rows to a rule, left to right."""

    rule: StopRule
    before: int  # drafted tokens before the stage in this round
    stage_len: int
    kept: int = 0  # tokens of the stage
    path_logp: float = 0.0  # of what was shown
    is_cut: bool = False  # no row is shown any more

    def ends(self, drawn: Drawn) -> bool:
        """Show a row; whether the stage ends there. `kept` then tells whether the row's token stays."""
        assert not self.is_cut
        if isinstance(self.rule, BeforeRule):
            stays = self.rule.admits(drawn.row)
            self.is_cut = not stays
        else:
            stays = True
            self.is_cut = not self.rule.goes_on(drawn)
        self.kept += stays
        self.path_logp = drawn.path_logp
        return self.is_cut


def watch_of(request: StageRequest, stage_len: int) -> Watch | None:
    """What watches a stage; None without a rule. Earlier stages are whole: one that was cut is its round's last."""
    if not isinstance(request, RuledRequest):
        return None
    return Watch(request.rule, request.index * stage_len, stage_len)


def shortened(stage: Stage, watch: Watch, top_logp: list[float]) -> Stage:
    """The chain that a rule leaves of a stage, if it cut it."""
    if not watch.is_cut:
        return stage
    kept = slice(watch.kept)
    return replace(
        stage,
        tokens=stage.tokens[kept],
        parents=stage.parents[kept],
        logp=stage.logp[kept],
        spine=stage.spine[kept],
        score=sum(top_logp[kept]),
        probs=None if stage.probs is None else stage.probs[kept],
        cut=True,
    )


NOTHING = Stage(tokens=[], parents=[], logp=[], spine=[], score=0.0, cut=True)  # not even the first token was admitted


def under(task: Task, rule: StopRule) -> Task:
    """A decode whose stages end where the rule says, which learns from its rounds."""
    with closing(task):
        answer: Stage | Seen | None = None
        while True:
            try:
                item = task.send(answer)
            except StopIteration:
                return
            if isinstance(item, StageRequest):
                if item.index == 0:
                    rule.begin()
                item = RuledRequest(**vars(item), rule=rule)
            elif isinstance(item, Round):
                rule.observe(item)
            answer = yield item
