"""Programmatic dependent launch: a kernel may start while the one before it still runs (Hopper and later).

Every kernel here calls `wait` before it touches what another kernel writes, and `release` once it has begun; only
weights, which nothing writes, may be touched before `wait`.
"""

import triton
import triton.language as tl


def launch_options(pdl: bool) -> dict[str, bool]:
    """What a launch is told; Triton's interpreter knows no such option."""
    return {"launch_pdl": True} if pdl else {}


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until all that earlier kernels wrote can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def release(PDL: tl.constexpr):
    """Let the next kernel start."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch(pointers):
    """Ask for one cache line a pointer to be brought into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )
