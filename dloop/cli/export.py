"""`dloop export`: a drafter in another published layout."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option, required
from dloop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Write a drafter in a published layout. Tensors are passed on bit for bit.

    specforge is what `dloop train` writes: a nested config, the target's vocabulary is used. dflash is the same under
    the one model name that early files give every family. deepspec (DSpark only) is flat and stores embedding and head
    of the target too. All load as --draft-model.
    """

    draft_model: str = required("drafter: a folder (a training checkpoint too), a hub id, or demo", group="models")
    model: str = required("the drafter's target: smollm2, a folder or a hub id", group="models")
    layout: Literal["specforge", "dflash", "deepspec"] = required("the layout to write")
    output_dir: Path = required("a new folder")
    max_shard_bytes: int | None = option(None, "split the weights into files of at most this many bytes")
    overwrite: bool = option(False, "replace a checkpoint that is there")
    revision: str | None = option(None, "the target's branch, tag or commit on the hub", group="models")
    draft_revision: str | None = option(None, "the drafter's branch, tag or commit on the hub", group="models")


def run(command: Command) -> int | None:
    if command.max_shard_bytes is not None and command.max_shard_bytes < 1:
        raise UserError(f"--max-shard-bytes {command.max_shard_bytes} must be at least 1")
    from dloop.checkpoint import sha256  # torch and transformers only from here on
    from dloop.cli.answer import hush
    from dloop.export import EMBEDDING, check_output, export, read_drafter
    from dloop.load import DTYPES, load_target
    from dloop.records import dumps

    check_output(command.output_dir, command.overwrite)
    hush()
    config, tensors = read_drafter(command.draft_model, command.draft_revision)
    first = [tensors[EMBEDDING]] if EMBEDDING in tensors else tensors.values()
    stored = next(tensor.dtype for tensor in first if tensor.is_floating_point())
    names = [name for name, dtype in DTYPES.items() if dtype == stored]
    if not names:
        raise UserError(f"{command.draft_model} is stored as {stored}; only {' and '.join(DTYPES)} can be exported")
    target = load_target(command.model, names[0], "cpu", command.revision)  # pyright: ignore[reportArgumentType]
    folder, layout = command.output_dir, command.layout
    size = export(command.draft_model, (config, tensors), target, layout, folder, command.max_shard_bytes)
    if command.json:
        facts = {"schema": 1, "output_dir": str(folder), "layout": layout, "bytes": size}
        print(dumps({**facts, "checkpoint_sha256": sha256(folder)}))
    else:
        print(folder)
    return None
