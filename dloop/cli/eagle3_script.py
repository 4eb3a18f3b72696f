"""The published flags and defaults of `scripts/train_eagle3.py`, turned into `dloop train`'s."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

from dloop.cli.args import option, parse
from dloop.cli.train import MOST_STEPS, Command
from dloop.cli.train_script import (
    DEFAULT_EMBEDDING,
    DEFAULT_HEAD,
    FORMER,
    READ_AT_ONCE,
    as_command,
    refuse,
    refuse_two,
    tell,
)
from dloop.errors import UserError

T = TypeVar("T")

STEPS, ACCUMULATION = "--max-num-steps", "--draft-accumulation-steps"
ONE_DEVICE = "the target runs on one device; leave it out"
NO_EVALUATION = "leave it out, and measure a checkpoint on prompts: dloop generate --draft-model ..."
BUILT_IN = "mtp"
HOST_LENGTH = {None: 7, "qwen3.5": 3, "gemma4": 6}  # of an unroll, by --mtp
OWN_LOSS = "the objective is the published cross-entropy with the target's law; leave it out"
# field -> (values that are taken, the way out for all others)
TAKEN: dict[str, tuple[tuple[object, ...], str]] = {
    "is_preformatted": ((False,), "give conversations with roles, or tokens (.npz)"),
    "train_only_last_turn": ((False,), "every answer is a label; leave it out, or cut the conversations"),
    "is_vlm": ((False,), "targets read text alone; leave it out"),
    "trust_remote_code": ((False,), "code of checkpoints is never run; use a Qwen3, Qwen2 or Llama-like target"),
    "embedding_key": ((None, DEFAULT_EMBEDDING), "the embedding is the loaded target's; leave it out"),
    "lm_head_key": ((None, DEFAULT_HEAD), "the teacher is the loaded target; leave it out"),
    "lk_loss_type": ((None,), OWN_LOSS),
    "kl_scale": ((1.0,), OWN_LOSS),
    "kl_decay": ((3.0,), OWN_LOSS),
    "tp_size": ((1,), ONE_DEVICE),
    "sp_ulysses_size": ((1,), ONE_DEVICE),
    "sp_ring_size": ((1,), ONE_DEVICE),
    "shard_target_output": ((False,), ONE_DEVICE),
    "train_hidden_states_path": ((None,), "features are computed in the trainer; --cache-features keeps them"),
    "eval_hidden_states_path": ((None,), NO_EVALUATION),
    "model_download_dir": ((None,), "checkpoints go to the hub's own cache (HF_HOME); leave it out"),
    "total_steps": ((None,), "the schedule ends with the run; leave it out, or give --max-num-steps"),
}


@dataclass(frozen=True, kw_only=True)
class Published(Command):
    """Train an EAGLE-3 drafter, or an MTP head (--mtp), with the published flags and defaults, through `dloop train`.

    Start from a checkpoint (--ckpt-dir, whose vocabulary map is kept) or from a config (--draft-model-config).
    """

    ckpt_dir: str | None = option(None, "EAGLE-3 checkpoint to start from; its vocabulary map is kept", group="models")
    draft_model_config: Path | None = option(None, "config.json of a new drafter", group="models")
    mtp: Literal["qwen3.5", "gemma4"] | None = option(
        None,
        "train an MTP head instead: Qwen3.5's built-in one or that of --ckpt-dir; the Gemma 4 assistant of --ckpt-dir",
        group="models",
    )
    chat_template: Literal["model", "qwen", "llama3"] = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        "llama3", "how conversations are written; name one, the published llama3 is not offered", group="data"
    )
    num_epochs: int = option(10, "passes over the data", group="run")
    max_num_steps: int | None = option(None, "optimiser steps; replaces --num-epochs", group="run")
    draft_accumulation_steps: int = option(1, "forwards of an optimiser step", group="run")
    learning_rate: float = option(1e-4, "peak rate of AdamW", group="run")
    max_length: int = option(2048, "samples are cut at this many tokens", group="data")
    warmup_ratio: float = option(0.015, "share of the steps that warm up; a cosine to 0 follows", group="run")
    max_grad_norm: float = option(0.5, "gradients are clipped to this global norm", group="run")
    seed: int = option(0, "of the order of the data and the lengths", group="run")
    save_interval: int = option(5000, "steps between checkpoints", group="run")
    ttt_length: int | None = option(
        None,
        "length of the unroll without --ttt-length-dist; 7 for EAGLE-3, 3 for Qwen3.5, 6 for Gemma 4",
        group="objective",
    )
    ttt_length_dist: tuple[int, ...] | None = option(
        None, "lengths of the unroll, one drawn each step", group="objective"
    )
    attention_backend: Literal["sdpa", "flex_attention", "eager", "fa"] = option(
        "flex_attention", "taken, and told what is used instead: PyTorch's own; see --attention", group="speed"
    )
    dataloader_num_workers: int = option(4, f"taken: {READ_AT_ONCE}", group="data")
    build_dataset_num_proc: int | None = option(None, f"taken: {READ_AT_ONCE}", group="data")
    cache_dir: str | None = option(None, "taken: tokens are not kept on disk", group="data")
    cache_key: str | None = option(None, "taken: tokens are not kept on disk", group="data")
    eval_interval: int = option(5000, "taken: every checkpoint is measured, see --save-interval", group="run")
    verbose: bool = option(False, "taken: the log has a line every --log-interval steps", group="run")
    train_hidden_states_path: Path | None = option(None, "features computed before", group=FORMER)
    eval_hidden_states_path: Path | None = option(None, "features of held-out data", group=FORMER)
    is_preformatted: bool = option(False, "texts with the chat template already in them", group=FORMER)
    train_only_last_turn: bool = option(False, "labels of the last answer alone", group=FORMER)
    is_vlm: bool = option(False, "a target that sees images", group=FORMER)
    trust_remote_code: bool = option(False, "run code of a checkpoint", group=FORMER)
    tp_size: int = option(1, "devices of the target", group=FORMER)
    sp_ulysses_size: int = option(1, "devices of a sequence", group=FORMER)
    sp_ring_size: int = option(1, "devices of a sequence", group=FORMER)
    shard_target_output: bool = option(False, "spread the target's output over devices", group=FORMER)
    embedding_key: str | None = option(None, "name of the target's embedding", group=FORMER)
    lm_head_key: str | None = option(None, "name of the target's head", group=FORMER)
    lk_loss_type: str | None = option(None, "another objective", group=FORMER)
    kl_scale: float = option(1.0, "of another objective", group=FORMER)
    kl_decay: float = option(3.0, "of another objective", group=FORMER)
    model_download_dir: str | None = option(None, "where checkpoints are kept", group=FORMER)
    total_steps: int | None = option(None, "steps of the schedule", group=FORMER)
    report_to: Literal["none", "csv", "tensorboard"] = option(  # pyright: ignore[reportIncompatibleVariableOverride]
        "none", "none: train.csv alone", group="run"
    )


def forwarded(prog: str, words: list[str]) -> list[str]:
    """The same command line for `dloop train`. Notes go to standard error. Raises UserError for what is not offered."""
    command = parse(Published, prog, words)
    refuse(command, TAKEN)
    for flag, count in ((STEPS, command.max_num_steps), (ACCUMULATION, command.draft_accumulation_steps)):
        if count is not None and count < 1:
            raise UserError(f"{flag} {count} must be at least 1")
    is_text = command.train_data_path.suffix == ".jsonl"
    if is_text and command.chat_template == "llama3":
        raise UserError("--chat-template llama3 is not offered: name qwen (for Qwen3) or model (the target's own)")
    refuse_two(command.attention, command.attention_backend)
    tell(prog, "sdpa" if command.attention == "flex" else command.attention_backend)
    start = merged("--draft-init-path", command.draft_init_path, "--ckpt-dir", command.ckpt_dir, None)
    if command.mtp is not None:
        start = head_of(command, start)
    meant = replace(
        command,
        draft_init_path=start,
        draft_config_path=merged(
            "--draft-config-path", command.draft_config_path, "--draft-model-config", command.draft_model_config, None
        ),
        max_steps=merged("--max-steps", command.max_steps, STEPS, command.max_num_steps, None),
        accumulation_steps=merged(
            "--accumulation-steps", command.accumulation_steps, ACCUMULATION, command.draft_accumulation_steps, 1
        ),
        chat_template=command.chat_template if is_text else "model",
        report_to="csv" if command.report_to == "none" else command.report_to,
        ttt_length_dist=command.ttt_length_dist or (length_of(command),),
    )
    return as_command(meant)


def length_of(command: Published) -> int:
    """The length of every unroll. Raises UserError for one that no run can use."""
    host = HOST_LENGTH[command.mtp]
    length = host if command.ttt_length is None else command.ttt_length
    if not 1 <= length <= MOST_STEPS:
        raise UserError(f"--ttt-length {length} must be a length from 1 to {MOST_STEPS}; leave it out for {host}")
    return length


def head_of(command: Published, start: str | None) -> str:
    """The MTP head to start from. Raises UserError where something else is named."""
    if command.draft_model_config is not None or command.draft_config_path is not None:
        raise UserError(f"--mtp {command.mtp} trains a head that is there, not one of a config; leave the config out")
    if start in (None, BUILT_IN):
        if command.mtp == "gemma4":
            raise UserError(
                "--mtp gemma4 trains an assistant, which is a checkpoint of its own; give it as --ckpt-dir, "
                "google/gemma-4-12B-it-assistant say"
            )
        return BUILT_IN
    from dloop import checkpoint  # torch only from here on
    from dloop.detect import GEMMA_FAMILY, MTP_FAMILY, detect_family

    folder = checkpoint.resolve(start, None, "--ckpt-dir")
    raw = checkpoint.read_json(folder / "config.json", start)
    family = detect_family(raw, start, lambda: checkpoint.tensor_names(folder))
    if family != {"qwen3.5": MTP_FAMILY, "gemma4": GEMMA_FAMILY}[command.mtp or "qwen3.5"]:
        raise UserError(f"--mtp {command.mtp}: {start} is a drafter of {family}; give a head, or leave out --mtp")
    return start


def merged(ours: str, value: T, theirs: str, given: T, default: T) -> T:
    """One value of two flags that mean the same. Raises UserError if both are given and differ."""
    if given == default:
        return value
    if value not in (default, given):
        raise UserError(f"{ours} {value} and {theirs} {given} mean the same thing; give one")
    return given
