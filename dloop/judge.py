"""Acceptance: which drafted tokens the target would have produced itself."""

from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from dloop.sampling import (
    ACCEPT_STREAM,
    TARGET_STREAM,
    Sampling,
    choose,
    law,
    salt,
    salted_draw,
    salted_uniform,
)
from dloop.types import Draft, Verdict


class Sampler:
    """What is done with the target's logits, ending in one copy to the host: here one operation after the other."""

    def pick(self, logits: Float[Tensor, "n V"], sampling: Sampling, positions: list[int]) -> list[int]:
        """The target's tokens, for rows of logits that stand before these positions."""
        if sampling.is_greedy:
            return logits.argmax(-1).tolist()  # sync
        numbers = torch.tensor([[salt(sampling.seed)] * len(positions), positions], device=logits.device)
        return choose(logits, sampling, *numbers).tolist()  # sync

    def reject(self, logits: Float[Tensor, "n V"], sampling: Sampling, draft: Draft) -> list[int]:
        """[accepted tokens of a chain, the token after them], by `rejected`."""
        q = torch.cat(draft.probs) if draft.probs else law(logits[:0], sampling)
        return rejected(logits, q, sampling, numbers_of(draft, sampling).to(logits.device)).tolist()  # sync


PLAIN = Sampler()


@dataclass(frozen=True)
class Match:
    """Accept what equals the target's own choice: the argmax, or a sample with position-keyed noise.

    Every emitted token is one of these choices and no choice depends on the draft, so the text is the one plain
    decoding gives with the same seed: exact for chains and trees at any temperature.
    Source: DFlash's acceptance rule; paper, step (4).
    """

    sampling: Sampling
    sampler: Sampler = field(default=PLAIN, repr=False, compare=False)

    @property
    def drafting(self) -> Sampling | None:
        """Drafts are the drafter's most likely tokens."""
        return None

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return PLAIN.pick(logits[None], self.sampling, [position])[0]

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        return follow(draft, self.choose(logits, [position + 1 for position in draft.positions]))

    def choose(self, logits: Float[Tensor, "n V"], positions: list[int]) -> list[int]:
        """The target's token for each of these positions."""
        return self.sampler.pick(logits, self.sampling, positions)


@dataclass(frozen=True)
class Reject:
    """Speculative sampling: accept a drawn token with probability min(1, p / q), else draw from what p has beyond q.

    Keeps the law of the text, not the text. Chains only. Drafts must be drawn from the very float32 probabilities q
    that they bring along. All noise is position-keyed, so a seed repeats a run.
    Source: Leviathan et al. 2023, Chen et al. 2023.
    """

    sampling: Sampling
    sampler: Sampler = field(default=PLAIN, repr=False, compare=False)

    @property
    def drafting(self) -> Sampling | None:
        """Drafts are drawn from the drafter's law, processed like the target's."""
        return self.sampling

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return Match(self.sampling).first(logits, position)

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        if not draft.is_chain or sum(len(probs) for probs in draft.probs) != len(draft.drafted):
            raise ValueError("rejection sampling needs a chain whose tokens bring the law they were drawn from")
        taken, token = self.sampler.reject(logits, self.sampling, draft)
        return Verdict(path=list(range(1, taken + 1)), bonus=token)


def numbers_of(draft: Draft, sampling: Sampling) -> Int64[Tensor, "4 n"]:
    """What `rejected` must know of a chain: the salts of both streams, where each row's token will stand, what is
    drafted for it (of the last row nothing).
    """
    count = len(draft.tokens)
    salts = [[salt(sampling.seed, stream)] * count for stream in (ACCEPT_STREAM, TARGET_STREAM)]
    return torch.tensor([*salts, [position + 1 for position in draft.positions], [*draft.drafted, 0]])


def rejected(
    logits: Float[Tensor, "n V"], q: Float[Tensor, "n-1 V"], sampling: Sampling, numbers: Int64[Tensor, "4 n"]
) -> Int64[Tensor, "2"]:
    """(accepted tokens, the token after them) of a chain, without a device-to-host copy."""
    accepting, drawing, where, tokens = numbers
    p, drafted = law(logits, sampling), tokens[:-1, None]
    chance = salted_uniform(accepting[:-1], where[:-1], 1)
    right = chance * q.gather(1, drafted).double() < p[:-1].gather(1, drafted).double()
    accepted = right[:, 0].long().cumprod(0).sum()[None]
    rest = torch.cat([(p[:-1] - q).clamp(min=0), p[-1:]])[accepted]
    rest = torch.where(rest.sum() > 0, rest, p[accepted])  # p equals q up to rounding: nothing is left over
    return torch.cat([accepted, salted_draw(rest, drawing[accepted], where[accepted])])


def follow(draft: Draft, picks: list[int]) -> Verdict:
    """Follow the target's own choices down the draft; picks[i] is the token chosen after node i. O(n) host work.

    Raises ValueError if picks and draft disagree in length. Source: tree form as in DDTree.
    """
    if len(picks) != len(draft.tokens):
        raise ValueError(f"{len(picks)} picks for a draft of {len(draft.tokens)} nodes; the judge needs one each")
    children = {
        (parent, token): node for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))
    }
    path: list[int] = []
    here = 0
    while (child := children.get((here, picks[here]))) is not None:
        path.append(child)
        here = child
    return Verdict(path=path, bonus=picks[here])
