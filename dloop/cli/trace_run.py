"""What `dloop trace record` does: load the pair, read the prompts, trace what no part holds yet, write the trace."""

import hashlib
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.progress import Progress

from dloop import checkpoint
from dloop.bench.store import write
from dloop.chat import load_tokenizer
from dloop.cli import data
from dloop.cli.answer import device_of, hush
from dloop.cli.data_run import about, begin, earlier, read, record_of, refuse_to_overwrite
from dloop.cli.race import bar
from dloop.cli.trace_record import Command
from dloop.data.answers import Parts
from dloop.data.prompts import Prompt
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.gates import record as recorder
from dloop.gates.trace import Trace, joined, load, save
from dloop.load import load_drafter, load_target
from dloop.records import Json, dumps, plain
from dloop.sampling import sample_seed
from dloop.settings import Settings
from dloop.targets.hf import HFTarget
from dloop.types import Round

SHARED = (  # flags of dloop data, with its meaning
    *("dtype", "device", "engine", "revision", "prompts", "output", "chat_template", "max_prompt_tokens"),
    *("max_samples", "max_new_tokens", "temperature", "seed", "resume"),
)


def record(command: Command, drafter_name: str) -> int:
    """Trace and write; the path, or with --json all that is known of the trace, on standard output."""
    asked, parts = as_data(command), Parts.beside(command.output)
    refuse_to_overwrite(asked, parts)
    hush()
    target = load_target(command.model, command.dtype, device_of(command.device), command.revision, command.engine)
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None:
        raise UserError(f"{command.model} has no tokenizer beside its weights; prompts are texts")
    drafter = load_drafter(drafter_name, target, command.draft_revision, command.gap_rows, command.draft_rope_theta)
    prompts = read(asked, target, tokenizer)
    known = with_drafter(about(asked, target, tokenizer, prompts), command, drafter)
    if (finished := earlier(asked, parts, known)) is None:
        begin(parts, known)
        trace_all(command, target, drafter, prompts.used)
        finished = finish(command.output, parts, known)
    print(dumps(finished) if command.json else command.output)
    return 0


def as_data(command: Command) -> data.Command:
    """The same choices as a command of `dloop data`; of the drafter it knows nothing."""
    return data.Command(model=command.model, **{name: getattr(command, name) for name in SHARED})


def with_drafter(known: dict[str, Json], command: Command, drafter: HostDrafter) -> dict[str, Json]:
    """What is known of the texts and of what drafts them."""
    setting, sha256 = known["setting"], known["checkpoint_sha256"]
    assert isinstance(setting, dict) and isinstance(sha256, dict)
    names = ("max_stages", "draft_depth", "mtp_k")
    theta = drafter.config.rope_theta if isinstance(drafter, ChainDrafter) else None
    mine = {name: getattr(command, name) for name in names}
    mine |= {"gap_rows": drafter.config.gap_rows, "draft_rope_theta": theta}
    draft = checkpoint.sha256(drafter.folder) if drafter.folder else None
    added: dict[str, Json] = {
        "source": "trace",
        "draft": drafter.name,
        "draft_revision": command.draft_revision,
        "family": drafter.family,
        "setting": setting | {name: plain(value) for name, value in mine.items()},
        "checkpoint_sha256": {**sha256, "draft": draft},
    }
    return known | added


def trace_all(command: Command, target: HFTarget, drafter: HostDrafter, prompts: Sequence[Prompt]) -> None:
    """Trace what no part holds; an interrupt tells how to go on."""
    paths = {prompt.question.line: part_of(command.output, prompt.question.line) for prompt in prompts}
    left = [prompt for prompt in prompts if not paths[prompt.question.line].exists()]
    if len(left) < len(prompts):
        print(f"dloop trace record: {len(prompts) - len(left)} of {len(prompts)} texts are there", file=sys.stderr)
    settings = Settings(
        max_new_tokens=command.max_new_tokens,
        max_stages=command.max_stages,
        temperature=command.temperature,
        draft_depth=command.draft_depth,
        mtp_k=command.mtp_k,
    )
    room = command.max_new_tokens - 1  # starts of a text that is not cut short by a stop token
    try:
        with bar(room * len(prompts)) as progress:
            for done, prompt in enumerate(left, len(prompts) - len(left)):
                progress.update(progress.task_ids[0], completed=done * room, description=f"text {done + 1}")
                own = replace(settings, seed=sample_seed(command.seed, prompt.question.line - 1))
                recording = recorder.begin(target, drafter, prompt.tokens.tolist(), own)
                save(paths[prompt.question.line], trace_one(recording, progress))
    except KeyboardInterrupt:
        kept = sum(path.exists() for path in paths.values())
        print(
            f"\ndloop trace record: {kept} of {len(prompts)} texts are in {Parts.beside(command.output).folder}; "
            "the same command with --resume goes on",
            file=sys.stderr,
        )
        raise


def part_of(output: Path, line: int) -> Path:
    """Where a text waits until all are there."""
    return Parts.beside(output).folder / f"part-{line:06d}.npz"


def trace_one(recording: recorder.Recording, progress: Progress) -> Trace:
    """One text, start by start."""
    rounds: list[Round] = []
    for round in recording.stream:
        rounds.append(round)
        progress.advance(progress.task_ids[0])
    return recording.trace(rounds)


def finish(output: Path, parts: Parts, known: dict[str, Json]) -> dict[str, object]:
    """Write the trace and what is known of it in place of the parts."""
    trace = joined([load(path) for path in parts.files()])
    save(output, trace)
    with output.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    made: dict[str, object] = {
        **known,
        "texts": len(trace.texts),
        "starts": trace.starts,
        "stage_len": trace.ground.stage_len,
        "features": list(trace.features),
        "output_sha256": sha256,
    }
    write(record_of(output), json.dumps(made, indent=1, allow_nan=False) + "\n")
    done = parts.folder.with_name(parts.folder.name + ".done")  # a kill half-way through leaves nothing to resume
    parts.folder.rename(done)
    shutil.rmtree(done)
    print(
        f"{output}: {len(trace.texts)} texts, {trace.starts} starts, at most {trace.ground.limits.max_stages} stages "
        f"of {trace.ground.stage_len} tokens",
        file=sys.stderr,
    )
    return made
