"""Residual addition and RMS norm in one pass; adds the parts of a split product on the way."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from dloop.kernels.pdl import launch_options, release, wait


@triton.jit
def add_norm_kernel(
    residual,  # [R, D], updated in place
    parts,  # [SPLIT, R, D]
    weight,  # [D]
    normed,  # [R, D]
    rows,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: residual += sum of the parts; normed = residual / rms(residual) * weight."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < D
    gain = tl.load(weight + d, mask=inside, other=0.0)
    release(PDL)
    wait(PDL)
    kind = residual.dtype.element_ty
    x = tl.load(residual + row * D + d, mask=inside, other=0.0)
    if SPLIT > 0:
        delta = tl.zeros((WIDTH,), tl.float32)
        for part in tl.static_range(SPLIT):
            delta += tl.load(parts + (part * rows + row) * D + d, mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) + delta.to(kind).to(tl.float32)).to(kind)
        tl.store(residual + row * D + d, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + EPS)
    y = ((wide * scale).to(kind).to(tl.float32) * gain.to(tl.float32)).to(kind)
    tl.store(normed + row * D + d, y, mask=inside)


def launch(residual: Tensor, parts: Tensor | None, weight: Tensor, eps: float, pdl: bool) -> Tensor:
    """residual [R, D] += sum of parts [S, R, D] (None: nothing), in place; returns the normed rows [R, D]."""
    count, size = residual.shape
    normed = torch.empty_like(residual)
    add_norm_kernel[(count,)](
        residual, residual if parts is None else parts, weight, normed, count, D=size,
        WIDTH=triton.next_power_of_2(size), SPLIT=0 if parts is None else parts.shape[0], EPS=eps, PDL=pdl,
        num_warps=4 if size <= 2048 else 8, **launch_options(pdl),
    )  # fmt: skip
    return normed
