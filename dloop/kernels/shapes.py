"""What the kernels are told about heads, rows and the store."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

KEYS = 128  # keys of a piece, whose attention is added up in one go; pieces begin at multiples
GROUP = 4  # pieces of a group: sums go piece by piece within a group, then group by group
FILL = 16  # (tile, piece) pairs up to which each gets programs of its own
NEVER = 2**30  # beyond every store: rows of a chain have no separate ancestors


class Heads(NamedTuple):
    """The shape of one attention layer, and its rotary positions."""

    queries: int
    keys: int  # key/value heads
    dim: int
    eps: float  # of the query and key norms
    frequency: Float[Tensor, " half"]  # float32, radians a position
    scaling: float  # of cosines and sines


class HeadWeights(NamedTuple):
    """What happens to a layer's fused product before it is stored; None: nothing."""

    bias: Float[Tensor, " W"] | None
    query_gain: Float[Tensor, " d"] | None
    key_gain: Float[Tensor, " d"] | None


class Store(NamedTuple):
    """One layer's keys and values, all slots."""

    k: Float[Tensor, "slots keys capacity d"]
    v: Float[Tensor, "slots keys capacity d"]


class Place(NamedTuple):
    """Where each of R rows stands and what it sees, on the device. Rows that fill a bucket up have index -1."""

    slot: Int[Tensor, " R"]
    index: Int[Tensor, " R"]  # row of the slot's store that the row's keys and values go to
    position: Int[Tensor, " R"]  # for RoPE
    visible: Int[Tensor, " R"]  # how many keys the row sees, itself included


class Tiles(NamedTuple):
    """Which rows share a piece of attention work, on the device.

    table: first row, rows, slot, keys that the rows share (whole pieces; NEVER: all they see). A row sees the store's
    entry p at p < base, and entry ancestors[row, p - base] from there on.
    """

    table: Int[Tensor, "T 4"]
    count: Int[Tensor, "3"]  # tiles in use, units of the longest one, pieces a unit: 1 or GROUP
    base: Int[Tensor, " R"]  # NEVER: the row belongs to a chain
    ancestors: Int[Tensor, "R depth"] | None  # None: all rows belong to chains
