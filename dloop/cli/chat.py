"""`dloop chat`: its flags and the lines a user types, without torch. The talking is in `dloop.cli.conversation`."""

import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from dloop.cli.args import option
from dloop.cli.generate import SAMPLING, Decoding, drafter_name
from dloop.errors import UserError

HELP = "/reset forgets the conversation, /stats sums it up, /trace on|off shows the stages, /exit or Ctrl-D ends"


@dataclass(frozen=True, kw_only=True)
class Command(Decoding):
    """Talk with a target: a line is a turn, the answer streams. Piped, every line of standard input is a turn.

    /reset forgets the conversation, /stats sums it up, /trace on|off shows every token with its stage, /exit or
    Ctrl-D ends. Ctrl-C stops the answer; what was said so far stays in the conversation.
    """

    system: str | None = option(None, "system prompt; default: the chat template's own", group="conversation")
    max_new_tokens: int = option(512, "most tokens of an answer", group=SAMPLING)
    trace: bool = option(False, "start with /trace on", group="output")


def run(command: Command) -> int | None:
    name = drafter_name(command, "dloop chat")
    from dloop.cli.conversation import talk  # torch and transformers only from here on

    return talk(command, name, is_terminal())


def is_terminal() -> bool:
    """Whether a person types and reads."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def typed() -> Iterator[str]:
    """Lines from a terminal, with a prompt and a history; Ctrl-C on a line only leaves that line."""
    with suppress(ImportError):
        import readline  # noqa: F401  # pyright: ignore[reportUnusedImport]
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{HELP}", file=sys.stderr)
            continue
        yield line


def piped() -> Iterator[str]:
    """Lines of standard input. Raises UserError if they are not UTF-8."""
    for number, raw in enumerate(sys.stdin.buffer if sys.stdin else (), 1):
        try:
            yield raw.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(f"line {number} of standard input is not UTF-8; convert it first") from None
