"""Checkpoint folders: where they are, what they hold, and strict loading. Safetensors only, no remote code."""

import hashlib
import json
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping
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

MISFIT = "the checkpoint does not fit its config.json"
UNQUANTISED = "only float32, bfloat16, float16 and float64 are read: use the checkpoint that is not quantised"
MAX_REASON = 300
SHORT = reprlib.Repr()
SHORT.maxstring = SHORT.maxother = SHORT.maxlong = 100
SHORT.maxlist = 10
PLAIN_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
PLAIN_NAMES = ("F32", "BF16", "F16", "F64")  # the same in headers of safetensors files


def resolve(name: str, revision: str | None, what: str) -> Path:
    """A local folder, or a model id fetched from the hub at this revision. `what` says what it is for in errors."""
    path = Path(name)
    try:
        path = path.expanduser()
        is_folder, exists = bool(name) and path.is_dir(), bool(name) and path.exists()
    except (OSError, RuntimeError, ValueError):  # no such user, a name too long, a folder that may not be read
        is_folder, exists = False, False
    if is_folder:
        only_hub(revision, name, what)
        return path
    if exists:
        raise UserError(f"{what} {name!r} is a file; give the folder that holds config.json and model.safetensors")
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise UserError(f"{what} {name!r} is neither a folder here nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except HFValidationError as error:
        raise UserError(
            f"{what} {name!r} is neither a folder here nor a hub id of the form owner/name ({reason(error)})"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise UserError(
            f"{what} {name!r} is not a folder here and could not be fetched from the hub ({reason(error)}); check the "
            "name and the network, or give a local folder"
        ) from error


def only_hub(revision: str | None, name: str, what: str) -> None:
    """Refuse a revision of something that has none: it would be recorded and mean nothing."""
    if revision is not None:
        raise UserError(f"revision {revision!r} of {what} {name!r}: a revision only applies to hub ids; leave it out")


def reason(error: BaseException) -> str:
    """What an exception of another library says, short and in one line; its type if it says nothing."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


def brief(value: object) -> str:
    """A value as errors show it: however large or deeply nested, a short piece of one line."""
    return SHORT.repr(value).replace("\n", " ")


def read_json(path: Path, what: str) -> dict[str, object]:
    """The object in a JSON file; `what` names its owner in errors."""
    if not path.is_file():
        raise UserError(f"{what}: {path} does not exist; a checkpoint folder needs it")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise UserError(f"{what}: {path} is not valid JSON ({reason(error)}); fetch the checkpoint again") from error
    if not isinstance(value, dict):
        raise UserError(f"{what}: {path} must hold a JSON object")
    return cast(dict[str, object], value)


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, sharded or single."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.is_file():
        return indexed_files(index, single)
    if single.is_file():
        return [single]
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise UserError(
            f"{folder} holds {', '.join(pickles)} but no safetensors; pickled weights can run code and are refused. "
            f"Convert them once: {CONVERT}"
        )
    raise UserError(f"{folder} holds no model.safetensors; give the folder of a complete checkpoint")


def indexed_files(index: Path, single: Path) -> list[Path]:
    """The files an index names: there, beside it, and the only weights of their folder."""
    weight_map = read_json(index, "weights index").get("weight_map")
    if not isinstance(weight_map, Mapping) or not weight_map:
        raise UserError(f"{index} has no weight_map; fetch the checkpoint again")
    given = list(cast(Mapping[str, object], weight_map).values())
    names = {name for name in given if isinstance(name, str) and name.endswith(".safetensors") and "\0" not in name}
    wrong = [brief(name) for name in given if name not in list(names) or Path(str(name)).name != name]
    if wrong:
        raise UserError(f"{index} names {wrong[0]}, which is no safetensors file beside it; fetch the checkpoint again")
    files = [index.parent / name for name in sorted(names)]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UserError(f"{index.parent}: the index names {', '.join(missing)}, not found; fetch the checkpoint again")
    if single.is_file() and single not in files:
        raise UserError(
            f"{index.parent} holds {single.name} and {index.name}, which names other files; "
            "it is not said which are the weights: remove one of the two"
        )
    return files


def check_headers(folder: Path, source: str) -> int:
    """Open every weight file, refuse quantised weights; give the number of stored values.

    A damaged file is told in one line here, and not by whoever reads it later.
    """
    odd: list[str] = []
    count = 0
    for file in weight_files(folder):
        with opened(file) as handle:
            for key in handle.keys():
                part = handle.get_slice(key)
                count += math.prod(part.get_shape())
                if part.get_dtype() not in PLAIN_NAMES:
                    odd.append(f"{key} ({part.get_dtype()})")
    complain(source, "has quantised", odd, UNQUANTISED)
    return count


def opened(file: Path) -> safe_open:
    """A safetensors file whose header is sound."""
    try:
        return safe_open(file, framework="pt")
    except Exception as error:  # safetensors raises its own type without a common base across releases
        raise UserError(
            f"{file} cannot be read as safetensors ({reason(error)}); fetch the checkpoint again"
        ) from error


def tensor_names(folder: Path) -> list[str]:
    """The names of all tensors of a checkpoint; reads headers alone."""
    names: list[str] = []
    for file in weight_files(folder):
        with opened(file) as handle:
            names += handle.keys()
    return names


def read_tensors(folder: Path, only: Collection[str] | None = None) -> dict[str, Tensor]:
    """The tensors of a checkpoint, all or those of these names, on the CPU."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        with opened(file) as handle:
            tensors |= {key: handle.get_tensor(key) for key in handle.keys() if only is None or key in only}
    return tensors


def load_strictly(module: nn.Module, tensors: Mapping[str, Tensor], source: str) -> None:
    """Put every tensor to use: same names, same shapes, finite values. `module` may live on the meta device."""
    for fault, names in tensor_faults(module, tensors).items():
        complain(source, fault, names)
    weights = [name for name, value in module.state_dict().items() if value.is_floating_point()]  # maps are no weights
    check_values(source, {name: tensors[name] for name in weights})
    module.load_state_dict(dict(tensors), strict=True, assign=True)


def tensor_faults(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """What of these tensors does not fit the module, by the words for it; the lists are empty where all is well."""
    expected = {name: tuple(value.shape) for name, value in module.state_dict().items()}
    both = sorted(expected.keys() & tensors.keys())
    shapes = {name: tuple(tensors[name].shape) for name in both}
    return {
        "is missing": sorted(expected.keys() - tensors.keys()),
        "has unexpected": sorted(tensors.keys() - expected.keys()),
        "has wrongly shaped": [f"{k} {shapes[k]} instead of {expected[k]}" for k in both if shapes[k] != expected[k]],
    }


def check_values(source: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse quantised weights, which would be read as plain numbers, and values that are not finite."""
    odd = [f"{name} ({value.dtype})" for name, value in tensors.items() if value.dtype not in PLAIN_DTYPES]
    complain(source, "has quantised", odd, UNQUANTISED)
    check_finite(source, tensors)


def identical(one: Tensor, other: Tensor) -> bool:
    """Whether two stored tensors are the same; those of other types are not, which may not even be comparable."""
    return one.dtype == other.dtype and torch.equal(one, other)


def check_finite(source: str, tensors: Mapping[str, Tensor]) -> None:
    """Refuse NaN and infinite values, with one pass over tensors of one device and one wait for it."""
    names = [name for name, value in tensors.items() if value.numel()]
    if not names:
        return
    extremes = [torch.stack(torch.aminmax(tensors[name])) for name in names]  # NaN if any value is
    sound = cast(list[bool], torch.stack([torch.isfinite(pair).all() for pair in extremes]).tolist())  # sync
    bad = [name for name, fine in zip(names, sound, strict=True) if not fine]
    complain(source, "has NaN or infinite values in", bad, "fetch it again, or try another checkpoint or dtype")


def complain(source: str, fault: str, names: Iterable[str], way_out: str = MISFIT) -> None:
    """Raise a UserError that lists the first of these tensors; no names, no error."""
    listed = sorted(names)
    if listed:
        shown = ", ".join(listed[:5]) + (f" and {len(listed) - 5} more" if len(listed) > 5 else "")
        raise UserError(f"{source} {fault} {len(listed)} tensors: {shown}; {way_out}")


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
