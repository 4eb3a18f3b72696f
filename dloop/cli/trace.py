"""`dloop trace`: the front of its parts; each has its own --help."""

from dataclasses import dataclass

from dloop.cli.args import Common
from dloop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """What a pair drafts from every position of a text, on record: `dloop trace record` writes it, `dloop replay`
    tries gates on it.
    """


def run(command: Command) -> int | None:
    raise UserError("say which part: dloop trace record --model M --prompts FILE --output trace.npz")
