"""Attention of few rows over long stores, split along the keys at fixed positions.

Keys are read in logical order: entry p of a row is its p-th token, wherever the store keeps it, so that a row of a
tree, a row of a chain and a row alone add up the same numbers in the same order. Split attention after
"Flash-Decoding" (Dao et al. 2023), online softmax after Milakov and Gimelshein 2018.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dloop.kernels.pdl import launch_options, release, wait
from dloop.kernels.shapes import SPLIT, Heads, Place, Store, Tiles

LOG2_E = math.log2(math.e)
KEYS = 64  # keys a step; part of the order of sums


@triton.jit
def attend_kernel(
    q,  # [R, QUERIES, D]
    k,  # [slots, HEADS, capacity, D]
    v,  # [slots, HEADS, capacity, D]
    visible,  # [R]
    table,  # [T, 6]
    count,  # [2]
    ancestors,  # [R, depth]
    out,  # [splits, R, QUERIES, D] float32
    top,  # [splits, R, QUERIES] float32, base 2
    mass,  # [splits, R, QUERIES] float32
    rows,
    capacity,
    depth,
    scale,
    QUERIES: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    KEYS: tl.constexpr,
    TREE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Work through (tile, split, key head) items: keys are the tall operand, (row, head of the group) the columns."""
    release(PDL)
    wait(PDL)
    tiles = tl.load(count)
    items = tiles * tl.load(count + 1) * HEADS
    d = tl.arange(0, D)
    column = tl.arange(0, COLUMNS)
    PER_KEY: tl.constexpr = QUERIES // HEADS
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        head = item % HEADS
        tile = table + (item // HEADS) % tiles * 6
        split = item // HEADS // tiles
        row = tl.load(tile) + column // GROUP
        used = (column // GROUP < tl.load(tile + 1)) & (column % GROUP < PER_KEY)
        seen = tl.load(visible + row, mask=used, other=0)
        limit = tl.max(seen, 0)
        if (split >= tl.load(tile + 3)) & (split < tl.load(tile + 4)) & (split * SPLIT < limit):
            query = row.to(tl.int64) * QUERIES + head * PER_KEY + column % GROUP
            asked = tl.load(q + query[:, None] * D + d[None, :], mask=used[:, None], other=0.0)
            start = (tl.load(tile + 2).to(tl.int64) * HEADS + head) * capacity
            best = tl.full((COLUMNS,), float("-inf"), tl.float32)
            total = tl.zeros((COLUMNS,), tl.float32)
            mixed = tl.zeros((D, COLUMNS), tl.float32)
            for step in range(SPLIT // KEYS):
                p = split * SPLIT + step * KEYS + tl.arange(0, KEYS)
                entry = p
                if TREE:
                    base = tl.load(tile + 5)
                    own = ancestors + tl.load(tile).to(tl.int64) * depth + p - base
                    entry = tl.where(p < base, p, tl.load(own, mask=(p >= base) & (p < limit), other=0))
                at = (start + entry)[:, None] * D + d[None, :]
                keys = tl.load(k + at, mask=(p < limit)[:, None], other=0.0)
                scores = tl.dot(keys, tl.trans(asked), input_precision="ieee") * scale
                scores = tl.where(p[:, None] < seen[None, :], scores, float("-inf"))
                higher = tl.maximum(best, tl.max(scores, 0))
                shift = tl.where(higher == float("-inf"), 0.0, higher)
                weight = tl.exp2(scores - shift[None, :])
                shrink = tl.exp2(best - shift)
                total = total * shrink + tl.sum(weight, 0)
                values = tl.load(v + at, mask=(p < limit)[:, None], other=0.0)
                mixed = tl.dot(
                    tl.trans(values), weight.to(v.dtype.element_ty), mixed * shrink[None, :], input_precision="ieee"
                )
                best = higher
            place = split.to(tl.int64) * rows * QUERIES + query
            tl.store(top + place, best, mask=used)
            tl.store(mass + place, total, mask=used)
            tl.store(out + place[:, None] * D + d[None, :], tl.trans(mixed), mask=used[:, None])


@triton.jit
def combine_kernel(
    out,  # [splits, R, QUERIES, D] float32
    top,  # [splits, R, QUERIES]
    mass,  # [splits, R, QUERIES]
    visible,  # [R]
    y,  # [R, QUERIES, D]
    rows,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add one row's splits in order, HEADS query heads a program; a row that sees nothing gives zeros."""
    release(PDL)
    wait(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    inside = head < QUERIES
    d = tl.arange(0, D)
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    mixed = tl.zeros((HEADS, D), tl.float32)
    for split in range(tl.cdiv(tl.load(visible + row), SPLIT)):
        place = (split * rows + row) * QUERIES + head
        part = tl.load(top + place, mask=inside, other=0.0)
        higher = tl.maximum(best, part)
        shrink, gain = tl.exp2(best - higher), tl.exp2(part - higher)
        total = total * shrink + tl.load(mass + place, mask=inside, other=0.0) * gain
        values = tl.load(out + place[:, None] * D + d[None, :], mask=inside[:, None], other=0.0)
        mixed = mixed * shrink[:, None] + values * gain[:, None]
        best = higher
    mean = mixed / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(y + (row * QUERIES + head)[:, None] * D + d[None, :], mean.to(y.dtype.element_ty), mask=inside[:, None])


class Work(NamedTuple):
    """How many programs share the attention of a forward at most, and how many (row, head) columns one takes."""

    programs: int
    columns: int
    pdl: bool


def launch(q: Tensor, store: Store, heads: Heads, place: Place, tiles: Tiles, work: Work) -> Tensor:
    """[R, QUERIES * D] queries over a layer's store -> [R, QUERIES * D]."""
    count, capacity = q.shape[0], store.k.shape[2]
    splits = triton.cdiv(capacity, SPLIT)
    group = triton.next_power_of_2(heads.queries // heads.keys)
    out = q.new_empty(splits, count, heads.queries, heads.dim, dtype=torch.float32)
    top, mass = torch.empty_like(out[..., 0]), torch.empty_like(out[..., 0])
    depth = 0 if tiles.ancestors is None else tiles.ancestors.shape[1]
    extra = launch_options(work.pdl)
    items = tiles.table.shape[0] * splits * heads.keys
    attend_kernel[(min(work.programs, items),)](
        q, store.k, store.v, place.visible, tiles.table, tiles.count,
        tiles.table if tiles.ancestors is None else tiles.ancestors, out, top, mass, count, capacity, depth,
        heads.dim**-0.5 * LOG2_E, QUERIES=heads.queries, HEADS=heads.keys, D=heads.dim, GROUP=group,
        COLUMNS=work.columns, SPLIT=SPLIT, KEYS=KEYS, TREE=tiles.ancestors is not None, PDL=work.pdl, num_warps=4,
        num_stages=2, **extra,
    )  # fmt: skip
    y = torch.empty_like(q)
    per = min(4, triton.next_power_of_2(heads.queries))
    combine_kernel[(count, triton.cdiv(heads.queries, per))](
        out, top, mass, place.visible, y, count, QUERIES=heads.queries, D=heads.dim, HEADS=per, SPLIT=SPLIT,
        PDL=work.pdl, num_warps=4, **extra,
    )  # fmt: skip
    return y
