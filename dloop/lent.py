"""Keys and values that a target lends to its drafter, and where they lie in a row of its features.

The tap LENT gives, in place of a layer's output, what the target's last layer of each kind keeps of a position: keys
(normed, rotated), then values, kind after kind. A drafter without keys and values of its own attends to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

LENT = -2  # among taps; -1 is the embedding
SLIDING, FULL = "sliding_attention", "full_attention"
KINDS = (SLIDING, FULL)  # of layers, in the order of a row

Pair = tuple[Float[Tensor, "_ _ _ _"], Float[Tensor, "_ _ _ _"]]  # keys, values: [B, H, n, d]


@dataclass(frozen=True, kw_only=True)
class LentKind:
    """The layers of one kind, as far as whoever reads their keys must know them."""

    heads: int  # of keys and values
    head_dim: int
    window: int | None  # positions that a row sees, its own included; None: all
    rope_theta: float
    turning: float  # share of a head that turns with the position

    @property
    def width(self) -> int:
        """Values of one position."""
        return 2 * self.heads * self.head_dim


def in_rows(pairs: Mapping[str, Pair], count: int) -> Float[Tensor, "B n F"]:
    """The last `count` positions of each kind's keys and values, side by side."""
    parts = [part[:, :, -count:].transpose(1, 2).flatten(2) for kind in KINDS if kind in pairs for part in pairs[kind]]
    return torch.cat(parts, -1)


def of_rows(rows: Float[Tensor, "B n F"], kinds: Mapping[str, LentKind]) -> dict[str, Pair]:
    """What `in_rows` put side by side; `kinds` in the order of KINDS."""
    found: dict[str, Pair] = {}
    parts = rows.split([shape.width for shape in kinds.values()], -1)
    for (kind, shape), part in zip(kinds.items(), parts, strict=True):
        keys, values = part.unflatten(-1, (2, shape.heads, shape.head_dim)).permute(2, 0, 3, 1, 4)
        found[kind] = keys, values
    return found
