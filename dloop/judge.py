"""Acceptance: which drafted tokens the target would have produced itself."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.sampling import ACCEPT_STREAM, TARGET_STREAM, Sampling, choose, draw, law, salt, uniform
from dloop.types import Draft, Verdict

# The target's tokens for rows of logits that stand before these positions.
Pick = Callable[[Float[Tensor, "n V"], Sampling, list[int]], list[int]]


def pick(logits: Float[Tensor, "n V"], sampling: Sampling, positions: list[int]) -> list[int]:
    """`choose`, one operation after the other."""
    if sampling.is_greedy:
        return logits.argmax(-1).tolist()  # sync
    where = torch.tensor(positions, device=logits.device)
    salts = torch.full_like(where, salt(sampling.seed))
    return choose(logits, sampling, salts, where).tolist()  # sync


@dataclass(frozen=True)
class Match:
    """Accept what equals the target's own choice: the argmax, or a sample with position-keyed noise.

    Every emitted token is one of these choices and no choice depends on the draft, so the text is the one plain
    decoding gives with the same seed: exact for chains and trees at any temperature.
    Source: DFlash's acceptance rule; paper, step (4).
    """

    sampling: Sampling
    pick: Pick = pick  # of a target that answers into the same memory again and again: one launch

    @property
    def drafting(self) -> Sampling | None:
        """Drafts are the drafter's most likely tokens."""
        return None

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return pick(logits[None], self.sampling, [position])[0]

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        return follow(draft, self.choose(logits, [position + 1 for position in draft.positions]))

    def choose(self, logits: Float[Tensor, "n V"], positions: list[int]) -> list[int]:
        """The target's token for each of these positions."""
        return self.pick(logits, self.sampling, positions)


@dataclass(frozen=True)
class Reject:
    """Speculative sampling: accept a drawn token with probability min(1, p / q), else draw from what p has beyond q.

    Keeps the law of the text, not the text. Chains only. Drafts must be drawn from the very float32 probabilities q
    that they bring along. All noise is position-keyed, so a seed repeats a run.
    Source: Leviathan et al. 2023, Chen et al. 2023.
    """

    sampling: Sampling

    @property
    def drafting(self) -> Sampling | None:
        """Drafts are drawn from the drafter's law, processed like the target's."""
        return self.sampling

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return Match(self.sampling).first(logits, position)

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        count = len(draft.drafted)
        if not draft.is_chain or sum(len(probs) for probs in draft.probs) != count:
            raise ValueError("rejection sampling needs a chain whose tokens bring the law they were drawn from")
        p = law(logits, self.sampling)
        q = torch.cat(draft.probs) if count else p[:0]
        where = torch.tensor(draft.positions, device=p.device) + 1
        tokens = torch.tensor(draft.drafted, device=p.device, dtype=torch.int64)[:, None]
        chance = uniform(self.sampling.seed, where[:-1], 1, ACCEPT_STREAM)
        right = chance * q.gather(1, tokens).double() < p[:-1].gather(1, tokens).double()
        accepted = right[:, 0].long().cumprod(0).sum()
        rest = torch.cat([(p[:-1] - q).clamp(min=0), p[-1:]])[accepted]
        rest = torch.where(rest.sum() > 0, rest, p[accepted])  # p equals q up to rounding: nothing is left over
        bonus = draw(rest[None], self.sampling.seed, where[accepted][None], TARGET_STREAM)[0]
        taken, token = torch.stack([accepted, bonus]).tolist()  # sync
        return Verdict(path=list(range(1, taken + 1)), bonus=token)


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
