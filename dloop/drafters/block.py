"""The block backbone shared by DFlash, DSpark and Domino, and its one stage function.

Source of the architecture: z-lab/dflash and deepseek-ai/DeepSpec (Qwen3 blocks over tapped target states).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dloop.drafters.config import BlockConfig
from dloop.drafters.gap import new_gap_rows
from dloop.drafters.memory import KeyValues, SlotMemory, join
from dloop.drafters.proposal import Proposal, read_out
from dloop.loop import Drafter
from dloop.sampling import GREEDY, Draw
from dloop.types import Features, Stage, StageRequest, Vocabulary


class Rotary(NamedTuple):
    """Cosines and sines of some positions, ready to be applied to [B, H, n, d]."""

    cos: Float[Tensor, "B 1 n d"]
    sin: Float[Tensor, "B 1 n d"]


class RMSNorm(nn.Module):
    """Variance in float32, cast back, then the weight: Qwen3's order."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """Non-causal attention of block rows over a memory and over one another."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        bias, hidden = config.attention_bias, config.hidden_size
        self.q_proj = nn.Linear(hidden, self.num_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, self.num_kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def project(self, states: Float[Tensor, "B n D"], rotary: Rotary) -> KeyValues:
        """Keys (normed, rotated) and values (neither) of any states: context features, gap rows, block rows."""
        keys = self.k_norm(self._heads(self.k_proj(states), self.num_kv_heads))
        return KeyValues(rotate(keys, rotary), self._heads(self.v_proj(states), self.num_kv_heads))

    def forward(
        self, rows: Float[Tensor, "B R D"], rotary: Rotary, memory: KeyValues, mask: Bool[Tensor, "B 1 R S"] | None
    ) -> Float[Tensor, "B R D"]:
        """Attend over [memory ; rows]; `mask` (True = visible) covers all S of them, None shows everything."""
        batch, count, _ = rows.shape
        queries = rotate(self.q_norm(self._heads(self.q_proj(rows), self.num_heads)), rotary)
        keys, values = join(memory, self.project(rows, rotary))
        groups = self.num_heads // self.num_kv_heads
        # The heads of a group share keys: fold them into the rows instead of copying the keys.
        folded = queries.reshape(batch, self.num_kv_heads, groups * count, self.head_dim)
        seen = None if mask is None else mask.repeat(1, 1, groups, 1)
        mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=seen, scale=self.head_dim**-0.5)
        heads = mixed.reshape(batch, self.num_heads, count, self.head_dim)
        return self.o_proj(heads.transpose(1, 2).reshape(batch, count, -1))

    def _heads(self, x: Float[Tensor, "B n W"], heads: int) -> Float[Tensor, "B H n d"]:
        return x.unflatten(-1, (heads, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """Gated linear unit with SiLU."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Float[Tensor, "B R D"]) -> Float[Tensor, "B R D"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm attention over [memory ; rows], then the MLP. Memory rows get no input norm."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, rows: Float[Tensor, "B R D"], rotary: Rotary, memory: KeyValues, mask: Bool[Tensor, "B 1 R S"] | None
    ) -> Float[Tensor, "B R D"]:
        rows = rows + self.self_attn(self.input_layernorm(rows), rotary, memory, mask)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class BlockModel(nn.Module):
    """Weights of a block drafter under their published names; no memory. Families add heads and `propose`."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def context(self, taps: Float[Tensor, "B n F"]) -> Float[Tensor, "B n D"]:
        """Context features of verified positions: once a position, the same for every layer."""
        return self.hidden_norm(self.fc(taps))

    def project(self, states: Float[Tensor, "B n D"], positions: Int[Tensor, "B n"]) -> list[KeyValues]:
        """Every layer's keys and values of context features or gap rows (final states, joined as they are)."""
        rotary = self.rotary(positions, states.dtype)
        return [layer.self_attn.project(states, rotary) for layer in self._layers()]

    def stage(
        self,
        rows: Float[Tensor, "B R D"],
        positions: Int[Tensor, "B R"],
        memory: list[KeyValues],
        mask: Bool[Tensor, "B 1 R S"] | None = None,
    ) -> Float[Tensor, "B R D"]:
        """The one layer arithmetic: block rows over a memory, then the final norm. Training calls it packed with a
        mask, decoding calls it cached without one.
        """
        rotary = self.rotary(positions, rows.dtype)
        for layer, keys_values in zip(self._layers(), memory, strict=True):
            rows = layer(rows, rotary, keys_values, mask)
        return self.norm(rows)

    def rotary(self, positions: Int[Tensor, "B n"], dtype: torch.dtype) -> Rotary:
        """Rotate-half RoPE; angles in float32 at least, cast like the states afterwards."""
        wide = torch.promote_types(dtype, torch.float32)
        steps = torch.arange(0, self.config.head_dim, 2, device=positions.device, dtype=wide)
        frequencies = 1.0 / self.config.rope_theta ** (steps / self.config.head_dim)
        angles = (positions[..., None].to(wide) * frequencies).repeat(1, 1, 2)
        return Rotary(angles.cos().to(dtype)[:, None], angles.sin().to(dtype)[:, None])

    def predicting(self, hidden: Float[Tensor, "... B D"]) -> Float[Tensor, "... k D"]:
        """The rows that carry a label: with same-position labels row 0, the anchor's own, has none."""
        return hidden[..., self.config.label_shift :, :]

    @abstractmethod
    def propose(
        self, hidden: Float[Tensor, "... B D"], anchor: Int[Tensor, "..."], vocabulary: Vocabulary, draw: Draw = GREEDY
    ) -> Proposal:
        """Turn one stage's final states into its tokens, left to right, without a device-to-host copy."""

    @abstractmethod
    def teacher_forced(
        self, hidden: Float[Tensor, "... B D"], previous: Int[Tensor, "... k"], vocabulary: Vocabulary
    ) -> tuple[Float[Tensor, "... k V"], Tensor | None]:
        """(logits of whole stages whose previous tokens are known, what else the family's loss reads)."""

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


def rotate(x: Float[Tensor, "B H n d"], rotary: Rotary) -> Float[Tensor, "B H n d"]:
    """Apply rotate-half RoPE."""
    first, second = x.chunk(2, -1)
    return x * rotary.cos + torch.cat([-second, first], -1) * rotary.sin


@dataclass(frozen=True)
class BlockDrafter:
    """A loaded block drafter: weights and facts, no memory."""

    name: str
    family: str
    model: BlockModel
    vocabulary: Vocabulary
    folder: Path | None = None

    @property
    def config(self) -> BlockConfig:
        return self.model.config

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    def open(self) -> Drafter:
        return BlockMemory(self)


@dataclass
class SlotState:
    """One sequence: keys and values, and the final states of the stages drafted since the last `extend`."""

    memory: SlotMemory = field(default_factory=SlotMemory)
    hidden: list[Float[Tensor, "B D"]] = field(default_factory=list[Tensor])


class BlockMemory:
    """The drafting side of the loop for block families. Law: committed rows + a speculative tail.

    A further stage appends the draft hidden states of the stages before it to the tail; `extend` and the next
    round's first stage drop them, so that nothing computed from unverified states survives a verification.
    """

    def __init__(self, drafter: BlockDrafter) -> None:
        self.drafter = drafter
        self.slots: dict[int, SlotState] = {}

    @property
    def stage_len(self) -> int:
        return self.drafter.config.stage_len

    @torch.no_grad()
    def extend(self, slot: int, position: int, tokens: list[int], features: Features) -> None:
        if position == 0:
            self.slots[slot] = SlotState()
        state = self.slots[slot]
        state.memory.drop_tail()
        state.hidden.clear()
        assert state.memory.committed == position
        positions = torch.arange(position, position + len(tokens), device=features.taps.device)[None]
        state.memory.append(self.drafter.model.project(self.drafter.model.context(features.taps[None]), positions))
        state.memory.commit()

    def draft(self, requests: Sequence[StageRequest]) -> list[Stage]:
        """One stage a request; this twin answers them one after the other."""
        return [self._stage(request) for request in requests]

    @torch.no_grad()
    def _stage(self, request: StageRequest) -> Stage:
        state, model, config = self.slots[request.slot], self.drafter.model, self.drafter.config
        if request.index == 0:
            state.memory.drop_tail()
            state.hidden.clear()
        else:
            self._fill_gap(state, request.index)
        weight = self.drafter.vocabulary.embedding
        ids = torch.full((config.block_size,), config.mask_token_id, device=weight.device)
        ids[0] = request.anchor
        start = state.memory.committed + request.index * config.stage_len
        positions = torch.arange(start, start + config.block_size, device=weight.device)[None]
        hidden = model.stage(F.embedding(ids, weight)[None], positions, state.memory.layers())[0]
        state.hidden.append(hidden)
        draw = Draw(request.sampling, start + 1)
        return read_out(model.propose(hidden, ids[0], self.drafter.vocabulary, draw))

    def _fill_gap(self, state: SlotState, index: int) -> None:
        """Append the earlier stages' own final states as context of the positions nobody has verified yet."""
        config = self.drafter.config
        rows = new_gap_rows(config.gap_rows, index, config.stage_len, config.label_shift)
        if not rows:  # a stage of one token has no state between its two anchors
            return
        states = torch.stack([state.hidden[row.stage][row.row] for row in rows])[None]
        first = state.memory.committed + rows[0].offset  # offsets are consecutive in every reading
        positions = torch.arange(first, first + len(rows), device=states.device)[None]
        state.memory.append(self.drafter.model.project(states, positions))
