"""Looped speculative decoding: draft while the drafter is confident, verify once, the output is the target's."""

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from dloop.api import Generation, generate, generate_autoregressive, stream
    from dloop.batch import Completion, generate_many
    from dloop.dropin.attached import attach, detach
    from dloop.errors import UserError
    from dloop.load import load_drafter, load_target
    from dloop.settings import Settings

__all__ = [
    "Completion",
    "Generation",
    "Settings",
    "UserError",
    "attach",
    "detach",
    "generate",
    "generate_autoregressive",
    "generate_many",
    "load_drafter",
    "load_target",
    "stream",
]

_HOME = {
    "Completion": "dloop.batch",
    "Settings": "dloop.settings",
    "UserError": "dloop.errors",
    "attach": "dloop.dropin.attached",
    "detach": "dloop.dropin.attached",
    "generate_many": "dloop.batch",
    "load_drafter": "dloop.load",
    "load_target": "dloop.load",
}


def __getattr__(name: str) -> object:
    """Import on first use: `import dloop` and `dloop --help` load neither torch nor transformers."""
    if name not in __all__:
        raise AttributeError(f"module 'dloop' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME.get(name, "dloop.api")), name)
