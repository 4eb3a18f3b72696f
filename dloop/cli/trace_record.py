"""`dloop trace record`: its flags, without torch. The work is in `dloop.cli.trace_run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option, required
from dloop.cli.check import drafter_name
from dloop.cli.generate import MODELS
from dloop.errors import UserError

DATA, LIMITS, FAMILIES, RUN = "data", "limits", "other families", "run"


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Let a target write texts, and draft from every position of them as far as the limits allow.

    `dloop replay` then tells, exactly and without a model, what decoding these texts under any gate would be like.
    Prompts are JSON lines as for `dloop data`. Every position costs one verification and all its stages; drafts are
    chains. OUTPUT.json tells how the trace came about. A run that was stopped keeps whole texts in OUTPUT.parts;
    --resume goes on there.
    """

    model: str = required("target: a folder, a hub id owner/name, or smollm2 (small, fetched once)", group=MODELS)
    draft_model: str | None = option(
        None, "drafter: a folder, a hub id, demo (for smollm2, its default), or mtp (Qwen3.5's own head)", group=MODELS
    )
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic of both models", group=MODELS)
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one", group=MODELS)
    engine: Literal["auto", "fast", "twin"] = option(
        "auto",
        "fast: static memory, fused weights, kernels on a GPU; twin: transformers' own forward, and of block drafters "
        "each row's entropy, margin and confidence are kept too",
        group=MODELS,
    )
    revision: str | None = option(None, "the target's branch, tag or commit on the hub", group=MODELS)
    draft_revision: str | None = option(None, "the drafter's branch, tag or commit on the hub", group=MODELS)
    gap_rows: Literal["producing", "position", "anchor_included"] | None = option(
        None, "which draft hidden states fill unverified positions; default: as the drafter was trained", group=MODELS
    )

    prompts: Path = required("prompts to answer: .jsonl or .jsonl.gz", group=DATA)
    output: Path = required("where the trace goes: .npz", group=DATA)
    chat_template: Literal["model", "qwen", "none"] = option(
        "model", "how prompts are written, as for dloop data; none gives them as they are", group=DATA
    )
    max_prompt_tokens: int | None = option(None, "longer prompts are left out", group=DATA)
    max_samples: int | None = option(None, "trace the first N usable prompts; all by default", group=DATA)

    max_new_tokens: int = option(256, "most tokens of a text", group=LIMITS)
    max_stages: int = option(12, "most drafting stages before a verification; replay takes this or fewer", group=LIMITS)
    temperature: float = option(
        0.0, "of the texts; above 0 they are plain sampling's, drafts stay greedy", group=LIMITS
    )
    seed: int = option(0, "of sampling; every prompt's own seed is made from it and its line", group=LIMITS)

    draft_depth: int | None = option(None, "tokens of a stage (EAGLE-3); 7 by default", group=FAMILIES)
    draft_rope_theta: float | None = option(
        None, "RoPE base that the drafter was trained with, where its config says another (EAGLE-3)", group=FAMILIES
    )
    mtp_k: int | None = option(
        None, "drafting steps of a stage (MTP); 3 by default for Qwen3.5, 6 for Gemma 4", group=FAMILIES
    )
    resume: bool = option(False, "go on from what OUTPUT.parts holds", group=RUN)


def run(command: Command) -> int | None:
    refuse(command)
    name = drafter_name(command.model, command.draft_model, "dloop trace record", "a trace is of a pair")
    from dloop.cli.trace_run import record  # torch and transformers only from here on

    return record(command, name)


def refuse(command: Command) -> None:
    """What can be told before anything is loaded."""
    if command.output.suffix != ".npz":
        raise UserError(f"--output {command.output} must end in .npz")
    for name, least in (("max_prompt_tokens", 1), ("max_samples", 1), ("max_new_tokens", 2), ("max_stages", 1)):
        value: int | None = getattr(command, name)
        if value is not None and value < least:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least {least}")
    if not command.prompts.is_file():
        raise UserError(f'--prompts {command.prompts} is no file; give JSON lines such as {{"prompt": "..."}}')
    if not command.resume and command.output.exists():
        raise UserError(f"--output {command.output} exists; choose another name, or remove it")
