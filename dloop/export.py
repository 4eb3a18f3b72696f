"""DSpark drafters between their published layouts: SpecForge's nested config, DeepSpec's flat one with own vocabulary.

Tensors are passed on bit for bit. Sources: DeepSpec's checkpoints, SpecForge's loader for them.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from dloop import checkpoint
from dloop.drafters.config import Json, read_dspark
from dloop.drafters.dspark import DSpark
from dloop.errors import UserError
from dloop.load import DEMO, check_pair, detect_family
from dloop.targets.hf import HFTarget
from dloop.types import Vocabulary

Layout = Literal["specforge", "deepspec"]
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
FLAT = ("projector_type", "attention_mode")  # what only the nested layout says
NESTED = (
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
)


def in_layout(
    layout: Layout, config: Json, tensors: Mapping[str, Tensor], vocabulary: Vocabulary
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """A drafter's config and tensors, of either layout, in this layout. `vocabulary` is the target's.

    Raises UserError if a vocabulary of the drafter's own would be lost.
    """
    own = {key: tensors[key] for key in (EMBEDDING, HEAD) if key in tensors}
    rest = {key: value for key, value in tensors.items() if key not in own}
    if layout == "deepspec":
        own = own or {EMBEDDING: vocabulary.embedding.clone(), HEAD: vocabulary.head.clone()}  # a tied pair is one
        return flat(config), rest | own
    for key, shared in ((EMBEDDING, vocabulary.embedding), (HEAD, vocabulary.head)):
        if key in own and not torch.equal(own[key].to(shared.device, shared.dtype), shared):
            raise UserError(
                f"the drafter's {key} is not its target's, and the specforge layout has no place for it; "
                "give the target that it was trained for, or keep the deepspec layout"
            )
    return nested(config), rest


def flat(config: Json) -> dict[str, object]:
    """DeepSpec's config: every key at the top level."""
    inner = cast(Json, config.get("dflash_config") or {})
    top = {key: value for key, value in config.items() if key not in ("dflash_config", "auto_map")}
    top |= {key: value for key, value in inner.items() if key not in FLAT}
    return top | {"architectures": ["Qwen3DSparkModel"]}


def nested(config: Json) -> dict[str, object]:
    """SpecForge's config: what the method needs under `dflash_config`."""
    inner = {"projector_type": "dspark", "attention_mode": "gqa", **cast(Json, config.get("dflash_config") or {})}
    inner |= {key: config[key] for key in NESTED if key in config and key not in inner}
    top = {key: value for key, value in config.items() if key not in (*NESTED, "dflash_config", "auto_map")}
    return top | {"architectures": ["DSparkDraftModel"], "dflash_config": inner}


def read_drafter(name: str, revision: str | None) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Config and tensors of a drafter as they are stored."""
    if name == "demo":
        checkpoint.only_hub(revision, name, "drafter")
    folder = DEMO if name == "demo" else checkpoint.resolve(name, revision, "drafter")
    raw = checkpoint.read_json(folder / "config.json", name)
    detect_family(raw, name)
    tensors = checkpoint.read_tensors(folder)
    with torch.device("meta"):
        model = DSpark(read_dspark(raw, f"{name}/config.json"))
    backbone = {key: value for key, value in tensors.items() if key not in (EMBEDDING, HEAD)}
    checkpoint.load_strictly(model, backbone, name)
    return raw, tensors


def export(
    name: str,
    stored: tuple[Json, Mapping[str, Tensor]],
    target: HFTarget,
    layout: Layout,
    folder: Path,
    max_shard_bytes: int | None = None,
) -> int:
    """Write a drafter that `read_drafter` gave in this layout; the folder appears when it is whole. Give its bytes."""
    config, tensors = stored
    check_pair(read_dspark(config, name), target, name)
    written, kept = in_layout(layout, config, tensors, target.vocabulary)
    partial = folder.parent / f".{folder.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    checkpoint.write_checkpoint(partial, written, kept, max_shard_bytes)
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)
    return sum(tensor.nbytes for tensor in kept.values())


def check_output(folder: Path, overwrite: bool) -> None:
    """A folder is only written if it is new or empty, or a checkpoint that may be replaced. Raises UserError."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or not (folder / "config.json").is_file():
        raise UserError(f"--output-dir {folder} exists and is no checkpoint; choose another")
    if not overwrite:
        raise UserError(f"--output-dir {folder} is not empty; add --overwrite to replace it, or choose another")
