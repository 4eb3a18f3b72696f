"""What the texts of one prompt are held against: plain decoding, and one forward over the whole text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.api import Generation, collect, start
from dloop.certificate.findings import Fault, Kind, Pair, Part
from dloop.certificate.margins import Keeping, deviation, near_tie, scores_of
from dloop.drafters.host import HostDrafter
from dloop.settings import Settings, sampling_of, shaped
from dloop.targets.hf import HFTarget
from dloop.types import Sampling

# Deviations have no unit; on the offline target rounding gives 3e-6 and 0.04. A verification may deviate from plain
# decoding by LEEWAY times what plain decoding itself deviates from one forward, which must be below INSANE.
USUAL = {"float32": 1e-4, "bfloat16": 0.05}
INSANE = {"float32": 1e-3, "bfloat16": 0.2}
LEEWAY = 3.0
NOT_BEST = 1e-6  # a token this far below the best of its row was not chosen from it


@dataclass(frozen=True)
class Text:
    """A decoded text, the logits that each token was chosen from, and the laws that drafts were drawn from."""

    tokens: list[int]
    rows: Float[Tensor, "T V"]
    laws: list[list[Float[Tensor, " V"]]]  # a round's, one a drafted token; empty where none was drawn
    generation: Generation


@dataclass(frozen=True, kw_only=True)
class Ground:
    """What the texts of one prompt are held against."""

    prompt: list[int]
    plain: Text
    sampling: Sampling
    slack: Float[Tensor, " T"]  # largest gap that is rounding
    noise: float
    limit: float  # of deviations

    def scores(self, text: Text, index: int) -> Float[Tensor, " V"]:
        return scores_of(text.rows[index], self.sampling, len(self.prompt) + index)


@dataclass(frozen=True, kw_only=True)
class Place:
    """Which text a fault is in."""

    part: Part
    dtype: str
    prompt: str
    gate: float | None = None

    def fault(self, kind: Kind, measured: float, limit: float) -> Fault:
        return Fault(
            part=self.part,
            dtype=self.dtype,
            prompt=self.prompt,
            gate=self.gate,
            kind=kind,
            measured=measured,
            limit=limit,
        )


def decode_text(pair: Pair, drafter: HostDrafter | None, prompt: list[int], settings: Settings) -> Text:
    """Decode by the pair's own rule, keeping every row that a token was chosen from."""
    judge = Keeping(pair.judge_of(settings, sampling_of(settings), shaped(drafter, settings, pair.target)))
    generation = collect(start(pair.target, drafter, prompt, settings, judge))
    return Text(generation.tokens, judge.rows[: len(generation.tokens)], judge.laws, generation)


def full_rows(target: HFTarget, prompt: Sequence[int], tokens: Sequence[int]) -> Float[Tensor, "T V"]:
    """The logits of all these tokens from one forward over the whole text: no memory, no positions of ours."""
    ids = torch.tensor([[*prompt, *tokens]], device=target.device)
    return target.logits(target.features(ids, ()).last[0, len(prompt) - 1 : -1])


def lay_ground(pair: Pair, prompt: list[int], settings: Settings, place: Place) -> tuple[Ground, list[Fault]]:
    """Plain decoding, held against one forward over its text; how much of the difference is rounding."""
    plain = decode_text(pair, None, prompt, settings)
    full = full_rows(pair.target, prompt, plain.tokens)
    noise = float(deviation(plain.rows, full).max())
    exact = pair.target.is_exact  # bit-identical rows: nothing is left to rounding
    ground = Ground(
        prompt=prompt,
        plain=plain,
        sampling=sampling_of(settings),
        slack=near_tie(pair.dtype, plain.rows, full) * (not exact),
        noise=noise,
        limit=0.0 if exact else limit_of(pair.dtype, noise),
    )
    faults = strays(ground, plain, place)
    if not noise <= INSANE[pair.dtype]:  # nan is a fault
        faults.append(place.fault("reference", noise, INSANE[pair.dtype]))
    return ground, faults


def limit_of(dtype: str, noise: float) -> float:
    """How far rows of a verification may lie from plain decoding's, which lies `noise` from one forward."""
    return max(USUAL[dtype], LEEWAY * min(noise, INSANE[dtype]))


def strays(ground: Ground, text: Text, place: Place) -> list[Fault]:
    """The first token that its own row does not choose: no arithmetic excuses that."""
    for index, token in enumerate(text.tokens):
        scores = ground.scores(text, index)
        below = float(scores.max() - scores[token])
        if not below <= NOT_BEST:
            fault = place.fault("judge", below, NOT_BEST)
            return [replace(fault, index=index, plain=int(scores.argmax()), other=token, gap=below)]
    return []
