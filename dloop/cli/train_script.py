"""The published flags and defaults of `scripts/train_dflash.py` and `train_domino.py`, turned into `dloop train`'s."""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from dloop.cli.args import option, parse
from dloop.cli.train import Command
from dloop.errors import UserError

FORMER, CHECKED = "published, refused where another value is asked for", "checked against the draft config"
DEFAULT_EMBEDDING, DEFAULT_HEAD = "model.embed_tokens.weight", "lm_head.weight"
# field -> (values that are taken, the way out for all others)
TAKEN: dict[str, tuple[tuple[object, ...], str]] = {
    "is_preformatted": ((False,), "give conversations with roles, or tokens (.npz)"),
    "trust_remote_code": ((False,), "code of checkpoints is never run; use a Qwen3, Qwen2 or Llama-like target"),
    "tp_size": ((1,), "the target runs on one device; use --tp-size 1"),
    "embedding_key": ((None, DEFAULT_EMBEDDING), "embedding and head are the loaded target's; leave it out"),
    "lm_head_key": ((None, DEFAULT_HEAD), "embedding and head are the loaded target's; leave it out"),
    "loss_type": ((None, "dflash", "dspark", "domino"), "the drafter's family decides the objective; leave it out"),
    "dpace_alpha": ((0.5,), "the drafter's family decides the objective; leave it out"),
}
READ_AT_ONCE = "conversations are tokenised in this process"


@dataclass(frozen=True, kw_only=True)
class Published(Command):
    """Train a drafter with the published flags and their published defaults; forwards to `dloop train`."""

    num_epochs: int = option(6, "passes over the data", group="run")
    chat_template: Literal["model", "qwen"] = option("qwen", "how conversations are written", group="data")
    loss_decay_gamma: float = option(float("inf"), "row j of a stage weighs exp(-j / gamma)", group="objective")
    block_size: int | None = option(None, "rows of a stage", group=CHECKED)
    num_draft_layers: int | None = option(None, "layers of the drafter", group=CHECKED)
    mask_token_id: int | None = option(None, "the token of unknown rows", group=CHECKED)
    attention_backend: Literal["sdpa", "flex_attention", "eager"] = option(
        "flex_attention", "flex_attention leaves --attention as it is; the others are --attention dense", group="speed"
    )
    dataloader_num_workers: int = option(8, f"taken: {READ_AT_ONCE}", group="data")
    build_dataset_num_proc: int | None = option(None, f"taken: {READ_AT_ONCE}", group="data")
    cache_dir: str | None = option(None, "taken: tokens are not kept on disk", group="data")
    eval_interval: int = option(1000, "taken: every checkpoint is measured, see --save-interval", group="run")
    is_preformatted: bool = option(False, "texts with the chat template already in them", group=FORMER)
    trust_remote_code: bool = option(False, "run code of a checkpoint", group=FORMER)
    tp_size: int = option(1, "devices of the target", group=FORMER)
    embedding_key: str | None = option(None, "name of the target's embedding", group=FORMER)
    lm_head_key: str | None = option(None, "name of the target's head", group=FORMER)
    loss_type: str | None = option(None, "dflash, dspark or domino: the drafter decides", group=FORMER)
    dpace_alpha: float = option(0.5, "of the loss type dpace", group=FORMER)
    report_to: Literal["none", "csv", "tensorboard"] = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        "none", "none: train.csv alone", group="run"
    )


def forwarded(prog: str, words: list[str]) -> list[str]:
    """The same command line for `dloop train`. Notes go to standard error. Raises UserError for what is not offered."""
    command = parse(Published, prog, words)
    refuse(command, TAKEN)
    check_draft(command)
    flex = command.attention_backend == "flex_attention"
    refuse_two(command.attention, command.attention_backend)
    tell(prog, "sdpa" if flex else command.attention_backend)
    command = dataclasses.replace(command, report_to="csv" if command.report_to == "none" else command.report_to)
    return as_command(command if flex else dataclasses.replace(command, attention="dense"))


def as_command(command: Command) -> list[str]:
    """What differs from the defaults of `dloop train`, as it is typed."""
    result: list[str] = []
    for field in dataclasses.fields(Command):
        value = getattr(command, field.name)
        if value != field.default:
            result += as_words(field.name, value)
    return result


def refuse(command: Command, rules: Mapping[str, tuple[tuple[object, ...], str]]) -> None:
    """Raises UserError naming the flag, its value and the way out."""
    for name, (taken, way_out) in rules.items():
        value = getattr(command, name)
        if value not in taken:
            shown = "" if value is True else f" {value}"
            raise UserError(f"--{name.replace('_', '-')}{shown} is not offered: {way_out}")


def check_draft(command: Published) -> None:
    """The shape of a drafter is its config's: flags may repeat it, not change it. Raises UserError."""
    given = {name: getattr(command, name) for name in ("block_size", "num_draft_layers", "mask_token_id")}
    if all(value is None for value in given.values()) or bool(command.draft_init_path) == bool(
        command.draft_config_path
    ):
        return
    from dloop import checkpoint  # torch only from here on
    from dloop.cli.training import read_config
    from dloop.drafters.config import BlockConfig
    from dloop.load import DEMO

    path = command.draft_config_path
    if path is None:
        name = command.draft_init_path or ""
        folder = DEMO if name == "demo" else checkpoint.resolve(name, None, "--draft-init-path")
        path = folder / "config.json"
    config = read_config(path, "the draft config")
    if not isinstance(config, BlockConfig):
        raise UserError(f"{path} is of {config.family}; this script trains block drafters: use train_eagle3.py")
    found = {
        "block_size": config.block_size,
        "num_draft_layers": config.num_layers,
        "mask_token_id": config.mask_token_id,
    }
    for name, value in given.items():
        if value not in (None, found[name]):
            raise UserError(
                f"--{name.replace('_', '-')} {value} is not the drafter's, whose config says {found[name]} ({path}); "
                "leave it out, or change the config of a new drafter"
            )


def refuse_two(attention: str, attention_backend: str) -> None:
    """Raises UserError where our flag and the published one name different kernels."""
    if attention == "flex" and attention_backend != "flex_attention":
        raise UserError(f"--attention flex and --attention-backend {attention_backend} differ; give one")


def tell(prog: str, attention_backend: str) -> None:
    """Say what is done in place of what was asked for, where the numbers stay the same."""
    if attention_backend != "sdpa":
        note = "PyTorch's SDPA is used, for the same attention"
        print(f"{prog}: --attention-backend {attention_backend}: {note}", file=sys.stderr)


def as_words(name: str, value: object) -> list[str]:
    """One flag as it is typed."""
    flag = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return [f"{flag}={text}"]
