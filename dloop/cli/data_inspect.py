"""`dloop data inspect`: conversations as training sees them, the labels in colour; and what is wrong with the rest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option, required
from dloop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Show conversations as a target's chat template writes them, with the labels (what a drafter learns) in colour.

    Counts lines that are left out by reason, samples without a label, and samples that --max-length cuts.
    """

    model: str = required("the target whose tokenizer and template: a folder, a hub id, smollm2", group="data")
    data: Path = required("conversations (.jsonl), or tokens (.npz)", group="data")
    chat_template: Literal["model", "qwen"] = option("model", "how conversations are written", group="data")
    max_length: int = option(3072, "samples are cut at this many tokens", group="data")
    show: int = option(3, "samples to show", group="data")
    line: int | None = option(None, "show the sample of this line (of an .npz: this sample, from 1)", group="data")
    color: Literal["auto", "always", "never"] = option("auto", "never: labels stand between [[ and ]]", group="output")


def run(command: Command) -> int:
    if command.max_length < 2 or command.show < 0:
        raise UserError(f"--max-length {command.max_length} must be at least 2, --show {command.show} at least 0")
    from dloop.cli.data_inspect_run import inspect  # torch only from here on

    return inspect(command)
