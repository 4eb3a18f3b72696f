"""What `dloop demo` does: the same prompts decoded plainly, by the host drafter and by the loop, in turns."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from dloop.api import start
from dloop.bench.heap import still_heap
from dloop.certificate.margins import NEAR_TIE, Difference, Keeping, first_difference
from dloop.chat import Tokenizer, load_tokenizer
from dloop.cli.answer import decode as decode_stream
from dloop.cli.answer import device_of
from dloop.cli.demo import PROMPTS, Command
from dloop.drafters.block import BlockModel
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.gate import NEVER_OPENS
from dloop.judge import Match
from dloop.load import DTypeName, load_drafter, load_target
from dloop.records import Answer, dumps, mean_of
from dloop.settings import Settings
from dloop.targets.hf import HFTarget
from dloop.train import replay
from dloop.types import Sampling

WARM_UP_TOKENS = 8
THREAD_TEST_TOKENS = 5
CONTROL_TOKENS = 48


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A target, its tokenizer and a drafter for it."""

    target: HFTarget
    tokenizer: Tokenizer
    drafter: HostDrafter


@dataclass(frozen=True)
class Way:
    """One way to decode."""

    name: str
    drafter: HostDrafter | None
    gate: float = NEVER_OPENS


@dataclass(frozen=True, kw_only=True)
class Run:
    """One answer, one way."""

    prompt: str
    way: str
    answer: Answer
    difference: Difference | None  # None: the same text as plain decoding


class Headroom(NamedTuple):
    """Acceptance length on plain decoding's texts, by exact replay: gate closed, as set, and the best gate there is."""

    closed: float
    gated: float
    oracle: float


@dataclass(frozen=True, kw_only=True)
class Race:
    """All runs of a race, and the same texts' proof in float32 (None: the race itself was in float32)."""

    runs: list[Run]
    control: Run | None
    headroom: Headroom | None = None  # None: the family cannot be replayed

    def faults(self, dtype: str) -> list[Run]:
        """Runs whose text differs where rounding cannot be the reason."""
        found = [run for run in self.runs if is_fault(run, dtype)]
        return found + [run for run in [self.control] if run and is_fault(run, "float32")]


def is_fault(run: Run, dtype: str) -> bool:
    return run.difference is not None and run.difference.gap > NEAR_TIE[dtype]


def race(command: Command) -> int:
    from dloop.cli.race_report import document, report  # it reads the records above

    if not 1 <= command.prompts <= len(PROMPTS):
        raise UserError(f"--prompts {command.prompts}: there are {len(PROMPTS)}: {', '.join(PROMPTS)}")
    disable_progress_bar()  # there is one of our own
    pair = load(command, command.dtype)
    kinds = list(PROMPTS)[: command.prompts]
    total = 3 * len(kinds) + (command.dtype != "float32")
    with bar(total) as progress, still_heap():
        runs = run_all(pair, command, kinds, progress)
        control = None if command.dtype == "float32" else float32_control(command, kinds[-1], progress)
    done = Race(runs=runs, control=control, headroom=headroom(pair, command.loop_gate, runs))
    if command.json:
        print(dumps(document(pair, command, done)))
    else:
        report(Console(highlight=False), pair, command, done)
    faults = done.faults(command.dtype)
    for run in faults:
        print(f"dloop demo: failed: {run.prompt}, {run.way}: not plain decoding's text", file=sys.stderr)
    return 1 if faults else 0


def load(command: Command, dtype: DTypeName) -> Pair:
    target = load_target(command.model, dtype, device_of(command.device), engine=command.engine)
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None:
        raise UserError(f"{command.model} has no tokenizer beside its weights; the demo needs one to show texts")
    return Pair(target=target, tokenizer=tokenizer, drafter=load_drafter(command.draft_model, target))


def bar(total: int) -> Progress:
    """Progress on standard error, silent when that is piped."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task("warming up", total=total)
    return progress


def run_all(pair: Pair, command: Command, kinds: list[str], progress: Progress) -> list[Run]:
    """Every prompt every way; the order of the ways turns, so that none always comes first."""
    plain, host = Way("plain", None), Way("host", pair.drafter)
    ways = [plain, host, Way("loop", pair.drafter, command.loop_gate)]
    choose_threads(pair.target, lambda: decode_one(pair, plain, kinds[0], THREAD_TEST_TOKENS).answer.decode_s)
    for way in ways:
        decode_one(pair, way, kinds[0], WARM_UP_TOKENS)
    runs: list[Run] = []
    for turn, kind in enumerate(kinds):
        done: dict[str, Decoded] = {}
        for way in ways[turn % 3 :] + ways[: turn % 3]:
            progress.update(progress.task_ids[0], description=f"{kind}: {way.name}")
            done[way.name] = decode_one(pair, way, kind, command.max_new_tokens)
            progress.advance(progress.task_ids[0])
        runs += [compare(kind, way.name, done["plain"], done[way.name]) for way in ways]
    return runs


def choose_threads(target: HFTarget, time: Callable[[], float]) -> None:
    """On a busy processor threads wait for one another, and one alone can be several times faster: measure."""
    many = torch.get_num_threads()
    if target.device.type != "cpu" or many == 1:
        return
    times: dict[int, float] = {}
    for threads in (many, 1, many, 1):  # the first of each also warms up
        torch.set_num_threads(threads)
        times[threads] = time()
    torch.set_num_threads(min(times, key=times.__getitem__))


def float32_control(command: Command, kind: str, progress: Progress) -> Run:
    """One answer again in float32, where no rounding excuses a difference."""
    progress.update(progress.task_ids[0], description=f"{kind} in float32")
    pair, length = load(command, "float32"), min(command.max_new_tokens, CONTROL_TOKENS)
    plain = decode_one(pair, Way("plain", None), kind, length)
    loop = decode_one(pair, Way("loop", pair.drafter, command.loop_gate), kind, length)
    progress.advance(progress.task_ids[0])
    return compare(kind, "loop", plain, loop)


def headroom(pair: Pair, gate: float, runs: Sequence[Run]) -> Headroom | None:
    """What the gate leaves to the oracle, which drafts on exactly while everything drafted is right."""
    model, target = pair.drafter.model, pair.target
    if not isinstance(model, BlockModel):
        return None
    texts = [(run.answer.prompt_ids, run.answer.generation.tokens) for run in runs if run.way == "plain"]
    vocabulary, depth = pair.drafter.vocabulary, Settings().max_stages
    traces = [replay.trace(model, vocabulary, target, prompt, answer, depth) for prompt, answer in texts]
    gates = (NEVER_OPENS, gate, None)
    return Headroom(*(mean_of([replay.walk(trace, g).acceptance_length for trace in traces]) for g in gates))


class Decoded(NamedTuple):
    answer: Answer
    rows: Float[Tensor, "T V"]  # the logits that each token was chosen from


def decode_one(pair: Pair, way: Way, kind: str, max_new_tokens: int) -> Decoded:
    settings = Settings(max_new_tokens=max_new_tokens, loop_gate=way.gate)
    tokenizer, target, text = pair.tokenizer, pair.target, PROMPTS[kind]
    chat = tokenizer.has_template
    ids = tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
    judge = Keeping(Match(Sampling()))
    stream = start(target, way.drafter, ids, settings, judge)
    answer = decode_stream(stream, ids, tokenizer, quiet=True)
    return Decoded(answer, judge.rows)


def compare(kind: str, way: str, plain: Decoded, other: Decoded) -> Run:
    ours, theirs = plain.answer.generation.tokens, other.answer.generation.tokens
    difference = first_difference(ours, theirs, lambda index: plain.rows[index].float())
    assert difference or len(ours) == len(theirs), (
        f"{way} ends {kind} after {len(theirs)} tokens, plain after {len(ours)}"
    )
    return Run(prompt=kind, way=way, answer=other.answer, difference=difference)
