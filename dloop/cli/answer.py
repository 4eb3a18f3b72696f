"""What `dloop generate` does: load, decode, stream the text, sum up."""

import dataclasses
import logging
import os
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from dloop.api import Generation, Settings, Stream, start
from dloop.chat import Growing, Message, Tokenizer, load_tokenizer, read_messages
from dloop.cli.generate import Command
from dloop.drafters.block import BlockDrafter
from dloop.errors import UserError
from dloop.load import load_drafter, load_target
from dloop.records import Answer, Json, document, dumps, looped_tokens, plain, stage_counts
from dloop.trace import trace
from dloop.types import Round

OFFLINE = "smollm2"
DEFAULT_PROMPT = "Write a Python function that checks whether a word is a palindrome."
LOOP_ONLY = ("draft_model", "draft_revision", "loop_gate", "gate_sum", "max_stages", "gap_rows")
RECORDED = ("baseline", "chat", "revision", "draft_revision")
USELESS_ROUNDS, USELESS_LENGTH = 50, 1.05
WIDE = 100  # columns from which a trace shows scores too

logger = logging.getLogger("dloop")


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """What was asked; one of the three is given."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    messages: list[Message] | None = None


def answer(command: Command) -> None:
    name = drafter_name(command)
    prompt = read_prompt(command)
    target = load_target(command.model, command.dtype, device_of(command.device), command.revision)
    tokenizer = load_tokenizer(target.folder, target.name)
    prompt_ids = encode(prompt, tokenizer, command)
    drafter = load_drafter(name, target, command.draft_revision, command.gap_rows) if name else None
    settings = Settings(**{field.name: getattr(command, field.name) for field in dataclasses.fields(Settings)})
    done = decode(start(target, drafter, prompt_ids, settings), prompt_ids, tokenizer, quiet=command.json)
    warn_if_useless(done.generation.rounds, drafter)
    if command.json:
        print(dumps(document(target, drafter, setting_of(command, settings, drafter), done)))
    else:
        print(summary(done, drafter), file=sys.stderr)
    if command.trace:
        console = Console(stderr=True, highlight=False)
        show = tokenizer.show if tokenizer else as_words
        console.print(trace(done.generation.first, done.generation.rounds, show, scores=console.width >= WIDE))


def drafter_name(command: Command) -> str | None:
    """The drafter to load; None is plain decoding."""
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
    print("dloop generate: without --draft-model, smollm2 takes its own: --draft-model demo", file=sys.stderr)
    return "demo"


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
    if not text.strip():
        raise UserError("the prompt is empty; give --prompt TEXT, --prompt-file FILE, --prompt-ids or --messages")
    return Prompt(text=text)


def read_text(command: Command) -> str:
    """A file or standard input, less the newline at its end that editors and echo add."""
    path = command.prompt_file
    if path is None and stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode):  # a terminal or /dev/null: nobody pipes
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


def encode(prompt: Prompt, tokenizer: Tokenizer | None, command: Command) -> list[int]:
    if prompt.ids is not None:
        return list(prompt.ids)
    if tokenizer is None:
        raise UserError(f"{command.model} has no tokenizer beside its weights; give the prompt as --prompt-ids 1,2,3")
    if prompt.messages is not None:
        return tokenizer.encode_chat(prompt.messages)
    assert prompt.text is not None
    if command.chat is True or (command.chat == "auto" and tokenizer.has_template):
        return tokenizer.encode_chat([{"role": "user", "content": prompt.text}])
    return tokenizer.encode(prompt.text)


def device_of(given: str) -> str:
    return given if given != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def decode(stream: Stream, prompt_ids: list[int], tokenizer: Tokenizer | None, *, quiet: bool) -> Answer:
    """Decode to the end, printing the text as it comes unless `quiet`; only the decoding is timed."""
    growing = Growing(tokenizer.decode if tokenizer else as_words)
    say = Voice(quiet)
    say(growing.push([stream.first]))
    rounds: list[Round] = []
    decode_s, started = 0.0, time.perf_counter()
    for round in stream:
        decode_s += time.perf_counter() - started
        rounds.append(round)
        say(growing.push(round.emitted))
        started = time.perf_counter()
    say(growing.finish())
    say.end()
    assert stream.finish_reason is not None
    generation = Generation(
        tokens=growing.tokens,
        first=stream.first,
        rounds=rounds,
        finish_reason=stream.finish_reason,
        seed=stream.seed,
        exact=False,
    )
    text = say.text if tokenizer else None
    return Answer(prompt_ids=prompt_ids, generation=generation, text=text, decode_s=decode_s)


class Voice:
    """Says a text on standard output as it grows, unless `quiet`, and remembers it."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.text = ""

    def __call__(self, more: str) -> None:
        self.text += more
        if more and not self.quiet:
            print(more, end="", flush=True)

    def end(self) -> None:
        if not self.quiet and not self.text.endswith("\n"):
            print()


def as_words(tokens: Sequence[int]) -> str:
    """Ids in place of text, for targets without a tokenizer."""
    return " ".join(map(str, tokens))


def setting_of(command: Command, settings: Settings, drafter: BlockDrafter | None) -> dict[str, Json]:
    """Every choice that led to the text, with what "as trained" came to."""
    chosen = dataclasses.asdict(settings) | {name: getattr(command, name) for name in RECORDED}
    chosen["gap_rows"] = drafter.config.gap_rows if drafter else None
    return {name: plain(value) for name, value in chosen.items()}


def summary(done: Answer, drafter: BlockDrafter | None) -> str:
    generation = done.generation
    parts = [f"{len(generation.tokens)} tokens, ended by {generation.finish_reason}"]
    if generation.rounds:
        parts.append(f"{done.tokens_per_s:.1f} tokens/s")
    if drafter is None:
        parts.append("plain decoding")
    elif generation.rounds:
        counts = " ".join(f"{stages}x{count}" for stages, count in stage_counts(generation.rounds).items())
        looped = looped_tokens(generation.rounds) / len(generation.tokens)
        parts += [
            f"tau {generation.acceptance_length:.2f} (mean over {len(generation.rounds)} rounds of accepted + 1)",
            f"stages x rounds {counts}",
            f"{looped:.0%} of the text from stages >= 2",
        ]
    return "; ".join(parts)


def warn_if_useless(rounds: Sequence[Round], drafter: BlockDrafter | None) -> None:
    """The target repairs everything a broken drafter does: only this number shows it."""
    if drafter is None or len(rounds) < USELESS_ROUNDS:
        return
    tau = sum(round.accepted + 1 for round in rounds) / len(rounds)
    if tau < USELESS_LENGTH:
        logger.warning(
            "acceptance length %.2f after %d rounds: %s contributes nothing; was it trained for this target?",
            tau,
            len(rounds),
            drafter.name,
        )
