"""`dloop train gate-head`: its flags, without torch. The work is in `dloop.cli.train_gate_head_run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option, required
from dloop.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Train a small head that a stop rule reads (--stop-rule specdec++, adaeagle, disco-ffn or pacer, with
    --gate-head OUTPUT_DIR); target and drafter stay as they are.

    The drafter drafts from places of the training texts, as it does when it decodes; the head learns how far the texts
    agree. What was drafted is kept text by text, and the fit pass by pass, so that --resume goes on after a stop.
    """

    target_model_path: str = required("the target: smollm2, a folder or a hub id", group="models")
    draft_model: str = required("the drafter: a folder, a hub id, demo, or mtp (Qwen3.5's own head)", group="models")
    kind: Literal["specdec++", "adaeagle", "disco", "pacer"] = required("whose head", group="models")
    train_data_path: Path = required(
        "conversations (.jsonl, one a line), or tokens (.npz), as for dloop train", group="data"
    )
    chat_template: Literal["model", "qwen"] = option(
        "model", "how conversations are written, as for dloop train", group="data"
    )
    max_length: int = option(3072, "samples are cut at this many tokens", group="data")
    max_samples: int | None = option(None, "the first N samples; all by default", group="data")
    stride: int = option(1, "draft from every Nth place of a text", group="data")
    held_out: float = option(0.1, "share of the texts, the last ones, that the loss is only measured on", group="data")
    longest: int | None = option(
        None, "tokens of a drafted stage (EAGLE-3, MTP); by default as the drafter was published", group="data"
    )
    output_dir: Path = required("where the head goes", group="run")
    resume: bool = option(False, "go on from what --output-dir holds", group="run")
    num_epochs: int = option(3, "passes over the drafted stages", group="run")
    batch_size: int = option(64, "stages of a step", group="run")
    learning_rate: float = option(1e-3, "peak rate of AdamW", group="run")
    seed: int = option(42, "of the weights, the order and the drawn drafts", group="run")
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic of both models", group="speed")
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one", group="speed")


def run(command: Command) -> int | None:
    check(command)
    from dloop.cli.train_gate_head_run import train  # torch and transformers only from here on

    return train(command)


def check(command: Command) -> None:
    """What can be told before anything is loaded."""
    for name in ("max_length", "max_samples", "stride", "longest", "num_epochs", "batch_size"):
        value = getattr(command, name)
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not 0 < command.learning_rate < float("inf"):
        raise UserError(f"--learning-rate {command.learning_rate} must be above 0 and finite")
    if not 0 <= command.held_out < 1:
        raise UserError(f"--held-out {command.held_out} must be at least 0 and below 1")
    if not 0 <= command.seed < 2**31:
        raise UserError(f"--seed {command.seed} must be at least 0 and below 2^31")
    if not command.train_data_path.is_file():
        raise UserError(f"--train-data-path {command.train_data_path} does not exist; give a .jsonl or a .npz")
    if not command.resume and command.output_dir.is_dir() and any(command.output_dir.iterdir()):
        raise UserError(f"{command.output_dir} is not empty; add --resume or choose another --output-dir")
