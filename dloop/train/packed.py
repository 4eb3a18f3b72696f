"""Many stages of one sequence in one forward: the deployed loop's layout, packed with a mask.

Sequence of T tokens, A anchors, blocks of B rows. The rows of all anchors stand side by side; each sees the context
features before its own anchor, its own chain's gap rows, and its own block, never anything of another anchor.
Anchors go in groups, each over its own copy of the context: a row's own chain is a few keys, those of all anchors are
more than the context, and all but a few of them would be computed for nothing.
Source of the layout: z-lab/dflash and DeepSpec (first stage); the loop stages continue it.
"""

from dataclasses import dataclass, field
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from dloop.drafters.block import BlockModel
from dloop.drafters.gap import new_gap_rows
from dloop.drafters.memory import KeyValues, join
from dloop.train.anchors import Anchors
from dloop.train.pieces import recomputed
from dloop.types import Vocabulary

GROUP = 16  # anchors that share their keys: as few as still make a matrix product of a group's rows


@dataclass
class PackedStages:
    """A chain of stages for every anchor of a batch, with ground-truth tokens. Gradients flow through the gap rows."""

    model: BlockModel
    vocabulary: Vocabulary
    tokens: Int[Tensor, "B T"]
    anchors: Anchors
    memory: list[KeyValues]
    offsets: Int[Tensor, "B 1"]  # RoPE position of each sample's first token
    hidden: list[Float[Tensor, "B A R D"]] = field(default_factory=list[Tensor])
    recompute: bool = False  # a stage anew for the gradient

    @classmethod
    def begin(
        cls,
        model: BlockModel,
        vocabulary: Vocabulary,
        tokens: Int[Tensor, "B T"],
        taps: Float[Tensor, "B T F"],
        anchors: Anchors,
        offsets: Int[Tensor, " B"] | None = None,
    ) -> "PackedStages":
        """Project the context features of all positions, once for all anchors and stages.

        `offsets`: the RoPE position of each sample's first token; None: 0.
        """
        first = torch.zeros_like(tokens[:, :1]) if offsets is None else offsets[:, None]
        positions = first + torch.arange(tokens.shape[1], device=tokens.device)
        groups = cls.groups(anchors.positions.shape[1])
        memory = [spread(layer, groups) for layer in model.project(model.context(taps), positions)]
        return cls(model, vocabulary, tokens, anchors, memory, first)

    @classmethod
    def groups(cls, num_anchors: int) -> int:
        """How many groups the anchors of a sequence stand in, each with its own copy of the context."""
        return num_groups(num_anchors)

    @property
    def block_size(self) -> int:
        return self.model.config.block_size

    def starts(self, stage_index: int) -> Int[Tensor, "B A"]:
        """Where the stage's own anchor stands in the sample: the last token of the stage before."""
        return self.anchors.positions + stage_index * self.model.config.stage_len

    def forward(self) -> Float[Tensor, "B A R D"]:
        """Run the next stage of all chains; its final states, kept for the stages after it."""
        index = len(self.hidden)
        if index:
            self._fill_gap(index)
        starts = self.starts(index)
        positions = (starts[..., None] + torch.arange(self.block_size, device=starts.device)).flatten(1)
        rows, positions = self._grouped(self._rows(starts)), self._grouped(positions + self.offsets)
        stage = partial(recomputed, self.model.stage) if self.recompute else self.model.stage
        hidden = stage(rows, positions, list(self.memory), self.mask())
        self.hidden.append(hidden.reshape(*starts.shape, self.block_size, -1))
        return self.hidden[-1]

    def _grouped(self, x: Tensor) -> Tensor:
        """[B, rows of all anchors, ...] as [B x groups, rows of a group's anchors, ...]."""
        return x.reshape(len(self.memory[0].keys), -1, *x.shape[2:])

    def mask(self) -> Bool[Tensor, "b 1 R S"] | BlockMask:
        """Which of [context ; gap rows ; block rows] each packed row of a group sees."""
        anchors = self._grouped(self.anchors.positions)
        owners = self.owners()
        before = torch.arange(self.tokens.shape[1], device=anchors.device) < anchors[..., None]
        context = before.repeat_interleave(self.block_size, dim=1)
        own = owners[-context.shape[1] :, None] == owners[None]
        return torch.cat([context, own.expand(len(anchors), -1, -1)], -1)[:, None]

    def owners(self) -> Int[Tensor, " s"]:
        """Whose each of [gap rows ; block rows] is: the number of its chain in the group."""
        chain = torch.arange(self._grouped(self.anchors.positions).shape[1], device=self.tokens.device)
        counts = (*self._gap_counts(), self.block_size)  # rows of a chain, appended stage after stage for all anchors
        return torch.cat([chain.repeat_interleave(count) for count in counts])

    def _gap_counts(self) -> list[int]:
        config = self.model.config
        stages = range(1, len(self.hidden) + 1)
        counts = [len(new_gap_rows(config.gap_rows, s, config.stage_len, config.label_shift)) for s in stages]
        return [count for count in counts if count]

    def _rows(self, starts: Int[Tensor, "B A"]) -> Float[Tensor, "B R D"]:
        """[embedding of the ground-truth anchor, mask x (B-1)] for every chain."""
        width = self.tokens.shape[1]
        ids = self.tokens.gather(1, starts.clamp(max=width - 1))  # chains that start beyond the end weigh nothing
        ids = F.pad(ids[..., None], (0, self.block_size - 1), value=self.model.config.mask_token_id)
        return F.embedding(ids.flatten(1), self.vocabulary.embedding)

    def _fill_gap(self, index: int) -> None:
        """Append earlier stages' own states, as decoding does."""
        config = self.model.config
        rows = new_gap_rows(config.gap_rows, index, config.stage_len, config.label_shift)
        if not rows:
            return
        states = torch.stack([self.hidden[row.stage][:, :, row.row] for row in rows], 2)
        offsets = torch.arange(
            rows[0].offset, rows[-1].offset + 1, device=states.device
        )  # consecutive in every reading
        positions = (self.anchors.positions[..., None] + offsets).flatten(1)
        added = self.model.project(self._grouped(states.flatten(1, 2)), self._grouped(positions + self.offsets))
        self.memory = [join(old, new) for old, new in zip(self.memory, added, strict=True)]


def num_groups(num_anchors: int) -> int:
    """As many equal groups as there can be of GROUP anchors or more."""
    return max((n for n in range(1, num_anchors // GROUP + 1) if num_anchors % n == 0), default=1)


def spread(memory: KeyValues, groups: int) -> KeyValues:
    """A copy of every sequence's keys and values for each of its groups."""
    return KeyValues(*(x[:, None].expand(-1, groups, -1, -1, -1).flatten(0, 1) for x in memory))
