"""Gemma 4: layers of sliding and of full attention, soft-capped logits, and keys and values lent to its assistant.

Every layer keeps all of its positions and a window is a matter of the mask: so rejected rows are cut off by slicing
however long the text is, and branches of a tree are verified together. A row a window back costs memory, not time.
Source: Gemma 4 in Hugging Face transformers (layers, shared keys and values).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from jaxtyping import Float
from torch import Tensor, nn
from transformers import DynamicCache, PretrainedConfig

from dloop.errors import UserError
from dloop.lent import FULL, KINDS, LENT, SLIDING, LentKind, in_rows
from dloop.loop import Target
from dloop.targets.branches import ancestry, depths
from dloop.targets.hf import HFMemory, HFTarget

GEMMA4 = ("gemma4_unified", "gemma4_unified_text", "gemma4", "gemma4_text")  # only their texts are read
ROPE_TYPES = ("default", "proportional")  # whose frequencies are the same in every forward


@dataclass(frozen=True)
class Gemma4Target(HFTarget):
    """A loaded Gemma 4: its texts alone."""

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config.get_text_config()

    @property
    def backbone(self) -> nn.Module:
        inner = self.model.base_model
        return cast(nn.Module, getattr(inner, "language_model", inner))

    @property
    def rope_theta(self) -> float:
        """That of full attention."""
        return float(self.config.rope_parameters[FULL]["rope_theta"])

    @property
    def beyond_fast(self) -> str:
        return "sliding-window"

    @cached_property
    def lends(self) -> Mapping[str, LentKind]:
        """The last layer of each kind that has keys and values of its own, in the order of KINDS."""
        config = self.config
        kinds = config.layer_types[: self.num_layers - (config.num_kv_shared_layers or 0)]
        layers = cast(nn.ModuleList, self.backbone.layers)
        last = {kind: cast(nn.Module, layers[i].self_attn) for i, kind in enumerate(kinds)}
        return {kind: self._lent(kind, last[kind]) for kind in KINDS if kind in last}

    def _lent(self, kind: str, attention: nn.Module) -> LentKind:
        rope = self.config.rope_parameters[kind]
        head_dim = cast(int, attention.head_dim)
        return LentKind(
            heads=cast(nn.Linear, attention.k_proj).out_features // head_dim,
            head_dim=head_dim,
            window=self.config.sliding_window if kind == SLIDING else None,
            rope_theta=float(rope["rope_theta"]),
            turning=float(rope.get("partial_rotary_factor", 1.0)) if rope["rope_type"] == "proportional" else 1.0,
        )

    def open(self, taps: tuple[int, ...] = ()) -> Target:
        return Gemma4Memory(self, taps)

    def run(self, inputs: dict[str, object], taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        if LENT not in taps:
            return super().run(inputs, taps)
        assert taps == (LENT,)
        outputs = self.backbone(**inputs, return_shared_kv_states=True)
        last = cast(Tensor, outputs.last_hidden_state)
        return in_rows(outputs.shared_kv_states, last.shape[1]), last

    def width_of(self, taps: tuple[int, ...]) -> int:
        lent = sum(kind.width for kind in self.lends.values())
        return sum(lent if tap == LENT else self.hidden_size for tap in taps)


@dataclass
class Gemma4Memory(HFMemory):
    """Keys and values of all positions, those behind a window too."""

    def _cache(self) -> DynamicCache:
        """Told nothing of windows, so that no layer forgets: the masks are the same."""
        return DynamicCache()

    def _tree_mask(self, slot: int, parents: list[int]) -> dict[str, Float[Tensor, "1 1 n K"]]:
        """One mask a kind; in sliding layers what is a window or more away is hidden."""
        base = self.committed[slot]
        seen = ancestry(base, parents)
        rows = base + depths(parents)
        near = rows[:, None] - np.concatenate([np.arange(base), rows]) < self.target.config.sliding_window
        return {FULL: self._additive(seen), SLIDING: self._additive(seen & near)}


def rope_parts(raw: Mapping[str, object]) -> list[Mapping[str, object]]:
    """A config with the RoPE of one kind of layers, for each of them; the whole where there is one RoPE."""
    by_kind = raw.get("rope_parameters")
    if not isinstance(by_kind, Mapping):
        return [raw]
    parts = cast(Mapping[str, object], by_kind)
    return [{"rope_parameters": part} for part in parts.values()]


def check_layers(raw: Mapping[str, object], name: str) -> None:
    """Raises UserError for a Gemma 4 config whose rows see more than what stands before them, or unknown layers."""
    kinds = raw.get("layer_types")
    if kinds is not None and not (isinstance(kinds, list) and set(map(str, cast(list[object], kinds))) <= set(KINDS)):
        raise UserError(f"{name}: layer_types={kinds!r:.100} must be a list of {' and '.join(KINDS)}")
    if raw.get("use_bidirectional_attention") == "all":
        raise UserError(
            f"{name} lets every token see those behind it (use_bidirectional_attention='all'), so that no token "
            "follows from the ones before: use a generating checkpoint"
        )
