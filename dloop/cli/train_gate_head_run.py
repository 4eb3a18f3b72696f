"""What `dloop train gate-head` does: load, draft from the texts, fit, write the head."""

import hashlib
import json
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file, save_file

from dloop.cli import train as host
from dloop.cli.answer import device_of, hush
from dloop.cli.race import bar
from dloop.cli.train_checks import make_writable
from dloop.cli.train_data import check_data, is_jsonl, read_jsonl
from dloop.cli.train_gate_head import Command
from dloop.cli.training import digest
from dloop.drafters.chain import ChainDrafter
from dloop.drafters.gemma4_config import FAMILY as GEMMA_FAMILY
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.load import load_drafter, load_target
from dloop.rules.heads import CONFIG, HEADS, WEIGHTS, Examples, Head, save_head
from dloop.sampling import sample_seed
from dloop.targets.hf import HFTarget
from dloop.train.batch import TokenFile
from dloop.train.gate_head import FitSettings, Pass, config_of, draft_from, fit, starts_of

PARTS, STATE, RUN = "parts", "training_state.pt", "run.json"


@dataclass(frozen=True)
class Pair:
    """What drafts, and from what."""

    target: HFTarget
    drafter: HostDrafter
    data: TokenFile


def train(command: Command) -> int:
    """Draft, fit and write; the folder, or with --json the passes, on standard output."""
    hush()
    make_writable(command.output_dir, RUN, STATE, CONFIG, WEIGHTS, dry=False)
    pair = load(command)
    settle(command, pair)
    count = len(pair.data) if command.max_samples is None else min(command.max_samples, len(pair.data))
    parts = draft(command, pair, count)
    held = int(count * command.held_out)
    examples, held_out = joined(parts[: count - held]), joined(parts[count - held :])
    if examples is None:
        raise UserError(
            f"{command.train_data_path} has no place to draft {pair.drafter.stage_len} tokens from; give longer texts"
        )
    torch.manual_seed(command.seed)
    head = HEADS[command.kind](config_of(command.kind, pair.drafter)).to(pair.target.device)
    passes = fitted(command, head, examples, held_out)
    shutil.rmtree(command.output_dir / PARTS)
    if command.json:
        told = {"head": str(command.output_dir), "stages": len(examples.accepted)}
        print(json.dumps({"schema": 1, **told, "passes": [each._asdict() for each in passes]}))
    else:
        print(command.output_dir)
    return 0


def load(command: Command) -> Pair:
    """Target, drafter with stages as long as asked for, and texts."""
    device = device_of(command.device)
    target = load_target(command.target_model_path, command.dtype, device, engine="twin")
    drafter = load_drafter(command.draft_model, target).with_trees(None)
    if drafter.family == GEMMA_FAMILY:
        raise UserError(
            f"{drafter.name} lives on its target's keys and values: no head is offered for it; leave it out"
        )
    if command.longest is not None:
        if not isinstance(drafter, ChainDrafter):
            raise UserError(f"--longest {command.longest}: a stage of {drafter.family} is its block; leave it out")
        drafter = drafter.at_depth(command.longest)
    if command.kind == "specdec++" and isinstance(drafter, ChainDrafter) and drafter.stage_len < 2:
        raise UserError(
            f"stages of {drafter.stage_len} token have nothing for specdec++: it judges a token by the row after it; "
            "give --longest 2 or more"
        )
    reading = host.Command(
        target_model_path=command.target_model_path,
        train_data_path=command.train_data_path,
        output_dir=command.output_dir,
        chat_template=command.chat_template,
        max_length=command.max_length,
    )
    jsonl = is_jsonl(command.train_data_path)
    data = (
        read_jsonl(reading, target, drafter.config)
        if jsonl
        else TokenFile.read(command.train_data_path, command.max_length)
    )
    check_data(data, target, reading)
    return Pair(target, drafter, data)


def settle(command: Command, pair: Pair) -> None:
    """Write down what decides the head, or hold it to what was written. Raises UserError for another run's folder."""
    free = {"output_dir": Path(), "resume": False, "json": False, "debug": False, "device": ""}
    facts = repr((replace(command, **free), digest(pair.data.contents()), pair.drafter.stage_len))
    fingerprint = hashlib.sha256(facts.encode()).hexdigest()[:12]
    path, text = command.output_dir / RUN, json.dumps({"fingerprint": fingerprint}) + "\n"
    if not path.is_file():
        path.write_text(text)
    elif path.read_text() != text:
        raise UserError(
            f"{path} is that of a run with other settings, or damaged; resume with the same ones or choose another "
            "--output-dir"
        )


def draft(command: Command, pair: Pair, count: int) -> list[Examples | None]:
    """The stages drafted from each text, kept text by text."""
    folder, head = command.output_dir / PARTS, HEADS[command.kind]
    folder.mkdir(exist_ok=True)
    found: list[Examples | None] = []
    with bar(count) as progress:
        progress.update(progress.task_ids[0], description="drafting")
        for index in range(count):
            path = folder / f"part-{index:06d}.safetensors"
            if not path.is_file():
                sample = pair.data.sample(index)
                starts = starts_of(sample, pair.drafter.stage_len, command.stride)
                seed = sample_seed(command.seed, index)
                keep(draft_from(pair.target, pair.drafter, sample, starts, head, seed), path)
            stored = load_file(path)
            found.append(Examples(**stored) if stored else None)
            progress.advance(progress.task_ids[0])
    return found


def keep(examples: Examples | None, path: Path) -> None:
    """Write a part whole or not at all."""
    partial = path.with_suffix(".partial")
    save_file(
        {} if examples is None else {name: each.contiguous() for name, each in examples._asdict().items()}, partial
    )
    partial.rename(path)


def joined(parts: list[Examples | None]) -> Examples | None:
    """All stages; None if there are none."""
    real = [part for part in parts if part is not None]
    return Examples(*(torch.cat(each) for each in zip(*real, strict=True))) if real else None


def fitted(command: Command, head: Head, train: Examples, held_out: Examples | None) -> list[Pass]:
    """Fit from where the folder stands; a line a pass on standard error, and everything saved with it."""
    optimizer = torch.optim.AdamW(head.parameters(), lr=command.learning_rate)
    passes = restored(command.output_dir / STATE, head, optimizer)
    settings = FitSettings(
        num_epochs=command.num_epochs,
        batch_size=command.batch_size,
        learning_rate=command.learning_rate,
        seed=command.seed,
    )
    print(
        f"dloop train gate-head: {len(train.accepted)} stages, mean accepted "
        f"{train.accepted.float().mean():.2f} of {train.soft.shape[1]}",
        file=sys.stderr,
    )
    for each in fit(head, optimizer, train, held_out, settings, done=len(passes)):
        passes.append(each)
        held = "" if each.held_out is None else f", held out {each.held_out:.4f}"
        print(
            f"dloop train gate-head: pass {each.epoch}/{command.num_epochs}: loss {each.loss:.4f}{held}",
            file=sys.stderr,
        )
        state = {"head": head.state_dict(), "optimizer": optimizer.state_dict(), "passes": [tuple(p) for p in passes]}
        partial = command.output_dir / f".{STATE}.partial"
        torch.save(state, partial)
        save_head(head, command.output_dir)
        partial.rename(command.output_dir / STATE)
    return passes


def restored(path: Path, head: Head, optimizer: torch.optim.Optimizer) -> list[Pass]:
    """The passes that are done, their state put back."""
    if not path.is_file():
        return []
    state = cast(dict[str, Any], torch.load(path, map_location="cpu", weights_only=True))
    head.load_state_dict(state["head"])
    optimizer.load_state_dict(state["optimizer"])
    return [Pass(*each) for each in state["passes"]]
