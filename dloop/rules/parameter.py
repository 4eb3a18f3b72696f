"""Parameters of stop rules: a dataclass's fields with the values they may take, read from NAME:param=value,..."""

import dataclasses
import math
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from dloop.errors import UserError

T = TypeVar("T")
MOST_TOKENS = 1024  # of a stage
REQUIRED = cast(Any, dataclasses.MISSING)


def parameter(default: T, low: float = -math.inf, high: float = math.inf) -> T:
    """A field of a rule, its default and bounds; `REQUIRED` must be given."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def parameters_of(rule: type[object]) -> list["dataclasses.Field[object]"]:
    """What can be set, in order."""
    return [each for each in dataclasses.fields(cast(Any, rule)) if "low" in each.metadata]


def read_parameters(rule: type[object], name: str, text: str) -> dict[str, object]:
    """The values that param=value,... gives; of a list's numbers a + stands between. Raises UserError."""
    known = {each.name: each for each in parameters_of(rule)}
    values: dict[str, object] = {}
    for part in text.split(",") if text else []:
        key, mark, value = part.partition("=")
        if key in values:
            raise UserError(f"stop_rule {name}: {key} is given twice; leave one out")
        if key not in known or not mark:
            raise UserError(
                f"stop_rule {name} has no parameter {part!r}; it has {', '.join(known)}, as in {name}:"
                f"{next(iter(known))}=..."
            )
        values[key] = read_value(get_type_hints(rule)[key], known[key], name, value)
    missing = [each.name for each in known.values() if each.default is dataclasses.MISSING and each.name not in values]
    if missing:
        raise UserError(
            f"stop_rule {name} needs {missing[0]}, which has no published default; give {name}:{missing[0]}=..."
        )
    return values


def read_value(hint: object, field: "dataclasses.Field[object]", name: str, text: str) -> object:
    """One value within its bounds. Raises UserError."""
    low, high = field.metadata["low"], field.metadata["high"]
    if field.name == "longest":
        low, high = 1, MOST_TOKENS
    kind = next((arm for arm in get_args(hint) if arm is not NoneType), hint) if isinstance(hint, UnionType) else hint
    if kind is Path:
        return Path(text)
    try:
        number = int if kind is int or get_origin(kind) is tuple else float
        found = [number(each) for each in (text.split("+") if get_origin(kind) is tuple else [text])]
        if all(low <= each <= high and math.isfinite(each) for each in found):
            return tuple(found) if get_origin(kind) is tuple else found[0]
    except ValueError:
        pass
    what = "a whole number" if kind is int else "whole numbers joined by +" if get_origin(kind) is tuple else "a number"
    bounds = (f" from {low:g}" if low > -math.inf else "") + (f" to {high:g}" if high < math.inf else "")
    raise UserError(f"stop_rule {name}: {field.name}={text!r} must be {what}{bounds}")
