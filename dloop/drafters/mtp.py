"""Qwen3.5's built-in head for multi-token prediction: one layer of full attention over (token, state) pairs.

A row reads the target's last state, after its norm, and hands on its own, after its norm; embedding and head are the
target's. The tensors `mtp.*` lie in the target's own shards, where transformers leaves them out, or in a checkpoint of
their own beside the target's config.json.
Sources: Qwen3.5's checkpoints and the head's layer in vllm-project/speculators (names, arithmetic); vLLM (chaining).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from dloop.checkpoint import brief, identical
from dloop.drafters.chain import Attend, ChainModel
from dloop.drafters.config import Json, Reader
from dloop.drafters.host import EMBEDDING, HEAD, PublishedConfig, as_published
from dloop.drafters.layers import MLP, NormedAttention, Rotary, WideRMSNorm
from dloop.drafters.memory import KeyValues
from dloop.errors import UserError
from dloop.types import Vocabulary

FAMILY = "mtp-qwen3.5"
DEPTH = 3  # tokens of a stage, as published
PREFIX = "mtp."
TELLING = "pre_fc_norm_hidden.weight"  # of no other model
COPIES = {name + EMBEDDING: EMBEDDING for name in ("", "model.", "model.language_model.")} | {HEAD: HEAD}
MODEL_TYPES = ("qwen3_5", "qwen3_5_text")


@dataclass(frozen=True, kw_only=True)
class MTPConfig(PublishedConfig):
    """What the target's config says of its head."""

    family: ClassVar[str] = FAMILY
    architecture: ClassVar[str] = "Qwen3_5ForConditionalGeneration"
    copies_vocabulary: ClassVar[bool] = True
    reads_layers: ClassVar[bool] = False

    partial_rotary_factor: float  # how much of a head turns with the position

    @property
    def stage_len(self) -> int:
        return DEPTH

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)


def read_mtp(raw: Json, source: str) -> MTPConfig:
    """Parse a Qwen3.5 config, with or without the part that sees images.

    Raises UserError naming the key that is missing or wrong, or that asks for another head.
    """
    text = raw.get("text_config")
    reader = Reader(cast(Json, text) if isinstance(text, Mapping) else raw, source)
    said = reader.raw
    for key, taken in (("mtp_num_hidden_layers", 1), ("mtp_use_dedicated_embeddings", False), ("hidden_act", "silu")):
        if said.get(key) not in (None, taken):
            raise reader.fail(
                f"{key}={brief(said[key])} is another head, which is not supported; use one with {taken}, as Qwen3.5's"
            )
    rope = said.get("rope_parameters")
    turning = Reader(cast(Json, rope) if isinstance(rope, Mapping) else said, source)
    return MTPConfig(
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size"),
        **reader.heads(),  # pyright: ignore[reportArgumentType]
        vocab_size=reader.integer("vocab_size"),
        rms_norm_eps=reader.number("rms_norm_eps", 1.0),
        rope_theta=reader.rope_theta(),
        partial_rotary_factor=turning.number("partial_rotary_factor", 1.01),
        max_positions=reader.integer("max_position_embeddings"),
        attention_bias=reader.boolean("attention_bias") if reader.has("attention_bias") else False,
        target_layer_ids=(),
        num_target_layers=reader.integer("num_hidden_layers"),
        published=as_published(raw),
    )


def is_mtp(raw: Json, names: Callable[[], Iterable[str]]) -> bool:
    """Whether a Qwen3.5 checkpoint holds a head: the config is the target's, so only the tensors tell."""
    return raw.get("model_type") in MODEL_TYPES and any(name.endswith(TELLING) for name in names())


def head_names(names: Iterable[str]) -> list[str]:
    """The head's tensors among a checkpoint's: all, or those with the prefix where a target's layers stand beside."""
    listed = list(names)
    prefixed = [name for name in listed if name.startswith(PREFIX)]
    among = any(".layers." in name for name in listed if not name.startswith(PREFIX))
    return prefixed if prefixed and among else listed


def with_prefix(tensors: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """A head's tensors under their published names, and copies of the target's embedding and head under theirs.

    Such a copy is what vLLM reads. Raises UserError where two tensors of one name differ.
    """
    found: dict[str, Tensor] = {}
    for name in head_names(tensors):
        bare = name.removeprefix(PREFIX)
        key = COPIES.get(bare, PREFIX + bare)
        if key in found and not identical(found[key], tensors[name]):
            raise UserError(f"{source} stores {key} twice, with different values; fetch it again")
        found[key] = tensors[name]
    return found


class CentredRMSNorm(WideRMSNorm):
    """With gains 1 + weight."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__(size, eps)
        nn.init.zeros_(self.weight)

    def gain(self, dtype: torch.dtype) -> Float[Tensor, " D"]:
        return 1.0 + self.weight.to(dtype)


class GatedAttention(NormedAttention):
    """`q_proj` gives each head its query and, after it, a gate on what the head mixed."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config, config.hidden_size)
        self.q_proj = nn.Linear(config.hidden_size, 2 * self.num_heads * self.head_dim, bias=config.attention_bias)
        self.q_norm = CentredRMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = CentredRMSNorm(self.head_dim, config.rms_norm_eps)

    def mixed(self, rows: Float[Tensor, "B n D"], rotary: Rotary, attend: Attend) -> Float[Tensor, "B n D"]:
        """What the rows add to the residual."""
        pairs = self.q_proj(rows).unflatten(-1, (self.num_heads, 2 * self.head_dim)).transpose(1, 2)
        queries, gates = pairs.chunk(2, -1)
        own: KeyValues = self.project(rows, rotary)
        return self.output(attend(rotary.rotate(self.q_norm(queries)), own) * gates.sigmoid())


class HeadLayer(nn.Module):
    """A Qwen3.5 layer of full attention."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.input_layernorm = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = GatedAttention(config)
        self.post_attention_layernorm = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Float[Tensor, "B n D"], rotary: Rotary, attend: Attend) -> Float[Tensor, "B n D"]:
        x = x + self.self_attn.mixed(self.input_layernorm(x), rotary, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """The 15 tensors."""

    def __init__(self, config: MTPConfig) -> None:
        super().__init__()
        self.pre_fc_norm_embedding = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_fc_norm_hidden = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([HeadLayer(config)])
        self.norm = CentredRMSNorm(config.hidden_size, config.rms_norm_eps)


class MTP(ChainModel):
    """The head as a drafter: its one layer, step after step."""

    config: MTPConfig  # pyright: ignore[reportIncompatibleVariableOverride]

    def __init__(self, config: MTPConfig) -> None:
        super().__init__(config)
        self.mtp = Head(config)

    def reads(self, taps: Float[Tensor, "*n F"], last: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return last

    def first(self, features: Float[Tensor, "B n D"]) -> Float[Tensor, "B n D"]:
        return features

    def rows(
        self,
        states: Float[Tensor, "B n D"],
        embedded: Float[Tensor, "B n D"],
        positions: Int[Tensor, "#B n"],
        attend: Attend,
    ) -> Float[Tensor, "B n D"]:
        head = self.mtp
        x = head.fc(torch.cat([head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(states)], -1))
        return head.norm(head.layers[0](x, Rotary.at(positions, self.config, x.dtype), attend))

    def logits(self, states: Float[Tensor, "... D"], vocabulary: Vocabulary) -> Float[Tensor, "... V"]:
        return F.linear(states, vocabulary.head)

    @property
    def kept(self) -> None:
        return None


def no_head(name: str) -> UserError:
    """What to say of a target without a head."""
    return UserError(
        f"draft model mtp: {name} has no {PREFIX}* tensors; a Qwen3.5 checkpoint as released has them, one saved by "
        "transformers has lost them: give the released one, or the checkpoint of a head (for Gemma 4, of its assistant)"
    )
