"""The left-to-right head of a DSpark stage: each token's low-rank bias shifts the next row's logits.

One kernel a row: its programs first agree on the previous row's token, from what each left of its share of the
vocabulary, then go through their share for this row. A last one writes the tokens and their log-probabilities.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dloop.kernels.pdl import launch_options, prefetch, release, wait


class Tiling(NamedTuple):
    """How a row is shared out. It decides the order of sums: one choice for all launches."""

    programs: int  # that share the vocabulary, at most
    width: int  # tokens of the vocabulary a step: 64 for every 4 warps
    warps: int
    stages: int  # steps in flight


TILING = Tiling(programs=264, width=64, warps=4, stages=3)  # two programs for each of an H200's multiprocessors
SEQUENCES = 64  # of one launch, at most: their rows of the first factor stay in shared memory
LOW = tl.constexpr(-1e30)  # below every logit, and finite, so that differences are numbers


@triton.jit
def likeliest(
    best,
    where,
    start,
    sequences,
    PROGRAMS: tl.constexpr,
    PADDED: tl.constexpr,
    JOINED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The likeliest token, the lowest of equals, of what the programs left at `start` [sequences, PROGRAMS].

    JOINED columns are read, as few as hold the sequences; of the COLUMNS given, the others say token 0.
    """
    p = tl.arange(0, PADDED)
    s = tl.arange(0, COLUMNS)
    inside = p < PROGRAMS
    if JOINED == 1:
        tops = tl.load(best + start + p, mask=inside, other=LOW)
        tokens = tl.load(where + start + p, mask=inside, other=2**31 - 1)
        found = tl.where(s == 0, tl.min(tl.where(tops == tl.max(tops, 0), tokens, 2**31 - 1), 0), 0)
    else:
        j = tl.arange(0, JOINED)
        at = start + j[None, :] * PROGRAMS + p[:, None]
        inside = inside[:, None] & (j < sequences)[None, :]
        tops = tl.load(best + at, mask=inside, other=LOW)
        tokens = tl.load(where + at, mask=inside, other=2**31 - 1)
        found = tl.min(tl.where(tops == tl.max(tops, 0)[None, :], tokens, 2**31 - 1), 0)
        found = tl.where(j < sequences, found, 0)
        if JOINED < COLUMNS:
            found = tl.sum(tl.where(j[:, None] == s[None, :], found[:, None], 0), 0)
    return found


@triton.jit
def row_kernel(
    logits,  # [SEQUENCES * BLOCK, V] of the rows, without bias
    anchors,  # [SEQUENCES]
    w1,  # [target's vocabulary, RANK]
    w2,  # [V, RANK]
    kept,  # [V] int64, if MAPPED: the target's ids of the head's words
    best,  # [BLOCK, SEQUENCES, PROGRAMS] float32
    where,  # [BLOCK, SEQUENCES, PROGRAMS] int32
    mass,  # [BLOCK, SEQUENCES, PROGRAMS] float32
    row,
    sequences,
    V: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    JOINED: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PADDED: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program's share of the vocabulary for row `row` of every sequence.

    Odd rows go backwards: what the row before read last is still in the L2 cache.
    """
    STEPS: tl.constexpr = (V + WIDTH * PROGRAMS - 1) // (WIDTH * PROGRAMS)
    program = tl.program_id(0)
    s = tl.arange(0, COLUMNS)
    r = tl.arange(0, DEPTH)
    lane = tl.arange(0, WIDTH)
    used = s < sequences
    kind = logits.dtype.element_ty
    if PDL:
        v = ((STEPS - 1) * (row % 2) * PROGRAMS + program) * WIDTH + lane
        lines = tl.minimum(64 * tl.arange(0, DEPTH // 64), RANK - 1)
        prefetch(w2 + tl.where(v < V, v, 0).to(tl.int64)[:, None] * RANK + lines[None, :])
    release(PDL)
    wait(PDL)
    if row == 0:
        previous = tl.load(anchors + s, mask=used, other=0).to(tl.int32)
    else:
        start = (row - 1) * sequences * PROGRAMS
        previous = likeliest(best, where, start, sequences, PROGRAMS, PADDED, JOINED, COLUMNS)
        if MAPPED:
            previous = tl.load(kept + previous, mask=used, other=0).to(tl.int32)
    previous = previous.to(tl.int64)
    narrow = tl.load(w1 + previous[:, None] * RANK + r[None, :], mask=used[:, None] & (r < RANK)[None, :], other=0.0)
    tops = tl.full((WIDTH, COLUMNS), LOW, tl.float32)
    total = tl.zeros((WIDTH, COLUMNS), tl.float32)
    tokens = tl.full((WIDTH, COLUMNS), V - 1, tl.int32)  # a token even where no logit is a number
    for step in range(STEPS):
        turn = tl.where(row % 2 == 1, STEPS - 1 - step, step)
        v = (turn * PROGRAMS + program) * WIDTH + lane
        inside = v < V
        tall = tl.load(
            w2 + v.to(tl.int64)[:, None] * RANK + r[None, :], mask=inside[:, None] & (r < RANK)[None, :], other=0.0
        )
        at = logits + (s.to(tl.int64) * BLOCK + row)[None, :] * V + v[:, None]
        plain = tl.load(at, mask=inside[:, None] & used[None, :], other=0.0)  # in flight while the product is made
        bias = tl.dot(tall, tl.trans(narrow), input_precision="ieee").to(kind)
        shifted = (plain.to(tl.float32) + bias.to(tl.float32)).to(kind).to(tl.float32)
        shifted = tl.where(inside[:, None], shifted, float("-inf"))
        higher = tl.maximum(tops, shifted)
        total = total * tl.exp(tops - higher) + tl.exp(shifted - higher)
        tokens = tl.where((shifted > tops) | ((shifted == tops) & (v[:, None] < tokens)), v[:, None], tokens)
        tops = higher
    top = tl.max(tops, 0)
    out = (row * sequences + s) * PROGRAMS + program
    tl.store(best + out, top, mask=used)
    tl.store(where + out, tl.min(tl.where(tops == top[None, :], tokens, V - 1), 0), mask=used)
    tl.store(mass + out, tl.sum(total * tl.exp(tops - top[None, :]), 0), mask=used)


@triton.jit
def finish_kernel(
    best,  # [BLOCK, SEQUENCES, PROGRAMS]
    where,  # [BLOCK, SEQUENCES, PROGRAMS]
    mass,  # [BLOCK, SEQUENCES, PROGRAMS]
    kept,  # [V] int64, if MAPPED
    out,  # [SEQUENCES, 3, BLOCK] float64
    sequences,
    BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PADDED: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of one row of one sequence, its log-probability and the top one, which is the same."""
    s, row = tl.program_id(0), tl.program_id(1)
    p = tl.arange(0, PADDED)
    inside = p < PROGRAMS
    at = (row * sequences + s) * PROGRAMS + p
    release(PDL)
    wait(PDL)
    tops = tl.load(best + at, mask=inside, other=LOW)
    top = tl.max(tops, 0)
    token = tl.load(where + at, mask=inside, other=2**31 - 1)
    token = tl.min(tl.where(tops == top, token, 2**31 - 1), 0)
    if MAPPED:
        token = tl.load(kept + token)
    total = tl.sum(tl.load(mass + at, mask=inside, other=0.0) * tl.exp(tops - top), 0)
    logp = tl.where(total > 0, 0.0 - tl.log(total), float("nan")).to(tl.float64)  # no law: never a certain token
    tl.store(out + s * 3 * BLOCK + row, token.to(tl.float64))
    tl.store(out + (s * 3 + 1) * BLOCK + row, logp)
    tl.store(out + (s * 3 + 2) * BLOCK + row, logp)


def launch(
    logits: Float[Tensor, "R W"],
    anchors: Int[Tensor, " S"],
    factors: tuple[Float[Tensor, "V r"], Float[Tensor, "W r"]],
    kept: Int[Tensor, " W"] | None,
    block: int,
    pdl: bool,
) -> Float64[Tensor, "S 3 k"]:
    """Tokens, their log-probabilities and the top ones (the same), packed, of S sequences of `block` rows each.

    `kept` names the words of logits and second factor; anchors, the first factor's rows and what is told are named so.
    """
    if len(anchors) > SEQUENCES:
        parts = zip(logits.split(SEQUENCES * block), anchors.split(SEQUENCES), strict=False)  # spare rows come last
        return torch.cat([launch(rows, own, factors, kept, block, pdl) for rows, own in parts])
    sequences, (vocab, rank) = len(anchors), factors[1].shape
    cut = TILING
    programs = min(cut.programs, triton.cdiv(vocab, cut.width))
    best = torch.empty(block, sequences, programs, device=logits.device)
    mass, where = torch.empty_like(best), torch.empty_like(best, dtype=torch.int32)
    shape = dict(BLOCK=block, PROGRAMS=programs, PADDED=triton.next_power_of_2(programs), PDL=pdl)
    shape |= dict(MAPPED=kept is not None)
    names = where if kept is None else kept
    joined, extra = triton.next_power_of_2(sequences), launch_options(pdl)
    for row in range(block):
        row_kernel[(programs,)](
            logits, anchors, *factors, names, best, where, mass, row, sequences, V=vocab, RANK=rank, JOINED=joined,
            COLUMNS=max(16, joined), DEPTH=max(64, triton.next_power_of_2(rank)), WIDTH=cut.width,
            num_warps=cut.warps, num_stages=cut.stages, **shape, **extra,
        )  # fmt: skip
    out = torch.empty(sequences, 3, block, dtype=torch.float64, device=logits.device)
    finish_kernel[(sequences, block)](best, where, mass, names, out, sequences, num_warps=4, **shape, **extra)
    return out
