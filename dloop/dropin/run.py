"""One call of `generate`, decoded with a drafter: all sequences together, in transformers' own form of a result."""

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from dloop.drafters.host import HostDrafter
from dloop.dropin.call import Call, of_row
from dloop.dropin.walk import Keyed, Pick, Walk, Walked, drawn, most_likely
from dloop.gate import Gate
from dloop.gates.choose import gate_of
from dloop.loop import Session, Task, decode, run_many
from dloop.sampling import sample_seed
from dloop.settings import Settings, limits_of
from dloop.targets.hf import HFTarget
from dloop.types import FinishReason, Round


@dataclass(frozen=True, kw_only=True)
class Report:
    """How one call of `generate` was decoded. The lists hold an entry a sequence; plain decoding leaves them empty."""

    mode: Literal["dloop", "plain"]
    reason: str | None = None  # why plain
    rounds: list[list[Round]] = field(default_factory=list[list[Round]])
    finish_reasons: list[FinishReason | None] = field(default_factory=list["FinishReason | None"])
    num_new_tokens: list[int] = field(default_factory=list[int])  # padding not counted

    @property
    def acceptance_length(self) -> float:
        """Mean over all rounds of accepted + 1; nan without a round."""
        rounds = [round for own in self.rounds for round in own]
        return sum(round.accepted + 1 for round in rounds) / len(rounds) if rounds else float("nan")


@dataclass(frozen=True)
class Pair:
    """Who decodes, and how drafts are made."""

    target: HFTarget
    drafter: HostDrafter
    settings: Settings


def run(pair: Pair, call: Call) -> tuple[GenerateDecoderOnlyOutput | Tensor, Report]:
    """Decode a call that has no reason against it."""
    walks = [walk_of(call, row, pick) for row, pick in enumerate(picks_of(call))]
    session = Session(target=pair.target.open(pair.drafter.taps), drafter=pair.drafter.open())
    tasks = [task_of(pair, call, session, row, walk) for row, walk in enumerate(walks)]
    rounds: list[list[Round]] = [[] for _ in walks]
    for row, event in run_many(tasks, session):
        if isinstance(event, Round):
            rounds[row].append(event)
    if call.streamer is not None:
        call.streamer.end()
    report = Report(
        mode="dloop",
        rounds=rounds,
        finish_reasons=[walk.finish for walk in walks],
        num_new_tokens=[walk.length - walk.prompt_length for walk in walks],
    )
    return result_of(call, walks), report


def picks_of(call: Call) -> list[Pick]:
    """How each sequence's tokens are chosen.

    One alone draws as transformers does, from PyTorch's generator; of several, which transformers draws in step, each
    has a seed of its own, derived from that generator.
    """
    count = len(call.ids)
    if not call.config.do_sample:
        return [most_likely] * count
    if count == 1:
        return [drawn]
    seed = int(torch.randint(2**62, ()))
    return [Keyed(sample_seed(seed, row)) for row in range(count)]


def walk_of(call: Call, row: int, pick: Pick) -> Walk:
    """The judge of one sequence, with room for its text."""
    length = call.ids.shape[1]
    ids = call.ids.new_zeros(1, call.max_length)
    ids[0, :length] = call.ids[row]
    return Walk(
        ids=ids,
        length=length,
        pick=pick,
        processors=of_row(call, row),
        criteria=call.other_criteria,
        stop_ids=call.stop_ids,
        streamer=call.streamer,
        scores=[] if call.asks_for("output_scores") else None,
        logits=[] if call.asks_for("output_logits") else None,
    )


def task_of(pair: Pair, call: Call, session: Session, row: int, walk: Walk) -> Task:
    """One sequence, decoded in the slot of its number."""
    bounds = limits_of(pair.settings, pair.target, pair.drafter)
    limits = Walked(
        walk=walk,
        max_new_tokens=call.max_length - walk.length,
        stop_ids=call.stop_ids,
        max_stages=bounds.max_stages,
        context=bounds.context,
    )
    prompt: list[int] = call.ids[row][call.real[row].bool()].tolist()
    return decode(session, row, prompt, gate=gate_for(pair, call), judge=walk, limits=limits)


def gate_for(pair: Pair, call: Call) -> Gate:
    """A gate for one sequence. What bends logits beyond temperature, top-k and top-p teaches gates nothing."""
    temperature = float(call.config.temperature or 1.0) if call.config.do_sample else 0.0
    usual = {"TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper"}
    teaches = all(type(processor).__name__ in usual for processor in call.processors)
    return gate_of(replace(pair.settings, temperature=temperature), pair.target, pair.drafter, teaches=teaches)


def result_of(call: Call, walks: list[Walk]) -> GenerateDecoderOnlyOutput | Tensor:
    """What transformers' own loop returns, but for the cache."""
    sequences = padded(call, walks)
    if not call.config.return_dict_in_generate:
        return sequences
    walk = walks[0]
    return GenerateDecoderOnlyOutput(
        sequences=sequences,  # pyright: ignore[reportArgumentType]
        scores=None if walk.scores is None else tuple(walk.scores),  # pyright: ignore[reportArgumentType]
        logits=None if walk.logits is None else tuple(walk.logits),  # pyright: ignore[reportArgumentType]
    )


def padded(call: Call, walks: list[Walk]) -> Int[Tensor, "B T"]:
    """All texts; those that ended early are padded on the right."""
    width = max(walk.length for walk in walks)
    padding = vars(call.config).get("_pad_token_tensor")
    sequences = call.ids.new_full((len(walks), width), 0 if padding is None else int(padding))
    for row, walk in enumerate(walks):
        sequences[row, : walk.length] = walk.ids[0, : walk.length]
    return sequences
