"""Which adapter decodes a model."""

from dloop.targets.gemma4 import GEMMA4, Gemma4Target
from dloop.targets.hf import SUPPORTED, HFTarget
from dloop.targets.recurrent import RECURRENT, RecurrentTarget
from dloop.targets.release import require_version

TARGETS = (*SUPPORTED, *RECURRENT, *GEMMA4)  # model types


def adapter_of(model_type: object, name: str) -> type[HFTarget]:
    """The adapter of a supported model type. Raises UserError where it needs another transformers."""
    if model_type in RECURRENT:
        require_version(name, "Qwen3.5")
        return RecurrentTarget
    if model_type in GEMMA4:
        require_version(name, "Gemma 4")
        return Gemma4Target
    return HFTarget
