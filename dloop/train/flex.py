"""Packed stages through flex attention: no mask, no copies of the context, and no block of keys that no row sees.

Which blocks of keys a block of rows sees follows from the layout: those before its last anchor, and of every stage the
stretch of its own chains. Blocks wholly before the first of its anchors need no mask inside either.
Source of the attention: torch.nn.attention.flex_attention.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

from dloop.drafters.host import HostConfig
from dloop.errors import UserError
from dloop.train.packed import PackedStages

BLOCK = 128  # rows, and keys, that share an entry of the block mask
Attention = Literal["dense", "flex"]


@dataclass
class FlexStages(PackedStages):
    """The same stages; all anchors of a sequence share one copy of its context."""

    @classmethod
    def groups(cls, num_anchors: int) -> int:
        return 1

    def mask(self) -> BlockMask:
        """Which of [context ; gap rows ; block rows] each packed row sees, and which blocks hold none of that."""
        anchors, size, width = self.anchors.positions, self.block_size, self.tokens.shape[1]
        owners = self.owners()

        some, whole = self.blocks()
        return BlockMask.from_kv_blocks(
            *ordered(some & ~whole),
            *ordered(whole),
            BLOCK_SIZE=BLOCK,
            mask_mod=lambda b, h, q, kv: (  # by the compiler's rules: nothing but arithmetic
                (kv < anchors[b, q // size]) | ((kv >= width) & (owners[torch.clamp(kv - width, min=0)] == q // size))
            ),
            seq_lengths=(anchors.shape[1] * size, width + len(owners)),
        )

    def blocks(self) -> tuple[Bool[Tensor, "B 1 q s"], Bool[Tensor, "B 1 q s"]]:
        """(blocks of keys of which a block of rows sees something, those of which every row sees all)."""
        size, width = self.block_size, self.tokens.shape[1]
        rows = self.anchors.positions.shape[1] * size
        at = self.anchors.positions.repeat_interleave(size, 1)
        count = -(-rows // BLOCK)
        extra = count * BLOCK - rows
        furthest = pad(at, (0, extra), value=0).unflatten(1, (count, BLOCK)).amax(-1)
        nearest = pad(at, (0, extra), value=0).unflatten(1, (count, BLOCK)).amin(-1)
        first = torch.arange(count, device=at.device) * BLOCK
        low, high = first // size, (first + BLOCK - 1).clamp(max=rows - 1) // size + 1  # chains of a block of rows
        keys = torch.arange(0, width + len(self.owners()), BLOCK, device=at.device)
        own = torch.zeros(count, len(keys), dtype=torch.bool, device=at.device)
        start = width
        for each in (*self._gap_counts(), size):
            begin, end = start + low[:, None] * each, start + high[:, None] * each
            own |= (begin < keys + BLOCK) & (end > keys)
            start += each * self.anchors.positions.shape[1]
        some = (keys < furthest[..., None]) | own
        return some[:, None], (keys + BLOCK <= nearest[..., None])[:, None]


def ordered(blocks: Bool[Tensor, "B 1 q s"]) -> tuple[Int[Tensor, "B 1 q"], Int[Tensor, "B 1 q s"]]:
    """(how many, their numbers first), as block masks take them."""
    numbers = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), numbers.int()


def check_flex(config: HostConfig, device: torch.device) -> None:
    """Raises UserError where flex attention is not offered, or its kernels do not run."""
    reason = None
    if config.borrows:
        reason = f"{config.family}'s rows see its target's keys alone, and in dense pieces few that they do not see"
    elif device.type != "cuda":
        reason = f"its kernels need a GPU, this run is on {device}"
    elif config.head_dim < 16 or config.head_dim & (config.head_dim - 1):
        reason = f"its kernels need heads of 16, 32, 64 ... dimensions, the drafter's have {config.head_dim}"
    if reason:
        raise UserError(f"--attention flex: {reason}; use --attention dense")
