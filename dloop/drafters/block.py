"""The block backbone shared by DFlash, DSpark and Domino, and its one stage function.

Source of the architecture: z-lab/dflash and deepseek-ai/DeepSpec (Qwen3 blocks over tapped target states).
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dloop.drafters.config import BlockConfig
from dloop.drafters.draft_vocab import D2T, kept_by, register_maps
from dloop.drafters.gap import new_gap_rows
from dloop.drafters.host import HostDrafter, HostModel
from dloop.drafters.layers import MLP, Mask, NormedAttention, RMSNorm, Rotary
from dloop.drafters.memory import KeyValues, SlotMemory
from dloop.drafters.proposal import Proposal, Unbuilt, read_out
from dloop.drafters.watched import Laws, watched_stage
from dloop.loop import Drafter
from dloop.sampling import GREEDY, Draw
from dloop.stop import watch_of
from dloop.trees.shape import TreeShape
from dloop.types import Features, Stage, StageRequest, Vocabulary


class Layer(nn.Module):
    """Pre-norm attention over [memory ; rows], then the MLP. Memory rows get no input norm."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = NormedAttention(config, config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, rows: Float[Tensor, "B R D"], rotary: Rotary, memory: KeyValues, mask: Mask | None
    ) -> Float[Tensor, "B R D"]:
        rows = rows + self.self_attn(self.input_layernorm(rows), rotary, memory, mask)
        return rows + self.mlp(self.post_attention_layernorm(rows))


class BlockModel(HostModel):
    """Weights of a block drafter under their published names; no memory. Families add heads and `propose`."""

    tells_confidence: ClassVar[bool] = False  # whether what stands beside the logits is each row's confidence logit
    config: BlockConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: BlockConfig) -> None:
        super().__init__(config)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if config.draft_vocab_size is not None:
            register_maps(self, config.draft_vocab_size, config.vocab_size)

    @property
    def kept(self) -> Int[Tensor, " W"] | None:
        """The target's ids of the tokens that it can name; None: all. Logits are over these alone, tokens that come in
        or go out are the target's.
        """
        return None if self.config.draft_vocab_size is None else kept_by(self.get_buffer(D2T))

    def context(self, taps: Float[Tensor, "B n F"]) -> Float[Tensor, "B n D"]:
        """Context features of verified positions: once a position, the same for every layer."""
        return self.hidden_norm(self.fc(taps))

    def project(self, states: Float[Tensor, "B n D"], positions: Int[Tensor, "B n"]) -> list[KeyValues]:
        """Every layer's keys and values of context features or gap rows (final states, joined as they are)."""
        rotary = Rotary.at(positions, self.config, states.dtype)
        return [layer.self_attn.project(states, rotary) for layer in self._layers()]

    def stage(
        self,
        rows: Float[Tensor, "B R D"],
        positions: Int[Tensor, "B R"],
        memory: list[KeyValues],
        mask: Mask | None = None,
    ) -> Float[Tensor, "B R D"]:
        """The one layer arithmetic: block rows over a memory, then the final norm. Training calls it packed with a
        mask, decoding calls it cached without one.
        """
        rotary = Rotary.at(positions, self.config, rows.dtype)
        for layer, keys_values in zip(self._layers(), memory, strict=True):
            rows = layer(rows, rotary, keys_values, mask)
        return self.norm(rows)

    def predicting(self, hidden: Float[Tensor, "... B D"]) -> Float[Tensor, "... k D"]:
        """The rows that carry a label: with same-position labels row 0, the anchor's own, has none."""
        return hidden[..., self.config.label_shift :, :]

    @abstractmethod
    def propose(
        self, hidden: Float[Tensor, "... B D"], anchor: Int[Tensor, "..."], vocabulary: Vocabulary, draw: Draw = GREEDY
    ) -> Proposal:
        """Turn one stage's final states into its tokens, left to right, without a device-to-host copy."""

    @abstractmethod
    def tree(
        self,
        hidden: Float[Tensor, "B D"],
        anchor: Int[Tensor, ""],
        vocabulary: Vocabulary,
        shape: TreeShape,
        nodes: int,
    ) -> Unbuilt:
        """The family's tree of at most so many nodes from one stage's final states, without a device-to-host copy."""

    @abstractmethod
    def teacher_forced(
        self, hidden: Float[Tensor, "... B D"], previous: Int[Tensor, "... k"], vocabulary: Vocabulary
    ) -> tuple[Float[Tensor, "... k W"], Tensor | None]:
        """(logits of whole stages whose previous tokens are known, what else the family's loss reads)."""

    def compile_layers(self) -> None:
        """Let a compiler fuse what runs between the matrix products; names and weights stay."""
        for module in (*self.layers, self.norm, self.hidden_norm):
            module.compile()
        for layer in self._layers():
            vars(layer.self_attn)["project"] = torch.compile(layer.self_attn.project)

    def _layers(self) -> list[Layer]:
        return [layer for layer in self.layers if isinstance(layer, Layer)]


@dataclass(frozen=True)
class BlockDrafter(HostDrafter):
    """A loaded block drafter: weights and facts, no memory."""

    model: BlockModel

    def __post_init__(self) -> None:
        whole = self.config.draft_vocab_size is None
        assert whole == (self.vocabulary.kept is None), "its head has the rows of the tokens that it can name"

    @property
    def config(self) -> BlockConfig:
        return self.model.config

    def open(self) -> Drafter:
        return BlockMemory(self)

    def read_stage(
        self, hidden: Float[Tensor, "B D"], anchor: Int[Tensor, ""], request: StageRequest, position: int
    ) -> Stage:
        """One stage's tokens from its final states; the anchor stands at `position`."""
        nodes = self.nodes(request.index)
        if not nodes:
            draw = Draw(request.sampling, position + 1)
            stage = read_out(self.model.propose(hidden, anchor, self.vocabulary, draw))
            watch = watch_of(request, self.stage_len)
            return stage if watch is None else watched_stage(stage, self.laws(hidden, anchor, stage.tokens), watch)
        assert self.trees is not None and request.sampling is None
        return self.model.tree(hidden, anchor, self.vocabulary, self.trees, nodes).read()

    @torch.no_grad()
    def laws(self, hidden: Float[Tensor, "B D"], anchor: Int[Tensor, ""], tokens: list[int]) -> Laws:
        """What a stage's rows said when these tokens were drawn, computed once more; no row sees its own token."""
        previous = torch.cat([anchor[None], torch.tensor(tokens[:-1], device=anchor.device, dtype=anchor.dtype)])
        logits, beside = self.model.teacher_forced(hidden, previous, self.vocabulary)
        return Laws(logits, self.model.predicting(hidden), beside if self.model.tells_confidence else None)


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
        return self.drafter.read_stage(hidden, ids[0], request, start)

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
