"""The embedding and the head that a drafter's checkpoint stores beside its own layers."""

import torch
from torch import Tensor

from dloop import checkpoint
from dloop.drafters.host import EMBEDDING, HEAD, HostConfig
from dloop.errors import UserError
from dloop.targets.hf import HFTarget
from dloop.types import Vocabulary


def own_vocabulary(config: HostConfig, tensors: dict[str, Tensor], target: HFTarget, name: str) -> Vocabulary:
    """Take `embed_tokens` and `lm_head` out of the tensors if the layout stores them; else the target's are used.

    A head of the family's own is no part of the vocabulary and stays. Raises UserError for a matrix of another shape,
    for half of a pair, and for a copy of the target's that is not what the target has.
    """
    kept = {EMBEDDING: target.vocabulary.embedding, HEAD: target.vocabulary.head}
    stored = (EMBEDDING,) if config.own_head else (EMBEDDING, HEAD)
    keys = [key for key in stored if key in tensors]
    if keys and len(keys) < len(stored) and not config.copies_vocabulary:
        raise UserError(
            f"{name} has {keys[0]} but not the other of embed_tokens.weight and lm_head.weight; fetch it again"
        )
    for key in keys:
        weight = tensors.pop(key)
        checkpoint.check_values(name, {key: weight})
        expected = (len(kept[key]), config.embedding_size)
        if weight.shape != expected:
            raise UserError(
                f"{name}: {key} is {tuple(weight.shape)}; expected {expected} as in {target.name}: use its target"
            )
        moved = weight.to(device=target.device, dtype=target.dtype)
        if torch.equal(moved, kept[key]):  # keep one copy
            continue
        if config.copies_vocabulary:
            raise UserError(
                f"{name}: {key} is not that of {target.name}, and a head of {config.family} has none of its own; give "
                "the target that it was trained for"
            )
        kept[key] = moved
    if (width := kept[EMBEDDING].shape[1]) != config.embedding_size:
        raise UserError(
            f"{name} has hidden size {config.hidden_size} and no embed_tokens.weight, and the embedding of "
            f"{target.name} is {width} wide: use the drafter trained for this target"
        )
    return Vocabulary(embedding=kept[EMBEDDING], head=kept[HEAD], softcap=target.vocabulary.softcap)
