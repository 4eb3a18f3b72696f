"""The left-to-right head of a DSpark stage: each token's low-rank bias shifts the next row's logits.

Two kernels a row: the vocabulary's tiles find their best token and their mass, then one program adds them up.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dloop.kernels.pdl import launch_options, prefetch, release, wait

WIDTH = 128  # tokens of the vocabulary a program


@triton.jit
def tile_kernel(
    logits,  # [SEQUENCES * BLOCK, V] of the rows, without bias
    w1,  # [V, RANK]
    w2,  # [V, RANK]
    tokens,  # [SEQUENCES, 1 + BLOCK]; column `row` holds the previous token
    best,  # [SEQUENCES, TILES] float32
    where,  # [SEQUENCES, TILES] int64
    mass,  # [SEQUENCES, TILES] float32
    row,
    sequences,
    V: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of the vocabulary for row `row` of every sequence."""
    tile = tl.program_id(0)
    v = tile * WIDTH + tl.arange(0, WIDTH)
    s = tl.arange(0, COLUMNS)
    r = tl.arange(0, DEPTH)
    inside, used = v < V, s < sequences
    if PDL:
        lines = 64 * tl.arange(0, DEPTH // 64)
        prefetch(w2 + tl.where(inside, v, 0).to(tl.int64)[:, None] * RANK + tl.minimum(lines, RANK - 1)[None, :])
    release(PDL)
    wait(PDL)
    previous = tl.load(tokens + s * (1 + BLOCK) + row, mask=used, other=0)
    narrow = tl.load(w1 + previous[:, None] * RANK + r[None, :], mask=used[:, None] & (r < RANK)[None, :], other=0.0)
    tall = tl.load(
        w2 + v.to(tl.int64)[:, None] * RANK + r[None, :], mask=inside[:, None] & (r < RANK)[None, :], other=0.0
    )
    kind = logits.dtype.element_ty
    bias = tl.dot(tall, tl.trans(narrow), input_precision="ieee").to(kind)
    at = logits + (s.to(tl.int64) * BLOCK + row)[None, :] * V + v[:, None]
    plain = tl.load(at, mask=inside[:, None] & used[None, :], other=0.0)
    shifted = (plain.to(tl.float32) + bias.to(tl.float32)).to(kind).to(tl.float32)
    shifted = tl.where(inside[:, None], shifted, float("-inf"))
    top = tl.max(shifted, 0)
    first = tl.min(tl.where(shifted == top[None, :], v[:, None], V), 0)
    out = s * tl.num_programs(0) + tile
    tl.store(best + out, top, mask=used)
    tl.store(where + out, first.to(tl.int64), mask=used)
    tl.store(mass + out, tl.sum(tl.exp(shifted - top[None, :]), 0), mask=used)


@triton.jit
def pick_kernel(
    best,  # [SEQUENCES, TILES]
    where,  # [SEQUENCES, TILES]
    mass,  # [SEQUENCES, TILES]
    tokens,  # [SEQUENCES, 1 + BLOCK]
    logp,  # [SEQUENCES, BLOCK] float32
    row,
    BLOCK: tl.constexpr,
    TILES: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The likeliest token of one sequence's row, the lowest of equals, and its log-probability."""
    s = tl.program_id(0)
    tile = tl.arange(0, PADDED)
    inside = tile < TILES
    release(PDL)
    wait(PDL)
    tops = tl.load(best + s * TILES + tile, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    token = tl.load(where + s * TILES + tile, mask=inside, other=0)
    token = tl.min(tl.where(inside & (tops == top), token, 2**31 - 1), 0)
    total = tl.sum(tl.load(mass + s * TILES + tile, mask=inside, other=0.0) * tl.exp(tops - top), 0)
    tl.store(tokens + s * (1 + BLOCK) + row + 1, token)
    tl.store(logp + s * BLOCK + row, -tl.log(total))


def launch(
    logits: Float[Tensor, "R V"],
    anchors: Int[Tensor, " S"],
    w1: Float[Tensor, "V r"],
    w2: Float[Tensor, "V r"],
    block: int,
    pdl: bool,
) -> Float64[Tensor, "S 3 k"]:
    """Tokens, their log-probabilities and the top ones (the same), packed, of S sequences of `block` rows each."""
    sequences, (vocab, rank) = len(anchors), w1.shape
    tiles = triton.cdiv(vocab, WIDTH)
    tokens = anchors.new_zeros(sequences, 1 + block, dtype=torch.int64)
    tokens[:, 0] = anchors
    best = torch.empty(sequences, tiles, device=logits.device)
    mass, where = torch.empty_like(best), torch.empty_like(best, dtype=torch.int64)
    logp = torch.empty(sequences, block, device=logits.device)
    extra = launch_options(pdl)
    for row in range(block):
        tile_kernel[(tiles,)](
            logits, w1, w2, tokens, best, where, mass, row, sequences, V=vocab, RANK=rank, BLOCK=block,
            COLUMNS=max(16, triton.next_power_of_2(sequences)), DEPTH=max(64, triton.next_power_of_2(rank)),
            WIDTH=WIDTH, PDL=pdl, num_warps=4, num_stages=2, **extra,
        )  # fmt: skip
        pick_kernel[(sequences,)](
            best, where, mass, tokens, logp, row, BLOCK=block, TILES=tiles, PADDED=triton.next_power_of_2(tiles),
            PDL=pdl, num_warps=4, **extra,
        )  # fmt: skip
    return torch.stack([tokens[:, 1:].double(), logp.double(), logp.double()], 1)
