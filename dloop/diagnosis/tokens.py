"""The tokenizer and its chat template: does it fit the target, and does the template write what a prompt needs."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from dloop.chat import HFTokenizer, Message, Tokenizer, load_tokenizer
from dloop.diagnosis.findings import Cause, Finding, Severity
from dloop.errors import UserError
from dloop.targets.hf import HFTarget

SAMPLED_IDS = 2000
FETCH = "fetch tokenizer.json and tokenizer_config.json of the target again"
QUESTION, ANSWER = "Which colour has the sky?", "Blue as a rule"


@runtime_checkable
class Special(Protocol):
    """What is asked of transformers' tokenizers beyond encoding."""

    bos_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    unk_token_id: int | None
    mask_token_id: int | None

    def __len__(self) -> int: ...

    def convert_ids_to_tokens(self, ids: int) -> str: ...


@dataclass(frozen=True)
class TokenReport:
    """What was found, the tokenizer (None: there is none), and whether prompts can be made with it."""

    findings: list[Finding]
    tokenizer: Tokenizer | None
    usable: bool


def special(tokenizer: Tokenizer) -> Special:
    """The same tokenizer, for its special tokens."""
    inner: HFTokenizer = tokenizer.inner
    return cast(Special, inner)


def check_tokens(target: HFTarget, drafter_folder: Path | None) -> TokenReport:
    """The tokenizer beside the target, the one beside the drafter if there is one, and the template."""
    tokenizer = load_tokenizer(target.folder, target.name)
    if tokenizer is None:
        missing = found(
            "fault", "tokenizer", "the target has no tokenizer", "no tokenizer file beside its weights", FETCH
        )
        return TokenReport([missing], None, usable=False)
    findings = list(check_size(tokenizer, target))
    usable = not findings
    findings += check_stops(tokenizer, target)
    findings += check_drafters(tokenizer, drafter_folder)
    findings += check_template(tokenizer, target) if usable else []
    return TokenReport(findings, tokenizer, usable)


def found(severity: Severity, cause: Cause, what: str, evidence: str, remedy: str) -> Finding:
    """A finding, in one line."""
    return Finding(severity=severity, cause=cause, what=what, evidence=evidence, remedy=remedy)


def check_size(tokenizer: Tokenizer, target: HFTarget) -> Iterator[Finding]:
    """No id may lie beyond the embedding; padding of the embedding is normal."""
    size = len(special(tokenizer))
    if size > target.vocab_size:
        yield found(
            "fault",
            "tokenizer",
            "the tokenizer is another model's: it has more tokens than the target",
            f"{size} tokens, vocab_size {target.vocab_size}",
            FETCH,
        )


def check_stops(tokenizer: Tokenizer, target: HFTarget) -> Iterator[Finding]:
    """The tokenizer's end mark should end an answer."""
    end = special(tokenizer).eos_token_id
    if end is not None and target.stop_ids and end not in target.stop_ids:
        yield found(
            "warning",
            "tokenizer",
            "the tokenizer's end token does not stop the target",
            f"eos_token_id {end} of the tokenizer, {sorted(target.stop_ids)} of generation_config.json",
            "add it to eos_token_id in the target's generation_config.json, if answers end with it",
        )


def check_drafters(tokenizer: Tokenizer, folder: Path | None) -> Iterator[Finding]:
    """A tokenizer beside the drafter must be the target's."""
    other = load_tokenizer(folder, "the drafter")
    if other is None:
        return
    ours, theirs = special(tokenizer), special(other)
    shared = min(len(ours), len(theirs))
    sampled = range(0, shared, max(1, shared // SAMPLED_IDS))
    told = ((i, ours.convert_ids_to_tokens(i), theirs.convert_ids_to_tokens(i)) for i in sampled)
    different = [f"id {i} is {a!r} for the target, {b!r} for the drafter" for i, a, b in told if a != b]
    if different:
        evidence = f"{len(different)} of {len(sampled)} ids compared differ: {different[0]}"
    elif len(ours) != len(theirs):
        evidence = f"{len(ours)} tokens for the target, {len(theirs)} for the drafter"
    else:
        return
    what = "the tokenizers of target and drafter differ"
    yield found("fault", "tokenizer", what, evidence, "use the drafter trained for this target, or fetch both again")


def check_template(tokenizer: Tokenizer, target: HFTarget) -> Iterator[Finding]:
    """The template is there, keeps the message, opens the answer, begins once and ends what it began."""
    if not tokenizer.has_template:
        evidence = "no chat_template in tokenizer_config.json, no chat_template.jinja; prompts are given as plain text"
        remedy = (
            "fetch chat_template.jinja of the target; a base model has none, and a drafter trained on chats suffers"
        )
        yield found("warning", "template", "the tokenizer has no chat template", evidence, remedy)
        return
    messages: list[Message] = [{"role": "user", "content": QUESTION}]
    try:
        opened = tokenizer.render(messages, answer=True)
        closed = tokenizer.render(messages, answer=False)
    except UserError as error:
        yield found("fault", "template", "the chat template refuses a plain question", str(error), FETCH)
        return
    template = "correct chat_template.jinja (or chat_template in tokenizer_config.json), or fetch it again"
    if QUESTION not in opened:
        yield found("fault", "template", "the chat template drops the user's words", f"it writes {opened!r}", template)
    if opened == closed:
        what = "the chat template does not open the answer: add_generation_prompt changes nothing"
        yield found("warning", "template", what, f"both ways it writes {opened!r}", template)
    yield from check_beginning(tokenizer, opened, template)
    yield from check_end(tokenizer, target, messages, template)


def check_beginning(tokenizer: Tokenizer, opened: str, template: str) -> Iterator[Finding]:
    """One beginning mark: not two, and none lost that plain texts get."""
    begin = special(tokenizer).bos_token_id
    if begin is None:
        return
    ids, plain = tokenizer.encode_rendered(opened), tokenizer.encode("a")
    evidence = f"a question begins with the ids {ids[:4]}; the beginning mark is {begin}"
    if ids[:2] == [begin, begin]:
        yield found("fault", "template", "the chat template writes the beginning mark twice", evidence, template)
    elif plain[:1] == [begin] and begin not in ids[:1]:
        what = "the chat template leaves out the beginning mark that plain texts get"
        yield found("warning", "template", what, evidence, template)


def check_end(tokenizer: Tokenizer, target: HFTarget, messages: list[Message], template: str) -> Iterator[Finding]:
    """What follows an answer should hold a stop token."""
    try:
        text = tokenizer.render([*messages, {"role": "assistant", "content": ANSWER}], answer=False)
    except UserError:
        return  # a template for single questions
    tail = text[text.rfind(ANSWER) + len(ANSWER) :] if ANSWER in text else ""
    ids = tokenizer.encode_rendered(tail) if tail.strip() else []
    if ids and target.stop_ids and not target.stop_ids & set(ids):
        evidence = f"after an answer it writes {tail!r}; the target stops at {sorted(target.stop_ids)}"
        yield found("warning", "template", "the chat template ends answers with no stop token", evidence, template)


def mask_candidates(target: HFTarget, tokenizer: Tokenizer | None, mask: int) -> list[int]:
    """Ids that may have been the mask in training: neighbours, special tokens, the first beyond the tokenizer, 0."""
    ids = [mask - 1, mask + 1, 0, target.vocab_size - 1, *sorted(target.stop_ids)[:3]]
    if tokenizer is not None:
        inner = special(tokenizer)
        marks = (inner.mask_token_id, inner.pad_token_id, inner.eos_token_id, inner.bos_token_id, inner.unk_token_id)
        ids += [token for token in marks if token is not None] + [len(inner)]
    return [token for token in dict.fromkeys(ids) if token != mask and 0 <= token < target.vocab_size]
