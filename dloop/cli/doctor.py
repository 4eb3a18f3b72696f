"""`dloop doctor`: its flags and prompts, without torch. The work is in `dloop.cli.doctor_run`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option
from dloop.cli.check import drafter_name
from dloop.cli.generate import MODELS, OFFLINE
from dloop.diagnosis.prompts import PROMPTS
from dloop.errors import UserError, refuse_output

TEXTS = "texts"
LEAST_TOKENS = 8


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Examine a pair in about a minute: why are so few drafts accepted?

    The target repairs whatever a broken drafter does: a wrong layer index, RoPE base or mask token shows in the speed
    alone. The doctor reads both checkpoints, has the target write a few greedy texts, measures how far drafts from
    every position are accepted, and measures again with one thing changed at a time: other taps, norms, RoPE bases,
    positions, mask tokens, labels, layer orders, embeddings. A change that helps is the diagnosis, and is told first
    with its remedy. Nothing is written to either checkpoint. Exits 1 on a fault.
    """

    model: str = option(OFFLINE, "target: a folder, a hub id owner/name, or smollm2", group=MODELS)
    draft_model: str | None = option(
        None, "drafter: a folder, a hub id, or demo (for smollm2, its default)", group=MODELS
    )
    dtype: Literal["float32", "bfloat16"] = option("bfloat16", "arithmetic", group=MODELS)
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one", group=MODELS)
    engine: Literal["auto", "fast", "twin"] = option(
        "auto",
        "what writes the texts; fast: static memory, GPU kernels; twin: transformers' forward",
        group=MODELS,
    )
    revision: str | None = option(None, "the target's branch, tag or commit on the hub", group=MODELS)
    draft_revision: str | None = option(None, "the drafter's branch, tag or commit on the hub", group=MODELS)

    prompts: Path | None = option(
        None,
        f"a file of prompts, one a line (empty lines separate); without it {len(PROMPTS)} built-in ones",
        group=TEXTS,
    )
    max_new_tokens: int = option(48, "most tokens of an answer", group=TEXTS)

    output: Path | None = option(None, "also write the diagnosis, as JSON, to this file", group="output")


def run(command: Command) -> int | None:
    texts = check(command)
    name = drafter_name(command.model, command.draft_model, "dloop doctor", "a diagnosis is of a pair")
    from dloop.cli.doctor_run import examine  # torch and transformers only from here on

    return examine(command, name, texts)


def check(command: Command) -> list[str]:
    """The prompts; raises UserError for what can be told before anything is loaded."""
    if command.max_new_tokens < LEAST_TOKENS:
        raise UserError(
            f"--max-new-tokens {command.max_new_tokens} leaves too little to draft on; give at least {LEAST_TOKENS}"
        )
    refuse_output(command.output, "--output")
    if command.prompts is None:
        return list(PROMPTS)
    try:
        lines = command.prompts.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts {command.prompts} cannot be read ({error}); give a text file") from error
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise UserError(f"--prompts {command.prompts} holds no prompt; give one a line")
    return texts
