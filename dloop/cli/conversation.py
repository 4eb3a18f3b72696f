"""What `dloop chat` does: turn after turn, the whole conversation encoded anew each time."""

import dataclasses
import re
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from rich.console import Console

from dloop.api import Stream, start
from dloop.chat import Growing, Message, Tokenizer, load_tokenizer
from dloop.cli.answer import WIDE, Voice, device_of, hush, warn_if_useless
from dloop.cli.chat import HELP, Command, piped, typed
from dloop.cli.gate_state import kept
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.load import load_drafter, load_target
from dloop.records import SCHEMA, Json, acceptance_length, dumps, looped_tokens, plain, round_record, stage_counts
from dloop.settings import Settings
from dloop.targets.hf import HFTarget
from dloop.trace import trace
from dloop.types import FinishReason, Round

COMMAND = re.compile(r"/\w+$")


@dataclass
class Turn:
    """One answer as far as it came."""

    text: str = ""
    first: int | None = None  # None: stopped before the first token
    rounds: list[Round] = field(default_factory=list[Round])
    decode_s: float = 0.0
    finish: FinishReason | Literal["interrupted"] = "interrupted"
    seed: int | None = None

    @property
    def num_tokens(self) -> int:
        return (self.first is not None) + sum(len(round.emitted) for round in self.rounds)


@dataclass
class Conversation:
    """Who talks, and all that was said."""

    target: HFTarget
    drafter: HostDrafter | None
    tokenizer: Tokenizer
    settings: Settings
    opening: list[Message]  # the system prompt, if there is one
    messages: list[Message] = field(default_factory=list[Message])  # after the opening
    turns: list[Turn] = field(default_factory=list[Turn])
    tracing: bool = False
    failed: bool = False

    def begin(self, text: str) -> Stream:
        """An answer to this line, not begun. Raises UserError if the conversation has become too long."""
        prompt = self.tokenizer.encode_chat([*self.opening, *self.messages, {"role": "user", "content": text}])
        room = self.target.context - len(prompt)
        if self.messages and self.settings.max_new_tokens > room:
            raise UserError(
                f"the conversation is {len(prompt)} tokens long; with an answer of up to "
                f"{self.settings.max_new_tokens} it exceeds the context of {self.target.context}. Your line was not "
                "added: /reset starts a new conversation; a lower --max-new-tokens leaves more room for it"
            )
        return start(self.target, self.drafter, prompt, self.settings)

    def answer(self, text: str, *, quiet: bool) -> None:
        """One turn. Faults are told, and the conversation stays as it was before."""
        try:
            stream = self.begin(text)
        except UserError as error:
            self.failed = True
            print(f"dloop chat: {error}", file=sys.stderr)
            return
        turn = speak(stream, self.tokenizer, quiet=quiet)
        self.turns.append(turn)
        if turn.text:
            self.messages.append({"role": "user", "content": text})
            self.messages.append({"role": "assistant", "content": turn.text})
        if turn.finish == "interrupted":
            kept = "the answer so far stays" if turn.text else "nothing was said, your line is forgotten"
            print(f"(stopped; {kept})", file=sys.stderr)
        if self.tracing:
            self.show_trace(turn)
        warn_if_useless([round for turn in self.turns for round in turn.rounds], self.drafter)

    def show_trace(self, turn: Turn) -> None:
        console = Console(stderr=True, highlight=False)
        if turn.first is not None:
            console.print(trace(turn.first, turn.rounds, self.tokenizer.show, scores=console.width >= WIDE))

    def obey(self, line: str) -> bool:
        """Carry out a command; False ends the conversation."""
        name, argument = line.split()[0], " ".join(line.split()[1:])
        if name == "/exit":
            return False
        if name == "/reset":
            self.messages.clear()
            said = "the conversation is forgotten"
        elif name == "/stats":
            said = stats(self.turns)
        elif name == "/trace" and argument in ("on", "off"):
            self.tracing = argument == "on"
            said = f"trace {argument}"
        else:
            said = HELP if name == "/help" else f"{line} is not a command; {HELP}"
        print(said, file=sys.stderr)
        return True

    def document(self) -> dict[str, Json]:
        """Everything, for --json."""
        turns: list[dict[str, object]] = [
            {
                **{"text": turn.text, "first": turn.first, "finish_reason": turn.finish, "seed": turn.seed},
                **{"decode_s": turn.decode_s, "rounds": [round_record(round) for round in turn.rounds]},
            }
            for turn in self.turns
        ]
        return {
            "schema": SCHEMA,
            "target": self.target.name,
            "draft": self.drafter.name if self.drafter else None,
            "setting": {name: plain(value) for name, value in dataclasses.asdict(self.settings).items()},
            "messages": [dict[str, Json](role=m["role"], content=m["content"]) for m in self.opening + self.messages],
            "turns": turns,  # pyright: ignore[reportReturnType]
        }


def talk(command: Command, drafter_name: str | None, is_terminal: bool) -> int:
    """Load, then a turn a line until the end. Piped, 1 if a line got no answer."""
    conversation = open_conversation(command, drafter_name)
    if is_terminal:
        print(f"{conversation.target.name}: {HELP}", file=sys.stderr)
    with kept(command, conversation.drafter):
        hold(conversation, typed() if is_terminal else piped(), quiet=command.json)
    if command.json:
        print(dumps(conversation.document()))
    return int(conversation.failed and not is_terminal)


def hold(conversation: Conversation, lines: Iterable[str], *, quiet: bool) -> None:
    """Turn after turn, until the lines or one of them end it."""
    for line in filter(str.strip, lines):
        if not COMMAND.match(line.split()[0]):
            conversation.answer(line, quiet=quiet)
        elif not conversation.obey(line.strip()):
            break


def open_conversation(command: Command, drafter_name: str | None) -> Conversation:
    """Raises UserError for whatever would go wrong in every turn."""
    hush()
    target = load_target(command.model, command.dtype, device_of(command.device), command.revision, command.engine)
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None or not tokenizer.has_template:
        raise UserError(f"{command.model} has no chat template beside its weights; dloop generate takes plain prompts")
    drafter = None
    if drafter_name:
        drafter = load_drafter(drafter_name, target, command.draft_revision, command.gap_rows, command.draft_rope_theta)
    settings = Settings(**{field.name: getattr(command, field.name) for field in dataclasses.fields(Settings)})
    opening: list[Message] = [] if command.system is None else [{"role": "system", "content": command.system}]
    conversation = Conversation(target, drafter, tokenizer, settings, opening, tracing=command.trace)
    conversation.begin("Hello")
    return conversation


def speak(stream: Stream, tokenizer: Tokenizer, *, quiet: bool) -> Turn:
    """Say an answer as it comes, up to its end or Ctrl-C; half a character is never said."""
    growing, say, turn = Growing(tokenizer.decode), Voice(quiet), Turn()
    try:
        turn.first = stream.first
        say(growing.push([stream.first]))
        started = time.perf_counter()
        for round in stream:
            turn.decode_s += time.perf_counter() - started
            turn.rounds.append(round)
            say(growing.push(round.emitted))
            started = time.perf_counter()
        say(growing.finish())
        turn.finish = stream.finish_reason or "interrupted"
    except KeyboardInterrupt:
        pass  # `finish` says so
    say.end()
    turn.text, turn.seed = say.text, stream.seed
    return turn


def stats(turns: list[Turn]) -> str:
    """The numbers of all answers so far, those before a /reset too."""
    rounds = [round for turn in turns for round in turn.rounds]
    num_tokens, decode_s = sum(turn.num_tokens for turn in turns), sum(turn.decode_s for turn in turns)
    parts = [f"answers: {len(turns)}, tokens: {num_tokens}"]
    if rounds:
        counts = ", ".join(f"{stages}: {count}" for stages, count in stage_counts(rounds).items())
        parts += [
            f"{sum(len(round.emitted) for round in rounds) / decode_s:.1f} tokens/s",
            f"tau {acceptance_length(rounds):.2f} (mean over {len(rounds)} rounds of accepted + 1)",
            f"rounds by stages {counts}",
            f"{looped_tokens(rounds) / num_tokens:.0%} of the text from stages >= 2",
        ]
    return "; ".join(parts)
