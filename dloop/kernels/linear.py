"""Matrix products of few rows with large weights: bound by reading the weights once.

The weights are the tall operand (64 or more of their rows a program, what Hopper's matrix instruction wants), the
activations the narrow one. Where a weight has too few rows to fill the chip, the summed dimension is split among
programs and the parts are left for the next kernel to add, in order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dloop.kernels.pdl import launch_options, prefetch, release, wait

UNIT = 128  # a sum is shared out among programs in multiples of this many values


class Tiling(NamedTuple):
    """How a product is cut. `split` decides the order of sums: one choice a weight, for all rows; the rest is speed."""

    width: int  # rows of the weight a program; gated: half of them gates
    depth: int  # summed values a step
    rows: int  # rows of the activations a program: 16 or more
    split: int  # programs that share a sum
    stages: int  # steps in flight
    warps: int


@triton.jit
def linear_kernel(
    x,  # [R, K]
    w,  # [N, K]; gated: [2 N, K], gates first
    y,  # [SPLIT, R, N]
    rows,
    N: tl.constexpr,
    K: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    GATED: tl.constexpr,
    EVEN: tl.constexpr,
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of y = x w^T, or of silu(x w_gate^T) * (x w_up^T). EVEN: no step reaches beyond K."""
    OUT: tl.constexpr = WIDTH // 2 if GATED else WIDTH
    lane = tl.arange(0, WIDTH)
    n = tl.program_id(1) * OUT + lane % OUT
    inside = (n < N)[:, None]
    n = tl.where(n < N, n, 0).to(tl.int64) + lane // OUT * N
    part = tl.program_id(2)
    first = part * STEPS * DEPTH
    r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # rows times a vocabulary pass 2**31
    k = tl.arange(0, DEPTH)
    weights = w + n[:, None] * K + first + k[None, :]
    states = x + r[:, None] * K + first + k[None, :]
    if PDL:
        lines = first + 64 * tl.arange(0, AHEAD)  # 64 values of 2 bytes fill a cache line
        prefetch(w + n[:, None] * K + tl.minimum(lines, K - 1)[None, :])
    wait(PDL)
    acc = tl.zeros((WIDTH, ROWS), tl.float32)
    for step in range(STEPS):
        if EVEN:
            narrow = tl.load(states)
            tall = tl.load(weights)
        else:
            left = K - first - step * DEPTH
            narrow = tl.load(states, mask=k[None, :] < left, other=0.0)
            tall = tl.load(weights, mask=inside & (k[None, :] < left), other=0.0)
        acc = tl.dot(tall, tl.trans(narrow), acc, input_precision="ieee")
        weights += DEPTH
        states += DEPTH
    release(PDL)
    kind = y.dtype.element_ty
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (2, OUT, ROWS)), (1, 2, 0)))
        gate = gate.to(kind).to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(kind).to(tl.float32)
        acc = gate * up.to(kind).to(tl.float32)
    n = tl.program_id(1) * OUT + tl.arange(0, OUT)
    out = y + part.to(tl.int64) * rows * N + r[:, None] * N + n[None, :]
    tl.store(out, tl.trans(acc).to(kind), mask=n[None, :] < N)


def launch(x: Tensor, w: Tensor, tiling: Tiling, gated: bool, pdl: bool) -> Tensor:
    """Run the kernel: [R, K] and [N, K] -> [split, R, N], float32 parts if the sum is split, else of x's type.

    R must be a multiple of the tiling's rows.
    """
    count, depth = x.shape
    out = w.shape[0] // 2 if gated else w.shape[0]
    share = triton.cdiv(triton.cdiv(depth, UNIT), tiling.split) * UNIT
    steps = triton.cdiv(share, tiling.depth)
    ahead = max(1, tiling.depth * min(tiling.stages, steps) // 64)
    y = x.new_empty(tiling.split, count, out, dtype=torch.float32 if tiling.split > 1 else x.dtype)
    grid = (count // tiling.rows, triton.cdiv(out, tiling.width // 2 if gated else tiling.width), tiling.split)
    linear_kernel[grid](
        x, w, y, count, N=out, K=depth, STEPS=steps, ROWS=tiling.rows, WIDTH=tiling.width, DEPTH=tiling.depth,
        GATED=gated, EVEN=share * tiling.split == depth, AHEAD=triton.next_power_of_2(ahead), PDL=pdl,
        num_warps=tiling.warps, num_stages=tiling.stages, **launch_options(pdl),
    )  # fmt: skip
    return y
