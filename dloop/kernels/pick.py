"""The most likely token of each row and its log-probability, over a head's own vocabulary.

One kernel goes through the logits once, a share a program; a second joins the shares of a row, in order.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dloop.kernels.pdl import launch_options, release, wait

SHARE = 4096  # logits of one program: of the vocabulary's size alone, so that a row's sum has one order
LOW = tl.constexpr(-1e30)  # below every logit, and finite, so that differences are numbers


@triton.jit
def share_kernel(
    logits,  # [R, V]
    best,  # [R, SHARES] float32
    where,  # [R, SHARES] int32
    mass,  # [R, SHARES] float32
    V: tl.constexpr,
    SHARE: tl.constexpr,
    SHARES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One share of one row: its highest logit, the first token that has it, the sum of exponentials below it."""
    row, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = share * SHARE + tl.arange(0, SHARE)
    release(PDL)
    wait(PDL)
    x = tl.load(logits + row * V + v, mask=v < V, other=float("-inf")).to(tl.float32)
    top = tl.maximum(tl.max(x, 0), LOW)
    at = row * SHARES + share
    tl.store(best + at, top)
    tl.store(where + at, tl.min(tl.where(x == top, v, V - 1), 0))
    tl.store(mass + at, tl.sum(tl.exp(x - top), 0))


@triton.jit
def join_kernel(
    best,  # [R, SHARES]
    where,  # [R, SHARES]
    mass,  # [R, SHARES]
    kept,  # [V] int64, if MAPPED
    out,  # [R, 3] float64
    V: tl.constexpr,
    SHARES: tl.constexpr,
    PADDED: tl.constexpr,
    MAPPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The token of one row, in the target's ids, its log-probability and the top one, which is the same."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PADDED)
    inside = p < SHARES
    release(PDL)
    wait(PDL)
    tops = tl.load(best + row * SHARES + p, mask=inside, other=LOW)
    top = tl.max(tops, 0)
    token = tl.load(where + row * SHARES + p, mask=inside, other=V - 1)
    token = tl.min(tl.where(inside & (tops == top), token, V - 1), 0)  # a token even where no logit is a number
    total = tl.sum(tl.load(mass + row * SHARES + p, mask=inside, other=0.0) * tl.exp(tops - top), 0)
    logp = tl.where(total > 0, 0.0 - tl.log(total), float("nan")).to(tl.float64)  # no law: never a certain token
    if MAPPED:
        token = tl.load(kept + token)
    tl.store(out + row * 3, token.to(tl.float64))
    tl.store(out + row * 3 + 1, logp)
    tl.store(out + row * 3 + 2, logp)


def launch(logits: Float[Tensor, "R V"], kept: Int[Tensor, " V"] | None, pdl: bool) -> Float64[Tensor, "R 3"]:
    """Tokens (as `kept` names them), their log-probabilities and the top ones (the same), packed."""
    (rows, vocab), shares = logits.shape, triton.cdiv(logits.shape[1], SHARE)
    best = torch.empty(rows, shares, device=logits.device)
    mass, where = torch.empty_like(best), torch.empty_like(best, dtype=torch.int32)
    out = torch.empty(rows, 3, dtype=torch.float64, device=logits.device)
    extra = dict(V=vocab, SHARES=shares, PDL=pdl, **launch_options(pdl))
    share_kernel[(rows, shares)](logits, best, where, mass, SHARE=SHARE, num_warps=8, **extra)
    extra |= dict(PADDED=triton.next_power_of_2(shares), MAPPED=kept is not None)
    join_kernel[(rows,)](best, where, mass, where if kept is None else kept, out, num_warps=1, **extra)
    return out
