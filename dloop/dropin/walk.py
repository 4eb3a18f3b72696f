"""A judge that goes down the draft as transformers' own loop goes through the text: one emitted token after another.

Logits processors, stopping criteria, the random number generator and the streamer meet each token of the text once, in
order, after its own prefix; drafts that are rejected never reach them. So they may be of any kind, with any state.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from dloop.loop import Limits
from dloop.sampling import gumbel
from dloop.types import Draft, FinishReason, Sampling, Verdict

Pick = Callable[[Float[Tensor, "1 V"], int], int]  # (processed scores, position) -> token


@runtime_checkable
class Streamer(Protocol):
    """What is used of transformers' streamers."""

    def put(self, value: Int[Tensor, "..."]) -> object: ...
    def end(self) -> object: ...


def most_likely(scores: Float[Tensor, "1 V"], position: int) -> int:
    """The token of greedy search."""
    return int(scores.argmax(-1))  # sync


def drawn(scores: Float[Tensor, "1 V"], position: int) -> int:
    """A token drawn like transformers' own: with PyTorch's seed, the very same one."""
    return int(torch.multinomial(scores.softmax(-1), 1))  # sync


@dataclass(frozen=True)
class Keyed:
    """A token drawn with noise of its own for each (seed, position): the same alone or among others."""

    seed: int

    def __call__(self, scores: Float[Tensor, "1 V"], position: int) -> int:
        if not bool(scores.max().isfinite()):  # sync; no token has a chance: an error, and the one of plain decoding
            return drawn(scores, position)
        where = torch.tensor([position], device=scores.device)
        return int((scores.double() + gumbel(self.seed, where, scores.shape[-1])).argmax(-1))  # sync


@dataclass(kw_only=True)
class Walk:
    """The judge of one sequence, and its text so far. One call of `first`, then one a round."""

    ids: Int[Tensor, "1 M"]  # padding, prompt and new tokens, with room for all that may come
    length: int  # of what stands there; processors see this much
    pick: Pick
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList  # beside the length, which `ids` has, and `stop_ids`
    stop_ids: frozenset[int]
    streamer: Streamer | None = None
    scores: list[Float[Tensor, "1 V"]] | None = None  # one a new token, processed; None: not asked for
    logits: list[Float[Tensor, "1 V"]] | None = None  # the same, raw
    finish: FinishReason | None = None
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.prompt_length = self.length

    @property
    def drafting(self) -> Sampling | None:
        """Drafts are the drafter's most likely tokens."""
        return None

    @property
    def needs_rows(self) -> bool:
        """Whether a row's token depends on more than its logits."""
        return bool(self.processors) or self.pick is not most_likely or (self.scores, self.logits) != (None, None)

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return self._step(logits)

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        nodes = zip(draft.parents, draft.tokens, strict=True)
        children = {edge: node for node, edge in enumerate(nodes)}
        picks = None if self.needs_rows else logits.argmax(-1).tolist()  # sync
        path, here = list[int](), 0
        while self.finish is None:
            token = self._step(logits[here]) if picks is None else self._add(picks[here])
            child = children.get((here, token))
            if child is None:
                return Verdict(path=path, bonus=token)
            path.append(child)
            here = child
        return Verdict(path=path, bonus=None)

    def _step(self, logits: Float[Tensor, " V"]) -> int:
        """The token after the text, from logits of its last position."""
        raw = logits[None].to(device=self.ids.device, dtype=torch.float32, copy=True)
        scores = self.processors(self.ids[:, : self.length], raw)  # pyright: ignore[reportArgumentType]
        if self.scores is not None:
            self.scores.append(scores)
        if self.logits is not None:
            self.logits.append(raw)
        return self._add(self.pick(scores, self.length))

    def _add(self, token: int) -> int:
        self.ids[0, self.length] = token
        self.length += 1
        ended = token in self.stop_ids
        if self.criteria:  # asked in any case: they may count what they see
            scores = None if self.scores is None else tuple(self.scores)
            told = self.criteria(self.ids[:, : self.length], scores)  # pyright: ignore[reportArgumentType]
            ended |= bool(told.any())  # sync
        self.finish = "stop" if ended else "length" if self.length == self.ids.shape[1] else None
        if self.streamer is not None:
            self.streamer.put(torch.tensor([token]))
        return token


@dataclass(frozen=True, kw_only=True)
class Walked(Limits):
    """Limits of a text whose judge has ended it where it ends: nothing is left to cut."""

    walk: Walk

    def cut(self, tokens: list[int], produced: int) -> tuple[list[int], FinishReason | None]:
        """The tokens as they are."""
        return tokens, self.walk.finish
