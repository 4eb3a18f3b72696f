"""A head's own vocabulary: which of the target's tokens it knows, as two maps that must tell the same.

Source of the form: SafeAILab/EAGLE (`d2t`: what is added to a draft id, `t2d`: which target ids are kept).
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from dloop.errors import UserError

D2T, T2D = "d2t", "t2d"
WAY_OUT = "fetch the checkpoint again, or use one whose training wrote its map"


def maps_of(kept: Int[Tensor, " W"], vocab_size: int) -> dict[str, Tensor]:
    """Both maps, from the target's ids that are kept, in increasing order."""
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return {D2T: kept - torch.arange(len(kept)), T2D: t2d}


def most_frequent(tokens: Int[Tensor, " n"], size: int, vocab_size: int) -> Int[Tensor, " W"]:
    """The target's ids that occur most often (the smaller id first where counts are equal), in increasing order."""
    counts = torch.bincount(tokens, minlength=vocab_size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def register_maps(module: nn.Module, size: int, vocab_size: int) -> None:
    """Give a module both maps as buffers; until they are filled they keep the target's first ids."""
    module.register_buffer(D2T, torch.zeros(size, dtype=torch.int64))
    module.register_buffer(T2D, torch.arange(vocab_size) < size)


def kept_by(d2t: Int[Tensor, " W"]) -> Int[Tensor, " W"]:
    """The target's ids that a map keeps, in increasing order."""
    return d2t + torch.arange(len(d2t), device=d2t.device)


def with_maps(tensors: Mapping[str, Tensor], size: int, vocab_size: int, source: str) -> dict[str, Tensor]:
    """The tensors with sound maps. A head over the whole vocabulary needs none: every token keeps its id.

    Raises UserError for maps that are missing, were never filled or contradict each other.
    """
    found = dict(tensors)
    if size > vocab_size:
        raise UserError(f"{source}: draft_vocab_size={size} is more than vocab_size={vocab_size}; correct config.json")
    given = [name for name in (D2T, T2D) if name in found]
    if not given and size == vocab_size:
        return found | maps_of(torch.arange(size), vocab_size)
    if len(given) < 2:
        missing = " and ".join(name for name in (D2T, T2D) if name not in found)
        raise UserError(
            f"{source} has no {missing} for its draft vocabulary of {size} of {vocab_size} tokens; {WAY_OUT}"
        )
    for name, length in ((D2T, size), (T2D, vocab_size)):
        if found[name].shape != (length,) or found[name].is_floating_point():
            shape = f"{list(found[name].shape)} of {found[name].dtype}"
            raise UserError(f"{source}: {name} is {shape}, expected whole numbers [{length}]; {WAY_OUT}")
    found[D2T], found[T2D] = found[D2T].long(), found[T2D].bool()
    check_maps(found[D2T], found[T2D], source)
    return found


def check_maps(d2t: Int[Tensor, " W"], t2d: Bool[Tensor, " V"], source: str) -> None:
    """Raises UserError unless both name the same tokens in increasing order."""
    size, kept = len(d2t), int(t2d.sum())
    if kept != size:
        never = " (it was never filled)" if kept in (0, len(t2d)) else ""
        raise UserError(f"{source}: t2d keeps {kept} tokens{never}, the draft vocabulary has {size}; {WAY_OUT}")
    if not torch.equal(t2d.nonzero()[:, 0], d2t + torch.arange(size)):
        raise UserError(f"{source}: d2t and t2d name different tokens; {WAY_OUT}")
