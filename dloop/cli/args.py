"""Flags from dataclasses: one frozen, keyword-only dataclass a command, every field with its help text.

Field types: str, int, float, Path, a Literal of words, unions of these, bool (--x / --no-x), tuple[int, ...] (7,14,21)
and list[str] (--x a b, repeatable). Imports neither torch nor transformers: help and typing errors come at once.
"""

import argparse
import difflib
import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import MISSING, Field, dataclass, field, fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from dloop.errors import UserError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
NAMES: dict[object, str] = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH"}
FLAG = re.compile(r"--[A-Za-z][\w-]*(?==|$)")


def option(default: T, help: str, *, group: str = "options") -> T:
    """A field with a default."""
    about = {"help": help, "group": group}
    if isinstance(default, list):
        return cast(T, field(default_factory=cast(list[str], default).copy, metadata=about))
    return field(default=default, metadata=about)


def required(help: str, *, group: str = "options") -> T:  # pyright: ignore[reportInvalidTypeVarUse]
    """A field that must be given."""
    return cast(T, field(metadata={"help": help, "group": group}))


@dataclass(frozen=True, kw_only=True)
class Common:
    """What every command takes."""

    json: bool = option(False, "print one JSON document on standard output, and nothing else there", group="output")
    debug: bool = option(False, "show the traceback of an error", group="output")


def parse(command: type[T], prog: str, words: Sequence[str]) -> T:
    """Turn a command line into its dataclass. Raises UserError in one line; `--help` prints and exits."""
    return command(**given(command, prog, words))


def given(command: type[object], prog: str, words: Sequence[str]) -> dict[str, object]:
    """The fields that a command line names, and their values."""
    parser, spelled = build(command, prog), normalise(words)
    for match in filter(None, map(FLAG.match, spelled)):
        if match[0] not in (*parser.flags, "--help"):
            near = difflib.get_close_matches(match[0], parser.flags, n=3, cutoff=0.7)
            hint = f"did you mean {' or '.join(near)}?" if near else f"see {prog} --help"
            raise UserError(f"{match[0]} is not a flag of {prog}; {hint}")
    return vars(parser.parse_args(spelled))


def normalise(words: Sequence[str]) -> list[str]:
    """--loop_gate becomes --loop-gate; `--x -inf` becomes `--x=-inf`, as argparse takes -inf, -1e-3, -1,2 for flags."""
    normal: list[str] = []
    for word in words:
        if normal and FLAG.fullmatch(normal[-1]) and re.match(r"-(\.?\d|inf\b|nan\b)", word, re.IGNORECASE):
            normal[-1] += f"={word}"
        else:
            normal.append(FLAG.sub(lambda match: match[0].replace("_", "-"), word, count=1))
    return normal


class Parser(argparse.ArgumentParser):
    flags: tuple[str, ...] = ()  # every flag that help shows, in its order

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message.removeprefix('argument ')}; see {self.prog} --help")


class Switch(argparse.Action):
    def __call__(self, parser: object, namespace: object, values: object, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no-"))


def build(command: type[object], prog: str) -> Parser:
    """The command's parser; what is not given keeps the dataclass's own default."""
    layout = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
    parser = Parser(prog, description=inspect.getdoc(command), allow_abbrev=False, formatter_class=layout)
    everything = fields(cast("type[DataclassInstance]", command))
    items, usage = sorted(everything, key=lambda item: item.metadata["group"] == "output"), [prog]
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(f.metadata["group"] for f in items)}
    for item in items:
        hint, kebab = get_type_hints(command)[item.name], item.name.replace("_", "-")
        switch, repeated = bool in arms(hint), get_origin(hint) is list
        element: object = get_args(hint)[0] if repeated else hint
        must = item.default is MISSING and item.default_factory is MISSING
        names = (f"--{kebab}", f"--no-{kebab}") if switch else (f"--{kebab}",)
        groups[item.metadata["group"]].add_argument(
            *names,
            dest=item.name,
            default=argparse.SUPPRESS,
            action=Switch if switch else "extend" if repeated else "store",
            nargs=0 if switch else "+" if repeated else None,
            type=partial(read_flag, element),
            required=must,
            metavar=name_of(element),
            help=item.metadata["help"].replace("%", "%%") + (" (required)" if must else default_of(item)),
        )
        parser.flags += names
        usage += [names[0], name_of(element)] if must else []
    parser.usage = " ".join([*usage, "[options]"])
    return parser


def default_of(item: "Field[object]") -> str:
    shown = {True: "on", False: "off"}[item.default] if isinstance(item.default, bool) else item.default
    if isinstance(shown, tuple):  # as it is typed
        shown = ",".join(map(str, cast(tuple[object, ...], shown)))
    return "" if shown in (MISSING, None, "") else f" (default: {shown})"


def read_flag(hint: object, text: str) -> object:
    try:
        return read(hint, text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {name_of(hint)}") from None


def read(hint: object, text: str) -> object:
    """Raises ValueError where the text does not fit; the arms of a union are tried in their order."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        for arm in arms(hint):
            with suppress(ValueError):
                return read(arm, text)
    if origin is tuple:
        return tuple(read(get_args(hint)[0], part.strip()) for part in text.split(",")) if text else ()
    if hint is Path and not text:
        raise ValueError("Path('') would be the folder where one stands")
    if origin is None:
        return cast(Callable[[str], object], hint)(text)
    return get_args(hint)[get_args(hint).index(text)]  # a Literal; ValueError if it is none of these


def arms(hint: object) -> tuple[object, ...]:
    return tuple(arm for arm in get_args(hint) or (hint,) if arm is not NoneType)


def name_of(hint: object) -> str:
    """What help and errors call a type."""
    if get_origin(hint) is tuple:
        return f"{name_of(get_args(hint)[0])},..."
    if get_origin(hint) is Literal:
        return "|".join(map(str, get_args(hint)))
    return NAMES[hint] if hint in NAMES else "|".join(name_of(arm) for arm in arms(hint) if arm is not bool)
