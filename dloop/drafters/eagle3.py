"""EAGLE-3: one Llama layer over (token, state) pairs, features of three target layers, a vocabulary of its own.

Sources: SafeAILab/EAGLE (architecture, key names, decoding), SpecForge (config, checkpoint layout).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from dloop.checkpoint import brief
from dloop.drafters.chain import Attend, ChainModel
from dloop.drafters.config import Json, Reader, fully_attends
from dloop.drafters.draft_vocab import kept_by, register_maps
from dloop.drafters.host import HostConfig
from dloop.drafters.layers import MLP, Attention, RMSNorm, Rotary
from dloop.drafters.memory import KeyValues
from dloop.types import Vocabulary

DEPTH = 7  # tokens of a chain: the length of the published training-time test
TREE_DEPTH = 8  # levels of a tree: the published depth argument 7 counts the expansions after the first level
NUM_TAPS = 3
TAPS = "eagle_aux_hidden_state_layer_ids"
LATER = ("fc_norm", "norm_before_fc", "norm_before_residual", "mlp_bias", "parallel_drafting")  # another arithmetic
OTHER = ("use_sliding_window", "quantization_config")  # what a Llama layer may have and this one has not


@dataclass(frozen=True, kw_only=True)
class Eagle3Config(HostConfig):
    """EAGLE-3: the sizes that are its own. No `target_layer_ids` yet: the published rule, once the target is known."""

    family: ClassVar[str] = "eagle3"
    architecture: ClassVar[str] = "LlamaForCausalLMEagle3"
    own_head: ClassVar[bool] = True

    target_hidden_size: int
    draft_vocab_size: int

    @property
    def stage_len(self) -> int:
        return DEPTH

    @property
    def tree_len(self) -> int:
        return TREE_DEPTH

    @property
    def feature_size(self) -> int:
        return self.target_hidden_size

    def for_target(self, num_layers: int) -> "Eagle3Config":
        """What the file leaves open, filled in for a target of so many layers."""
        taps = self.target_layer_ids or published_taps(num_layers)
        return replace(self, target_layer_ids=taps, num_target_layers=self.num_target_layers or num_layers)


def published_taps(num_layers: int) -> tuple[int, ...]:
    """Low, middle, high: the layers whose outputs the public trainers read."""
    return 1, num_layers // 2 - 1, num_layers - 4


def read_eagle3(raw: Json, source: str) -> Eagle3Config:
    """Parse SpecForge's or SafeAILab's config. What they leave out means what it means to a Llama layer: no bias, heads
    that divide the hidden size, the whole vocabulary. Raises UserError naming the key that is missing or wrong.
    """
    reader = with_head_dim(Reader(raw, source))
    check_plain(reader)
    if reader.integer("num_hidden_layers") != 1:
        found = brief(raw["num_hidden_layers"])
        raise reader.fail(f"num_hidden_layers={found} is not supported; use a checkpoint of one layer, as EAGLE-3 has")
    hidden, vocabulary = reader.integer("hidden_size"), reader.integer("vocab_size")
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        **reader.heads(),  # pyright: ignore[reportArgumentType]
        vocab_size=vocabulary,
        rms_norm_eps=reader.number("rms_norm_eps", 1.0),
        rope_theta=reader.rope_theta(),
        own_rope=reader.named_rope() is not None,
        max_positions=reader.integer("max_position_embeddings"),
        attention_bias=reader.boolean("attention_bias") if reader.has("attention_bias") else False,
        target_layer_ids=read_taps(reader),
        num_target_layers=reader.integer("num_target_layers") if reader.has("num_target_layers") else 0,
        target_hidden_size=reader.integer("target_hidden_size") if reader.has("target_hidden_size") else hidden,
        draft_vocab_size=reader.integer("draft_vocab_size") if reader.has("draft_vocab_size") else vocabulary,
    )


def check_plain(reader: Reader) -> None:
    """Refuse what names another model than the published one. Null is as good as absent."""
    raw = reader.raw
    later = "a later EAGLE-3 variant, which is not supported; use a plain one"
    for key in LATER:
        if raw.get(key):
            raise reader.fail(f"{key}={brief(raw[key])} is {later}")
    if raw.get("norm_output") not in (None, True):
        raise reader.fail(f"norm_output={brief(raw['norm_output'])} is {later}")
    for key in OTHER:
        if raw.get(key):
            raise reader.fail(f"{key}={brief(raw[key])} is not supported; use a checkpoint without it")
    if raw.get("hidden_act") not in (None, "silu"):
        raise reader.fail(f"hidden_act={brief(raw['hidden_act'])} is not supported; use a checkpoint with 'silu'")
    if not fully_attends(raw):
        found = brief(raw["layer_types"])
        raise reader.fail(f"layer_types={found} is not supported; use a checkpoint that attends to everything")
    for key in ("dloop_config", "eagle_config"):
        if raw.get(key) is not None and not isinstance(raw[key], Mapping):
            raise reader.fail(f"{key}={brief(raw[key])} must be an object; fetch config.json again")


def with_head_dim(reader: Reader) -> Reader:
    """Llama's rule where the config does not say it; the weights' shapes tell whether it holds."""
    if reader.has("head_dim"):
        return reader
    hidden, heads = reader.integer("hidden_size"), reader.integer("num_attention_heads")
    return Reader({**reader.raw, "head_dim": hidden // heads}, reader.source)


def read_taps(reader: Reader) -> tuple[int, ...]:
    """The output layers that `eagle_config` names, as SpecForge counts them; () for the published rule.

    Raises UserError for other layers at the top level: there some count a layer's output and some its input.
    """
    own, taps = reader.raw.get("eagle_config"), tuple[int, ...]()
    if isinstance(own, Mapping) and cast(Json, own).get(TAPS) is not None:
        taps = Reader(cast(Json, own), reader.source).integers(TAPS)
        if len(taps) != NUM_TAPS:
            raise reader.fail(f"{TAPS}={brief(list(taps))} must name {NUM_TAPS} layers; correct config.json")
    for key in (TAPS, "target_layer_ids"):
        if (given := reader.raw.get(key)) not in (None, list(taps)):
            raise reader.fail(
                f"{key}={brief(given)} at the top level may count outputs of layers or inputs; "
                f"keep eagle_config.{TAPS} alone, which counts outputs"
            )
    return taps


def write_eagle3(config: Eagle3Config, dtype: str) -> dict[str, object]:
    """SpecForge's config, with both spellings of the RoPE base; once more where it was named on purpose."""
    found: dict[str, object] = {
        "architectures": [config.architecture],
        "model_type": "llama",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "target_hidden_size": config.target_hidden_size,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    if config.target_layer_ids != published_taps(config.num_target_layers):
        found["eagle_config"] = {TAPS: list(config.target_layer_ids)}
    return found | ({"dloop_config": {"rope_theta": config.rope_theta}} if config.own_rope else {})


class Midlayer(nn.Module):
    """A Llama layer whose attention reads token and state side by side; the residual is the state as it came."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, states: Float[Tensor, "B n D"], embedded: Float[Tensor, "B n D"], rotary: Rotary, attend: Attend
    ) -> Float[Tensor, "B n D"]:
        return self.after(states, attend(*self.before(states, embedded, rotary)))

    def before(
        self, states: Float[Tensor, "B n D"], embedded: Float[Tensor, "B n D"], rotary: Rotary
    ) -> tuple[Float[Tensor, "B H n d"], KeyValues]:
        """What attention takes: queries, and the rows' own keys and values."""
        pairs = torch.cat([self.input_layernorm(embedded), self.hidden_norm(states)], -1)
        return self.self_attn.queries(pairs, rotary), self.self_attn.project(pairs, rotary)

    def after(self, states: Float[Tensor, "B n D"], mixed: Float[Tensor, "B H n d"]) -> Float[Tensor, "B n D"]:
        """The residual with what attention mixed and the MLP adds."""
        states = states + self.self_attn.output(mixed)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3(ChainModel):
    """The EAGLE-3 drafter. What a row hands on is its output before the final norm."""

    config: Eagle3Config  # pyright: ignore[reportIncompatibleVariableOverride]
    d2t: Int[Tensor, " W"]  # what is added to a draft id to give the target's
    t2d: Bool[Tensor, " V"]  # whether the draft vocabulary holds a token

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.fc = nn.Linear(NUM_TAPS * config.target_hidden_size, config.hidden_size, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        register_maps(self, config.draft_vocab_size, config.vocab_size)

    def first(self, features: Float[Tensor, "B n F"]) -> Float[Tensor, "B n D"]:
        return self.fc(features)

    def rows(
        self,
        states: Float[Tensor, "B n D"],
        embedded: Float[Tensor, "B n D"],
        positions: Int[Tensor, "#B n"],
        attend: Attend,
    ) -> Float[Tensor, "B n D"]:
        return self.midlayer(states, embedded, Rotary.at(positions, self.config, states.dtype), attend)

    def compile_layers(self) -> None:
        for name in ("before", "after"):
            vars(self.midlayer)[name] = torch.compile(getattr(self.midlayer, name))

    def logits(self, states: Float[Tensor, "... D"], vocabulary: Vocabulary) -> Float[Tensor, "... W"]:
        return self.lm_head(self.norm(states))

    @property
    def kept(self) -> Int[Tensor, " W"]:
        return kept_by(self.d2t)
