"""Many prompts at once: the sequences that are alive share every forward, and each text is the one it gets alone.

Every sequence has its own seed, derived from the run's and its index (`dloop.sampling.sample_seed`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor

from dloop.api import check_request
from dloop.drafters.host import HostDrafter
from dloop.errors import UserError
from dloop.gates.choose import gate_of
from dloop.loop import Session, Task, decode, run_queue
from dloop.rules.choose import maker_of
from dloop.sampling import sample_seed
from dloop.settings import Settings, check_prompt, judge_of, limits_of, sampling_of, shaped
from dloop.stop import under
from dloop.targets.hf import HFTarget
from dloop.types import FinishReason, First, Round, Sampling

Prompts = Iterable[Sequence[int] | Tensor]
Numbered = Iterable[tuple[int, Sequence[int] | Tensor]]


@dataclass
class Completion:
    """One finished text of many."""

    index: int  # of its prompt
    seed: int  # its own, whether or not anything was drawn
    tokens: list[int] = field(default_factory=list[int])  # new tokens only
    rounds: list[Round] = field(default_factory=list[Round])  # empty where plain decoding stayed on the device
    finish_reason: FinishReason | None = None

    def take(self, event: First | Round) -> None:
        """Add what a decoding event brought."""
        self.tokens += [event.token] if isinstance(event, First) else event.emitted
        self.finish_reason = event.finish
        if isinstance(event, Round):
            self.rounds.append(event)


def generate_many(
    target: HFTarget, drafter: HostDrafter | None, prompts: Prompts, settings: Settings, live: int = 32
) -> Iterator[Completion]:
    """Decode all prompts, at most `live` at a time; yields each text when it ends.

    Packed where the engine packs: the fast path verifies and drafts for all live sequences in one forward each.
    Without a drafter, on a GPU, tokens are chosen on the device and no rounds are recorded. `settings` as the
    arguments of `generate`. Raises UserError like `generate`, before the first forward where the run is to blame.
    """
    return generate_numbered(target, drafter, enumerate(prompts), settings, live)


def generate_numbered(
    target: HFTarget, drafter: HostDrafter | None, numbered: Numbered, settings: Settings, live: int = 32
) -> Iterator[Completion]:
    """The same for prompts that bring their own numbers, no two alike, as when some of many are done already."""
    if live < 1:
        raise UserError(f"live={live} must be at least 1")
    check_request(target, drafter, settings)
    drafter = shaped(drafter, settings, target)
    rule = maker_of(settings.stop_rule, settings.gate_head, drafter)
    sampling = sampling_of(settings)
    if drafter is None and target.engine == "fast" and target.is_exact:
        yield from on_device(target, numbered, settings, sampling, live)
        return
    session = Session(target=target.open(drafter.taps if drafter else ()), drafter=drafter.open() if drafter else None)
    texts: dict[int, Completion] = {}  # by the order of their start

    def begin(start: int, prompt: tuple[int, Sequence[int] | Tensor], slot: int) -> Task:
        own = replace(sampling, seed=sample_seed(sampling.seed, prompt[0]))
        texts[start] = Completion(index=prompt[0], seed=own.seed)
        limits, judge = limits_of(settings, target, drafter), judge_of(settings, own, drafter, target.sampler)
        tokens = check_prompt(prompt[1], target, settings.max_new_tokens)
        task = decode(session, slot, tokens, gate=gate_of(settings, target, drafter), judge=judge, limits=limits)
        return task if rule is None else under(task, rule())

    starts: Iterator[Callable[[int], Task]] = (partial(begin, start, prompt) for start, prompt in enumerate(numbered))
    for start, event in run_queue(starts, session, live):
        texts[start].take(event)
        if texts[start].finish_reason is not None:
            yield texts.pop(start)


def on_device(
    target: HFTarget,
    prompts: Numbered,
    settings: Settings,
    sampling: Sampling,
    live: int,
) -> Iterator[Completion]:
    """Plain decoding whose tokens never wait for the host."""
    from dloop.fast.decode import Decoder, Prompt
    from dloop.fast.target import FastTarget

    assert isinstance(target, FastTarget)

    def own(index: int, prompt: Sequence[int] | Tensor) -> Prompt:
        tokens = check_prompt(prompt, target, settings.max_new_tokens)
        return Prompt(index, tokens, replace(sampling, seed=sample_seed(sampling.seed, index)))

    decoder = Decoder(target, live, limits_of(settings, target, None), sampling)
    for text in decoder.run(own(index, prompt) for index, prompt in prompts):
        yield Completion(index=text.index, seed=text.seed, tokens=text.tokens, finish_reason=text.finish)
