"""What `dloop train` refuses before and after it has seen the models: one line, the value and the way out."""

import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import cast

from dloop.cli.train import MOST_STEPS, Command
from dloop.detect import BLOCK_FAMILIES, CHAIN_FAMILIES
from dloop.drafters.host import HostConfig
from dloop.errors import UserError, refuse_folder
from dloop.targets.hf import HFTarget
from dloop.train.parallel import Share, from_environment

MOST_ANCHORS = 100_000
COUNTS = ("num_epochs", "max_steps", "batch_size", "accumulation_steps", "log_interval", "save_interval")
RULES: tuple[tuple[str, Callable[[float], bool], str], ...] = (  # written so that NaN breaks every one
    ("max_length", lambda value: value >= 2, "at least 2"),
    *((name, lambda value: value >= 1, "at least 1") for name in COUNTS),
    ("keep_last", lambda value: value >= 1, "at least 1; leave it out to keep all"),
    ("learning_rate", lambda value: 0 < value < math.inf, "above 0 and finite"),
    ("warmup_ratio", lambda value: 0 <= value < 1, "at least 0 and below 1"),
    ("max_grad_norm", lambda value: value > 0, "above 0 (inf clips nothing)"),
    ("seed", lambda value: 0 <= value < 2**31, "at least 0 and below 2^31"),
    ("num_anchors", lambda value: 1 <= value <= MOST_ANCHORS, f"at least 1 and at most {MOST_ANCHORS}"),
    ("loss_decay_gamma", lambda value: value > 0, "above 0 (inf weighs all rows alike)"),
    ("dspark_ce_loss_alpha", lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    ("dspark_l1_loss_alpha", lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    ("dspark_confidence_head_alpha", lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    ("lambda_base_start", lambda value: 0 <= value <= 1, "a share from 0 to 1"),
    ("lambda_base_decay_ratio", lambda value: 0 <= value < math.inf, "at least 0 and finite"),
    ("position_offset_max", lambda value: 0 <= value < 2**31, "at least 0 (0 leaves positions alone)"),
    ("dloop_max_stage", lambda value: value >= 0, "at least 0 (0 trains the host alone)"),
    ("dloop_loss_weight", lambda value: 0 <= value <= 1, "a weight from 0 to 1"),
    ("dist_timeout", lambda value: value >= 1, "at least 1 minute"),
    ("eval_samples", lambda value: value >= 1, "at least 1"),
    ("eval_max_new_tokens", lambda value: value >= 2, "at least 2"),
    ("eval_gate", lambda value: value == value, "a number; 1 never opens"),
    ("loss_mask_shift", lambda value: value in (0, 1), "0 or 1"),
)
FAMILIES_OF: dict[str, tuple[str, ...]] = {  # flags that some objectives have no use for
    "dspark_ce_loss_alpha": ("dspark",),
    "dspark_l1_loss_alpha": ("dspark",),
    "dspark_confidence_head_alpha": ("dspark",),
    "dloop_loss_weight": ("dspark", "domino"),
    "lambda_base_start": ("domino",),
    "lambda_base_decay_ratio": ("domino",),
    "num_anchors": BLOCK_FAMILIES,
    "loss_decay_gamma": BLOCK_FAMILIES,
    "dloop_max_stage": BLOCK_FAMILIES,
    "gap_rows": BLOCK_FAMILIES,
    "init_layers": BLOCK_FAMILIES,
    "ttt_length_dist": CHAIN_FAMILIES,
    "loss_mask_shift": CHAIN_FAMILIES,
    "draft_rope_theta": ("eagle3",),
}


def refuse_unsupported(command: Command) -> None:
    """Flags that cannot be honoured here are refused by name, before anything is loaded."""
    if from_environment().world > 1 and command.cuda_graphs:
        raise UserError("--cuda-graphs is for one process; leave it out under torchrun")
    if command.target_model_backend == "sglang":
        raise UserError("--target-model-backend sglang is not offered; hf runs the target inside the trainer")
    if (command.draft_init_path is None) == (command.draft_config_path is None):
        raise UserError("give either --draft-init-path (a drafter to start from) or --draft-config-path (a new one)")
    if command.init_layers is not None and command.draft_init_path is not None:
        raise UserError(
            f"--init-layers {','.join(map(str, command.init_layers))} has no use with --draft-init-path, which brings "
            "its own layers; leave one of them out"
        )
    if command.position_offset_max and command.cache_features:
        raise UserError(
            f"--position-offset-max {command.position_offset_max} moves samples each step, and --cache-features keeps "
            "what the target says at one place; leave one of them out"
        )
    refuse_together(command)


def refuse_together(command: Command) -> None:
    """Flags that make no sense beside one another."""
    if command.on_the_fly_loader and (command.strict_data or command.cache_features):
        other = "--strict-data" if command.strict_data else "--cache-features"
        raise UserError(
            f"--on-the-fly-loader does not know the samples beforehand, as {other} must; leave one of them out"
        )
    if command.profile and not command.dry_run:
        raise UserError("--profile takes steps that are no part of a run; add --dry-run")
    if command.peak_tflops is not None and not (command.profile and 0 < command.peak_tflops < math.inf):
        raise UserError(f"--peak-tflops {command.peak_tflops} must be above 0, and goes with --profile")
    if command.cuda_graphs and command.accumulation_steps > 1:
        raise UserError("--cuda-graphs needs --accumulation-steps 1; leave one of them out")


def refuse_numbers(command: Command) -> None:
    """Raises UserError at a number no run can use, NaN included."""
    for name, holds, words in RULES:
        value = getattr(command, name)
        if value is not None and not holds(value):
            raise UserError(f"--{name.replace('_', '-')} {value} must be {words}")
    lengths = command.ttt_length_dist
    if lengths is not None and not (lengths and all(1 <= length <= MOST_STEPS for length in lengths)):
        given = spelled(lengths)
        raise UserError(f"--ttt-length-dist {given} must be lengths from 1 to {MOST_STEPS}, such as 7,14,21")


def make_writable(folder: Path, *files: str, dry: bool) -> None:
    """Make the output folder, unless `dry`. Raises UserError if it cannot be made or written to, or has folders where
    these files will go: now, not after the first steps.
    """
    for name in files:
        refuse_folder(folder / name, "--output-dir")
    try:
        if not dry:
            folder.mkdir(parents=True, exist_ok=True)
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise UserError(
            f"--output-dir {folder} cannot be written to ({error.strerror}); choose another folder"
        ) from error


def refuse_for_family(command: Command, config: HostConfig, target: HFTarget) -> None:
    """Raises UserError at a flag that the drafter's objective does not read, or positions that are not there."""
    for name, families in FAMILIES_OF.items():
        value = getattr(command, name)
        given = value != getattr(Command, name)
        flag = f"--{name.replace('_', '-')} {spelled(value)}"
        if given and config.family not in families:
            raise UserError(f"{flag} is for {' and '.join(families)}, this drafter is {config.family}; leave it out")
        if given and name.startswith("lambda_") and command.dloop_max_stage:
            raise UserError(
                f"{flag} is for training the host alone; with --dloop-max-stage {command.dloop_max_stage} the share "
                "is 0: leave it out, or give --dloop-max-stage 0"
            )
    if config.family in BLOCK_FAMILIES and command.num_anchors > command.max_length:
        raise UserError(
            f"--num-anchors {command.num_anchors} is more than --max-length {command.max_length}, and a token is one "
            "anchor at most; give as many anchors as tokens or fewer"
        )
    positions = min(target.context, config.max_positions)
    if command.position_offset_max > positions:
        raise UserError(
            f"--position-offset-max {command.position_offset_max} is beyond the {positions} positions that target and "
            "drafter are made for; give that many or fewer"
        )


def refuse_large_batch(command: Command, samples: int, share: Share) -> None:
    """Raises UserError where the data do not fill one batch."""
    size = command.batch_size * share.world
    if size > samples:
        many = f" in each of {share.world} processes" if share.world > 1 else ""
        raise UserError(
            f"--batch-size {command.batch_size}{many} is more than the {samples} samples of {command.train_data_path}; "
            "give a smaller one, or more data"
        )


def spelled(value: object) -> str:
    """A flag's value as it is typed."""
    return ",".join(map(str, cast(tuple[object, ...], value))) if isinstance(value, tuple) else str(value)
