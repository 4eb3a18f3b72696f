"""From logits to the law a token is drawn from, and noise that depends on nothing but (seed, position, token)."""

import hashlib
import math
import secrets
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Float32, Float64, Int
from torch import Tensor

from dloop.types import Sampling

TARGET_STREAM, DRAFT_STREAM, ACCEPT_STREAM = 0, 1, 2  # independent noise for the same positions


def sample_seed(seed: int, index: int) -> int:
    """A sample's own seed, from the run's and the sample's index: the same in any order and on any rank."""
    digest = hashlib.sha256(f"{seed}:{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # below 2**63


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
        outside[:, 0] = False  # however small top_p is, the likeliest token stays
        scores = scores.masked_fill(outside.scatter(-1, order, outside), -math.inf)
    return scores


def law(logits: Float[Tensor, "n V"], sampling: Sampling) -> Float32[Tensor, "n V"]:
    """The distribution tokens are drawn from: the very float32 probabilities that are judged by later."""
    return process(logits, sampling).softmax(-1)


def draw(probs: Float32[Tensor, "n V"], seed: int, positions: Int[Tensor, " n"], stream: int) -> Int[Tensor, " n"]:
    """One token a row from these probabilities (they need not add up to 1), without a device-to-host copy."""
    return salted_draw(probs, torch.full_like(positions, salt(seed, stream), dtype=torch.int64), positions)


def salted_draw(
    probs: Float32[Tensor, "n V"], salts: Int[Tensor, " n"], positions: Int[Tensor, " n"]
) -> Int[Tensor, " n"]:
    """`draw` for rows that each have a seed of their own."""
    return noisy_argmax(probs, salted_gumbel(salts, positions, probs.shape[-1]))


def noisy_argmax(probs: Float32[Tensor, "n V"], noise: Float64[Tensor, "n V"]) -> Int[Tensor, " n"]:
    """Draw from these probabilities with Gumbel noise."""
    return (probs.double().log() + noise).argmax(-1)


def choose(
    logits: Float[Tensor, "n V"], sampling: Sampling, salts: Int[Tensor, " n"], positions: Int[Tensor, " n"]
) -> Int[Tensor, " n"]:
    """The target's token of each row, without a device-to-host copy: the likeliest, or a draw with the row's noise."""
    if sampling.is_greedy:
        return logits.argmax(-1)
    noise = salted_gumbel(salts, positions, logits.shape[-1])
    return (process(logits, sampling).double() + noise).argmax(-1)


def gumbel(
    seed: int, positions: Int[Tensor, " n"], vocab_size: int, stream: int = TARGET_STREAM
) -> Float64[Tensor, "n V"]:
    """Gumbel noise that is a pure function of (seed, stream, absolute position, token id), on the positions' device.

    argmax(log-probabilities + noise) is then a sample, and the same one however rows are packed.
    """
    return salted_gumbel(torch.full_like(positions, salt(seed, stream), dtype=torch.int64), positions, vocab_size)


def salted_gumbel(salts: Int[Tensor, " n"], positions: Int[Tensor, " n"], vocab_size: int) -> Float64[Tensor, "n V"]:
    """`gumbel` for rows that each have a seed of their own."""
    return -torch.log(-torch.log(salted_uniform(salts, positions, vocab_size)))


def uniform(
    seed: int, positions: Int[Tensor, " n"], vocab_size: int, stream: int = TARGET_STREAM
) -> Float64[Tensor, "n V"]:
    """Uniform numbers in (0, 1) with 52 bits, a pure function of (seed, stream, position, token id)."""
    return salted_uniform(torch.full_like(positions, salt(seed, stream), dtype=torch.int64), positions, vocab_size)


def salt(seed: int, stream: int = TARGET_STREAM) -> int:
    """What a row's noise knows of its seed and stream: 64 bits, signed."""
    return _as_int64(_mix_int(seed ^ _mix_int(stream)))


def salted_uniform(salts: Int[Tensor, " n"], positions: Int[Tensor, " n"], vocab_size: int) -> Float64[Tensor, "n V"]:
    """`uniform` for rows that each have a seed of their own."""
    tokens = torch.arange(vocab_size, dtype=torch.int64, device=positions.device)
    row = _mix(positions.to(torch.int64) + salts)
    bits = _mix(row[:, None] + tokens[None, :] * _as_int64(_GOLDEN))
    kept = (bits >> 12) & ((1 << 52) - 1)
    return (kept.double() + 0.5) * 2.0**-52  # (2k + 1) / 2^53: exact, never 0 or 1


class Drawn(NamedTuple):
    """Tokens of some rows, and the laws they were drawn from (None: they are the most likely ones)."""

    token: Int[Tensor, "..."]
    probs: Float32[Tensor, "... V"] | None


@dataclass(frozen=True)
class Draw:
    """How a drafter picks each row's token: the most likely one, or (with `sampling`) a draw from the row's law."""

    sampling: Sampling | None = None
    position: int = 0  # absolute position of row 0's token
    noise: Float64[Tensor, "k V"] | None = None  # of all rows, where seed and position are only known on the device

    def __call__(self, logits: Float[Tensor, "... V"], row: int) -> Drawn:
        """Pick the token of one row; only the greedy form takes batched rows."""
        if self.sampling is None:
            return Drawn(logits.argmax(-1), None)
        drawn = self._draw(logits[None], row)
        return Drawn(drawn.token[0], None if drawn.probs is None else drawn.probs[0])

    def rows(self, logits: Float[Tensor, "... k V"]) -> Drawn:
        """Pick the tokens of all rows of a stage at once, each from its own law; batched like `__call__`."""
        return Drawn(logits.argmax(-1), None) if self.sampling is None else self._draw(logits, 0)

    def _draw(self, logits: Float[Tensor, "k V"], first: int) -> Drawn:
        assert self.sampling is not None
        probs = law(logits, self.sampling)
        if self.noise is not None:
            return Drawn(noisy_argmax(probs, self.noise[first : first + len(probs)]), probs)
        where = torch.arange(len(logits), device=logits.device) + (self.position + first)
        return Drawn(draw(probs, self.sampling.seed, where, DRAFT_STREAM), probs)


GREEDY = Draw()

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
