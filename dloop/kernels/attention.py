"""Attention of few rows over long stores, split along the keys at fixed positions.

Keys are read in logical order: entry p of a row is its p-th token, wherever the store keeps it. Sums have one order for
all rows: within a piece of KEYS keys as the matrix unit adds them, then piece by piece within a group, then group by
group. One program adds up a piece or a whole group (a *unit*), whichever fills the chip, and another adds the units; a
row of a tree adds its own pieces there. So a row of a tree, a row of a chain and a row alone get the same bits. Split
attention after "Flash-Decoding" (Dao et al. 2023), online softmax after Milakov and Gimelshein 2018.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dloop.kernels.pdl import launch_options, release, wait
from dloop.kernels.shapes import FILL, GROUP, KEYS, Heads, Place, Store, Tiles

LOG2_E = math.log2(math.e)


@triton.jit
def attend_piece(asked, k, v, at, inside, visible, scale):
    """(top, mass, mixed [D, C]) of C queries over the keys at `at` [KEYS, D]; top in base 2."""
    keys = tl.load(k + at, mask=inside[:, None], other=0.0)
    values = tl.load(v + at, mask=inside[:, None], other=0.0)
    scores = tl.dot(keys, tl.trans(asked), input_precision="ieee") * scale
    scores = tl.where(visible, scores, float("-inf"))
    top = tl.max(scores, 0)
    weight = tl.exp2(scores - tl.where(top == float("-inf"), 0.0, top)[None, :])
    mixed = tl.dot(tl.trans(values), weight.to(v.dtype.element_ty), input_precision="ieee")
    return top, tl.sum(weight, 0), mixed


@triton.jit
def fold(best, total, top, mass):
    """Join two parts of a softmax: (top, mass, factor of the first part's values, factor of the second's).

    Written with explicit fused operations, here and where values are joined, so that no compiler can choose.
    """
    higher = tl.maximum(best, top)
    shift = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, gain = tl.exp2(best - shift), tl.exp2(top - shift)
    return higher, tl.fma(total, shrink, mass * gain), shrink, gain


@triton.jit
def attend_kernel(
    q,  # [R, QUERIES, D]
    k,  # [slots, HEADS, capacity, D]
    v,  # [slots, HEADS, capacity, D]
    visible,  # [R]
    table,  # [T, 4]
    count,  # [3]
    out,  # [units, R, QUERIES, D] float32
    top,  # [units, R, QUERIES] float32, base 2
    mass,  # [units, R, QUERIES] float32
    rows,
    capacity,
    scale,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Work through (tile, unit, key head) items: keys are the tall operand, (row, head of the group) the columns."""
    tiles = tl.load(count)  # the tables were written before the first kernel of the forward
    items = tiles * tl.load(count + 1) * HEADS
    pieces = tl.load(count + 2)
    d = tl.arange(0, D)
    column = tl.arange(0, COLUMNS)
    PER_KEY: tl.constexpr = QUERIES // HEADS
    release(PDL)
    wait(PDL)
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head = item % HEADS
        tile = table + (item // HEADS) % tiles * 4
        unit = item // HEADS // tiles
        row = tl.load(tile) + column // WIDTH
        used = (column // WIDTH < tl.load(tile + 1)) & (column % WIDTH < PER_KEY)
        seen = tl.load(visible + row, mask=used, other=0)
        limit = tl.minimum(tl.max(seen, 0), tl.load(tile + 3))
        end = tl.minimum((unit + 1) * pieces, tl.cdiv(limit, KEYS))
        if unit * pieces < end:
            query = row.to(tl.int64) * QUERIES + head * PER_KEY + column % WIDTH
            asked = tl.load(q + query[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
            start = (tl.load(tile + 2).to(tl.int64) * HEADS + head) * capacity
            best = tl.full((COLUMNS,), float("-inf"), tl.float32)
            total = tl.zeros((COLUMNS,), tl.float32)
            mixed = tl.zeros((D, COLUMNS), tl.float32)
            for piece in range(unit * pieces, end):
                p = piece * KEYS + tl.arange(0, KEYS)
                at = (start + p)[:, None] * D + d[None, :]
                inside = p[:, None] < seen[None, :]
                part, part_mass, values = attend_piece(asked, k, v, at, p < limit, inside, scale)
                best, total, shrink, gain = fold(best, total, part, part_mass)
                mixed = tl.fma(mixed, shrink[None, :], values * gain[None, :])
            place = unit.to(tl.int64) * rows * QUERIES + query
            tl.store(top + place, best, mask=used)
            tl.store(mass + place, total, mask=used)
            tl.store(out + place[:, None] * D + d[None, :], tl.trans(mixed), mask=used[:, None])


@triton.jit
def combine_kernel(
    out,  # [units, R, QUERIES, D] float32
    top,  # [units, R, QUERIES]
    mass,  # [units, R, QUERIES]
    visible,  # [R]
    count,  # [3]
    y,  # [R, QUERIES, D]
    rows,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the units of one query head of one row in order; a row that sees nothing gives zeros.

    One warp and scalars, so that nothing keeps the loads of GROUP units from being in flight together.
    """
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    pieces = tl.load(count + 2)
    units = tl.cdiv(tl.cdiv(tl.load(visible + row), KEYS), pieces)
    query = row * QUERIES + tl.program_id(1)
    release(PDL)
    wait(PDL)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    mixed = tl.zeros((D,), tl.float32)
    for first in range(0, units, GROUP):
        top_g, mass_g = best, total  # units are groups: go on; pieces: they first make up a group
        mixed_g = mixed
        if pieces == 1:
            top_g = tl.full((), float("-inf"), tl.float32)
            mass_g = tl.zeros((), tl.float32)
            mixed_g = tl.zeros((D,), tl.float32)
        for i in tl.static_range(GROUP):
            inside = units > first + i
            place = (first + i) * rows * QUERIES + query
            part = tl.load(top + place, mask=inside, other=float("-inf"))
            part_mass = tl.load(mass + place, mask=inside, other=0.0)
            values = tl.load(out + place * D + d, mask=d < tl.where(inside, D, 0), other=0.0)
            top_g, mass_g, shrink, gain = fold(top_g, mass_g, part, part_mass)
            mixed_g = tl.fma(mixed_g, shrink, values * gain)
        if pieces == 1:
            best, total, shrink, gain = fold(best, total, top_g, mass_g)
            mixed = tl.fma(mixed, shrink, mixed_g * gain)
        else:
            best, total = top_g, mass_g
            mixed = mixed_g
    mean = mixed / tl.where(total > 0, total, 1.0)
    tl.store(y + query * D + d, mean.to(y.dtype.element_ty))


@triton.jit
def combine_tree_kernel(
    q,  # [R, QUERIES, D]
    k,  # [slots, HEADS, capacity, D]
    v,  # [slots, HEADS, capacity, D]
    slot,  # [R]
    visible,  # [R]
    bases,  # [R]
    ancestors,  # [R, depth]
    count,  # [3]
    out,  # [units, R, QUERIES, D] float32
    top,  # [units, R, QUERIES]
    mass,  # [units, R, QUERIES]
    y,  # [R, QUERIES, D]
    rows,
    capacity,
    depth,
    scale,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for one key head of one row that may have its own keys: units that it shares, then its own pieces."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    PER_KEY: tl.constexpr = QUERIES // HEADS
    column = tl.arange(0, COLUMNS)
    used = column < PER_KEY
    d = tl.arange(0, D)
    pieces = tl.load(count + 2)
    seen, base = tl.load(visible + row), tl.load(bases + row)
    start = (tl.load(slot + row).to(tl.int64) * HEADS + head) * capacity
    own = ancestors + row * depth - base
    last = tl.cdiv(seen, KEYS)
    shared = tl.minimum(base // KEYS, last)
    query = row * QUERIES + head * PER_KEY + column
    release(PDL)
    wait(PDL)
    asked = tl.load(q + query[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
    best = tl.full((COLUMNS,), float("-inf"), tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    mixed = tl.zeros((D, COLUMNS), tl.float32)
    for group in range(tl.cdiv(last, GROUP)):
        top_g = tl.full((COLUMNS,), float("-inf"), tl.float32)
        mass_g = tl.zeros((COLUMNS,), tl.float32)
        mixed_g = tl.zeros((D, COLUMNS), tl.float32)
        end = tl.minimum((group + 1) * GROUP, shared)
        for unit in range(group * GROUP // pieces, tl.cdiv(end, pieces)):
            place = (unit + 0 * row) * rows * QUERIES + query  # int64, like the row
            part = tl.load(top + place, mask=used, other=float("-inf"))
            part_mass = tl.load(mass + place, mask=used, other=0.0)
            values = tl.load(out + place[None, :] * D + d[:, None], mask=used[None, :], other=0.0)
            top_g, mass_g, shrink, gain = fold(top_g, mass_g, part, part_mass)
            mixed_g = tl.fma(mixed_g, shrink[None, :], values * gain[None, :])
        for piece in range(tl.maximum(group * GROUP, shared), tl.minimum((group + 1) * GROUP, last)):
            p = piece * KEYS + tl.arange(0, KEYS)
            entry = tl.where(p < base, p, tl.load(own + p, mask=(p >= base) & (p < seen), other=0))
            at = (start + entry)[:, None] * D + d[None, :]
            inside = (p < seen)[:, None] & used[None, :]
            part, part_mass, values = attend_piece(asked, k, v, at, p < seen, inside, scale)
            top_g, mass_g, shrink, gain = fold(top_g, mass_g, part, part_mass)
            mixed_g = tl.fma(mixed_g, shrink[None, :], values * gain[None, :])
        best, total, shrink, gain = fold(best, total, top_g, mass_g)
        mixed = tl.fma(mixed, shrink[None, :], mixed_g * gain[None, :])
    mean = mixed / tl.where(total > 0, total, 1.0)[None, :]
    tl.store(y + query[None, :] * D + d[:, None], mean.to(y.dtype.element_ty), mask=used[None, :])


class Work(NamedTuple):
    """How many programs share the attention of a forward at most, and how many (row, head) columns one takes."""

    programs: int
    columns: int
    pdl: bool


def launch(q: Tensor, store: Store, heads: Heads, place: Place, tiles: Tiles, work: Work) -> Tensor:
    """[R, QUERIES * D] queries over a layer's store -> [R, QUERIES * D]."""
    count, capacity = q.shape[0], store.k.shape[2]
    units = min(triton.cdiv(capacity, KEYS), max(FILL, triton.cdiv(capacity, KEYS * GROUP)))
    width = triton.next_power_of_2(heads.queries // heads.keys)
    out = q.new_empty(units, count, heads.queries, heads.dim, dtype=torch.float32)
    parts = out, torch.empty_like(out[..., 0]), torch.empty_like(out[..., 0])
    scale, extra = heads.dim**-0.5 * LOG2_E, launch_options(work.pdl)
    shape = dict(QUERIES=heads.queries, D=heads.dim, KEYS=KEYS, PDL=work.pdl, num_warps=4)
    attend_kernel[(min(work.programs, tiles.table.shape[0] * units * heads.keys),)](
        q, store.k, store.v, place.visible, tiles.table, tiles.count, *parts, count, capacity, scale, HEADS=heads.keys,
        WIDTH=width, COLUMNS=work.columns, num_stages=3, **shape, **extra,
    )  # fmt: skip
    y = torch.empty_like(q)
    if tiles.ancestors is None:
        combine_kernel[(count, heads.queries)](
            *parts, place.visible, tiles.count, y, count, GROUP=GROUP, **shape | dict(num_warps=1), **extra
        )
    else:
        combine_tree_kernel[(count, heads.keys)](
            q, store.k, store.v, place.slot, place.visible, tiles.base, tiles.ancestors, tiles.count, *parts, y, count,
            capacity, tiles.ancestors.shape[1], scale, HEADS=heads.keys, COLUMNS=max(16, width), GROUP=GROUP,
            num_stages=2, **shape, **extra,
        )  # fmt: skip
    return y
