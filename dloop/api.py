"""The facade: `generate`, `stream`, `generate_autoregressive`. Arguments are named like the command-line flags."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from torch import Tensor

from dloop.chat import Growing, Message, Tokenizer, encode_prompt, is_text
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.gate import AutoName, GateSum
from dloop.gates.choose import gate_of
from dloop.loop import Judge, Session, decode, run_one
from dloop.refusals import check_loaded as check_loaded
from dloop.refusals import check_request as check_request
from dloop.rules.choose import maker_of
from dloop.settings import (
    Budget,
    Settings,
    Verify,
    check_prompt,
    judge_of,
    limits_of,
    sampling_of,
    shaped,
)
from dloop.stop import under
from dloop.targets.hf import HFTarget
from dloop.types import FinishReason, First, Round

Prompt = Sequence[int] | Tensor | str | Sequence[Message]


@dataclass(frozen=True, kw_only=True)
class Generation:
    """A finished text and how it came about."""

    tokens: list[int]  # new tokens only, cut at the stop token (kept) or at max_new_tokens
    first: int  # the token that prefill gave
    rounds: list[Round]
    finish_reason: FinishReason
    seed: int | None  # the sampling seed in force; None when greedy
    exact: bool  # whether the bit-identical mode was on
    text: str | None = None  # what a reader sees of the tokens; None where the prompt was token ids

    @property
    def acceptance_length(self) -> float:
        """Mean over rounds of accepted + 1, never cut; nan without a round."""
        return sum(r.accepted + 1 for r in self.rounds) / len(self.rounds) if self.rounds else float("nan")


class Stream:
    """Rounds as they happen. `first` is the token prefill gave; `finish_reason` is known at the end.

    A stream that is closed, or that nobody refers to any more, has given its memory back.
    """

    def __init__(
        self,
        events: Generator[First | Round, None, None],
        seed: int | None,
        exact: bool,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._events = events
        self._first: First | None = None
        self._closed = False
        self._taken = False  # whether a round, or the iterator of texts, was given away
        self.seed = seed
        self.exact = exact
        self.tokenizer = tokenizer  # None where the prompt was token ids
        self.finish_reason: FinishReason | None = None

    @property
    def first(self) -> int:
        """Raises UserError where the stream was closed before anything was read."""
        if self._first is None:
            event = next(self._events, None)
            if event is None:
                raise UserError("the stream was closed before its first token; start another")
            assert isinstance(event, First)
            self._first = event
            self.finish_reason = event.finish
        return self._first.token

    def close(self) -> None:
        """Stop here: no further round comes, and the memory is free at once."""
        self._closed = True
        self._events.close()

    def texts(self) -> Iterator[str]:
        """The text instead of the rounds, as far as each makes it grow; half a character waits for its rest.

        After `close` nothing more comes. Raises UserError where the prompt was token ids, and where a round was taken
        before, or the texts: what these held would be missing.
        """
        if self.tokenizer is None:
            raise UserError("a stream of texts needs a prompt in text or messages; with token ids, decode the tokens")
        if self._taken:
            raise UserError("rounds or texts were taken from this stream before; ask it for texts() first, and once")
        self._taken = True
        return self._texts(Growing(self.tokenizer.decode))

    def _texts(self, growing: Growing) -> Iterator[str]:
        if not self._closed:
            yield growing.push([self.first])
        for round in self:
            yield growing.push(round.emitted)
        if not self._closed:
            yield growing.finish()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Round:
        self._taken = True
        if not self._closed:
            _ = self.first
        event = next(self._events)
        assert isinstance(event, Round)
        self.finish_reason = event.finish
        return event


def stream(
    target: HFTarget,
    drafter: HostDrafter | None,
    prompt_ids: Prompt,
    max_new_tokens: int = 256,
    loop_gate: float | AutoName = 1.0,
    gate_sum: GateSum = "last",
    max_stages: int = 12,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    verify: Verify = "auto",
    stop_token_ids: Sequence[int] | Literal["model"] = "model",
    tree_budget: Budget = "host",
    stage_tree_budget: Budget = "host",
    topk_k: int = 10,
    tree_width: int = 12,
    tree_beta: float = -0.2,
    draft_depth: int | None = None,
    mtp_k: int | None = None,
    exact: bool | Literal["auto"] = "auto",
    stop_rule: str | None = None,
    gate_head: str | Path | None = None,
) -> Stream:
    """Decode and yield the rounds as they happen; arguments as in `generate`. Arguments are checked at the call."""
    settings = Settings(**{k: v for k, v in locals().items() if k not in ("target", "drafter", "prompt_ids")})
    return start(target, drafter, prompt_ids, settings)


def generate(
    target: HFTarget,
    drafter: HostDrafter | None,
    prompt_ids: Prompt,
    max_new_tokens: int = 256,
    loop_gate: float | AutoName = 1.0,
    gate_sum: GateSum = "last",
    max_stages: int = 12,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    verify: Verify = "auto",
    stop_token_ids: Sequence[int] | Literal["model"] = "model",
    tree_budget: Budget = "host",
    stage_tree_budget: Budget = "host",
    topk_k: int = 10,
    tree_width: int = 12,
    tree_beta: float = -0.2,
    draft_depth: int | None = None,
    mtp_k: int | None = None,
    exact: bool | Literal["auto"] = "auto",
    stop_rule: str | None = None,
    gate_head: str | Path | None = None,
) -> Generation:
    """Decode one prompt; the text is the one the target alone gives with the same arguments.

    Args:
        target, drafter: from `load_target` and `load_drafter`; drafter None is plain decoding.
        prompt_ids: token ids, not empty; or a text, taken as it is; or a conversation, which goes through the chat
            template: [{"role": "user", "content": "Hello"}]. The last two need the tokenizer beside the target's
            weights. With max_new_tokens the prompt must fit the target's context.
        loop_gate: another stage is drafted while the stage's summed top-1 log-probability is at least this.
            1.0 never opens (the host as released); -inf is always open. "auto" needs no number: it weighs what a
            further stage should bring against its time, learns both while decoding, and keeps what it learned with the
            drafter, for all texts that follow; "auto:full" is another estimator of the same.
        gate_sum: (of thresholds) "last" judges the stage just drafted, "all" the whole chain.
        max_stages: most drafting stages before a verification.
        temperature, top_k, top_p, seed: 0 is greedy; without a seed a fresh one is drawn and recorded.
        verify: with a temperature, "match" (the text of plain sampling with the same seed, token for token), "reject"
            (speculative sampling: the law of the text) or "auto" (reject; match where a stage's rows do not see one
            another's tokens, as in DFlash).
        stop_token_ids: "model" takes the target's own.
        tree_budget, stage_tree_budget, topk_k, tree_width, tree_beta, draft_depth, mtp_k: for the families that have
            them; a value the family cannot honour is refused. Budgets "host" are the family's published ones, and 0 on
            a target that cannot verify branches (Qwen3.5). topk_k and tree_width are at most 1024.
        exact: bit-identical decoding; "auto" takes it where it is offered.
        stop_rule: an adaptive-length baseline, NAME or NAME:param=value,...; a stage that it cuts is the round's last.
        gate_head: the folder of a trained head, for the rules that read one.

    Raises UserError naming the value, the reason and the way out.
    """
    settings = Settings(**{k: v for k, v in locals().items() if k not in ("target", "drafter", "prompt_ids")})
    return collect(start(target, drafter, prompt_ids, settings))


def generate_autoregressive(
    target: HFTarget,
    prompt_ids: Prompt,
    max_new_tokens: int = 256,
    loop_gate: float | AutoName = 1.0,
    gate_sum: GateSum = "last",
    max_stages: int = 12,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | None = None,
    verify: Verify = "auto",
    stop_token_ids: Sequence[int] | Literal["model"] = "model",
    tree_budget: Budget = "host",
    stage_tree_budget: Budget = "host",
    topk_k: int = 10,
    tree_width: int = 12,
    tree_beta: float = -0.2,
    draft_depth: int | None = None,
    mtp_k: int | None = None,
    exact: bool | Literal["auto"] = "auto",
    stop_rule: str | None = None,
    gate_head: str | Path | None = None,
) -> Generation:
    """The plain baseline: one target forward a token. Same arguments as `generate`, so that one set drives both;
    those that only concern drafting are checked and change nothing.
    """
    settings = Settings(**{k: v for k, v in locals().items() if k not in ("target", "prompt_ids")})
    return collect(start(target, None, prompt_ids, settings))


def start(
    target: HFTarget,
    drafter: HostDrafter | None,
    prompt_ids: Prompt,
    settings: Settings,
    judge: Judge | None = None,
) -> Stream:
    """Check everything, open fresh memory, and begin; the prompt is read when the first event is asked for.

    `judge` replaces the one the settings ask for.
    """
    check_request(target, drafter, settings)
    drafter = shaped(drafter, settings, target)
    tokenizer = target.tokenizer if is_text(prompt_ids) else None
    ids = encode_prompt(prompt_ids, tokenizer, target.name) if is_text(prompt_ids) else prompt_ids
    prompt = check_prompt(cast(Sequence[int] | Tensor, ids), target, settings.max_new_tokens)
    sampling = sampling_of(settings)
    limits = limits_of(settings, target, drafter)
    session = Session(target=target.open(drafter.taps if drafter else ()), drafter=drafter.open() if drafter else None)
    judge = judge or judge_of(settings, sampling, drafter, target.sampler)
    task = decode(session, 0, prompt, gate=gate_of(settings, target, drafter), judge=judge, limits=limits)
    if (rule := maker_of(settings.stop_rule, settings.gate_head, drafter)) is not None:
        task = under(task, rule())
    return Stream(run_one(task, session), None if sampling.is_greedy else sampling.seed, target.is_exact, tokenizer)


def collect(stream: Stream) -> Generation:
    """Run a stream to its end."""
    return finished(stream, list(stream))


def finished(stream: Stream, rounds: list[Round]) -> Generation:
    """What a stream that ended after these rounds came to."""
    assert stream.finish_reason is not None
    tokens = [stream.first, *(token for r in rounds for token in r.emitted)]
    return Generation(
        tokens=tokens,
        first=stream.first,
        rounds=rounds,
        finish_reason=stream.finish_reason,
        seed=stream.seed,
        exact=stream.exact,
        text=stream.tokenizer.decode(tokens) if stream.tokenizer else None,
    )
