"""What the kernels are told about heads, rows and the store."""

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

SPLIT = 256  # keys whose attention one program adds up: pieces begin at multiples; part of the order of sums
NEVER = 2**30  # a cache index beyond every store: rows of a chain have no separate ancestors


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

    table: first row, rows, slot, first split, end of splits, base. Splits beyond what the rows see are left out. A row
    sees the store's entry p at p < base, and entry ancestors[row, p - base] from there on.
    """

    table: Int[Tensor, "T 6"]
    count: Int[Tensor, "2"]  # tiles in use, splits of the longest row
    ancestors: Int[Tensor, "R depth"] | None  # None: all rows belong to chains
