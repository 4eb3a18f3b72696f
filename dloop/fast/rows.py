"""Packing the rows of a forward into one block of integers, copied to the device in one go."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from jaxtyping import Int, Int32
from torch import Tensor

from dloop.kernels.shapes import FILL, GROUP, KEYS, NEVER, Place, Tiles
from dloop.types import Rows

FIELDS = 7  # token, slot, index, position, visible, state, base
TILE = 4  # integers that describe a tile
Integers = Int32[np.ndarray, "..."]


@dataclass(frozen=True)
class Run:
    """Rows of one slot, standing together, and the rows its store holds before them."""

    slot: int
    first: int
    count: int
    base: int


class BlockRows(NamedTuple):
    """A drafter's rows on the host."""

    token: list[int]
    position: list[int]
    state: list[int]


@dataclass(frozen=True, kw_only=True)
class RowBatch:
    """R rows on the device (bucket size), as views of one block of integers."""

    token: Int[Tensor, " R"]
    place: Place
    moving: Int[Tensor, "3 R"]  # index, position and visible of `place` in one: what changes when rows move on
    state: Int[Tensor, " R"]  # a drafter's row of kept states that the row reads or writes; -1: none
    tiles: Tiles
    runs: list[Run]  # on the host, for the plain twin; empty under a graph


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a bucket's block of integers is cut: one layout, one graph."""

    rows: int
    tile_rows: int  # rows that share a tile
    tree: bool
    depth: int | None = None  # most ancestors of a tree's row, itself included; None: as many as rows

    @property
    def ancestors(self) -> int:
        """Entries of a row's table of ancestors."""
        return 0 if not self.tree else self.rows if self.depth is None else self.depth

    @property
    def counts(self) -> int:
        """Where the three counts of `Tiles` stand."""
        return (FIELDS + TILE) * self.rows

    @property
    def size(self) -> int:
        return self.counts + 3 + self.rows * self.ancestors

    def views(self, block: Int[Tensor, " n"], runs: list[Run]) -> RowBatch:
        """Name the parts of a block of integers."""
        fields = block[: FIELDS * self.rows].view(FIELDS, self.rows)
        token, slot, index, position, visible, state, base = fields
        table = block[FIELDS * self.rows : self.counts].view(self.rows, TILE)
        count = block[self.counts : self.counts + 3]
        ancestors = block[self.counts + 3 :].view(self.rows, self.ancestors) if self.tree else None
        place = Place(slot=slot, index=index, position=position, visible=visible)
        tiles = Tiles(table=table, count=count, base=base, ancestors=ancestors)
        return RowBatch(token=token, place=place, moving=fields[2:5], state=state, tiles=tiles, runs=runs)


def runs_of(slots: list[int], stored: Mapping[int, int]) -> list[Run]:
    """Cut rows into runs of one slot. Raises ValueError if a slot's rows do not stand together."""
    changes = [0, *(i for i in range(1, len(slots)) if slots[i] != slots[i - 1])]
    runs = [
        Run(slots[first], first, end - first, stored[slots[first]])
        for first, end in zip(changes, [*changes[1:], len(slots)], strict=True)
    ]
    if len({run.slot for run in runs}) < len(runs):
        raise ValueError(f"the rows of one slot must stand together; slots {slots}")
    return runs


def pack_rows(rows: Rows, runs: list[Run], layout: Layout) -> Integers:
    """Target rows: node i of a run is stored at base + i and sees its ancestors, which end at its position."""
    block, fields = blank(layout)
    n = len(rows)
    fields[0, :n] = rows.token
    fields[1, :n] = rows.slot
    fields[3, :n] = rows.position
    fields[4, :n] = fields[3, :n] + 1
    for run in runs:
        fields[2, run.first : run.first + run.count] = np.arange(run.base, run.base + run.count)
        if layout.tree:
            fields[6, run.first : run.first + run.count] = run.base
    if layout.tree:
        write_ancestors(block[-(layout.rows**2) :].reshape(layout.rows, layout.rows), rows, runs)
    write_tiles(block, layout, runs, fields[4])
    return block


def pack_block(block_rows: BlockRows, runs: list[Run], layout: Layout) -> Integers:
    """Rows that see everything stored and one another: those of a drafting stage, or of a context."""
    block, fields = blank(layout)
    n = len(block_rows.position)
    fields[0, :n], fields[3, :n], fields[5, :n] = block_rows.token, block_rows.position, block_rows.state
    for run in runs:
        rows = slice(run.first, run.first + run.count)
        fields[1, rows] = run.slot
        fields[2, rows] = np.arange(run.base, run.base + run.count)
        fields[4, rows] = run.base + run.count
    write_tiles(block, layout, runs, fields[4])
    return block


def pack_steps(rows: BlockRows, ahead: int, runs: list[Run], layout: Layout) -> Integers:
    """An autoregressive drafter's rows: each sees what stands before its position, and itself.

    In a tree a run's rows are siblings, which see nothing of it but what their ancestors' table will say. Attention is
    laid out for rows that move on by `ahead` positions.
    """
    block, fields = blank(layout)
    n = len(rows.position)
    fields[0, :n], fields[3, :n], fields[5, :n] = rows.token, rows.position, rows.state
    fields[4, :n] = fields[3, :n] + 1
    for run in runs:
        here = slice(run.first, run.first + run.count)
        fields[1, here], fields[2, here] = run.slot, np.arange(run.base, run.base + run.count)
        if layout.tree:
            fields[6, here] = run.base
    write_tiles(block, layout, runs, fields[4] + ahead)
    return block


def blank(layout: Layout) -> tuple[Integers, Integers]:
    """An empty block and its fields; rows nobody fills are written nowhere and see nothing."""
    block = empty(layout).copy()
    return block, block[: FIELDS * layout.rows].reshape(FIELDS, layout.rows)


@lru_cache(maxsize=256)
def empty(layout: Layout) -> Integers:
    """The block that `blank` copies."""
    block = np.zeros(layout.size, np.int32)
    block[layout.counts + 2] = 1
    fields = block[: FIELDS * layout.rows].reshape(FIELDS, layout.rows)
    fields[2] = fields[5] = -1
    fields[6] = NEVER
    return block


def write_ancestors(table: Integers, rows: Rows, runs: list[Run]) -> None:
    """table[row, j]: the store's entry of the row's ancestor at the run's first position + j, the row itself last.

    Depth by depth rather than row by row: a tree has many rows and few depths.
    """
    parent, position = np.array(rows.parent), np.array(rows.position)
    for run in runs:
        here = np.arange(run.first, run.first + run.count)
        depth = position[here] - position[run.first]
        table[here, depth] = run.base + here - run.first
        for level in range(1, int(depth.max()) + 1):
            below = here[depth == level]
            table[below, :level] = table[parent[below], :level]


def write_tiles(block: Integers, layout: Layout, runs: list[Run], visible: Integers) -> None:
    """Tiles of rows that share keys: in a tree, those of the pieces before its rows begin to have their own."""
    tiles: list[tuple[int, int, int, int]] = []
    longest = 0
    for run in runs:
        end = run.first + run.count
        pieces = -(-int(visible[run.first : end].max()) // KEYS)
        shared = run.base // KEYS * KEYS if layout.tree else NEVER
        longest = max(longest, min(pieces, shared // KEYS))
        for first in range(run.first, end, layout.tile_rows):
            tiles.append((first, min(layout.tile_rows, end - first), run.slot, shared))
    start = FIELDS * layout.rows
    block[start : start + TILE * len(tiles)] = np.array(tiles, np.int32).reshape(-1)
    block[layout.counts : layout.counts + 3] = len(tiles), *units_of(len(tiles), longest)


def units_of(tiles: int, pieces: int) -> tuple[int, int]:
    """(units of the longest tile, pieces a unit): single pieces where they are few, else groups."""
    return (pieces, 1) if tiles * pieces <= FILL else (-(-pieces // GROUP), GROUP)


def bucket_of(rows: int) -> int:
    """Rows of the graph that takes this many: a power of two from 16 to 256, then 320, then multiples of 256."""
    if rows <= 256:
        return max(16, 1 << (rows - 1).bit_length())
    return 320 if rows <= 320 else -(-rows // 256) * 256
