"""`dloop data`: its flags. The work is in `dloop.cli.data_run`: help and typing errors load no torch."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.cli.args import Common, option, required
from dloop.errors import UserError

MODELS, DATA, SAMPLING, RUN = "models", "data", "sampling", "run"
FORMS = (".npz", ".jsonl")


@dataclass(frozen=True, kw_only=True)
class Command(Common):
    """Let a target answer prompts, many at once: its answers are the training data of its drafters.

    Prompts are JSON lines: {"prompt": "..."}, {"turns": ["...", ...]}, or {"conversations": [...]} or {"messages":
    [...]} with turns {role, content} or {from, value}. Each is asked its first question, with the system prompt before
    it if there is one; answers and later turns in the file are not used. Lines that are left out are counted by reason.
    An .npz holds the target's own tokens, as decoding sees them; a .jsonl holds conversations as text. OUTPUT.json
    tells how they came about. A run that was stopped keeps its answers in OUTPUT.parts; --resume goes on exactly there.

    `dloop data prepare` makes such prompts of a data set, `dloop data regenerate` has servers answer whole
    conversations, `dloop data inspect` shows what training sees; each has its own --help.
    """

    model: str = required("target: a folder, a hub id owner/name, or smollm2 (small, fetched once)", group=MODELS)
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic", group=MODELS)
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one", group=MODELS)
    engine: Literal["auto", "fast", "twin"] = option(
        "auto", "fast: static memory, fused weights, kernels on a GPU; twin: transformers' own forward", group=MODELS
    )
    revision: str | None = option(None, "the target's branch, tag or commit on the hub", group=MODELS)
    prompts: Path = required("prompts to answer: .jsonl or .jsonl.gz", group=DATA)
    output: Path = required("where the data go: .npz for tokens, .jsonl for conversations as text", group=DATA)
    chat_template: Literal["model", "qwen", "none"] = option(
        "model",
        "how prompts are written, thinking off: model is the target's own template; qwen is ChatML, with the system "
        "prompt 'You are a helpful assistant.' where there is none; none gives them as they are (.npz only)",
        group=DATA,
    )
    max_prompt_tokens: int | None = option(None, "longer prompts are left out", group=DATA)
    max_samples: int | None = option(None, "answer the first N usable prompts; all by default", group=DATA)
    max_new_tokens: int = option(320, "most tokens of an answer; longer ones are cut, kept and counted", group=SAMPLING)
    temperature: float = option(0.0, "0 is greedy", group=SAMPLING)
    top_k: int = option(0, "draw among the k likeliest tokens; 0 is off", group=SAMPLING)
    top_p: float = option(1.0, "draw among the likeliest tokens of this mass; 1.0 is off", group=SAMPLING)
    seed: int = option(0, "of sampling; every prompt's own seed is made from it and its line", group=SAMPLING)
    live: int | Literal["auto"] = option(
        "auto", "texts decoded at once, which take memory; auto: 256 on a GPU, 16 on a CPU", group=RUN
    )
    shard: int = option(4096, "answers are written down after every so many", group=RUN)
    resume: bool = option(False, "go on from what OUTPUT.parts holds", group=RUN)


def run(command: Command) -> int | None:
    refuse(command)
    from dloop.cli.data_run import write_data  # torch and transformers only from here on

    return write_data(command)


def refuse(command: Command) -> None:
    """What can be told before anything is loaded."""
    if command.output.suffix not in FORMS:
        raise UserError(f"--output {command.output} must end in .npz (tokens) or .jsonl (conversations as text)")
    if command.output.suffix == ".jsonl" and command.chat_template == "none":
        raise UserError("--chat-template none makes no conversations; give --output a name in .npz")
    for name in ("max_prompt_tokens", "max_samples", "max_new_tokens", "live", "shard"):
        value: int | str | None = getattr(command, name)
        if isinstance(value, int) and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value} must be at least 1")
    if not command.prompts.is_file():
        raise UserError(f'--prompts {command.prompts} is no file; give JSON lines such as {{"prompt": "..."}}')
