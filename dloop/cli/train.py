"""`dloop train`: its flags. The work is in `dloop.cli.training`: help and typing errors load no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option, required

MOST_STEPS = 1024  # of an unroll


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Train a drafter for a target: the host's own objective, and a loop stage in the layout decoding runs.

    The drafter decides the family: DFlash, DSpark, Domino, EAGLE-3, Qwen3.5's MTP head or Gemma 4's assistant.
    Start from a drafter (--draft-init-path) or from the target's own layers (--draft-config-path, --init-layers).
    Checkpoints epoch_E_step_S in --output-dir load as --draft-model. Ctrl-C saves; --resume goes on exactly there.
    """

    target_model_path: str = required("the target: smollm2, a folder or a hub id", group="models")
    target_model_backend: Literal["hf", "sglang"] = option("hf", "hf runs the target in the trainer", group="models")
    draft_init_path: str | None = option(
        None, "drafter to start from: its config and weights; mtp is the target's built-in head", group="models"
    )
    draft_config_path: Path | None = option(None, "config.json of a new drafter", group="models")
    init_layers: tuple[int, ...] | None = option(
        None,
        "layers of the target that a new drafter's layers copy, such as 28,29; the last ones by default",
        group="models",
    )
    draft_rope_theta: float | None = option(
        None, "EAGLE-3: RoPE base that the drafter was trained with, where its config says another", group="models"
    )
    train_data_path: Path = required(
        "conversations (.jsonl, one a line), or tokens (.npz with 'flat' [tokens] and 'lens' [samples, 2])",
        group="data",
    )
    chat_template: Literal["model", "qwen"] = option(
        "model",
        "how conversations are written: model is the target's own template; qwen is ChatML, with the system prompt "
        "'You are a helpful assistant.' where there is none",
        group="data",
    )
    strict_data: bool = option(False, "stop at the first malformed line instead of skipping it", group="data")
    on_the_fly_loader: bool = option(
        False, "tokenise conversations when a batch wants them, not before the first step", group="data"
    )
    max_length: int = option(3072, "samples are cut at this many tokens", group="data")
    eval_data_path: Path | None = option(
        None,
        "held-out prompts (.jsonl as for dloop data, or .npz): every checkpoint's acceptance length on the target's "
        "greedy answers",
        group="evaluation",
    )
    eval_samples: int = option(16, "prompts of them", group="evaluation")
    eval_max_new_tokens: int = option(128, "most tokens of an answer", group="evaluation")
    eval_gate: float = option(-0.5, "loop gate that acceptance is measured under", group="evaluation")
    output_dir: Path = required("where checkpoints and train.csv go", group="run")
    resume: bool = option(False, "go on from the latest checkpoint in --output-dir", group="run")
    num_epochs: int = option(1, "passes over the data", group="run")
    max_steps: int | None = option(None, "optimiser steps; replaces --num-epochs", group="run")
    batch_size: int = option(1, "sequences of a forward, in each process", group="run")
    accumulation_steps: int = option(1, "forwards of an optimiser step", group="run")
    learning_rate: float = option(6e-4, "peak rate of AdamW", group="run")
    warmup_ratio: float = option(0.04, "share of the steps that warm up; a cosine to 0 follows", group="run")
    max_grad_norm: float = option(1.0, "gradients are clipped to this global norm", group="run")
    seed: int = option(42, "of the order of the data, the anchors and the depths", group="run")
    log_interval: int = option(50, "steps between lines of the log", group="run")
    save_interval: int = option(1000, "steps between checkpoints", group="run")
    keep_last: int | None = option(
        None, "checkpoints that stay, beside the one with the best measured acceptance; all by default", group="run"
    )
    report_to: Literal["csv", "tensorboard"] = option(
        "csv", "train.csv is always written; tensorboard beside it", group="run"
    )
    parallel: Literal["ddp", "fsdp"] = option(
        "ddp",
        "several processes (torchrun), each with its part of every batch: ddp keeps the drafter in all, fsdp spreads "
        "weights, gradients and optimiser state",
        group="run",
    )
    dist_timeout: int = option(30, "minutes that a process waits for the others", group="run")
    dry_run: bool = option(False, "check everything, tell what the run would do, and stop", group="run")
    profile: bool = option(
        False, "with --dry-run: time steps at every depth; FLOPs, memory and utilisation", group="run"
    )
    peak_tflops: float | None = option(
        None,
        "with --profile: the rate that utilisation is a share of; measured on a matrix product by default",
        group="run",
    )
    num_anchors: int = option(512, "most anchors of a sequence", group="objective")
    loss_decay_gamma: float = option(
        4.0, "row j of a stage weighs exp(-j / gamma); published: 7 for blocks of 16", group="objective"
    )
    position_offset_max: int = option(
        0, "samples begin at positions drawn anew each step, below this minus their length", group="objective"
    )
    dspark_ce_loss_alpha: float = option(0.1, "DSpark: weight of the cross-entropy", group="objective")
    dspark_l1_loss_alpha: float = option(0.9, "DSpark: weight of the distance to the target's law", group="objective")
    dspark_confidence_head_alpha: float = option(1.0, "DSpark: weight of the confidence head's loss", group="objective")
    lambda_base_start: float = option(
        1.0,
        "Domino, host training: first share of the uncorrected loss; 0 as soon as --dloop-max-stage > 0",
        group="objective",
    )
    lambda_base_decay_ratio: float = option(
        0.5, "Domino, host training: part of the run after which that share is 0", group="objective"
    )
    dloop_max_stage: int = option(
        3, "loop stage k ~ U{1..K} each step; 0 is the host objective alone", group="objective"
    )
    dloop_loss_weight: float = option(
        0.25, "loss = (1 - w) host + w loop; DFlash takes one mean over both instead", group="objective"
    )
    ttt_length_dist: tuple[int, ...] | None = option(
        None,
        "EAGLE-3, MTP: lengths of the unroll, one drawn each step; one number trains the host alone; by default one, "
        "two or three stages: 7,14,21 for EAGLE-3, 3,6,9 for Qwen3.5's head, 6,12,18 for Gemma 4's assistant",
        group="objective",
    )
    loss_mask_shift: int = option(
        0,
        "EAGLE-3, MTP: a row counts if the token of its features (0, as published) or the one after (1) is a label",
        group="objective",
    )
    gap_rows: Literal["producing", "position", "anchor_included"] | None = option(
        None,
        "which draft states fill the gap of unverified positions; the drafter's own reading by default",
        group="objective",
    )
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic; master weights are float32", group="speed")
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one", group="speed")
    attention: Literal["dense", "flex"] = option(
        "dense",
        "of packed stages and unrolls: dense masks keys that no row sees, flex leaves out blocks of them (a GPU)",
        group="speed",
    )
    gradient_checkpointing: bool = option(
        False, "run stages anew for the gradient instead of keeping what they computed: less memory", group="speed"
    )
    cache_features: bool = option(False, "run the target once and keep its features in device memory", group="speed")
    compile: bool = option(
        False,
        "fuse what runs between matrix products: layers of target, block drafters and EAGLE-3, the vocabulary's work",
        group="speed",
    )
    cuda_graphs: bool = option(False, "replay steps as CUDA graphs", group="speed")


def run(command: Command) -> int | None:
    from dloop.cli.training import run as train  # torch and transformers only from here on

    return train(command)
