"""What `dloop doctor` does: take both in, let the target write, measure, tell."""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console

from dloop import checkpoint
from dloop.api import collect, start
from dloop.batch import generate_many
from dloop.bench.reporting import save
from dloop.chat import Tokenizer
from dloop.cli.answer import device_of, hush
from dloop.cli.doctor import Command
from dloop.cli.race import THREAD_TEST_TOKENS, bar, choose_threads
from dloop.diagnosis.diagnose import diagnose
from dloop.diagnosis.findings import Diagnosis
from dloop.diagnosis.intake import Intake, take_in
from dloop.diagnosis.measure import Text
from dloop.diagnosis.tokens import TokenReport, check_tokens
from dloop.errors import UserError
from dloop.load import DEMO, load_target
from dloop.records import dumps
from dloop.settings import Settings
from dloop.targets.hf import HFTarget


@dataclass(frozen=True, kw_only=True)
class Examined:
    """A pair, what it was examined on, and the diagnosis."""

    target: HFTarget
    name: str  # of the drafter
    intake: Intake
    tokens: TokenReport
    texts: list[Text]
    diagnosis: Diagnosis
    seconds: float


def examine(command: Command, name: str, prompts: list[str]) -> int:
    from dloop.cli.doctor_report import document, report  # it reads the record above

    hush()
    done = examined(command, name, prompts)
    whole = dumps(document(command, done)) if command.json or command.output else ""
    if command.json:
        print(whole)
    else:
        report(Console(highlight=False), done)
    for finding in done.diagnosis.findings:
        if finding.severity == "fault":
            print(f"dloop doctor: fault: {finding.cause}: {finding.what}: {finding.remedy}", file=sys.stderr)
    if command.output is not None:  # last: a file that cannot be written must not cost the verdict
        save(command.output, whole + "\n")
    return 0 if done.diagnosis.is_healthy else 1


def examined(command: Command, name: str, prompts: list[str]) -> Examined:
    started = time.perf_counter()
    target = load_target(command.model, command.dtype, device_of(command.device), command.revision, command.engine)
    if name == "demo":
        checkpoint.only_hub(command.draft_revision, name, "drafter")
        folder = DEMO
    else:
        folder = checkpoint.resolve(name, command.draft_revision, "drafter")
    intake = take_in(name, folder, target)
    tokens = check_tokens(target, folder)
    texts: list[Text] = []
    with bar(len(prompts)) as progress:
        task = progress.task_ids[0]
        if intake.drafter is not None and tokens.tokenizer is not None and tokens.usable:
            progress.update(task, description="texts")
            for text in written(target, tokens.tokenizer, prompts, command.max_new_tokens):
                texts.append(text)
                progress.advance(task)
        progress.update(task, description="probes", completed=0)
        diagnosis = diagnose(
            target, intake, tokens, texts, lambda done, total: progress.update(task, completed=done, total=total)
        )
    return Examined(
        target=target,
        name=name,
        intake=intake,
        tokens=tokens,
        texts=texts,
        diagnosis=diagnosis,
        seconds=time.perf_counter() - started,
    )


def written(target: HFTarget, tokenizer: Tokenizer, prompts: list[str], max_new_tokens: int) -> Iterator[Text]:
    """Greedy answers of the target alone, in the order in which they end."""
    chat = tokenizer.has_template
    ids = [tokenizer.encode_chat([{"role": "user", "content": p}]) if chat else tokenizer.encode(p) for p in prompts]
    if not all(ids):
        raise UserError("a prompt has no tokens; leave it out")

    def decode_s() -> float:
        began = time.perf_counter()
        collect(start(target, None, ids[0], Settings(max_new_tokens=THREAD_TEST_TOKENS)))
        return time.perf_counter() - began

    choose_threads(target, decode_s)
    for done in generate_many(target, None, ids, Settings(max_new_tokens=max_new_tokens)):
        yield Text(ids[done.index], done.tokens)
