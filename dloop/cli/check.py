"""`dloop check`: its flags and prompts, without torch. The work is in `dloop.cli.check_run`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option
from dloop.cli.demo import PROMPTS
from dloop.cli.generate import MODELS, OFFLINE
from dloop.errors import UserError, refuse_output

DEFAULT_PROMPTS = ("code", "story")  # one with long accepted runs, one with many rejections
TEXTS, SAMPLING = "texts", "sampling"


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Certify that a pair is lossless: that with this drafter the target writes what it writes alone.

    In float32 every text must be plain decoding's, token for token, whatever the gate. In bfloat16 a text may leave it
    at a near-tie; the target alone, given its own text several rows at a time, shows how much is arithmetic. At a
    temperature: plain sampling's text with the same seed, and for rejection sampling the target's law. Both memories
    are compared with fresh ones after rejections. Exits 1 on a fault, and says where it is and what it points at.
    """

    model: str = option(OFFLINE, "target: a folder, a hub id owner/name, or smollm2", group=MODELS)
    draft_model: str | None = option(
        None, "drafter: a folder, a hub id, or demo (for smollm2, its default)", group=MODELS
    )
    dtype: Literal["both", "float32", "bfloat16"] = option("both", "arithmetic to certify", group=MODELS)
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one", group=MODELS)
    engine: Literal["auto", "fast", "twin"] = option(
        "auto", "fast: static memory, fused weights, kernels on a GPU; twin: transformers' own forward", group=MODELS
    )
    revision: str | None = option(None, "the target's branch, tag or commit on the hub", group=MODELS)
    draft_revision: str | None = option(None, "the drafter's branch, tag or commit on the hub", group=MODELS)

    prompt: list[str] = option([], "texts to answer, repeatable; without any, two of the demo's", group=TEXTS)
    max_new_tokens: int = option(48, "most tokens of an answer", group=TEXTS)
    loop_gate: tuple[float, ...] = option(
        (1.0, -0.5, float("-inf")), "gates to try, joined by commas; 1.0 never opens, -inf always", group=TEXTS
    )
    max_stages: int = option(3, "most drafting stages before a verification", group=TEXTS)

    temperature: float = option(0.8, "of the sampling parts (in float32, if that is certified)", group=SAMPLING)
    seed: int = option(0, "of the sampling parts", group=SAMPLING)

    output: Path | None = option(None, "also write the certificate, as JSON, to this file", group="output")


def run(command: Command) -> int | None:
    check(command)
    name = drafter_name(command.model, command.draft_model, "dloop check", "a certificate is of a pair")
    from dloop.cli.check_run import certificate  # torch and transformers only from here on

    return certificate(command, name)


def check(command: Command) -> None:
    """What can be told before anything is loaded."""
    if not command.loop_gate:
        raise UserError("--loop-gate is empty; give gates joined by commas, such as 1.0,-0.5,-inf")
    if any(gate != gate for gate in command.loop_gate):
        raise UserError("--loop-gate nan is not a threshold; give numbers such as 1.0,-0.5,-inf")
    if command.max_new_tokens < 2:
        raise UserError(f"--max-new-tokens {command.max_new_tokens} leaves nothing to draft; give at least 2")
    if command.max_stages < 1:
        raise UserError(f"--max-stages {command.max_stages} must be at least 1")
    if not 1e-5 <= command.temperature < float("inf"):
        raise UserError(
            f"--temperature {command.temperature:g} is not a temperature to sample at (greedy texts are checked "
            "anyway); give a number such as 0.8"
        )
    if any(not text.strip() for text in command.prompt):
        raise UserError("--prompt is empty; give a text, or leave it out")
    refuse_output(command.output, "--output")


def drafter_name(model: str, draft_model: str | None, prog: str, why: str) -> str:
    """The drafter to load, for a command that needs one; `why` says so."""
    if draft_model is not None:
        return draft_model
    if model != OFFLINE:
        raise UserError(f"--model {model} needs --draft-model: {why}")
    print(f"{prog}: without --draft-model, smollm2 takes its own: --draft-model demo", file=sys.stderr)
    return "demo"


def prompts_of(command: Command) -> dict[str, str]:
    """The texts to answer, by short names."""
    given = {str(number): text for number, text in enumerate(command.prompt, start=1)}
    return given or {name: PROMPTS[name] for name in DEFAULT_PROMPTS}
