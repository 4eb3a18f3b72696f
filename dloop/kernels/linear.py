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


class Tiling(NamedTuple):
    """How a product is cut. `depth` and `split` decide the order of sums: one choice a weight, for all rows."""

    width: int  # rows of the weight a program
    depth: int  # summed values a step
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
    AHEAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of y = x w^T, or of silu(x w_gate^T) * (x w_up^T)."""
    n = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    part = tl.program_id(2)
    first = part * STEPS * DEPTH
    r = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    weights = w + n.to(tl.int64)[:, None] * K + first + k[None, :]
    states = x + r[:, None] * K + first + k[None, :]
    inside = n[:, None] < N
    if PDL:
        lines = first + 64 * tl.arange(0, AHEAD)  # 64 values of 2 bytes fill a cache line
        prefetch(w + tl.where(inside, n.to(tl.int64)[:, None], 0) * K + tl.minimum(lines, K - 1)[None, :])
    release(PDL)
    wait(PDL)
    acc = tl.zeros((WIDTH, ROWS), tl.float32)
    up = tl.zeros((WIDTH, ROWS), tl.float32)
    for step in range(STEPS):
        left = K - first - step * DEPTH
        narrow = tl.load(states, mask=k[None, :] < left, other=0.0)
        tall = tl.load(weights, mask=inside & (k[None, :] < left), other=0.0)
        acc = tl.dot(tall, tl.trans(narrow), acc, input_precision="ieee")
        if GATED:
            tall = tl.load(weights + N * K, mask=inside & (k[None, :] < left), other=0.0)
            up = tl.dot(tall, tl.trans(narrow), up, input_precision="ieee")
        weights += DEPTH
        states += DEPTH
    if GATED:
        gate = acc.to(y.dtype.element_ty).to(tl.float32)
        gate = (gate * tl.sigmoid(gate)).to(y.dtype.element_ty).to(tl.float32)
        acc = gate * up.to(y.dtype.element_ty).to(tl.float32)
    out = y + part.to(tl.int64) * rows * N + r[:, None] * N + n[None, :]
    tl.store(out, tl.trans(acc).to(y.dtype.element_ty), mask=n[None, :] < N)


def launch(x: Tensor, w: Tensor, tiling: Tiling, gated: bool, pdl: bool) -> Tensor:
    """Run the kernel: [R, K] and [N, K] -> [split, R, N], float32 parts if the sum is split, else of x's type.

    R must be a multiple of 16; up to 128 rows go through one program, more through several.
    """
    count, depth = x.shape
    out = w.shape[0] // 2 if gated else w.shape[0]
    rows = tile_rows(count)
    steps = triton.cdiv(triton.cdiv(depth, tiling.depth), tiling.split)
    ahead = max(1, tiling.depth * min(tiling.stages, steps) // 64)
    y = x.new_empty(tiling.split, count, out, dtype=torch.float32 if tiling.split > 1 else x.dtype)
    grid = (count // rows, triton.cdiv(out, tiling.width), tiling.split)
    linear_kernel[grid](
        x, w, y, count, N=out, K=depth, STEPS=steps, ROWS=rows, WIDTH=tiling.width, DEPTH=tiling.depth, GATED=gated,
        AHEAD=triton.next_power_of_2(ahead), PDL=pdl, num_warps=tiling.warps, num_stages=tiling.stages,
        **launch_options(pdl),
    )  # fmt: skip
    return y


def tile_rows(count: int) -> int:
    """Rows of one program: a power of two from 16 to 128 that divides the count."""
    return min(128, count & -count)
