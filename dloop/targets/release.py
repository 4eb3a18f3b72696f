"""Which transformers release hybrid targets need: earlier ones keep or advance their memories otherwise."""

from importlib.metadata import version

from dloop.errors import UserError

FLOOR = (5, 16)
EXTRA = "pip install 'dloop-decoding[mtp]'"


def is_offered() -> bool:
    """Whether the installed transformers is recent enough."""
    return tuple(int(part) for part in version("transformers").split(".")[:2]) >= FLOOR


def require_version(name: str, model: str) -> None:
    """Raises UserError where it is not."""
    if not is_offered():
        floor, installed = ".".join(map(str, FLOOR)), version("transformers")
        raise UserError(f"{name} is a {model} model, which needs transformers >= {floor}, not {installed}: {EXTRA}")
