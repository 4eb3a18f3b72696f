"""What `dloop data inspect` does: render, mark the labels, count."""

import json
import sys
from collections.abc import Iterator

from rich.console import Console

from dloop import checkpoint
from dloop.chat import Tokenizer, load_tokenizer
from dloop.cli.data_inspect import Command
from dloop.data.chat_templates import chat_template
from dloop.data.conversations import Skipped
from dloop.data.inspect import Account, marked
from dloop.data.tokenise import samples_of
from dloop.errors import UserError
from dloop.offline import smollm2
from dloop.train.batch import Sample, TokenFile


def inspect(command: Command) -> int:
    """Show and count."""
    tokenizer = tokenizer_of(command.model)
    account = Account(command.max_length)
    force = {"auto": None, "always": True, "never": False}[command.color]
    console = Console(force_terminal=force, highlight=False, soft_wrap=True, no_color=force is False)
    left = command.show
    for line, sample in samples(command, tokenizer, account):
        account.add(line, sample)
        wanted = left > 0 if command.line is None else line == command.line
        if wanted and not command.json:
            left -= 1
            console.rule(f"line {line}: {len(sample.tokens)} tokens, {int(sample.labels.sum())} labels")
            console.print(marked(sample, tokenizer, plain=not console.is_terminal))
    if not account.lines:
        raise UserError(f"{command.data} is empty")
    check_line(command, account)
    print(json.dumps({"schema": 1, **account.record()}) if command.json else "\n".join(account.told()))
    sys.stdout.flush()
    return 0


def check_line(command: Command, account: Account) -> None:
    """Raises UserError where there is nothing to show of --line."""
    for reason, where in account.skipped.items():
        if command.line in where:
            raise UserError(f"--line {command.line} of {command.data} is left out: {reason}; name another")
    if command.line is not None and not 1 <= command.line <= account.lines:
        raise UserError(
            f"--line {command.line} is not there, {command.data} has {account.lines} lines; name one of them"
        )


def tokenizer_of(name: str) -> Tokenizer:
    """The target's own, without its weights where they are in a folder here."""
    folder = smollm2() if name == "smollm2" else checkpoint.resolve(name, None, "--model")
    tokenizer = load_tokenizer(folder, name)
    if tokenizer is None:
        raise UserError(f"--model {name} has no tokenizer; give the folder of a whole checkpoint")
    return tokenizer


def samples(command: Command, tokenizer: Tokenizer, account: Account) -> Iterator[tuple[int, Sample]]:
    """(line, sample) of all that is usable; the rest goes to the account."""
    if command.data.suffix == ".npz":
        data = TokenFile.read(command.data, sys.maxsize, "--data")
        yield from ((index + 1, data.sample(index)) for index in range(len(data)))
        return
    if not command.data.is_file():
        raise UserError(f"--data {command.data} does not exist; give conversations (.jsonl) or tokens (.npz)")
    for item in samples_of(command.data, chat_template(command.chat_template, tokenizer), sys.maxsize):
        if isinstance(item, Skipped):
            account.skip(item)
        else:
            yield item
