"""What a stop rule is shown of drafted rows: figures of their laws, brought to the host.

Of a row whose logits are broken (NaN, +inf) every figure is NaN: it is neither certain nor uncertain, and no comparison
with it holds, so that no rule and no gate that reads it goes on.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Int
from torch import Tensor

from dloop.stop import Drawn, Row, Watch, shortened
from dloop.trees.beam import Children, Frontier
from dloop.types import Stage


class Laws(NamedTuple):
    """What the k rows of a stage said, still on the device."""

    logits: Float[Tensor, "k W"]  # over the tokens that the drafter can name
    hidden: Float[Tensor, "k D"]
    confidence: Float[Tensor, " k"] | None


def figures(logits: Float[Tensor, "k V"]) -> Float32[Tensor, "k 3"]:
    """Each row's top log-probability, its margin over the second (inf where there is none), and the entropy in nats."""
    logp = logits.float().log_softmax(-1)
    best = logp.topk(min(2, logp.shape[-1]), -1).values
    first, second = best[..., 0], best[..., 1] if best.shape[-1] > 1 else torch.full_like(best[..., 0], -torch.inf)
    entropy = -(logp.exp() * logp.clamp(min=torch.finfo(logp.dtype).min)).sum(-1)  # 0 * -inf is 0 here, NaN stays NaN
    return torch.stack([first, first - second, entropy], -1)


def watched_stage(stage: Stage, laws: Laws, watch: Watch) -> Stage:
    """A block's stage, cut where the rule says: all of it is drafted, the rows that are left are verified."""
    found = figures(laws.logits)
    if laws.confidence is not None:
        found = torch.cat([found, laws.confidence.float()[:, None]], -1)
    return watched_chain(stage, found.tolist(), laws.hidden, watch)  # sync


def watched_chain(stage: Stage, numbers: list[list[float]], hidden: Float[Tensor, "k D"], watch: Watch) -> Stage:
    """The same, from the rows' figures; the fourth of each, where there is one, is the confidence."""
    for index, each in enumerate(numbers):
        if watch.ends(link(watch, each, stage.logp[index], hidden[index])):
            break
    return shortened(stage, watch, [each[0] for each in numbers])


def row_of(watch: Watch, numbers: list[float], hidden: Float[Tensor, " D"]) -> Row:
    """The next row, from its figures; the fourth, where there is one, is the confidence."""
    top, margin, entropy, *confidence = numbers
    return Row(
        index=watch.kept,
        depth=watch.before + watch.kept,
        stage_len=watch.stage_len,
        top_logp=top,
        margin=margin,
        entropy=entropy,
        confidence=confidence[0] if confidence else None,
        hidden=hidden,
    )


def link(watch: Watch, numbers: list[float], logp: float, hidden: Float[Tensor, " D"]) -> Drawn:
    """The next row of a chain and its token: a beam of one."""
    path = watch.path_logp + numbers[0]
    return Drawn(row=row_of(watch, numbers, hidden), logp=logp, path_logp=path, mass_logp=path)


def link_of(watch: Watch, logits: Float[Tensor, " W"], token: Int[Tensor, ""], hidden: Float[Tensor, " D"]) -> Drawn:
    """The next row of a chain that is still drafted; the token is an index into the logits."""
    logp = logits.float().log_softmax(-1)[token]
    *numbers, drawn = torch.cat([figures(logits[None])[0], logp[None]]).tolist()  # sync
    return link(watch, numbers, drawn, hidden)


def level_of(
    watch: Watch, logits: Float[Tensor, " W"], hidden: Float[Tensor, " D"], frontier: Frontier, children: Children
) -> Drawn:
    """A level of a tree, by the best row of its frontier; the beam is as wide as a row has children."""
    scores = (frontier.scores[:, None] + children.logp).flatten().topk(children.logp.shape[1]).values
    beam = torch.stack([scores[0], scores.logsumexp(0)])
    *numbers, path, mass = torch.cat([figures(logits[None])[0], beam]).tolist()  # sync
    row = row_of(watch, numbers, hidden)
    return Drawn(row=row, logp=row.top_logp, path_logp=path, mass_logp=mass)
