"""Residual addition and RMS norm in one pass, adding the parts of a split product on the way; normed pairs of rows."""

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


@triton.jit
def embed_norm_kernel(
    tokens,  # [R]
    embedding,  # [V, D]
    weight,  # [D]
    residual,  # [R, D]
    normed,  # [R, D]
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: residual = its token's embedding; normed = residual / rms(residual) * weight, as `add_norm_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, WIDTH)
    inside = d < D
    gain = tl.load(weight + d, mask=inside, other=0.0)
    release(PDL)
    wait(PDL)
    kind = residual.dtype.element_ty
    x = tl.load(embedding + tl.load(tokens + row).to(tl.int64) * D + d, mask=inside, other=0.0)
    tl.store(residual + row * D + d, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + EPS)
    y = ((wide * scale).to(kind).to(tl.float32) * gain.to(tl.float32)).to(kind)
    tl.store(normed + row * D + d, y, mask=inside)


def launch_embed(tokens: Tensor, embedding: Tensor, weight: Tensor, eps: float, pdl: bool) -> tuple[Tensor, Tensor]:
    """Tokens [R] -> (their embeddings [R, D], the same normed)."""
    count, size = len(tokens), embedding.shape[1]
    residual = embedding.new_empty(count, size)
    normed = torch.empty_like(residual)
    embed_norm_kernel[(count,)](
        tokens, embedding, weight, residual, normed, D=size, WIDTH=triton.next_power_of_2(size), EPS=eps, PDL=pdl,
        num_warps=4 if size <= 2048 else 8, **launch_options(pdl),
    )  # fmt: skip
    return residual, normed


@triton.jit
def pair_kernel(
    tokens,  # [R]
    embedding,  # [V, D]
    states,  # [R, D]
    token_gain,  # [D]
    state_gain,  # [D]
    pairs,  # [R, 2 D]
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One half of one row's pair: its token's embedding, or its state, normed."""
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, WIDTH)
    inside = d < D
    release(PDL)
    wait(PDL)
    if half == 0:
        source, gain = embedding + tl.load(tokens + row).to(tl.int64) * D, token_gain
    else:
        source, gain = states + row * D, state_gain
    wide = tl.load(source + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / D + EPS)
    kind = pairs.dtype.element_ty
    y = (wide * scale).to(kind).to(tl.float32) * tl.load(gain + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(pairs + (row * 2 + half) * D + d, y.to(kind), mask=inside)


def launch_pair(
    tokens: Tensor, embedding: Tensor, states: Tensor, gains: tuple[Tensor, Tensor], eps: float, pdl: bool
) -> Tensor:
    """Tokens [R] and states [R, D] -> [R, 2 D]: embeddings and states side by side, each normed with its gain."""
    count, size = states.shape
    pairs = states.new_empty(count, 2 * size)
    pair_kernel[(count, 2)](
        tokens, embedding, states, *gains, pairs, D=size, WIDTH=triton.next_power_of_2(size), EPS=eps, PDL=pdl,
        num_warps=4 if size <= 2048 else 8, **launch_options(pdl),
    )  # fmt: skip
    return pairs
