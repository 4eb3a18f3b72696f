"""What `dloop generate` does: load, decode, stream the text, sum up."""

import dataclasses
import logging
import sys
import time
from collections.abc import Sequence

import torch
from rich.console import Console
from transformers.utils.logging import disable_progress_bar

from dloop.api import Stream, finished, start
from dloop.chat import Growing, Tokenizer, load_tokenizer
from dloop.cli.gate_state import kept
from dloop.cli.generate import Command, Prompt
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.load import load_drafter, load_target
from dloop.records import Answer, Json, document, dumps, looped_tokens, plain, stage_counts
from dloop.settings import Settings
from dloop.tally import Tally
from dloop.trace import trace
from dloop.types import Round

RECORDED = ("baseline", "chat", "revision", "draft_revision", "gate_state")
WIDE = 100  # columns from which a trace shows scores too

logger = logging.getLogger("dloop")


def answer(command: Command, prompt: Prompt, drafter_name: str | None) -> None:
    hush()
    target = load_target(command.model, command.dtype, device_of(command.device), command.revision, command.engine)
    tokenizer = load_tokenizer(target.folder, target.name)
    prompt_ids = encode(prompt, tokenizer, command)
    drafter = None
    if drafter_name:
        drafter = load_drafter(drafter_name, target, command.draft_revision, command.gap_rows, command.draft_rope_theta)
    settings = Settings(**{field.name: getattr(command, field.name) for field in dataclasses.fields(Settings)})
    with kept(command, drafter):
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


def hush() -> None:
    """No progress bars of transformers where standard error is piped."""
    if not sys.stderr.isatty():
        disable_progress_bar()


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
    text = say.text if tokenizer else None
    return Answer(prompt_ids=prompt_ids, generation=finished(stream, rounds), text=text, decode_s=decode_s)


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


def setting_of(command: Command, settings: Settings, drafter: HostDrafter | None) -> dict[str, Json]:
    """Every choice that led to the text, with what "as trained" came to."""
    chosen = dataclasses.asdict(settings) | {name: getattr(command, name) for name in RECORDED}
    chosen["gap_rows"] = drafter.config.gap_rows if drafter else None
    if isinstance(drafter, ChainDrafter):
        chosen["draft_rope_theta"] = drafter.config.rope_theta
    return {name: plain(value) for name, value in chosen.items()}


def summary(done: Answer, drafter: HostDrafter | None) -> str:
    generation = done.generation
    parts = [f"{len(generation.tokens)} tokens, ended by {generation.finish_reason}"]
    if generation.rounds:
        parts.append(f"{done.tokens_per_s:.1f} tokens/s")
    if drafter is None:
        parts.append("plain decoding")
    elif generation.rounds:
        counts = ", ".join(f"{stages}: {count}" for stages, count in stage_counts(generation.rounds).items())
        looped = looped_tokens(generation.rounds) / len(generation.tokens)
        parts += [
            f"tau {generation.acceptance_length:.2f} (mean over {len(generation.rounds)} rounds of accepted + 1)",
            f"rounds by stages {counts}",
            f"{looped:.0%} of the text from stages >= 2",
        ]
    return "; ".join(parts)


def warn_if_useless(rounds: Sequence[Round], drafter: HostDrafter | None) -> None:
    """Tell what is odd about the drafter's acceptance."""
    if drafter is not None and (line := Tally().add(rounds).suspicion(drafter.name)):
        logger.warning(line)
