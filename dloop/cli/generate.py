"""`dloop generate`: its flags and its prompt, without torch. The decoding is in `dloop.cli.answer`."""

import dataclasses
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dloop.chat import Message, read_messages
from dloop.cli.args import Common, option, required
from dloop.errors import UserError, refuse_output

PROMPT, LOOP, SAMPLING, TREES, MODELS = "prompt (one of these)", "loop", "sampling and end", "other families", "models"
OFFLINE, OWN_DRAFTER = "smollm2", "demo"
DEFAULT_PROMPT = "Write a Python function that checks whether a word is a palindrome."
LOOP_ONLY = (
    *("draft_model", "draft_revision", "loop_gate", "gate_sum", "gate_state", "max_stages", "gap_rows"),
    *("draft_rope_theta", "stop_rule", "gate_head"),
)


@dataclass(frozen=True, kw_only=True)
class Decoding(Common):
    """The flags of a decode: all but the prompt."""

    model: str = required("target: a folder, a hub id owner/name, or smollm2 (small, fetched once)", group=MODELS)
    draft_model: str | None = option(
        None, "drafter: a folder, a hub id, demo (for smollm2, its default), or mtp (Qwen3.5's own head)", group=MODELS
    )
    baseline: bool = option(False, "plain decoding, without a drafter", group=MODELS)
    dtype: Literal["bfloat16", "float32"] = option("bfloat16", "arithmetic of both models", group=MODELS)
    device: str = option("auto", "cpu, cuda, cuda:1 ...; auto takes the GPU if there is one", group=MODELS)
    engine: Literal["auto", "fast", "twin"] = option(
        "auto", "fast: static memory, fused weights, kernels on a GPU; twin: transformers' own forward", group=MODELS
    )
    revision: str | None = option(None, "the target's branch, tag or commit on the hub", group=MODELS)
    draft_revision: str | None = option(None, "the drafter's branch, tag or commit on the hub", group=MODELS)

    loop_gate: float | Literal["auto", "auto:full"] = option(
        1.0,
        "draft another stage while the last one's summed top-1 log-probability is at least this, e.g. -0.5; "
        "1.0 never opens: the drafter as released; -inf is always open; auto weighs what a stage should bring against "
        "its time, and learns both while decoding (auto:full: with a model of every token)",
        group=LOOP,
    )
    gate_sum: Literal["last", "all"] = option("last", "what is summed: the last stage or all of them", group=LOOP)
    gate_state: Path | None = option(
        None, "a file for what --loop-gate auto learns: read if it is there, and written (bench only reads)", group=LOOP
    )
    max_stages: int = option(12, "most drafting stages before a verification", group=LOOP)
    gap_rows: Literal["producing", "position", "anchor_included"] | None = option(
        None, "which draft hidden states fill unverified positions; default: as the drafter was trained", group=LOOP
    )
    stop_rule: str | None = option(
        None,
        "an adaptive-length baseline that ends stages early, NAME or NAME:param=value,...: bild, svip, adaedl, llmcad, "
        "specdec++, disco, disco-ffn, adaeagle, ddd, pacer, dspark; a stage that it cuts is its round's last",
        group=LOOP,
    )
    gate_head: Path | None = option(
        None, "the trained head that specdec++, disco-ffn, adaeagle or pacer reads: a folder", group=LOOP
    )

    max_new_tokens: int = option(256, "most tokens of the answer", group=SAMPLING)
    stop_token_ids: tuple[int, ...] | Literal["model"] = option(
        "model", 'ids that end the text; model: the target\'s own; "" for none', group=SAMPLING
    )
    temperature: float = option(0.0, "0 is greedy", group=SAMPLING)
    top_k: int = option(0, "draw among the k likeliest tokens; 0 is off", group=SAMPLING)
    top_p: float = option(1.0, "draw among the likeliest tokens of this mass; 1.0 is off", group=SAMPLING)
    seed: int | None = option(None, "of sampling; without one a fresh seed is drawn and recorded", group=SAMPLING)
    verify: Literal["auto", "match", "reject"] = option(
        "auto", "acceptance; match gives plain sampling's text with the same seed, token for token", group=SAMPLING
    )
    exact: bool | Literal["auto"] = option(
        "auto", "bit-identical to plain decoding; auto: where offered", group=SAMPLING
    )

    tree_budget: int | Literal["host"] = option(
        "host",
        "nodes of the first stage's tree; 0 is a chain; host: EAGLE-3 60 with the root (0 on Qwen3.5), others 0",
        group=TREES,
    )
    stage_tree_budget: int | Literal["host"] = option(
        "host", "nodes of each further stage's tree; 0 is a chain; host: EAGLE-3 48, DFlash 64, others 0", group=TREES
    )
    topk_k: int = option(
        10, "candidates at each depth (DFlash), width of the beam (EAGLE-3); at most 1024", group=TREES
    )
    tree_width: int = option(12, "nodes at each depth before pruning (DSpark, Domino); at most 1024", group=TREES)
    tree_beta: float = option(-0.2, "length bonus of each depth, at most 0 (DSpark, Domino)", group=TREES)
    draft_depth: int | None = option(
        None, "tokens or levels of a stage (EAGLE-3); by default 7 in a chain, 8 in a tree", group=TREES
    )
    draft_rope_theta: float | None = option(
        None, "RoPE base that the drafter was trained with, where its config says another (EAGLE-3)", group=TREES
    )
    mtp_k: int | None = option(
        None, "drafting steps of a stage (MTP); 3 by default for Qwen3.5, 6 for Gemma 4", group=TREES
    )


@dataclass(frozen=True, kw_only=True)
class Command(Decoding):
    """Decode one prompt: the text goes to standard output as it comes, one line of numbers to standard error.

    The text is the one the target alone gives; the drafter only makes it come faster. With --json, nodes in
    `parents` and `path` are numbered through a round's whole draft: 0 is the anchor, 1 the first drafted token.
    """

    prompt: str | None = option(None, "a text", group=PROMPT)
    prompt_file: Path | None = option(None, "a file in UTF-8; - or no prompt flag at all: standard input", group=PROMPT)
    prompt_ids: tuple[int, ...] | None = option(None, "token ids, taken as they are", group=PROMPT)
    messages: str | None = option(None, 'a conversation in JSON: [{"role": "user", "content": "Hello"}]', group=PROMPT)
    chat: bool | Literal["auto"] = option(
        "auto", "put the text into the target's chat template, thinking off; auto: if it has one", group=PROMPT
    )

    trace: bool = option(False, "show every token with the stage it came from, on standard error", group="output")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What was asked; one of the three is given."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: list[Message] | None = None


def run(command: Command) -> int | None:
    prompt, name = read_prompt(command), drafter_name(command)  # a faulty prompt is told before any notice
    from dloop.cli.answer import answer  # torch and transformers only from here on

    return answer(command, prompt, name)


def drafter_name(command: Decoding, prog: str = "dloop generate") -> str | None:
    """The drafter to load; None is plain decoding."""
    if command.gate_state is not None and not isinstance(command.loop_gate, str):
        raise UserError("--gate-state keeps what --loop-gate auto learns; give both, or leave it out")
    refuse_output(command.gate_state, "--gate-state")
    if command.baseline:
        defaults = {field.name: field.default for field in dataclasses.fields(command)}
        given = [name for name in LOOP_ONLY if getattr(command, name) != defaults[name]]
        if given:
            flags = ", ".join("--" + name.replace("_", "-") for name in given)
            raise UserError(f"{flags} means nothing with --baseline, which decodes without a drafter; leave one out")
        return None
    if command.draft_model is not None:
        return command.draft_model
    if command.model != OFFLINE:
        raise UserError(
            f"--model {command.model} needs --draft-model, a drafter trained for it, or --baseline for plain decoding"
        )
    print(f"{prog}: without --draft-model, smollm2 takes its own: --draft-model demo", file=sys.stderr)
    return OWN_DRAFTER


def read_prompt(command: Command) -> Prompt:
    """The one prompt that was given; standard input if there is none."""
    sources = ("prompt", "prompt_file", "prompt_ids", "messages")
    given = ["--" + name.replace("_", "-") for name in sources if getattr(command, name) is not None]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} are both prompts; give one")
    if command.messages is not None:
        if command.chat is False:
            raise UserError("--messages needs the chat template; leave out --no-chat, or give --prompt")
        return Prompt(messages=read_messages(command.messages))
    if command.prompt_ids is not None:
        return Prompt(ids=command.prompt_ids)
    text = command.prompt if command.prompt is not None else read_text(command)
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise UserError(f"the prompt {text[:20]!a} holds bytes that are no UTF-8; give the text in UTF-8")
    if not text.strip():
        raise UserError("the prompt is empty; give --prompt TEXT, --prompt-file FILE, --prompt-ids or --messages")
    return Prompt(text=text)


def read_text(command: Command) -> str:
    """A file or standard input, less the newline at its end that editors and echo add."""
    path = command.prompt_file
    if path is None and not is_piped():
        if command.model != OFFLINE:
            return ""
        print(f"dloop generate: no prompt given, taking: {DEFAULT_PROMPT}", file=sys.stderr)
        return DEFAULT_PROMPT
    try:
        data = sys.stdin.buffer.read() if path in (None, Path("-")) else path.read_bytes()
        return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"the prompt in {path or 'standard input'} cannot be read ({error}); give a file in UTF-8"
        ) from error


def is_piped() -> bool:
    """Whether standard input brings a text: a terminal and /dev/null do not."""
    try:
        return not stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):  # no standard input at all
        return False
