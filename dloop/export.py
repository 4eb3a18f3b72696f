"""Drafters between their published layouts. Tensors are passed on bit for bit.

specforge: a nested config that names the family's own model. dflash: the same under DFlashDraftModel, as the released
Domino files, z-lab's and SpecForge's early DSpark ones. deepspec: DSpark's flat config, with the target's vocabulary.
EAGLE-3 has one layout, specforge, which SafeAILab's code reads as well.
Sources: the checkpoints of z-lab, DeepSpec, SpecForge and Domino, and the loaders that read them.
"""

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, cast

import torch
from torch import Tensor

from dloop import checkpoint
from dloop.detect import check_heads, detect_family
from dloop.drafters.config import BlockConfig, Json
from dloop.drafters.families import READERS, build, named
from dloop.drafters.host import EMBEDDING, HEAD, HostConfig, PublishedConfig
from dloop.errors import UserError
from dloop.load import DEMO
from dloop.misfits import check_pair
from dloop.targets.hf import HFTarget
from dloop.types import Vocabulary

Layout = Literal["specforge", "dflash", "deepspec"]
FLAT = ("projector_type", "attention_mode")  # what only the nested layout says
TOP = ("block_size", "num_target_layers")
NESTED = (
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
    "pure_draft_prefix_len",
    "emb_dim",
    "gru_hidden_dim",
    "shift_label",
)


def in_layout(
    layout: Layout, config: Json, tensors: Mapping[str, Tensor], vocabulary: Vocabulary
) -> tuple[dict[str, object], dict[str, Tensor]]:
    """A drafter's config and tensors, of any layout, in this layout. `vocabulary` is the target's.

    An embedding that is the target's is left out. Raises UserError if the family has no such layout, or if a vocabulary
    of the drafter's own would be lost.
    """
    read = read_config(config, "the drafter", tensors)
    shared = {EMBEDDING: vocabulary.embedding} | ({} if read.own_head else {HEAD: vocabulary.head})
    own = {key: tensors[key] for key in shared if key in tensors}
    rest = {key: value for key, value in tensors.items() if key not in own}
    if layout != "specforge" and not isinstance(read, BlockConfig):
        raise UserError(f"the {layout} layout is for block drafters, this drafter is {read.family}; use specforge")
    if layout == "deepspec":
        if read.family != "dspark":
            raise UserError(f"the deepspec layout is DSpark's, this drafter is {read.family}; use specforge or dflash")
        assert isinstance(read, BlockConfig)
        if read.draft_vocab_size is not None:
            raise UserError(
                f"the deepspec layout has no draft vocabulary, this drafter's is of {read.draft_vocab_size} tokens; "
                "use specforge or dflash"
            )
        own = own or {EMBEDDING: vocabulary.embedding.clone(), HEAD: vocabulary.head.clone()}  # a tied pair is one
        return flat(config), rest | own
    own = {key: value for key, value in own.items() if not is_same(value, shared[key])}
    if own and not read.own_head:
        other = ", or keep the deepspec layout" if read.family == "dspark" else ""
        raise UserError(
            f"the drafter's {next(iter(own))} is not its target's, and the {layout} layout has no place for it; "
            f"give the target that it was trained for{other}"
        )
    if isinstance(read, PublishedConfig):
        return cast(dict[str, object], json.loads(read.published)), rest | own
    if not isinstance(read, BlockConfig):
        top = {key: value for key, value in config.items() if key != "auto_map"}
        return top | {"architectures": [read.architecture]}, rest | own
    found = nested(config, read.architecture, meanings(read))
    return found if layout == "specforge" else early(found), rest


def is_same(own: Tensor, kept: Tensor) -> bool:
    """Whether a drafter's matrix is its target's, in the target's arithmetic."""
    return torch.equal(own.to(kept.device, kept.dtype), kept)


def read_config(config: Json, name: str, tensors: Iterable[str]) -> HostConfig:
    """The config of any family, of a checkpoint with these tensors. Raises UserError naming what is wrong with it."""
    return READERS[detect_family(config, name, lambda: tensors)](config, name)


def flat(config: Json) -> dict[str, object]:
    """DeepSpec's config: every key at the top level."""
    inner = cast(Json, config.get("dflash_config") or {})
    top = {key: value for key, value in config.items() if key not in ("dflash_config", "auto_map")}
    top |= {key: value for key, value in inner.items() if key not in FLAT}
    return top | {"architectures": ["Qwen3DSparkModel"]}


def meanings(read: BlockConfig) -> dict[str, object]:
    """What the nested config says and other forms may leave out, by name or by omission."""
    said = read.method()
    known = {key: value for key, value in said.items() if key in FLAT or read.family == "domino"}
    return {"target_layer_ids": list(read.target_layer_ids), **known}


def nested(config: Json, architecture: str, meant: Json) -> dict[str, object]:
    """SpecForge's config: what the method needs under `dflash_config`, the block's shape at the top."""
    said = cast(Json, config.get("dflash_config") or {})
    inner = {**meant, **{key: config[key] for key in NESTED if key in config}, **said}
    if "projector_type" in meant:
        inner["projector_type"] = meant["projector_type"]  # and not an early alias
    top = {key: value for key, value in config.items() if key not in (*NESTED, "dflash_config", "auto_map")}
    top |= {key: inner.pop(key) for key in TOP if key in inner}
    if "emb_dim" in inner:
        top["emb_dim"] = inner["emb_dim"]  # SpecForge writes it twice
    return top | {"architectures": [architecture], "dflash_config": inner}


def early(config: Json) -> dict[str, object]:
    """The same config as files write it that call every family's model by one name."""
    inner = cast(Json, config["dflash_config"])
    top = {key: value for key, value in config.items() if key != "emb_dim"}
    inner = {key: value for key, value in inner.items() if key != "attention_mode"}
    return top | {"architectures": ["DFlashDraftModel"], "dflash_config": inner}


def read_drafter(name: str, revision: str | None) -> tuple[dict[str, object], dict[str, Tensor]]:
    """Config and tensors of a drafter as they are stored."""
    if name == "demo":
        checkpoint.only_hub(revision, name, "drafter")
    folder = DEMO if name == "demo" else checkpoint.resolve(name, revision, "drafter")
    raw = checkpoint.read_json(folder / "config.json", name)
    stored = checkpoint.read_tensors(folder)
    config = READERS[detect_family(raw, name, lambda: stored)](raw, f"{name}/config.json")
    tensors = named(config, stored, name)
    check_heads(config.family, tensors, name)
    with torch.device("meta"):
        model = build(config)
    shared = (EMBEDDING,) if config.own_head else (EMBEDDING, HEAD)
    backbone = {key: value for key, value in tensors.items() if key not in shared}
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
    check_pair(read_config(config, name, tensors).for_target(target.num_layers), target, name)
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
