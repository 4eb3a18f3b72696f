"""Acceptance: which drafted tokens the target would have produced itself."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from dloop.sampling import Sampling, gumbel, process
from dloop.types import Draft, Verdict


@dataclass(frozen=True)
class Match:
    """Accept what equals the target's own choice: the argmax, or a sample with position-keyed noise.

    Every emitted token is one of these choices and no choice depends on the draft, so the text is the one plain
    decoding gives with the same seed: exact for chains and trees at any temperature.
    Source: DFlash's acceptance rule; paper, step (4).
    """

    sampling: Sampling

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        return self.choose(logits[None], [position])[0]

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        return follow(draft, self.choose(logits, [position + 1 for position in draft.positions]))

    def choose(self, logits: Float[Tensor, "n V"], positions: list[int]) -> list[int]:
        """The target's token for each of these positions."""
        if self.sampling.is_greedy:
            return logits.argmax(-1).tolist()  # sync
        where = torch.tensor(positions, device=logits.device)
        noise = gumbel(self.sampling.seed, where, logits.shape[-1])
        picks: Int[Tensor, " n"] = (process(logits, self.sampling).double() + noise).argmax(-1)
        return picks.tolist()  # sync


def follow(draft: Draft, picks: list[int]) -> Verdict:
    """Follow the target's own choices down the draft; picks[i] is the token chosen after node i. O(n) host work.

    Raises ValueError if picks and draft disagree in length. Source: tree form as in DDTree.
    """
    if len(picks) != len(draft.tokens):
        raise ValueError(f"{len(picks)} picks for a draft of {len(draft.tokens)} nodes; the judge needs one each")
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(draft.parents, draft.tokens))}
    path: list[int] = []
    here = 0
    while (child := children.get((here, picks[here]))) is not None:
        path.append(child)
        here = child
    return Verdict(path=path, bonus=picks[here])
