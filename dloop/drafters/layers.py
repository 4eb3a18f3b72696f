"""The layer parts that drafters share: RMSNorm, rotary positions, grouped attention over a memory, the gated MLP.

Source of the arithmetic: the Llama and Qwen3 blocks of Hugging Face transformers.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, FlexKernelOptions, flex_attention

from dloop.drafters.host import HostConfig
from dloop.drafters.memory import KeyValues, join

# Few rows go through the same kernel: the one made for decoding finds no tiles for masks like ours.
FLEX_OPTIONS: FlexKernelOptions = {"FORCE_USE_FLEX_ATTENTION": True}
Mask: TypeAlias = Bool[Tensor, "#B 1 n S"] | BlockMask  # a block mask calls for flex attention


@functools.cache
def compiled_flex() -> Callable[..., Tensor]:
    """Flex attention as a kernel, compiled once a process; without a compiler it holds all scores."""
    return torch.compile(flex_attention)


class Rotary(NamedTuple):
    """Cosines and sines of some positions, ready to be applied to the first r dimensions of [B, H, n, d]."""

    cos: Float[Tensor, "B 1 n r"]
    sin: Float[Tensor, "B 1 n r"]

    @classmethod
    def at(cls, positions: Int[Tensor, "B n"], config: HostConfig, dtype: torch.dtype) -> "Rotary":
        """Rotate-half RoPE; angles in float32 at least, for any position, cast like the states afterwards."""
        wide = torch.promote_types(dtype, torch.float32)
        steps = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=wide)
        return cls.turning(positions, 1.0 / config.rope_theta ** (steps / config.rotary_dim), dtype)

    @classmethod
    def turning(cls, positions: Int[Tensor, "B n"], frequencies: Float[Tensor, " h"], dtype: torch.dtype) -> "Rotary":
        """With these frequencies, one a pair of dimensions."""
        angles = (positions[..., None].to(frequencies.dtype) * frequencies).repeat(1, 1, 2)
        return cls(angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None])

    def rotate(self, x: Float[Tensor, "B H n d"]) -> Float[Tensor, "B H n d"]:
        size = self.cos.shape[-1]  # of a head that turns in part, the leading dimensions
        turning, rest = (x, x[..., :0]) if size == x.shape[-1] else (x[..., :size], x[..., size:])
        first, second = turning.chunk(2, -1)
        turned = turning * self.cos + torch.cat([-second, first], -1) * self.sin
        return torch.cat([turned, rest], -1) if rest.shape[-1] else turned


class RMSNorm(nn.Module):
    """Variance in float32, cast back, then the weight: Qwen3's order, and Llama's."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class WideRMSNorm(RMSNorm):
    """The weight is multiplied in float32 too, and the product cast back: the order of Qwen3.5 and Gemma."""

    def gain(self, dtype: torch.dtype) -> Float[Tensor, " D"]:
        """What the normed values are multiplied by."""
        return self.weight.to(dtype)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * self.gain(wide.dtype)).to(x.dtype)


class Attention(nn.Module):
    """Grouped attention of rows over a memory. `width`: of what the projections read."""

    def __init__(self, config: HostConfig, width: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        bias = config.attention_bias
        self.q_proj = nn.Linear(width, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=bias)

    def queries(self, rows: Float[Tensor, "B n W"], rotary: Rotary) -> Float[Tensor, "B H n d"]:
        """Rotated queries."""
        return rotary.rotate(self.heads(self.q_proj(rows)))

    def project(self, rows: Float[Tensor, "B n W"], rotary: Rotary) -> KeyValues:
        """Keys (rotated) and values (not) of any rows."""
        return KeyValues(rotary.rotate(self.heads(self.k_proj(rows))), self.heads(self.v_proj(rows)))

    def output(self, mixed: Float[Tensor, "B H n d"]) -> Float[Tensor, "B n D"]:
        """Mixed values of all heads, back in the hidden size."""
        return self.o_proj(mixed.transpose(1, 2).flatten(2))

    def heads(self, x: Float[Tensor, "B n W"]) -> Float[Tensor, "B H n d"]:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class NormedAttention(Attention):
    """With an RMSNorm of every query's and key's head, before the rotation."""

    def __init__(self, config: HostConfig, width: int) -> None:
        super().__init__(config, width)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def queries(self, rows: Float[Tensor, "B n W"], rotary: Rotary) -> Float[Tensor, "B H n d"]:
        return rotary.rotate(self.q_norm(self.heads(self.q_proj(rows))))

    def project(self, rows: Float[Tensor, "B n W"], rotary: Rotary) -> KeyValues:
        keys = self.k_norm(self.heads(self.k_proj(rows)))
        return KeyValues(rotary.rotate(keys), self.heads(self.v_proj(rows)))

    def forward(
        self, rows: Float[Tensor, "B R W"], rotary: Rotary, memory: KeyValues, mask: Mask | None
    ) -> Float[Tensor, "B R D"]:
        """Attend over [memory ; rows]; `mask` (True = visible) covers all S of them, None shows everything."""
        queries = self.queries(rows, rotary)
        return self.output(attend(queries, join(memory, self.project(rows, rotary)), mask))


class MLP(nn.Module):
    """Gated linear unit."""

    def __init__(self, config: HostConfig, activation: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "B R D"]) -> Float[Tensor, "B R D"]:
        return self.down_proj(self.activation(self.gate_proj(x)) * self.up_proj(x))


def attend(
    queries: Float[Tensor, "B H n d"],
    seen: KeyValues,
    mask: Mask | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B H n d"]:
    """Softmax attention of grouped heads; `mask` True = visible, None shows everything. `scale`: 1 / sqrt(d)."""
    if isinstance(mask, BlockMask):
        run = compiled_flex() if queries.is_cuda else flex_attention
        return run(queries, *seen, block_mask=mask, scale=scale, enable_gqa=True, kernel_options=FLEX_OPTIONS)
    batch, heads, count, dim = queries.shape
    shared = seen.keys.shape[1]
    groups = heads // shared
    # The heads of a group share keys: fold them into the rows instead of copying the keys.
    folded = queries.reshape(batch, shared, groups * count, dim)
    visible = None if mask is None else mask.repeat(1, 1, groups, 1)
    mixed = F.scaled_dot_product_attention(folded, seen.keys, seen.values, attn_mask=visible, scale=scale)
    return mixed.reshape(batch, heads, count, dim)
