"""Conversations of `dloop train`: tokenised before the first step, with progress and a summary on standard error."""

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from dloop.chat import load_tokenizer
from dloop.cli.train import Command
from dloop.data.chat_templates import chat_template
from dloop.data.on_the_fly import OnTheFly
from dloop.data.tokenise import Collection, named, samples_of
from dloop.drafters.config import BlockConfig
from dloop.drafters.host import HostConfig
from dloop.errors import UserError
from dloop.targets.hf import HFTarget
from dloop.train.batch import TokenFile


def is_jsonl(path: Path) -> bool:
    """Whether the data are conversations. Raises UserError if they are not there."""
    if path.suffix != ".jsonl":
        return False
    if not path.is_file():
        raise UserError(f"--train-data-path {path} does not exist; give conversations (.jsonl) or tokens (.npz)")
    return True


def read_jsonl(command: Command, target: HFTarget, config: HostConfig) -> TokenFile:
    """Samples with enough labels: two blocks of them, or any where chains start from every token."""
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None:
        raise UserError(f"{target.name} has no tokenizer beside its weights; give tokens (.npz) as --train-data-path")
    path, template = command.train_data_path, chat_template(command.chat_template, tokenizer)
    found = Collection(path, 2 * config.block_size if isinstance(config, BlockConfig) else 1)
    if command.on_the_fly_loader:
        data = OnTheFly.index(found, template, command.max_length, target.vocab_size)
        reasons = [f"  skipped {len(lines)}: {why} ({named(lines)})" for why, lines in found.skipped.items()]
        print(
            "\n".join([f"{path}: {len(data)} conversations, tokenised when they are read", *reasons]), file=sys.stderr
        )
        return data
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("tokenising", total=count_lines(path))
        for item in samples_of(path, template, command.max_length):
            found.add(item, strict=command.strict_data)
            progress.advance(task)
    print("\n".join(found.summary()), file=sys.stderr)
    found.check()
    data = TokenFile.of(found.samples, command.max_length)
    if data.flat.max() >= target.vocab_size:
        raise UserError(
            f"the tokenizer of {target.name} gives token {data.flat.max()}, beyond its vocabulary of "
            f"{target.vocab_size}; fetch the checkpoint again, or use --chat-template model"
        )
    return data


def check_data(data: TokenFile, target: HFTarget, command: Command) -> None:
    """Raises UserError if the data do not fit the target: ids beyond its vocabulary, samples beyond its context."""
    path = command.train_data_path
    if isinstance(data, OnTheFly):
        if data.max_length > target.context:
            raise UserError(
                f"--max-length {data.max_length} is beyond the {target.context} tokens of {target.name}; give "
                f"--max-length {target.context}"
            )
        if 0 < command.position_offset_max < data.max_length:
            raise UserError(
                f"--position-offset-max {command.position_offset_max} leaves no place for samples of --max-length "
                f"{data.max_length}; give at least that"
            )
        return
    check_tokens(path, data, target)
    longest = min(int(data.lens.sum(1).max()), data.max_length)
    if longest > target.context:
        raise UserError(
            f"{path} has samples of {longest} tokens within --max-length {command.max_length}, {target.name} takes "
            f"{target.context}; give --max-length {target.context} to cut them there"
        )
    if 0 < command.position_offset_max < longest:
        raise UserError(
            f"--position-offset-max {command.position_offset_max} leaves no place for {path}'s samples of {longest} "
            "tokens; give at least that, or cut them with --max-length"
        )


def check_tokens(path: Path, data: TokenFile, target: HFTarget) -> None:
    """Raises UserError at ids beyond the target's vocabulary."""
    low, high = int(data.flat.min()), int(data.flat.max())
    if low < 0 or high >= target.vocab_size:
        raise UserError(
            f"{path} has the token {low if low < 0 else high}, {target.name} knows 0..{target.vocab_size - 1}; "
            "tokenise it for this target"
        )


def count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(1 for _ in file)
