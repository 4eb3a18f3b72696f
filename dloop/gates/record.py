"""Writes a trace: decodes as always, with the gate always open, but keeps one token a round.

`decode` itself runs, with the real drafter and the real judge, so that nothing of a stage is computed another way and
every family and engine is served. The judge's verdict is noted and then cut to the anchor: the text goes on by one
token, and every position becomes a start. One start costs a verification and all its stages.
"""

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from torch import Tensor

from dloop.api import Stream, start
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.gate import ALWAYS_OPEN
from dloop.gates.features import FEATURES, Watched, watched
from dloop.gates.trace import Ground, Text, Trace
from dloop.judge import Match
from dloop.settings import Settings, judge_of, limits_of, sampling_of, shaped
from dloop.targets.hf import HFTarget
from dloop.types import Draft, Round, Sampling, Verdict


@dataclass(frozen=True)
class Probe:
    """A judge that accepts nothing, and notes how much the one it asks would have accepted."""

    judge: Match
    accepted: list[int] = field(default_factory=list[int])  # a round

    @property
    def drafting(self) -> Sampling | None:
        """As the judge says."""
        return self.judge.drafting

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return self.judge.first(logits, position)

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        verdict = self.judge(draft, logits)
        self.accepted.append(len(verdict.path))
        following = draft.tokens[verdict.path[0]] if verdict.path else verdict.bonus
        return Verdict(path=[], bonus=following)


class Recording(NamedTuple):
    """One text being traced: run the stream to its end, then ask for the trace."""

    stream: Stream
    probe: Probe
    prompt: list[int]
    ground: Ground
    drafter: HostDrafter  # Watched where it shows its rows

    def trace(self, rounds: list[Round]) -> Trace:
        """What these rounds, all of the stream's, tell."""
        names = FEATURES if isinstance(self.drafter, Watched) else ()
        answer = [self.stream.first, *(token for round in rounds for token in round.emitted)]
        stages, k = self.ground.limits.max_stages, self.ground.stage_len
        empty = blank(len(rounds), stages, k, len(names))
        for i, round in enumerate(rounds):
            for s, record in enumerate(round.stage_records):
                nodes = slice(record.start, record.stop)
                empty["score"][i, s] = record.score
                empty["tokens"][i, s] = round.draft.tokens[nodes]
                empty["logp"][i, s] = round.draft.logp[nodes]
        counts = np.array([round.stages for round in rounds], np.int64)
        if isinstance(self.drafter, Watched) and counts.any():
            empty["features"][np.arange(stages) < counts[:, None]] = self.drafter.rows()
        text = Text(
            prompt=np.array(self.prompt, np.int32),
            answer=np.array(answer, np.int32),
            stages=counts,
            accepted=np.array(self.probe.accepted, np.int64),
            **empty,
        )
        return Trace(ground=self.ground, texts=[text], features=names)


def blank(starts: int, stages: int, stage_len: int, features: int) -> dict[str, np.ndarray]:
    """Arrays in which nothing is drafted yet."""
    return {
        "score": np.full((starts, stages), np.nan),
        "tokens": np.full((starts, stages, stage_len), -1, np.int32),
        "logp": np.full((starts, stages, stage_len), np.nan, np.float32),
        "features": np.full((starts, stages, stage_len, features), np.nan, np.float32),
    }


def begin(target: HFTarget, drafter: HostDrafter, prompt: list[int], settings: Settings) -> Recording:
    """Trace the target's text after this prompt; of the settings, gate, trees and rule of acceptance are not read.

    At a temperature the text is that of plain sampling with the settings' seed.
    """
    settings = replace(settings, loop_gate=ALWAYS_OPEN, tree_budget=0, stage_tree_budget="host", verify="match")
    sampling = sampling_of(settings)
    if settings.seed is None and not sampling.is_greedy:
        raise UserError(f"temperature={settings.temperature} without a seed is not one fixed text; give a seed")
    chosen = shaped(drafter, settings, target)
    assert chosen is not None
    drafter = watched(drafter)
    judge = judge_of(settings, sampling, drafter, target.sampler)
    assert isinstance(judge, Match)
    probe = Probe(judge)
    ground = Ground(family=drafter.family, stage_len=chosen.stage_len, limits=limits_of(settings, target, chosen))
    return Recording(start(target, drafter, prompt, settings, probe), probe, prompt, ground, drafter)
