"""A transformers model that is loaded already, as a target."""

from pathlib import Path
from typing import cast

from transformers import PreTrainedModel

from dloop.detect import check_target
from dloop.errors import UserError
from dloop.load import DTYPES
from dloop.targets.adapters import adapter_of
from dloop.targets.hf import HFTarget


def adopt(model: PreTrainedModel) -> HFTarget:
    """The model as a target on the twin's engine, which runs the model's own forward and changes nothing.

    Raises UserError for a model that cannot be decoded exactly here.
    """
    raw = cast(dict[str, object], model.config.to_dict())
    name = model.name_or_path or type(model).__name__
    check_target(raw, name)
    if model.dtype not in DTYPES.values():
        raise UserError(f"{name} is in {model.dtype}; load it with dtype {' or '.join(DTYPES)}")
    attention = str(getattr(model.config, "_attn_implementation", None))
    if attention not in ("sdpa", "eager"):
        raise UserError(
            f"{name} attends with {attention}, which takes no mask for branches; load it with "
            "attn_implementation='sdpa' or 'eager'"
        )
    folder = Path(name) if Path(name).is_dir() else None
    target = adapter_of(raw["model_type"], name)(name=name, model=model, stop_ids=frozenset(), folder=folder)
    if target.config.get_text_config() is not target.config:
        raise UserError(f"{name} reads more than text; load its text model, with dloop.load_target")
    return target
