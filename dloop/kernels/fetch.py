"""Integers from the host's pinned memory, read by a kernel: a copy engine takes longer to hand over than to copy."""

import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor

from dloop.kernels.pdl import launch_options, release, wait

SIZE = 1024  # integers of one program


@triton.jit
def fetch_kernel(
    host,  # [n], in pinned memory
    block,  # [n]
    n,
    SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program's share."""
    i = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    release(PDL)
    wait(PDL)
    tl.store(block + i, tl.load(host + i, mask=i < n, other=0), mask=i < n)


def launch(host: Int[Tensor, " n"], block: Int[Tensor, " n"], pdl: bool) -> None:
    """Fill `block` with what stands in `host` when the kernel runs."""
    programs = triton.cdiv(len(host), SIZE)
    fetch_kernel[(programs,)](host, block, len(host), SIZE=SIZE, PDL=pdl, num_warps=4, **launch_options(pdl))
