"""A transformers model that is loaded already, as a target."""

from collections.abc import Iterator
from pathlib import Path
from typing import cast

from torch import nn
from transformers import PreTrainedModel

from dloop.detect import check_target
from dloop.errors import UserError
from dloop.load import DTYPES
from dloop.targets.adapters import adapter_of
from dloop.targets.hf import HFTarget

ATTENTION = ("sdpa", "eager")  # implementations that take a mask for branches
OWN = ("forward", "prepare_inputs_for_generation", "_update_model_kwargs_for_generation")  # what plain decoding calls


def adopt(model: PreTrainedModel) -> HFTarget:
    """The model as a target on the twin's engine, which runs the model's own forward and changes nothing.

    Raises UserError for a model that cannot be decoded exactly here.
    """
    name = model.name_or_path or type(model).__name__
    if not model.can_generate() or model.get_output_embeddings() is None:
        raise UserError(
            f"{name} is a {type(model).__name__}, which does not generate; load it as a causal language model"
        )
    if len(devices := devices_of(model)) > 1:
        raise UserError(f"{name} lies on several devices ({', '.join(devices)}); load it on one: device_map={{'': 0}}")
    raw = cast(dict[str, object], model.config.to_dict())
    check_target(raw, name)
    if model.dtype not in DTYPES.values():
        raise UserError(f"{name} is in {model.dtype}; load it with dtype {' or '.join(DTYPES)}")
    if (attention := attention_of(model)) not in ATTENTION:
        raise UserError(
            f"{name} attends with {attention}, which takes no mask for branches; load it with "
            "attn_implementation='sdpa' or 'eager'"
        )
    folder = Path(name) if Path(name).is_dir() else None
    target = adapter_of(raw["model_type"], name)(name=name, model=model, stop_ids=frozenset(), folder=folder)
    if target.config.get_text_config() is not target.config:
        raise UserError(f"{name} reads more than text; load its text model, with dloop.load_target")
    return target


def devices_of(model: PreTrainedModel) -> list[str]:
    """Where the model's parts lie, or are said to lie by the map they were loaded with."""
    mapped = cast(dict[str, object], getattr(model, "hf_device_map", {}))
    return sorted({str(place) for place in mapped.values()} or {str(weight.device) for weight in model.parameters()})


def attention_of(model: PreTrainedModel) -> str:
    """The name of the model's attention implementation."""
    return str(getattr(model.config, "_attn_implementation", None))


def changes(target: HFTarget, kind: type[PreTrainedModel]) -> Iterator[str]:
    """What of an attached model, of this class, is no longer what verification runs: layers and head as published."""
    model = target.model
    for name in OWN:
        if name in vars(model) or not getattr(kind, name).__module__.startswith("transformers."):
            yield f"the model's {name} is not transformers' own"
    if vars(model)["_forward_hooks"] or vars(model)["_forward_pre_hooks"]:
        yield "the model has hooks on its forward"
    if attention_of(model) not in ATTENTION:
        yield f"the model attends with {attention_of(model)}, which takes no mask for branches"
    if len(cast(nn.ModuleList, target.backbone.layers)) != target.config.num_hidden_layers:
        yield f"the model runs {target.config.num_hidden_layers} of its layers"
