"""From logits to the law a token is drawn from, and noise that depends on nothing but (seed, position, token)."""

import math
import secrets
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from dloop.errors import UserError

GREEDY_BELOW = 1e-5  # temperatures under this mean argmax, as in the public implementations


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn. `top_k=0` and `top_p=1.0` are off; one seed a sequence."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise UserError(f"temperature={self.temperature} must be a finite number >= 0; 0 is greedy decoding")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be >= 0; 0 switches it off")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must lie in (0, 1]; 1.0 switches it off")
        if not 0 <= self.seed < 2**63:
            raise UserError(f"seed={self.seed} must lie in [0, 2**63)")

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


def fresh_seed() -> int:
    """A seed for a run that was given none; recorded with the results so that the run can be repeated."""
    return secrets.randbits(62)


def process(logits: Float[Tensor, "n V"], sampling: Sampling) -> Float[Tensor, "n V"]:
    """Temperature, then top-k, then top-p, in float32; forbidden tokens are -inf. Each row by itself.

    The order is the one of transformers' warpers. A token equal to the k-th largest logit stays.
    """
    scores = logits.float() / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < kth, -math.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True)
        probs = ordered.softmax(-1)
        outside = probs.cumsum(-1) - probs >= sampling.top_p  # the token that crosses top_p stays
        scores = scores.masked_fill(outside.scatter(-1, order, outside), -math.inf)
    return scores


def gumbel(seed: int, positions: Int[Tensor, " n"], vocab_size: int) -> Float64[Tensor, "n V"]:
    """Gumbel noise that is a pure function of (seed, absolute position, token id), on the positions' device.

    argmax(processed logits + noise) is then a sample from the softmax, and the same one however rows are packed.
    """
    return -torch.log(-torch.log(uniform(seed, positions, vocab_size)))


def uniform(seed: int, positions: Int[Tensor, " n"], vocab_size: int, stream: int = 0) -> Float64[Tensor, "n V"]:
    """Uniform numbers in (0, 1) with 52 bits, a pure function of (seed, stream, position, token id)."""
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=positions.device)
    row = _mix(positions.to(torch.int64) + _as_int64(_mix_int(seed ^ _mix_int(stream))))
    bits = _mix(row[:, None] + tokens[None, :] * _as_int64(_GOLDEN))
    kept = (bits >> 12) & ((1 << 52) - 1)
    return (kept.double() + 0.5) * 2.0**-52  # (2k + 1) / 2^53: exact, never 0 or 1


# The finaliser of SplitMix64 (Steele, Lea, Flood 2014), in wrapping 64-bit arithmetic.
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)


def _as_int64(value: int) -> int:
    value &= 2**64 - 1
    return value - 2**64 if value >= 2**63 else value


def _mix(values: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        values = values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))  # int64 shifts are arithmetic: mask the sign
        values = values * _as_int64(factor)
    return values


def _mix_int(value: int) -> int:
    value = (value + _GOLDEN) & (2**64 - 1)
    for shift, factor in zip(_SHIFTS, (*_FACTORS, 1), strict=True):
        value = ((value ^ (value >> shift)) * factor) & (2**64 - 1)
    return value
