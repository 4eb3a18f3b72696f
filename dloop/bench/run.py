"""What `dloop bench` does: load, share the samples among the ranks, decode, sum up."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dloop import checkpoint
from dloop.bench import gate_state
from dloop.bench.decode import Decoder, decode_sample, warm_up
from dloop.bench.heap import still_heap
from dloop.bench.measure import figures
from dloop.bench.ranks import Ranks, joined
from dloop.bench.speedup import baseline_folder, device_name, find_baseline, speedup
from dloop.bench.store import Store, slug
from dloop.bench.table import show
from dloop.bench.tasks import DataSet, load
from dloop.chat import Tokenizer, load_tokenizer
from dloop.cli.answer import hush, setting_of
from dloop.cli.bench import Command, as_generate, setting_name
from dloop.cli.race import bar
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.gates.learned import read
from dloop.load import load_drafter, load_target
from dloop.records import SCHEMA, Json, dumps, hardware, plain, versions
from dloop.settings import Settings
from dloop.targets.hf import HFTarget

IDENTITY = (
    "target",
    "draft",
    "checkpoint_sha256",
    "setting",
    "dtype",
    "engine",
    "hardware",
    "data_sha256",
    "template_sha256",
    "versions",
)


@dataclass(frozen=True)
class Run:
    """One command's models and facts."""

    command: Command
    ranks: Ranks
    decoder: Decoder
    about: dict[str, Json]  # what the summaries of all sets share; empty on ranks that write none


def bench(commands: Sequence[Command], names: Sequence[str], drafters: Sequence[str | None]) -> int:
    """Measure these sets with each command's setting, in turns; 1 if any response failed."""
    hush()
    command = commands[0]
    for given in (each.gate_state for each in commands if each.gate_state is not None):
        read(given)  # now, not after the warm-up
    sets = [load(name, command.data_dir, command.max_samples) for name in names]
    with joined() as ranks:
        target, tokenizer = load_both(command, ranks)
        runs: list[Run] = []
        for each, name in zip(commands, drafters, strict=True):
            decoder = decoder_of(each, name, target, tokenizer)
            warm_up(decoder, sets[0].samples[0])
            runs.append(Run(each, ranks, decoder, about(each, decoder) if ranks.leads else {}))
        with still_heap():
            summaries = [summary for data in sets for summary in measure_set(runs, data)]
    if not ranks.leads:
        return 0
    if command.json:
        print(dumps({"schema": SCHEMA, "results": summaries}))
    else:
        show(summaries)
    return 1 if any(summary["failures"] for summary in summaries) else 0


def load_both(command: Command, ranks: Ranks) -> tuple[HFTarget, Tokenizer]:
    """The target of this rank, and its tokenizer."""
    device = ranks.device(command.device)
    target = load_target(command.model, command.dtype, device, command.revision, command.engine)
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None:
        raise UserError(f"{command.model} has no tokenizer beside its weights; the benchmarks' prompts are texts")
    return target, tokenizer


def decoder_of(command: Command, name: str | None, target: HFTarget, tokenizer: Tokenizer) -> Decoder:
    """One setting's drafter and arguments. The baseline loads no drafter."""
    drafter = None
    if name is not None:
        drafter = load_drafter(name, target, command.draft_revision, command.gap_rows, command.draft_rope_theta)
    settings = Settings(**{field.name: getattr(command, field.name) for field in dataclasses.fields(Settings)})
    chat = tokenizer.has_template if command.chat == "auto" else command.chat
    return Decoder(target=target, tokenizer=tokenizer, drafter=drafter, settings=settings, chat=chat)


def about(command: Command, decoder: Decoder) -> dict[str, Json]:
    """Everything known before the first token; hashing reads all weights once."""
    target, drafter = decoder.target, decoder.drafter
    facts: dict[str, object] = {
        "schema": SCHEMA,
        "target": target.name,
        "draft": drafter.name if drafter else None,
        "family": drafter.family if drafter else None,
        "setting_name": setting_name(command) if drafter else "baseline",
        "setting": setting_of(as_generate(command), decoder.settings, drafter),
        "thinking": False,
        "template_sha256": template_sha256(decoder.tokenizer) if decoder.chat else None,
        "checkpoint_sha256": {
            "target": checkpoint.sha256(target.folder) if target.folder else None,
            "draft": checkpoint.sha256(drafter.folder) if drafter and drafter.folder else None,
        },
        "dtype": command.dtype,
        "engine": target.engine,
        "attention": target.attention,
        "device": target.device.type,
        "hardware": hardware(target.device),
        "versions": versions(),
        "commit": commit(),
    }
    return {name: plain(value) for name, value in facts.items()}


def measure_set(runs: Sequence[Run], data: DataSet) -> list[dict[str, Json]]:
    """Decode what is not on record yet, setting after setting for each sample; the leading rank gathers all and writes
    the summaries, which other ranks do not have.
    """
    ranks, order = runs[0].ranks, [sample.index for sample in data.samples]
    measured = [(run, Store(folder_of(run, data.name))) for run in runs]
    if ranks.leads:
        prepare(measured, data, order)
    ranks.wait()
    decode_all(measured, data)
    ranks.wait()
    if not ranks.leads:
        return []
    measured.sort(key=lambda pair: pair[0].decoder.drafter is not None)  # others are measured against the baseline
    return [summed_up(run, data, store) for run, store in measured]


def prepare(measured: Sequence[tuple[Run, Store]], data: DataSet, order: Sequence[int]) -> None:
    """Make all folders ready, or none: a refusal leaves everything as it was. Raises UserError."""
    folders = [store.folder for _, store in measured]
    if twice := [str(folder) for number, folder in enumerate(folders) if folder in folders[:number]]:
        raise UserError(
            f"two settings would be written to {twice[0]}; leave one out, or measure it to another --output-dir"
        )
    identities: list[dict[str, Json]] = []
    for run, store in measured:
        known = known_of(run, data)
        identities.append({key: known[key] for key in IDENTITY})
        store.refuse_folders()
        if not run.command.overwrite:
            store.check(identities[-1], order)
    for (run, store), identity in zip(measured, identities, strict=True):
        if run.command.overwrite:
            store.clear()
        store.prepare(identity)


def known_of(run: Run, data: DataSet) -> dict[str, Json]:
    """Everything known of a set before its first token."""
    return {**run.about, "dataset": data.name, "data_sha256": data.sha256}


def summed_up(run: Run, data: DataSet, store: Store) -> dict[str, Json]:
    """The summary of a set that all ranks are done with."""
    order, recorded = [sample.index for sample in data.samples], store.recorded()
    if missing := [index for index in order if index not in recorded]:
        raise RuntimeError(f"{len(missing)} samples are not on record; do all ranks see the same --output-dir?")
    responses = [response for index in order for response in recorded[index]]
    found = {"subset": subset_of(data), "samples": order, "ranks": run.ranks.world, **figures(responses)}
    summary = known_of(run, data) | {name: plain(value) for name, value in found.items()}
    summary |= speedup_of(run, summary)
    store.finish(responses, summary)
    return summary


def subset_of(data: DataSet) -> dict[str, Json]:
    """Whether these are the published samples, and what else they may be a part of."""
    return {
        "rows": data.rows,
        "official_rows": data.official_rows,
        "official_samples": data.official_samples,
        "complete": data.is_complete,
    }


def decode_all(measured: Sequence[tuple[Run, Store]], data: DataSet) -> None:
    """This rank's share, each sample on record as soon as it is done."""
    ranks = measured[0][0].ranks
    share = data.samples[ranks.rank :: ranks.world]
    done = [store.recorded() for _, store in measured]
    todo = [
        (sample, *pair)
        for sample in share
        for pair, found in zip(measured, done, strict=True)
        if sample.index not in found
    ]
    total = len(share) * len(measured)
    if ranks.leads and len(todo) < total:
        print(f"dloop bench: {data.name}: {total - len(todo)} of {total} samples are on record", file=sys.stderr)
    for run, store in measured:
        if (drafter := learning(run)) is not None and any(run is each for _, each, _ in todo):
            gate_state.begin(drafter, store, ranks.rank, run.command.gate_state)
    with bar(total) as progress:
        task = progress.task_ids[0]
        progress.update(task, description=data.name, completed=total - len(todo), visible=ranks.leads)
        for sample, run, store in todo:
            responses = decode_sample(run.decoder, sample)
            store.append(ranks.rank, responses)
            if (drafter := learning(run)) is not None:
                drafter.learned.save(gate_state.file_of(store, ranks.rank))
            progress.advance(task)
            for failed in (r.header for r in responses if r.header["error"] is not None):
                where = f"{data.name}, sample {failed['sample']}, turn {failed['turn']}"
                print(f"dloop bench: failed: {where}: {failed['error']}", file=sys.stderr)


def learning(run: Run) -> HostDrafter | None:
    """The drafter whose gates learn while this setting is measured; None where nothing learns."""
    return run.decoder.drafter if isinstance(run.command.loop_gate, str) else None


def folder_of(run: Run, dataset: str) -> Path:
    """results/TARGET/DRAFT/DATASET/SETTING, the baseline in results/TARGET/baseline--GPU/DATASET."""
    command, target, drafter = run.command, run.decoder.target, run.decoder.drafter
    if drafter is None:
        return baseline_folder(command.output_dir, target.name, device_name(hardware(target.device)), dataset)
    return command.output_dir / slug(target.name) / slug(drafter.name) / dataset / slug(setting_name(command))


def speedup_of(run: Run, summary: Mapping[str, Json]) -> dict[str, Json]:
    """Against the baseline beside this run's results."""
    target = run.decoder.target
    device = device_name(hardware(target.device))
    baseline = find_baseline(run.command.output_dir, target.name, device, str(summary["dataset"]))
    value, reason = speedup(summary, baseline)
    return {"speedup": value, "speedup_reason": reason}


def template_sha256(tokenizer: Tokenizer) -> str:
    """Names the chat template: with another one the same drafter accepts less or more."""
    return hashlib.sha256(json.dumps(tokenizer.inner.chat_template, sort_keys=True).encode()).hexdigest()


def commit() -> str | None:
    """The commit of these sources, with -dirty where they were changed; None outside a repository of ours."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
