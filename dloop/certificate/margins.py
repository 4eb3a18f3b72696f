"""Where a text first leaves plain decoding's, how sure plain decoding was there, and how much is rounding."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor

from dloop.loop import Judge
from dloop.sampling import gumbel, process
from dloop.types import Draft, Sampling, Verdict

NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.25}  # largest gap of logits that rounding can turn over
NOISE_FACTOR = 6  # in bfloat16, logits of another size round otherwise: gaps up to so many times the row's own noise


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a text first leaves plain decoding's, and how sure plain decoding was there."""

    index: int  # of the token in the answer
    plain: int
    other: int
    gap: float  # plain decoding's own logit (with the noise, where it samples) of its token, less that of the other


@dataclass
class Keeping:
    """A judge that keeps the rows it chose from, one a token. Without a drafter these are plain decoding's own.

    Of drafts that were drawn it keeps the laws too, which no round remembers.
    """

    judge: Judge
    kept: list[Float[Tensor, "_ V"]] = field(default_factory=list[Tensor])
    laws: list[list[Float[Tensor, " V"]]] = field(default_factory=list[list[Tensor]])  # a round's, one a drafted token

    @property
    def drafting(self) -> Sampling | None:
        """As the judge says."""
        return self.judge.drafting

    @property
    def rows(self) -> Float[Tensor, "T V"]:
        """Row i gave token i of the text, before it was cut."""
        return torch.cat(self.kept)

    def first(self, logits: Float[Tensor, " V"], position: int) -> int:
        self.kept.append(logits[None].clone())  # a target may answer into the same memory again
        return self.judge.first(logits, position)

    def __call__(self, draft: Draft, logits: Float[Tensor, "n V"]) -> Verdict:
        verdict = self.judge(draft, logits)
        self.kept.append(logits[[0, *verdict.path]])
        self.laws.append([row for stage in draft.probs for row in stage])
        return verdict


def first_difference(
    plain: Sequence[int], other: Sequence[int], scores: Callable[[int], Float[Tensor, " V"]]
) -> Difference | None:
    """The first token that differs; None while one text is the other's beginning. `scores` are plain decoding's."""
    for index, (ours, theirs) in enumerate(zip(plain, other, strict=False)):
        if ours != theirs:
            row = scores(index)
            return Difference(index=index, plain=ours, other=theirs, gap=float(row[ours] - row[theirs]))
    return None


def scores_of(row: Float[Tensor, " V"], sampling: Sampling, position: int) -> Float[Tensor, " V"]:
    """What a choice takes the largest of, in units of logits: the logits, with the position's own noise if sampled.

    One row alone, so that nothing depends on what else was verified with it.
    """
    if sampling.is_greedy:
        return row.double()
    noise = gumbel(sampling.seed, torch.tensor([position], device=row.device), row.shape[-1])[0]
    return (process(row[None], sampling)[0].double() + noise) * sampling.temperature


def deviation(rows: Float[Tensor, "T V"], others: Float[Tensor, "T V"]) -> Float[Tensor, " T"]:
    """How far two computations of the same rows lie apart, in units of the rows' own spread.

    The root mean square of the logits' differences, less a common shift, over their standard deviation: it has no
    unit, so that one limit serves models of all sizes.
    """
    apart = rows.float() - others.float()
    return apart.std(-1, correction=0) / others.float().std(-1, correction=0)


def near_tie(dtype: str, plain: Float[Tensor, "T V"], full: Float[Tensor, "T V"]) -> Float[Tensor, " T"]:
    """The largest gap of each row that rounding can turn over.

    Fixed in float32. In bfloat16 at least 0.25, and six times what the row itself shows of rounding: plain decoding's
    logits less those of one forward over the whole text.
    """
    flat = torch.full((len(plain),), NEAR_TIE[dtype], device=plain.device)
    if dtype == "float32":
        return flat
    return flat.maximum(NOISE_FACTOR * (plain.float() - full.float()).std(-1, correction=0))
