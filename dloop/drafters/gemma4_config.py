"""What the config of a Gemma 4 assistant says.

Source: the released assistants, and the form in which Hugging Face transformers writes them (`per_layer_config`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, cast

from dloop.checkpoint import brief
from dloop.drafters.config import MAX_BASE, Json, Reader
from dloop.drafters.host import PublishedConfig, as_published
from dloop.lent import FULL, KINDS, LENT, SLIDING, LentKind

FAMILY = "mtp-gemma4"
DEPTH = 6  # tokens of a stage, as published
MODEL_TYPES = ("gemma4_unified_assistant", "gemma4_assistant")
ACTIVATION = "gelu_pytorch_tanh"
PUBLISHED = {FULL: ("global_head_dim", "num_global_key_value_heads"), SLIDING: ("head_dim", "num_key_value_heads")}


@dataclass(frozen=True, kw_only=True)
class AssistantConfig(PublishedConfig):
    """The assistant's own sizes, and the shapes of what it reads of its target."""

    family: ClassVar[str] = FAMILY
    architecture: ClassVar[str] = "Gemma4UnifiedAssistantForCausalLM"
    own_head: ClassVar[bool] = True
    reads_layers: ClassVar[bool] = False

    backbone_size: int  # the target's hidden size
    layer_types: tuple[str, ...]
    lent: tuple[tuple[str, LentKind], ...]
    num_centroids: int = 0  # clusters of an ordered vocabulary; 0: none
    top_centroids: int = 0

    @property
    def stage_len(self) -> int:
        return DEPTH

    @property
    def feature_size(self) -> int:
        return self.backbone_size

    @property
    def embedding_size(self) -> int:
        return self.backbone_size

    @property
    def borrows(self) -> Mapping[str, LentKind]:
        return dict(self.lent)

    def for_target(self, num_layers: int) -> "AssistantConfig":
        """The file does not say of how many layers its target is."""
        return replace(self, num_target_layers=num_layers)


def read_assistant(raw: Json, source: str) -> AssistantConfig:
    """Parse an assistant's config. Raises UserError naming the key that is missing or wrong, or of another model."""
    outer, text = Reader(raw, source), raw.get("text_config")
    if not isinstance(text, Mapping):
        raise outer.fail(f"text_config={brief(text)} must be an object; fetch config.json again")
    reader = Reader(cast(Json, text), source)
    check_form(outer, reader)
    kinds = layer_kinds(reader)
    lent = tuple((kind, lent_kind(reader, kind, kinds)) for kind in KINDS)
    sizes = {**reader.heads()}
    for kind, shape in lent:
        if sizes["num_heads"] % shape.heads:
            raise reader.fail(f"num_attention_heads={sizes['num_heads']} must be a multiple of {kind}'s {shape.heads}")
    doubled = 2 if text.get("use_double_wide_mlp") else 1
    return AssistantConfig(
        hidden_size=reader.integer("hidden_size"),
        intermediate_size=reader.integer("intermediate_size") * doubled,
        **sizes,  # pyright: ignore[reportArgumentType]
        vocab_size=reader.integer("vocab_size"),
        rms_norm_eps=reader.number("rms_norm_eps", 1.0),
        rope_theta=dict(lent)[FULL].rope_theta,
        max_positions=reader.integer("max_position_embeddings"),
        attention_bias=reader.boolean("attention_bias") if reader.has("attention_bias") else False,
        target_layer_ids=(LENT,),
        num_target_layers=0,
        published=as_published(raw),
        backbone_size=outer.integer("backbone_hidden_size"),
        layer_types=kinds,
        lent=lent,
        **centroids(outer, reader.integer("vocab_size")),
    )


def check_form(outer: Reader, reader: Reader) -> None:
    """Refuse what names another model than the released ones."""
    layers, shared = reader.integer("num_hidden_layers"), reader.raw.get("num_kv_shared_layers")
    if shared not in (None, 0, layers):
        raise reader.fail(
            f"num_kv_shared_layers={brief(shared)} of {layers} leaves layers with keys of their own; an assistant's "
            "layers read its target's"
        )
    if outer.raw.get("tie_word_embeddings") not in (None, True):
        raise outer.fail("tie_word_embeddings=False is not supported; an assistant's output matrix is its embedding")
    if reader.find("hidden_activation") != ACTIVATION:
        found = brief(reader.raw["hidden_activation"])
        raise reader.fail(f"hidden_activation={found} is not supported; Gemma 4 uses {ACTIVATION!r}")
    for key in ("hidden_size_per_layer_input", "enable_moe_block"):
        if reader.raw.get(key):
            raise reader.fail(f"{key}={brief(reader.raw[key])} is not supported in an assistant; use a released one")


def layer_kinds(reader: Reader) -> tuple[str, ...]:
    """The kind of each layer."""
    found, count = reader.find("layer_types"), reader.integer("num_hidden_layers")
    kinds = tuple(map(str, cast(list[object], found))) if isinstance(found, list) else ()
    if len(kinds) != count or not set(kinds) <= set(KINDS):
        raise reader.fail(f"layer_types={brief(found)} must name {count} layers of {' or '.join(KINDS)}")
    return kinds


def lent_kind(reader: Reader, kind: str, kinds: tuple[str, ...]) -> LentKind:
    """The shape of one kind of layers, which is its target's."""
    rope = rope_of(reader, kind)
    head_dim, heads = shape_of(reader, kind, kinds)
    if head_dim % 2:
        raise reader.fail(f"a head of {kind} has {head_dim} dimensions; it must be even: rotary positions turn pairs")
    whole = rope.raw.get("rope_type") in (None, "default")
    return LentKind(
        heads=heads,
        head_dim=head_dim,
        window=reader.integer("sliding_window") if kind == SLIDING else None,
        rope_theta=rope.number("rope_theta", MAX_BASE),
        turning=1.0 if whole or not rope.has("partial_rotary_factor") else rope.number("partial_rotary_factor", 1.01),
    )


def rope_of(reader: Reader, kind: str) -> Reader:
    """The RoPE of one kind of layers."""
    by_kind = reader.find("rope_parameters")
    found = cast(Json, by_kind).get(kind) if isinstance(by_kind, Mapping) else None
    if not isinstance(found, Mapping):
        raise reader.fail(f"rope_parameters={brief(by_kind)} must have an object for {kind}; fetch config.json again")
    rope = Reader(cast(Json, found), f"{reader.source}, rope_parameters.{kind}")
    if rope.raw.get("rope_type") not in (None, "default", "proportional"):
        raise rope.fail(f"rope_type={brief(rope.raw['rope_type'])} is not supported; Gemma 4 has none such")
    if rope.raw.get("factor") not in (None, 1, 1.0):
        raise rope.fail(f"factor={brief(rope.raw['factor'])} is not supported; Gemma 4 has none")
    return rope


def shape_of(reader: Reader, kind: str, kinds: tuple[str, ...]) -> tuple[int, int]:
    """(size of a head, heads of keys) of one kind: under the release's names, or in transformers' table by layer."""
    raw, table = reader.raw, reader.raw.get("per_layer_config")
    if not isinstance(table, Mapping):
        dim, heads = PUBLISHED[kind]
        alike = kind == FULL and not (raw.get("attention_k_eq_v") and reader.has(heads))
        return reader.integer(dim), reader.integer("num_key_value_heads" if alike else heads)
    own = [cast(Json, table).get(str(index)) or {} for index, each in enumerate(kinds) if each == kind]
    layers = [Reader({**raw, **cast(Json, each)}, reader.source) for each in own if isinstance(each, Mapping)]
    found = {(layer.integer("head_dim"), layer.integer("num_key_value_heads")) for layer in layers or [reader]}
    if len(found) > 1:
        raise reader.fail(f"per_layer_config gives layers of {kind} several shapes, {sorted(found)}; they share one")
    return found.pop()


def centroids(outer: Reader, vocab_size: int) -> dict[str, int]:
    """Clusters of an ordered vocabulary. The sizes may stand in a config that does not use them."""
    if not outer.raw.get("use_ordered_embeddings"):
        return {}
    count, top = outer.integer("num_centroids"), outer.integer("centroid_intermediate_top_k")
    if vocab_size % count or top > count:
        raise outer.fail(
            f"num_centroids={count} must divide vocab_size={vocab_size}, and centroid_intermediate_top_k={top} be at "
            "most as many"
        )
    return {"num_centroids": count, "top_centroids": top}
