"""The attention of an unroll through flex attention: the first step's rows causally, with no score ever held.

Of the later steps a row sees nothing but its own rows, one a step. They are no keys of the kernel, which would visit a
block of 128 for each: its log-sum-exp tells what the first step weighs beside them, and they are mixed in afterwards.
So one block mask serves all steps, and no step's keys are kept twice.
Sources: torch.nn.attention.flex_attention; online softmax, as in FlashAttention.
"""

import functools
from collections.abc import Callable, Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask, flex_attention

from dloop.drafters.layers import FLEX_OPTIONS, compiled_flex
from dloop.drafters.memory import KeyValues
from dloop.train.flex import BLOCK, ordered
from dloop.train.pieces import recomputed


def causal(width: int, device: torch.device) -> BlockMask:
    """Every row sees those up to its own, of any sample: what pads a text stands behind it."""
    first = torch.arange(0, width, BLOCK, device=device)
    rows, keys = first[:, None], first[None]
    whole = (keys < rows) & (rows + BLOCK <= width)
    return BlockMask.from_kv_blocks(
        *ordered(((keys <= rows) & ~whole)[None, None]),
        *ordered(whole[None, None]),
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda b, h, q, kv: kv <= q,
        seq_lengths=(width, width),
    )


def flexed(
    queries: Float[Tensor, "B H T d"], first: KeyValues, later: Sequence[KeyValues], mask: BlockMask
) -> Float[Tensor, "B H T d"]:
    """One softmax over the first step's rows, by the mask, and over the row's own rows of the later steps."""
    run = compiled_flex() if queries.is_cuda else flex_attention
    mixed, aux = cast(
        tuple[Tensor, AuxOutput],
        run(
            queries,
            *first,
            block_mask=mask,
            enable_gqa=True,
            kernel_options=FLEX_OPTIONS,
            return_aux=AuxRequest(lse=True),
        ),
    )
    return recomputed(beside, queries, mixed, aux.lse, later)


def beside(
    queries: Float[Tensor, "B H T d"],
    mixed: Float[Tensor, "B H T d"],
    lse: Float[Tensor, "B H T"],
    later: Sequence[KeyValues],
) -> Float[Tensor, "B H T d"]:
    """`merged`, with the steps side by side: so the compiler meets one shape, and what is copied is not kept."""
    keys, values = (torch.stack(parts, 2) for parts in zip(*later, strict=True))
    return (compiled_merged() if queries.is_cuda else merged)(queries, mixed, lse, keys, values)


@functools.cache
def compiled_merged() -> Callable[..., Tensor]:
    """The same in a few kernels; else products as large as all later steps' queries are held."""
    return torch.compile(merged)


def merged(
    queries: Float[Tensor, "B H T d"],
    mixed: Float[Tensor, "B H T d"],
    lse: Float[Tensor, "B H T"],
    keys: Float[Tensor, "B Hkv m T d"],
    values: Float[Tensor, "B Hkv m T d"],
) -> Float[Tensor, "B H T d"]:
    """One softmax of the keys that a row has mixed, whose scores have this log-sum-exp, and of its own m further ones.

    Heads of a group share keys.
    """
    wide = torch.promote_types(queries.dtype, torch.float32)
    grouped, before, past = (x.unflatten(1, (keys.shape[1], -1)).to(wide) for x in (queries, mixed, lse))
    scores = (grouped[:, :, :, None] * keys[:, :, None]).sum(-1) * queries.shape[-1] ** -0.5
    whole = torch.logaddexp(past, scores.logsumexp(3))
    own = ((scores - whole[:, :, :, None]).exp()[..., None] * values[:, :, None]).sum(3)
    return ((past - whole).exp()[..., None] * before + own).flatten(1, 2).to(mixed.dtype)
