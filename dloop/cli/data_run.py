"""What `dloop data` does: load the target, read the prompts, answer what is not answered yet, write the data."""

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter
from typing import cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dloop import checkpoint
from dloop.api import check_request
from dloop.bench.run import commit, template_sha256
from dloop.bench.store import differences, write
from dloop.chat import Tokenizer, load_tokenizer
from dloop.cli.answer import device_of, hush
from dloop.cli.data import Command
from dloop.data.answers import Answer, Parts
from dloop.data.prompts import Prompts, prompt_encoder, read_questions
from dloop.data.regenerate import built_in, regenerate, write_conversations, write_tokens
from dloop.data.tokenise import SHOWN
from dloop.errors import UserError, refuse_folder
from dloop.load import load_target
from dloop.records import SCHEMA, Json, dumps, hardware, plain, versions
from dloop.settings import Settings, sampling_of
from dloop.targets.hf import HFTarget

IDENTITY = (  # what decides the data; a run goes on only where all of it agrees
    "checkpoint_sha256",
    "template_sha256",
    "prompts",
    "setting",
    "dtype",
    "engine",
    "versions",
)
LIVE_ON_GPU, LIVE_ON_CPU = 256, 16  # each text's memory is that of 2048 tokens at first


def write_data(command: Command) -> int:
    """Answer and write; the path, or with --json all that is known of the data, on standard output."""
    parts = Parts.beside(command.output)
    refuse_to_overwrite(command, parts)
    hush()
    target = load_target(command.model, command.dtype, device_of(command.device), command.revision, command.engine)
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None:
        raise UserError(f"{command.model} has no tokenizer beside its weights; prompts are texts")
    settings = settings_of(command)
    sampling_of(settings)  # refuses numbers that are no law
    check_request(target, None, settings)
    prompts = read(command, target, tokenizer)
    known = about(command, target, tokenizer, prompts)
    if (finished := earlier(command, parts, known)) is None:
        begin(parts, known)
        answer_all(command, target, prompts, parts)
        finished = finish(command, prompts, parts, target.vocab_size, known, tokenizer)
    print(dumps(finished) if command.json else command.output)
    return 0


def refuse_to_overwrite(command: Command, parts: Parts) -> None:
    """Raises UserError where folders stand for files, or an earlier run left something and --resume is not given."""
    for path in (command.output, record_of(command.output), record_of(parts.folder)):
        refuse_folder(path, "--output")
    if command.resume:
        return
    if command.output.exists():
        raise UserError(f"--output {command.output} exists; choose another name, or remove it")
    if parts.folder.exists():
        raise UserError(
            f"{parts.folder} holds the answers of an unfinished run; add --resume to go on with it, or remove it"
        )


def settings_of(command: Command) -> Settings:
    """How answers are drawn."""
    return Settings(
        max_new_tokens=command.max_new_tokens,
        temperature=command.temperature,
        top_k=command.top_k,
        top_p=command.top_p,
        seed=command.seed,
    )


def read(command: Command, target: HFTarget, tokenizer: Tokenizer) -> Prompts:
    """All prompts, with an account of them on standard error. Raises UserError if none can be answered."""
    prompts = Prompts(
        path=command.prompts,
        encode=prompt_encoder(command.chat_template, tokenizer),
        room=target.context - command.max_new_tokens,
        max_tokens=command.max_prompt_tokens,
        max_samples=command.max_samples,
    )
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("reading prompts", total=None)
        for item in read_questions(command.prompts):
            prompts.add(item)
            progress.update(task, completed=prompts.lines, description=f"reading prompts: {prompts.lines}")
    if not prompts.used:
        reasons = "; ".join(f"{len(where)}: {why}" for why, where in prompts.skipped.items())
        raise UserError(f"{command.prompts} has no prompt to answer ({reasons or 'the file is empty'})")
    print("\n".join(prompts.summary()), file=sys.stderr)
    highest = max(int(prompt.tokens.max()) for prompt in prompts.used)
    if highest >= target.vocab_size:
        raise UserError(
            f"the tokenizer of {target.name} gives token {highest}, beyond its vocabulary of {target.vocab_size}; "
            "fetch the checkpoint again"
        )
    return prompts


def about(command: Command, target: HFTarget, tokenizer: Tokenizer, prompts: Prompts) -> dict[str, Json]:
    """Everything known before the first token; hashing reads all weights once."""
    with command.prompts.open("rb") as file:
        prompts_sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    sampling = ("max_new_tokens", "temperature", "top_k", "top_p", "seed")
    names = (*sampling, "chat_template", "max_prompt_tokens", "max_samples")
    facts: dict[str, object] = {
        "schema": SCHEMA,
        "source": "built-in",
        "target": target.name,
        "revision": command.revision,
        "checkpoint_sha256": {"target": checkpoint.sha256(target.folder) if target.folder else None},
        "template_sha256": template_sha256(tokenizer) if command.chat_template != "none" else None,
        "thinking": False if command.chat_template != "none" else None,
        "setting": {name: getattr(command, name) for name in names},
        "sample_seed": "dloop.sampling.sample_seed(seed, line - 1)",
        "prompts_file": str(command.prompts),
        "prompts": {
            "sha256": prompts_sha256,
            "lines": prompts.lines,
            "used": len(prompts.used),
            "first_question_only": prompts.asking_more,
            "left_out": {
                why: {"count": len(where), "first_lines": where[:SHOWN]} for why, where in prompts.skipped.items()
            },
        },
        "dtype": command.dtype,
        "engine": target.engine,
        "exact": target.is_exact,
        "attention": target.attention,
        "device": target.device.type,
        "hardware": hardware(target.device),
        "versions": versions(),
        "commit": commit(),
    }
    return {name: plain(value) for name, value in facts.items()}


def earlier(command: Command, parts: Parts, known: dict[str, Json]) -> dict[str, object] | None:
    """What is known of the data if an earlier run with the same settings has finished them; None if none has.

    Raises UserError where a run with other settings, or none that is known, left them or its parts.
    """
    where = parts.folder if parts.folder.exists() else command.output
    if not where.exists():
        return None
    record = record_of(where)
    try:
        before = cast(dict[str, object], json.loads(record.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{where} exists without a sound {record} ({error}); choose another --output, or remove it"
        ) from error
    now: dict[str, object] = {name: known[name] for name in IDENTITY}
    now["hardware"] = {"gpu": cast(dict[str, Json], known["hardware"])["gpu"]}
    if different := differences(before, now):
        raise UserError(
            f"{where} is of a run with another {', '.join(different)}; run it with the same settings, choose another "
            "--output, or remove it"
        )
    if where == parts.folder:
        return None
    print(f"{command.output} is finished", file=sys.stderr)
    return before


def record_of(where: Path) -> Path:
    """Where it is told how data, or the parts of a run, came about."""
    return where / "run.json" if where.suffix == ".parts" else where.with_name(f"{where.name}.json")


def begin(parts: Parts, known: dict[str, Json]) -> None:
    """Make the folder of parts; what is known is in it before the first part."""
    try:
        parts.folder.mkdir(parents=True, exist_ok=True)
        write(record_of(parts.folder), dumps(known))
    except OSError as error:
        raise UserError(f"--output: {parts.folder} cannot be written to ({error.strerror}); choose another") from error


def answer_all(command: Command, target: HFTarget, prompts: Prompts, parts: Parts) -> None:
    """Answer what no part holds, with progress on standard error; an interrupt tells how to go on."""
    total = len(prompts.used)
    done = len(parts.lines())
    if done:
        print(f"dloop data: {done} of {total} answers are there already", file=sys.stderr)
    if done == total:
        return
    on_gpu = target.device.type == "cuda"
    most = (LIVE_ON_GPU if on_gpu else LIVE_ON_CPU) if command.live == "auto" else command.live
    source = built_in(target, settings_of(command), min(most, total - done))
    try:
        with closing(regenerate(prompts.used, source, parts, shard=command.shard, vocab_size=target.vocab_size)) as run:
            follow(run, done, total, command.shard)
    except KeyboardInterrupt:
        kept = len(parts.lines())
        print(
            f"\ndloop data: {kept} of {total} answers are in {parts.folder}; the same command with --resume goes on",
            file=sys.stderr,
        )
        raise


def follow(answers: Iterator[Answer], done: int, total: int, shard: int) -> None:
    """Show speed and remaining time: as a bar on a terminal, else as a line a part."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    tokens, began = 0, perf_counter()
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("answering", total=total, completed=done)
        for count, answer in enumerate(answers, 1):
            tokens += len(answer.response)
            seconds = perf_counter() - began
            speed = f"{tokens / seconds:.0f} tokens/s"
            progress.update(task, advance=1, description=speed)
            if count % shard == 0 and not console.is_terminal:
                left = seconds / count * (total - done - count) / 60
                print(f"dloop data: {done + count} of {total} answers, {speed}, {left:.0f} min left", file=sys.stderr)


def finish(
    command: Command, prompts: Prompts, parts: Parts, vocab_size: int, known: dict[str, Json], tokenizer: Tokenizer
) -> dict[str, object]:
    """Write the data and what is known of them in place of the parts."""
    answers = parts.read(vocab_size)
    if command.output.suffix == ".npz":
        write_tokens(command.output, answers)
    else:
        questions = {prompt.question.line: prompt.question.messages for prompt in prompts.used}
        write_conversations(command.output, answers, questions, tokenizer, settings_of(command))
    with command.output.open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    figures = answers.figures()
    record: dict[str, object] = {**known, **figures, "output_sha256": sha256}
    write(record_of(command.output), json.dumps(record, indent=1, allow_nan=False) + "\n")
    done = parts.folder.with_name(parts.folder.name + ".done")  # a kill half-way through leaves nothing to resume
    parts.folder.rename(done)
    shutil.rmtree(done)
    print(
        f"{command.output}: {figures['samples']} answers, {figures['response_tokens']} tokens at "
        f"{figures['tokens_per_s']:.0f} tokens/s; {figures['cut']} cut at {command.max_new_tokens} tokens; "
        f"{figures['repetition_share']:.0%} of 8-grams repeat",
        file=sys.stderr,
    )
    return record
