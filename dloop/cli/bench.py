"""`dloop bench`: its flags, without torch. The work is in `dloop.bench.run`."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from dloop.bench.tasks import TASKS, names_of
from dloop.cli import generate
from dloop.cli.args import given, option, required
from dloop.cli.generate import LOOP_ONLY, OWN_DRAFTER, SAMPLING, Decoding, drafter_name
from dloop.errors import UserError

DATA = "data"
FIXED = {"model", "revision", "dtype", "device", "engine", "json", "debug"}  # of all settings of a run
MAY_DIFFER = {field.name for field in dataclasses.fields(Decoding)} - FIXED
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
    beside: list[str] = option(
        [],
        "settings measured too, in turn with this one, sample by sample, so that a machine that warms up or is shared "
        'slows all alike; each in quotes: flags without their dashes, e.g. baseline "loop-gate=1 max-stages=2"',
        group=DATA,
    )
    chat: bool | Literal["auto"] = option(
        "auto", "put prompts into the target's chat template, thinking off; auto: if it has one", group=DATA
    )
    max_new_tokens: int = option(2048, "most tokens of an answer", group=SAMPLING)
    seed: int | None = option(0, "of sampling; every sample's own seed is made from it", group=SAMPLING)
    output_dir: Path = option(Path("results"), "where results go", group="output")
    overwrite: bool = option(False, "forget what earlier runs left in the same folder", group="output")


def run(command: Command) -> int | None:
    names, commands = names_of(command.dataset, command.data_dir), [command, *others(command)]
    drafters: list[str | None] = []
    for each in commands:  # that smollm2 takes its own is told once
        takes_own = OWN_DRAFTER in drafters and each.draft_model is None and not each.baseline
        drafters.append(OWN_DRAFTER if takes_own else drafter_name(each, "dloop bench"))
    from dloop.bench.run import bench  # torch and transformers only from here on

    return bench(commands, names, drafters)


def others(command: Command) -> list[Command]:
    """The settings beside a command: each is the command with some flags changed."""
    found = [changed(command, words) for words in command.beside]
    names = [folder_name(each) for each in (command, *found)]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise UserError(
                f"--beside {command.beside[index - 1]!r} is a setting that is measured already; leave it out"
            )
    return found


def folder_name(command: Command) -> tuple[str, str]:
    """What its results' folder is named by, as far as it is known before anything is loaded."""
    if command.baseline:
        return "baseline", ""
    return (command.draft_model or OWN_DRAFTER).rstrip("/"), setting_name(command)


def changed(command: Command, words: str) -> Command:
    """A command with the flags of one --beside changed."""
    needed = [f"--model={command.model}", f"--dataset={command.dataset}"]
    try:
        flags = [f"--{word}" for word in shlex.split(words)]
    except ValueError as error:
        raise UserError(f"--beside {words!r} cannot be read ({error}); write NAME=VALUE, spaces between") from error
    if "--help" in flags:
        raise UserError(f"--beside {words!r} names no setting; dloop bench --help explains the flags")
    new = given(Command, "dloop bench --beside", [*needed, *flags])
    del new["model"], new["dataset"]
    if not new:
        raise UserError(f"--beside {words!r} changes nothing; name a flag, such as baseline or loop-gate=1")
    if isinstance(new.get("loop_gate"), float):
        new.setdefault("gate_state", None)  # a threshold has none
    if fixed := [name for name in new if name not in MAY_DIFFER]:
        raise UserError(
            f"--beside {words!r} changes {fixed[0].replace('_', '-')}, which all settings share; leave it out"
        )
    defaults = {field.name: field.default for field in dataclasses.fields(Command)}
    if new.get("baseline"):
        new |= {name: defaults[name] for name in LOOP_ONLY}
    elif set(LOOP_ONLY) & new.keys():
        new["baseline"] = False
    return dataclasses.replace(command, **new)


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
    if isinstance(value, Path):
        return value.name  # the whole path stands in the summary
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
