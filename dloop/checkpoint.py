"""Checkpoint folders: where they are, what they hold, and strict loading. Safetensors only, no remote code."""

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dloop.errors import UserError

CONVERT = (
    'python -c "import sys, torch; from safetensors.torch import save_file; '
    'save_file({k: v.contiguous() for k, v in torch.load(sys.argv[1], weights_only=True).items()}, sys.argv[2])" '
    "pytorch_model.bin model.safetensors"
)

PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def resolve(name: str, revision: str | None, what: str) -> Path:
    """A local folder, or a model id fetched from the hub at this revision."""
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{what} {name!r} is a file; give the folder that holds config.json and model.safetensors")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"{what} {name!r} is neither a folder here nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{what} {name!r} is not a folder here and could not be fetched from the hub ({reason}); check the name "
            "and the network, or give a local folder"
        ) from error


def read_json(path: Path, what: str) -> dict[str, object]:
    """The object in a JSON file; `what` names its owner in errors."""
    if not path.is_file():
        raise UserError(f"{what}: {path} does not exist; a checkpoint folder needs it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{what}: {path} is not valid JSON ({error}); fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise UserError(f"{what}: {path} must hold a JSON object")
    return cast(dict[str, object], value)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded or single."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index, "weights index").get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise UserError(f"{index} has no weight_map; fetch the checkpoint again")
        weight_map = cast(Mapping[str, str], weight_map)
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise UserError(f"{folder}: the index names {', '.join(missing)}, not found; fetch the checkpoint again")
        return files
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder} holds {', '.join(pickles)} but no safetensors; pickled weights can run code and are refused. "
            f"Convert them once: {CONVERT}"
        )
    raise UserError(f"{folder} holds no model.safetensors; give the folder of a complete checkpoint")


def check_readable(folder: Path) -> None:
    """Open every weight file, so that a damaged one is told in one line and not by whoever reads it later."""
    for file in weight_files(folder):
        opened(file)


def opened(file: Path) -> safe_open:
    """A safetensors file whose header is sound."""
    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors raises its own type without a common base across releases
        raise UserError(f"{file} cannot be read as safetensors ({error}); fetch the checkpoint again") from error


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with opened(file) as handle:
            tensors |= {key: handle.get_tensor(key) for key in handle.keys()}
    return tensors


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Put every tensor to use: same names, same shapes, finite values. `module` may live on the meta device."""
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    complain(source, "is missing", expected.keys() - tensors.keys())
    complain(source, "has unexpected", tensors.keys() - expected.keys())
    wrong = [
        f"{k} {tuple(tensors[k].shape)} instead of {expected[k]}" for k in expected if tensors[k].shape != expected[k]
    ]
    complain(source, "has wrongly shaped", wrong)
    check_values(source, tensors)
    module.load_state_dict(dict(tensors), strict=True, assign=True)


def check_values(source: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse quantised weights, which would be read as plain numbers, and values that are not finite."""
    odd = [f"{name} ({value.dtype})" for name, value in tensors.items() if value.dtype not in PLAIN_DTYPES]
    complain(source, "has quantised", odd)
    bad = [name for name, value in tensors.items() if not bool(torch.isfinite(value).all())]
    complain(source, "has NaN or infinite values in", bad)


def complain(source: str, fault: str, names: Iterable[str]) -> None:
    """Raise a UserError that lists the first of these tensors; no names, no error."""
    listed = sorted(names)
    if listed:
        shown = ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
        raise UserError(f"{source} {fault} {len(listed)} tensors: {shown}; the checkpoint does not fit its config.json")


def write_checkpoint(
    folder: Path, config: Mapping[str, object], tensors: Mapping[str, Tensor], max_shard_bytes: int | None = None
) -> None:
    """config.json and safetensors, in shards of at most `max_shard_bytes` with an index if they are more than one."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if max_shard_bytes and shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.detach().cpu().contiguous()
        size += tensor.nbytes
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        names = ["model.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
        (folder / name).chmod(0o644)  # safetensors writes 0600; a checkpoint is made to be read
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def sha256(folder: Path) -> str:
    """One hash over all weight files of a checkpoint, in name order."""
    digest = hashlib.sha256()
    for file in weight_files(folder):
        with file.open("rb") as handle:
            while chunk := handle.read(1 << 22):
                digest.update(chunk)
    return digest.hexdigest()
