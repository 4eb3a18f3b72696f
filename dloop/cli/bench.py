"""`dloop bench`: its flags, without torch. The work is in `dloop.bench.run`."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from dloop.bench.tasks import TASKS, names_of
from dloop.cli import generate
from dloop.cli.args import option, required
from dloop.cli.generate import SAMPLING, Decoding, drafter_name

DATA = "data"
NO_SETTING = {"model", "draft_model", "baseline", "device", "revision", "json", "debug"}


@dataclass(frozen=True, kw_only=True)
class Command(Decoding):
    """Measure acceptance and speed on the paper's eight benchmarks, one sample at a time; torchrun spreads samples.

    Measure the baseline once for each target, data set and GPU (--baseline), then each setting: speed-ups are given
    only against a baseline of the same machine, dtype, samples and length. A run that was stopped continues. Records
    of every round are written beside the summary, to --output-dir/TARGET/DRAFT/DATASET/SETTING/. Responses that failed
    are counted apart, and make the exit status 1.
    """

    dataset: str = required(f"a set, several joined by commas, or all: {', '.join(TASKS)}", group=DATA)
    data_dir: Path | None = option(
        None, 'a folder of NAME.jsonl with lines {"turns": ["..."]}, in place of a download', group=DATA
    )
    max_samples: int | None = option(None, "samples of each set; default: as many as in the paper", group=DATA)
    chat: bool | Literal["auto"] = option(
        "auto", "put prompts into the target's chat template, thinking off; auto: if it has one", group=DATA
    )
    max_new_tokens: int = option(2048, "most tokens of an answer", group=SAMPLING)
    seed: int | None = option(0, "of sampling; every sample's own seed is made from it", group=SAMPLING)
    output_dir: Path = option(Path("results"), "where results go", group="output")
    overwrite: bool = option(False, "forget what earlier runs left in the same folder", group="output")


def run(command: Command) -> int | None:
    names, drafter = names_of(command.dataset, command.data_dir), drafter_name(command, "dloop bench")
    from dloop.bench.run import bench  # torch and transformers only from here on

    return bench(command, names, drafter)


def as_generate(command: Command) -> generate.Command:
    """The same choices as a command of `dloop generate`; of the prompt it knows nothing."""
    shared = {field.name: getattr(command, field.name) for field in dataclasses.fields(Decoding)}
    return generate.Command(**shared, chat=command.chat)


def setting_name(command: Command) -> str:
    """A setting's folder: what differs from the host as released, `host` for nothing."""
    fields = {field.name: field for field in dataclasses.fields(Command)}
    names = [field.name for field in dataclasses.fields(Decoding) if field.name not in NO_SETTING]
    changed = [name for name in [*names, "chat"] if getattr(command, name) != fields[name].default]
    return ",".join(f"{name.replace('_', '-')}={spelled(getattr(command, name))}" for name in changed) or "host"


def spelled(value: object) -> str:
    """A flag's value in a folder's name."""
    if isinstance(value, tuple):
        return "+".join(map(str, cast(tuple[int, ...], value))) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)
