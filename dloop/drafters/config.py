"""Reading the configuration files of drafters, and writing those of block drafters, in their published layouts.

Sources: DeepSpec's flat layout (Qwen3DSparkModel), SpecForge's nested layout (`dflash_config`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, cast

from dloop.checkpoint import brief
from dloop.drafters.gap import READINGS
from dloop.drafters.host import HostConfig
from dloop.errors import UserError
from dloop.types import GapRows

Json = Mapping[str, object]
MarkovHeadType = Literal["vanilla", "gated", "rnn"]

LIMITS = {  # of whole numbers in a config, drafter's or target's: far beyond all models, far below an overflow
    "hidden_size": (1, 2**17),
    "intermediate_size": (1, 2**20),
    "num_hidden_layers": (1, 1024),
    "num_target_layers": (1, 1024),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 2**14),
    "vocab_size": (1, 2**24),
    "draft_vocab_size": (1, 2**24),
    "target_hidden_size": (1, 2**17),
    "max_position_embeddings": (1, 2**31),
    "block_size": (1, 1024),
    "mask_token_id": (0, 2**24),
    "markov_rank": (0, 2**24),
    "emb_dim": (1, 2**17),
    "gru_hidden_dim": (1, 2**17),
    "pure_draft_prefix_len": (0, 1024),
    "backbone_hidden_size": (1, 2**17),
    "global_head_dim": (1, 2**14),
    "num_global_key_value_heads": (1, 4096),
    "sliding_window": (1, 2**31),
    "num_centroids": (1, 2**24),
    "centroid_intermediate_top_k": (1, 2**24),
}
MAX_BASE = 1e15

DEEPSPEC_ARCHITECTURES = ("Qwen3DSparkModel", "Gemma4DSparkModel")


@dataclass(frozen=True, kw_only=True)
class BlockConfig(HostConfig):
    """What all block drafters share."""

    num_layers: int
    block_size: int  # rows of one stage, B
    label_shift: int  # l: 1 if rows carry same-position labels, 0 if next-token labels
    mask_token_id: int
    gap_rows: GapRows = "producing"  # pyright: ignore[reportIncompatibleVariableOverride]
    # None: all words. Not shown: runs are told apart by how a config is shown, and those before it stay as they are.
    draft_vocab_size: int | None = field(default=None, repr=False)

    @property
    def stage_len(self) -> int:
        return self.block_size - self.label_shift

    def method(self) -> dict[str, object]:
        """What a nested config says about the family's own heads."""
        return {}


@dataclass(frozen=True, kw_only=True)
class DSparkConfig(BlockConfig):
    """DSpark: a Markov head (rank 0: none, as DeepSpec's own "DFlash" files) and an optional confidence head."""

    family: ClassVar[str] = "dspark"
    architecture: ClassVar[str] = "DSparkDraftModel"

    markov_rank: int
    markov_head_type: MarkovHeadType
    confidence_head: bool
    confidence_with_markov: bool

    def method(self) -> dict[str, object]:
        return {
            "projector_type": "dspark",
            "attention_mode": "gqa",
            "markov_rank": self.markov_rank,
            "markov_head_type": self.markov_head_type,
            "enable_confidence_head": self.confidence_head,
            "confidence_head_with_markov": self.confidence_with_markov,
            "confidence_head_alpha": 1.0,
        }


CORRECT = "correct config.json"


class Reader:
    """Typed look-ups in a config file; a missing or ill-typed value is an error that names the file and the key."""

    def __init__(self, raw: Json, source: str) -> None:
        self.raw = raw
        self.source = source
        nested = raw.get("dflash_config")
        self.nested: Json = cast(Json, nested) if isinstance(nested, Mapping) else {}

    def fail(self, message: str) -> UserError:
        return UserError(f"{self.source}: {message}")

    def find(self, key: str) -> object:
        """Nested first, then top level: newer files nest what older ones keep flat. null is as good as absent."""
        for level in (self.nested, self.raw):
            if level.get(key) is not None:
                return level[key]
        raise self.fail(f"the config has no {key!r}; it is needed and never guessed: add it to config.json")

    def has(self, key: str) -> bool:
        return any(level.get(key) is not None for level in (self.nested, self.raw))

    def integer(self, key: str, most: int | None = None) -> int:
        low, high = LIMITS[key][0], most or LIMITS[key][1]
        value = self.find(key)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(f"{key}={brief(value)} must be a whole number from {low} to {high}; {CORRECT}")
        return value

    def number(self, key: str, below: float) -> float:
        """A positive number."""
        value = self.find(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < below:
            raise self.fail(f"{key}={brief(value)} must be a number above 0 and below {below:g}; {CORRECT}")
        return float(value)

    def boolean(self, key: str) -> bool:
        value = self.find(key)
        if not isinstance(value, bool):
            raise self.fail(f"{key}={brief(value)} must be true or false; {CORRECT}")
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.find(key)
        if not isinstance(value, list) or not all(type(x) is int for x in cast(list[object], value)):
            raise self.fail(f"{key}={brief(value)} must be a list of whole numbers; {CORRECT}")
        return tuple(cast(list[int], value))

    def rope_theta(self) -> float:
        """Transformers 5 writes `rope_parameters`, older files `rope_theta`; a missing base is never defaulted. One
        named on purpose wins.
        """
        if (named := self.named_rope()) is not None:
            return named
        bases = {"rope_theta": self.number("rope_theta", MAX_BASE)} if self.has("rope_theta") else {}
        for key in ("rope_parameters", "rope_scaling"):
            parameters = self.raw.get(key) or {}
            if not isinstance(parameters, Mapping):
                raise self.fail(f"{key}={brief(parameters)} must be an object; {CORRECT}")
            rope = cast(Json, parameters)
            kind = next((rope[field] for field in ("rope_type", "type") if rope.get(field) is not None), "default")
            if kind != "default":
                told = f"rope type {brief(kind)} is not supported for drafters; supported: 'default'"
                raise self.fail(f"{told}; use a drafter with it")
            if rope.get("rope_theta") is not None:
                bases[f"{key}.rope_theta"] = Reader(rope, self.source).number("rope_theta", MAX_BASE)
        if len(set(bases.values())) > 1:
            told = " but ".join(f"{key}={base:g}" for key, base in bases.items())
            raise self.fail(f"{told}; a drafter has one RoPE base: keep the one it was trained with")
        return next(iter(bases.values())) if bases else self.number("rope_theta", MAX_BASE)

    def named_rope(self) -> float | None:
        """`dloop_config.rope_theta`: the base the weights were trained with, where that was said on purpose."""
        own = self.raw.get("dloop_config")
        if not isinstance(own, Mapping) or cast(Json, own).get("rope_theta") is None:
            return None
        return Reader(cast(Json, own), f"{self.source}, dloop_config").number("rope_theta", MAX_BASE)

    def heads(self) -> dict[str, int]:
        """The shape of the attention."""
        heads, shared = self.integer("num_attention_heads"), self.integer("num_key_value_heads")
        if heads % shared:
            raise self.fail(
                f"num_attention_heads={heads} must be a multiple of num_key_value_heads={shared}; {CORRECT}"
            )
        head_dim = self.integer("head_dim")
        if head_dim % 2:
            raise self.fail(f"head_dim={head_dim} must be even, as rotary positions turn pairs; {CORRECT}")
        return {"num_heads": heads, "num_kv_heads": shared, "head_dim": head_dim}


def fully_attends(raw: Json) -> bool:
    """Whether `layer_types`, if there are any, is a list that names full attention alone."""
    kinds = raw.get("layer_types")
    return kinds is None or isinstance(kinds, list) and all(k == "full_attention" for k in cast(list[object], kinds))


def read_block(reader: Reader, label_shift: int) -> dict[str, object]:
    """The fields all block families share; refuses what the shared stage function does not compute."""
    raw = reader.raw
    if raw.get("hidden_act") not in (None, "silu"):
        raise reader.fail(f"hidden_act={brief(raw['hidden_act'])} is not supported; block drafters use 'silu'")
    if not fully_attends(raw):
        found = brief(raw["layer_types"])
        raise reader.fail(
            f"layer_types={found} has layers other than 'full_attention', sliding ones say, which are not supported; "
            "use a drafter with full attention"
        )
    if reader.integer("block_size") <= label_shift:
        raise reader.fail(f"block_size={label_shift} leaves no row to draft with: row 0 is the anchor's; correct it")
    whole = reader.integer("vocab_size")
    return {
        "hidden_size": reader.integer("hidden_size"),
        "intermediate_size": reader.integer("intermediate_size"),
        "num_layers": reader.integer("num_hidden_layers"),
        **reader.heads(),
        "vocab_size": whole,
        "rms_norm_eps": reader.number("rms_norm_eps", 1.0),
        "rope_theta": reader.rope_theta(),
        "max_positions": reader.integer("max_position_embeddings"),
        "attention_bias": reader.boolean("attention_bias"),
        "block_size": reader.integer("block_size"),
        "label_shift": label_shift,
        "mask_token_id": reader.integer("mask_token_id"),
        "target_layer_ids": reader.integers("target_layer_ids"),
        "num_target_layers": reader.integer("num_target_layers"),
        "gap_rows": read_gap_rows(reader),
        "draft_vocab_size": reader.integer("draft_vocab_size", whole) if reader.has("draft_vocab_size") else None,
    }


def with_taps(reader: Reader) -> Reader:
    """Files of z-lab's layout may leave the tapped layers to the published rule: evenly spread over 1..n-3."""
    if reader.has("target_layer_ids"):
        return reader
    layers, targets = reader.integer("num_hidden_layers"), reader.integer("num_target_layers")
    spread = [round(1 + i * (targets - 4) / (layers - 1)) for i in range(layers)] if layers > 1 else [targets // 2]
    return Reader({**reader.raw, "target_layer_ids": spread}, reader.source)


def read_gap_rows(reader: Reader) -> GapRows:
    """`dloop_config.gap_rows`, written by our training; released checkpoints carry none and get the default."""
    own = reader.raw.get("dloop_config")
    value = cast(Json, own).get("gap_rows") if isinstance(own, Mapping) else own
    if value is None:
        return "producing"
    if value not in READINGS:
        raise reader.fail(f"dloop_config.gap_rows={brief(value)} is not known; choose one of {', '.join(READINGS)}")
    return value


def read_dspark(raw: Json, source: str) -> DSparkConfig:
    """Parse either published layout. Raises UserError naming the key that is missing or wrong."""
    reader = Reader(raw, source)
    kind = reader.find("markov_head_type") if reader.has("markov_head_type") else "vanilla"
    if kind not in ("vanilla", "gated", "rnn"):
        raise reader.fail(f"markov_head_type={brief(kind)} is not known; choose vanilla, gated or rnn")
    confidence = reader.boolean("enable_confidence_head") if reader.has("enable_confidence_head") else False
    return DSparkConfig(
        **read_block(reader, label_shift=0),  # pyright: ignore[reportArgumentType]
        markov_rank=reader.integer("markov_rank"),
        markov_head_type=kind,
        confidence_head=confidence,
        confidence_with_markov=reader.boolean("confidence_head_with_markov") if confidence else False,
    )


def write_block(config: BlockConfig, dtype: str) -> dict[str, object]:
    """The SpecForge nested layout, with both spellings of the RoPE base and the gap rows the training used."""
    return {
        "architectures": [config.architecture],
        "model_type": "qwen3",
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "layer_types": ["full_attention"] * config.num_layers,
        "max_position_embeddings": config.max_positions,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
        **({} if config.draft_vocab_size is None else {"draft_vocab_size": config.draft_vocab_size}),
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.target_layer_ids),
            **config.method(),
        },
        "dloop_config": {"gap_rows": config.gap_rows},
    }
