"""What `dloop latency` does: build a shape, then measure every setting, each on record as soon as it is done."""

import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
from rich.progress import Progress

from dloop.bench.decode import release
from dloop.bench.latency.book import (
    Entry,
    ceilings_of,
    check_apart,
    check_output,
    check_same,
    resumed,
    row_json,
    save,
    stage_json,
)
from dloop.bench.latency.floors import Cost, extend_cost, stage_cost, verify_cost
from dloop.bench.latency.models import BLOCK_SIZE, MARKOV_RANK, Pair, random_pair
from dloop.bench.latency.peers import PeerName, Setting, compare
from dloop.bench.latency.picture import check_picture, draw
from dloop.bench.latency.replay import PASSES, Pace, Turn, pace, replay
from dloop.bench.latency.rounds import Chance, Scripts, drawn_scripts, read_scripts
from dloop.bench.latency.shapes import Shape, shape_of
from dloop.bench.latency.show import show, show_replay
from dloop.bench.latency.stages import Drafters, Piece, host_work, other_stages
from dloop.bench.latency.timing import WARM_UPS, Ceilings, in_turns, measure_ceilings, warm_up
from dloop.bench.latency.verify import Verifiers
from dloop.bench.run import commit
from dloop.bench.speedup import device_name
from dloop.cli.answer import device_of, hush
from dloop.cli.latency import Command
from dloop.cli.race import bar
from dloop.errors import UserError
from dloop.load import DTYPES, check_device
from dloop.records import SCHEMA, Json, dumps, hardware, plain, versions

EXTEND_ROWS = BLOCK_SIZE + 1  # a fully accepted round of one stage


@dataclass(frozen=True)
class Bench:
    """One command's models."""

    command: Command
    shape: Shape
    pair: Pair

    @property
    def device(self) -> torch.device:
        return self.pair.target.device

    def prompt(self, count: int) -> list[int]:
        """Random tokens, the same for every contender and every run."""
        generator = torch.Generator().manual_seed(self.command.seed)
        return torch.randint(self.shape.vocab_size, (count,), generator=generator).tolist()


def latency(command: Command) -> int:
    """Rows and stages of a shape, or rounds replayed."""
    hush()
    shape, scripted = shape_of(command.shape), command.replay is not None or command.synthetic_acceptance is not None
    check_output(command.output, resume=command.resume)
    if command.synthetic_acceptance is not None:
        check_apart(command.output)
    if command.plot is not None:
        check_picture(command.plot)
    return replay_rounds(command, shape) if scripted else measure(command, shape)


def measure(command: Command, shape: Shape) -> int:
    """Every context, every number of rows, the drafting side, then the peers."""
    reserve = max(*command.rows, 2 * BLOCK_SIZE + (WARM_UPS + command.repeats) * EXTEND_ROWS)
    check_positions(shape, max(command.context) + reserve, f"--context {max(command.context)} and {reserve} rows more")
    book = resumed(command.output, resume=command.resume)
    bench = build(command, shape, BLOCK_SIZE)
    ceilings = measure_ceilings(bench.device, bench.pair.target.dtype)
    check_same(book, blank_entry(bench, command.context[0], ceilings))
    entries = [book.entry(blank_entry(bench, context, ceilings)) for context in command.context]
    with progress(command, entries) as advance:
        for entry in entries:
            for _ in measure_context(bench, entry, entry["context"] + reserve):
                book.save()
                advance(entry["context"])
            release(bench.device)
        for entry in entries if command.peers else []:  # last: they may change how the target's model runs
            names: list[PeerName] = [name for name in command.peers if not is_known(entry, name)]
            if names:
                entry["peers"] |= compare(Setting(bench.pair, shape, bench.prompt(entry["context"])), names)
                book.save()
            advance(entry["context"])
    finish(command, entries)
    return 0


def is_known(entry: Entry, peer: PeerName) -> bool:
    """Whether this tool's numbers are on record; one may have several, and one that failed is tried again."""
    found = [cast(dict[str, Json], value) for name, value in entry["peers"].items() if name.split(",")[0] == peer]
    return any(value["status"] == "ok" for value in found)


def finish(command: Command, entries: list[Entry]) -> None:
    """Tell what is on record."""
    if command.plot is not None:
        draw(entries, command.plot)
    if command.json:
        print(dumps(entries))
    else:
        show(entries)


def measure_context(bench: Bench, entry: Entry, capacity: int) -> Iterator[None]:
    """Measure what the entry lacks; a step each time that something is complete."""
    missing = [rows for rows in bench.command.rows if str(rows) not in entry["rows"]]
    prompt = bench.prompt(entry["context"])
    if missing:
        verifiers = Verifiers(bench.pair, prompt, capacity)
        jobs = {rows: verifiers.jobs(bench.prompt(rows)) for rows in missing}
        warm_up([job for found in jobs.values() for job in found], bench.device)
        for rows in missing:
            spreads = in_turns(jobs[rows], bench.command.repeats, bench.device)
            floor_ms = floor(entry, verify_cost(bench.pair.target, rows, entry["context"]))
            entry["rows"][str(rows)] = row_json(spreads, floor_ms)
            entry["quartiles_ms"][str(rows)] = {name: [found.low, found.high] for name, found in spreads.items()}
            yield
    if not entry["stage_ms"]:
        entry["stage_ms"] = measure_stages(bench, entry, capacity)
        yield


def measure_stages(bench: Bench, entry: Entry, capacity: int) -> dict[str, Json]:
    """The drafting side, and the loop's own host work."""
    drafter, context = bench.pair.drafter, entry["context"]
    drafters = Drafters(bench.pair, context, capacity)
    own = {
        "first": Piece(drafters.first(), stage_cost(drafter, context)),
        "later": Piece(drafters.later(), stage_cost(drafter, context + BLOCK_SIZE)),
        "extend": Piece(drafters.extend(EXTEND_ROWS), extend_cost(drafter, EXTEND_ROWS), {"rows": EXTEND_ROWS}),
    }
    found = timed(bench, entry, own)  # the last of them grows the context
    for pieces in other_stages(bench.shape, bench.pair.target, context, capacity):
        found |= timed(bench, entry, pieces)
    host = host_work(BLOCK_SIZE, bench.command.repeats)
    return {**found, "host": {"loop_ms": host.median, "quartiles_ms": [host.low, host.high]}}


def timed(bench: Bench, entry: Entry, pieces: Mapping[str, Piece]) -> dict[str, Json]:
    """Each piece's times, one piece after the other."""
    found: dict[str, Json] = {}
    for kind, (jobs, cost, size) in pieces.items():
        warm_up(jobs, bench.device)
        spreads = in_turns(jobs, bench.command.repeats, bench.device)
        found[kind] = {**stage_json(spreads, floor(entry, cost)), **size}
    return found


def floor(entry: Entry, cost: Cost) -> float:
    """Milliseconds, at the ceilings on record."""
    return ceilings_of(entry).floor_ms(cost.num_bytes, cost.flop)


def build(command: Command, shape: Shape, block_size: int) -> Bench:
    """The models, and a word where there is no fast path."""
    device = check_device(device_of(command.device))
    bench = Bench(command, shape, random_pair(shape, device, DTYPES[command.dtype], block_size))
    if bench.pair.reason is not None:
        print(f"dloop latency: fast: not available ({bench.pair.reason})", file=sys.stderr)
    return bench


def blank_entry(bench: Bench, context: int, ceilings: Ceilings) -> Entry:
    """What is known before anything is measured."""
    target, fast = bench.pair.target, bench.pair.fast_target
    machine = hardware(target.device)
    return {
        "schema": SCHEMA,
        "shape": bench.shape.name,
        "context": context,
        "gpu": device_name(machine),
        "dtype": bench.command.dtype,
        "parameters": bench.shape.num_parameters,
        "drafter": {
            "family": "dspark",
            "layers": bench.shape.drafter_layers,
            "taps": list(bench.pair.drafter.taps),
            "stage_len": BLOCK_SIZE,
            "markov_rank": MARKOV_RANK,
        },
        "fast": fast.attention if fast is not None else f"not available: {bench.pair.reason}",
        "repeats": bench.command.repeats,
        "rows": {},
        "quartiles_ms": {},
        "stage_ms": {},
        "peers": {},
        "ceilings": ceilings._asdict(),
        "hardware": machine,
        "versions": versions(),
        "commit": commit(),
    }


def replay_rounds(command: Command, shape: Shape) -> int:
    """Recorded or drawn rounds through both loops; one object."""
    scripts = scripts_of(command)
    check_positions(shape, scripts.longest, f"rounds that need {scripts.longest} positions")
    bench = build(command, shape, scripts.stage_len)
    paces = paced(bench, scripts)
    fast = paces.get("fast")
    found: dict[str, object] = {
        "schema": SCHEMA,
        "shape": shape.name,
        "gpu": device_name(hardware(bench.device)),
        "dtype": command.dtype,
        "lossless": False,  # acceptance is dictated, not earned
        "synthetic": command.synthetic_acceptance is not None,
        "source": str(command.replay) if command.replay else None,
        "synthetic_acceptance": command.synthetic_acceptance,
        "stage_len": scripts.stage_len,
        "responses": len(scripts.responses),
        "loops": {
            name: {**vars(pace), "work": pace.work._asdict(), "speedup_over_plain": pace.speedup}
            for name, pace in paces.items()
        },
        "ratio": paces["stock"].ms_per_round / fast.ms_per_round if fast else None,
        "hardware": hardware(bench.device),
        "versions": versions(),
        "commit": commit(),
    }
    document = {key: plain(value) for key, value in found.items()}
    if command.output is not None:
        save(command.output, document)
    if command.json:
        print(dumps(document))
    else:
        show_replay(document)
    return 0


def paced(bench: Bench, scripts: Scripts) -> dict[str, Pace]:
    """Every loop's pace, with a bar."""
    turns: list[Turn] = []
    with bar((1 + PASSES) * len(scripts.responses)) as shown:
        for turn in replay(bench.pair, scripts, bench.command.seed):
            turns += turn
            shown.update(shown.task_ids[0], description=f"{bench.shape.name}, rounds", advance=1)
    return {
        name: pace([turn for turn in turns if turn.loop == name]) for name in dict.fromkeys(turn.loop for turn in turns)
    }


def scripts_of(command: Command) -> Scripts:
    """Recorded or drawn."""
    if command.replay is not None:
        return read_scripts(command.replay, command.replay_rounds)
    assert command.synthetic_acceptance is not None
    chance = Chance(command.synthetic_acceptance, command.synthetic_stages, command.replay_rounds, command.seed)
    return drawn_scripts(chance, BLOCK_SIZE, command.context)


def check_positions(shape: Shape, needed: int, what: str) -> None:
    """Raises UserError beyond the longest context of the shape."""
    if needed > shape.positions:
        raise UserError(f"{what} exceed the {shape.positions} positions of {shape.name}; ask for less")


@contextmanager
def progress(command: Command, entries: list[Entry]) -> Generator["Step"]:
    """A bar over all settings."""
    done = sum(str(rows) in entry["rows"] for entry in entries for rows in command.rows)
    done += sum(bool(entry["stage_ms"]) for entry in entries)
    total = len(entries) * (len(command.rows) + 1 + bool(command.peers))
    with bar(total) as shown:
        shown.update(shown.task_ids[0], completed=done)
        yield Step(shown, command.shape)


@dataclass(frozen=True)
class Step:
    """Moves the bar."""

    shown: Progress
    name: str

    def __call__(self, context: int) -> None:
        self.shown.update(self.shown.task_ids[0], description=f"{self.name}, {context} tokens", advance=1)
