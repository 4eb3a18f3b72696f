"""What `dloop check` does: load the pair in each arithmetic, try it, tell what was found."""

import sys
import time
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console

from dloop.api import collect, start
from dloop.bench.reporting import save
from dloop.certificate.certify import certify, count_findings
from dloop.certificate.findings import DTypeName, Fault, Finding, Pair, Plan
from dloop.chat import Tokenizer, load_tokenizer
from dloop.cli.answer import device_of, hush
from dloop.cli.check import Command, prompts_of
from dloop.cli.race import THREAD_TEST_TOKENS, bar, choose_threads
from dloop.errors import UserError
from dloop.load import load_drafter, load_target
from dloop.records import dumps
from dloop.settings import Settings

Found: TypeAlias = dict[DTypeName, list[Finding]]


@dataclass(frozen=True, kw_only=True)
class Certificate:
    """What was tried, and what came of it."""

    pair: Pair  # in the last arithmetic
    tokenizer: Tokenizer
    plan: Plan
    found: Found
    seconds: float

    @property
    def faults(self) -> list[Fault]:
        return [fault for findings in self.found.values() for finding in findings for fault in finding.faults]

    @property
    def is_lossless(self) -> bool:
        """Whether no fault touches the text; a drafter's stale memory only costs acceptance."""
        return not any(fault.harms_text for fault in self.faults)


def certificate(command: Command, drafter_name: str) -> int:
    from dloop.cli.check_report import document, report, sentence  # it reads the record above

    hush()
    started = time.perf_counter()
    done = try_pair(command, drafter_name, started)
    whole = dumps(document(command, done)) if command.json or command.output else ""
    if command.json:
        print(whole)
    else:
        report(Console(highlight=False), done)
    for fault in done.faults:
        print(f"dloop check: fault: {sentence(done, fault)}", file=sys.stderr)
    if command.output is not None:  # last: a file that cannot be written must not cost the verdict
        save(command.output, whole + "\n")
    return 1 if done.faults else 0


def try_pair(command: Command, drafter_name: str, started: float) -> Certificate:
    """One arithmetic after the other; the sampling parts run in the first."""
    dtypes: list[DTypeName] = ["float32", "bfloat16"] if command.dtype == "both" else [command.dtype]
    found: Found = {}
    pair, tokenizer = load_pair(command, drafter_name, dtypes[0])
    plan = plan_of(command, tokenizer)
    total = sum(count_findings(plan, sampled=dtype == dtypes[0]) for dtype in dtypes)
    with bar(total) as progress:
        for dtype in dtypes:
            progress.update(progress.task_ids[0], description=dtype)
            if dtype != pair.dtype:
                del pair  # a GPU may not hold both
                pair, _ = load_pair(command, drafter_name, dtype)
            settle_threads(pair, plan)
            found[dtype] = []
            for finding in certify(pair, plan, sampled=dtype == dtypes[0]):
                found[dtype].append(finding)
                progress.advance(progress.task_ids[0])
    return Certificate(pair=pair, tokenizer=tokenizer, plan=plan, found=found, seconds=time.perf_counter() - started)


def load_pair(command: Command, drafter_name: str, dtype: DTypeName) -> tuple[Pair, Tokenizer]:
    target = load_target(command.model, dtype, device_of(command.device), command.revision, command.engine)
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None:
        raise UserError(f"{command.model} has no tokenizer beside its weights; the prompts are texts")
    return Pair(
        target=target, drafter=load_drafter(drafter_name, target, command.draft_revision), dtype=dtype
    ), tokenizer


def plan_of(command: Command, tokenizer: Tokenizer) -> Plan:
    chat = tokenizer.has_template
    prompts = {
        name: tokenizer.encode_chat([{"role": "user", "content": text}]) if chat else tokenizer.encode(text)
        for name, text in prompts_of(command).items()
    }
    return Plan(
        prompts=prompts,
        gates=tuple(dict.fromkeys(command.loop_gate)),
        max_new_tokens=command.max_new_tokens,
        max_stages=command.max_stages,
        temperature=command.temperature,
        seed=command.seed,
    )


def settle_threads(pair: Pair, plan: Plan) -> None:
    """On the processor, as many threads as are fastest now."""
    prompt, settings = next(iter(plan.prompts.values())), Settings(max_new_tokens=THREAD_TEST_TOKENS)

    def decode_s() -> float:
        stream = start(pair.target, None, prompt, settings)
        _ = stream.first
        started = time.perf_counter()
        collect(stream)
        return time.perf_counter() - started

    choose_threads(pair.target, decode_s)
