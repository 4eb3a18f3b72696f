"""What all drafters share, block and autoregressive: the shape of a layer, and a loaded drafter without memory."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, cast

from torch import nn

from dloop.gates.learned import Learned
from dloop.lent import LentKind
from dloop.loop import Drafter
from dloop.trees.shape import TreeShape
from dloop.types import GapRows, Vocabulary

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"  # where a layout stores a vocabulary


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """What the configs of all families say."""

    family: ClassVar[str]
    architecture: ClassVar[str]  # what the family's published layout calls its model
    own_head: ClassVar[bool] = False  # whether it has an output matrix of its own, not the target's
    copies_vocabulary: ClassVar[bool] = False  # whether a stored embedding or head can only be a copy of the target's
    reads_layers: ClassVar[bool] = True  # whether it taps layers of the target; else it reads the last state alone

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_positions: int
    attention_bias: bool
    target_layer_ids: tuple[int, ...]  # layers of the target whose outputs are read
    num_target_layers: int
    gap_rows: GapRows | None = None  # None: the family leaves no gap
    own_rope: bool = False  # whether the base was named on purpose, so that it may differ from the target's

    @property
    def stage_len(self) -> int:
        """Tokens of one stage, as the family was published."""
        raise NotImplementedError

    @property
    def tree_len(self) -> int:
        """Depth of one stage's tree, as the family was published."""
        return self.stage_len

    @property
    def rotary_dim(self) -> int:
        """Leading dimensions of a head that turn with the position."""
        return self.head_dim

    @property
    def feature_size(self) -> int:
        """Hidden size of the target's layers."""
        return self.hidden_size

    @property
    def embedding_size(self) -> int:
        """Width of the embedding that it reads tokens with."""
        return self.hidden_size

    @property
    def borrows(self) -> Mapping[str, LentKind]:
        """Layers of the target whose keys and values it reads, by kind, in the order in which they are lent."""
        return {}

    def for_target(self, num_layers: int) -> "HostConfig":
        """What the file leaves open, filled in for a target of so many layers."""
        return self


@dataclass(frozen=True, kw_only=True)
class PublishedConfig(HostConfig):
    """A config of a model of Hugging Face: written as it came, all that is not read here included."""

    published: str  # the whole config.json, as JSON

    def written(self, dtype: str) -> dict[str, object]:
        """The config for tensors of this type."""
        return {**cast(dict[str, object], json.loads(self.published)), "dtype": dtype}


def as_published(raw: Mapping[str, object]) -> str:
    """What `published` keeps of a config: all but the code of others."""
    return json.dumps({key: value for key, value in raw.items() if key != "auto_map"})


class HostModel(nn.Module):
    """Weights of a drafter under their published names; no memory."""

    def __init__(self, config: HostConfig) -> None:
        super().__init__()
        self.config = config


@dataclass(frozen=True)
class HostDrafter(ABC):
    """A loaded drafter: weights and facts, no memory. `open` gives memory."""

    name: str
    family: str
    model: HostModel
    vocabulary: Vocabulary
    folder: Path | None = None
    trees: TreeShape | None = None  # None: every stage is a chain
    obeys_rules: ClassVar[bool] = True  # whether its stages end where a stop rule says
    learned: Learned = field(default_factory=Learned, compare=False, repr=False)  # by gates; all shapes share it

    @property
    def config(self) -> HostConfig:
        return self.model.config

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.target_layer_ids

    @property
    def stage_len(self) -> int:
        """Tokens of one stage."""
        return self.config.stage_len

    @property
    def max_positions(self) -> int | None:
        """Positions it can draft at; None: as many as its target has."""
        return self.config.max_positions

    def with_trees(self, trees: TreeShape | None) -> "HostDrafter":
        """The same drafter with stages of this shape."""
        return replace(self, trees=trees)

    def nodes(self, index: int) -> int:
        """The tree budget of a round's stage `index`; 0: a chain."""
        return 0 if self.trees is None else self.trees.nodes(index)

    @abstractmethod
    def open(self) -> Drafter:
        """Fresh memory."""
