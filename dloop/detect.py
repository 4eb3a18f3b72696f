"""What a config says its checkpoint is: a target that can be decoded exactly, or a drafter and of which family."""

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import cast

from dloop.checkpoint import brief
from dloop.drafters.config import DEEPSPEC_ARCHITECTURES, LIMITS, Json, Reader, fully_attends
from dloop.drafters.gemma4_config import FAMILY as GEMMA_FAMILY
from dloop.drafters.gemma4_config import MODEL_TYPES as ASSISTANTS
from dloop.drafters.mtp import FAMILY as MTP_FAMILY
from dloop.drafters.mtp import is_mtp
from dloop.errors import UserError
from dloop.targets import gemma4
from dloop.targets.adapters import TARGETS
from dloop.targets.recurrent import LINEAR, RECURRENT

BLOCK_FAMILIES = ("dflash", "dspark", "domino")
CHAIN_FAMILIES = ("eagle3", MTP_FAMILY, GEMMA_FAMILY)
FAMILIES = (*BLOCK_FAMILIES, *CHAIN_FAMILIES)
HEADS = {  # tensors that only one family has
    "markov_head.": "dspark",
    "prefix_gru.": "domino",
    "midlayer.": "eagle3",
    "mtp.": MTP_FAMILY,
    "pre_projection.": GEMMA_FAMILY,
}
EAGLE3_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
DEEPSPEC_EAGLE3 = ("Qwen3Eagle3Model", "Gemma4Eagle3Model", "Eagle3DraftModel")
ROPE_TYPES = ("default", "linear", "yarn", "llama3")  # whose frequencies are the same in every forward


def check_target(raw: Json, name: str) -> None:
    """Refuse what is not a target, or not one that can be decoded exactly here."""
    if is_drafter(raw):
        raise UserError(
            f"{name} is a drafter{of_layers(raw)}, not a target; "
            "give it as the drafter (--draft-model) and its target as the target (--model)"
        )
    kind = raw.get("model_type")
    if kind not in TARGETS:
        raise UserError(f"{name} is a {brief(kind)} model; supported targets: {', '.join(TARGETS)}")
    raw = text_config(raw, name)
    if kind in gemma4.GEMMA4:
        gemma4.check_layers(raw, name)
    elif not (mixes_linear(raw) if kind in RECURRENT else fully_attends(raw)) or raw.get("use_sliding_window"):
        raise UserError(
            f"{name} has layers without full attention (layer_types={brief(raw.get('layer_types'))}); the cache of "
            "sliding-window layers, for one, cannot be shortened here: use a full-attention model"
        )
    quantised = raw.get("quantization_config")
    if quantised is not None:
        method = cast(Json, quantised).get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise UserError(
            f"{name} is quantised (quantization_config: {brief(method)}), which is not supported; "
            "use the checkpoint that is not quantised"
        )
    if raw.get("transformers_weights") is not None:
        raise UserError(f"{name} names other weights in its config (transformers_weights); remove that key")
    for key in LIMITS:
        if raw.get(key) is not None:
            Reader(raw, f"{name}/config.json").integer(key)
    for part in gemma4.rope_parts(raw) if kind in gemma4.GEMMA4 else (raw,):
        check_rope(part, name, (*ROPE_TYPES, *gemma4.ROPE_TYPES) if kind in gemma4.GEMMA4 else ROPE_TYPES)


def text_config(raw: Json, name: str) -> Json:
    """The part of a config that describes the layers; the whole, with what it says of the text, where there is one."""
    text = raw.get("text_config")
    if text is None:
        return raw
    if not isinstance(text, Mapping):
        raise UserError(f"{name}: text_config={brief(text)} must be an object; fetch config.json again")
    return {**raw, **cast(Json, text)}


def mixes_linear(raw: Json) -> bool:
    """Whether layers are of linear or of full attention, and some of each."""
    kinds = raw.get("layer_types")
    return isinstance(kinds, list) and {LINEAR, "full_attention"} == set(map(str, cast(list[object], kinds)))


def check_rope(raw: Json, name: str, types: Collection[str] = ROPE_TYPES) -> None:
    """Refuse rotary embeddings that depend on how long a forward is: plain and speculative decoding would differ."""
    for key in ("rope_parameters", "rope_scaling"):
        parameters = raw.get(key)
        if parameters is None:
            continue
        if not isinstance(parameters, Mapping):
            raise UserError(f"{name}: {key}={brief(parameters)} must be an object; fetch config.json again")
        rope = cast(Json, parameters)
        for kind in (rope[field] for field in ("rope_type", "type") if rope.get(field) is not None):
            if kind not in types:
                raise UserError(
                    f"{name} has RoPE of type {brief(kind)}; types whose frequencies change with the length of a "
                    "forward, as longrope and dynamic do, cannot be decoded exactly, because a verification is "
                    f"longer than a plain step: use a model with one of {', '.join(types)}"
                )
        if any(isinstance(value, Mapping) for value in rope.values()):
            raise UserError(f"{name}: {key} differs by layer, which is not supported; use a model with one RoPE")


def is_drafter(raw: Json) -> bool:
    """Whether a config has fields that only drafters have."""
    own = ("dflash_config", "target_layer_ids", "block_size", "draft_vocab_size")
    named = raw.get("architectures") == [EAGLE3_ARCHITECTURES[0]] or raw.get("model_type") in ASSISTANTS
    return named or any(raw.get(key) is not None for key in own)


def of_layers(raw: Json) -> str:
    """For what target a drafter's config says that it is."""
    layers = raw.get("num_target_layers")
    return "" if layers is None else f" for a target of {brief(layers)} layers"


def architecture_of(raw: Json, name: str) -> str:
    """The first architecture a config names."""
    architectures = raw.get("architectures") or ["(none)"]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise UserError(
            f"{name}: architectures={brief(architectures)} must be a list of names; fetch config.json again"
        )
    return architectures[0]


def detect_family(raw: Json, name: str, tensors: Callable[[], Iterable[str]] = tuple) -> str:
    """The host family, from the config, in the published order of precedence.

    `tensors` gives the names of the stored tensors; asked only where a config may be a target's as well: that of
    SafeAILab's EAGLE-3 and that of an MTP head.
    """
    architecture = architecture_of(raw, name)
    own = raw.get("dflash_config")
    if own is not None and not isinstance(own, Mapping):
        raise UserError(f"{name}: dflash_config={brief(own)} must be an object; fetch config.json again")
    nested = cast(Json, own or {})
    projector = nested.get("projector_type")
    if (found := foreign(raw, architecture)) is not None:
        pass
    elif architecture in DEEPSPEC_ARCHITECTURES or projector == "dspark" or architecture == "DSparkDraftModel":
        if architecture.startswith("Gemma4"):
            raise UserError(
                f"{name} is a Gemma 4 DSpark drafter, which is not supported; supported families: "
                f"{', '.join(FAMILIES)} (Qwen3 blocks)"
            )
        return "dspark"
    elif projector in ("domino", "causal_v5") or architecture == "DominoDraftModel":
        return "domino"
    elif architecture == "DFlashDraftModel" and projector is None:
        return "dflash"
    elif architecture in EAGLE3_ARCHITECTURES or is_safeailab(raw, tensors):
        return "eagle3"
    elif (family := of_model_type(raw, tensors)) is not None:
        return family
    elif not is_drafter(raw):
        found = (
            f"a plain {architecture}, not a drafter; give it as the target (--model), and a drafter trained for it "
            "as the drafter (--draft-model)"
        )
    else:
        found = f"of architecture {brief(architecture)} with projector type {brief(projector)}"
    raise UserError(f"{name} is {found}; supported families: {', '.join(FAMILIES)}")


def of_model_type(raw: Json, tensors: Callable[[], Iterable[str]]) -> str | None:
    """The family of a checkpoint that a model type of Hugging Face's tells; None: of none."""
    if raw.get("model_type") in ASSISTANTS:
        return GEMMA_FAMILY
    return MTP_FAMILY if is_mtp(raw, tensors) else None


def foreign(raw: Json, architecture: str) -> str | None:
    """What a config describes that has a family's name or form and is another model or format; None: nothing such."""
    nested = cast(Json, raw.get("dflash_config") or {})
    if architecture == "DFlash2DraftModel" or any(
        nested.get(key, raw.get(key)) for key in ("conv_kernel_size", "selector_rank")
    ):
        return "a DFlash 2 drafter (another model than DFlash)"
    if any(raw.get(key) is not None for key in ("speculators_model_type", "transformer_layer_config")):
        return "a drafter in vLLM's speculators format; convert it to its published host format"
    if architecture in DEEPSPEC_EAGLE3:
        return (
            f'DeepSpec\'s own "eagle3" ({architecture}: five target layers, query and key norms, whole vocabulary), '
            "another model than EAGLE-3; use a checkpoint of SpecForge or SafeAILab"
        )
    return None


def is_safeailab(raw: Json, tensors: Callable[[], Iterable[str]]) -> bool:
    """Whether a plain Llama config belongs to an EAGLE-3 checkpoint: only its tensors tell."""
    return raw.get("model_type") == "llama" and any(key.startswith("midlayer.") for key in tensors())


def check_heads(family: str, tensors: Iterable[str], name: str) -> None:
    """The tensors must be those of the family the config names: an early file may say one thing and hold another."""
    for key in tensors:
        owner = next((family for prefix, family in HEADS.items() if key.startswith(prefix)), family)
        if owner != family:
            raise UserError(
                f"{name}: its config says {family}, its tensor {key} is {owner}'s; correct projector_type and "
                "architectures in its config.json, or fetch the checkpoint again"
            )
