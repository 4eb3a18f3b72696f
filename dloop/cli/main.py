"""`dloop COMMAND ...`: finds the command, reads its flags, turns errors into one line and an exit code.

0 good, 1 the run failed, 2 the user's error, 130 interrupted, 141 the reader of a pipe went away.
"""

import difflib
import importlib
import io
import logging
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple, Protocol, cast

from dloop import __version__
from dloop.cli.args import parse
from dloop.errors import UserError


class Entry(NamedTuple):
    """Where a command lives (imported on use), and what it does."""

    module: str
    about: str


COMMANDS = {
    "demo": Entry("dloop.cli.demo", "race plain decoding, the host drafter and the loop on a small real model"),
    "generate": Entry("dloop.cli.generate", "answer one prompt, and tell how the text came about"),
    "bench": Entry("dloop.cli.bench", "measure acceptance and speed on the paper's eight benchmarks"),
    "report": Entry("dloop.cli.report", "tell what was measured: tables, means, intervals, comparisons, a picture"),
    "latency": Entry("dloop.cli.latency", "time forwards, stages and rounds of a named shape against their floors"),
    "trace": Entry("dloop.cli.trace", "put on record what a pair drafts from every position of its texts"),
    "replay": Entry("dloop.cli.replay", "try gates on a trace, exactly and without a model; the oracles' bounds"),
    "calibrate": Entry(
        "dloop.cli.calibrate", "judge on a trace what gates read: ranking, precision, calibration, sweep"
    ),
    "tune": Entry("dloop.cli.tune", "find on a trace the best fixed gate, sum and stage cap, if the loop pays at all"),
    "check": Entry("dloop.cli.check", "certify that a pair is lossless, and tell arithmetic from faults"),
    "doctor": Entry("dloop.cli.doctor", "examine a pair: why are so few drafts accepted, and what to mend"),
    "chat": Entry("dloop.cli.chat", "talk with a target in the terminal"),
    "train": Entry("dloop.cli.train", "train a drafter for a target, loop stage included"),
    "data": Entry("dloop.cli.data", "let a target answer prompts, many at once: training data for its drafters"),
    "export": Entry("dloop.cli.export", "write a drafter in another published layout"),
}


PARTS = {  # `dloop COMMAND PART ...`
    "data": {
        "prepare": Entry("dloop.cli.data_prepare", "any data set of conversations in one dialect"),
        "regenerate": Entry("dloop.cli.data_regenerate", "answers from servers that run the target"),
        "inspect": Entry("dloop.cli.data_inspect", "conversations as training sees them, the labels in colour"),
    },
    "trace": {
        "record": Entry("dloop.cli.trace_record", "write a trace"),
        "sts": Entry("dloop.cli.trace_sts", "temperatures of DSpark's confidences, fitted on a trace"),
    },
    "train": {"gate-head": Entry("dloop.cli.train_gate_head", "a small head that a stop rule reads")},
}


class CommandModule(Protocol):
    """What each module of the table offers."""

    Command: type[object]  # a dataclass; its docstring and fields make the help

    def run(self, command: object) -> int | None:
        """Give the exit code; None is 0."""
        ...


def entry(argv: Sequence[str] | None = None) -> int:
    """Run one command line and give its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    prog = f"dloop {words[0]}" if words and words[0] in COMMANDS else "dloop"
    set_up()
    try:
        code = dispatch(prog, words)
        sys.stdout.flush()  # here, where a broken pipe is still caught
        return code
    except UserError as error:
        return fail(f"{prog}: error: {one_line(error)}", 2, words)
    except KeyboardInterrupt:
        return fail(f"\n{prog}: interrupted", 130, [])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter complains at its end
        return 141
    except Exception as error:  # the last line of defence: whatever went wrong, one line unless --debug
        hint = "" if "--debug" in words else "; --debug shows the traceback"
        return fail(f"{prog}: failed: {type(error).__name__}: {one_line(error)}{hint}", 1, words)


def dispatch(prog: str, words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(overview())
    elif words[0] == "--version":
        print(f"dloop {__version__}")
    elif words[0] not in COMMANDS:
        near = difflib.get_close_matches(words[0], COMMANDS, n=2)
        hint = f"did you mean {' or '.join(near)}?" if near else f"choose one of {', '.join(COMMANDS)}"
        raise UserError(f"{words[0]!r} is not a command; {hint}")
    else:
        parts = PARTS.get(words[0], {})
        part = words[1] if len(words) > 1 and words[1] in parts else None
        found = COMMANDS[words[0]] if part is None else parts[part]
        module = cast(CommandModule, importlib.import_module(found.module))
        try:
            command = parse(module.Command, f"{prog} {part}" if part else prog, words[2 if part else 1 :])
        except SystemExit:  # argparse has printed the help
            return 0
        return module.run(command) or 0
    return 0


def overview() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: dloop COMMAND [options]",
            "",
            "Looped speculative decoding: draft while the drafter is confident, verify once; the text is the target's.",
            "",
            *(f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items()),
            "",
            "`dloop COMMAND --help` explains every flag; `dloop --version` prints the version.",
        ]
    )


def fail(line: str, code: int, words: list[str]) -> int:
    if "--debug" in words:
        traceback.print_exc()
    print(line, file=sys.stderr)
    return code


def one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, UserError) or len(text) <= 300 else f"{text[:300]}..."


def set_up() -> None:
    """Warnings of `dloop` once each, on standard error; no download bars where that is piped."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("dloop: %(message)s"))
    handler.addFilter(Once())
    logger = logging.getLogger("dloop")
    logger.handlers, logger.propagate = [handler], False
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    stdout = sys.stdout
    if isinstance(stdout, io.TextIOWrapper) and not stdout.encoding.lower().startswith("utf"):
        stdout.reconfigure(errors="backslashreplace")  # an answer must not fail on a letter


class Once:
    """A logging filter that lets each message through once."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        is_new = message not in self.seen
        self.seen.add(message)
        return is_new
